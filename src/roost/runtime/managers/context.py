"""`JobContext`: a job as one of its processes sees it, which is all that a worker needs to talk to the others.

A worker's first message makes one, so this module imports little; `control.py` adds what launching and calling need.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, ClassVar, Self

import ray

from roost.deadline import Deadline
from roost.errors import ClusterError, ConfigError
from roost.runtime.connect.calls import check_not_fork, is_fork, is_worker
from roost.runtime.failures.meanwhile import Meanwhile
from roost.runtime.limits import CALL_SECONDS
from roost.runtime.managers.job_info import JobView
from roost.runtime.managers.node_manager import NodeManager
from roost.runtime.managers.worker_manager import WorkerManager
from roost.runtime.nodes.info import NodeInfo
from roost.runtime.runs.folder import RunDir

if TYPE_CHECKING:
    from roost.runtime.connect.connection import Connection

process_lock = threading.RLock()
"""Held while this process joins its job or leaves it: a process has one job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext(JobView):
    """A job as one of its processes sees it."""

    _current: ClassVar[JobContext | None] = None

    node_manager: NodeManager
    worker_manager: WorkerManager
    connection: Connection | None
    """The connection to Ray that this process made; None in a worker, which Ray connected."""
    owner: str | None
    """The name of this process, if it can end before the job does: a worker, or a driver that attached."""
    failures: Meanwhile
    """The failures of the job so far."""
    pid: int = field(default_factory=os.getpid)
    is_closed: threading.Event = field(default_factory=threading.Event)
    at_close: list[Callable[[], None]] = field(default_factory=list)
    """How to end what this process talks through, last first."""

    @classmethod
    def attach(cls, deadline: Deadline | None = None) -> JobContext:
        """Return this process's part in its job: that of its Cluster, or that of the worker that it is.

        No Cluster is made for it. ClusterError in a process that belongs to no job.
        """
        with process_lock:
            current = JobContext._current
            if current is not None and current.pid == os.getpid():
                return current
            check_not_fork()
            if not is_worker():
                raise ClusterError("this process has no Cluster", hint="make one: Cluster()")
            context = ray.get_runtime_context()
            owner = context.get_actor_name()
            if not owner:
                from roost.runtime.nodes.ray_state import name_of_job  # for a task of Ray's, which has no name

                owner = name_of_job(context.get_job_id())
            managers = NodeManager.get_proxy(context.namespace), WorkerManager.get_proxy(context.namespace)
            joined = JobContext.join(*managers, None, owner, deadline or Deadline.after(CALL_SECONDS))
            joined.make_current()
            atexit.register(joined.leave)
            return joined

    @classmethod
    def join(
        cls,
        node_manager: NodeManager,
        worker_manager: WorkerManager,
        connection: Connection | None,
        owner: str | None,
        deadline: Deadline,
    ) -> Self:
        """Ask a job's managers for its nodes; only the driver of a new job has no `owner`."""
        view = node_manager.within(max(0.1, deadline.left)).get_view()
        return cls(
            **{item.name: getattr(view, item.name) for item in fields(view)},
            node_manager=node_manager,
            worker_manager=worker_manager,
            connection=connection,
            owner=owner,
            failures=Meanwhile(lambda after, seconds: worker_manager.within(seconds).get_failures(after)),
        )

    def make_current(self) -> None:
        """Let `attach` return this one."""
        JobContext._current = self
        Meanwhile.current = self.failures

    def leave(self) -> None:
        """End what this process talks through; nothing is asked of Ray."""
        with process_lock:
            atexit.unregister(self.leave)
            if JobContext._current is self:
                JobContext._current = Meanwhile.current = None
            self.is_closed.set()
            # A fork has the sockets of its parent.
            while self.at_close and self.pid == os.getpid():
                self.at_close.pop()()

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
        return self.is_connected and (self.connection is None or self.connection.is_alive)

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
        if self.connection is not None and not self.connection.is_alive:
            raise self.connection.head.gone(doing)

    def node(self, rank: int) -> NodeInfo:
        """Return a node by its rank; ConfigError if there is none."""
        if type(rank) is not int or not 0 <= rank < len(self.nodes):
            has = "only 0" if len(self.nodes) == 1 else f"0-{len(self.nodes) - 1}"
            raise ConfigError(f"there is no node {rank!r}: the cluster has {has}")
        return self.nodes[rank]
