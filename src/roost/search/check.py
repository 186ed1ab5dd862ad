"""Check a proof that no placement is better. This file shares nothing with the search but the values that are searched.

A proof has the problem, a placement, a schedule that keeps its step time, and a tree of all placements. In the tree,
roles join from the largest count down, ties in the order of the file. A role joins with the devices of group i (`=i`),
or on some of them that no other has (`<i`); the first groups are all devices of each kind. Each way is listed with why
nothing below it is better: the events of a cycle that takes as long; `memory` if roles on the same devices lack it;
`room` if roles that are left lack it in less time; `nodes` if groups do not fit on them; or the ways of the next role.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise, product
from typing import Any, NamedTuple

from roost.errors import ConfigError
from roost.search.problem import WEIGHTS, Group, Problem, digest

Edge = tuple[str, str, int, int]


class Branch(NamedTuple):
    """The groups that have joined, the roles that are left, and the last role's count and place."""

    groups: Sequence[Group]
    left: tuple[int, ...]
    last: tuple[float, int] = (-math.inf, -1)


def check_proof(proof: Mapping[str, Any]) -> int:
    """Check a proof; raise ConfigError if it does not hold. Return how many branches of the tree it refutes."""
    try:
        _require(proof.get("version") == 1, f"it has version {proof.get('version')!r}, and this Roost reads 1")
        _require(proof.get("digest") == digest(proof), "its digest does not fit its content, so it was changed")
        times = (*proof["step_time"], *proof["schedule"].values())
        _require({*map(type, times)} == {int} and times[1] > 0, "its times are not numbers")
        checker = _Checker(Problem.from_dict(proof["problem"]), *proof["step_time"])
        checker.check_schedule([set(proof["ranks"][role.name]) for role in checker.roles], proof["schedule"])
        return checker.check_tree(proof["tree"], Branch(checker.devices, tuple(range(len(checker.roles)))))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise ConfigError(f"the proof does not hold: {error}") from None


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


class _Checker:
    def __init__(self, problem: Problem, goal: int, scale: int) -> None:
        self.goal, self.scale, self.limits = goal, scale, problem.limits
        self.roles, self.is_stale = problem.roles, bool(problem.weights and problem.weights.staleness)
        self.nodes = list(zip(problem.nodes, problem.kinds, strict=True))
        self.devices = [Group((), size, None, kind) for kind, size in enumerate(problem.devices)]
        self.events = [call.name for call in problem.calls]
        at = self.events.index
        self.role_of = {call.name: problem.role_index.get(call.role, -1) for call in problem.calls} | {WEIGHTS: -1}
        self.times = {c.name: [{n: t * scale for n, t in own.items()} for own in c.times] for c in problem.calls}
        self.always: list[Edge] = [(one, other, 0, 0) for one, other in problem.edges]
        self.both: set[int] = set()
        if weights := problem.weights:
            both = (weights.source, weights.target)
            sources, targets = ([call.name for call in problem.calls if call.role == role] for role in both)
            self.events.insert(self.events.index(sources[-1]) + 1, WEIGHTS)
            self.times[WEIGHTS] = [{0: weights.time * scale}]
            self.source = {self.role_of[sources[0]]} - {-1}
            self.both = self.source | {self.role_of[targets[0]]} - {-1}
            after: set[str] = set()
            for one, other in sorted(problem.edges, key=lambda edge: at(edge[0])):
                after |= {other} if one in {*targets, *after} else set()
            self.always += [(call, WEIGHTS, 0, 0) for call in sources]
            self.always += [(WEIGHTS, call, 0, 1 + weights.staleness) for call in targets if call not in after]
        _require(all(at(a) < at(b) for a, b, _, later in self.always if not later), "its calls are not in flow order")
        self.always += [(event, event, 0, 1) for event in self.events]
        self.ring, self.lacks_nodes = cache(self._ring), cache(self._lacks_nodes)

    def check_schedule(self, sets: Sequence[set[int]], starts: Mapping[str, int]) -> None:
        """Check that the placement is legal, and that the schedule keeps its step time."""
        ends, groups = [0, *accumulate(size for size, _ in self.nodes)], []
        for at, (role, own) in enumerate(zip(self.roles, sets, strict=True)):
            parts = [len(own & set(range(*node))) for node in pairwise(ends)]
            (kind,) = {kind for part, (_, kind) in zip(parts, self.nodes, strict=True) if part}
            is_whole = sum(parts) == len(own) and not any(n % role.devices_per_worker for n in parts)
            is_apart = all(own <= other or other <= own or not own & other for other in sets)
            _require(is_whole and is_apart and len(own) in role.counts[kind], f"{role.name} has illegal devices")
            groups.append(Group((at,), len(own), None, kind))
        took = self.least(Branch(groups, ()))
        holders = {tuple(at for at, own in enumerate(sets) if device in own) for device in range(ends[-1])} - {()}
        _require(not any(self.is_full(own, groups[own[0]].kind) for own in holders), "its devices lack memory")
        for one, other, extra, steps in self.always + [edge for roles in holders for edge in self.ring(roles, False)]:
            waits = starts[other] >= starts[one] + took[one] + extra - steps * self.goal
            _require(waits, f"{other} begins before {one} allows it")

    def _ring(self, holders: tuple[int, ...], is_open: bool) -> list[Edge]:
        """Return what the order of events on a device enforces; if open, also if the update's other role joins."""
        own = {event: {role} for event, role in self.role_of.items()} | {WEIGHTS: self.both & set(holders)}
        is_open = is_open and len(own[WEIGHTS]) < len(self.both)
        turns = [event for event in self.events if own[event] & set(holders)]
        found: list[Edge] = []
        for one, other in zip(turns, turns[1:] + turns[:1], strict=True):
            is_free = own[one] & own[other] or (is_open and WEIGHTS in (one, other))
            extra = max(self.roles[r].sleep for r in own[one]) + max(self.roles[r].wake for r in own[other])
            found.append((one, other, 0 if is_free else extra * self.scale, int(other == turns[0])))
        if self.is_stale and own[WEIGHTS] and not self.source & set(holders):
            (one, _, before, back), (_, other, after, on) = found[(at := turns.index(WEIGHTS)) - 1], found[at]
            found = [edge for edge in found if WEIGHTS not in edge[:2]]
            found.append((one, other, before + self.times[WEIGHTS][0][0] + after, back + on))
        return found

    def check_tree(self, ways: Sequence[Any], branch: Branch) -> int:
        """Check that every way to join is there, and that nothing below it is better; return how many are refuted."""
        told = {(role, count, place): why for role, count, place, why in ways}
        possible = {way: Branch(*joined) for way, *joined in self.ways(*branch)}
        _require(told.keys() == possible.keys(), "it does not list every way in which a role can join")
        grown = {way: why for way, why in told.items() if isinstance(why[0], list)}
        for new, why in ((possible[way], told[way]) for way in told.keys() - grown.keys()):
            holds = self.lacks_nodes(new) if why == "nodes" else why == "room" and self.lacks_room(new)
            holds = holds or (why == "memory" and any(self.is_full(own, kind) for _, kind, own, _ in self.rings(new)))
            _require(holds or self.is_slow(new, why), f"nothing speaks against {new.groups}")
        return len(told) - len(grown) + sum(self.check_tree(why, possible[way]) for way, why in grown.items())

    def ways(self, groups: Sequence[Group], left: tuple[int, ...], last: tuple[float, int]) -> Iterator[Any]:
        for role, (count, kind) in ((one, share) for one in left for share in self.shares(one, last)):
            name, others, now = self.roles[role].name, tuple(one for one in left if one != role), (-count, role)
            if not all(self.shares(one, now) for one in others):
                continue
            for at, (group, free) in enumerate(zip(groups, self.free(groups), strict=True)):
                if group.kind == kind and group.roles and group.devices == count:
                    joined = group._replace(roles=(*group.roles, role))
                    yield (name, count, f"={at}"), (*groups[:at], joined, *groups[at + 1 :]), others, now
                elif group.kind == kind and free >= count:
                    yield (name, count, f"<{at}"), (*groups, Group((role,), count, at, kind)), others, now

    def shares(self, role: int, last: tuple[float, int]) -> list[tuple[int, int]]:
        return [(n, at) for at, own in enumerate(self.roles[role].counts) for n in own if (-n, role) > last]

    def free(self, groups: Sequence[Group]) -> list[int]:
        return [one.devices - sum(n for _, n, up, _ in groups if up == at) for at, one in enumerate(groups)]

    def rings(self, branch: Branch) -> Iterator[tuple[int, int, tuple[int, ...], list[Edge]]]:
        """Yield numbers and kinds of devices, their roles, and what holds whichever of those that are left join."""
        for (roles, _, up, kind), free in zip(branch.groups, self.free(branch.groups), strict=True):
            while up is not None:
                roles, up = (*roles, *branch.groups[up].roles), branch.groups[up].parent
            if free:
                yield free, kind, roles, self.ring(tuple(sorted(roles)), not self.both.isdisjoint(branch.left))

    def least(self, branch: Branch) -> dict[str, int]:
        """Return the least time of each event."""
        shares = {role: [(count, kind)] for roles, count, _, kind in branch.groups for role in roles} | {-1: [(0, 0)]}
        shares |= {role: self.shares(role, branch.last) for role in branch.left}
        return {event: min(self.times[event][at][n] for n, at in shares[self.role_of[event]]) for event in self.events}

    def is_slow(self, branch: Branch, cycle: Sequence[str]) -> bool:
        """Tell whether a cycle of these events holds for every placement below, and is not quicker than the goal."""
        took, gain = self.least(branch), 0
        rings = [*(ring for *_, ring in self.rings(branch)), *(self.ring((role,), True) for role in branch.left)]
        for pair in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
            edges = [edge for ring in (self.always, *rings) for edge in ring if edge[:2] == pair]
            gain += max(took[one] + extra - steps * self.goal for one, _, extra, steps in edges)
        return gain >= 0

    def is_full(self, roles: Sequence[int], kind: int) -> bool:
        held = zip(*(self.roles[role].memory for role in roles if self.roles[role].memory), strict=True)
        return any(sum(sizes) > self.limits[kind] for sizes in held)

    def lacks_room(self, branch: Branch) -> bool:
        """Tell whether the roles that are left find too little time on the devices in a step quicker than the goal."""
        took, usable, needed = self.least(branch), set(), []
        room = [(n, kind, sum(took[edge[0]] + edge[2] for edge in ring)) for n, kind, _, ring in self.rings(branch)]
        for role in branch.left:
            works = []
            switch = 0 if role in self.both else (self.roles[role].wake + self.roles[role].sleep) * self.scale
            for count, kind in self.shares(role, branch.last):
                alone = sum(self.times[call][kind][count] for call, own in self.role_of.items() if own == role)
                ends = [busy + alone + switch * bool(busy) for _, _, busy in room]
                quick = [at for at, (n, of, _) in enumerate(room) if n >= count and of == kind and ends[at] < self.goal]
                usable.update(quick)
                works += [count * (ends[at] - room[at][2]) for at in quick]
            needed.append(min(works, default=math.inf))
        return sum(needed) >= sum(room[at][0] * (self.goal - room[at][2]) for at in usable)

    def _lacks_nodes(self, branch: Branch, node: int = 0) -> bool:
        """Tell whether groups do not find their devices on the nodes, on each a multiple of what their workers need."""
        if node == len(self.nodes) or not any(group.devices for group in branch.groups if group.roles):
            return any(group.devices for group in branch.groups if group.roles)
        for given in product(*(self.parts(group, *self.nodes[node]) for group in branch.groups)):
            here = [group._replace(devices=n) for group, n in zip(branch.groups, given, strict=True)]
            rest = tuple(one._replace(devices=one.devices - n) for one, n in zip(branch.groups, given, strict=True))
            if min(self.free(here)) >= 0 and not self.lacks_nodes(Branch(rest, ()), node + 1):
                return False
        return True

    def parts(self, group: Group, room: int, kind: int) -> range:
        """Return how many devices a group may have on a node; without roles, it has all."""
        most = min(group.devices, room) if group.kind == kind else 0
        unit = math.lcm(*(self.roles[role].devices_per_worker for role in group.roles))
        return range(0 if group.roles else most, most + 1, unit)
