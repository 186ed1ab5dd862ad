"""An update of weights as pure state machines: events in, steps out. Nothing here acts.

`Update` is the link's side, and its steps are requests to members. `Membership` is the side of a worker in the link.
`link.py` and `member.py` carry the steps out.

An update prepares, moves and commits. All members are there with the same plan, and sources say where their memory is
(`OFFER`, `PREPARE`); targets that do not know it yet find it (`CONNECT`); every target copies (`MOVE`), with the help
of sources that have to send (`SEND`); then it is decided, and every target takes the version over (`COMMIT`). Until
then anything that goes wrong ends the update for all; afterwards for none.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from roost.comm.move.route import Route
from roost.errors import CallTimedOut, ClusterError, ConfigError, Problem, WorkerDied
from roost.text import join_words
from roost.weights.plan import SyncPlan

if TYPE_CHECKING:
    from roost.comm.move.mover import Offer


class UpdateDecided(CallTimedOut):
    """A target had not answered at the deadline, but all have the version: it takes it over when it goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Detour:
    """A pair of workers between which bytes did not go as planned."""

    source: str
    target: str
    planned: Route
    taken: Route
    why: str

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}: {self.taken.words}, not {self.planned.words}: {self.why}"


class Verb(enum.Enum):
    """The requests that a link makes of a member."""

    LEARN = "learn"
    """Learn a plan; the answer is what of the worker's memory does not fit it.

    The details are the plan, what its sources are asked for, and whether it is the link's own.
    """
    OFFER = "offer"
    """Be there, as a source. The answer is the number of its offer and the offer, or None if the details name it."""
    PREPARE = "prepare"
    """Be there, as a target."""
    CONNECT = "connect"
    """Find the memory of sources, whose offers are the details; the answer is the `Ways` in which their bytes come."""
    MOVE = "move"
    """Copy all that the plan says; the answer is a `Moved`."""
    SEND = "send"
    """Send their parts to the targets in the details, which cannot copy them."""
    COMMIT = "commit"
    """Take the version over; the answer is for how many seconds the weights changed."""
    ABORT = "abort"
    """Break an attempt off."""
    VERSION = "version"
    """Say the version of the weights, or where the details are true the one that others can copy."""
    LEAVE = "leave"
    """Forget the link."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request of a link to one member, in an attempt or outside of any."""

    worker: str
    verb: Verb
    attempt: int = 0
    version: int = -1
    digest: str = ""
    """Which plan it is about."""
    details: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """The time and the bytes of a target's copy."""

    seconds: Mapping[str, float]
    """By source."""
    detours: Mapping[str, str] = field(default_factory=dict)
    """By source: why its bytes came by another route than it was connected by."""


Ways = Mapping[str, tuple[Route, str]]
"""By source: how its bytes come to a target, and why if that is not as planned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One update, as the link sees it. Each event returns what it is then, and whom to ask for what."""

    plan: SyncPlan
    attempt: int
    version: int
    offers: Mapping[str, tuple[int, Offer]] = field(default_factory=dict)
    """By source: the number of its last offer, and the offer."""
    routes: Mapping[str, Ways] | None = None
    """By target; None while targets do not know where the memory of the sources is."""
    phase: Verb = Verb.PREPARE
    """The request to the targets now. Once they commit, it is decided: they take the version over, whatever happens."""
    waiting: frozenset[tuple[str, Verb]] = frozenset()
    """Who has not answered yet, and what."""
    moved: Mapping[str, Moved] = field(default_factory=dict)
    pauses: Mapping[str, float] = field(default_factory=dict)
    """By target: for how many seconds its weights changed."""
    error: Exception | None = None
    """Its error at the end; of the errors after the decision the worst."""
    is_over: bool = False

    @property
    def sources(self) -> list[str]:
        """The workers that something is copied from."""
        return [worker for worker, (sent, _) in self.plan.bytes_by_worker().items() if sent]

    def begin(self) -> tuple[Update, Sequence[Request]]:
        """Return the first steps."""
        known = {worker: number for worker, (number, _) in self.offers.items()}
        offers = [self._request(worker, Verb.OFFER, known.get(worker, 0)) for worker in self.sources]
        return self._ask(Verb.PREPARE, offers)

    def answered(self, request: Request, value: Any = None) -> tuple[Update, Sequence[Request]]:
        """Take in the answer of a member."""
        if self.is_over:
            return self, ()
        worker = request.worker
        now = replace(self, waiting=self.waiting - {(worker, request.verb)})
        match request.verb:
            case Verb.OFFER if value is not None:
                # Wherever it is read from: until all know the new place, none of them does.
                now = replace(now, offers={**self.offers, worker: value}, routes=None)
                if wrong := self.plan.source.misfits(worker, value[1].arrays):
                    # Nothing is copied from it.
                    return now._fail(ConfigError([Problem(message=line) for line in wrong]))
            case Verb.CONNECT:
                now = replace(now, routes={**(self.routes or {}), worker: value})
            case Verb.MOVE:
                now = replace(now, moved={**self.moved, worker: value})
            case Verb.COMMIT:
                now = replace(now, pauses={**self.pauses, worker: value})
        return now._go_on()

    def failed(self, request: Request, error: Exception) -> tuple[Update, Sequence[Request]]:
        """Take in that a request failed, or that its member has ended."""
        if self.is_over:
            return self, ()
        now = replace(self, waiting=self.waiting - {(request.worker, request.verb)})
        if self.phase is not Verb.COMMIT:
            return now._fail(error)
        is_worse = isinstance(error, WorkerDied) and not isinstance(self.error, WorkerDied)
        return replace(now, error=error if self.error is None or is_worse else self.error)._go_on()

    def late(self) -> tuple[Update, Sequence[Request]]:
        """Take in that the deadline has passed."""
        if self.is_over:
            return self, ()
        missing = join_words(sorted({worker for worker, _ in self.waiting}))
        if self.phase is not Verb.COMMIT:
            what = f"{self.phase.value!r} of update {self.attempt}, to version {self.version}"
            return self._fail(CallTimedOut(f"no answer to {what}, from {missing} in time"))
        having = join_words(sorted(self.pauses)) or "none"
        decided = UpdateDecided(
            f"version {self.version} is decided, and in use by {having}; not heard from by the deadline, to take it "
            f"over when it goes on: {missing}",
            hint="`versions` says who has it; a worker that stays silent can be restarted, and filled with `refill`",
        )
        return replace(self, is_over=True, error=self.error if isinstance(self.error, WorkerDied) else decided), ()

    def waits_for(self) -> str:
        """Say who has not answered yet, and what."""
        workers = sorted({worker for worker, _ in self.waiting})
        more = f" and {len(workers) - 3} more" if len(workers) > 3 else ""
        return f"{', '.join(workers[:3])}{more}, {self.phase.value} of version {self.version}"

    def give_up(self) -> Sequence[Request]:
        """Return the steps with which an update ends that nobody waits for any more; none once it is decided."""
        if self.is_over or self.phase is Verb.COMMIT:
            return ()
        workers = dict.fromkeys([*self.sources, *self.plan.target.workers])
        return [self._request(worker, Verb.ABORT) for worker in workers]

    @property
    def detours(self) -> list[Detour]:
        """Every pair between which bytes did not go as planned, and why."""
        found = []
        for target, ways in (self.routes or {}).items():
            late = self.moved[target].detours if target in self.moved else {}
            for source, (taken, why) in ways.items():
                planned = self.plan.route(source, target)
                # NCCL can refuse when it is used, and then the bytes go by messages.
                refused = late.get(source, "")
                if refused:
                    taken = Route.NETWORK if planned is Route.NETWORK else Route.RELAY
                if reason := why or refused:
                    found.append(Detour(source=source, target=target, planned=planned, taken=taken, why=reason))
        return found

    def _request(self, worker: str, verb: Verb, details: Any = None) -> Request:
        return Request(worker, verb, self.attempt, self.version, self.plan.digest, details)

    def _ask(
        self, phase: Verb, others: Sequence[Request] = (), details: Mapping[str, Any] | None = None
    ) -> tuple[Update, Sequence[Request]]:
        """Begin a phase: ask the targets for it, with details by target, and others for what belongs to it."""
        mine = [self._request(worker, phase, (details or {}).get(worker)) for worker in self.plan.target.workers]
        steps = [*others, *mine]
        return replace(self, phase=phase, waiting=frozenset((step.worker, step.verb) for step in steps)), steps

    def _go_on(self) -> tuple[Update, Sequence[Request]]:
        """Begin the next phase, if everyone has answered."""
        if self.waiting:
            return self, ()
        if self.phase is Verb.PREPARE and self.routes is None:
            wanted: dict[str, dict[str, Offer]] = {target: {} for target in self.plan.target.workers}
            for source, target in self.plan.traffic:
                wanted[target][source] = self.offers[source][1]
            return self._ask(Verb.CONNECT, details=wanted)
        if self.phase in (Verb.PREPARE, Verb.CONNECT):
            sending: dict[str, list[str]] = {}
            for target, ways in (self.routes or {}).items():
                for source, (route, _) in ways.items():
                    if route.is_sent:
                        sending.setdefault(source, []).append(target)
            sends = [self._request(source, Verb.SEND, tuple(targets)) for source, targets in sending.items()]
            return self._ask(Verb.MOVE, sends)
        if self.phase is Verb.MOVE:
            return self._ask(Verb.COMMIT)
        return replace(self, is_over=True), ()

    def _fail(self, error: Exception) -> tuple[Update, Sequence[Request]]:
        return replace(self, is_over=True, error=error), self.give_up()


class Step(enum.Enum):
    """The steps of a member that serves a request."""

    BREAK_OFF = enum.auto()
    """Tell the worker that the change of its weights, which is under way, does not become a version."""
    OFFER = enum.auto()
    """Answer with an offer, unless it is the one that is known."""
    CHECK = enum.auto()
    """Check that the version is newer than that of the weights, and that the memory of these fits the plan."""
    CONNECT = enum.auto()
    """Find the memory of sources."""
    SEND = enum.auto()
    """Send to targets that cannot copy."""
    BEGIN = enum.auto()
    """Begin to change the weights that are in use: they have no version until `END`."""
    COPY = enum.auto()
    """Copy everything that the plan says."""
    TAKE_OVER = enum.auto()
    """Copy what lies beside the weights over them."""
    END = enum.auto()
    """The weights that were written to are a whole version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The state of a worker in a link: it refuses messages of older attempts, however late they come."""

    who: str
    attempt: int = 0
    ended: int = 0
    """The last attempt that was broken off."""
    is_changing: bool = False
    """Whether weights that are in use are being written to."""
    has_all: bool = False
    """Whether everything of the attempt has been copied."""

    def check(self, attempt: int) -> None:
        """Raise ClusterError if an attempt was broken off, or a later one has begun."""
        if attempt < self.attempt or attempt <= self.ended:
            raise ClusterError(f"update {attempt} of {self.who} was broken off")

    def abort(self, attempt: int) -> Membership:
        """Note at once that an attempt is broken off: what is under way finds out."""
        return replace(self, ended=max(self.ended, attempt))

    def take(self, request: Request, *, overwrites: bool) -> tuple[Membership, Sequence[Step]]:
        """Return what follows from a request of an attempt; ClusterError refuses it.

        With `overwrites`, moving writes to weights that are in use.
        """
        ends = [Step.BREAK_OFF] if self.is_changing else []
        if request.verb is Verb.ABORT:
            is_over = self.attempt <= self.ended
            return (replace(self, is_changing=False), ends) if is_over else (self, ())
        self.check(request.attempt)
        match request.verb:
            case Verb.OFFER | Verb.PREPARE:
                now = replace(self, attempt=request.attempt, is_changing=False, has_all=False)
                return now, [*ends, Step.OFFER if request.verb is Verb.OFFER else Step.CHECK]
            case Verb.MOVE if overwrites:
                return replace(self, is_changing=True), [Step.BEGIN, Step.COPY]
            case Verb.MOVE:
                return self, [Step.COPY]
            case Verb.COMMIT if not self.has_all:
                raise ClusterError(f"{self.who} has not got all of update {request.attempt}")
            case Verb.COMMIT if self.is_changing:
                return replace(self, is_changing=False), [Step.END]
            case Verb.COMMIT:
                return self, [Step.BEGIN, Step.TAKE_OVER, Step.END]
        return self, [Step.CONNECT if request.verb is Verb.CONNECT else Step.SEND]
