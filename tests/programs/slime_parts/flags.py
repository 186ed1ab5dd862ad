"""The flags of Megatron and SGLang that slime asks for, and no more of them."""

import argparse

GPU_MEMORY_TYPE_CUDA_GRAPH, GPU_MEMORY_TYPE_KV_CACHE, GPU_MEMORY_TYPE_WEIGHTS = "cuda_graph", "kv_cache", "weights"
_OF_MEGATRON = {
    **dict.fromkeys(("load", "save", "hf-checkpoint", "tokenizer-model", "tokenizer-type", "vocab-size"), None),
    **dict.fromkeys(("seq-length", "max-position-embeddings", "padded-vocab-size"), None),
    **dict.fromkeys(("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"), None),
    **dict.fromkeys(("fp16", "no-save-optim", "no-load-optim", "no-load-rng", "finetune"), False),
    **dict.fromkeys(("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size"), 1),
    **dict.fromkeys(("ckpt-step", "save-interval", "global-batch-size", "mtp-num-layers"), None),
    **dict.fromkeys(("micro-batch-size", "num-layers", "hidden-size", "seed"), 1),
    "lr": 0.1,
}


class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        for name in ("dp-size", "pp-size", "ep-size", "moe-dp-size"):
            parser.add_argument(f"--{name}", type=int, default=1)


class RouterArgs:
    @staticmethod
    def add_cli_args(parser, use_router_prefix, exclude_host_port):
        pass


def parse_args(extra_args_provider, ignore_unknown_args):
    assert ignore_unknown_args
    parser = argparse.ArgumentParser(allow_abbrev=False, conflict_handler="resolve")
    for name, default in _OF_MEGATRON.items():
        kind = {int: int, float: float}.get(type(default), int if name.endswith(("-interval", "-batch-size")) else str)
        parser.add_argument(f"--{name}", default=default, type=kind)
    return extra_args_provider(parser).parse_known_args()[0]


def validate_args(args):
    return args


def _vocab_size_with_padding(size, _args):
    return size
