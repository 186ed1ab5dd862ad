"""The measurements that decide: a tenth off, they would make another placement the best one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from roost.search.find import Found, in_order
from roost.search.graph import StepGraph
from roost.search.problem import Call, Problem

MOST_ROLES = 5
"""With more roles than these, a search takes too long to be repeated for every measurement."""
_OFF = Fraction(1, 10)


class Doubt(NamedTuple):
    """A measurement that decides: a call on a number of devices of a kind, and the factor that changes the winner."""

    call: str
    kind: int
    devices: int
    factor: Fraction


def deciding(problem: Problem, best: Found) -> Iterator[Doubt]:
    """Yield the measurements that change the winner if they are off by a tenth, up or down."""
    shares = {problem.roles[role].name: (group.kind, group.devices) for group in best.family for role in group.roles}
    for call in problem.calls:
        for kind, count in ((kind, count) for kind, times in enumerate(call.times) for count in times):
            is_used = shares.get(call.role, (0, 0)) == (kind, count)
            # A time that the winner does not use matters only if it is quicker, to placements that use it.
            for factor in (1 + _OFF, 1 - _OFF) if is_used else (1 - _OFF,):
                changed = _scaled(problem, call, kind, count, factor)
                if is_used:
                    graph = StepGraph(changed)
                    limit = Fraction(graph.slowest_cycle(best.family).ratio, graph.scale)
                else:
                    changed = _with_count(changed, call.role, kind, count)
                    limit = best.step_time
                if next(in_order(changed, below=limit), None) is not None:
                    yield Doubt(call.name, kind, count, factor)


def _scaled(problem: Problem, call: Call, kind: int, count: int, factor: Fraction) -> Problem:
    own = {**call.times[kind], count: round(call.times[kind][count] * factor)}
    times = (*call.times[:kind], own, *call.times[kind + 1 :])
    calls = tuple(replace(one, times=times) if one is call else one for one in problem.calls)
    return replace(problem, calls=calls)


def _with_count(problem: Problem, role: str, kind: int, count: int) -> Problem:
    """Return the same problem with a role that has exactly so many devices of a kind."""
    counts = tuple((count,) if at == kind else () for at in range(len(problem.devices)))
    return replace(
        problem, roles=tuple(replace(one, counts=counts) if one.name == role else one for one in problem.roles)
    )
