"""Whether the groups of a placement fit on the nodes: the devices of a worker lie on one node."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

from roost.search.problem import Family, Problem


def units_of(problem: Problem, family: Family) -> list[int]:
    """Return the number that the devices of each group on a node are a multiple of."""
    return [math.lcm(*(problem.roles[role].devices_per_worker for role in group.roles)) for group in family]


def packs(problem: Problem, family: Family) -> bool:
    """Tell whether there are devices for all groups of a family."""
    return any_order_packs(problem.nodes, units_of(problem, family)) or pack(problem, family) is not None


def any_order_packs(nodes: Sequence[int], units: Sequence[int]) -> bool:
    """Tell whether numbers of devices that add up fit in any case.

    They do where units divide one another and all nodes: smaller units always fill up what larger ones leave.
    """
    sizes = sorted(set(units))
    return all(large % small == 0 for small, large in pairwise(sizes)) and all(node % sizes[-1] == 0 for node in nodes)


def pack(problem: Problem, family: Family) -> list[tuple[int, ...]] | None:
    """Return for each node how many devices each group has there; None if the groups do not fit."""
    units = units_of(problem, family)
    children = [[at for at, group in enumerate(family) if group.parent == parent] for parent in range(len(family))]
    roots = [at for at, group in enumerate(family) if group.parent is None]

    def on_node(at: int, room: int, wanted: tuple[int, ...]) -> list[dict[int, int]]:
        """Return the ways to give a group, and those nested in it, some of the devices of a node, most first."""
        found = []
        for own in range(min(room, wanted[at]) // units[at] * units[at], -1, -units[at]):
            for below in side_by_side(children[at], own, wanted):
                found.append({at: own, **below})
        return found

    def side_by_side(groups: Sequence[int], room: int, wanted: tuple[int, ...]) -> list[dict[int, int]]:
        if not groups:
            return [{}]
        return [
            {**first, **rest}
            for first in on_node(groups[0], room, wanted)
            for rest in side_by_side(groups[1:], room - first[groups[0]], wanted)
        ]

    @cache
    def fill(node: int, wanted: tuple[int, ...]) -> tuple[tuple[int, ...], ...] | None:
        if not any(wanted):
            return ((0,) * len(wanted),) * (len(problem.nodes) - node)
        if node == len(problem.nodes):
            return None
        for given in side_by_side(roots, problem.nodes[node], wanted):
            rest = fill(node + 1, tuple(want - given[at] for at, want in enumerate(wanted)))
            if rest is not None:
                return (tuple(given[at] for at in range(len(wanted))), *rest)
        return None

    found = fill(0, tuple(group.count for group in family))
    return None if found is None else list(found)
