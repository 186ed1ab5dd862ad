"""A Ray cluster seen from outside any job: its nodes, the jobs on it, and what earlier jobs left behind."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from roost.config.topology import Topology
from roost.deadline import Deadline
from roost.errors import ClusterError, RoostError
from roost.machine.processes import find_processes
from roost.placement.plan import Piece
from roost.runtime.connect import connection
from roost.runtime.connect.calls import list_actors
from roost.runtime.limits import HANG_SECONDS, STATUS_SECONDS
from roost.runtime.managers.job_info import JOB_VARIABLE, JobInfo, driver_of
from roost.runtime.managers.namespaces import MANAGER_NAMES, get_job
from roost.runtime.managers.node_manager import NodeManager
from roost.runtime.managers.worker_manager import WorkerManager
from roost.runtime.nodes import discover
from roost.runtime.nodes.info import NodeInfo, SickNode
from roost.runtime.nodes.ray_state import read_jobs
from roost.runtime.reserve.occupancy import Holdings, find_holdings, pieces_on
from roost.text import join_words, plural


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveNodes:
    """The nodes of a cluster in the order that a job gives them."""

    nodes: tuple[NodeInfo, ...]
    sick: tuple[SickNode, ...]
    topology: Topology | None
    """The hardware of the nodes that answer, if any does."""


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
    waits: tuple[tuple[str, str], ...] = ()
    """Who waits for which accelerators."""

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
    sick: tuple[SickNode, ...]
    jobs: tuple[JobStatus, ...]
    leftovers: tuple[Leftover, ...]
    holdings: Holdings

    def to_dict(self) -> dict[str, Any]:
        """Return the status in types that JSON has."""
        return {
            "address": self.address,
            "nodes": [node.to_dict() for node in self.nodes],
            "sick": [node.to_dict() for node in self.sick],
            "jobs": [
                {
                    "namespace": item.namespace,
                    "driver": None if item.job is None else asdict(item.job),
                    "managers": list(item.managers),
                    "workers": dict(item.workers),
                    "waits": dict(item.waits),
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


def get_nodes(address: str | None = None, timeout: float = STATUS_SECONDS) -> LiveNodes:
    """Return the nodes of a cluster, including nodes that cannot be probed."""
    with visit(address, timeout) as (_, deadline):
        nodes, sick = discover.survey(deadline)
    return LiveNodes(nodes=nodes, sick=sick, topology=discover.make_topology(nodes) if nodes else None)


def get_hardware(num_nodes: int | None, address: str | None = None, timeout: float = STATUS_SECONDS) -> LiveHardware:
    """Return the hardware that a job with `num_nodes` would get; ClusterError if there are fewer nodes."""
    with visit(address, timeout) as (_, deadline):
        found = discover.wait_for_nodes(1, deadline)
        if num_nodes is not None and len(found) < num_nodes:
            raise ClusterError(
                f"num_nodes is {num_nodes}, but the cluster has {plural(len(found), 'node')} now: {join_words(found)}",
                hint="wait for the others, or plan on --cluster or --inventory",
            )
        nodes, notice = discover.discover(found, deadline, count=num_nodes)
        holdings = find_holdings(nodes)
    note = f"note: {notice}" if notice else ""
    return LiveHardware(topology=discover.make_topology(nodes), nodes=nodes, holdings=holdings, note=note)


def get_status(address: str | None = None, timeout: float = STATUS_SECONDS) -> ClusterStatus:
    """Return the nodes, the jobs and the leftovers of a cluster."""
    with visit(address, timeout) as (found, deadline):
        nodes, sick = discover.survey(deadline)
        leftovers, jobs = find_left_processes(nodes, found, deadline)
        return ClusterStatus(
            address=found, nodes=nodes, sick=sick, jobs=jobs, leftovers=leftovers, holdings=find_holdings(nodes)
        )


@contextlib.contextmanager
def visit(address: str | None, timeout: float = STATUS_SECONDS) -> Iterator[tuple[str, Deadline]]:
    """Connect in an unused namespace that nothing is left in; yield the address, and the deadline for the nodes."""
    deadline = Deadline.after(timeout)
    connection.check_can_connect()
    made = connection.connect(address, f"roost-look-{os.getpid()}", may_start=False, timeout=timeout)
    try:
        yield made.address, deadline
    finally:
        connection.disconnect(made)


def find_left_processes(
    nodes: tuple[NodeInfo, ...], address: str, deadline: Deadline, user: str | None = None
) -> tuple[tuple[Leftover, ...], tuple[JobStatus, ...]]:
    """Find processes, perhaps only those of one user, that jobs of this cluster left behind, and the jobs that run.

    A job runs that has a manager in any namespace, even if the node manager has died.
    """
    # Nodes on one machine share its processes.
    machines = {node.network: node for node in nodes}
    names = {node.ray_id: str(node) for node in machines.values()}
    found = discover.on_nodes(names, find_processes, JOB_VARIABLE, user, deadline=deadline)
    # After the processes: a job that starts in between has left nothing over.
    managers: dict[str, set[str]] = {}
    for entry in list_actors(all_namespaces=True):
        if entry["name"] in MANAGER_NAMES:
            managers.setdefault(entry["namespace"], set()).add(entry["name"])
    jobs = []
    for namespace, alive in sorted(managers.items()):
        workers: Counter[str] = Counter()
        with contextlib.suppress(RoostError):
            manager = WorkerManager.get_proxy(namespace).within(HANG_SECONDS)
            workers.update(str(worker.state) for worker in manager.get_workers())
        waits: dict[str, str] = {}
        with contextlib.suppress(RoostError):
            waits = NodeManager.get_proxy(namespace).within(HANG_SECONDS).get_waits()
        jobs.append(
            JobStatus(
                namespace=namespace,
                job=get_job(namespace, HANG_SECONDS),
                managers=tuple(name for name in MANAGER_NAMES if name in alive),
                workers=tuple(sorted(workers.items())),
                waits=tuple(waits.items()),
            )
        )
    # Of a job that lost its manager only the namespace is known: what belongs to it is not left over.
    running = tuple(f"{address}|{item.namespace}:" if item.job is None else f"{item.job.id}/" for item in jobs)
    drivers = {job.pid for job in read_jobs().values() if job.user and not job.has_ended}
    left = [
        Leftover(
            node=names[ray_id],
            pid=item.pid,
            command=item.command,
            job=mark.partition("|")[2],
            since=item.since,
        )
        for ray_id, processes in found.items()
        for item in processes
        for mark in item.environment.values()
        # A driver may live though its managers do not.
        if mark.startswith(f"{address}|") and not mark.startswith(running) and driver_of(mark) not in drivers
    ]
    return tuple(left), tuple(jobs)
