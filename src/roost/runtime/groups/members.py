"""The workers of one group as this process reaches them: calls, deaths, restarts. All narrowed groups share it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle
from ray.util import list_named_actors

from roost.errors import ClusterError, ConfigError, RoostError, WorkerDied
from roost.runtime.connect.connection import wait_for_names_to_go
from roost.runtime.failures.failure import Failure, FailureKind
from roost.runtime.groups.result import CallResult
from roost.runtime.groups.stream import ItemStream
from roost.runtime.launch.launch import Launch, Member
from roost.runtime.launch.progress import LaunchBoard
from roost.runtime.launch.site import JobSite, describe_failure
from roost.runtime.launch.worker_spec import Seat
from roost.runtime.managers.ledgers.workers import GroupRecord, WorkerRecord
from roost.runtime.nodes.discover import live_nodes
from roost.runtime.process.actor import MethodKind
from roost.runtime.process.identity import WorkerIdentity
from roost.runtime.process.packing import pack, pack_call
from roost.runtime.reserve.reservation import Reservation, accelerators_of
from roost.runtime.reserve.reserver import RESERVE_SECONDS
from roost.runtime.runs.folder import put_aside
from roost.text import plural, shorten

if TYPE_CHECKING:
    from roost.runtime.cluster import Cluster

log: logging.Logger = logging.getLogger(__name__)

_END_SECONDS = 10.0
_WATCH_SECONDS = 0.5
_CAUSE_SECONDS = 2.0


class Crew:
    """The workers of a group, by rank."""

    def __init__(self, cluster: Cluster, record: GroupRecord) -> None:
        self.name: str = record.name
        self.methods: dict[str, MethodKind] = {name: MethodKind(kind) for name, kind in record.methods}
        self._cluster = cluster
        self._record = record
        # By rank; those of `_lost` are looked up when they are needed.
        self._handles: dict[int, ActorHandle[Any]] = {}
        self._lost = set(range(len(record.identities)))
        self._is_closed = False

    @property
    def cluster(self) -> Cluster:
        """The job's Cluster."""
        return self._cluster

    @property
    def size(self) -> int:
        """How many workers the group has."""
        return len(self._record.identities)

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._is_closed

    def identity(self, rank: int) -> WorkerIdentity:
        """Who a rank is."""
        return self._record.identities[rank]

    def handles(self, ranks: Sequence[int]) -> list[ActorHandle[Any]]:
        """The actors behind some ranks."""
        self.check_open()
        return self._ready_handles(ranks)

    def alive(self) -> list[int]:
        """The ranks whose workers are alive now."""
        if not self.is_reachable() or not self._is_current():
            return []
        names = set(list_named_actors())
        return [rank for rank in range(self.size) if self.identity(rank).address in names]

    def is_reachable(self) -> bool:
        """Whether the group and its Cluster are open, and Ray is there: Ray's calls would start a new one."""
        return not self._is_closed and self._cluster.is_open and self._cluster.is_connected()

    def call(self, method: str, ranks: Sequence[int], sent: Sequence[tuple[Any, ...]]) -> CallResult:
        """Call a method on some ranks, each with what is sent to it."""
        self.check_open()
        handles = self._ready_handles(ranks)
        refs = [getattr(handle, method).remote(*args) for handle, args in zip(handles, sent, strict=True)]
        return CallResult(self, method, ranks, refs)

    def stream(self, method: str, ranks: Sequence[int], sent: tuple[Any, ...]) -> ItemStream:
        """The items that a generator method yields on some ranks, with the rank, as they come."""
        self.check_open()
        return ItemStream(self, method, ranks, self._ready_handles(ranks), sent)

    def pack(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The arguments of a call as what is sent."""
        try:
            return pack_call(args, kwargs)
        except Exception as error:
            raise ConfigError(
                f"{_culprit(args, kwargs)} of {method!r} cannot be sent to a worker: {shorten(str(error), 300)}",
                hint="what is sent has to be picklable: send what it is made from, and make it in the worker",
            ) from None

    def describe(self, error: BaseException, rank: int) -> Failure:
        """What an error of Ray says of a worker, with what can be found out beside."""
        failure = describe_failure(self._cluster, self.identity(rank), error)
        if failure.kind is FailureKind.DEATH:
            self._lost.add(rank)
        return failure

    def check_open(self) -> None:
        """Refuse a group that was closed, or whose Cluster was."""
        if self._is_closed:
            raise ClusterError(f"the group {self.name!r} is closed", hint="launch it again")
        self._cluster.check_open()

    def close(self) -> None:
        """Let go of the group; its workers belong to the process that launched it."""
        self._is_closed = True

    def restart(self, rank: int) -> None:
        """Refused here: see OwnCrew."""
        raise ClusterError(
            f"{self.identity(rank).address} can only be restarted by the process that launched the group"
        )

    def _is_current(self) -> bool:
        """Whether the name still stands for this launch."""
        try:
            return self._cluster.worker_manager.get_group(self.name).launch == self._record.launch
        except ClusterError:
            return False

    def _ready_handles(self, ranks: Sequence[int]) -> list[ActorHandle[Any]]:
        # Whoever launched the group may have restarted those that died.
        for rank in self._lost & set(ranks):
            address = self.identity(rank).address
            try:
                self._handles[rank] = ray.get_actor(address, namespace=self._cluster.namespace)
            except ValueError:
                raise WorkerDied(f"{address} on {self.identity(rank).node} is dead") from None
            self._lost.discard(rank)
        return [self._handles[rank] for rank in ranks]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the workers of a group are made, the first time and again."""

    remote: Any
    """The actor class."""
    made_of: Any
    """The user's class and its arguments, packed."""
    options: Mapping[str, Any]
    timeout: float
    restarts: int
    reserve: bool
    share: float | None


class OwnCrew(Crew):
    """The workers of a group that this process launched: it can restart them, and ends them."""

    def __init__(self, cluster: Cluster, record: GroupRecord, seats: Sequence[Seat], recipe: Recipe) -> None:
        super().__init__(cluster, record)
        self._seats = list(seats)
        self._recipe = recipe
        self._lock = threading.RLock()
        self._restarts_left = dict.fromkeys(range(len(seats)), recipe.restarts)
        self._stopped = threading.Event()
        self._site = JobSite(cluster, {seat.address: seat.identity for seat in seats}, self._stopped)
        self._watcher: threading.Thread | None = None
        self._reservation: Reservation | None = None
        self._is_ended = False
        self._is_kept = False
        """Whether the name is ours, and other processes can find it."""

    def _is_current(self) -> bool:
        return True

    def launch(self) -> dict[str, float]:
        """Start all of them, and give the seconds of the phases; what was started is stopped if that fails."""
        began = time.monotonic()
        try:
            self._reserve()
            reached = {"reserved": time.monotonic()} if self._reservation is not None else {}
            members, board = self._start(self._seats, is_restart=False)
        except BaseException:
            self.close()
            raise
        self._handles = {seat.identity.rank: members[seat.address].handle for seat in self._seats}
        if self._recipe.restarts:
            self._watcher = threading.Thread(target=self._watch, name=f"roost-{self.name}", daemon=True)
            self._watcher.start()
        reached |= {str(phase): when for phase, when in board.reached.items()}
        return {phase: when - began for phase, when in reached.items()}

    def _reserve(self) -> None:
        """Let Ray know what is taken, before anything is started there."""
        if not self._recipe.reserve:
            return
        pieces = {seat.address: accelerators_of(seat.identity.placement) for seat in self._seats}
        share, workers = self._recipe.share, Counter(piece for own in pieces.values() for piece in own)
        shares = {piece: None if share is None else share * count for piece, count in workers.items()}
        self._reservation = self._cluster.reserve_accelerators(
            self.name,
            shares,
            {self.name: [seat.identity.placement for seat in self._seats]},
            timeout=min(self._recipe.timeout, RESERVE_SECONDS),
        )
        slots = {slot.piece: slot for slot in self._reservation.slots}
        self._site.slots = self._reservation.slots
        self._seats = [
            replace(seat, slots=tuple(slots[piece] for piece in pieces[seat.address]), share=share)
            for seat in self._seats
        ]

    def restart(self, rank: int) -> None:
        """Start a rank whose worker is dead anew, in its place."""
        with self._lock:
            self.check_open()
            seat = self._seats[rank]
            if rank in self.alive():
                raise ConfigError(f"{seat.address} is alive", hint="only a dead worker can be restarted in its place")
            if seat.node.ray_id not in {node.ray_id for node in live_nodes()}:
                raise ClusterError(
                    f"{seat.address} cannot be restarted: {seat.node} is gone", hint="close the group and plan anew"
                )
            began, reason = time.monotonic(), self._cause_of_death(rank)
            failure: BaseException | None = None
            try:
                # Ray keeps the name of an actor that died by itself until it is told to end it.
                self._end({seat.address: self._handles[rank]})
                members, _ = self._start([seat], is_restart=True)
                self._handles[rank] = members[seat.address].handle
            except BaseException as error:
                failure = error
                raise
            finally:
                self._cluster.recorder.note_restart(seat.address, reason, time.monotonic() - began, failure)

    def _cause_of_death(self, rank: int) -> str:
        """What is known of the end of a rank that is dead: a call to it is refused with the reason."""
        try:
            ray.get(self._handles[rank].__ray_ready__.remote(), timeout=_CAUSE_SECONDS)
        except Exception as error:
            return describe_failure(self._cluster, self.identity(rank), error).what
        return "not known"

    def close(self) -> None:
        """End every worker, and give back what the group had."""
        self._stopped.set()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(timeout=_END_SECONDS)
        with self._lock:
            if self._is_ended:
                return
            self._is_closed = True
            if self._cluster.is_connected():
                try:
                    self._end({self.identity(rank).address: handle for rank, handle in self._handles.items()})
                    with contextlib.suppress(RoostError):
                        self._site.release_ports()
                finally:
                    if self._reservation is not None:
                        self._reservation.close()
                if self._is_kept:
                    with contextlib.suppress(RoostError):
                        self._cluster.worker_manager.remove_group(self.name)
            if self._is_kept:
                self._cluster.logs.forget([seat.address for seat in self._seats])
                self._cluster.forget_group(self.name, self.close)
            # Only now: whoever is interrupted in the middle can close it again.
            self._is_ended = True

    def _start(self, seats: list[Seat], *, is_restart: bool) -> tuple[dict[str, Member], LaunchBoard]:
        cluster, recipe = self._cluster, self._recipe
        launch = Launch(seats, cluster.nodes, recipe.timeout)
        nodes = len({seat.node.rank for seat in seats})
        try:
            with cluster.screen.launching(self.name, launch.board, nodes) as view:
                launch.request(recipe.remote, cluster.namespace, recipe.options)
                cluster.worker_manager.register_actors([_record(seat) for seat in seats])
                if not is_restart:
                    self._keep()
                members = launch.run(recipe.made_of, view, self._site, is_restart=is_restart)
            reports = {address: member.report for address, member in members.items()}
            cluster.worker_manager.add_group(
                self._record,
                {address: report.pid for address, report in reports.items()},
                {address: report.log.path for address, report in reports.items() if not report.log.is_shared},
            )
        except BaseException:
            self._end(launch.handles)
            raise
        return members, launch.board

    def _keep(self) -> None:
        """The name is ours now: while the processes start, take what the group needs."""
        self._is_kept = True
        self._cluster.keep_group(self.name, self.close)
        put_aside(self._cluster.job.run_dir.logs.joinpath(*self.name.split(":")))
        self._site.propose_ports(self._seats[0].node.rank)

    def _end(self, handles: Mapping[str, ActorHandle[Any]]) -> None:
        for handle in handles.values():
            with contextlib.suppress(Exception):
                ray.kill(handle)
        wait_for_names_to_go(set(handles), _END_SECONDS)

    def _ready_handles(self, ranks: Sequence[int]) -> list[ActorHandle[Any]]:
        # A restart that is going on is waited for.
        with self._lock if self._recipe.restarts else contextlib.nullcontext():
            return [self._handles[rank] for rank in ranks]

    def _watch(self) -> None:
        """Restart whoever dies, as often as was allowed."""
        while not self._stopped.wait(_WATCH_SECONDS):
            if not self.is_reachable():
                return
            try:
                dead = sorted(set(range(self.size)) - set(self.alive()))
            except Exception as error:
                log.warning("who of %r is alive cannot be told just now: %s", self.name, error)
                continue
            for rank in [rank for rank in dead if self._restarts_left[rank]]:
                self._restarts_left[rank] -= 1
                self._revive(rank)

    def _revive(self, rank: int) -> None:
        address = self.identity(rank).address
        left = self._restarts_left[rank]
        try:
            if not self._stopped.is_set():
                self.restart(rank)
                log.warning("%s died and was restarted in its place; %s left", address, plural(left, "restart"))
        except Exception as error:
            log.error("%s died and could not be restarted: %s", address, error)


def _record(seat: Seat) -> WorkerRecord:
    placement = seat.identity.placement
    return WorkerRecord(
        address=seat.address,
        node_rank=placement.cluster_node_rank,
        rank=placement.rank,
        group=seat.identity.group_name,
        accelerators=placement.local_hardware_ranks if placement.hardware_type == "accelerator" else (),
        since=time.time(),
    )


def _culprit(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Which argument cannot be pickled."""
    named = [(f"argument {place}", value) for place, value in enumerate(args)]
    for what, value in [*named, *((f"argument {name!r}", value) for name, value in kwargs.items())]:
        try:
            pack(value)
        except Exception:
            return f"{what} ({type(value).__name__})"
    return "an argument"
