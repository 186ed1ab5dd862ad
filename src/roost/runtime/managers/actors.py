"""The actors behind the managers' proxies: thin shells around plain state, on node 0 of the job."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util import list_named_actors
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roost.config.node_groups import NodeGroup
from roost.errors import ClusterError, ConfigError, NameTaken, RoostError
from roost.machine.ports import lease_range, taken_ports
from roost.machine.processes import die_with_parent
from roost.placement.plan import Piece
from roost.runtime.managers.ledgers.ports import Block, PortLease, PortLedger
from roost.runtime.managers.ledgers.reservations import HeldSlot, Slot, SlotLedger
from roost.runtime.managers.ledgers.workers import (
    CollectiveGroup,
    CollectiveLedger,
    GroupRecord,
    RollCall,
    WorkerLedger,
    WorkerRecord,
    WorkerState,
)
from roost.runtime.managers.proxies import CollectiveManager, JobInfo, JobView, Manager, NodeManager, WorkerManager
from roost.runtime.nodes.discover import remote_function
from roost.runtime.nodes.info import NodeInfo
from roost.runtime.nodes.placement_groups import Ask, Pin, make_group, remove_groups
from roost.runtime.nodes.ray_state import living_jobs

_WATCH_SECONDS = 0.5
_TRY_SECONDS = 30.0
_MAX_PORTS = 4096


class _ManagerActor:
    """What all manager actors share: being watched, and watching the job's other actors."""

    def __init__(self) -> None:
        die_with_parent()
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

    async def add_group(self, group: GroupRecord, pids: dict[str, int | None], logs: dict[str, str]) -> None:
        self._ledger.add_group(group, pids, logs, time.time())

    async def remove_group(self, name: str) -> None:
        self._ledger.remove_group(name)

    async def get_group(self, name: str) -> GroupRecord:
        return self._ledger.get_group(name)

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
    """The shell around nodes, the port ledger, and what the job has reserved."""

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
        self._slots = SlotLedger()
        self._waiting: dict[int, list[_Wanted]] = {node.rank: [] for node in nodes}
        self._trying: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watching = False
        self._master_lock = asyncio.Lock()
        self._master_port: int | None = None

    async def living(self) -> set[str]:
        """Actors, and processes that attached to the job."""
        return await super().living() | await asyncio.to_thread(living_jobs, self._slots.owners)

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
        # Whoever asks first leases it, the others wait for that.
        async with self._master_lock:
            if self._master_port is None:
                self._master_port = (await self.lease_ports(0, 1, None, 1))[0].port
            return self._master_port

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
        return [_lease(node, block, holder) for block in await wanted.done]

    async def propose_ports(self, node_rank: int, count: int, holder: str | None) -> list[PortLease]:
        """Lease single ports that nobody in the job has; whether strangers have them is for the holder to try."""
        node = self._nodes[node_rank]
        if holder is not None:
            await self._watch_holder(holder)
        blocks = [self._ledger.propose(node.network, 1, holder) for _ in range(count)]
        return [_lease(node, block, holder) for block in blocks]

    async def _watch_holder(self, holder: str) -> None:
        """Know that the holder is alive before it holds something, so that its death is one."""
        if not self.roll.has_seen(holder):
            self.roll.expect({holder} & await self.living())
        if not self._watching:
            self._watching = True
            self._start(self.watch(lambda: self._ledger.holders | self._slots.owners, self._bury))

    async def release_ports(self, leases: list[PortLease]) -> None:
        for lease in leases:
            block = Block(start=lease.start, count=lease.count, number=lease.number)
            self._ledger.release(self._nodes[lease.node_rank].network, block)

    async def count_leased_ports(self) -> int:
        return self._ledger.held

    async def ask_slots(self, user: str, shares: dict[Piece, float | None]) -> tuple[list[Slot], list[Piece]]:
        return self._slots.ask(user, shares)

    async def make_groups(self, user: str, owner: str | None, asks: list[Ask], pin: Pin) -> list[PlacementGroup]:
        if owner is not None:
            await self._watch_holder(owner)
        made: list[PlacementGroup] = []
        for ask in asks:
            # In a thread: Ray's call waits for its head.
            made.append(await asyncio.to_thread(make_group, ask, self._job.namespace, self._nodes, pin))
            self._slots.add_drafts(user, owner, made[-1:])
        return made

    async def discard_groups(self, user: str, groups: list[PlacementGroup]) -> None:
        self._slots.discard_drafts(user, groups)
        await asyncio.to_thread(remove_groups, groups)

    async def take_slots(self, user: str, shares: dict[Piece, float | None], new: list[Slot]) -> list[Piece]:
        gone, surplus = self._slots.take(user, shares, new)
        await asyncio.to_thread(remove_groups, surplus)
        return gone

    async def let_go_slots(self, user: str) -> None:
        await asyncio.to_thread(remove_groups, self._slots.let_go(user))

    async def drop_slots(self, pieces: list[Piece]) -> None:
        await asyncio.to_thread(remove_groups, self._slots.drop(pieces))

    async def get_slots(self) -> list[HeldSlot]:
        return self._slots.held

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
            remove_groups(self._slots.let_go_of_owner(name))


def _lease(node: NodeInfo, block: Block, holder: str | None) -> PortLease:
    return PortLease(
        node_rank=node.rank,
        address=node.address,
        start=block.start,
        count=block.count,
        holder=holder,
        number=block.number,
    )


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
