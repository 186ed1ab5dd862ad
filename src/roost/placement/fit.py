"""Find the nearest layout that fits on the free accelerators, for messages."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby

from roost.config.hardware import ACCELERATOR
from roost.config.ranks import format_ranks
from roost.config.topology import Topology
from roost.placement.placement import Piece, Placement, pieces_of

Components = Mapping[str, Sequence[Placement]]


def nearest_fit(topology: Topology, components: Components, free: Collection[Piece]) -> dict[str, str] | None:
    """Return a `component_placement` of the same components on free accelerators, moved as little as possible, or None.

    Processes that share accelerators still share them, no process spans two nodes, and their order stays.

    >>> from roost import FlexiblePlacementStrategy
    >>> topology = Topology.from_shorthand("1x4")
    >>> actor = FlexiblePlacementStrategy([[0], [1]]).get_placement(topology)
    >>> nearest_fit(topology, {"actor": actor}, {Piece(0, "accelerator", local) for local in (1, 2, 3)})
    {'actor': '1-2:0-1'}
    """
    units = list(_units(components))
    order = sorted(Piece(rank, ACCELERATOR, local) for rank, node in enumerate(topology.nodes)
                   for local in range(len(node.accelerators)))  # fmt: skip
    available = [piece for piece in order if piece in free]
    moved = _assign(units, available, keep=True) or _assign(units, available, keep=False)
    if moved is None:
        return None
    space = topology.space()
    texts: dict[str, str] = {}
    for name, placements in components.items():
        if not all(placement.hardware_type == ACCELERATOR for placement in placements):
            continue
        pieces = [[moved[piece] for piece in pieces_of(placement)] for placement in placements]
        text = write_ranks([[space.rank_of(piece.node_rank, piece.local_rank) for piece in own] for own in pieces])
        if text is None:
            return None
        texts[name] = text
    return texts


def _units(components: Components) -> Iterator[list[Piece]]:
    """Yield the sets of accelerators that must stay together because one process has several of them, in order."""
    together: dict[Piece, set[Piece]] = {}
    for placements in components.values():
        for placement in placements:
            pieces = {piece for piece in pieces_of(placement) if piece.kind == ACCELERATOR}
            joined = pieces.union(*(together.get(piece, set()) for piece in pieces))
            together.update(dict.fromkeys(joined, joined))
    for piece in sorted(together):
        if piece == min(together[piece]):
            yield sorted(together[piece])


def _assign(units: Sequence[Sequence[Piece]], available: Sequence[Piece], *, keep: bool) -> dict[Piece, Piece] | None:
    """Find a free place for each unit, in order: with `keep` its own if that is free, else the next one."""
    moved: dict[Piece, Piece] = {}
    start = 0
    for unit in units:
        found: Sequence[Piece] | None = unit
        if not keep or not all(piece in available[start:] for piece in unit):
            nodes = (list(run) for _, run in groupby(available[start:], key=lambda piece: piece.node_rank))
            found = next((on_node[: len(unit)] for on_node in nodes if len(on_node) >= len(unit)), None)
        if found is None:
            return None
        moved.update(zip(unit, found, strict=True))
        start = available.index(found[-1]) + 1
    return moved


def write_ranks(ranks: Sequence[Sequence[int]]) -> str | None:
    """Write each process's hardware ranks as a placement; None if the syntax cannot express it."""
    segments: list[tuple[list[int], list[int]]] = []
    for process, own in enumerate(ranks):
        if list(own) != list(range(own[0], own[0] + len(own))):
            return None
        last = segments[-1] if segments else None
        if last and own[0] == last[0][-1] + 1 and len(own) * len(last[1]) == len(last[0]):
            last[0].extend(own)
            last[1].append(process)
        elif last and len(own) == 1 and own[0] == last[0][-1] and len(last[0]) == 1:
            last[1].append(process)
        elif last and own[0] <= last[0][-1]:
            return None
        else:
            segments.append((list(own), [process]))
    return ",".join(f"{format_ranks(resources)}:{format_ranks(processes)}" for resources, processes in segments)
