"""The workers of one group as this process reaches them: calls, deaths, restarts. All narrowed groups share them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle

from roost.errors import ClusterError, ConfigError, RoostError, WorkerDied
from roost.runtime.connect.connection import wait_for_names_to_go
from roost.runtime.failures.failure import Failure, FailureKind
from roost.runtime.groups.result import CallResult
from roost.runtime.launch.group_port import GroupPort
from roost.runtime.launch.launch import Launch
from roost.runtime.launch.progress import Phase, show_launch
from roost.runtime.launch.worker_spec import WorkerSpec
from roost.runtime.managers.context import JobContext
from roost.runtime.managers.ledgers.workers import GroupRecord, WorkerRecord
from roost.runtime.nodes.discover import live_nodes
from roost.runtime.nodes.ray_state import living
from roost.runtime.process.actor import MethodKind
from roost.runtime.process.identity import WorkerIdentity
from roost.runtime.reserve.reservation import Reservation
from roost.runtime.runs.folder import put_aside
from roost.text import plural

log: logging.Logger = logging.getLogger(__name__)

_END_SECONDS = 10.0
_CAUSE_SECONDS = 2.0


class Members:
    """The workers of a group, by rank."""

    def __init__(self, context: JobContext, record: GroupRecord) -> None:
        self.context = context
        self.name: str = record.name
        self.methods: dict[str, MethodKind] = {name: MethodKind(kind) for name, kind in record.methods}
        self._record = record
        # By rank; the handles of the ranks in `_lost` are looked up when they are needed.
        self._handles: dict[int, ActorHandle[Any]] = {}
        self._lost = set(range(len(record.identities)))
        self.size: int = len(record.identities)
        self.is_closed: bool = False

    @property
    def is_reachable(self) -> bool:
        """Whether the group and its Cluster are open, and Ray answers."""
        return not self.is_closed and self.context.is_reachable

    def identity(self, rank: int) -> WorkerIdentity:
        """Return the identity of a rank."""
        return self._record.identities[rank]

    def handles(self, ranks: Sequence[int]) -> list[ActorHandle[Any]]:
        """Return the actors behind some ranks."""
        self.check_open()
        return self._ready_handles(ranks)

    def alive(self) -> list[int]:
        """Return the ranks whose workers are alive now."""
        if not self.is_reachable or not self._is_current():
            return []
        addresses = [identity.address for identity in self._record.identities]
        alive = living(addresses)
        return [rank for rank, address in enumerate(addresses) if address in alive]

    def call(self, method: str, ranks: Sequence[int], sent: Sequence[tuple[Any, ...]]) -> CallResult:
        """Call a method on some ranks, with what is sent to each."""
        handles = self.handles(ranks)
        refs = [getattr(handle, method).remote(*args) for handle, args in zip(handles, sent, strict=True)]
        return CallResult(self, method, ranks, refs)

    def describe(self, error: BaseException, rank: int) -> Failure:
        """Turn what Ray raised for a call into the worker's failure."""
        failure = self.context.describe(self.identity(rank), error)
        if failure.kind is FailureKind.DEATH:
            self._lost.add(rank)
        return failure

    def check_open(self) -> None:
        """Raise ClusterError if the group or its Cluster was closed."""
        if self.is_closed:
            raise ClusterError(f"the group {self.name!r} is closed", hint="launch it again")
        self.context.check_open()

    def close(self) -> None:
        """Let go of the group; its workers belong to the process that launched it."""
        self.is_closed = True

    def restart(self, rank: int) -> None:
        """Refuse: only the process that launched the group can restart a worker."""
        address = self.identity(rank).address
        raise ClusterError(f"{address} can only be restarted by the process that launched the group")

    def _is_current(self) -> bool:
        """Whether the name still belongs to this launch."""
        try:
            return self.context.worker_manager.get_group(self.name).launch == self._record.launch
        except ClusterError:
            return False

    def _ready_handles(self, ranks: Sequence[int]) -> list[ActorHandle[Any]]:
        # The process that launched the group may have restarted those that died.
        for rank in self._lost & set(ranks):
            address = self.identity(rank).address
            try:
                self._handles[rank] = ray.get_actor(address, namespace=self.context.job.namespace)
            except ValueError:
                raise WorkerDied(f"{address} on {self.identity(rank).node} is dead") from None
            self._lost.discard(rank)
        return [self._handles[rank] for rank in ranks]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the workers of a group are started, the first time and again."""

    remote: Any
    """The actor class."""
    constructor: Any
    """The user's class and its arguments, packed."""
    options: Mapping[str, Any]
    timeout: float
    restarts: int


class OwnMembers(Members):
    """The workers of a group that this process launched: it can restart them, and ends them."""

    def __init__(
        self,
        context: JobContext,
        record: GroupRecord,
        specs: Sequence[WorkerSpec],
        recipe: Recipe,
        reservation: Reservation | None,
    ) -> None:
        super().__init__(context, record)
        self._specs = tuple(specs)
        self._recipe = recipe
        self._reservation = reservation
        self._lock = threading.RLock()
        self._restarts_left = dict.fromkeys(range(len(specs)), recipe.restarts)
        self._stopped = threading.Event()
        self._port = GroupPort(context.node_manager, specs[0].node.rank, context.owner)
        self._reviver: threading.Thread | None = None
        self._is_ended = False
        self._is_kept = False
        """Whether the name is ours, and other processes can find it."""

    def _is_current(self) -> bool:
        return True

    def launch(self) -> Mapping[str, float]:
        """Start all workers, and return when the last of them reached each phase; if it fails, end them."""
        try:
            reached = self._start(self._specs, is_restart=False)
        except BaseException:
            self.close()
            raise
        if self._recipe.restarts:
            self.context.watch.add_workers(self, [spec.address for spec in self._specs], self._revive_soon)
        return {str(phase): when for phase, when in reached.items()}

    def restart(self, rank: int) -> None:
        """Start a rank whose worker is dead again, in its place."""
        with self._lock:
            self.check_open()
            spec = self._specs[rank]
            if rank in self.alive():
                raise ConfigError(f"{spec.address} is alive", hint="only a dead worker can be restarted in its place")
            if spec.node.ray_id not in {node.ray_id for node in live_nodes()}:
                raise ClusterError(
                    f"{spec.address} cannot be restarted: {spec.node} is gone", hint="close the group and plan again"
                )
            began, reason = time.monotonic(), self._cause_of_death(rank)
            failure: BaseException | None = None
            try:
                # Ray keeps the name of an actor that died until it is killed.
                self._end({spec.address: self._handles[rank]})
                self._start([spec], is_restart=True)
            except BaseException as error:
                failure = error
                raise
            finally:
                self.context.recorder.note_restart(spec.address, reason, time.monotonic() - began, failure)

    def _cause_of_death(self, rank: int) -> str:
        """Say what is known about the death of a rank: Ray refuses a call to it with the reason."""
        try:
            ray.get(self._handles[rank].__ray_ready__.remote(), timeout=_CAUSE_SECONDS)
        except Exception as error:
            return self.context.describe(self.identity(rank), error).what
        return "not known"

    def close(self) -> None:
        """End every worker, and release what the group held."""
        self._stopped.set()
        self.context.watch.remove_workers(self)
        reviver = self._reviver
        if reviver is not None and reviver is not threading.current_thread():
            reviver.join(timeout=_END_SECONDS)
        with self._lock:
            if self._is_ended:
                return
            self.is_closed = True
            if self.context.is_connected():
                try:
                    self._end({self.identity(rank).address: handle for rank, handle in self._handles.items()})
                    with contextlib.suppress(RoostError):
                        self._port.release()
                finally:
                    if self._reservation is not None:
                        self._reservation.close()
                if self._is_kept:
                    with contextlib.suppress(RoostError):
                        self.context.worker_manager.remove_group(self.name)
            if self._is_kept:
                self.context.logs.forget([spec.address for spec in self._specs])
                self.context.forget_group(self.name, self.close)
            # Set last, so that a close that was interrupted can be repeated.
            self._is_ended = True

    def _start(self, specs: Sequence[WorkerSpec], *, is_restart: bool) -> Mapping[Phase, float]:
        """Start these workers, and return when the last of them reached each phase."""
        context, recipe = self.context, self._recipe
        launch = Launch(context, specs, self._port, self._stopped, seconds=recipe.timeout, is_restart=is_restart)
        nodes = len({spec.node.rank for spec in specs})
        try:
            with show_launch(context.console, self.name, launch.board, nodes) as view:
                launch.request(recipe.remote, recipe.options)
                context.worker_manager.register_actors([_record(spec) for spec in specs])
                if not is_restart:
                    # The name is ours now. What the group needs is taken while the processes start.
                    self._is_kept = True
                    context.keep_group(self.name, self.close)
                    put_aside(context.run_dir.logs.joinpath(*self.name.split(":")))
                    self._port.propose()
                reports = launch.run(recipe.constructor, view)
            context.worker_manager.add_group(
                self._record,
                {address: report.pid for address, report in reports.items()},
                {address: report.log.path for address, report in reports.items() if not report.log.is_shared},
            )
        except BaseException:
            self._end(launch.handles)
            raise
        self._handles |= {spec.identity.rank: launch.handles[spec.address] for spec in specs}
        return launch.board.reached

    def _end(self, handles: Mapping[str, ActorHandle[Any]]) -> None:
        for handle in handles.values():
            with contextlib.suppress(Exception):
                ray.kill(handle)
        wait_for_names_to_go(set(handles), _END_SECONDS)

    def _ready_handles(self, ranks: Sequence[int]) -> list[ActorHandle[Any]]:
        # Wait for a restart that is under way.
        with self._lock if self._recipe.restarts else contextlib.nullcontext():
            return [self._handles[rank] for rank in ranks]

    def _revive_soon(self, dead: set[str]) -> None:
        """Restart dead workers in a thread, because the watch must go on: called every time it finds some."""
        if (self._reviver is None or not self._reviver.is_alive()) and not self._stopped.is_set():
            name = f"roost-{self.name}"
            self._reviver = threading.Thread(target=self._revive, args=(dead,), name=name, daemon=True)
            self._reviver.start()

    def _revive(self, dead: set[str]) -> None:
        """Restart each dead rank that has restarts left."""
        for rank, left in self._restarts_left.items():
            address = self.identity(rank).address
            # A restart by the user may have been quicker.
            if address not in dead or not left or self._stopped.is_set() or rank in self.alive():
                continue
            self._restarts_left[rank] -= 1
            try:
                self.restart(rank)
                log.warning("%s died and was restarted in its place; %s left", address, plural(left - 1, "restart"))
            except Exception as error:
                log.error("%s died and could not be restarted: %s", address, error)


def _record(spec: WorkerSpec) -> WorkerRecord:
    placement = spec.identity.placement
    return WorkerRecord(
        address=spec.address,
        node_rank=placement.cluster_node_rank,
        rank=placement.rank,
        group=spec.identity.group_name,
        accelerators=placement.local_hardware_ranks if placement.hardware_type == "accelerator" else (),
        since=time.time(),
    )
