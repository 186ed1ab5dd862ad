"""Which measurements decide: those that, a tenth off, would make another placement the best one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from roost.search.find import Found, in_order
from roost.search.graph import StepGraph, counts_of
from roost.search.problem import Call, Problem

MOST_ROLES = 5
"""With more roles than these, a search takes too long to be repeated for every measurement."""


class Doubt(NamedTuple):
    """A measurement that decides: a call with a number of devices, and the factor that changes the winner."""

    call: str
    devices: int
    factor: Fraction


def deciding(problem: Problem, best: Found, off: Fraction = Fraction(1, 10)) -> Iterator[Doubt]:
    """Yield the measurements that change the winner if they are off by a part, up or down."""
    counts = dict(zip((role.name for role in problem.roles), counts_of(best.family, len(problem.roles)), strict=True))
    for call in problem.calls:
        for count in call.times:
            is_used = counts.get(call.role, 0) == count
            # A slower call harms only placements that use it, a quicker one helps only these.
            factor = 1 + off if is_used else 1 - off
            changed = _scaled(problem, call, count, factor)
            if is_used:
                graph = StepGraph(changed)
                limit = Fraction(graph.slowest_cycle(best.family).ratio, graph.scale)
            else:
                changed = _with_count(changed, call.role, count)
                limit = best.step_time
            if next(in_order(changed, below=limit), None) is not None:
                yield Doubt(call.name, count, factor)


def _scaled(problem: Problem, call: Call, count: int, factor: Fraction) -> Problem:
    times = {**call.times, count: round(call.times[count] * factor)}
    calls = tuple(replace(one, times=times) if one is call else one for one in problem.calls)
    return replace(problem, calls=calls)


def _with_count(problem: Problem, role: str, count: int) -> Problem:
    """Return the same problem with a role that has exactly so many devices."""
    return replace(
        problem, roles=tuple(replace(one, counts=(count,)) if one.name == role else one for one in problem.roles)
    )
