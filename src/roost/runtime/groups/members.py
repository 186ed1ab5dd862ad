"""The workers of one group as this process reaches them: calls, deaths, restarts. All narrowed groups share them."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import ray
from ray.actor import ActorHandle

from roost.deadline import Deadline
from roost.errors import ClusterError, ConfigError, ManagerDied, RoostError, WorkerDied
from roost.runtime.connect.calls import end_actors
from roost.runtime.connect.head import within
from roost.runtime.events.emitter import emitter
from roost.runtime.events.waits import waiting
from roost.runtime.failures.failure import Failure, FailureKind
from roost.runtime.groups.result import CallResult, PassedCall, lost_value
from roost.runtime.launch.launch import GroupPort, Launch
from roost.runtime.launch.plan import LaunchPlan
from roost.runtime.launch.progress import Phase
from roost.runtime.limits import (
    BLIP_SECONDS,
    CAUSE_SECONDS,
    DEATH_NEWS_SECONDS,
    FLUSH_SECONDS,
    GROUP_CLOSE_SECONDS,
    HANG_SECONDS,
    KEPT_CALL_SECONDS,
    LATE_SECONDS,
    POLL_SECONDS,
    RESERVE_SECONDS,
)
from roost.runtime.managers.control import JobControl
from roost.runtime.managers.ledgers.workers import GroupRecord, WorkerRecord, WorkerState
from roost.runtime.managers.worker_manager import WorkerManager
from roost.runtime.nodes.discover import live_nodes
from roost.runtime.nodes.ray_state import is_known_dead, living
from roost.runtime.process.actor import MethodKind, group_call
from roost.runtime.process.identity import WorkerIdentity
from roost.runtime.process.packing import Sent
from roost.runtime.process.spec import Report, WorkerSpec
from roost.runtime.reserve.reservation import Reservation
from roost.runtime.reserve.reserver import reserve_accelerators
from roost.runtime.runs.folder import put_aside
from roost.text import join_words, plural, shorten

log: logging.Logger = logging.getLogger(__name__)

_MOST_RESULTS = 100


class Members:
    """The workers of a group, by rank."""

    def __init__(self, context: JobControl, record: GroupRecord) -> None:
        self.context = context
        self.name: str = record.name
        self.methods: dict[str, MethodKind] = {name: MethodKind(kind) for name, kind in record.methods}
        self._record = record
        # By rank; a missing one is looked up when it is needed.
        self._handles: dict[int, ActorHandle[Any]] = {}
        self._restarting: int | None = None
        """The rank that this process restarts now, which has no actor that could be called."""
        self.size: int = len(record.identities)
        self.is_closed: bool = False
        self._kept: list[tuple[int, str, tuple[Any, ...], Future[Any]]] = []
        """Calls to ranks that are being restarted, oldest first."""
        self._keeping = threading.Lock()
        self._results: deque[weakref.ref[CallResult[Any]]] = deque(maxlen=_MOST_RESULTS)
        """Of the last calls, for whoever wants to know behind which of them another one waits."""

    def identity(self, rank: int) -> WorkerIdentity:
        """Return the identity of a rank."""
        return self._record.identities[rank]

    def restarts_left(self, rank: int) -> int:
        """Return how often a rank is still restarted when it dies, as far as this process knows."""
        return self._record.restarts_left[rank] if self._record.restarts_left else 0

    def handles(self, ranks: Sequence[int]) -> list[ActorHandle[Any]]:
        """Return the actors behind some ranks, after waiting for ranks that are being restarted."""
        with waiting(lambda: f"a restart in {self.name!r}"):
            late = self.restarting(ranks, Deadline.after(KEPT_CALL_SECONDS))
        self._check_known(late)
        return [self._handles[rank] for rank in ranks]

    def restarting(self, ranks: Sequence[int], deadline: Deadline | None = None) -> set[int]:
        """Return which of some ranks are being restarted; with a deadline, wait until none is or it is over."""
        while True:
            self.check_open()
            lost = [
                rank
                for rank in ranks
                if rank == self._restarting or rank not in self._handles or is_known_dead(self._handles[rank])
            ]
            late = self._find_again(lost) if lost else set()
            if not late or deadline is None or deadline.is_over:
                return late
            time.sleep(POLL_SECONDS)

    def alive(self) -> list[int]:
        """Return the ranks whose workers are alive and constructed now; ClusterError if Ray does not say."""
        if self.is_closed or self.context.is_closed.is_set():
            return []
        self.context.check_reachable(f": who of {self.name!r} is alive is not known")
        addresses = [identity.address for identity in self._record.identities]
        # Asked before Ray: one that begins to be restarted in between is known to be dead.
        ready = self._ready(addresses)
        alive = living(addresses) if ready else ()
        return [rank for rank, address in enumerate(addresses) if rank in ready and address in alive]

    def _ready(self, addresses: Sequence[str]) -> set[int]:
        """Return which of these were constructed and not restarted since, by rank."""
        _, workers = self._known(addresses, self.context.worker_manager)
        return {worker.rank for worker in workers.values() if worker.state is WorkerState.READY}

    def _known(
        self, addresses: Sequence[str], manager: WorkerManager
    ) -> tuple[GroupRecord | None, dict[str, WorkerRecord]]:
        """Return what the job knows of the group and some of its workers; nothing if the name is another launch's."""
        try:
            record = manager.get_group(self.name)
            if record.launch == self._record.launch:
                return record, {worker.address: worker for worker in manager.get_workers(addresses)}
        except ManagerDied:
            raise
        except ClusterError:
            pass
        return None, {}

    def call(self, method: str, ranks: Sequence[int], sent: Sequence[Sent]) -> CallResult[Any]:
        """Call a method on some ranks, with what is sent to each."""
        # After calls that are kept, so that each worker gets them in order.
        late = self.restarting(ranks) | {rank for rank, *_ in list(self._kept)}
        name = group_call(method)
        calls = [
            self._keep(rank, method, item.arguments)
            if rank in late
            else getattr(self._handles[rank], name).remote(*item.arguments)
            for rank, item in zip(ranks, sent, strict=True)
        ]
        result: CallResult[Any] = CallResult(self, method, ranks, calls, [item.sources for item in sent])
        self._results.append(weakref.ref(result))
        return result

    def before(self, result: CallResult[Any], ranks: Sequence[int]) -> CallResult[Any] | None:
        """Return an earlier call that some ranks have not answered, if its result is still there."""
        for other in [found() for found in list(self._results)]:
            if other is None:
                continue
            if result._calls[0] in other._calls:
                # It is that call, or some ranks of it.
                break
            if set(other._late()) & set(ranks):
                return other
        return None

    def _keep(self, rank: int, method: str, args: tuple[Any, ...]) -> Future[Any]:
        """Send a call when its rank is back."""
        future: Future[Any] = Future()
        with self._keeping:
            self._kept.append((rank, method, args, future))
            if len(self._kept) == 1:
                threading.Thread(target=self._send_kept, name=f"roost-{self.name}-calls", daemon=True).start()
        return future

    def _send_kept(self) -> None:
        """Send the calls that are kept, until there is none."""
        while True:
            rank, method, args, future = self._kept[0]
            try:
                future.set_result(getattr(self.handles([rank])[0], group_call(method)).remote(*args))
            except BaseException as error:
                future.set_exception(error)
            with self._keeping:
                self._kept.pop(0)
                if not self._kept:
                    return

    def describe(self, error: BaseException, rank: int, method: str, sources: Sequence[PassedCall] = ()) -> Failure:
        """Turn what Ray raised for a call into the failure of its worker, or of one that makes its arguments."""
        for source in sources:
            for failure in source.failures(self.context):
                return self.passed_on(failure, method)
        own = self.identity(rank)
        found = lost_value(self.context, error, sources) or self.context.describe(own, error)
        is_own = found.address == own.address and found.method in ("", method)
        return found if is_own else self.passed_on(found, method)

    def passed_on(self, failure: Failure, method: str) -> Failure:
        """Add to which call of this group the failed call's result was passed."""
        return replace(failure, passed_to=f"{method!r} of {self.name!r}")

    def check_open(self) -> None:
        """Raise ClusterError if the group or its Cluster was closed."""
        if self.is_closed:
            raise ClusterError(f"the group {self.name!r} is closed", hint="launch it again")
        self.context.check_open()

    def close(self, timeout: float = GROUP_CLOSE_SECONDS) -> None:  # noqa: ARG002 - for the process that launched it
        """Forget the group; its workers belong to the process that launched it."""
        self.is_closed = True

    def restart(self, rank: int, *, force: bool, timeout: float | None = None) -> None:  # noqa: ARG002 - as for own
        """Refuse: only the process that launched the group can restart a worker."""
        address = self.identity(rank).address
        raise ClusterError(f"{address} can only be restarted by the process that launched the group")

    def _find_again(self, ranks: Sequence[int]) -> set[int]:
        """Look up the actors of ranks that are new to this process or have died; return the ranks to restart."""
        missing = {self.identity(rank).address: rank for rank in ranks}
        late: set[int] = set()
        record, workers = self._known(list(missing), self.context.worker_manager.within(BLIP_SECONDS))
        if record is not None:
            there = within(BLIP_SECONDS, lambda: self._look_up(missing), "find its actors")
            for address, handle in there.items():
                # There is no public way to tell whether it is the actor that was constructed.
                if handle._actor_id.hex() == workers[address].instance:
                    self._handles[missing.pop(address)] = handle
            late = {
                rank
                for address, rank in missing.items()
                if record.restarts_left[rank] or address in there or workers[address].state is WorkerState.REQUESTED
            }
            if late and record.owner is not None and not living({record.owner}):
                late = set()
        self._check_known(set(missing.values()) - late)
        return late

    def _look_up(self, addresses: Collection[str]) -> dict[str, ActorHandle[Any]]:
        """Return the actors of the addresses that are alive."""
        found = {}
        for address in living(addresses):
            with contextlib.suppress(ValueError):
                handle = ray.get_actor(address, namespace=self.context.job.namespace)
                # Ray's head may take a moment longer than this process to know it.
                if not is_known_dead(handle):
                    found[address] = handle
        return found

    def _check_known(self, ranks: Iterable[int]) -> None:
        """Raise WorkerDied for a dead rank that had no actor; Ray refuses a call to one that had, and says why."""
        for rank in ranks:
            if rank not in self._handles:
                identity = self.identity(rank)
                raise WorkerDied(f"{identity.address} on {identity.node} is dead")


class OwnMembers(Members):
    """The workers of a group that this process launched: it can restart them, and ends them."""

    def __init__(
        self, context: JobControl, plan: LaunchPlan, methods: Mapping[str, MethodKind], remote: Any, constructor: Any
    ) -> None:
        """Take the actor class, and the user's class with its arguments, packed."""
        record = GroupRecord(
            name=plan.name,
            identities=tuple(spec.identity for spec in plan.specs),
            methods=tuple((method, str(kind)) for method, kind in methods.items()),
            launch=secrets.token_hex(8),
            owner=context.owner,
            restarts_left=(plan.restarts,) * len(plan.specs),
        )
        super().__init__(context, record)
        self._plan = plan
        self._remote = remote
        self._constructor = constructor
        self._reservation: Reservation | None = None
        self._lock = threading.RLock()
        self._reports: dict[str, Report] = {}
        self._noted_deaths: set[str] = set()
        self._stopped = threading.Event()
        self._port = GroupPort(context.node_manager, plan.specs[0].node_rank, context.owner)
        self._reviver: threading.Thread | None = None
        self._is_ended = False
        self._is_kept = False
        """Whether the name is ours, and other processes can find it."""

    def _ready(self, addresses: Sequence[str]) -> set[int]:
        return set(range(len(addresses))) - {self._restarting}

    def launch(self) -> dict[str, float]:
        """Reserve the accelerators and start all workers; return when the last of them reached each phase.

        If it fails, end what was started and release what was reserved.
        """
        plan, reached = self._plan, dict[str, float]()
        if plan.shares:
            # Before anything is started there.
            limit = min(plan.timeout, RESERVE_SECONDS)
            components = {self.name: [spec.identity.placement for spec in plan.specs]}
            self._reservation = reserve_accelerators(
                self.context, self.name, plan.shares, components, timeout=limit, seats=plan.seats
            )
            reached["reserved"] = time.monotonic()
        deadline = Deadline.after(plan.timeout)
        try:
            reached |= {str(phase): when for phase, when in self._start(plan.specs, None, plan.timeout).items()}
        except BaseException:
            # A worker that cannot be ended now ends with the Cluster.
            with contextlib.suppress(ClusterError):
                self.close(max(LATE_SECONDS, deadline.left))
            raise
        emitter.note("launched", self.name, plural(self.size, "worker"))
        if plan.restarts or self.context.job.keeps_events:
            self.context.watch.add_workers(self, [spec.address for spec in plan.specs], self._note_deaths)
        return reached

    def restart(self, rank: int, *, force: bool, timeout: float | None = None) -> None:
        """Start a rank whose worker is dead again, in its place; `force` ends one that is alive."""
        with self._lock:
            self.check_open()
            spec = self._plan.specs[rank]
            deadline = Deadline.after(DEATH_NEWS_SECONDS)
            # Ray learns of a death a moment later than processes that talk to the worker.
            while (is_alive := rank in self.alive()) and not force and not deadline.is_over:
                time.sleep(POLL_SECONDS)
            if is_alive and not force:
                raise ConfigError(f"{spec.address} is alive", hint="restart(rank, force=True) ends it first")
            if spec.ray_id not in {node.ray_id for node in live_nodes()}:
                raise ClusterError(
                    f"{spec.address} cannot be restarted: {spec.identity.node} is gone",
                    hint="close the group and plan again",
                )
            began, reason = time.monotonic(), "restart(force=True) ended it"
            failure: BaseException | None = None
            self._restarting = rank
            try:
                if not is_alive:
                    reason = "not known"
                    try:
                        # Ray refuses a call to an actor that is dead, with the reason.
                        ray.get(self._handles[rank].__ray_ready__.remote(), timeout=CAUSE_SECONDS)
                    except Exception as error:
                        reason = self.context.describe(self.identity(rank), error).what
                # Ray keeps the name of an actor that died until it is killed.
                end_actors({spec.address: self._handles[rank]}, Deadline.after(GROUP_CLOSE_SECONDS))
                self._start([spec], self._reports[spec.address].pid, self._plan.timeout if timeout is None else timeout)
            except BaseException as error:
                failure = error
                raise
            finally:
                self._restarting = None
                self.context.recorder.note_restart(spec.address, reason, time.monotonic() - began, failure)
                self._noted_deaths.discard(spec.address)
                emitter.note("restarted" if failure is None else "lost", spec.address, shorten(reason, 300))
                if failure is None:
                    self.context.failures.note_death(spec.address, "")

    def close(self, timeout: float = GROUP_CLOSE_SECONDS) -> None:
        """End every worker, and release what the group held.

        ClusterError names what could not be ended in time; the group can then be closed again.
        """
        began, deadline = time.monotonic(), Deadline.after(timeout)
        self._stopped.set()
        self.context.watch.remove_workers(self)
        reviver = self._reviver
        if reviver is not None and reviver is not threading.current_thread():
            reviver.join(deadline.left)
        if not self._lock.acquire(timeout=deadline.left):
            raise ClusterError(f"{self.name!r} could not be closed: one of its workers is being restarted")
        try:
            if self._is_ended:
                return
            self.is_closed = True
            # Without the connection there is nothing left to end: what the job had went with it.
            if self.context.is_connected and (left := self._release(deadline)):
                # Where the head does not answer, the rest of the time would change nothing.
                seconds = min(timeout, round(time.monotonic() - began, 1))
                raise ClusterError(
                    f"{self.name!r} could not be closed in {seconds:g} s; still there: {join_words(left)}",
                    hint="close it again; closing the Cluster, or `roost clean`, ends what is left",
                )
            if self._is_kept:
                self.context.logs.forget([spec.address for spec in self._plan.specs])
                if self.context.open_groups.get(self.name) == self.close:
                    del self.context.open_groups[self.name]
            # Set last, so that a close that failed or was interrupted can be repeated.
            self._is_ended = True
            emitter.note("closed", self.name)
            for spec in self._plan.specs:
                self.context.failures.note_death(spec.address, "")
        finally:
            self._lock.release()

    def _release(self, deadline: Deadline) -> list[str]:
        """End the workers and release what they had; return what is left, and why."""
        if not self.context.is_reachable:
            return [f"its {plural(len(self._handles), 'worker')}, because Ray's head does not answer"]
        handles = {self.identity(rank).address: handle for rank, handle in self._handles.items()}
        if self.context.job.keeps_events:
            # Workers that are not in a call write their last events before they are ended.
            with contextlib.suppress(Exception):
                flushes: list[Any] = [handle._roost_flush.remote() for handle in handles.values()]
                ray.wait(flushes, num_returns=len(flushes), timeout=min(FLUSH_SECONDS, deadline.left))
        left = sorted(end_actors(handles, deadline))
        soon = deadline.within(HANG_SECONDS)
        releases: dict[str, Callable[[], object]] = {"its port": lambda: self._port.release(soon)}
        if self._reservation is not None:
            reservation = self._reservation
            releases["its accelerators"] = lambda: reservation.close(max(0.1, soon.left))
        if self._is_kept:
            releases["its name"] = lambda: self.context.worker_manager.until(soon).remove_group(self.name)
        for what, release in releases.items():
            try:
                release()
            except ManagerDied:
                # Its state is gone with it.
                continue
            except RoostError as error:
                left.append(f"{what} ({error.problems[0].message})")
        return left

    def _start(self, specs: Sequence[WorkerSpec], predecessor: int | None, seconds: float) -> Mapping[Phase, float]:
        """Start these workers, and return when the last of them reached each phase; a restart has a predecessor."""
        context, ports = self.context, tuple[int, ...]()
        launch = Launch(
            context=context,
            specs=specs,
            slots=self._reservation.slots if self._reservation is not None else (),
            port=self._port,
            stopped=self._stopped,
            constructor=self._constructor,
            seconds=seconds,
            predecessor=predecessor,
        )
        try:
            with launch.board.shown(len({spec.node_rank for spec in specs})):
                launch.request(self._remote, self._plan.max_concurrency)
                handles = {spec.identity.rank: launch.handles[spec.address] for spec in specs}
                if predecessor is None:
                    # For a close that comes before all are ready.
                    self._handles |= handles
                records = [
                    WorkerRecord(
                        address=spec.address,
                        node_rank=spec.node_rank,
                        rank=spec.identity.rank,
                        group=spec.identity.group_name,
                        accelerators=spec.accelerators,
                    )
                    for spec in specs
                ]
                context.worker_manager.until(launch.deadline).register(records, are_actors=True)
                if predecessor is None:
                    # The name is ours now. What the group needs is taken while the processes start.
                    self._is_kept = True
                    context.open_groups[self.name] = self.close
                    context.logs.start()
                    put_aside(context.run_dir.logs.joinpath(*self.name.split(":")))
                    ports = self._port.propose(launch.deadline)
                reports = launch.run(ports)
            self._reports |= reports
            until = max(launch.deadline, Deadline.after(LATE_SECONDS))
            context.worker_manager.until(until).add_group(self._record, reports)
            # Only now can a restarted worker be called: Ray keeps the calls of one process in order, and calls that
            # wait for their arguments would hold up the one that constructs it.
            self._handles |= handles
        except BaseException:
            end_actors(launch.handles, Deadline.after(GROUP_CLOSE_SECONDS))
            raise
        return launch.board.reached

    def _find_again(self, ranks: Sequence[int]) -> set[int]:
        left = self._record.restarts_left
        return {rank for rank in ranks if rank == self._restarting or (left[rank] and self._has_node(rank))}

    def _has_node(self, rank: int) -> bool:
        return self._plan.specs[rank].node_rank not in self.context.watch.dead_nodes

    def describe(self, error: BaseException, rank: int, method: str, sources: Sequence[PassedCall] = ()) -> Failure:
        """Do the same, and write an event about a death: a job that it ends does not wait for the watch to look."""
        found = super().describe(error, rank, method, sources)
        handle = self._handles.get(found.rank)
        is_own = any(found.address == spec.address for spec in self._plan.specs)
        if found.kind is FailureKind.DEATH and is_own and handle is not None and is_known_dead(handle):
            self._note_death(found.address, found.what)
        return found

    def _note_death(self, address: str, text: str = "") -> None:
        if address not in self._noted_deaths:
            self._noted_deaths.add(address)
            emitter.note("died", address, shorten(text, 300))
            self.context.failures.note_death(address, f"died: {shorten(text, 300)}" if text else "died")

    def _note_deaths(self, dead: set[str]) -> None:
        """Write an event for each worker that died since the last time, and restart the ranks that have restarts left.

        In a thread, because the watch must go on: it calls this every time it finds dead workers.
        """
        for address in sorted(dead):
            self._note_death(address)
        is_reviving = self._reviver is not None and self._reviver.is_alive()
        if self._plan.restarts and not is_reviving and not self._stopped.is_set():
            name = f"roost-{self.name}"
            reviver = threading.Thread(target=self._revive, args=(dead,), name=name, daemon=True)
            reviver.start()
            # Only now: `close` joins it.
            self._reviver = reviver

    def _revive(self, dead: set[str]) -> None:
        """Restart each dead rank that has restarts left."""
        for rank, left in enumerate(self._record.restarts_left):
            address = self.identity(rank).address
            with self._lock:
                # A restart by the user, which may be under way, is not counted.
                if address not in dead or not left or self._stopped.is_set() or rank in self.alive():
                    continue
                try:
                    self.restart(rank, force=False)
                    log.warning("%s died and was restarted in its place; %s left", address, plural(left - 1, "restart"))
                except Exception as error:
                    log.error("%s died and could not be restarted: %s", address, error)
                finally:
                    counts = list(self._record.restarts_left)
                    counts[rank] = left - 1 if self._has_node(rank) else 0
                    self._record = replace(self._record, restarts_left=tuple(counts))
                    # Other processes wait for ranks that will be restarted.
                    with contextlib.suppress(RoostError):
                        self.context.worker_manager.add_group(self._record, {})
