"""What happens in an update of weights, as pure state machines: events in, steps out. Nothing here acts.

`Update` is the link's side, `Membership` that of a worker in the link; `link.py` and `member.py` carry the steps out.

An update prepares, moves and commits. All members are there with the same plan, and sources say where their memory is
(`Prepare`); targets that do not know it yet find it (`Connect`); every target copies (`Move`), with the help of sources
that have to send (`Send`); then it is decided, and every target takes the version over (`Commit`). Until then anything
that goes wrong ends the update for all; afterwards for none.
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


# What a link asks of its members.


@dataclass(frozen=True, slots=True)
class Learn:
    """Learn a plan; the answer is what of the worker's memory does not fit it."""

    plan: SyncPlan
    method: str
    """What sources are asked for: `offer`, or `accept` if they are other targets."""
    is_main: bool
    """Whether it is the link's own plan."""


@dataclass(frozen=True, slots=True)
class Prepare:
    """Be there; a source answers with the number of its offer and the offer, or None if that number is known."""

    attempt: int
    version: int
    digest: str
    is_source: bool
    known: int = 0
    """The number of the offer that the link knows; 0 for none."""


@dataclass(frozen=True, slots=True)
class Connect:
    """Find the memory of sources; the answer is how the bytes of each come, and why if that is not as planned."""

    digest: str
    offers: Mapping[str, Offer]


@dataclass(frozen=True, slots=True)
class Move:
    """Copy all that the plan says; the answer is a `Moved`."""

    attempt: int
    digest: str


@dataclass(frozen=True, slots=True)
class Send:
    """Send their parts to targets that cannot copy them."""

    attempt: int
    digest: str
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """Take the version over; the answer is for how many seconds the weights changed."""

    attempt: int
    digest: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Break an attempt off."""

    attempt: int


@dataclass(frozen=True, slots=True)
class AskVersion:
    """Say the version of the weights, or with `to_copy` the one that others can copy."""

    to_copy: bool = False


@dataclass(frozen=True, slots=True)
class Leave:
    """Forget the link."""


Request = Learn | Prepare | Connect | Move | Send | Commit | Abort | AskVersion | Leave


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What it took a target to copy."""

    seconds: Mapping[str, float]
    """By source."""
    detours: Mapping[str, str] = field(default_factory=dict)
    """By source: why its bytes came by another route than it was connected by."""


# The link's side: events.


@dataclass(frozen=True, slots=True)
class Answered:
    """A member has answered a request."""

    worker: str
    request: Request
    value: Any = None


@dataclass(frozen=True, slots=True)
class Failed:
    """A request failed, or its member has ended."""

    worker: str
    request: Request
    error: Exception


@dataclass(frozen=True, slots=True)
class Late:
    """The deadline has passed."""


Event = Answered | Failed | Late


# The link's side: steps.


@dataclass(frozen=True, slots=True)
class Ask:
    """Send a request to a member, whose answer is an event."""

    worker: str
    request: Request


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a request that needs no answer, and only to a process that is there."""

    worker: str
    request: Request


@dataclass(frozen=True, slots=True)
class Decide:
    """All targets have this version: from here on they take it over, whatever happens to some of them."""

    version: int


@dataclass(frozen=True, slots=True)
class End:
    """The update is over: with an error, or well."""

    error: Exception | None = None


LinkStep = Ask | Tell | Decide | End


class Phase(enum.Enum):
    """How far an update is."""

    PREPARING = "prepare"
    CONNECTING = "connect"
    MOVING = "move"
    COMMITTING = "commit"
    OVER = "over"


Routes = Mapping[str, Mapping[str, tuple[Route, str]]]
"""By target and source: how bytes come, and why if that is not as planned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One update, as the link sees it."""

    plan: SyncPlan
    attempt: int
    version: int
    offers: Mapping[str, tuple[int, Offer]] = field(default_factory=dict)
    """By source: the number of its last offer, and the offer."""
    routes: Routes | None = None
    """None while targets do not know where the memory of the sources is."""
    phase: Phase = Phase.PREPARING
    waiting: frozenset[tuple[str, str]] = frozenset()
    """Who has not answered yet, and what."""
    moved: Mapping[str, Moved] = field(default_factory=dict)
    pauses: Mapping[str, float] = field(default_factory=dict)
    """By target: for how many seconds its weights changed."""
    errors: tuple[Exception, ...] = ()
    """Those of targets that did not take over what was decided."""

    @property
    def sources(self) -> list[str]:
        """The workers that something is copied from."""
        return [worker for worker, (sent, _) in self.plan.bytes_by_worker().items() if sent]

    def begin(self) -> tuple[Update, Sequence[LinkStep]]:
        """Return the first steps."""
        digest, numbers = self.plan.digest, {worker: number for worker, (number, _) in self.offers.items()}
        return self._ask(
            Phase.PREPARING,
            [
                *(
                    Ask(worker, Prepare(self.attempt, self.version, digest, True, numbers.get(worker, 0)))
                    for worker in self.sources
                ),
                *(Ask(worker, Prepare(self.attempt, self.version, digest, False)) for worker in self._targets),
            ],
        )

    def take(self, event: Event) -> tuple[Update, Sequence[LinkStep]]:
        """Return what follows from an event."""
        if self.phase is Phase.OVER:
            return self, ()
        if isinstance(event, Late):
            return self._late()
        now = replace(self, waiting=self.waiting - {_key(event.worker, event.request)})
        if isinstance(event, Failed):
            if self.phase is not Phase.COMMITTING:
                return now._fail(event.error)
            now = replace(now, errors=(*self.errors, event.error))
        else:
            now, wrong = now._note(event)
            if wrong:
                return now._fail(ConfigError([Problem(message=line) for line in wrong]))
        return now._go_on() if not now.waiting else (now, ())

    def give_up(self) -> Sequence[LinkStep]:
        """Return the steps with which an update ends that nobody waits for any more; none once it is decided."""
        if self.phase in (Phase.COMMITTING, Phase.OVER):
            return ()
        return [Tell(worker, Abort(self.attempt)) for worker in dict.fromkeys([*self.sources, *self._targets])]

    @property
    def detours(self) -> list[Detour]:
        """Every pair between which bytes did not go as planned, and why."""
        found = []
        for target, routes in (self.routes or {}).items():
            late = self.moved[target].detours if target in self.moved else {}
            for source, (taken, why) in routes.items():
                planned = self.plan.route(source, target)
                # NCCL can refuse when it is used, and then the bytes go by messages.
                refused = late.get(source, "")
                if refused:
                    taken = Route.NETWORK if planned is Route.NETWORK else Route.RELAY
                if reason := why or refused:
                    found.append(Detour(source=source, target=target, planned=planned, taken=taken, why=reason))
        return found

    @property
    def _targets(self) -> Sequence[str]:
        return self.plan.target.workers

    def _ask(self, phase: Phase, asks: list[Ask], *first: LinkStep) -> tuple[Update, Sequence[LinkStep]]:
        waiting = frozenset(_key(ask.worker, ask.request) for ask in asks)
        return replace(self, phase=phase, waiting=waiting), [*first, *asks]

    def _note(self, event: Answered) -> tuple[Update, list[str]]:
        """Note an answer; returns what of an offer does not fit the plan: nothing is copied from it then."""
        value, worker = event.value, event.worker
        match event.request:
            case Prepare(is_source=True) if value is not None:
                number, offer = value
                # Wherever it is read from: until all know the new place, none of them does.
                now = replace(self, offers={**self.offers, worker: (number, offer)}, routes=None)
                return now, self.plan.source.misfits(worker, offer.arrays)
            case Connect():
                return replace(self, routes={**(self.routes or {}), worker: value}), []
            case Move():
                return replace(self, moved={**self.moved, worker: value}), []
            case Commit():
                return replace(self, pauses={**self.pauses, worker: value}), []
        return self, []

    def _go_on(self) -> tuple[Update, Sequence[LinkStep]]:
        """Begin the next phase: everyone has answered."""
        digest = self.plan.digest
        if self.phase is Phase.PREPARING and self.routes is None:
            wanted: dict[str, dict[str, Offer]] = {target: {} for target in self._targets}
            for source, target in self.plan.traffic:
                wanted[target][source] = self.offers[source][1]
            return self._ask(Phase.CONNECTING, [Ask(one, Connect(digest, offers)) for one, offers in wanted.items()])
        if self.phase in (Phase.PREPARING, Phase.CONNECTING):
            sending: dict[str, list[str]] = {}
            for target, routes in (self.routes or {}).items():
                for source, (route, _) in routes.items():
                    if route.is_sent:
                        sending.setdefault(source, []).append(target)
            sends = [Ask(one, Send(self.attempt, digest, tuple(targets))) for one, targets in sending.items()]
            return self._ask(Phase.MOVING, [*sends, *(Ask(one, Move(self.attempt, digest)) for one in self._targets)])
        if self.phase is Phase.MOVING:
            commits = [Ask(one, Commit(self.attempt, digest)) for one in self._targets]
            return self._ask(Phase.COMMITTING, commits, Decide(self.version))
        return replace(self, phase=Phase.OVER), [End(_worst(self.errors))]

    def _fail(self, error: Exception) -> tuple[Update, Sequence[LinkStep]]:
        return replace(self, phase=Phase.OVER), [*self.give_up(), End(error)]

    def _late(self) -> tuple[Update, Sequence[LinkStep]]:
        missing = join_words(sorted({worker for worker, _ in self.waiting}))
        if self.phase is not Phase.COMMITTING:
            what = f"{self.phase.value!r} of update {self.attempt}, to version {self.version}"
            return self._fail(CallTimedOut(f"no answer to {what}, from {missing} in time"))
        having = join_words(sorted(self.pauses)) or "none"
        error: Exception = UpdateDecided(
            f"version {self.version} is decided, and in use by {having}; not heard from by the deadline, to take it "
            f"over when it goes on: {missing}",
            hint="`versions` says who has it; a worker that stays silent can be restarted, and filled with `refill`",
        )
        dead = _worst(self.errors)
        return replace(self, phase=Phase.OVER), [End(dead if isinstance(dead, WorkerDied) else error)]


def _key(worker: str, request: Request) -> tuple[str, str]:
    # A worker can be a source and a target.
    return worker, f"{type(request).__name__} {request.is_source if isinstance(request, Prepare) else ''}"


def _worst(errors: Sequence[Exception]) -> Exception | None:
    return next((error for error in errors if isinstance(error, WorkerDied)), errors[0] if errors else None)


# A member's side.


@dataclass(frozen=True, slots=True)
class BreakOff:
    """Tell the worker that the change of its weights, which is under way, does not become a version."""

    why: str


@dataclass(frozen=True, slots=True)
class CheckTarget:
    """Check that the version is newer than that of the weights, and that the memory of these fits the plan."""

    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class OfferWeights:
    """Answer with an offer, unless it is the one that is known."""

    digest: str
    known: int


@dataclass(frozen=True, slots=True)
class BeginChange:
    """Begin to change the weights that are in use: they have no version until `EndChange`."""

    version: int


@dataclass(frozen=True, slots=True)
class CopyAll:
    """Copy everything that the plan says."""

    digest: str


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Copy what lies beside the weights over them."""

    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class EndChange:
    """The weights that were written to are a whole version."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer with an error."""

    error: Exception


MemberStep = BreakOff | CheckTarget | OfferWeights | BeginChange | CopyAll | TakeOver | EndChange | Refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """What a worker in a link may do now: late messages of older attempts are refused, however late they come."""

    who: str
    attempt: int = 0
    version: int = -1
    """The version that the attempt brings."""
    ended: int = 0
    """The last attempt that was broken off."""
    is_changing: bool = False
    """Whether weights that are in use are being written to."""
    has_all: bool = False
    """Whether everything of the attempt has been copied."""

    def is_over(self, attempt: int) -> bool:
        """Whether an attempt was broken off, or a later one has begun."""
        return attempt < self.attempt or attempt <= self.ended

    def abort(self, attempt: int) -> Membership:
        """Note at once that an attempt is broken off: what is under way finds out."""
        return replace(self, ended=max(self.ended, attempt))

    def take(self, request: Request, *, overwrites: bool) -> tuple[Membership, Sequence[MemberStep]]:
        """Return what follows from a request; with `overwrites`, moving writes to weights that are in use."""
        if isinstance(request, Abort):
            return (
                self.broken_off(f"update {request.attempt} was broken off")
                if self.is_over(self.attempt)
                else (self, ())
            )
        if isinstance(request, Prepare | Move | Send | Commit) and self.is_over(request.attempt):
            return self, [Refuse(self.over_error(request.attempt))]
        match request:
            case Prepare():
                before, steps = self.broken_off(f"update {self.attempt} was not completed")
                now = replace(before, attempt=request.attempt, version=request.version, has_all=False)
                if request.is_source:
                    return now, [*steps, OfferWeights(request.digest, request.known)]
                return now, [*steps, CheckTarget(request.version, request.digest)]
            case Move() if overwrites:
                return replace(self, is_changing=True), [BeginChange(self.version), CopyAll(request.digest)]
            case Move():
                return self, [CopyAll(request.digest)]
            case Commit() if not self.has_all:
                return self, [Refuse(ClusterError(f"{self.who} has not got all of update {request.attempt}"))]
            case Commit() if self.is_changing:
                return replace(self, is_changing=False), [EndChange()]
            case Commit():
                return self, [TakeOver(self.version, request.digest)]
        return self, ()

    def copied(self) -> Membership:
        """Note that everything was copied."""
        return replace(self, has_all=True)

    def broken_off(self, why: str) -> tuple[Membership, Sequence[MemberStep]]:
        """End a change of the weights that is under way, if there is one."""
        return replace(self, is_changing=False), [BreakOff(why)] if self.is_changing else []

    def over_error(self, attempt: int) -> ClusterError:
        """Make the error for what belongs to an attempt that is over."""
        return ClusterError(f"update {attempt} of {self.who} was broken off")
