"""A search's prediction for the runs that its times are from, and an explanation where a step took another time.

The step time of a placement follows from the flow and the times of the calls. In a run it may follow from something
else: a call that takes from a channel while another puts into it, a driver that does more between two calls. Then no
prediction for another placement holds.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from roost.config.flow import FlowConfig, role_of
from roost.config.profile import MeasuredRun, Profile
from roost.config.ranks import format_ranks
from roost.errors import ConfigError
from roost.errors import Problem as Mistake
from roost.search.graph import StepGraph
from roost.search.problem import Call, Family, Group, Problem, Role, WeightUpdate, seconds
from roost.text import join_words

MOST_OFF = Fraction(1, 5)
"""A prediction that is further from what was measured says nothing about other placements."""


class Prediction(NamedTuple):
    """A search's prediction for the placement of a run, in nanoseconds."""

    run: MeasuredRun
    step: Fraction

    def __str__(self) -> str:
        placed = join_words([f"{role} on {format_ranks(ranks)}" for role, ranks in self.run.placement.items()])
        return (
            f"with {placed} a step took {seconds(self.run.step.median):.4g} s, and by these times it takes "
            f"{seconds(self.step):.4g} s"
        )


def check_runs(flow: FlowConfig, profile: Profile) -> list[Prediction]:
    """Predict the runs of a profile; ConfigError if a step took 20 % more or less there, with what explains it.

    Runs whose placement the search does not model, or with counts for which the profile has no times, are left out.
    """
    found, problems = [], []
    for run in profile.runs:
        problem = _problem_of(flow, profile, run)
        family = _family_of(problem, run) if problem is not None else None
        if problem is None or family is None or not run.step.median:
            continue
        graph = StepGraph(problem)
        prediction = Prediction(run, Fraction(graph.slowest_cycle(family).ratio, graph.scale))
        found.append(prediction)
        if abs(prediction.step - run.step.median) > MOST_OFF * run.step.median:
            reason = _reason(graph, family, prediction)
            hint = (
                "write the flow as the job works, or measure it again; without its 'runs', a profile is taken as it is"
            )
            problems.append(Mistake(message=f"{prediction}: {reason}", hint=hint, where=run.value.where()))
    if problems:
        raise ConfigError(problems)
    return found


def _problem_of(flow: FlowConfig, profile: Profile, run: MeasuredRun) -> Problem | None:
    """Return the problem in which each role has the devices of the run; None if a time is not known."""
    times = {}
    for call in flow.order:
        count = len(run.placement.get(role_of(call), ()))
        timings = profile.calls[call].timings
        by_count = timings.get(run.kinds.get(role_of(call), ""), timings.get("", {}))
        if count not in by_count:
            return None
        times[call] = {count: by_count[count].median}
    roles = []
    for name in (name for name in flow.roles if run.placement.get(name)):
        switch = profile.switches.get(name)
        wake, sleep = (0, 0) if switch is None else (switch.wake, switch.sleep)
        roles.append(Role(name=name, counts=((len(run.placement[name]),),), wake=wake, sleep=sleep))
    weights = None
    if flow.source:
        weights = WeightUpdate(source=flow.source, target=flow.target, time=profile.weights, staleness=flow.staleness)
    return Problem(
        roles=tuple(roles),
        calls=tuple(Call(name=call, role=role_of(call), times=(times[call],)) for call in flow.order),
        edges=flow.edges,
        weights=weights,
        nodes=(len({rank for ranks in run.placement.values() for rank in ranks}),),
        kinds=(0,),
    )


def _family_of(problem: Problem, run: MeasuredRun) -> Family | None:
    """Return the placement of a run without ranks; None if two roles overlap in part."""
    sets: dict[frozenset[int], list[int]] = {}
    for index, role in enumerate(problem.roles):
        sets.setdefault(frozenset(run.placement[role.name]), []).append(index)
    ordered = sorted(sets, key=len, reverse=True)
    family: list[Group] = []
    for at, own in enumerate(ordered):
        above = [index for index, other in enumerate(ordered[:at]) if own & other]
        if not all(own < ordered[index] for index in above):
            return None
        family.append(Group(tuple(sets[own]), len(own), above[-1] if above else None))
    return tuple(family)


def _reason(graph: StepGraph, family: Family, prediction: Prediction) -> str:
    """Say which call of a run is not as the flow and the profile have it."""
    run, names = prediction.run, graph.names
    works = [time / graph.scale for time in graph.times(family)]
    spans: dict[int, tuple[float, float]] = {
        event: run.calls[name] for event, name in enumerate(names) if name in run.calls
    }
    calls = list(spans)
    edges = [(one, other, extra / graph.scale, steps) for one, other, extra, steps in graph.edges(family)]
    sources = [spans[one][1] for one, other, _, steps in edges if other == graph.update and one in spans and not steps]
    if sources:
        # A run records no update of the weights: it is where the flow has it.
        spans[graph.update] = max(sources), max(sources) + works[graph.update]
    # How long after the last event for which the flow lets it wait each call begins, and which one that is.
    delays: dict[int, tuple[float, int]] = {}
    for one, other, extra, steps in edges:
        if one in spans and other in spans:
            delay = spans[other][0] + steps * run.step.median - spans[one][1] - extra
            delays[other] = min((delay, one), delays.get(other, (delay, one)))
    if prediction.step > run.step.median:
        (early, one), call = min(((delays[call], call) for call in calls if call in delays), default=((0.0, -1), -1))
        if early < 0:
            overlap = f"{names[call]} begins {seconds(-early):.4g} s before {names[one]} has ended"
            return f"{overlap}, for which the search lets it wait"
        slow = max(calls, key=lambda call: works[call] - spans[call][1] + spans[call][0], default=-1)
        return f"{names[slow]} took less there than in this profile" if slow >= 0 else "the run has no call of the flow"
    longest, waiting = max(((spans[call][1] - spans[call][0] - works[call], call) for call in calls), default=(0.0, -1))
    (late, one), call = max(((delays[call], call) for call in calls if call in delays), default=((0.0, -1), -1))
    if waiting >= 0 and longest >= late:
        lasts = f"{names[waiting]} lasts {seconds(spans[waiting][1] - spans[waiting][0]):.4g} s"
        return f"{lasts} there, and by this profile it works for {seconds(works[waiting]):.4g} s of them"
    if call < 0:
        return "the run has no call of the flow"
    more = ""
    others = [(end - begin, name) for name, (begin, end) in run.calls.items() if name not in names]
    if others:
        took, idle = max(others)
        more = f"; {idle}, which is not in the flow, takes {seconds(took):.4g} s of a step"
    elif one == graph.update and not works[one]:
        more = "; the profile has no seconds for the update of the weights, for which it waits"
    return f"{names[call]} begins {seconds(late):.4g} s later than the flow lets it{more}"
