"""The tree of all legal placements, and lower bounds for its branches.

Roles join one by one, those with more devices first; among equal counts, in the order of the file. A role that joins
has the devices of a group of its size, is nested in a larger one, or has devices of its own: every family of sets that
are pairwise equal, nested or disjoint comes about in exactly one way. What holds for the roles that have joined holds
for every placement below, so a bound on them is a bound on all of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from roost.search.graph import Cycle, Edge, StepGraph, slower_cycle, slowest_cycle
from roost.search.problem import Family, Group, Problem, ancestors


class Branch(NamedTuple):
    """The roles that have joined, and those that have yet to."""

    family: Family
    left: tuple[int, ...]
    free: tuple[int, ...]
    """How many devices of each group have no other group on them; the last number is of no group."""
    most: tuple[int, ...]
    """For each role that has yet to join, the most devices that it may have."""
    work: int
    """At least so much time do all devices work in a step, taken together."""
    used: int
    """How many devices are in use."""


class Tree:
    """All placements of a problem as a tree of branches."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.graph = StepGraph(problem)
        self.roles = range(len(problem.roles))
        self._singles: list[list[Edge]] = [self.graph.ring(frozenset((role,)), partial=True) for role in self.roles]
        self._times: list[dict[int, list[tuple[int, int]]]] = []
        """For each role and count: the least times of its calls with at most that count."""
        self._work: list[dict[int, int]] = []
        """For each role and count: the time of its calls, summed over its devices."""
        self._least_work: list[dict[int, int]] = []
        """Likewise, the least with at most that count."""
        for role, calls in zip(problem.roles, self.graph.calls_of, strict=True):
            upto = {count: role.counts[: place + 1] for place, count in enumerate(role.counts)}
            self._times.append(
                {count: [(event, min(times[one] for one in upto[count])) for event, times in calls] for count in upto}
            )
            work = {count: count * sum(times[count] for _, times in calls) for count in upto}
            self._work.append(work)
            self._least_work.append({count: min(work[one] for one in upto[count]) for count in upto})
        # Next to the weight update, which is of both its roles, these need not switch.
        self._switches = [
            0 if at in self.graph.updated else (role.wake + role.sleep) * self.graph.scale
            for at, role in enumerate(problem.roles)
        ]
        every = sorted({count for role in problem.roles for count in role.counts})
        self._below = [{most: _largest(role.counts, most - 1) for most in every} for role in problem.roles]
        self._upto = [{most: _largest(role.counts, most) for most in every} for role in problem.roles]

    def root(self) -> Branch:
        """Return the branch in which no role has joined yet."""
        left = tuple(self.roles)
        most = tuple(role.counts[-1] for role in self.problem.roles)
        work = sum(self._least_work[role][most[role]] for role in left)
        return Branch((), left, (self.problem.devices,), most, work + self._update_work((), left), 0)

    def children(self, branch: Branch) -> Iterator[Branch]:
        """Yield the branches in which one more role has joined."""
        for role, own in zip(branch.left, branch.most, strict=True):
            others = tuple(one for one in branch.left if one != role)
            for count in self.problem.roles[role].counts:
                if count > own:
                    break
                most = tuple((self._upto if one > role else self._below)[one][count] for one in others)
                if all(most):
                    yield from self._places(branch, role, count, others, most)

    def _places(
        self, branch: Branch, role: int, count: int, others: tuple[int, ...], most: tuple[int, ...]
    ) -> Iterator[Branch]:
        family, free = branch.family, branch.free
        work = self._work[role][count]
        for group in family:
            for one in group.roles:
                work += self._work[one][group.devices]
        for one, upto in zip(others, most, strict=True):
            work += self._least_work[one][upto]
        for at, group in enumerate(family):
            if group.devices == count:
                joined = Group((*group.roles, role), count, group.parent)
                grown = (*family[:at], joined, *family[at + 1 :])
                yield Branch(grown, others, free, most, work + self._update_work(grown, others), branch.used)
        for at, room in enumerate(free):
            parent = at if at < len(family) else None
            if room >= count and (parent is None or family[at].devices > count):
                grown = (*family, Group((role,), count, parent))
                rest = [*free[:-1], count, free[-1]]
                rest[-1 if parent is None else at] -= count
                used = branch.used + (count if parent is None else 0)
                yield Branch(grown, others, tuple(rest), most, work + self._update_work(grown, others), used)

    def _update_work(self, family: Family, left: tuple[int, ...]) -> int:
        """Return the least time of the weight update, summed over its devices."""
        updated = self.graph.updated
        if not updated:
            return 0
        counts = [group.devices for group in family for role in group.roles if role in updated]
        counts += [self.problem.roles[role].counts[0] for role in left if role in updated]
        return self.graph.fixed[self.graph.update] * max(counts)

    def slowest_cycle(self, branch: Branch, least: Cycle, *, any_slower: bool = False) -> Cycle:
        """Return the slowest cycle of the roles that have joined, or `least` if that is slower.

        With `any_slower`, any cycle will do that is slower than `least`.
        """
        edges = list(self.graph.always)
        for roles, _, is_new in self._devices(branch):
            if is_new:
                edges += self.graph.ring(roles, partial=self._is_open(branch))
        for role in branch.left:
            edges += self._singles[role]
        edges.sort()
        times = self._times_of(branch)
        return (slower_cycle(times, edges, least.ratio) or least) if any_slower else slowest_cycle(times, edges, least)

    def _times_of(self, branch: Branch) -> list[int]:
        """Return the least time of each event."""
        times = list(self.graph.fixed)
        for group in branch.family:
            for role in group.roles:
                for event, known in self.graph.calls_of[role]:
                    times[event] = known[group.devices]
        for role, most in zip(branch.left, branch.most, strict=True):
            for event, time in self._times[role][most]:
                times[event] = time
        return times

    def _devices(self, branch: Branch) -> Iterator[tuple[frozenset[int], int, bool]]:
        """Yield the roles of devices, how many there are, and whether they add anything to what holds elsewhere."""
        family, updated = branch.family, self.graph.updated
        inner = {group.parent for group in family}
        for at, group in enumerate(family):
            if branch.free[at]:
                roles = frozenset(group.roles)
                if group.parent is not None:
                    roles = frozenset(role for up in ancestors(family, at) for role in family[up].roles)
                # What holds on a nested group's devices holds on the others too, unless only some update weights.
                yield roles, branch.free[at], at not in inner or (len(updated & roles) == 1 and len(roles) > 1)

    def _is_open(self, branch: Branch) -> bool:
        return not self.graph.updated.isdisjoint(branch.left)

    def least_room(self, branch: Branch, ratio: int) -> int | None:
        """Return the least step time, from `ratio` on, at which the roles that are left find room; None if never.

        Nested or not, a role gets its devices among some that are enough and have enough time left. All roles that are
        left need as much time, over all devices, as there is on devices where any of them fits.
        """
        if not branch.left:
            return ratio
        times, is_open = self._times_of(branch), self._is_open(branch)
        rings = [(free, self.graph.ring(roles, partial=is_open)) for roles, free, _ in self._devices(branch)]
        # Numbers of devices, and how long they are busy already.
        room = [(free, sum(times[edge[0]] + edge[2] for edge in ring)) for free, ring in rings]
        room += [(branch.free[-1], 0)] if branch.free[-1] else []
        options = []
        opens: list[list[int]] = [[] for _ in room]
        for role, most in zip(branch.left, branch.most, strict=True):
            switch = self._switches[role]
            found = []
            for count, work in self._work[role].items():
                if count > most:
                    break
                # A role that shares its devices switches once in each step at least.
                ends = [
                    (work // count + busy + (switch if busy else 0), at)
                    for at, (free, busy) in enumerate(room)
                    if free >= count
                ]
                for end, at in ends:
                    opens[at].append(end)
                if ends:
                    alone = any(not room[at][1] for _, at in ends)
                    found.append((min(ends)[0], work if alone else work + switch * count))
            if not found:
                return None
            options.append(found)
        ratio = max(ratio, *(min(found)[0] for found in options))
        while True:
            needed = sum(min(work for end, work in found if end <= ratio) for found in options)
            fitting = [place for place, ends in zip(room, opens, strict=True) if any(end <= ratio for end in ends)]
            total = sum(free for free, _ in fitting)
            reached = (needed + sum(free * busy for free, busy in fitting)) // total
            if reached <= ratio:
                return ratio
            later = [end for ends in opens for end in ends if end > ratio]
            ratio = min(reached, *later) if later else reached


def _largest(counts: tuple[int, ...], most: int) -> int:
    """Return the largest count that is not too large, or 0."""
    return max((count for count in counts if count <= most), default=0)
