"""The three managers of a job: named actors on node 0 around plain state, and proxies to talk to them.

    proxy = WorkerManager.get_proxy()
    proxy.get_workers()

A proxy's methods are ordinary calls: they wait with a deadline, raise the error that the manager raised, and raise
`ManagerDied` where there is no manager any more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roost.errors import ClusterError, ConfigError, ManagerDied, NameTaken, RoostError
from roost.placement.groups import NodeGroup
from roost.placement.topology import Topology
from roost.runtime.bootstrap import WORKER_MANAGER, die_with_raylet
from roost.runtime.discover import make_topology, remote_function
from roost.runtime.ledgers import CollectiveGroup, CollectiveLedger, RollCall, WorkerLedger, WorkerRecord, WorkerState
from roost.runtime.node_info import NodeInfo
from roost.runtime.ports import Block, PortLease, PortLedger, lease_range, taken_ports

log = logging.getLogger(__name__)

CALL_SECONDS = 60.0
JOB_VARIABLE = "ROOST_JOB"
"""Marks what the workers of a job start: by it, processes that outlive their job are found."""
_WATCH_SECONDS = 0.5
_TRY_SECONDS = 30.0
_MAX_PORTS = 4096


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

    def register_actor(self, worker: WorkerRecord) -> None:
        """Add a worker that is an actor, without waiting; what this process asks afterwards takes it into account."""
        self._on_the_way.append(self._handle.register.remote([worker], are_actors=True))

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
    """Tells the layout of the nodes, the master address and port, and leases ports."""

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

    def get_job(self) -> JobInfo:
        """Who runs the job."""
        found: JobInfo = self._call("get_job")
        return found

    def lease_ports(
        self, node_rank: int, count: int = 1, holder: str | None = None, leases: int = 1
    ) -> list[PortLease]:
        """Lease blocks of consecutive ports on a node; `holder` is the name of the worker that they end with."""
        found: list[PortLease] = self._call("lease_ports", node_rank, count, holder, leases)
        return found

    def release_ports(self, leases: Sequence[PortLease]) -> None:
        """Give leases back."""
        self._call("release_ports", list(leases))

    def count_leased_ports(self) -> int:
        """How many ports are leased now."""
        found: int = self._call("count_leased_ports")
        return found


MANAGER_NAMES = (NodeManager.NAME, WorkerManager.NAME, CollectiveManager.NAME)


class _ManagerActor:
    """What all manager actors share: being watched, and watching the job's other actors."""

    def __init__(self) -> None:
        die_with_raylet()
        self.roll = RollCall()

    async def until_death(self) -> None:
        """A call that ends only with the actor: by it the owner sees the actor die."""
        await asyncio.Event().wait()

    async def living(self) -> set[str]:
        """The names of the job's actors that are alive now."""
        return set(await asyncio.to_thread(list_named_actors))

    async def watch(self, known: Callable[[], set[str]], bury: Callable[[set[str]], object]) -> None:
        """Tell `bury` which of the named actors that `known` gives have died, for as long as the job runs."""
        while True:
            # In this order: whoever comes while we look is not among those we look for.
            before = known()
            missing = self.roll.missing(before, await self.living())
            if missing:
                bury(missing)
            await asyncio.sleep(_WATCH_SECONDS)


class WorkerManagerActor(_ManagerActor):
    """The shell around the worker ledger."""

    def __init__(self) -> None:
        super().__init__()
        self._ledger = WorkerLedger()
        self._watching: asyncio.Task[None] | None = None

    async def register(self, workers: list[WorkerRecord], *, are_actors: bool = False) -> None:
        self._ledger.register(workers, time.time(), are_actors=are_actors)
        if are_actors:
            # Ray knew the name before we did: one that is not there any more has died.
            self.roll.expect(worker.address for worker in workers)
        if self._watching is None:
            self._watching = asyncio.create_task(self.watch(lambda: self._ledger.living, self._bury))

    async def get_workers(self, addresses: list[str] | None) -> list[WorkerRecord]:
        return self._ledger.get(addresses)

    async def set_ready(self, pids: dict[str, int | None]) -> None:
        self._ledger.update(WorkerState.READY, pids, time.time())

    def _bury(self, missing: set[str]) -> None:
        self._ledger.update(WorkerState.DEAD, dict.fromkeys(missing), time.time())


class CollectiveManagerActor(_ManagerActor):
    """The shell around the ledger of communication groups."""

    def __init__(self, namespace: str) -> None:
        super().__init__()
        self._ledger = CollectiveLedger()
        self._leases: dict[str, PortLease] = {}
        self._namespace = namespace
        self._lock = asyncio.Lock()

    async def create_group(self, name: str, members: tuple[str, ...], node_rank: int) -> CollectiveGroup:
        if not members:
            raise ConfigError(f"communication group {name!r} has no members")
        # Every member asks for the group: the first one makes it, the others find it.
        async with self._lock:
            found = self._ledger.find(name, members)
            if found is not None:
                return found
            # In a variable: on older Ray a method does not keep its actor's handle.
            manager = self._node_manager()
            lease = (await manager.lease_ports.remote(node_rank, 1, None, 1))[0]
            self._leases[name] = lease
            return self._ledger.add(CollectiveGroup(name=name, members=members, address=lease.address, port=lease.port))

    async def get_group(self, name: str) -> CollectiveGroup:
        return self._ledger.get(name)

    async def get_groups(self) -> list[CollectiveGroup]:
        return list(self._ledger.groups.values())

    async def remove_group(self, name: str) -> None:
        self._ledger.remove(name)
        lease = self._leases.pop(name, None)
        if lease is not None:
            manager = self._node_manager()
            await manager.release_ports.remote([lease])

    def _node_manager(self) -> ActorHandle[Any]:
        return ray.get_actor(NodeManager.NAME, namespace=self._namespace)


class NodeManagerActor(_ManagerActor):
    """The shell around nodes and the port ledger."""

    def __init__(
        self, nodes: tuple[NodeInfo, ...], groups: tuple[NodeGroup, ...], job: JobInfo, ports: tuple[int, int] | None
    ) -> None:
        super().__init__()
        self._nodes = nodes
        self._groups = groups
        self._job = job
        self._port_range = ports
        ranges = {node.network: lease_range(node.ephemeral_ports, ports) for node in nodes}
        self._ledger = PortLedger(ranges, seed=hash((job.host, job.pid, job.since)))
        self._waiting: dict[int, list[_Wanted]] = {node.rank: [] for node in nodes}
        self._trying: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watching = False
        self._master_port: asyncio.Future[int] | None = None

    async def get_nodes(self) -> tuple[NodeInfo, ...]:
        return self._nodes

    async def get_node_groups(self) -> tuple[NodeGroup, ...]:
        return self._groups

    async def get_job(self) -> JobInfo:
        return self._job

    async def get_view(self) -> JobView:
        port = await self.get_master_port()
        return JobView(
            nodes=self._nodes, groups=self._groups, job=self._job, master_port=port, port_range=self._port_range
        )

    async def get_master_port(self) -> int:
        if self._master_port is None:
            self._master_port = asyncio.get_running_loop().create_future()
            try:
                lease = (await self.lease_ports(0, 1, None, 1))[0]
            except BaseException as error:
                failed, self._master_port = self._master_port, None
                failed.set_exception(error)
                # Whoever waits beside us gets it too; if nobody does, it was raised here.
                failed.exception()
                raise
            self._master_port.set_result(lease.port)
        return await asyncio.shield(self._master_port)

    async def lease_ports(self, node_rank: int, count: int, holder: str | None, leases: int) -> list[PortLease]:
        if not 0 <= node_rank < len(self._nodes):
            raise ConfigError(f"there is no node {node_rank}: the cluster has 0-{len(self._nodes) - 1}")
        if not (1 <= count <= _MAX_PORTS and 1 <= leases <= _MAX_PORTS):
            raise ConfigError(f"{leases} x {count} ports were asked for: ask for 1 to {_MAX_PORTS} of each")
        if holder is not None:
            await self._watch_holder(holder)
        node = self._nodes[node_rank]
        wanted = _Wanted(count=count, holder=holder, leases=leases, done=asyncio.get_running_loop().create_future())
        self._waiting[node.rank].append(wanted)
        if node.rank not in self._trying:
            self._trying.add(node.rank)
            self._start(self._try(node))
        return [
            PortLease(
                node_rank=node_rank,
                address=node.address,
                start=block.start,
                count=count,
                holder=holder,
                number=block.number,
            )
            for block in await wanted.done
        ]

    async def _watch_holder(self, holder: str) -> None:
        """Know that the holder is alive before it holds something, so that its death is one."""
        if not self.roll.has_seen(holder):
            self.roll.expect({holder} & await self.living())
        if not self._watching:
            self._watching = True
            self._start(self.watch(lambda: self._ledger.holders, self._bury))

    async def release_ports(self, leases: list[PortLease]) -> None:
        for lease in leases:
            block = Block(start=lease.start, count=lease.count, number=lease.number)
            self._ledger.release(self._nodes[lease.node_rank].network, block)

    async def count_leased_ports(self) -> int:
        return self._ledger.held

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _try(self, node: NodeInfo) -> None:
        """Serve everybody who waits for ports of this node: propose, try all there at once, repeat."""
        strategy = NodeAffinitySchedulingStrategy(node_id=node.ray_id, soft=False)
        task = remote_function(taken_ports).options(scheduling_strategy=strategy)
        try:
            while waiting := self._waiting[node.rank]:
                self._waiting[node.rank] = []
                try:
                    await self._try_once(node, waiting, task)
                except Exception as error:
                    why = f"no answer in {_TRY_SECONDS:g} s" if isinstance(error, TimeoutError) else str(error)
                    for wanted in waiting:
                        wanted.fail(self._ledger, node.network, ClusterError(f"ports of {node} cannot be tried: {why}"))
        finally:
            self._trying.discard(node.rank)

    async def _try_once(self, node: NodeInfo, waiting: list[_Wanted], task: Any) -> None:
        proposed: list[tuple[_Wanted, Block]] = []
        for wanted in waiting:
            try:
                for _ in range(wanted.leases - len(wanted.blocks)):
                    proposed.append((wanted, self._ledger.propose(node.network, wanted.count, wanted.holder)))
            except RoostError as error:
                self._give_back(node, [item for item in proposed if item[0] is wanted])
                proposed = [item for item in proposed if item[0] is not wanted]
                wanted.fail(self._ledger, node.network, error)
        if not proposed:
            return
        try:
            trial = task.remote([(block.start, block.count) for _, block in proposed])
            taken = set(await asyncio.wait_for(trial, _TRY_SECONDS))
        except BaseException:
            self._give_back(node, proposed)
            raise
        for wanted, block in proposed:
            in_use = taken & set(block.ports)
            if in_use:
                self._ledger.refuse(node.network, block, in_use)
            else:
                wanted.blocks.append(block)
        for wanted in dict.fromkeys(wanted for wanted, _ in proposed):
            if len(wanted.blocks) == wanted.leases:
                wanted.done.set_result(wanted.blocks)
            else:
                self._waiting[node.rank].append(wanted)

    def _give_back(self, node: NodeInfo, proposed: list[tuple[_Wanted, Block]]) -> None:
        for _, block in proposed:
            self._ledger.release(node.network, block)

    def _bury(self, missing: set[str]) -> None:
        for name in missing:
            self._ledger.release_holder(name)


@dataclass(eq=False, slots=True)
class _Wanted:
    """A request for ports that is not served yet."""

    count: int
    holder: str | None
    leases: int
    done: asyncio.Future[list[Block]]
    blocks: list[Block] = field(default_factory=list)

    def fail(self, ledger: PortLedger, network: str, error: RoostError) -> None:
        for block in self.blocks:
            ledger.release(network, block)
        if not self.done.done():
            self.done.set_exception(error)


def start_managers(
    namespace: str,
    nodes: tuple[NodeInfo, ...],
    groups: tuple[NodeGroup, ...],
    job: JobInfo,
    ports: tuple[int, int] | None,
) -> tuple[NodeManager, WorkerManager, CollectiveManager]:
    """Start the three on node 0 at once; NameTaken where another driver was first in this namespace."""
    where = NodeAffinitySchedulingStrategy(node_id=nodes[0].ray_id, soft=False)

    def start(manager: type[Manager], actor: type, *arguments: Any) -> ActorHandle[Any]:
        options = {"name": manager.NAME, "namespace": namespace, "num_cpus": 0, "max_concurrency": 10_000}
        remote: Any = ray.remote(actor)
        handle: ActorHandle[Any] = remote.options(scheduling_strategy=where, **options).remote(*arguments)
        return handle

    try:
        # The first name decides who has the namespace.
        node_manager = NodeManager(start(NodeManager, NodeManagerActor, nodes, groups, job, ports), namespace)
    except ValueError:
        raise NameTaken(f"another job has namespace {namespace!r}") from None
    return (
        node_manager,
        WorkerManager(start(WorkerManager, WorkerManagerActor), namespace),
        CollectiveManager(start(CollectiveManager, CollectiveManagerActor, namespace), namespace),
    )
