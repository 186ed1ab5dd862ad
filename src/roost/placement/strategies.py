"""The strategies that place the workers of a component.

>>> from roost import Topology
>>> strided = PackedPlacementStrategy(0, 3, num_hardware_per_process=2, stride=2)
>>> [p.local_hardware_ranks for p in strided.get_placement(Topology.from_shorthand("1x4"))]
[(0, 2), (1, 3)]
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from roost.config.hardware import ACCELERATOR, BARE_NODE
from roost.config.ranks import MAX_PROCESSES, format_ranks
from roost.config.topology import HasTopology, RankSpace, Stretch, Topology, split_labels, topology_of
from roost.errors import PlacementError, Problem
from roost.placement.placement import Listed, Placement
from roost.text import shorten

_MAX_RANK = 10**15

# Argument names that older documents use.
_OLDER_NAMES = {
    "start_accelerator_id": "start_hardware_rank",
    "end_accelerator_id": "end_hardware_rank",
    "num_accelerators_per_process": "num_hardware_per_process",
}


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause garbage collection, which would walk a million new values again and again, none of them garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class PlacementStrategy(ABC):
    """A rule that places the workers of one component on the hardware of a cluster."""

    __slots__ = ()

    @abstractmethod
    def get_placement(self, cluster: HasTopology, isolate_accelerator: bool = True) -> list[Placement]:
        """Return the placements in rank order; `cluster` is a Topology or anything that has one."""


@dataclass(frozen=True, slots=True, init=False)
class PackedPlacementStrategy(PlacementStrategy):
    """Consecutive hardware, one piece or several to a process, contiguous or strided.

    A block of `num_hardware_per_process * stride` ranks holds `stride` processes, interleaved: ranks 0-3,
    two per process, stride 2 gives (0, 2) and (1, 3).
    """

    start_hardware_rank: int
    end_hardware_rank: int
    num_hardware_per_process: int
    stride: int
    node_groups: tuple[str, ...]
    isolate_accelerator: bool
    """Whether accelerators that are not its own may be hidden from a process."""

    def __init__(
        self,
        start_hardware_rank: int | None = None,
        end_hardware_rank: int | None = None,
        num_hardware_per_process: int | None = None,
        stride: int = 1,
        node_group: str | Sequence[str] | None = None,
        isolate_accelerator: bool = True,
        **older: int,
    ) -> None:
        given = {
            "start_hardware_rank": start_hardware_rank,
            "end_hardware_rank": end_hardware_rank,
            "num_hardware_per_process": num_hardware_per_process,
        }
        for name, value in older.items():
            newer = _OLDER_NAMES.get(name)
            if newer is None:
                raise TypeError(f"PackedPlacementStrategy has no argument {name!r}")
            if given[newer] is not None:
                raise PlacementError(f"{newer} is given twice, once as {name}")
            given[newer] = value
        per_process = 1 if given["num_hardware_per_process"] is None else given["num_hardware_per_process"]
        _fill(
            self,
            start_hardware_rank=_whole(given["start_hardware_rank"], "start_hardware_rank", 0),
            end_hardware_rank=_whole(given["end_hardware_rank"], "end_hardware_rank", 0),
            num_hardware_per_process=_whole(per_process, "num_hardware_per_process", 1),
            stride=_whole(stride, "stride", 1),
            node_groups=split_labels(node_group),
            isolate_accelerator=_flag(isolate_accelerator),
        )
        if self.end_hardware_rank < self.start_hardware_rank:
            raise PlacementError(
                f"end_hardware_rank {self.end_hardware_rank} is below start_hardware_rank {self.start_hardware_rank}",
                hint="both ends are included",
            )
        total = self.end_hardware_rank - self.start_hardware_rank + 1
        block = self.num_hardware_per_process * self.stride
        if total % block:
            raise PlacementError(
                f"hardware ranks {self.start_hardware_rank}-{self.end_hardware_rank} are {total}, which "
                f"{self.num_hardware_per_process} per process x stride {self.stride} = {block} does not divide",
                hint=_divisor_hint(total, block),
            )

    def get_placement(self, cluster: HasTopology, isolate_accelerator: bool = True) -> list[Placement]:
        topology = topology_of(cluster)
        space = _hardware_space(topology, self.node_groups, "PackedPlacementStrategy")
        space.check([self.start_hardware_rank, self.end_hardware_rank], "PackedPlacementStrategy")
        return place(topology, space, self._processes(), self.isolate_accelerator and isolate_accelerator)

    def _processes(self) -> Iterator[Sequence[int]]:
        block = self.num_hardware_per_process * self.stride
        for start in range(self.start_hardware_rank, self.end_hardware_rank + 1, block):
            for first in range(start, start + self.stride):
                yield range(first, start + block, self.stride)


@dataclass(frozen=True, slots=True, init=False)
class FlexiblePlacementStrategy(PlacementStrategy):
    """Any hardware for each process, rank by rank.

    Ranks are sorted within each process, and processes by their first rank.
    """

    hardware_ranks_list: tuple[tuple[int, ...], ...]
    node_groups: tuple[str, ...]

    def __init__(
        self,
        hardware_ranks_list: Sequence[Sequence[int]] | None = None,
        node_group_label: str | Sequence[str] | None = None,
        *,
        accelerator_id_lists: Sequence[Sequence[int]] | None = None,
    ) -> None:
        if (hardware_ranks_list is None) == (accelerator_id_lists is None):
            raise PlacementError("FlexiblePlacementStrategy takes hardware_ranks_list exactly once")
        given = hardware_ranks_list if hardware_ranks_list is not None else accelerator_id_lists
        _fill(self, hardware_ranks_list=_sorted_ranks(given), node_groups=split_labels(node_group_label))

    def get_placement(self, cluster: HasTopology, isolate_accelerator: bool = True) -> list[Placement]:
        topology = topology_of(cluster)
        space = _hardware_space(topology, self.node_groups, "FlexiblePlacementStrategy")
        return place(topology, space, self.hardware_ranks_list, isolate_accelerator)


@dataclass(frozen=True, slots=True, init=False)
class NodePlacementStrategy(PlacementStrategy):
    """Processes on nodes, regardless of accelerators: for workers that need only CPUs."""

    node_ranks: tuple[int, ...]
    node_groups: tuple[str, ...]

    def __init__(self, node_ranks: Sequence[int], node_group_label: str | Sequence[str] | None = None) -> None:
        if isinstance(node_ranks, str) or not isinstance(node_ranks, Iterable):
            raise PlacementError("node_ranks is a list of node ranks, one for each process")
        _check_count(node_ranks, "node_ranks")
        ranks = tuple(sorted(_whole(rank, "a node rank", 0) for rank in node_ranks))
        if not ranks:
            raise PlacementError("node_ranks is empty", hint="name one node rank for each process")
        _fill(self, node_ranks=ranks, node_groups=split_labels(node_group_label))

    def get_placement(self, cluster: HasTopology, isolate_accelerator: bool = True) -> list[Placement]:
        topology = topology_of(cluster)
        space = topology.node_space(self.node_groups or None)
        space.check(self.node_ranks, "NodePlacementStrategy")
        return place(topology, space, ((rank,) for rank in self.node_ranks), isolate_accelerator)


@collector_paused()
def place(
    topology: Topology, space: RankSpace, processes: Iterable[Sequence[int]], isolate_accelerator: bool
) -> list[Placement]:
    """Make one placement for each process, given as its ascending hardware ranks; a process never spans nodes."""
    return place_at(topology, *_seats(space, processes), isolate_accelerator)


def place_at(
    topology: Topology,
    stretches: Sequence[Stretch],
    local_ranks_of: Sequence[tuple[int, ...]],
    isolate_accelerator: bool,
) -> list[Placement]:
    """Make one placement for each process, given as a stretch of hardware on its node and its local ranks there."""
    _flag(isolate_accelerator)
    local_world_sizes = Counter(stretch.node_rank for stretch in stretches)
    placement_node_ranks = {node_rank: index for index, node_rank in enumerate(local_world_sizes)}
    next_local = dict.fromkeys(local_world_sizes, 0)
    visible: dict[object, tuple[str, ...]] = {}
    devices_of: dict[int, tuple[str, ...]] = {}
    placements = []
    for rank, (stretch, local_ranks) in enumerate(zip(stretches, local_ranks_of, strict=True)):
        node_rank = stretch.node_rank
        node = topology.nodes[node_rank]
        own = isolate_accelerator and stretch.kind == ACCELERATOR
        devices = devices_of.get(node_rank)
        if devices is None:
            devices = devices_of[node_rank] = Listed(node.devices)
        key = (devices, local_ranks if own else None)
        seen = visible.get(key)
        if seen is None:
            seen = visible[key] = Listed(devices[local] for local in local_ranks) if own else devices
        local_rank = next_local[node_rank]
        next_local[node_rank] = local_rank + 1
        placements.append(
            Placement(
                rank=rank,
                cluster_node_rank=node_rank,
                placement_node_rank=placement_node_ranks[node_rank],
                local_accelerator_rank=(local_ranks[0] if own else 0) if seen else -1,
                accelerator_type=node.accelerator_type,
                local_rank=local_rank,
                local_world_size=local_world_sizes[node_rank],
                visible_accelerators=seen,
                isolate_accelerator=isolate_accelerator,
                local_hardware_ranks=local_ranks,
                node_group_label=stretch.label,
                hardware_type=stretch.kind,
            )
        )
    return placements


def _seats(space: RankSpace, processes: Iterable[Sequence[int]]) -> tuple[list[Stretch], list[tuple[int, ...]]]:
    """Return the stretch of each process, and its local ranks there.

    Values are shared and the last stretch is tried before a search, so that a million processes make no garbage.
    """
    stretches: list[Stretch] = []
    local_ranks_of: list[tuple[int, ...]] = []
    shared: dict[tuple[int, ...], tuple[int, ...]] = {}
    bare = Listed[int]()
    start = end = 0
    stretch: Stretch | None = None
    for process, ranks in enumerate(processes):
        first, last = ranks[0], ranks[-1]
        if stretch is None or not start <= first < end:
            if first < 0 or first >= space.count:
                space.check(ranks)
            stretch, start = space.stretch_of(first)
            end = start + stretch.size
        if last >= end:
            space.check(ranks)
            raise _leaves_node(space, process, ranks)
        local: tuple[int, ...] = bare
        if stretch.kind != BARE_NODE:
            local = (first - start,) if len(ranks) == 1 else tuple([rank - start for rank in ranks])
            local = shared.get(local) or shared.setdefault(local, Listed(local))
        stretches.append(stretch)
        local_ranks_of.append(local)
    return stretches, local_ranks_of


def _leaves_node(space: RankSpace, process: int, ranks: Sequence[int]) -> PlacementError:
    ranks = tuple(ranks)
    places = [space.locate(rank) for rank in ranks]
    kinds = sorted({place.kind for place in places})
    nodes = sorted({place.node_rank for place in places})
    shown = format_ranks(ranks)
    if len(nodes) == 1:
        message = f"process {process} takes {space.unit}s {shown}, which are of different kinds: {', '.join(kinds)}"
        return PlacementError(Problem(message=message, ranks=ranks))
    edge = next(rank for rank, spot in zip(ranks, places, strict=True) if spot.node_rank != places[0].node_rank)
    stretch, start = space.stretch_of(edge)
    message = f"process {process} takes {space.unit}s {shown}, which are on nodes {format_ranks(nodes)}"
    hint = f"a process never leaves its node, and node rank {stretch.node_rank} starts at {space.unit} {start}"
    return PlacementError(Problem(message=message, hint=hint, ranks=ranks))


def _hardware_space(topology: Topology, labels: tuple[str, ...], who: str) -> RankSpace:
    space = topology.space(labels or None)
    if space.is_bare:
        raise PlacementError(
            f"{who} places on hardware, and {space.name} has none", hint="use NodePlacementStrategy for bare nodes"
        )
    return space


@collector_paused()
def _sorted_ranks(lists: Any) -> tuple[tuple[int, ...], ...]:
    if isinstance(lists, str) or not isinstance(lists, Iterable):
        raise PlacementError("hardware_ranks_list is a list of lists of hardware ranks")
    _check_count(lists, "hardware_ranks_list")
    found: list[tuple[int, ...]] = []
    for process, ranks in enumerate(lists):
        if isinstance(ranks, str) or not isinstance(ranks, Iterable):
            raise PlacementError(f"hardware_ranks_list[{process}] is not a list of hardware ranks")
        _check_count(ranks, f"hardware_ranks_list[{process}]")
        own = tuple(ranks)
        for rank in own:
            if type(rank) is not int or rank < 0:
                _whole(rank, f"a hardware rank of process {process}", 0)
        if not own:
            raise PlacementError(f"process {process} has no hardware", hint="name at least one hardware rank")
        if len(own) > 1:
            own = tuple(sorted(own))
            if len(set(own)) != len(own):
                raise PlacementError(f"process {process} names a hardware rank twice: {list(own)}")
        found.append(own)
    if not found:
        raise PlacementError("hardware_ranks_list is empty", hint="name one list of hardware ranks for each process")
    return tuple(sorted(found, key=lambda ranks: ranks[0]))


def _fill(strategy: PlacementStrategy, **fields: object) -> None:
    """Set the checked fields of a frozen strategy."""
    for name, value in fields.items():
        object.__setattr__(strategy, name, value)


def _check_count(items: Iterable[object], what: str) -> None:
    """Refuse a size that no job has, such as a range of 10^12, before iterating over it."""
    if isinstance(items, Sized) and len(items) > MAX_PROCESSES:
        raise PlacementError(f"{what} has {len(items)} entries, and may have {MAX_PROCESSES}")


def _whole(value: object, what: str, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise PlacementError(f"{what} must be a whole number, not {shorten(repr(value))}")
    if abs(value) > _MAX_RANK:
        raise PlacementError(f"{what} is too large")
    if value < minimum:
        raise PlacementError(f"{what} is {value}, and must be at least {minimum}")
    return value


def _flag(isolate_accelerator: object) -> bool:
    if not isinstance(isolate_accelerator, bool):
        raise PlacementError(f"isolate_accelerator is True or False, not {shorten(repr(isolate_accelerator))}")
    return isolate_accelerator


def _divisor_hint(total: int, block: int) -> str:
    fits = total // block * block
    return f"take {fits} or {fits + block} ranks" if fits else f"take at least {block} ranks"
