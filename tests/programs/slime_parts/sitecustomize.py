"""What slime imports and a machine without GPUs does not have: on the path of slime's program and of its workers."""

import importlib
import importlib.machinery
import sys

STAND_INS = {
    "slime.backends.megatron_utils.actor": "numpy_trainer",
    "slime.backends.sglang_utils.sglang_engine": "toy_engine",
    "megatron": "flags",
    "megatron.training": "flags",
    "megatron.training.arguments": "flags",
    "megatron.training.tokenizer": "flags",
    "megatron.training.tokenizer.tokenizer": "flags",
    "sglang": "flags",
    "sglang.srt": "flags",
    "sglang.srt.constants": "flags",
    "sglang.srt.server_args": "flags",
    "sglang_router": "flags",
    "sglang_router.launch_router": "flags",
}


class _StandIns:
    def find_spec(self, name, *_):
        return importlib.machinery.ModuleSpec(name, self) if name in STAND_INS else None

    def create_module(self, _spec):
        return None

    def exec_module(self, module):
        found = importlib.import_module(STAND_INS[module.__name__])
        found.__path__ = []
        sys.modules[module.__name__] = found


sys.meta_path.insert(0, _StandIns())
