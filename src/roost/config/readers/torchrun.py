"""Programs that torchrun, deepspeed or accelerate start: one process for each GPU, ranks by node."""

from __future__ import annotations

from roost.config.readers.framework import Default, Gpus, Role, Settings, each

TORCHRUN: dict[str, Default] = {"nnodes": 1, "nproc_per_node": None, "nproc-per-node": None, "num_processes": None}
"""Their options, which the reader puts among the settings of a job whose program they start."""


def _per_node(settings: Settings) -> int:
    found = [settings.number(key) for key in ("nproc_per_node", "nproc-per-node", "num_processes")]
    return next((count for count in found if count), 8 if not any(map(settings.find, TORCHRUN)) else 1)


def torchrun_size(settings: Settings) -> tuple[int, int]:
    """Return the nodes that it is started on, and the processes on each."""
    return settings.whole("nnodes") or 1, _per_node(settings)


def torchrun_role(settings: Settings, gpus: Gpus, name: str) -> Role:
    """Lay out one process for each GPU; the first GPUs of each node."""
    nodes, count = torchrun_size(settings)
    groups = gpus.nodes(nodes, count, name, settings.where("nproc_per_node", "nproc-per-node", "nnodes"))
    return Role(name=name, processes=each(rank for group in groups for rank in group))
