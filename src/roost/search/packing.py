"""Whether the groups of a placement fit on the nodes: the devices of a worker lie on one node."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from roost.search.problem import Family, Problem


def units_of(problem: Problem, family: Family) -> list[int]:
    """Return the number that the devices of each group on a node are a multiple of."""
    return [math.lcm(*(problem.roles[role].devices_per_worker for role in group.roles)) for group in family]


def packs(problem: Problem, family: Family) -> bool:
    """Tell whether there are devices for all groups of a family."""
    units = units_of(problem, family)
    for kind in range(len(problem.devices)):
        nodes = [size for size, of in zip(problem.nodes, problem.kinds, strict=True) if of == kind]
        if not any_order_packs(nodes, [unit for unit, group in zip(units, family, strict=True) if group.kind == kind]):
            return pack(problem, family) is not None
    return True


def any_order_packs(nodes: Sequence[int], units: Sequence[int]) -> bool:
    """Tell whether numbers of devices that add up fit in any case.

    They do where units divide one another and all nodes: smaller units always fill up what larger ones leave.
    """
    sizes = sorted({1, *units})
    return all(large % small == 0 for small, large in pairwise(sizes)) and all(node % sizes[-1] == 0 for node in nodes)


def pack(problem: Problem, family: Family) -> list[tuple[int, ...]] | None:
    """Return for each node how many devices each group has there; None if the groups do not fit."""
    units = units_of(problem, family)
    children = [[at for at, group in enumerate(family) if group.parent == parent] for parent in range(len(family))]
    roots = [
        [at for at, group in enumerate(family) if group.parent is None and group.kind == kind] for kind in problem.kinds
    ]

    def on_node(groups: Sequence[int], room: int, wanted: tuple[int, ...]) -> Iterator[dict[int, int]]:
        """Yield the ways to give groups, and those nested in them, devices of a node, most first."""
        if not groups:
            yield {}
            return
        first, unit = groups[0], units[groups[0]]
        for own in range(min(room, wanted[first]) // unit * unit, -1, -unit):
            for below in on_node(children[first], own, wanted):
                for rest in on_node(groups[1:], room - own, wanted):
                    yield {first: own, **below, **rest}

    wanted = tuple(group.devices for group in family)
    given: list[tuple[int, ...]] = []
    tried: set[tuple[int, tuple[int, ...]]] = set()
    ways = [on_node(roots[0], problem.nodes[0], wanted)]
    while ways:
        way = next(ways[-1], None)
        if way is None:
            ways.pop()
            if given:
                back = given.pop()
                wanted = tuple(want + n for want, n in zip(wanted, back, strict=True))
            continue
        here = tuple(way.get(at, 0) for at in range(len(family)))
        left = tuple(want - n for want, n in zip(wanted, here, strict=True))
        if not any(left):
            unused = len(problem.nodes) - len(given) - 1
            return [*given, here, *[(0,) * len(family)] * unused]
        if len(ways) < len(problem.nodes) and (len(ways), left) not in tried:
            tried.add((len(ways), left))
            given.append(here)
            wanted = left
            ways.append(on_node(roots[len(given)], problem.nodes[len(given)], wanted))
    return None
