"""`JobContext`: what reserving, launching and calling need to know about the job around them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ray.exceptions import ActorUnavailableError

from roost.config.topology import Topology
from roost.errors import ClusterError
from roost.runtime.connect.connection import Connection, check_not_fork, is_alive, is_fork
from roost.runtime.connect.stop import Stop
from roost.runtime.failures.failure import Failure, FailureKind, describe_death, failure_of
from roost.runtime.managers.collective_manager import CollectiveManager
from roost.runtime.managers.node_manager import JobInfo, NodeManager
from roost.runtime.managers.watch import Watch
from roost.runtime.managers.worker_manager import WorkerManager
from roost.runtime.nodes.discover import has_ended, live_nodes
from roost.runtime.nodes.info import NodeInfo
from roost.runtime.nodes.log_forwarder import LogForwarder
from roost.runtime.nodes.ray_state import living
from roost.runtime.process.identity import WorkerIdentity
from roost.runtime.process.output import STARTED_AGAIN, read_tail
from roost.runtime.runs.console import Console
from roost.runtime.runs.folder import RunDir, log_file
from roost.runtime.runs.recorder import Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """A job as one of its processes sees it."""

    job: JobInfo
    nodes: tuple[NodeInfo, ...]
    topology: Topology
    port_range: tuple[int, int] | None
    master_port: int
    node_manager: NodeManager
    worker_manager: WorkerManager
    collective_manager: CollectiveManager
    console: Console
    recorder: Recorder
    logs: LogForwarder
    watch: Watch
    connection: Connection | None
    """The connection to Ray that this process made; None in a worker, which Ray connected."""
    owner: str | None
    """The name of this process, if it can end before the job does: a worker, or a driver that attached."""
    stop: Stop
    """Whether this process was asked to stop."""
    is_closed: threading.Event = field(default_factory=threading.Event)
    open_groups: dict[str, Callable[[float], None]] = field(default_factory=dict)
    """How to close each group that this process launched and has not closed, within some seconds."""
    at_close: list[Callable[[], None]] = field(default_factory=list)
    """What else to end with the Cluster, after the groups."""

    @property
    def run_dir(self) -> RunDir:
        """The folder of the run."""
        return self.job.run_dir

    @property
    def is_connected(self) -> bool:
        """Whether this process still has its connection; if not, Ray's calls would start a new Ray."""
        return not is_fork() and (self.connection is None or self.connection.is_current)

    @property
    def is_reachable(self) -> bool:
        """Whether Ray answers at the other end, if need be after a blip; if not, Ray's calls would block."""
        return self.is_connected and (self.connection is None or is_alive(self.connection))

    def check_open(self) -> None:
        """Raise ClusterError if the Cluster was closed or lost its head, or if this process is a fork of its own."""
        check_not_fork()
        if self.is_closed.is_set():
            raise ClusterError("this Cluster is closed", hint="make a new one")
        if self.connection is not None and self.connection.head.is_given_up:
            raise self.connection.head.gone()

    def check_reachable(self, doing: str) -> None:
        """Raise ClusterError if this process cannot reach Ray."""
        self.check_open()
        if self.connection is not None and not is_alive(self.connection):
            raise self.connection.head.gone(doing)

    def keep_group(self, name: str, close: Callable[[float], None]) -> None:
        """Close a group when the Cluster is closed, at the latest."""
        self.open_groups[name] = close
        self.logs.start()

    def forget_group(self, name: str, close: Callable[[float], None]) -> None:
        """Stop keeping a group that is closed."""
        if self.open_groups.get(name) == close:
            del self.open_groups[name]

    def log_path(self, address: str) -> str:
        """Return the path of a worker's log in the run's folder."""
        return str(log_file(self.run_dir.logs, address))

    def describe(self, identity: WorkerIdentity, error: BaseException) -> Failure:
        """Turn what Ray raised for a call into the worker's failure, with its node's state and the end of its log."""
        path = self.log_path(identity.address)
        found = failure_of(error, address=identity.address, rank=identity.rank, node=identity.node, log_path=path)
        if isinstance(error, ActorUnavailableError):
            with contextlib.suppress(Exception):
                if living({identity.address}):
                    return replace(found, kind=FailureKind.EXCEPTION)
        if found.kind is not FailureKind.DEATH:
            # Another worker may have raised it, whose result is an argument of this call.
            return replace(found, log_path=self.log_path(found.address))
        self.logs.catch_up()
        tail = read_tail(path)
        # What an earlier process of this rank printed says nothing about the end of this one.
        what = describe_death(error, tail.rpartition(STARTED_AGAIN)[2])
        with contextlib.suppress(Exception):
            node = self.nodes[identity.placement.cluster_node_rank]
            if node.ray_id not in {item.ray_id for item in live_nodes()}:
                what = "its node is gone" if has_ended(node.ray_id) else "its node does not answer, it may still run"
        return replace(found, what=what, log_tail=tail)
