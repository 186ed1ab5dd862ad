"""The public names of `roost.testing`, each listed once, for `lazy_loader` and for type checkers."""

from .alone import as_worker as as_worker
from .local import LocalCluster as LocalCluster
from .local import LocalNode as LocalNode
from .local import local_cluster as local_cluster
from .numpy_engine import NumpyEngine as NumpyEngine
from .numpy_engine import TinyPolicy as TinyPolicy
from .weights import FakeMover as FakeMover
from .weights import carry_out as carry_out
