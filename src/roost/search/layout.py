"""From the groups of a placement to the ranks of its roles: consecutive where possible, lowest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from roost.config.ranks import format_ranks
from roost.search.packing import pack, units_of
from roost.search.problem import Family, Problem

Ranks = dict[str, tuple[int, ...]]


def lay_out(problem: Problem, family: Family) -> Ranks:
    """Return the hardware ranks of each role, in the order of the file."""
    order = _Order(family)
    units = units_of(problem, family)
    starts = _consecutive(problem, family, units, list(order.outer_first()), {})
    own: list[tuple[int, ...]]
    if starts is not None:
        own = [tuple(range(starts[at], starts[at] + group.devices)) for at, group in enumerate(family)]
    else:
        own = _by_node(problem, family, order)
    found = {role: own[at] for at, group in enumerate(family) for role in group.roles}
    return {role.name: found[at] for at, role in enumerate(problem.roles)}


def placement_text(problem: Problem, name: str, ranks: Sequence[int]) -> str:
    """Return a role's placement as a job has it: `0-15:0-3` for four workers with four devices each."""
    size = problem.roles[problem.role_index[name]].devices_per_worker
    if size == 1:
        return format_ranks(ranks)
    segments: list[tuple[int, int]] = []
    for first in range(0, len(ranks), size):
        start = ranks[first]
        if segments and segments[-1][1] + 1 == start:
            segments[-1] = (segments[-1][0], start + size - 1)
        else:
            segments.append((start, start + size - 1))
    if len(ranks) == size:
        return f"{segments[0][0]}-{segments[0][1]}:0"
    workers = accumulate(((last - first + 1) // size for first, last in segments), initial=0)
    return ",".join(
        f"{first}-{last}:{format_ranks(range(at, at + (last - first + 1) // size))}"
        for (first, last), at in zip(segments, workers, strict=False)
    )


class _Order:
    """Groups in the order in which they get devices: those with the first role of the file come first."""

    def __init__(self, family: Family) -> None:
        self.first = [min(group.roles) for group in family]
        for at in range(len(family) - 1, -1, -1):
            parent = family[at].parent
            if parent is not None:
                self.first[parent] = min(self.first[parent], self.first[at])
        self.family = family

    def inside(self, parent: int | None) -> list[int]:
        """Return the groups that are nested in one directly, or in none."""
        return sorted((at for at, g in enumerate(self.family) if g.parent == parent), key=lambda at: self.first[at])

    def outer_first(self, parent: int | None = None) -> Iterator[int]:
        """Yield all groups, each before those that are nested in it."""
        for at in self.inside(parent):
            yield at
            yield from self.outer_first(at)


def _consecutive(
    problem: Problem, family: Family, units: Sequence[int], order: Sequence[int], starts: dict[int, int]
) -> dict[int, int] | None:
    """Return the first rank of each group, each as low as those before it allow; None if they do not fit that way."""
    if len(starts) == len(order):
        return starts
    at = order[len(starts)]
    group = family[at]
    low, high = 0, sum(problem.nodes)
    if group.parent is not None:
        low = starts[group.parent]
        high = low + family[group.parent].devices
    beside = [(starts[one], starts[one] + family[one].devices) for one in starts if family[one].parent == group.parent]
    others = _others(problem, group.kind)
    edges = {low, *(end for _, end in beside), *(end for _, end in others if low <= end < high)}
    nodes = {next((begin for begin in accumulate(problem.nodes) if begin > edge), high) for edge in edges}
    for edge in sorted(edges | nodes):
        start = _next_start(problem.nodes, edge, group.devices, units[at])
        if start + group.devices <= high and all(
            start >= end or start + group.devices <= begin for begin, end in (*beside, *others)
        ):
            found = _consecutive(problem, family, units, order, {**starts, at: start})
            if found is not None:
                return found
    return None


def _others(problem: Problem, kind: int) -> list[tuple[int, int]]:
    """Return the ranks of each node with devices of another kind: the first one, and the one after the last."""
    ends = list(accumulate(problem.nodes))
    nodes = zip(problem.kinds, problem.nodes, ends, strict=True)
    return [(end - size, end) for of, size, end in nodes if of != kind]


def _next_start(nodes: Sequence[int], start: int, count: int, unit: int) -> int:
    """Return the first rank from `start` on where workers of `unit` consecutive devices each stay on one node."""
    ends = list(accumulate(nodes))
    while start + count <= ends[-1]:
        cut = [end for end in ends if start < end < start + count and (end - start) % unit]
        if not cut:
            break
        # Either the first node is left in whole workers, or this set begins on the next one.
        start = start + (cut[0] - start) % unit if cut[0] - start >= unit else cut[0]
    return start


def _by_node(problem: Problem, family: Family, order: _Order) -> list[tuple[int, ...]]:
    """Return the ranks of groups that are not consecutive; on each node they are."""
    packed = pack(problem, family)
    if packed is None:
        raise AssertionError("a placement that was found fits on the nodes")
    own: list[list[int]] = [[] for _ in family]
    begin = 0
    for size, counts in zip(problem.nodes, packed, strict=True):
        offsets: dict[int | None, int] = {None: begin}
        for at in order.outer_first():
            parent = family[at].parent
            start = offsets[parent]
            own[at] += range(start, start + counts[at])
            offsets[parent] = start + counts[at]
            offsets[at] = start
        begin += size
    return [tuple(ranks) for ranks in own]
