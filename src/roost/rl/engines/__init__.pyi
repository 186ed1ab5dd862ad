"""The public names of `roost.rl.engines`, each listed once, for `lazy_loader` and for type checkers."""

from .samples import Prompt as Prompt
from .samples import Sample as Sample
from .samples import VersionSpan as VersionSpan
from .sglang_engine import SglangEngine as SglangEngine
from .transformers_engine import TransformersEngine as TransformersEngine
from .vllm_engine import VllmEngine as VllmEngine
