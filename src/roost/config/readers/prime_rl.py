"""prime-rl: the GPUs of one node go to inference first and then to the trainer; of several nodes, whole nodes do.

Nobody chooses: the GPUs of one node are named, and the nodes are those that SLURM gives, in its order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from roost.config.readers.framework import Framework, Gpus, Role, Settings, table
from roost.config.readers.roles import engines, sizes, trained

_DEPLOYMENT = "inference.deployment"
_VLLM = "inference.vllm"
_DEFAULTS = table("""
    deployment: type=single_node gpus_per_node=8 num_train_gpus=1 num_infer_gpus=1
    deployment: num_train_nodes=null num_infer_nodes=null num_infer_replicas=1 nodes_per_fsdp_group=null
    inference.deployment: type=single_node num_nodes=2 gpus_per_node==deployment.gpus_per_node
    inference.deployment: prefill_nodes_per_replica=1 decode_nodes_per_replica=1
    inference.deployment: num_prefill_replicas=1 num_decode_replicas=1
    inference.vllm: tensor_parallel_size=1 data_parallel_size=1 enable_expert_parallel=false
    trainer.model, model: cp=1
""")
_OLDER = {
    "deployment.num_eval_gpus": "deployment.num_infer_gpus",
    "deployment.num_eval_nodes": "deployment.num_infer_nodes",
    "inference.parallel.tp": f"{_VLLM}.tensor_parallel_size",
    "inference.parallel.dp": f"{_VLLM}.data_parallel_size",
}


def _has(settings: Settings, section: str) -> bool:
    return any(key == section or key.startswith(f"{section}.") for key in settings.given)


def _kind(settings: Settings) -> str:
    """Return which program a config is for: `rl`, `sft` or `inference`."""
    program = (settings.text("program") or "").rpartition("/")[2]
    if program in ("rl", "sft", "inference"):
        return program
    if _has(settings, "orchestrator") or _has(settings, "trainer"):
        return "rl"
    # The config of a server has its keys at the top, without `inference`.
    return "inference" if _has(settings, "vllm") else "sft"


class _Nodes:
    """How many GPUs or nodes inference and the trainer have."""

    def __init__(self, settings: Settings) -> None:
        kind = _kind(settings)
        prefix = "" if kind == "inference" else "inference."
        self.at, self.vllm = f"{prefix}deployment", f"{prefix}vllm"
        self.kind = kind
        self.per_node = settings.whole("deployment.gpus_per_node")
        self.several = settings.text("deployment.type") == "multi_node"
        self.infers = kind == "inference" or _has(settings, "inference")
        own = settings.text(f"{self.at}.type") if self.infers else "single_node"
        self.parted = own == "disaggregated"
        self.prefill = self.decode = 0
        if self.parted:
            self.prefill, self.decode = (self._part(settings, name) for name in ("prefill", "decode"))
        replica = 1
        if own == "multi_node":
            replica = settings.number(f"{self.at}.num_nodes") or 2
        elif self.parted:
            replica = self.prefill + self.decode
        if kind == "inference":
            self.several = own in ("multi_node", "disaggregated")
        elif settings.has("deployment.num_infer_nodes"):
            replica = settings.whole("deployment.num_infer_nodes")
        self.replicas = settings.whole("deployment.num_infer_replicas") if kind == "rl" else 1
        self.infer_nodes = replica * self.replicas if self.infers and self.several else 0
        train = settings.number("deployment.num_train_nodes")
        self.train_nodes = 0 if kind == "inference" else (2 if train is None and kind == "sft" else train or 0)

    def _part(self, settings: Settings, name: str) -> int:
        nodes = settings.number(f"{self.at}.{name}_nodes_per_replica") or 1
        return nodes * (settings.number(f"{self.at}.num_{name}_replicas") or 1)


def _shape(settings: Settings, key: str) -> int:
    return settings.number(key) or 1


def _size(settings: Settings) -> tuple[int, int]:
    found = _Nodes(settings)
    if found.several:
        return found.infer_nodes + found.train_nodes, found.per_node
    infer, train = _on_one_node(settings, found)
    return 1, max(1, infer + train)


def _on_one_node(settings: Settings, found: _Nodes) -> tuple[int, int]:
    tensor, data = (_shape(settings, f"{found.vllm}.{axis}_parallel_size") for axis in ("tensor", "data"))
    if found.kind == "inference":
        return tensor * data, 0
    return settings.whole("deployment.num_infer_gpus") if found.infers else 0, settings.whole(
        "deployment.num_train_gpus"
    )


def _lay_out(settings: Settings, gpus: Gpus) -> Iterator[Role | None]:
    found = _Nodes(settings)
    counts = ("deployment.num_infer_gpus", "deployment.num_train_gpus", "deployment.gpus_per_node")
    if found.several:
        counts = ("deployment.num_train_nodes", "deployment.num_infer_nodes", f"{found.at}.type")
        groups = gpus.nodes(found.infer_nodes + found.train_nodes, found.per_node, "the job", settings.where(*counts))
        infer = [rank for group in groups[: found.infer_nodes] for rank in group]
        train = [rank for group in groups[found.infer_nodes :] for rank in group]
    else:
        first, rest = _on_one_node(settings, found)
        if first + rest > found.per_node:
            message = f"inference takes {first} GPUs and training {rest}, and a node has {found.per_node}"
            settings.error("too-many-gpus", message, "take fewer, or set deployment.gpus_per_node", *counts)
        ranks = gpus.on_one_node(first + rest, "the job", settings.where(*counts))
        infer, train = ranks[:first], ranks[first:]
    if infer:
        yield from _inference(settings, gpus, found, infer, counts)
    if train:
        key = "trainer.model.cp" if found.kind == "rl" else "model.cp"
        split = sizes(CP=settings.whole(key))
        yield trained(settings, "trainer", train, split, key, *counts, by_count=False)
    group = settings.number("deployment.nodes_per_fsdp_group")
    if found.several and group and found.train_nodes % group:
        message = f"num_train_nodes is {found.train_nodes}, which nodes_per_fsdp_group {group} does not divide"
        settings.error("not-divisible", message, "change one of them", "deployment.nodes_per_fsdp_group", *counts)


def _inference(
    settings: Settings, gpus: Gpus, found: _Nodes, ranks: list[int], counts: tuple[str, ...]
) -> Iterator[Role | None]:
    tensor, data = (f"{found.vllm}.{axis}_parallel_size" for axis in ("tensor", "data"))
    split = sizes(TP=_shape(settings, tensor))
    if found.parted:
        # Each replica has the nodes of prefill before those of decode.
        whole = (found.prefill + found.decode) * found.per_node
        first = found.prefill * found.per_node
        parts = [ranks[at : at + whole] for at in range(0, len(ranks), whole)]
        for name, own in (
            ("prefill", [rank for part in parts for rank in part[:first]]),
            ("decode", [rank for part in parts for rank in part[first:]]),
        ):
            yield engines(settings, f"inference_{name}", own, split, tensor, *counts, gpus=gpus, by_count=False)
        return
    if found.several and settings.flag(f"{found.vllm}.enable_expert_parallel"):
        replica = len(ranks) // max(1, found.replicas)
        given = _shape(settings, data) * _shape(settings, tensor)
        if settings.has(data) and given != replica:
            message = f"experts are split over {given} GPUs (TP x DP), and a replica has {replica}"
            settings.error("not-divisible", message, "TP x DP must be all GPUs of a replica", data, tensor)
    yield engines(settings, "inference", ranks, split, tensor, *counts, gpus=gpus, by_count=False)


PRIME_RL = Framework(
    name="prime-rl",
    version="0.8.0",
    defaults=_DEFAULTS,
    older=_OLDER,
    size=_size,
    lay_out=_lay_out,
    command=re.compile(r"^(rl|sft|inference)$"),
    common=re.compile(r"^(rl|sft|inference)$"),
    marks=("deployment", "orchestrator", "trainer", "inference"),
    in_config=True,
    suffix=".toml",
)
