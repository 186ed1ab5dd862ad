"""The node manager: the layout of the nodes, leased ports, and what the job has reserved."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar

from roost.config.node_groups import NodeGroup
from roost.errors import ClusterError, ConfigError, RoostError
from roost.machine.ports import lease_range, taken_ports
from roost.runtime.connect.calls import on_node
from roost.runtime.limits import PORT_TRY_SECONDS
from roost.runtime.managers.base import Manager, served
from roost.runtime.managers.job_info import JobInfo, JobView
from roost.runtime.managers.ledgers.ports import Block, PortLease, PortLedger
from roost.runtime.nodes.info import NodeInfo
from roost.runtime.process.plain_actor import WORKER_MANAGER

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from roost.config.topology import Topology
    from roost.placement.plan import Piece
    from roost.runtime.managers.ledgers.reservations import HeldSlot, Slot
    from roost.runtime.nodes.placement_groups import Ask

_MAX_PORTS = 4096


class NodeManager(Manager):
    """Knows the layout of the nodes, the master address and port, leases ports, and tracks what is reserved."""

    NAME: ClassVar[str] = "NodeManager"
    STATE: ClassVar[tuple[str, ...]] = ("_ledger", "_slots", "_master_port")
    KEEPER: ClassVar[str] = WORKER_MANAGER
    WARDS: ClassVar[tuple[str, ...]] = (WORKER_MANAGER, "CollectiveManager")

    def _begin(
        self, nodes: tuple[NodeInfo, ...], groups: tuple[NodeGroup, ...], job: JobInfo, ports: tuple[int, int] | None
    ) -> None:
        from roost.runtime.managers.ledgers.reservations import SlotLedger  # only the actor needs it

        self._nodes = nodes
        self._groups = groups
        self._job = job
        self._port_range = ports
        ranges = {node.network: lease_range(node.ephemeral_ports, ports) for node in nodes}
        self._ledger = PortLedger(ranges, seed=hash((job.host, job.pid, job.since)))
        self._slots = SlotLedger()
        self._waits: dict[str, tuple[str, str | None]] = {}
        """By user of accelerators: what it waits for, and its owner."""
        self._waiting: dict[int, list[_Wanted]] = {node.rank: [] for node in nodes}
        # Python keeps no reference to a task that runs.
        self._trying: dict[int, asyncio.Task[None]] = {}
        self._master_lock = asyncio.Lock()
        self._master_port: int | None = None

    @served
    async def get_nodes(self) -> tuple[NodeInfo, ...]:
        """Return the nodes in the order of their ranks."""
        return self._nodes

    @served
    async def get_node_groups(self) -> tuple[NodeGroup, ...]:
        """Return the node groups of the job."""
        return self._groups

    @served
    async def get_job(self) -> JobInfo:
        """Return who runs the job."""
        return self._job

    @served
    async def get_view(self) -> JobView:
        """Return nodes, groups, driver and ports: all that is needed to attach."""
        return JobView(
            nodes=self._nodes,
            groups=self._groups,
            job=self._job,
            master_port=await self._lease_master_port(),
            port_range=self._port_range,
        )

    @served
    async def get_master_port(self) -> int:
        """Return the port on node 0 that is leased for the job."""
        return await self._lease_master_port()

    def get_topology(self) -> Topology:
        """Return the planner's view of nodes and groups."""
        from roost.runtime.nodes.discover import make_topology  # a worker that only talks asks for no topology

        return make_topology(self.get_nodes(), self.get_node_groups())

    def get_master_ip(self) -> str:
        """Return the address of node 0."""
        return self.get_nodes()[0].address

    def get_num_gpus_per_node(self) -> list[int]:
        """Return how many accelerators each node has."""
        return [node.num_accelerators for node in self.get_nodes()]

    async def _lease_master_port(self) -> int:
        # The first caller leases it, the others wait for that.
        async with self._master_lock:
            if self._master_port is None:
                self._master_port = (await self._lease(self._nodes[0], 1, None)).port
                self._save_soon()
            return self._master_port

    @served
    async def lease_ports(self, node_rank: int, count: int = 1, holder: str | None = None) -> PortLease:
        """Lease consecutive ports on a node; `holder` is the worker whose death releases them."""
        if not 0 <= node_rank < len(self._nodes):
            raise ConfigError(f"there is no node {node_rank}: the cluster has 0-{len(self._nodes) - 1}")
        if not 1 <= count <= _MAX_PORTS:
            raise ConfigError(f"{count} ports were asked for: ask for 1 to {_MAX_PORTS}")
        await self._watch_holder(holder)
        return await self._lease(self._nodes[node_rank], count, holder)

    @served
    async def propose_ports(self, node_rank: int, count: int, holder: str | None = None) -> list[PortLease]:
        """Lease single ports without trying them on the node: the holder tries them and releases the rest."""
        node = self._nodes[node_rank]
        await self._watch_holder(holder)
        blocks = [self._ledger.propose(node.network, 1, holder) for _ in range(count)]
        return [_lease(node, block) for block in blocks]

    @served
    async def release_ports(self, leases: Iterable[PortLease]) -> None:
        """Release leases."""
        for lease in leases:
            self._ledger.release(self._nodes[lease.node_rank].network, lease)

    @served
    async def count_leased_ports(self) -> int:
        """Return how many ports are leased now."""
        return self._ledger.held

    @served
    async def ask_slots(self, user: str, shares: Mapping[Piece, float | None]) -> tuple[list[Slot], list[Piece]]:
        """Return which of these accelerators the job has reserved already, and which not."""
        return self._slots.ask(user, shares)

    @served
    async def make_groups(self, user: str, owner: str | None, asks: Sequence[Ask]) -> list[PlacementGroup]:
        """Make placement groups for a user that is trying: they belong to the job, and end with it or its `owner`."""
        from roost.runtime.nodes.placement_groups import make_group  # only the actor needs it

        await self._watch_holder(owner)
        made: list[PlacementGroup] = []
        for ask in asks:
            # In a thread, because Ray's call waits for its head.
            made.append(await asyncio.to_thread(make_group, ask, self._job.namespace, self._nodes))
            self._slots.add_drafts(user, owner, made[-1:])
        return made

    @served
    async def discard_groups(self, user: str, groups: Sequence[PlacementGroup]) -> None:
        """Remove placement groups that were not what the user wants."""
        self._slots.discard_drafts(user, groups)
        await self._remove(groups)

    @served
    async def take_slots(
        self, user: str, shares: Mapping[Piece, float | None], new: Sequence[Slot], seats: Sequence[Slot] = ()
    ) -> list[Piece]:
        """Use accelerators, `new` ones or `seats` of a pool too; return those that are gone, and then use none."""
        gone, surplus = self._slots.take(user, shares, new, seats)
        await self._remove(surplus)
        return gone

    @served
    async def release_slots(self, user: str) -> None:
        """End a user's hold; accelerators that no user of the job needs any more are released."""
        await self._remove(self._slots.release(user))

    @served
    async def drop_slots(self, pieces: Sequence[Piece]) -> None:
        """Forget accelerators that the job has lost."""
        await self._remove(self._slots.drop(pieces))

    @served
    async def get_slots(self) -> list[HeldSlot]:
        """Return everything the job has reserved, with its users."""
        return self._slots.held

    @served
    async def note_wait(self, user: str, what: str, owner: str | None = None) -> None:
        """Keep what a user of accelerators waits for, for others to see; with an empty text it waits no more.

        What an `owner` waits for that has died is forgotten.
        """
        await self._watch_holder(owner)
        self._waits[user] = what, owner
        if not what:
            del self._waits[user]

    @served
    async def get_waits(self) -> dict[str, str]:
        """Return what is waited for, by the name of who waits."""
        from roost.runtime.managers.ledgers.reservations import name_of  # only the actor needs it

        return {name_of(user): what for user, (what, _) in self._waits.items()}

    async def _watch_holder(self, holder: str | None) -> None:
        """Make sure the holder is alive before it holds something, so that its death is noticed."""
        if holder is None:
            return
        from roost.runtime.nodes.ray_state import living  # only the actor needs it

        if not self._roll.has_seen(holder):
            self._roll.expect({holder} & await asyncio.to_thread(living, {holder}))
        self._watch_soon()

    def _known(self) -> set[str]:
        waiting = {owner for _, owner in self._waits.values() if owner is not None}
        return self._ledger.holders | self._slots.owners | waiting

    async def _lease(self, node: NodeInfo, count: int, holder: str | None) -> PortLease:
        wanted = _Wanted(count=count, holder=holder, done=asyncio.get_running_loop().create_future())
        self._waiting[node.rank].append(wanted)
        if node.rank not in self._trying:
            self._trying[node.rank] = asyncio.create_task(self._try(node))
        return _lease(node, await wanted.done)

    async def _try(self, node: NodeInfo) -> None:
        """Serve all requests for ports of this node: propose, try all of them there in one task, repeat."""
        from roost.runtime.nodes.discover import remote_function  # only the actor needs it

        task = remote_function(taken_ports).options(scheduling_strategy=on_node(node.ray_id))
        try:
            while waiting := self._waiting[node.rank]:
                self._waiting[node.rank] = []
                proposed: dict[_Wanted, Block] = {}
                try:
                    for wanted in waiting:
                        try:
                            wanted.block = self._ledger.propose(node.network, wanted.count, wanted.holder)
                            proposed[wanted] = wanted.block
                        except RoostError as error:
                            wanted.done.set_exception(error)
                    if not proposed:
                        continue
                    trial = task.remote([(block.start, block.count) for block in proposed.values()])
                    taken = set(await asyncio.wait_for(trial, PORT_TRY_SECONDS))
                    for wanted, block in proposed.items():
                        if in_use := taken.intersection(block.ports):
                            self._ledger.refuse(node.network, block, in_use)
                            wanted.block = None
                            self._waiting[node.rank].append(wanted)
                        else:
                            wanted.done.set_result(block)
                except Exception as error:
                    why = f"no answer in {PORT_TRY_SECONDS:g} s" if isinstance(error, TimeoutError) else str(error)
                    for wanted in (wanted for wanted in waiting if not wanted.done.done()):
                        if wanted.block is not None:
                            self._ledger.release(node.network, wanted.block)
                        wanted.done.set_exception(ClusterError(f"ports of {node} cannot be tried: {why}"))
        finally:
            del self._trying[node.rank]

    async def _remove(self, groups: Iterable[PlacementGroup]) -> None:
        from roost.runtime.nodes.placement_groups import remove_groups  # only the actor needs it

        # In a thread, because Ray's call waits for its head.
        await asyncio.to_thread(remove_groups, groups)

    def _bury(self, missing: set[str]) -> None:
        from roost.runtime.nodes.placement_groups import remove_groups  # only the actor needs it

        self._waits = {user: wait for user, wait in self._waits.items() if wait[1] not in missing}
        for name in missing:
            self._ledger.release_holder(name)
            remove_groups(self._slots.release_owner(name))


def _lease(node: NodeInfo, block: Block) -> PortLease:
    return PortLease(node_rank=node.rank, address=node.address, **asdict(block))


@dataclass(eq=False, slots=True)
class _Wanted:
    """A request for ports that is not served yet."""

    count: int
    holder: str | None
    done: asyncio.Future[Block]
    block: Block | None = None
    """Proposed for it, and being tried."""
