"""`WeightLink`: moves the weights of a group of workers into another one, a version at a time, all or nothing."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from roost.comm.process import process_talk
from roost.comm.wire.loop import Handle
from roost.errors import CallTimedOut, ClusterError, ConfigError, Problem, WorkerDied
from roost.runtime.events.emitter import emitter
from roost.runtime.groups.group import WorkerGroup
from roost.text import join_words
from roost.weights.layout import Layout
from roost.weights.offers import Offer
from roost.weights.plan import BUCKET_BYTES, Place, SyncPlan, make_sync_plan

UPDATE_SECONDS = 60.0
_PEER_SECONDS = 5.0
_MARGIN_SECONDS = 1.0
"""How long before the caller's deadline members give up, so that their error arrives before it."""


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
        self.version = -1
        """The highest version that a target has; -1 if none has any."""
        self._begun = -1
        """The highest version that an update was begun to: the sources have it, or a later one."""
        self._groups = {source.name: source, target.name: target}
        self._options = in_place, may_share
        self._name = f"{source.name}-{target.name}-{os.getpid()}-{time.monotonic_ns():x}"
        self._attempts = itertools.count(1)
        self._lock = threading.Lock()
        self._offers: dict[tuple[str, str], tuple[int, Offer]] = {}
        """By worker and what it was asked for: its last offer, and the number of that."""
        self._senders: dict[str, dict[str, tuple[str, ...]]] = {}
        """By digest of a plan and target: the sources that have to send."""
        self._endpoint = process_talk().messages.endpoint
        deadline = time.monotonic() + timeout
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
        deadline = time.monotonic() + timeout
        offered = ask_layout(source, "offer", timeout)
        wanted = ask_layout(target, "accept", _left(deadline))
        plan = make_sync_plan(offered, wanted, places_in(source, target), bucket_bytes=bucket_bytes)
        return cls(plan, source, target, timeout=_left(deadline), **options)

    def update(self, version: int, timeout: float = UPDATE_SECONDS) -> UpdateReport:
        """Give all targets the present weights of the sources, as a version that is higher than the last.

        If a worker dies or is late, the error names it, and no target takes the version over; one that has died can be
        left out with `without`, or restarted and then filled with `refill`, or with `rejoin` if it is a source.
        """
        if isinstance(version, bool) or not isinstance(version, int) or version <= self.version:
            raise ConfigError(f"version is {version!r}: it is a whole number above {self.version}, the present one")
        deadline = time.monotonic() + timeout
        with self._alone(deadline):
            self._begun = version
            return self._update(self.plan, version, deadline)

    def versions(self, timeout: float = UPDATE_SECONDS) -> dict[str, int]:
        """Return the version that each target says it has; -1 for one without a whole version."""
        return self._ask(self.plan.target.workers, "status", (), time.monotonic() + timeout)

    def without(self, *workers: str, timeout: float = UPDATE_SECONDS) -> None:
        """Go on without some workers, such as those that have died; ConfigError if others cannot replace them."""
        deadline = time.monotonic() + timeout
        with self._alone(deadline):
            self._go_on(self._missing | set(workers), deadline)
            self._dismiss(workers)

    def rejoin(self, *workers: str, timeout: float = UPDATE_SECONDS) -> None:
        """Let workers that were restarted take part again; a target has no version until `refill` or an update."""
        deadline = time.monotonic() + timeout
        with self._alone(deadline):
            self._open(workers, deadline)
            if self._missing.isdisjoint(workers):
                self._teach(self.plan, workers, deadline)
            else:
                self._go_on(self._missing - set(workers), deadline)

    def _go_on(self, missing: frozenset[str], deadline: float) -> None:
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
        deadline = time.monotonic() + timeout
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
            self._tell(worker, "leave")

    @contextlib.contextmanager
    def _alone(self, deadline: float) -> Iterator[None]:
        """Let one operation of the link run at a time."""
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise CallTimedOut(f"another update of {self._name} is under way")
        try:
            yield
        finally:
            self._lock.release()

    def _plan_fill(self, source: Layout, worker: str) -> SyncPlan:
        target = self.plan.target.only([worker])
        return make_sync_plan(source, target, self.plan.places, bucket_bytes=self.plan.bucket_bytes)

    def _peers(self, worker: str, deadline: float) -> list[str]:
        """Return the other targets that have the present version; one that does not answer soon is none."""
        others = [other for other in self.plan.target.workers if other != worker]
        asked = {other: self._request(other, "holds", ()) for other in others}
        soon = min(deadline, time.monotonic() + _PEER_SECONDS)
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

    def _update(self, plan: SyncPlan, version: int, deadline: float, method: str = "offer") -> UpdateReport:
        began = time.monotonic()
        attempt, digest = next(self._attempts), plan.digest
        sources = [worker for worker, (sent, _) in plan.bytes_by_worker().items() if sent]
        targets = plan.target.workers
        try:
            self._prepare(plan, attempt, version, sources, deadline, method)
            prepared = time.monotonic()
            left = max(0.1, deadline - time.monotonic() - _MARGIN_SECONDS)
            sending: dict[str, list[str]] = {}
            for target, senders in self._senders.get(digest, {}).items():
                for sender in senders:
                    sending.setdefault(sender, []).append(target)
            handles = [
                self._request(sender, "send", (attempt, digest, tuple(wanted), left))
                for sender, wanted in sending.items()
            ]
            try:
                moved = self._ask(targets, "move", (attempt, digest, left), deadline)
            except ClusterError:
                # What went wrong with a sender is the cause of it.
                for handle in handles:
                    if handle.done():
                        self._answer(handle, deadline)
                raise
            for handle in handles:
                self._answer(handle, deadline)
            done = time.monotonic()
        except BaseException:
            for worker in dict.fromkeys([*sources, *targets]):
                self._tell(worker, "abort", attempt)
            raise
        # From here on targets take it over, whatever happens to some of them.
        self.version = version
        pauses = self._ask(targets, "commit", (attempt, version, digest), deadline)
        taken = [(seconds, target, name) for target, parts in moved.items() for name, seconds in parts.items()]
        slow = max(taken, default=None)
        report = UpdateReport(
            version=version,
            nbytes=sum(plan.traffic.values()),
            seconds=time.monotonic() - began,
            prepare_seconds=prepared - began,
            move_seconds=done - prepared,
            pause_seconds=max(pauses.values(), default=0.0),
            slowest="" if slow is None else f"{slow[1]} from {slow[2]}",
        )
        emitter.note(
            "weights",
            " -> ".join(self._groups),
            version=version,
            d=round(report.seconds, 4),
            pause=round(report.pause_seconds, 6),
            size=report.nbytes >> 20,
            slowest=report.slowest or None,
        )
        return report

    def _prepare(
        self, plan: SyncPlan, attempt: int, version: int, sources: Sequence[str], deadline: float, method: str
    ) -> None:
        """Make sure that everyone is there with the same plan, and knows where the memory of the sources lies."""
        digest = plan.digest
        asked = []
        for role, workers in (("source", sources), ("target", plan.target.workers)):
            for worker in workers:
                number = self._offers[worker, method][0] if (worker, method) in self._offers else 0
                asked.append((worker, self._request(worker, "prepare", (attempt, version, digest, role, number))))
        for worker, handle in asked:
            new: tuple[int, Offer] | None = self._answer(handle, deadline)
            if new is not None:
                self._offers[worker, method] = new
                # Wherever it is read from: until all know the new place, none of them does.
                self._senders.clear()
        if digest in self._senders:
            return
        offers = {worker: self._offers[worker, method][1] for worker in sources}
        wanted: dict[str, dict[str, Offer]] = {target: {} for target in plan.target.workers}
        for source, target in plan.traffic:
            wanted[target][source] = offers[source]
        handles = [(target, self._request(target, "connect", (digest, mine))) for target, mine in wanted.items()]
        self._senders[digest] = {target: self._answer(handle, deadline) for target, handle in handles}

    def _members(self, plan: SyncPlan) -> list[str]:
        return list(dict.fromkeys([*plan.source.workers, *plan.target.workers]))

    def _open(self, workers: Iterable[str], deadline: float) -> dict[str, int]:
        """Let workers take part, by a call: one that has never communicated begins to. Returns their versions."""
        calls = {}
        for worker in workers:
            name, _, rank = worker.rpartition(":")
            group = self._groups[name]
            calls[worker] = group.on(int(rank)).call("open_weights", self._name, *self._options)
            self._offers = {key: offer for key, offer in self._offers.items() if key[0] != worker}
        self._senders.clear()
        return {worker: call.wait(_left(deadline))[0] for worker, call in calls.items()}

    def _teach(self, plan: SyncPlan, workers: Iterable[str], deadline: float, method: str = "") -> None:
        """Tell workers a plan, the link's own unless it says what its sources are asked for."""
        wrong = self._ask(list(workers), "plan", (plan, method or "offer", not method), deadline)
        self._senders.pop(plan.digest, None)
        if problems := [Problem(message=line) for lines in wrong.values() for line in lines]:
            raise ConfigError(problems)

    def _ask(self, workers: Sequence[str], command: str, arguments: Sequence[Any], deadline: float) -> dict[str, Any]:
        """Ask all at once, and return their answers; if some fail, the error of the first, with all that died."""
        handles = {worker: self._request(worker, command, arguments) for worker in workers}
        answers: dict[str, Any] = {}
        errors: list[Exception] = []
        for worker, handle in handles.items():
            try:
                answers[worker] = self._answer(handle, deadline)
            except (ClusterError, ConfigError) as error:
                errors.append(error)
                if command == "move":
                    # The others wait for the same.
                    break
        if errors:
            raise next((error for error in errors if isinstance(error, WorkerDied)), errors[0])
        return answers

    def _tell(self, worker: str, command: str, *arguments: Any) -> None:
        """Ask without waiting, and only a process that is there: the next one of the name has nothing to end."""
        with contextlib.suppress(ClusterError):
            if worker in self._endpoint.peers and self._endpoint.peers[worker].is_open:
                self._request(worker, command, arguments)

    def _request(self, worker: str, command: str, arguments: Sequence[Any]) -> Handle[Any]:
        late = f"{worker} has not answered {command!r} of a link of weights"
        handle: Handle[Any] = Handle(self._endpoint.loop, late=lambda: late)
        data = pickle.dumps((self._name, command, tuple(arguments)))
        self._endpoint.request(worker, b"", data, (), handle)
        return handle

    def _answer(self, handle: Handle[Any], deadline: float) -> Any:
        frame = handle.wait(_left(deadline))
        succeeded, value = pickle.loads(frame.data)  # noqa: S301 - from a member of the job
        if not succeeded:
            raise value
        return value


def _left(deadline: float) -> float:
    """Return how many seconds are left; what is late gets a moment to say so itself."""
    return max(0.01, deadline - time.monotonic())
