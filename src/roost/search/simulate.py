"""A simulation of many steps with times drawn from what was measured: what long tails do to a placement.

Draws depend on the seed, the call and the step alone, so that two placements are compared on the same luck. A call
takes one draw for all its workers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from statistics import NormalDist, fmean, quantiles
from typing import NamedTuple

from roost.config.profile import Timing, spread_of
from roost.search.graph import StepGraph
from roost.search.problem import SECOND, Family, Problem

_STEPS = 1000
_WARM_UP = 50


class Simulated(NamedTuple):
    """The seconds of a step in a simulation."""

    mean: float
    p90: float


Timings = Mapping[str, Sequence[Mapping[int, Timing]]]
"""For each call and kind of device: its times by device count."""


def has_spread(timings: Timings) -> bool:
    """Tell whether any time has more than a median to it."""
    every = [one for kinds in timings.values() for times in kinds for one in times.values()]
    return any(len(one.samples) > 1 or one.p90 for one in every)


def simulate(problem: Problem, family: Family, timings: Timings, *, seed: int = 0) -> Simulated:
    """Run many steps of a placement and return the mean of their durations and what nine of ten stay below."""
    graph = StepGraph(problem)
    medians = graph.times(family)
    shares = {problem.roles[role].name: (group.kind, group.devices) for group in family for role in group.roles}
    used = {call.name: shares.get(call.role, (0, 0)) for call in problem.calls}
    known = {name: timings[name][kind].get(count) for name, (kind, count) in used.items()}
    dice = {name: random.Random(f"{seed}/{name}") for name in graph.names}  # noqa: S311 - luck, not secrets
    incoming: list[list[tuple[int, float, int]]] = [[] for _ in graph.names]
    for one, other, extra, back in graph.edges(family):
        incoming[other].append((one, extra / graph.scale / SECOND, back))
    ends: list[list[float]] = []
    finished = [0.0]
    for step in range(_WARM_UP + _STEPS):
        row: list[float] = []
        ends.append(row)
        for event, name in enumerate(graph.names):
            timing, luck = known.get(name), dice[name].random()
            took = medians[event] / graph.scale / SECOND if timing is None else draw(timing, luck)
            begins = [ends[step - back][one] + extra for one, extra, back in incoming[event] if back <= step]
            row.append(max(begins, default=0.0) + took)
        finished.append(max(finished[-1], *row))
    durations = [after - before for before, after in zip(finished[_WARM_UP:], finished[_WARM_UP + 1 :], strict=False)]
    return Simulated(mean=fmean(durations), p90=quantiles(durations, n=10)[-1])


def draw(timing: Timing, luck: float) -> float:
    """Return the seconds of a call for a number between 0 and 1: the quantile of its distribution."""
    if timing.samples:
        return sorted(timing.samples)[int(luck * len(timing.samples))] / SECOND
    spread = spread_of(timing)
    if not spread:
        return timing.median / SECOND
    return timing.median / SECOND * math.exp(spread * NormalDist().inv_cdf(min(max(luck, 1e-12), 1 - 1e-12)))
