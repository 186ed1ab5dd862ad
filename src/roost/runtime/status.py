"""A Ray cluster seen from outside any job: its nodes, the jobs on it, and what earlier jobs left behind."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ray.util import list_named_actors

from roost.config.topology import Topology
from roost.errors import ClusterError, RoostError
from roost.machine.processes import find_processes
from roost.placement.plan import Piece
from roost.runtime.connect import connection
from roost.runtime.managers.namespaces import MANAGER_NAMES, get_job
from roost.runtime.managers.node_manager import JOB_VARIABLE, JobInfo
from roost.runtime.managers.worker_manager import WorkerManager
from roost.runtime.nodes import discover
from roost.runtime.nodes.info import NodeInfo
from roost.runtime.reserve.occupancy import Holdings, find_holdings, pieces_on
from roost.text import join_words, plural

_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """One job on the cluster."""

    namespace: str
    job: JobInfo | None
    """The driver; None if the job's manager does not answer."""
    managers: tuple[str, ...]
    """The managers that are alive."""
    workers: tuple[tuple[str, int], ...]
    """How many workers are in each state."""

    @property
    def missing_managers(self) -> tuple[str, ...]:
        """The managers that have died."""
        return tuple(name for name in MANAGER_NAMES if name not in self.managers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A process that a worker started and that outlived its job."""

    node: str
    pid: int
    command: str
    job: str
    since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """The state of a cluster."""

    address: str
    nodes: tuple[NodeInfo, ...]
    jobs: tuple[JobStatus, ...]
    leftovers: tuple[Leftover, ...]
    holdings: Holdings

    def to_dict(self) -> dict[str, Any]:
        """Return the status in types that JSON has."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveHardware:
    """The part of a cluster that a job would get, and who holds what of it."""

    topology: Topology
    nodes: tuple[NodeInfo, ...]
    holdings: Holdings
    note: str = ""

    @property
    def taken(self) -> list[Piece]:
        """The accelerators that are held, wholly or in part."""
        return sorted(self.holdings.by_piece)


def get_nodes(address: str | None = None) -> tuple[NodeInfo, ...]:
    """Return the nodes of a cluster in the order that a job gives them."""
    with _visit(address) as (_, nodes, _):
        return nodes


def get_hardware(num_nodes: int | None, address: str | None = None) -> LiveHardware:
    """Return the hardware that a job with `num_nodes` would get; ClusterError if there are fewer nodes."""
    with _visit(address) as (_, nodes, _):
        holdings = find_holdings(nodes)
    if num_nodes is not None and len(nodes) < num_nodes:
        raise ClusterError(
            f"num_nodes is {num_nodes}, but the cluster has {plural(len(nodes), 'node')} now: "
            f"{join_words([str(node) for node in nodes])}",
            hint="wait for the others, or plan on --cluster or --inventory",
        )
    used, notice = discover.first_nodes(nodes, num_nodes)
    note = f"note: {notice}" if notice else ""
    return LiveHardware(topology=discover.make_topology(used), nodes=used, holdings=holdings, note=note)


def get_status(address: str | None = None) -> ClusterStatus:
    """Return the nodes, the jobs and the leftovers of a cluster."""
    with _visit(address) as (found, nodes, deadline):
        jobs = _jobs()
        # Of a job that lost its manager only the namespace is known: what belongs to it is not left over.
        alive = {f"{found}|{item.namespace}:" if item.job is None else f"{item.job.id}/" for item in jobs}
        return ClusterStatus(
            address=found,
            nodes=nodes,
            jobs=jobs,
            leftovers=_leftovers(nodes, found, alive, deadline),
            holdings=find_holdings(nodes),
        )


@contextlib.contextmanager
def _visit(address: str | None) -> Iterator[tuple[str, tuple[NodeInfo, ...], float]]:
    """Connect in an unused namespace that nothing is left in; yield the address, the nodes, and the deadline."""
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    connection.check_can_connect()
    made = connection.connect(address, f"roost-look-{os.getpid()}", may_start=False)
    try:
        yield made.address, discover.discover(discover.wait_for_nodes(1, deadline), deadline), deadline
    finally:
        connection.disconnect(made)


def _jobs() -> tuple[JobStatus, ...]:
    """Find the jobs of all namespaces that have a manager of Roost, even if the node manager has died."""
    managers: dict[str, set[str]] = {}
    for entry in list_named_actors(all_namespaces=True):
        if entry["name"] in MANAGER_NAMES:
            managers.setdefault(entry["namespace"], set()).add(entry["name"])
    jobs = []
    for namespace, alive in sorted(managers.items()):
        workers: Counter[str] = Counter()
        with contextlib.suppress(RoostError):
            workers.update(str(worker.state) for worker in WorkerManager.get_proxy(namespace).get_workers())
        names = tuple(name for name in MANAGER_NAMES if name in alive)
        states = tuple(sorted(workers.items()))
        jobs.append(JobStatus(namespace=namespace, job=get_job(namespace), managers=names, workers=states))
    return tuple(jobs)


def _leftovers(nodes: tuple[NodeInfo, ...], address: str, alive: set[str], deadline: float) -> tuple[Leftover, ...]:
    """Find processes marked by jobs of this cluster that are no longer alive."""
    # Nodes on one machine share its processes.
    machines = {node.network: node for node in nodes}
    names = {node.ray_id: str(node) for node in machines.values()}
    found = discover.on_nodes(names, find_processes, JOB_VARIABLE, deadline=deadline)
    return tuple(
        Leftover(node=names[ray_id], pid=item.pid, command=item.command, job=mark.partition("|")[2], since=item.since)
        for ray_id, processes in found.items()
        for item in processes
        for mark in item.environment.values()
        if mark.startswith(f"{address}|") and not mark.startswith(tuple(alive))
    )
