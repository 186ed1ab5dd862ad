"""`WeightLink`: moves the weights of a group of workers into another one, a version at a time, all or nothing."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from roost.comm.process import process_talk
from roost.comm.wire.connection import Frame
from roost.comm.wire.loop import Handle, Loop
from roost.deadline import Deadline
from roost.errors import CallTimedOut, ClusterError, ConfigError, Problem, WorkerDied
from roost.runtime.events.emitter import emitter
from roost.runtime.groups.group import WorkerGroup
from roost.text import join_words
from roost.weights.layout import Layout
from roost.weights.limits import MARGIN_SECONDS, PEER_SECONDS, UPDATE_SECONDS
from roost.weights.plan import BUCKET_BYTES, Place, SyncPlan, make_sync_plan
from roost.weights.update import (
    Answered,
    Ask,
    AskVersion,
    Decide,
    Detour,
    End,
    Event,
    Failed,
    Late,
    Learn,
    Leave,
    Phase,
    Request,
    Routes,
    Tell,
    Update,
)
from roost.weights.versions import NO_VERSION, check_newer

if TYPE_CHECKING:
    from roost.comm.move.mover import Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """What an update took."""

    version: int
    nbytes: int
    seconds: float
    prepare_seconds: float
    move_seconds: float
    pause_seconds: float
    """The longest time in which a target's weights were changing."""
    slowest: str
    """The target that took longest to copy, and from which source."""
    detours: tuple[Detour, ...] = ()
    """Every pair of workers between which bytes did not go as planned, and why."""

    @property
    def gigabytes_per_second(self) -> float:
        """How much was moved in a second, in all."""
        return self.nbytes / 1e9 / max(self.seconds, 1e-9)

    def __str__(self) -> str:
        return (
            f"version {self.version}: {self.nbytes / 1e9:.3g} GB in {1e3 * self.seconds:.1f} ms "
            f"({self.gigabytes_per_second:.1f} GB/s), targets paused for {1e3 * self.pause_seconds:.1f} ms"
        )


def ask_layout(group: WorkerGroup[Any], role: str, timeout: float = UPDATE_SECONDS) -> Layout:
    """Return what the workers of a group hold: `offer` asks sources, `accept` asks targets."""
    reports = group.call("report_weights", role).wait(timeout)
    return Layout.from_reports({f"{group.name}:{rank}": held for rank, held in zip(group.ranks, reports, strict=True)})


def places_in(*groups: WorkerGroup[Any]) -> dict[str, Place]:
    """Return where the workers of groups are."""
    return {f"{group.name}:{one.rank}": Place.of(one) for group in groups for one in group.placements}


class WeightLink:
    """The way from the weights of one group to those of another.

    Targets get a new version beside the old one, and take it over together when all have it; with `in_place` they get
    it in the place of the old one, which takes no memory, and a target whose update is broken off has no version until
    the next one. With `may_share`, weights of sources in host memory move into shared memory once.
    """

    def __init__(
        self,
        plan: SyncPlan,
        source: WorkerGroup[Any],
        target: WorkerGroup[Any],
        *,
        in_place: bool = False,
        may_share: bool = True,
        timeout: float = UPDATE_SECONDS,
    ) -> None:
        """Open everything once; ConfigError lists all that does not fit the plan, in any of the workers."""
        self.plan = plan
        self._whole = plan
        self._missing: frozenset[str] = frozenset()
        """Who is in the whole plan, and not in the present one."""
        self.version = NO_VERSION
        """The highest version that a target has; -1 if none has any."""
        self._begun = NO_VERSION
        """The highest version that an update was begun to: the sources have it, or a later one."""
        self._groups = {source.name: source, target.name: target}
        self._options = in_place, may_share
        self._name = f"{source.name}-{target.name}-{os.getpid()}-{time.monotonic_ns():x}"
        self._attempts = itertools.count(1)
        self._lock = threading.Lock()
        self._offers: dict[tuple[str, str], tuple[int, Offer]] = {}
        """By worker and what it was asked for: its last offer, and the number of that."""
        self._routes: dict[str, Routes] = {}
        """By digest of a plan: how bytes come to those of its targets that know where the sources' memory is."""
        self._endpoint = process_talk().messages.endpoint
        deadline = Deadline.after(timeout)
        try:
            versions = self._open(self._members(plan), deadline)
            self.version = max(versions[worker] for worker in plan.target.workers)
            self._teach(plan, self._members(plan), deadline)
        except BaseException:
            self.close()
            raise

    @classmethod
    def between(
        cls,
        source: WorkerGroup[Any],
        target: WorkerGroup[Any],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        timeout: float = UPDATE_SECONDS,
        **options: Any,
    ) -> WeightLink:
        """Ask the workers what they hold, plan, and open a link."""
        deadline = Deadline.after(timeout)
        offered = ask_layout(source, "offer", timeout)
        wanted = ask_layout(target, "accept", deadline.left)
        plan = make_sync_plan(offered, wanted, places_in(source, target), bucket_bytes=bucket_bytes)
        return cls(plan, source, target, timeout=deadline.left, **options)

    def update(self, version: int, timeout: float = UPDATE_SECONDS) -> UpdateReport:
        """Give all targets the present weights of the sources, as a version that is higher than the last.

        If a worker dies or is late, the error names it, and no target takes the version over; a worker that has died
        can be left out with `without`, or restarted and then filled with `refill`, or with `rejoin` if it is a source.
        `UpdateDecided` says that all have the version: a target that is late takes it over when it goes on.
        """
        deadline = Deadline.after(timeout)
        with self._alone(deadline):
            check_newer(version, self.version, "the link")
            self._begun = version
            return self._update(self.plan, version, deadline)

    def versions(self, timeout: float = UPDATE_SECONDS) -> dict[str, int]:
        """Return the version that each target says it has; -1 for one without a whole version."""
        return self._ask(self.plan.target.workers, AskVersion(), Deadline.after(timeout))

    def without(self, *workers: str, timeout: float = UPDATE_SECONDS) -> None:
        """Go on without some workers, such as those that have died; ConfigError if others cannot replace them."""
        deadline = Deadline.after(timeout)
        with self._alone(deadline):
            self._go_on(self._missing | set(workers), deadline)
            self._dismiss(workers)

    def rejoin(self, *workers: str, timeout: float = UPDATE_SECONDS) -> None:
        """Let workers that were restarted take part again; a target has no version until `refill` or an update."""
        deadline = Deadline.after(timeout)
        with self._alone(deadline):
            self._open(workers, deadline)
            if self._missing.isdisjoint(workers):
                self._teach(self.plan, workers, deadline)
            else:
                self._go_on(self._missing - set(workers), deadline)

    def _go_on(self, missing: frozenset[str], deadline: Deadline) -> None:
        plan = self._whole.without(missing) if missing else self._whole
        self._teach(plan, self._members(plan), deadline)
        self.plan, self._missing = plan, missing

    def refill(self, worker: str, timeout: float = UPDATE_SECONDS) -> UpdateReport:
        """Bring a target that was restarted to the present version, from the nearest worker that has it.

        If that is no other target, it is the sources, whose weights must be the same as in the last update;
        ClusterError if an update to a later version was begun.
        """
        if self.version < 0:
            raise ConfigError("there is no version yet", hint="the first update fills all targets")
        if worker not in self._whole.target.workers:
            raise ConfigError(f"{worker} is not a target: there are {join_words(self._whole.target.workers)}")
        deadline = Deadline.after(timeout)
        self.rejoin(worker, timeout=timeout)
        with self._alone(deadline):
            # What a trainer has may be newer.
            peers = self.plan.target.only(self._peers(worker, deadline))
            try:
                plan, method = self._plan_fill(peers, worker), "accept"
            except ConfigError:
                # They do not have everything between them.
                if self._begun > self.version:
                    what = f"no other target has version {self.version}, and the sources have version {self._begun}"
                    raise ClusterError(what, hint=f"call update: {worker} is in the link again") from None
                plan, method = self._plan_fill(self.plan.source, worker), "offer"
            self._teach(plan, self._members(plan), deadline, method)
            return self._update(plan, self.version, deadline, method)

    def close(self) -> None:
        """Let the workers forget the link; those that have died need not."""
        self._offers.clear()
        self._dismiss(self._members(self.plan))

    def _dismiss(self, workers: Iterable[str]) -> None:
        for worker in workers:
            self._tell(worker, Leave())

    @contextlib.contextmanager
    def _alone(self, deadline: Deadline) -> Iterator[None]:
        """Let one operation of the link run at a time."""
        if not self._lock.acquire(timeout=deadline.left):
            raise CallTimedOut(f"another update of {self._name} is under way")
        try:
            yield
        finally:
            self._lock.release()

    def _plan_fill(self, source: Layout, worker: str) -> SyncPlan:
        target = self.plan.target.only([worker])
        return make_sync_plan(source, target, self.plan.places, bucket_bytes=self.plan.bucket_bytes)

    def _peers(self, worker: str, deadline: Deadline) -> list[str]:
        """Return the other targets that have the present version; one that does not answer soon is none."""
        others = [other for other in self.plan.target.workers if other != worker]
        soon = deadline.within(PEER_SECONDS)
        asked = {other: self._request(other, AskVersion(to_copy=True), soon) for other in others}
        found = []
        for other, handle in asked.items():
            with contextlib.suppress(ClusterError, CallTimedOut):
                if self._answer(handle, soon) == self.version:
                    found.append(other)
        return found

    def __enter__(self) -> WeightLink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<WeightLink {self._name} at version {self.version}: {self.plan!r}>"

    def _update(self, plan: SyncPlan, version: int, deadline: Deadline, method: str = "offer") -> UpdateReport:
        """Carry out the steps of an update, and tell it what comes of them."""
        known = {
            worker: self._offers[worker, method] for worker in plan.source.workers if (worker, method) in self._offers
        }
        update = Update(
            plan=plan,
            attempt=next(self._attempts),
            version=version,
            offers=known,
            routes=self._routes.get(plan.digest),
        )
        arrived = _Arrivals(self._endpoint.loop, lambda: f"{update.phase.value} of version {version}")
        times: dict[Phase, float] = {Phase.PREPARING: time.monotonic()}
        update, steps = update.begin()
        try:
            while update.phase is not Phase.OVER or steps:
                times.setdefault(update.phase, time.monotonic())
                for step in steps:
                    match step:
                        case Ask():
                            arrived.expect(step, self._request(step.worker, step.request, deadline))
                        case Tell():
                            self._tell(step.worker, step.request)
                        case Decide():
                            self.version = step.version
                        case End() if step.error is not None:
                            raise step.error
                steps = ()
                if update.phase is not Phase.OVER:
                    before = update.phase
                    update, steps = update.take(arrived.next(deadline))
                    if update.phase is Phase.MOVING is not before:
                        self._remember(update, known, method)
        except BaseException:
            for step in update.give_up():
                if isinstance(step, Tell):
                    self._tell(step.worker, step.request)
            raise
        return self._report(update, times)

    def _remember(self, update: Update, known: Mapping[str, tuple[int, Offer]], method: str) -> None:
        """Keep what members need not say again: all targets know where the memory of the sources is."""
        if any(known.get(worker) is not offer for worker, offer in update.offers.items()):
            # Other plans read from it too: none of their targets knows the new place.
            self._routes.clear()
            self._offers |= {(worker, method): offer for worker, offer in update.offers.items()}
        self._routes[update.plan.digest] = update.routes or {}

    def _report(self, update: Update, times: Mapping[Phase, float]) -> UpdateReport:
        taken = [(took, target, name) for target, moved in update.moved.items() for name, took in moved.seconds.items()]
        slow = max(taken, default=None)
        began, prepared, done = (times[phase] for phase in (Phase.PREPARING, Phase.MOVING, Phase.COMMITTING))
        report = UpdateReport(
            version=update.version,
            nbytes=sum(update.plan.traffic.values()),
            seconds=time.monotonic() - began,
            prepare_seconds=prepared - began,
            move_seconds=done - prepared,
            pause_seconds=max(update.pauses.values(), default=0.0),
            slowest="" if slow is None else f"{slow[1]} from {slow[2]}",
            detours=tuple(update.detours),
        )
        emitter.note(
            "weights",
            " -> ".join(self._groups),
            version=report.version,
            d=round(report.seconds, 4),
            pause=round(report.pause_seconds, 6),
            size=report.nbytes >> 20,
            slowest=report.slowest or None,
            detours=len(report.detours) or None,
        )
        return report

    def _members(self, plan: SyncPlan) -> list[str]:
        return list(dict.fromkeys([*plan.source.workers, *plan.target.workers]))

    def _open(self, workers: Iterable[str], deadline: Deadline) -> dict[str, int]:
        """Let workers take part, by a call: one that has never communicated begins to. Returns their versions."""
        calls = {}
        for worker in workers:
            name, _, rank = worker.rpartition(":")
            group = self._groups[name]
            calls[worker] = group.on(int(rank)).call("open_weights", self._name, *self._options)
            self._offers = {key: offer for key, offer in self._offers.items() if key[0] != worker}
        self._routes.clear()
        return {worker: call.wait(deadline.left)[0] for worker, call in calls.items()}

    def _teach(self, plan: SyncPlan, workers: Iterable[str], deadline: Deadline, method: str = "") -> None:
        """Tell workers a plan, the link's own unless it says what its sources are asked for."""
        wrong = self._ask(list(workers), Learn(plan, method or "offer", not method), deadline)
        self._routes.pop(plan.digest, None)
        if problems := [Problem(message=line) for lines in wrong.values() for line in lines]:
            raise ConfigError(problems)

    def _ask(self, workers: Sequence[str], request: Request, deadline: Deadline) -> dict[str, Any]:
        """Ask all at once, and return their answers; if some fail, the error of the first that died, or the first."""
        handles = {worker: self._request(worker, request, deadline) for worker in workers}
        answers: dict[str, Any] = {}
        errors: list[Exception] = []
        for worker, handle in handles.items():
            try:
                answers[worker] = self._answer(handle, deadline)
            except (ClusterError, ConfigError) as error:
                errors.append(error)
        if errors:
            raise next((error for error in errors if isinstance(error, WorkerDied)), errors[0])
        return answers

    def _tell(self, worker: str, request: Request) -> None:
        """Ask without waiting, and only a process that is there: the next one of the name has nothing to end."""
        with contextlib.suppress(ClusterError):
            if worker in self._endpoint.peers and self._endpoint.peers[worker].is_open:
                self._request(worker, request, Deadline.after(UPDATE_SECONDS))

    def _request(self, worker: str, request: Request, deadline: Deadline) -> Handle[Any]:
        late = f"{worker} has not answered {type(request).__name__.lower()!r} of a link of weights"
        handle: Handle[Any] = Handle(self._endpoint.loop, late=lambda: late)
        # What is late gets a moment to say so itself.
        seconds = max(0.1, deadline.left - MARGIN_SECONDS)
        try:
            self._endpoint.request(worker, b"", self._pickled(request, seconds), (), handle)
        except ClusterError as error:
            handle.fail(error)
        return handle

    def _pickled(self, request: Request, seconds: float) -> bytes:
        return pickle.dumps((self._name, request, seconds))

    def _answer(self, handle: Handle[Any], deadline: Deadline) -> Any:
        return _value_of(handle.wait(max(0.01, deadline.left)))


class _Arrivals:
    """The answers of members, in the order in which they arrive."""

    def __init__(self, loop: Loop, words: Callable[[], str]) -> None:
        self._loop = loop
        self._words = words
        self._arrived: deque[tuple[Ask, Handle[Any]]] = deque()
        self._more: Handle[None] | None = None
        """What a thread waits for that has found nothing."""
        self._lock = threading.Lock()

    def expect(self, ask: Ask, handle: Handle[Any]) -> None:
        """Take in what becomes of a request."""

        def arrive() -> None:
            with self._lock:
                self._arrived.append((ask, handle))
                more, self._more = self._more, None
            if more is not None:
                more.complete(None)

        handle.on_done(arrive)

    def next(self, deadline: Deadline) -> Event:
        """Wait for the next answer; `Late` at the deadline."""
        with self._lock:
            more = None
            if not self._arrived:
                more = self._more = Handle(self._loop, late=lambda: f"{self._words()} has not been answered")
        if more is not None:
            try:
                more.wait(deadline.left)
            except CallTimedOut:
                return Late()
        with self._lock:
            ask, handle = self._arrived.popleft()
        try:
            return Answered(ask.worker, ask.request, _value_of(handle.wait(0)))
        except (ClusterError, ConfigError) as error:
            return Failed(ask.worker, ask.request, error)


def _value_of(frame: Frame) -> Any:
    succeeded, value = pickle.loads(frame.data)  # noqa: S301 - from a member of the job
    if not succeeded:
        raise value
    return value
