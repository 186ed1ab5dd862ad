"""`WeightLink`: moves the weights of a group of workers into another one, a version at a time, all or nothing."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pickle
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from roost.comm.process import process_messages
from roost.comm.wire.loop import Handle
from roost.deadline import Deadline
from roost.errors import CallTimedOut, ClusterError, ConfigError, Problem, WorkerDied
from roost.runtime.events.emitter import emitter
from roost.runtime.events.waits import waiting
from roost.runtime.failures.meanwhile import with_meanwhile
from roost.runtime.groups.group import WorkerGroup
from roost.text import join_words
from roost.weights.layout import Layout
from roost.weights.limits import MARGIN_SECONDS, PEER_SECONDS, UPDATE_SECONDS
from roost.weights.plan import BUCKET_BYTES, Place, SyncPlan, make_sync_plan
from roost.weights.update import Detour, Request, Update, Verb, Ways
from roost.weights.versions import NO_VERSION, check_newer

if TYPE_CHECKING:
    from roost.comm.move.mover import Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """The time and the bytes of an update."""

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


class WeightLink(contextlib.AbstractContextManager["WeightLink"]):
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
        self._routes: dict[str, Mapping[str, Ways]] = {}
        """By digest of a plan: how bytes come to those of its targets that know where the sources' memory is."""
        self._endpoint = process_messages().endpoint
        deadline = Deadline.after(timeout)
        try:
            versions = self._open(plan.workers, deadline)
            self.version = max(versions[worker] for worker in plan.target.workers)
            self._teach(plan, plan.workers, deadline)
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
        return self._ask(self.plan.target.workers, Verb.VERSION, None, Deadline.after(timeout))

    def without(self, *workers: str, timeout: float = UPDATE_SECONDS) -> None:
        """Go on without some workers, such as those that have died; ConfigError if others cannot replace them."""
        deadline = Deadline.after(timeout)
        with self._alone(deadline):
            self._go_on(self._missing | set(workers), deadline)
            for worker in workers:
                self._tell(Request(worker, Verb.LEAVE))

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
        self._teach(plan, plan.workers, deadline)
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
            # What a trainer has may be newer. A target that does not answer soon is no help.
            others = [other for other in self.plan.target.workers if other != worker]
            versions = self._ask(others, Verb.VERSION, True, deadline.within(PEER_SECONDS), may_fail=True)
            peers = [other for other, version in versions.items() if version == self.version]
            source, target = self.plan.target.only(peers), self.plan.target.only([worker])
            method = "accept"
            try:
                plan = make_sync_plan(source, target, self.plan.places, bucket_bytes=self.plan.bucket_bytes)
            except ConfigError:
                # They do not have everything between them.
                if self._begun > self.version:
                    what = f"no other target has version {self.version}, and the sources have version {self._begun}"
                    raise ClusterError(what, hint=f"call update: {worker} is in the link again") from None
                plan, method = self.plan.restricted([worker]), "offer"
            self._teach(plan, plan.workers, deadline, method)
            return self._update(plan, self.version, deadline, method)

    def close(self) -> None:
        """Let the workers forget the link; those that have died need not."""
        self._offers.clear()
        for worker in self.plan.workers:
            self._tell(Request(worker, Verb.LEAVE))

    @contextlib.contextmanager
    def _alone(self, deadline: Deadline) -> Iterator[None]:
        """Let one operation of the link run at a time."""
        with waiting(lambda: f"another update of {self._name}"):
            is_alone = self._lock.acquire(timeout=min(deadline.left, threading.TIMEOUT_MAX))
        if not is_alone:
            raise with_meanwhile(CallTimedOut(f"another update of {self._name} is under way"))
        try:
            yield
        finally:
            self._lock.release()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<WeightLink {self._name} at version {self.version}: {self.plan!r}>"

    def _update(self, plan: SyncPlan, version: int, deadline: Deadline, method: str = "offer") -> UpdateReport:
        """Ask what an update says, and tell it what comes of that."""
        known = {
            worker: self._offers[worker, method] for worker in plan.source.workers if (worker, method) in self._offers
        }
        routes, attempt = self._routes.get(plan.digest), next(self._attempts)
        update, steps = Update(plan=plan, attempt=attempt, version=version, offers=known, routes=routes).begin()
        arrived: SimpleQueue[tuple[Request, Handle[Any]]] = SimpleQueue()
        times = {update.phase: time.monotonic()}

        try:
            while not update.is_over:
                for step in steps:
                    handle = self._request(step, deadline)
                    handle.on_done(functools.partial(arrived.put, (step, handle)))
                self._endpoint.loop.nudge()
                try:
                    with waiting(update.waits_for, details=functools.partial(_details, update, self._name)):
                        request, handle = arrived.get(timeout=deadline.timeout)
                    value = _answer(handle, deadline)
                except Empty:
                    update, steps = update.late()
                except (ClusterError, ConfigError) as error:
                    update, steps = update.failed(request, error)
                else:
                    update, steps = update.answered(request, value)
                if update.phase not in times:
                    times[update.phase] = time.monotonic()
                    if update.phase is Verb.MOVE:
                        # What members need not say again: all targets know where the memory of the sources is.
                        if any(known.get(worker) is not offer for worker, offer in update.offers.items()):
                            # Other plans read from it too: none of their targets knows the new place.
                            self._routes.clear()
                            self._offers |= {(worker, method): offer for worker, offer in update.offers.items()}
                        self._routes[plan.digest] = update.routes or {}
                    elif update.phase is Verb.COMMIT:
                        # From here on targets take it over, whatever happens to some of them.
                        self.version = version
            if update.error is not None:
                raise with_meanwhile(update.error)
        except BaseException:
            for step in steps if update.is_over else update.give_up():
                self._tell(step)
            raise
        taken = [(took, target, name) for target, moved in update.moved.items() for name, took in moved.seconds.items()]
        slow = max(taken, default=None)
        began, prepared, done = (times[phase] for phase in (Verb.PREPARE, Verb.MOVE, Verb.COMMIT))
        report = UpdateReport(
            version=version,
            nbytes=sum(plan.traffic.values()),
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
        details = plan, method or "offer", not method
        try:
            wrong = self._ask(workers, Verb.LEARN, details, deadline)
        except WorkerDied:
            # The wire may have noticed only now that the process before a restarted one has died, and have asked that.
            wrong = self._ask(workers, Verb.LEARN, details, deadline)
        self._routes.pop(plan.digest, None)
        if problems := [Problem(message=line) for lines in wrong.values() for line in lines]:
            raise ConfigError(problems)

    def _ask(
        self, workers: Iterable[str], verb: Verb, details: Any, deadline: Deadline, *, may_fail: bool = False
    ) -> dict[str, Any]:
        """Ask all at once, and return their answers.

        If some fail, it raises the error of the first that died, or the first; with `may_fail` they have no answer.
        """
        handles = {worker: self._request(Request(worker, verb, details=details), deadline) for worker in workers}
        answers: dict[str, Any] = {}
        errors: list[Exception] = []
        for worker, handle in handles.items():
            try:
                answers[worker] = _answer(handle, deadline)
            except (ClusterError, ConfigError) as error:
                errors.append(error)
        if errors and not may_fail:
            raise next((error for error in errors if isinstance(error, WorkerDied)), errors[0])
        return answers

    def _tell(self, request: Request) -> None:
        """Ask without waiting, and only a process that is there: the next one of the name has nothing to end."""
        peer = self._endpoint.peers.get(request.worker)
        if peer is not None and peer.is_open:
            self._request(request, Deadline.after(UPDATE_SECONDS))

    def _request(self, request: Request, deadline: Deadline) -> Handle[Any]:
        late = f"{request.worker} has not answered {request.verb.value!r} of a link of weights"
        handle: Handle[Any] = Handle(self._endpoint.loop, late=lambda: late)
        # What is late gets a moment to say so itself.
        seconds = max(0.1, deadline.left - MARGIN_SECONDS)
        try:
            self._endpoint.request(request.worker, b"", pickle.dumps((self._name, request, seconds)), (), handle)
        except ClusterError as error:
            handle.fail(error)
        return handle


def _details(update: Update, name: str) -> tuple[str, Sequence[str]]:
    """Say what an update waits for, and for which workers."""
    late = sorted({worker for worker, _ in update.waiting})
    return f"{update.phase.value!r} of version {update.version} of {name}, not answered by", late


def _answer(handle: Handle[Any], deadline: Deadline) -> Any:
    frame = handle.wait(max(0.01, deadline.left))
    succeeded, value = pickle.loads(frame.data)  # noqa: S301 - from a member of the job
    if not succeeded:
        raise value
    return value
