"""Whether the workers of a plan fit in memory at every moment: while they start, in each phase, and in between.

From one phase to the next each role that changes its state switches once, one role after the other. While it switches,
each of its workers holds the larger of both states, of each kind of memory, since memory may come back late. An order
of switches is safe if no moment overflows, however far each worker of the role that switches has come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

from roost.config.hardware import ACCELERATOR
from roost.config.memory import Amount, MemoryConfig, Phase, RoleMemory
from roost.config.ranks import format_ranks
from roost.errors import Problem, Where
from roost.placement.plan import Plan
from roost.text import join_words, size_text

_MOST_TRIED = 100_000
"""So many sets of roles that have switched are tried for a change: all of 16 roles that give and take."""
_GIB, _MIB = 2**30, 2**20


class Seats(NamedTuple):
    """Accelerators or nodes that are alike: as much memory, and as many workers of each role."""

    is_host: bool
    limit: int | None
    workers: tuple[int, ...]
    """How many workers of each role have it, in the order of the section `memory`."""
    places: tuple[tuple[int, int], ...]
    """Node rank and local rank of each; the local rank of a node is -1."""

    def __str__(self) -> str:
        node, local = self.places[0]
        return f"node {node}" if self.is_host else f"accelerator {local} of node {node}"

    def held(self, terms: Sequence[Term]) -> int:
        """Return the bytes that these hold on one of the places."""
        return sum(term.on(self) for term in terms)


class Term(NamedTuple):
    """The memory that each worker of a role holds at a moment, or each of at most so many on a node."""

    role: int
    words: str
    amount: Amount
    most: int | None = None

    def on(self, seats: Seats) -> int:
        """Return the bytes that the role's workers hold on one of the places."""
        count = seats.workers[self.role]
        each = self.amount.host + self.amount.pinned if seats.is_host else self.amount.device
        return each * (count if self.most is None else min(count, self.most))


class Moment(NamedTuple):
    """A moment of a step, and how to get there: what `switched` before, in this order, and what is switching."""

    words: str
    terms: tuple[Term, ...]
    phase: int
    switched: tuple[str, ...] = ()
    switching: str = ""
    is_start: bool = False


class Overflow(NamedTuple):
    """A moment at which too much is held, and where."""

    moment: Moment
    seats: Seats
    is_all: bool = True
    """For a change: whether every order of switches was tried."""

    @property
    def excess(self) -> int:
        """The bytes that are too many."""
        return self.seats.held(self.moment.terms) - (self.seats.limit or 0)


class Change(NamedTuple):
    """A change of phase, and a safe order in which the roles switch."""

    before: Phase
    after: Phase
    order: tuple[str, ...]

    def __str__(self) -> str:
        steps = [f"{role} to {self.after.states[role]}" for role in self.order]
        return f"{self.before.name} → {self.after.name}: " + (", then ".join(steps) if steps else "nothing switches")


@dataclass(frozen=True)
class Ledger:
    """The memory of a plan's workers: `problems` says what does not fit, `unknown` what could not be checked."""

    config: MemoryConfig
    seats: tuple[Seats, ...]
    unknown: tuple[str, ...]

    @cached_property
    def overflows(self) -> tuple[Overflow, ...]:
        """The moments that overflow: of the start, of each phase, and of each change for which no order is safe."""
        return self._checked[0]

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """The changes of phase that have a safe order, with one."""
        return self._checked[1]

    @cached_property
    def problems(self) -> tuple[Problem, ...]:
        """The overflows, each with its moment, the sum, who holds it, and the nearest that would fit."""
        return tuple(map(self._problem, self.overflows))

    @cached_property
    def peaks(self) -> dict[Seats, tuple[int, str]]:
        """The most that is held on each kind of place, and when, with the orders of `changes`."""
        found = {}
        moments = [_start(self.config), *(_phase(self.config, at) for at in range(len(self.config.phases)))]
        for change in self.changes:
            before = self.config.phases.index(change.before)
            moments += [
                _switch(self.config, before, change.order[:done], role) for done, role in enumerate(change.order)
            ]
        for seats in self.seats:
            # The first of equals: a phase is told in place of a change to it.
            phases_first = sorted(moments, key=lambda moment: bool(moment.switching) or moment.is_start)
            top = max(phases_first, key=lambda moment: seats.held(moment.terms))
            found[seats] = (seats.held(top.terms), top.words)
        return found

    def held(self, seats: Seats, phase: int) -> int:
        """Return the bytes that are held in a phase on one of the places."""
        return seats.held(_phase(self.config, phase).terms)

    def lines(self) -> list[str]:
        """Say in lines of text how much is held at most, in which order roles switch, and what is not known."""
        out = []
        for is_host, what in ((False, "an accelerator"), (True, "a node")):
            known = [seats for seats in self.seats if seats.is_host == is_host and seats.limit]
            if known and any(self.peaks[seats][0] for seats in known):
                top = max(known, key=lambda seats: self.peaks[seats][0] / (seats.limit or 1))
                held, when = self.peaks[top]
                out.append(f"memory: at most {size_text(held)} of {size_text(top.limit or 0)} on {what}: {top}, {when}")
        return [*out, *map(str, self.changes), *(f"not known: {line}" for line in self.unknown)]

    @cached_property
    def _checked(self) -> tuple[tuple[Overflow, ...], tuple[Change, ...]]:
        overflows, changes = [], []
        phases = self.config.phases
        for check in _checks(self.config):
            found = check(self.config, self.seats)
            if isinstance(found, Overflow):
                overflows.append(found)
            elif found is not None:
                before, order = found
                changes.append(Change(phases[before], phases[(before + 1) % len(phases)], order))
        return tuple(overflows), tuple(changes)

    def _problem(self, overflow: Overflow) -> Problem:
        moment, seats, is_all = overflow
        held, limit = size_text(seats.held(moment.terms)), size_text(seats.limit or 0)
        if held == limit:
            held = f"{size_text(overflow.excess)} more than that"
        who = join_words([_said(term, seats) for term in moment.terms if term.on(seats)])
        alike = len(seats.places) - 1
        others = f", and {alike} more like it" if alike else ""
        phases = self.config.phases
        where: Where | None = phases[moment.phase].where
        message = f"{moment.words}, {seats} has {limit} and would hold {held}: {who}{others}"
        if moment.switching:
            where = phases[(moment.phase + 1) % len(phases)].where
            none = "no order of switches is safe" if is_all else f"no order of {_MOST_TRIED:,} tried is safe"
            message = f"{none}: {message}"
        return Problem(message=message, hint=self._hint(overflow), where=where)

    def _hint(self, overflow: Overflow) -> str:
        """Return the nearest that would fit: all of it if one size is enough, else this moment."""
        moment, seats = overflow.moment, overflow.seats
        own = next(check for check in _checks(self.config) if check(self.config, self.seats) == overflow)

        def fits_here(config: MemoryConfig) -> bool:
            return not isinstance(own(config, self.seats), Overflow)

        def fits(config: MemoryConfig) -> bool:
            return not any(isinstance(check(config, self.seats), Overflow) for check in _checks(config))

        for is_enough in (fits, fits_here):
            if moment.is_start and (hint := self._start_hint(seats, is_enough)):
                return hint
            if found := list(self._smaller(overflow, is_enough)):
                return max(found)[1]
        percent = _largest(100, lambda part: fits_here(_scaled(self.config, part)))
        return f"no single size is enough: at {percent} % of every size it would fit" if percent else ""

    def _start_hint(self, seats: Seats, is_enough: Callable[[MemoryConfig], bool]) -> str:
        """Return how many workers of a role may start at the same time."""
        for index, role in enumerate(self.config.roles):
            now = min(seats.workers[index], role.start_at_once or seats.workers[index])
            if not role.start_host or now < 2:
                continue

            def with_most(most: int, role: RoleMemory = role) -> bool:
                return is_enough(_changed(self.config, replace(role, start_at_once=most)))

            if most := next((count for count in range(now - 1, 0, -1) if with_most(count)), 0):
                how = f"start_at_once: {most}, in a script of yours, since roost run starts all"
                return f"start {most} of {role.name} at a time on a node ({how})"
        return ""

    def _smaller(self, overflow: Overflow, is_enough: Callable[[MemoryConfig], bool]) -> Iterator[tuple[float, str]]:
        """Yield for each size that takes part how much of it could stay, as a part and in words."""
        moment, seats = overflow.moment, overflow.seats
        phases = (self.config.phases[moment.phase], self.config.phases[(moment.phase + 1) % len(self.config.phases)])
        sizes: dict[tuple[str, str, str], int] = {}
        for term in moment.terms:
            role = self.config.roles[term.role]
            if not term.on(seats):
                continue
            if moment.is_start and role.start_host:
                sizes[role.name, "start_host", ""] = role.start_host
            both = phases if role.name == moment.switching else (phases[role.name in moment.switched],)
            for state in (phase.states[role.name] for phase in both):
                for key in ("host", "pinned") if seats.is_host else ("device",):
                    sizes[role.name, state, key] = getattr(role.states[state], key)
        for (name, state, key), size in sizes.items():
            role = next(one for one in self.config.roles if one.name == name)

            def changed(step: int, role: RoleMemory = role, state: str = state, key: str = key) -> bool:
                least = _told_size(step)
                if not key:
                    return is_enough(_changed(self.config, replace(role, start_host=least)))
                states = {**role.states, state: role.states[state]._replace(**{key: least})}
                return is_enough(_changed(self.config, replace(role, states=states)))

            smaller = 1014 + (size * 10 - 1) // _GIB if size > _GIB else (size - 1) // _MIB
            if left := _told_size(_largest(smaller, changed)):
                kind = "" if key in ("device", "") else f" {key}"
                yield left / size, f"{name} {state}{kind} at most {_size(left)}"


def make_ledger(plan: Plan, config: MemoryConfig) -> Ledger:
    """Return the ledger of a plan."""
    roles = {role.name: index for index, role in enumerate(config.roles)}
    on: dict[tuple[int, int], list[int]] = {}
    for component in plan.components:
        index = roles.get(component.name)
        for placement in component.placements if index is not None else ():
            node = placement.cluster_node_rank
            locals_ = placement.local_hardware_ranks if placement.hardware_type == ACCELERATOR else ()
            for local in (-1, *locals_):
                on.setdefault((node, local), [0] * len(roles))[index or 0] += 1
    alike: dict[tuple[bool, int | None, tuple[int, ...]], list[tuple[int, int]]] = {}
    for (rank, local), workers in sorted(on.items()):
        node_ = plan.topology.nodes[rank]
        limit = node_.memory if local < 0 else node_.accelerators[local].memory
        alike.setdefault((local < 0, limit, tuple(workers)), []).append((rank, local))
    seats = tuple(Seats(*key, tuple(places)) for key, places in alike.items())
    silent = [component.name for component in plan.components if component.name not in roles]
    unknown = [f"what {join_words(silent)} {'hold' if len(silent) > 1 else 'holds'}"] if silent else []
    for is_host, what in ((False, "the accelerators of "), (True, "")):
        blind = [one for one in seats if one.limit is None and one.is_host == is_host and _uses(config, one)]
        if nodes := sorted({node for one in blind for node, _ in one.places}):
            word = "node" if len(nodes) == 1 else "nodes"
            verb = "has" if is_host and len(nodes) == 1 else "have"
            unknown.append(f"how much memory {what}{word} {format_ranks(nodes)} {verb}; an inventory can say")
    return Ledger(config, seats, tuple(unknown))


def _uses(config: MemoryConfig, seats: Seats) -> bool:
    moments = [_start(config), *(_phase(config, at) for at in range(len(config.phases)))]
    return any(seats.held(moment.terms) for moment in moments)


_Check = Callable[[MemoryConfig, Sequence[Seats]], Overflow | tuple[int, tuple[str, ...]] | None]
"""Returns an overflow, or for a change the phase before it and a safe order."""


def _checks(config: MemoryConfig) -> list[_Check]:
    """Return a check for the start, for each phase, and for each change between two phases that fit."""
    count = len(config.phases)
    # Two phases have two changes, one has none.
    changes = [partial(_check_change, before=at) for at in range(count if count > 1 else 0)]
    return [_check_start, *(partial(_check_phase, phase=at) for at in range(count)), *changes]


def _check_start(config: MemoryConfig, seats: Sequence[Seats]) -> Overflow | None:
    # What the phase alone overflows, its own check says.
    fitting = [one for one in seats if _worst(_phase(config, 0), [one]) is None]
    return _worst(_start(config), fitting)


def _check_phase(config: MemoryConfig, seats: Sequence[Seats], phase: int) -> Overflow | None:
    return _worst(_phase(config, phase), seats)


def _check_change(
    config: MemoryConfig, seats: Sequence[Seats], before: int
) -> Overflow | tuple[int, tuple[str, ...]] | None:
    """Find a safe order of the switches from a phase to the next: roles that only give back are first, takers last."""
    after = (before + 1) % len(config.phases)
    if any(_worst(_phase(config, at), seats) is not None for at in (before, after)):
        return None
    givers: list[str] = []
    mixed: list[str] = []
    takers: list[str] = []
    for role in config.roles:
        old, new = (role.states[config.phases[at].states[role.name]] for at in (before, after))
        if config.phases[before].states[role.name] == config.phases[after].states[role.name]:
            continue
        (givers if old.most(new) == old else takers if old.most(new) == new else mixed).append(role.name)
    # Depth first, with the roles that have switched; what is left to try from them does not depend on their order.
    nearest: Overflow | None = None
    tried: set[frozenset[str]] = set()
    stack = [tuple(givers)]
    while stack and len(tried) < _MOST_TRIED:
        order = stack.pop()
        left = [name for name in mixed if name not in order]
        if not left:
            return before, (*order, *takers)
        for name in reversed(left):
            found = _worst(_switch(config, before, order, name), seats)
            if found is None and frozenset((*order, name)) not in tried:
                tried.add(frozenset((*order, name)))
                stack.append((*order, name))
            elif found is not None and (nearest is None or found.excess < nearest.excess):
                nearest = found
    return nearest._replace(is_all=not stack) if nearest else None


def _worst(moment: Moment, seats: Sequence[Seats]) -> Overflow | None:
    over = [Overflow(moment, one) for one in seats if one.limit is not None and one.held(moment.terms) > one.limit]
    return max(over, key=lambda one: one.excess, default=None)


def _phase(config: MemoryConfig, phase: int) -> Moment:
    states = config.phases[phase].states
    terms = tuple(
        Term(index, f"{role.name} {states[role.name]}", role.states[states[role.name]])
        for index, role in enumerate(config.roles)
    )
    return Moment(f"in phase {config.phases[phase].name!r}", terms, phase)


def _start(config: MemoryConfig) -> Moment:
    """The worst moment of the start: all that the first phase holds, and as many starting as may."""
    starting = tuple(
        Term(index, f"{role.name} starting", Amount(host=role.start_host), role.start_at_once)
        for index, role in enumerate(config.roles)
    )
    words = f"at the start, into phase {config.phases[0].name!r}"
    return Moment(words, (*_phase(config, 0).terms, *starting), 0, is_start=True)


def _switch(config: MemoryConfig, before: int, switched: Sequence[str], switching: str) -> Moment:
    """The worst moment of a switch: all workers of the role at the same time."""
    old, new = (_phase(config, at % len(config.phases)) for at in (before, before + 1))
    terms = []
    for role, one, other in zip(config.roles, old.terms, new.terms, strict=True):
        if role.name == switching:
            into = config.phases[new.phase].states[role.name]
            terms.append(Term(one.role, f"{one.words} → {into}", one.amount.most(other.amount)))
        else:
            terms.append(other if role.name in switched else one)
    names = [config.phases[at % len(config.phases)].name for at in (before, before + 1)]
    done = f", after {join_words(list(switched))}" if switched else ""
    words = f"from {names[0]!r} to {names[1]!r}, when {switching} switches{done}"
    return Moment(words, tuple(terms), before, tuple(switched), switching)


def _said(term: Term, seats: Seats) -> str:
    count = seats.workers[term.role]
    count = count if term.most is None else min(count, term.most)
    times = f"{count} × " if count > 1 else ""
    return f"{term.words} {times}{size_text(term.on(seats) // count)}"


def _changed(config: MemoryConfig, role: RoleMemory) -> MemoryConfig:
    return replace(config, roles=tuple(role if one.name == role.name else one for one in config.roles))


def _scaled(config: MemoryConfig, percent: int) -> MemoryConfig:
    def scaled(role: RoleMemory) -> RoleMemory:
        states = {name: Amount(*(size * percent // 100 for size in now)) for name, now in role.states.items()}
        return replace(role, states=states, start_host=role.start_host * percent // 100)

    return replace(config, roles=tuple(map(scaled, config.roles)))


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to `most` that fits, where all smaller ones fit as well; 0 if none does."""
    if most < 1 or not fits(1):
        return 0
    low = 1
    while low < most:
        middle = (low + most + 1) // 2
        low, most = (middle, most) if fits(middle) else (low, middle - 1)
    return low


def _told_size(step: int) -> int:
    """Return one of the sizes that hints tell: whole MiB, and from 1 GiB, which is number 1024, tenths of a GiB."""
    return step * _MIB if step < 1024 else (step - 1014) * _GIB // 10


def _size(size: int) -> str:
    return f"{size / _GIB:.1f}GiB".replace(".0GiB", "GiB") if size >= _GIB else f"{size // _MIB}MiB"


def start_at_once_problems(config: MemoryConfig) -> list[Problem]:
    """Return why `roost run` cannot carry out a job: it starts all workers at the same time."""
    return [
        Problem(
            message=f"memory of {role.name!r}: start_at_once is {role.start_at_once}, and roost run starts all workers "
            "at the same time",
            hint="launch the groups one after the other in a script, or leave it out",
            where=role.where("start_at_once"),
        )
        for role in config.roles
        if role.start_at_once is not None
    ]
