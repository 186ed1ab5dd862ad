"""The two shapes of a role: training, which splits a model over all its ranks, and engines, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from roost.config.readers.framework import Default, Gpus, Role, Settings

Split = tuple[tuple[str, int], ...]
"""How a model is split: `(("TP", 4), ("PP", 2))`, in the order of the ranks."""
TORCHRUN: dict[str, Default] = {
    "nnodes": 1,
    "nproc_per_node": None,
    "nproc-per-node": "=nproc_per_node",
    "num_processes": "=nproc-per-node",
    "num_gpus": "=num_processes",
}
"""The options of torchrun, deepspeed and accelerate, which are among the settings of a job whose program they start."""


def sizes(**given: int) -> Split:
    """Return the sizes of a split that are not 1."""
    return tuple((name, size) for name, size in given.items() if size > 1)


def product(split: Sequence[tuple[str, int]]) -> tuple[int, str]:
    """Return the product of a split and how to write it: `(8, "TP 4 x PP 2")`."""
    total = 1
    for _, size in split:
        total *= size
    return total, " x ".join(f"{name} {size}" for name, size in split) or "1"


def in_chunks(ranks: Sequence[int], size: int) -> list[list[int]]:
    """Return the GPUs in whole groups of a size; what is left over is in none."""
    size = max(1, size)
    return [list(ranks[at : at + size]) for at in range(0, len(ranks) - size + 1, size)]


def trained(
    settings: Settings,
    name: str,
    ranks: Sequence[int],
    split: Split,
    *keys: str,
    experts: int = 1,
    by_count: bool = True,
) -> Role:
    """Lay out a model that is trained: one process for each GPU, and pipeline stages outermost.

    `keys` are those that decide the number of GPUs and the split, for the finding that they do not fit.
    """
    needed, text = product(split)
    fits = settings.divides(len(ranks), needed, f"the number of GPUs of {name}", text, *keys)
    within = tuple(axis for axis in split if axis[0] != "PP")
    across = tuple(axis for axis in split if axis[0] == "PP")
    ways = sizes(DP=len(ranks) // needed if fits and needed else 1)
    processes = tuple((rank,) for rank in ranks)
    parallel = (*within, *ways, *across, *sizes(EP=experts))
    return Role(name=name, processes=processes, parallel=parallel, together=product(within)[0], by_count=by_count)


def engines(
    settings: Settings,
    name: str,
    ranks: Sequence[int],
    split: Split,
    *keys: str,
    gpus: Gpus | None = None,
    size: int | None = None,
    by_count: bool = True,
) -> Role | None:
    """Lay out engines over GPUs, one after the other; None if there is no whole one.

    Each GPU has a process; with `gpus`, each node of an engine has one instead. `size` is the number of GPUs of an
    engine, if that is not the product of its split.
    """
    whole, text = product(split)
    size = whole if size is None else size
    if size < 1:
        return None
    settings.divides(len(ranks), size, f"the number of GPUs of {name}", text if size == whole else str(size), *keys)
    found = in_chunks(ranks, size)
    if not found:
        return None
    processes: list[tuple[int, ...]] = [(rank,) for engine in found for rank in engine]
    together = size
    if gpus is not None:
        own = [[tuple(part) for _, part in groupby(engine, gpus.node_of)] for engine in found]
        processes, together = [part for engine in own for part in engine], len(own[0])
        if len(set(map(len, own))) > 1:
            # Engines that lie differently over nodes are no blocks of equal size.
            together = 1
    return Role(
        name=name,
        processes=tuple(processes),
        parallel=(*split, ("engines", len(found))),
        together=together,
        by_count=by_count,
    )


def torchrun_size(settings: Settings) -> tuple[int, int]:
    """Return the nodes that a program is started on, and the processes on each."""
    count = settings.number("num_gpus")
    return settings.whole("nnodes") or 1, count or (1 if any(map(settings.find, TORCHRUN)) else 8)


def torchrun_ranks(settings: Settings, gpus: Gpus, name: str) -> list[int]:
    """Return the GPUs of such a program: the first ones of each node."""
    nodes, count = torchrun_size(settings)
    groups = gpus.nodes(nodes, count, name, settings.where(*reversed(TORCHRUN)))
    return [rank for group in groups for rank in group]
