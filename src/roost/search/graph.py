"""The step as a timed event graph: who waits for whom, and the cycle that sets the pace.

An edge `(u, v, extra, steps)` says that `v` of step k + steps begins when `u` of step k has ended and `extra` more time
has passed. The step time is the largest ratio of time to steps over all cycles. Times are parts of a
nanosecond, so small that the ratio of every cycle is a whole number of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from roost.search.problem import WEIGHTS, Group, Problem, device_sets

Edge = tuple[int, int, int, int]


class Cycle(NamedTuple):
    """The time of a cycle for each step that it spans, and its events in order."""

    ratio: int
    events: tuple[int, ...] = ()


class StepGraph:
    """The events of a step in flow order, and the edges that hold for every placement."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        weights = problem.weights
        self.names: list[str] = []
        last = max((i for i, call in enumerate(problem.calls) if weights and call.role == weights.source), default=-1)
        for index, call in enumerate(problem.calls):
            self.names.append(call.name)
            if index == last:
                self.names.append(WEIGHTS)
        at = {name: index for index, name in enumerate(self.names)}
        # A cycle passes each event once at most, and spans more than one step only where the update does.
        self.scale = math.lcm(*range(1, len(self.names) + (weights.staleness if weights else 0) + 1))
        """How many parts of a nanosecond are one unit of time here."""
        indices = problem.role_index
        self.update = at.get(WEIGHTS, -1)
        """The event of the weight update, or -1."""
        both = (weights.source, weights.target) if weights else ()
        self.updated: frozenset[int] = frozenset(indices[name] for name in both if name in indices)
        """The roles with devices that take part in the weight update."""
        self._source = indices.get(weights.source, -1) if weights else -1
        self.calls_of: list[list[tuple[int, list[dict[int, int]]]]] = [[] for _ in problem.roles]
        self.fixed = [0] * len(self.names)
        """The times of events that do not depend on the placement."""
        self._role_of = [-1] * len(self.names)
        for call in problem.calls:
            if call.role in indices:
                self._role_of[at[call.name]] = indices[call.role]
                times = [{count: time * self.scale for count, time in own.items()} for own in call.times]
                self.calls_of[indices[call.role]].append((at[call.name], times))
            else:
                self.fixed[at[call.name]] = call.times[0][0] * self.scale
        self.always: list[Edge] = [(at[before], at[after], 0, 0) for before, after in problem.edges]
        self.always += [(index, index, 0, 1) for index in range(len(self.names))]
        if weights:
            self.fixed[self.update] = weights.time * self.scale
            lag = 1 + weights.staleness
            self.always += [(at[call.name], self.update, 0, 0) for call in problem.calls if call.role == weights.source]
            self.always += [(self.update, first, 0, lag) for first in self._first_calls(weights.target, at)]
        self.lagging: set[Edge] = set()
        """Edges that include the time of a weight update which is not waited for."""
        self._rings: dict[tuple[frozenset[int], bool], list[Edge]] = {}

    def _first_calls(self, role: str, at: dict[str, int]) -> list[int]:
        """Return the calls of a role before which the flow has no other call of that role."""
        before: dict[str, set[str]] = {call.name: set() for call in self.problem.calls}
        for call in self.problem.calls:
            for one, other in self.problem.edges:
                if other == call.name:
                    before[other] |= before[one] | {one}
        own = [call.name for call in self.problem.calls if call.role == role]
        return [at[name] for name in own if not before[name] & set(own)]

    def ring(self, roles: frozenset[int], *, partial: bool = False) -> list[Edge]:
        """Return the order of the events on a device that has these roles, with the switches between them.

        With `partial`, other roles may still join; the edges are then only those that hold whichever do. A switch can
        shrink only next to the weight update, when the other role of that joins.
        """
        partial = partial and len(self.updated & roles) == 1 and len(self.updated) == 2
        if (roles, partial) not in self._rings:
            self._rings[roles, partial] = self._ring(roles, partial)
        return self._rings[roles, partial]

    def _ring(self, roles: frozenset[int], partial: bool) -> list[Edge]:
        own = [
            event
            for event, role in enumerate(self._role_of)
            if role in roles or (event == self.update and self.updated & roles)
        ]
        following = [*((event, 0) for event in own[1:]), (own[0], 1)]
        ring = [
            (one, other, self._switch(one, other, roles, partial), steps)
            for one, (other, steps) in zip(own, following, strict=True)
        ]
        if self.update not in own or self._waits(roles):
            return ring
        # The device spends the time of an update where its turn is, without waiting for the one of this step.
        at = own.index(self.update)
        before, after = ring[at - 1], ring[at]
        extra = before[2] + self.fixed[self.update] + after[2]
        ring[at] = (before[0], after[1], extra, before[3] + after[3])
        self.lagging.add(ring[at])
        del ring[at - 1]
        return ring

    def _waits(self, roles: frozenset[int]) -> bool:
        """Tell whether a device takes part in each update in its own step: the source's devices, or all of them."""
        weights = self.problem.weights
        return weights is None or not weights.staleness or self._source in roles

    def _switch(self, one: int, other: int, roles: frozenset[int], partial: bool) -> int:
        sleeping, waking = self._roles_at(one, roles), self._roles_at(other, roles)
        if sleeping & waking or (partial and self.update in (one, other)):
            return 0
        known = self.problem.roles
        sleep, wake = max(known[role].sleep for role in sleeping), max(known[role].wake for role in waking)
        return (sleep + wake) * self.scale

    def own_switches(self, role: int, roles: frozenset[int]) -> int:
        """Return the nanoseconds in which a role wakes up and goes to sleep in a step, on a device of these roles."""
        own = [
            event
            for event, of in enumerate(self._role_of)
            if of in roles or (event == self.update and self.updated & roles)
        ]
        known, total = self.problem.roles[role], 0
        for one, other in zip(own, own[1:] + own[:1], strict=True):
            sleeping, waking = self._roles_at(one, roles), self._roles_at(other, roles)
            if not sleeping & waking:
                total += (known.sleep if role in sleeping else 0) + (known.wake if role in waking else 0)
        return total

    def _roles_at(self, event: int, roles: frozenset[int]) -> frozenset[int]:
        return self.updated & roles if event == self.update else frozenset((self._role_of[event],))

    def times(self, family: Sequence[Group]) -> list[int]:
        """Return the time of every event of a placement."""
        found = list(self.fixed)
        for group in family:
            for role in group.roles:
                for event, times in self.calls_of[role]:
                    found[event] = times[group.kind][group.devices]
        return found

    def edges(self, family: Sequence[Group]) -> list[Edge]:
        """Return all edges of a placement."""
        rings = [edge for roles, _ in device_sets(family) for edge in self.ring(roles)]
        return sorted({*self.always, *rings})

    def slowest_cycle(self, family: Sequence[Group]) -> Cycle:
        """Return the cycle that sets the step time of a placement."""
        return slowest_cycle(self.times(family), self.edges(family), Cycle(0))


def slowest_cycle(times: Sequence[int], edges: Sequence[Edge], least: Cycle) -> Cycle:
    """Return the cycle with the largest ratio, or `least` if none has a larger one.

    Edges are in the order of their first events; those that span no step lead to later events.
    """
    while (cycle := slower_cycle(times, edges, least.ratio)) is not None:
        least = cycle
    return least


def earliest_starts(times: Sequence[int], edges: Sequence[Edge], ratio: int) -> list[int]:
    """Return when each event of step 0 begins if steps follow one another after `ratio`, which no cycle exceeds."""
    starts = [0] * len(times)
    for _ in times:
        for u, v, extra, steps in edges:
            starts[v] = max(starts[v], starts[u] + times[u] + extra - steps * ratio)
    return starts


def slower_cycle(times: Sequence[int], edges: Sequence[Edge], ratio: int) -> Cycle | None:
    """Return a cycle with a larger ratio, if there is one: follow what delays what until nothing changes."""
    weighted = [(u, v, times[u] + extra - steps * ratio) for u, v, extra, steps in edges]
    starts = [0] * len(times)
    via = [-1] * len(times)
    while True:
        changed = -1
        for index, (u, v, weight) in enumerate(weighted):
            start = starts[u] + weight
            if start > starts[v]:
                starts[v] = start
                via[v] = index
                changed = v
        if changed < 0:
            return None
        path: list[int] = []
        while changed not in path and via[changed] >= 0:
            path.append(changed)
            changed = edges[via[changed]][0]
        if changed in path:
            # The path runs backwards. The cycle runs forwards and starts at its earliest event.
            path = path[path.index(changed) :][::-1]
            own = [edges[via[event]] for event in path]
            first = path.index(min(path))
            total = sum(times[edge[0]] + edge[2] for edge in own)
            return Cycle(total // sum(edge[3] for edge in own), (*path[first:], *path[:first]))
