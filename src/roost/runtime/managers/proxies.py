"""The three managers of a job: named actors on node 0 around plain state, and proxies to talk to them.

    proxy = WorkerManager.get_proxy()
    proxy.get_workers()

A proxy's methods are ordinary calls: they wait with a deadline, raise the error that the manager raised, and raise
`ManagerDied` where there is no manager any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup

from roost.config.node_groups import NodeGroup
from roost.config.topology import Topology
from roost.errors import ClusterError, ManagerDied, RoostError
from roost.placement.plan import Piece
from roost.runtime.managers.ledgers.ports import PortLease
from roost.runtime.managers.ledgers.reservations import HeldSlot, Slot
from roost.runtime.managers.ledgers.workers import CollectiveGroup, GroupRecord, WorkerRecord
from roost.runtime.nodes.discover import make_topology
from roost.runtime.nodes.info import NodeInfo
from roost.runtime.nodes.placement_groups import Ask, Pin
from roost.runtime.process.plain_actor import WORKER_MANAGER
from roost.runtime.runs.folder import RunDir

CALL_SECONDS = 60.0
JOB_VARIABLE = "ROOST_JOB"
"""Marks what the workers of a job start: by it, processes that outlive their job are found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInfo:
    """Who runs a job: enough to tell one job from another on a shared cluster."""

    cluster: str
    """Where Ray is."""
    namespace: str
    host: str
    pid: int
    user: str
    command: str
    since: float
    run_dir: RunDir
    """The folder of this run, on the driver's machine."""

    @property
    def id(self) -> str:
        """What tells this job from every other, also from an earlier one in the same namespace."""
        return f"{self.cluster}|{self.namespace}:{self.host}:{self.pid}:{self.since:.0f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """All that a process needs to attach to a job, in one answer."""

    nodes: tuple[NodeInfo, ...]
    groups: tuple[NodeGroup, ...]
    job: JobInfo
    master_port: int
    port_range: tuple[int, int] | None


class Manager:
    """A proxy to one of the job's managers."""

    NAME: ClassVar[str]

    def __init__(self, handle: ActorHandle[Any], namespace: str) -> None:
        self._handle = handle
        self._namespace = namespace

    @classmethod
    def get_proxy(cls, namespace: str | None = None) -> Self:
        """The proxy to this manager of the job that this process belongs to."""
        if not ray.is_initialized():
            raise ClusterError(f"there is no {cls.NAME}: this process has no Cluster", hint="make one: Cluster()")
        found = namespace or ray.get_runtime_context().namespace
        try:
            return cls(ray.get_actor(cls.NAME, namespace=found), found)
        except ValueError:
            raise ManagerDied(
                f"there is no {cls.NAME} in namespace {found!r}",
                hint="the job has ended, or its manager died: `roost status` shows the jobs that are there",
            ) from None

    @property
    def handle(self) -> ActorHandle[Any]:
        """The actor behind the proxy."""
        return self._handle

    def _call(self, method: str, *arguments: Any, timeout: float = CALL_SECONDS) -> Any:
        try:
            return ray.get(getattr(self._handle, method).remote(*arguments), timeout=timeout)
        except AttributeError:
            raise ClusterError(f"the actor {self.NAME!r} of {self._namespace!r} is not a manager of Roost") from None
        except RayTaskError as error:
            if isinstance(error.cause, RoostError):
                raise error.cause from None
            raise
        except RayActorError as error:
            raise self.died(error) from None
        except GetTimeoutError:
            raise ClusterError(
                f"the {self.NAME} of {self._namespace!r} did not answer {method!r} in {timeout:.0f} s"
            ) from None

    def died(self, error: RayActorError) -> ManagerDied:
        """The error that says that this manager is gone."""
        why = " ".join(str(error).split())
        return ManagerDied(
            f"the {self.NAME} of {self._namespace!r} is gone: {why[:500]}",
            hint="what it knew is lost: close the Cluster and make a new one",
        )


class WorkerManager(Manager):
    """Tracks every worker's metadata: address, rank, node, hardware, state and since when."""

    NAME = WORKER_MANAGER
    _on_the_way: ClassVar[list[Any]] = []
    """Registrations of this process that nobody waited for yet."""

    def register_actors(self, workers: Sequence[WorkerRecord]) -> None:
        """Add workers that are actors, without waiting; what this process asks afterwards takes it into account."""
        self._on_the_way.append(self._handle.register.remote(list(workers), are_actors=True))

    def _call(self, method: str, *arguments: Any, timeout: float = CALL_SECONDS) -> Any:
        # The manager is free to take calls in another order than they were made in.
        calls = list(self._on_the_way)
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=CALL_SECONDS)
            self._on_the_way[:] = [call for call in self._on_the_way if call not in calls]
        return super()._call(method, *arguments, timeout=timeout)

    @classmethod
    def forget_registrations(cls) -> None:
        """Wait for none of them any more: the connection that they were made on ends."""
        cls._on_the_way.clear()

    def register(self, workers: Sequence[WorkerRecord]) -> None:
        """Add workers, all or none, in one call."""
        self._call("register", list(workers))

    def get_workers(self, addresses: Sequence[str] | None = None) -> list[WorkerRecord]:
        """The records of these workers in this order, or of all, in one call."""
        found: list[WorkerRecord] = self._call("get_workers", None if addresses is None else list(addresses))
        return found

    def set_ready(self, pids: Mapping[str, int | None]) -> None:
        """Mark workers as ready, with their processes."""
        self._call("set_ready", dict(pids))

    def add_group(self, group: GroupRecord, pids: Mapping[str, int | None], logs: Mapping[str, str]) -> None:
        """A group is ready: let other processes find it."""
        self._call("add_group", group, dict(pids), dict(logs))

    def remove_group(self, name: str) -> None:
        """A group is closed."""
        self._call("remove_group", name)

    def get_group(self, name: str) -> GroupRecord:
        """A group that was launched, by its name."""
        found: GroupRecord = self._call("get_group", name)
        return found


class CollectiveManager(Manager):
    """Holds the communication groups: members, address, and a port that is leased and not guessed."""

    NAME = "CollectiveManager"

    def create_group(self, name: str, members: Sequence[str], node_rank: int) -> CollectiveGroup:
        """The group of that name, made if it is not there: its first member listens on a port of `node_rank`."""
        found: CollectiveGroup = self._call("create_group", name, tuple(members), node_rank)
        return found

    def get_group(self, name: str) -> CollectiveGroup:
        """A group by its name."""
        found: CollectiveGroup = self._call("get_group", name)
        return found

    def get_groups(self) -> list[CollectiveGroup]:
        """All groups."""
        found: list[CollectiveGroup] = self._call("get_groups")
        return found

    def remove_group(self, name: str) -> None:
        """Forget a group and give its port back."""
        self._call("remove_group", name)


class NodeManager(Manager):
    """Tells the layout of the nodes, the master address and port, leases ports, and knows what is reserved."""

    NAME = "NodeManager"

    def get_nodes(self) -> tuple[NodeInfo, ...]:
        """The nodes in the order of their ranks."""
        found: tuple[NodeInfo, ...] = self._call("get_nodes")
        return found

    def get_node_groups(self) -> tuple[NodeGroup, ...]:
        """The node groups of the job."""
        found: tuple[NodeGroup, ...] = self._call("get_node_groups")
        return found

    def get_topology(self) -> Topology:
        """The planner's view of nodes and groups."""
        return make_topology(self.get_nodes(), self.get_node_groups())

    def get_master_ip(self) -> str:
        """The address of node 0."""
        return self.get_nodes()[0].address

    def get_master_port(self) -> int:
        """The port on node 0 that was leased for the job."""
        found: int = self._call("get_master_port")
        return found

    def get_num_gpus_per_node(self) -> list[int]:
        """How many accelerators each node has."""
        return [node.num_accelerators for node in self.get_nodes()]

    def get_view(self, timeout: float = CALL_SECONDS) -> JobView:
        """Nodes, groups, driver, ports: all that is needed to attach."""
        found: JobView = self._call("get_view", timeout=timeout)
        return found

    def get_job(self, timeout: float = CALL_SECONDS) -> JobInfo:
        """Who runs the job."""
        found: JobInfo = self._call("get_job", timeout=timeout)
        return found

    def lease_ports(
        self, node_rank: int, count: int = 1, holder: str | None = None, leases: int = 1
    ) -> list[PortLease]:
        """Lease blocks of consecutive ports on a node; `holder` is the name of the worker that they end with."""
        found: list[PortLease] = self._call("lease_ports", node_rank, count, holder, leases)
        return found

    def propose_ports(self, node_rank: int, count: int, holder: str | None = None) -> list[PortLease]:
        """Lease single ports without a trial on the node: the holder tries them, and gives back what is too much."""
        found: list[PortLease] = self._call("propose_ports", node_rank, count, holder)
        return found

    def release_ports(self, leases: Sequence[PortLease]) -> None:
        """Give leases back."""
        self._call("release_ports", list(leases))

    def ask_slots(self, user: str, shares: Mapping[Piece, float | None]) -> tuple[list[Slot], list[Piece]]:
        """Which of these accelerators the job has reserved already, and which not."""
        found: tuple[list[Slot], list[Piece]] = self._call("ask_slots", user, dict(shares))
        return found

    def make_groups(self, user: str, owner: str | None, asks: Sequence[Ask], pin: Pin) -> list[PlacementGroup]:
        """Placement groups for somebody who tries: they belong to the job, and go away with `user` or its `owner`."""
        found: list[PlacementGroup] = self._call("make_groups", user, owner, list(asks), pin)
        return found

    def discard_groups(self, user: str, groups: Sequence[PlacementGroup]) -> None:
        """Remove placement groups that were not what the user wants."""
        self._call("discard_groups", user, list(groups))

    def take_slots(self, user: str, shares: Mapping[Piece, float | None], new: Sequence[Slot]) -> list[Piece]:
        """Use accelerators, new ones among them; gives those that are not there any more, and then nothing is done."""
        found: list[Piece] = self._call("take_slots", user, dict(shares), list(new))
        return found

    def let_go_slots(self, user: str) -> None:
        """A user is done, or gave up: what nobody in the job needs any more is given back."""
        self._call("let_go_slots", user)

    def drop_slots(self, pieces: Sequence[Piece]) -> None:
        """These accelerators are not the job's any more."""
        self._call("drop_slots", list(pieces))

    def get_slots(self, timeout: float = CALL_SECONDS) -> list[HeldSlot]:
        """All that the job has reserved, and who uses it."""
        found: list[HeldSlot] = self._call("get_slots", timeout=timeout)
        return found

    def count_leased_ports(self) -> int:
        """How many ports are leased now."""
        found: int = self._call("count_leased_ports")
        return found


MANAGER_NAMES = (NodeManager.NAME, WorkerManager.NAME, CollectiveManager.NAME)
