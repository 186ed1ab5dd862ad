"""The answer of a search: the best placement, what sets its pace, what its roles do, and what others lose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import combinations
from typing import Any

from roost.errors import PlacementError
from roost.search.find import Found, find_best, in_order, kinds_of, shared_devices, sharing
from roost.search.graph import StepGraph
from roost.search.layout import lay_out, placement_text
from roost.search.problem import WEIGHTS, Family, Problem, device_sets, seconds
from roost.search.setup import Setup, explain_clash
from roost.text import join_words


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleShare:
    """How a role spends a step, as parts of the step time."""

    devices: int
    busy: float
    switching: float

    @property
    def idle(self) -> float:
        """The rest: the role waits, or its devices do something else."""
        return max(0.0, 1.0 - self.busy - self.switching)


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalCycle:
    """The cycle that sets the step time."""

    events: tuple[str, ...]
    time: int
    """Its nanoseconds, switches included."""
    steps: int
    """How many steps it spans."""

    def __str__(self) -> str:
        around = " → ".join([*self.events, self.events[0]]) if self.events else "nothing takes time"
        span = "" if self.steps == 1 else f" in {self.steps} steps"
        return f"{around}: {seconds(self.time):.4g} s{span}"


@dataclass(frozen=True, kw_only=True)
class Option:
    """One placement, explained."""

    problem: Problem
    family: Family
    step_time: Fraction
    interpolated: tuple[str, ...] = ()
    """The times that it rests on and that were not measured."""

    @cached_property
    def ranks(self) -> Mapping[str, tuple[int, ...]]:
        """The hardware ranks of each role that takes devices."""
        return lay_out(self.problem, self.family)

    @property
    def devices(self) -> int:
        """How many devices are in use."""
        return len({rank for own in self.ranks.values() for rank in own})

    @property
    def component_placement(self) -> dict[str, str]:
        """The placement as a job has it; roles without devices are not in it."""
        return {name: placement_text(self.problem, name, own) for name, own in self.ranks.items()}

    @cached_property
    def critical_cycle(self) -> CriticalCycle:
        """The cycle that sets the step time."""
        graph = StepGraph(self.problem)
        ratio, events = graph.slowest_cycle(self.family)
        times = graph.times(self.family)
        edges = graph.edges(self.family)
        time = steps = 0
        names: list[str] = []
        for pair in zip(events, (*events[1:], *events[:1]), strict=True):
            edge = max((e for e in edges if e[:2] == pair), key=lambda edge: edge[2] - edge[3] * ratio)
            time += times[edge[0]] + edge[2]
            steps += edge[3]
            names += [graph.names[edge[0]], *([WEIGHTS] if edge in graph.lagging else [])]
        return CriticalCycle(events=tuple(names), time=time // graph.scale, steps=max(1, steps))

    def shares(self) -> dict[str, RoleShare]:
        """Return what each role does in a step, in the order of the file; the weight update counts as busy."""
        weights = self.problem.weights
        counts = {name: len(own) for name, own in self.ranks.items()}
        kinds = dict(zip(self.ranks, kinds_of(self.family), strict=True))
        step = self.step_time or Fraction(1)
        found = {}
        for name in dict.fromkeys((*self.ranks, *(call.role for call in self.problem.calls))):
            count = counts.get(name, 0)
            busy = sum(call.times[kinds.get(name, 0)][count] for call in self.problem.calls if call.role == name)
            busy += weights.time if weights and name in (weights.source, weights.target) else 0
            switching = self._switching(name) if count else Fraction(0)
            found[name] = RoleShare(devices=count, busy=float(busy / step), switching=float(switching / step))
        return found

    def _switching(self, name: str) -> Fraction:
        """Return how long a role wakes up and goes to sleep in a step, as the mean of its devices."""
        graph, role = StepGraph(self.problem), self.problem.role_index[name]
        own = [(roles, free) for roles, free in device_sets(self.family) if role in roles]
        total = sum(free * graph.own_switches(role, roles) for roles, free in own)
        return Fraction(total, sum(free for _, free in own))

    def sharing(self) -> str:
        """Say which roles share devices."""
        pairs = list(combinations([role.name for role in self.problem.roles], 2))
        apart = sharing(self.family, len(self.problem.roles))
        shared = [f"{one} with {other}" for (one, other), is_apart in zip(pairs, apart, strict=True) if not is_apart]
        return f"{join_words(shared, most=4)} on the same devices" if shared else "every role on devices of its own"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The best placement, and the best of those in which other roles share devices."""

    setup: Setup
    best: Option
    others: tuple[Option, ...]

    def loss(self, other: Option) -> str:
        """Say what another placement loses, and to what."""
        more = other.step_time - self.best.step_time
        if not more:
            return f"as quick, and {_tie(self.best, other)}; {other.sharing()}"
        part = float(more / self.best.step_time) * 100 if self.best.step_time else 0.0
        slowest = " → ".join(other.critical_cycle.events)
        return f"loses {seconds(more):.4g} s ({part:.2g} %) to {slowest}; {other.sharing()}"

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as JSON has it."""
        best = self.best
        return {
            "version": 1,
            "step_seconds": seconds(best.step_time),
            "bound_seconds": seconds(best.step_time),
            "devices": best.devices,
            "component_placement": best.component_placement,
            "critical_cycle": list(best.critical_cycle.events),
            "interpolated": list(best.interpolated),
            "roles": {
                name: {
                    "devices": share.devices,
                    "busy": round(share.busy, 4),
                    "switching": round(share.switching, 4),
                    "idle": round(share.idle, 4),
                }
                for name, share in best.shares().items()
            },
            "alternatives": [
                {
                    "component_placement": other.component_placement,
                    "step_seconds": seconds(other.step_time),
                    "why": self.loss(other)
                    + (f"; interpolated: {', '.join(other.interpolated)}" if other.interpolated else ""),
                }
                for other in self.others
            ],
        }


def search(setup: Setup, top: int = 5, fits: Callable[[Option], bool] | None = None) -> Answer:
    """Find the best placement and the alternatives to it, without those that do not fit.

    PlacementError if no placement is legal.
    """
    found = find_best(setup.problem, top, None if fits is None else lambda one: fits(_option(setup, one)))
    if not found and fits is not None and any(in_order(setup.problem)):
        raise PlacementError(
            "no placement fits in the memory of the nodes, on the ranks that a search chooses",
            hint="roost plan says for a placement what does not fit",
        )
    if not found:
        raise explain_clash(setup)
    best, *others = (_option(setup, one) for one in found)
    return Answer(setup=setup, best=best, others=tuple(others))


def _option(setup: Setup, found: Found) -> Option:
    names = [role.name for role in setup.problem.roles]
    shares = {names[role]: (group.kind, group.devices) for group in found.family for role in group.roles}
    used = [(call.name, *shares.get(call.role, (0, 0))) for call in setup.problem.calls]
    rests_on = tuple(setup.measurement(*time) for time in used if time in setup.interpolated)
    return Option(problem=setup.problem, family=found.family, step_time=found.step_time, interpolated=rests_on)


def _tie(best: Option, other: Option) -> str:
    if best.devices != other.devices:
        return f"uses {other.devices} devices in place of {best.devices}"
    mine, yours = (shared_devices(one.family) for one in (best, other))
    return f"shares {yours} devices in place of {mine}" if mine != yours else "comes later in the order of roles"
