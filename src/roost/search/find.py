"""The search: the most promising branch first, so that the first placement it completes is the best one.

Branches wait in a queue by a lower bound of what placements are ranked by. The bound of a branch is first that of the
one it grew from and of the work that its devices share. When its turn comes, its slowest cycle is looked for, and
when it comes again, the room that its other roles need.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from fractions import Fraction
from itertools import combinations, count
from typing import NamedTuple

from roost.search.graph import Cycle
from roost.search.packing import packs
from roost.search.problem import Family, Problem, ancestors, free_devices
from roost.search.tree import Branch, Tree


class Found(NamedTuple):
    """A placement without ranks, and its step time."""

    family: Family
    step_time: Fraction
    """Nanoseconds."""


def find_best(problem: Problem, top: int = 1, fits: Callable[[Found], bool] | None = None) -> list[Found]:
    """Return the best placement, and after it the best ones in which other roles share devices, up to `top`.

    Those that do not fit are left out.
    """
    found: dict[tuple[int, ...], Found] = {}
    for one in in_order(problem):
        if fits is not None and not fits(one):
            continue
        found.setdefault(sharing(one.family, len(problem.roles)), one)
        if len(found) == top:
            break
    return list(found.values())


def in_order(problem: Problem, below: Fraction | None = None) -> Iterator[Found]:
    """Yield all legal placements, the best first; with `below`, only those that take less time.

    Ties go to fewer devices in use, then to fewer shared ones, then to smaller counts of the roles in their order, then
    to earlier kinds, then to the placement in which earlier roles share devices.
    """
    tree = Tree(problem)
    roles = len(problem.roles)
    smallest = [min(count for counts in role.counts for count in counts) for role in problem.roles]
    devices = sum(problem.nodes)
    number = count()
    queue: list[tuple[int, int, int, list[int], tuple[tuple[int, ...], ...], int, _Stage, Branch]] = []

    def push(branch: Branch, ratio: int, stage: _Stage) -> None:
        counts = list(smallest)
        for group in branch.family:
            for role in group.roles:
                counts[role] = group.devices
        used = max(branch.used, -(-branch.work // ratio) if ratio else 0)
        shared = shared_devices(branch.family, branch.free)
        last = (kinds_of(branch.family), sharing(branch.family, roles)) if stage is _Stage.COMPLETE else ()
        heapq.heappush(queue, (ratio, used, shared, counts, last, next(number), stage, branch))

    push(tree.root(), 0, _Stage.NEW)
    while queue:
        ratio, _, _, _, _, _, stage, branch = heapq.heappop(queue)
        if below is not None and Fraction(ratio, tree.graph.scale) >= below:
            return
        if stage is _Stage.NEW:
            slowest = tree.slowest_cycle(branch, Cycle(ratio)).ratio
            push(branch, slowest, _Stage.HAS_CYCLE if branch.left else _Stage.COMPLETE)
        elif stage is _Stage.HAS_CYCLE:
            room = tree.least_room(branch, ratio)
            if room is not None:
                push(branch, room, _Stage.HAS_ROOM)
        elif stage is _Stage.HAS_ROOM:
            for child in (one for one in tree.children(branch) if not tree.overflows(one)):
                push(child, max(ratio, -(-child.work // devices)), _Stage.NEW)
        elif packs(problem, branch.family):
            yield Found(branch.family, Fraction(ratio, tree.graph.scale))


class _Stage(Enum):
    """The parts of the bound of a branch in the queue."""

    NEW = auto()
    HAS_CYCLE = auto()
    HAS_ROOM = auto()
    COMPLETE = auto()


def shared_devices(family: Family, free: Sequence[int] | None = None) -> int:
    """Return how many devices have more than one role; `free` are those of each group that no other group has."""
    free = free_devices(family) if free is None else free
    return sum(
        room for group, room in zip(family, free, strict=True) if group.parent is not None or len(group.roles) > 1
    )


def kinds_of(family: Family) -> tuple[int, ...]:
    """Return the kind of each role's devices."""
    kinds = {role: group.kind for group in family for role in group.roles}
    return tuple(kinds[role] for role in sorted(kinds))


def sharing(family: Family, roles: int) -> tuple[int, ...]:
    """Return for each pair of roles, in the order of the file, 0 if they share devices and 1 if they do not."""
    place = {role: index for index, group in enumerate(family) for role in group.roles}
    above = [set(ancestors(family, index)) for index in range(len(family))]
    return tuple(
        int(place[one] not in above[place[other]] and place[other] not in above[place[one]])
        for one, other in combinations(range(roles), 2)
    )
