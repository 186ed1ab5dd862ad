"""The tree of all legal placements, and lower bounds for its branches.

Roles join one by one, those with more devices first; among equal counts, in the order of the file. A role that joins
has the devices of a group of its size, is nested in a larger one, or has devices of its own of some kind: every family
of sets that are pairwise equal, nested or disjoint comes about in exactly one way. What holds for the roles that have
joined holds for every placement below, so a bound on them is a bound on all of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from roost.search.graph import Cycle, Edge, StepGraph, slower_cycle, slowest_cycle
from roost.search.problem import Family, Group, Problem, Role, ancestors


class Branch(NamedTuple):
    """The roles that have joined, and those that have yet to."""

    family: Family
    left: tuple[int, ...]
    free: tuple[int, ...]
    """How many devices of each group have no other group on them."""
    unused: tuple[int, ...]
    """How many devices of each kind are in no group."""
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
        self._work: list[dict[tuple[int, int], int]] = []
        """For each role, and count and kind, the smallest count first: the time of its calls, summed over devices."""
        self._least_work: list[dict[int, int]] = []
        """For each role and count, likewise: the least with at most that count."""
        self._counts: list[list[int]] = []
        """For each role: the counts that it may have of any kind, the smallest first."""
        for role, calls in zip(problem.roles, self.graph.calls_of, strict=True):
            shares = sorted((count, kind) for kind, counts in enumerate(role.counts) for count in counts)
            counts = sorted({count for count, _ in shares})
            upto = {count: [share for share in shares if share[0] <= count] for count in counts}
            self._times.append(
                {
                    count: [(event, min(times[kind][one] for one, kind in upto[count])) for event, times in calls]
                    for count in counts
                }
            )
            work = {(count, kind): count * sum(times[kind][count] for _, times in calls) for count, kind in shares}
            self._work.append(work)
            self._least_work.append({count: min(work[share] for share in upto[count]) for count in counts})
            self._counts.append(counts)
        # Next to the weight update, which is of both its roles, these need not switch.
        self._switches = [
            0 if at in self.graph.updated else (role.wake + role.sleep) * self.graph.scale
            for at, role in enumerate(problem.roles)
        ]
        every = sorted({count for counts in self._counts for count in counts})
        self._below = [{most: _largest(counts, most - 1) for most in every} for counts in self._counts]
        self._upto = [{most: _largest(counts, most) for most in every} for counts in self._counts]

    def root(self) -> Branch:
        """Return the branch in which no role has joined yet."""
        left = tuple(self.roles)
        most = tuple(counts[-1] for counts in self._counts)
        work = sum(self._least_work[role][most[role]] for role in left)
        return Branch((), left, (), self.problem.devices, most, work + self._update_work((), left), 0)

    def children(self, branch: Branch) -> Iterator[Branch]:
        """Yield the branches in which one more role has joined."""
        for role, own in zip(branch.left, branch.most, strict=True):
            others = tuple(one for one in branch.left if one != role)
            for share in self._work[role]:
                if share[0] > own:
                    break
                most = tuple((self._upto if one > role else self._below)[one][share[0]] for one in others)
                if all(most):
                    yield from self._places(branch, role, share, others, most)

    def _places(
        self, branch: Branch, role: int, share: tuple[int, int], others: tuple[int, ...], most: tuple[int, ...]
    ) -> Iterator[Branch]:
        family, free, unused = branch.family, branch.free, branch.unused
        count, kind = share
        work = self._work[role][share]
        for group in family:
            for one in group.roles:
                work += self._work[one][group.devices, group.kind]
        for one, upto in zip(others, most, strict=True):
            work += self._least_work[one][upto]
        for at, group in enumerate(family):
            if group.kind != kind:
                continue
            if group.devices == count:
                joined = group._replace(roles=(*group.roles, role))
                grown = (*family[:at], joined, *family[at + 1 :])
                total = work + self._update_work(grown, others)
                yield Branch(grown, others, free, unused, most, total, branch.used)
            elif free[at] >= count:
                grown = (*family, Group((role,), count, at, kind))
                total = work + self._update_work(grown, others)
                inside = (*free[:at], free[at] - count, *free[at + 1 :], count)
                yield Branch(grown, others, inside, unused, most, total, branch.used)
        if unused[kind] >= count:
            grown = (*family, Group((role,), count, None, kind))
            total = work + self._update_work(grown, others)
            fewer = (*unused[:kind], unused[kind] - count, *unused[kind + 1 :])
            yield Branch(grown, others, (*free, count), fewer, most, total, branch.used + count)

    def _update_work(self, family: Family, left: tuple[int, ...]) -> int:
        """Return the least time of the weight update, summed over its devices."""
        updated = self.graph.updated
        if not updated:
            return 0
        counts = [group.devices for group in family for role in group.roles if role in updated]
        counts += [self._counts[role][0] for role in left if role in updated]
        return self.graph.fixed[self.graph.update] * max(counts)

    def slowest_cycle(self, branch: Branch, least: Cycle, *, any_slower: bool = False) -> Cycle:
        """Return the slowest cycle of the roles that have joined, or `least` if that is slower.

        With `any_slower`, any cycle will do that is slower than `least`.
        """
        edges = list(self.graph.always)
        for roles, _, _, is_new in self._devices(branch):
            if is_new:
                edges += self.graph.ring(roles, partial=self._is_open(branch))
        for role in branch.left:
            edges += self._singles[role]
        edges.sort()
        times = self._times_of(branch)
        return (slower_cycle(times, edges, least.ratio) or least) if any_slower else slowest_cycle(times, edges, least)

    def _times_of(self, branch: Branch) -> list[int]:
        """Return the least time of each event."""
        times = self.graph.times(branch.family)
        for role, most in zip(branch.left, branch.most, strict=True):
            for event, time in self._times[role][most]:
                times[event] = time
        return times

    def _devices(self, branch: Branch) -> Iterator[tuple[frozenset[int], int, int, bool]]:
        """Yield the roles of devices, how many, their kind, and whether they add anything to what holds elsewhere."""
        family, updated = branch.family, self.graph.updated
        inner = {group.parent for group in family}
        for at, group in enumerate(family):
            if branch.free[at]:
                roles = frozenset(group.roles)
                if group.parent is not None:
                    roles = frozenset(role for up in ancestors(family, at) for role in family[up].roles)
                # What holds on a nested group's devices holds on the others too, unless only some update weights.
                is_new = at not in inner or (len(updated & roles) == 1 and len(roles) > 1)
                yield roles, branch.free[at], group.kind, is_new

    def overflows(self, branch: Branch) -> bool:
        """Tell whether roles that share devices hold more than these have, in some phase.

        Between two phases that fit nothing overflows: roles that give back switch first.
        """
        for at, group in enumerate(branch.family if self.problem.limits else ()):
            own = [self.problem.roles[role] for up in ancestors(branch.family, at) for role in branch.family[up].roles]
            if any(total > self.problem.limits[group.kind] for total in held_by(own)):
                return True
        return False

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
        # Numbers of devices, their kind, and how long they are busy already.
        room = [
            (free, kind, sum(times[edge[0]] + edge[2] for edge in self.graph.ring(roles, partial=is_open)))
            for roles, free, kind, _ in self._devices(branch)
        ]
        room += [(unused, kind, 0) for kind, unused in enumerate(branch.unused) if unused]
        options = []
        opens: list[list[int]] = [[] for _ in room]
        for role, most in zip(branch.left, branch.most, strict=True):
            switch = self._switches[role]
            found = []
            for (count, kind), work in self._work[role].items():
                if count > most:
                    break
                # A role that shares its devices switches once in each step at least.
                ends = [
                    (work // count + busy + (switch if busy else 0), at)
                    for at, (free, of, busy) in enumerate(room)
                    if free >= count and of == kind
                ]
                for end, at in ends:
                    opens[at].append(end)
                if ends:
                    alone = any(not room[at][2] for _, at in ends)
                    found.append((min(ends)[0], work if alone else work + switch * count))
            if not found:
                return None
            options.append(found)
        ratio = max(ratio, *(min(found)[0] for found in options))
        while True:
            needed = sum(min(work for end, work in found if end <= ratio) for found in options)
            fitting = [place for place, ends in zip(room, opens, strict=True) if any(end <= ratio for end in ends)]
            total = sum(free for free, _, _ in fitting)
            reached = (needed + sum(free * busy for free, _, busy in fitting)) // total
            if reached <= ratio:
                return ratio
            later = [end for ends in opens for end in ends if end > ratio]
            ratio = min(reached, *later) if later else reached


def held_by(roles: Sequence[Role]) -> list[int]:
    """Return what roles that share a device hold on it, in each phase."""
    return [sum(sizes) for sizes in zip(*(role.memory for role in roles if role.memory), strict=True)]


def _largest(counts: Sequence[int], most: int) -> int:
    """Return the largest count that is not too large, or 0."""
    return max((count for count in counts if count <= most), default=0)
