"""A look at a Ray cluster from outside any job: its nodes, the jobs on it, what earlier ones left behind."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ray.util import list_named_actors

from roost.errors import RoostError
from roost.machine.processes import find_processes
from roost.runtime.connect import connection
from roost.runtime.managers.namespaces import MANAGER_NAMES, get_job
from roost.runtime.managers.node_manager import JOB_VARIABLE, JobInfo
from roost.runtime.managers.worker_manager import WorkerManager
from roost.runtime.nodes import discover
from roost.runtime.nodes.info import NodeInfo
from roost.runtime.reserve.occupancy import Holdings, find_holdings, pieces_on


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """One job on the cluster."""

    namespace: str
    job: JobInfo | None
    """Who runs it; None where its manager does not answer."""
    managers: tuple[str, ...]
    """Those that are alive."""
    workers: tuple[tuple[str, int], ...]
    """How many workers are in each state."""

    @property
    def missing_managers(self) -> tuple[str, ...]:
        """Those that should be there and are not."""
        return tuple(name for name in MANAGER_NAMES if name not in self.managers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A process that a worker of a job started, and that outlived the job."""

    node: str
    pid: int
    command: str
    job: str
    since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """What is on a cluster now."""

    address: str
    nodes: tuple[NodeInfo, ...]
    jobs: tuple[JobStatus, ...]
    leftovers: tuple[Leftover, ...]
    holdings: Holdings

    def to_dict(self) -> dict[str, Any]:
        """The status as JSON can say it."""
        return {
            "address": self.address,
            "nodes": [node.to_dict() for node in self.nodes],
            "jobs": [
                {
                    "namespace": item.namespace,
                    "driver": None if item.job is None else asdict(item.job),
                    "managers": list(item.managers),
                    "workers": dict(item.workers),
                }
                for item in self.jobs
            ],
            "accelerators": [
                {
                    "node_rank": piece.node_rank,
                    "local_rank": piece.local_rank,
                    "holders": [asdict(item) for item in self.holdings.of(piece)],
                }
                for node in self.nodes
                for piece in pieces_on(node)
            ],
            "held_somewhere": [
                {"node_rank": rank, **asdict(item)} for rank, held in self.holdings.somewhere.items() for item in held
            ],
            "leftovers": [asdict(item) for item in self.leftovers],
        }


def look_at_holdings(address: str | None = None, timeout: float = 60) -> tuple[tuple[NodeInfo, ...], Holdings]:
    """The nodes of a cluster, and who has which accelerator now."""
    deadline = time.monotonic() + timeout
    with _guest(address):
        nodes = discover.discover(discover.wait_for_nodes(1, deadline), deadline)
        return nodes, find_holdings(nodes)


def look_at_nodes(address: str | None = None, timeout: float = 60) -> tuple[NodeInfo, ...]:
    """The nodes of a cluster in the order that a job would give them."""
    deadline = time.monotonic() + timeout
    with _guest(address):
        return discover.discover(discover.wait_for_nodes(1, deadline), deadline)


def look_at_jobs(address: str | None = None, timeout: float = 60) -> ClusterStatus:
    """Nodes, jobs and leftovers of a cluster."""
    deadline = time.monotonic() + timeout
    with _guest(address) as found:
        nodes = discover.discover(discover.wait_for_nodes(1, deadline), deadline)
        jobs = _jobs()
        # Of a job that lost its manager only the namespace is known: what belongs to it is not left over.
        alive = {f"{found.address}|{item.namespace}:" if item.job is None else f"{item.job.id}/" for item in jobs}
        return ClusterStatus(
            address=found.address,
            nodes=nodes,
            jobs=jobs,
            leftovers=_leftovers(nodes, found.address, alive, deadline),
            holdings=find_holdings(nodes),
        )


@contextlib.contextmanager
def _guest(address: str | None) -> Iterator[connection.Connection]:
    """A connection in a namespace of nobody, which leaves nothing behind."""
    connection.check_can_connect()
    made = connection.connect(address, f"roost-look-{os.getpid()}", may_start=False)
    try:
        yield made
    finally:
        connection.disconnect(made)


def _jobs() -> tuple[JobStatus, ...]:
    """The jobs of every namespace with a manager of ours, also where the node manager is lost."""
    managers: dict[str, set[str]] = {}
    for entry in list_named_actors(all_namespaces=True):
        if entry["name"] in MANAGER_NAMES:
            managers.setdefault(entry["namespace"], set()).add(entry["name"])
    return tuple(_job_status(namespace, managers[namespace]) for namespace in sorted(managers))


def _job_status(namespace: str, managers: set[str]) -> JobStatus:
    workers: Counter[str] = Counter()
    with contextlib.suppress(RoostError):
        workers.update(str(worker.state) for worker in WorkerManager.get_proxy(namespace).get_workers())
    return JobStatus(
        namespace=namespace,
        job=get_job(namespace),
        managers=tuple(name for name in MANAGER_NAMES if name in managers),
        workers=tuple(sorted(workers.items())),
    )


def _leftovers(nodes: tuple[NodeInfo, ...], address: str, alive: set[str], deadline: float) -> tuple[Leftover, ...]:
    """Processes marked by a job of this cluster whose mark begins like that of no job that is alive."""
    # One look for each machine: nodes that share one share its processes.
    machines = {node.network: node for node in nodes}
    names = {node.ray_id: str(node) for node in machines.values()}
    found = discover.on_nodes(names, find_processes, JOB_VARIABLE, deadline=deadline)
    return tuple(
        Leftover(
            node=names[ray_id],
            pid=process.pid,
            command=process.command,
            job=mark.partition("|")[2],
            since=process.since,
        )
        for ray_id, processes in found.items()
        for process in processes
        for mark in process.environment.values()
        if mark.startswith(f"{address}|") and not mark.startswith(tuple(alive))
    )
