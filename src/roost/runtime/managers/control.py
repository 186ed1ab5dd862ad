"""`JobControl`: what a process needs to reserve, launch and call, beside what it needs to talk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError

from roost.config.topology import Topology
from roost.runtime.connect.stop import Stop
from roost.runtime.failures.failure import Failure, FailureKind, describe_death, failure_of
from roost.runtime.managers.collective_manager import CollectiveManager
from roost.runtime.managers.context import JobContext
from roost.runtime.managers.long_waits import LongWaits
from roost.runtime.managers.watch import Watch
from roost.runtime.nodes.discover import has_ended, live_nodes, make_topology
from roost.runtime.nodes.log_forwarder import Elsewhere, LogForwarder
from roost.runtime.nodes.ray_state import living
from roost.runtime.process.identity import WorkerIdentity
from roost.runtime.process.output import STARTED_AGAIN, read_tail
from roost.runtime.runs.console import Console
from roost.runtime.runs.folder import log_file
from roost.runtime.runs.recorder import Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class JobControl(JobContext):
    """A job as a process sees it that launches groups or calls them."""

    topology: Topology
    collective_manager: CollectiveManager
    console: Console
    recorder: Recorder
    logs: LogForwarder
    watch: Watch
    stop: Stop
    """Whether this process was asked to stop."""
    long_waits: LongWaits
    open_groups: dict[str, Callable[[float], None]] = field(default_factory=dict)
    """How to close each group that this process launched, within some seconds: closing the Cluster closes the rest."""
    actors: dict[str, ActorHandle[Any]] = field(default_factory=dict)
    """The actors that this process allocated."""

    @classmethod
    def over(
        cls,
        context: JobContext,
        collective_manager: CollectiveManager,
        console: Console,
        recorder: Recorder,
        stop: Stop,
    ) -> JobControl:
        """Add what launching and calling need; the driver of a new job fetches and shows the logs of all its groups."""
        job, nodes, made = context.job, context.nodes, context.connection
        logs = LogForwarder(job.run_dir, console)
        if made is not None and context.owner is None:

            def find_logs() -> list[Elsewhere]:
                return [
                    Elsewhere(nodes[worker.node_rank].ray_id, worker.node_rank, worker.address, worker.log)
                    for worker in context.worker_manager.get_workers()
                    if worker.log
                ]

            logs = LogForwarder(job.run_dir, console, find_logs, lambda: made.is_current and made.head.is_there)
        return cls(
            **{item.name: getattr(context, item.name) for item in fields(context)},
            topology=make_topology(nodes, context.groups),
            collective_manager=collective_manager,
            console=console,
            recorder=recorder,
            logs=logs,
            watch=Watch(nodes, made),
            stop=stop,
            long_waits=LongWaits(context, console, recorder, stop),
        )

    def log_path(self, address: str) -> str:
        """Return the path of a worker's log in the run's folder."""
        return str(log_file(self.run_dir.logs, address))

    def describe(self, identity: WorkerIdentity, error: BaseException) -> Failure:
        """Turn what Ray raised for a call, or what the call reports, into the worker's failure.

        A death gets its node's state and the end of its log.
        """
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
