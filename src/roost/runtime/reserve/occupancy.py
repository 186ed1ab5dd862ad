"""Who has which accelerator of a Ray cluster now: jobs of Roost, and actors and placement groups of others."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from roost.config.hardware import ACCELERATOR, accelerator_types
from roost.deadline import Deadline
from roost.errors import ManagerDied
from roost.placement.plan import Piece
from roost.runtime.limits import HOLDERS_SECONDS
from roost.runtime.managers.ledgers.reservations import HeldSlot, name_of
from roost.runtime.managers.namespaces import describe_job, job_namespaces
from roost.runtime.managers.node_manager import NodeManager
from roost.runtime.nodes.info import NodeInfo
from roost.runtime.nodes.ray_state import ActorEntry, GroupEntry, RayState, name_of_job, read_ray_state

_LEAST = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """An accelerator, or part of one, that is held."""

    amount: float
    holder: str
    """Job, actor and pid, as messages name them."""
    namespace: str | None = None
    """The namespace of the holder, if it is a job of Roost."""
    users: tuple[str, ...] = ()
    """The groups of that job that use it."""

    def __str__(self) -> str:
        return self.holder if self.amount >= 1 else f"{self.amount:g} of it {self.holder}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """Who has what."""

    by_piece: Mapping[Piece, Sequence[Holding]] = field(default_factory=dict)
    somewhere: Mapping[int, Sequence[Holding]] = field(default_factory=dict)
    """By node: what is taken there, without knowing which accelerator it is."""
    free: Mapping[int, float] = field(default_factory=dict)
    """By node: how much is free, as far as Ray's head knows."""

    def of(self, piece: Piece, *, except_for: str | None = None) -> list[Holding]:
        """Return who holds a piece, leaving out one job."""
        return [item for item in self.by_piece.get(piece, ()) if item.namespace is None or item.namespace != except_for]

    def free_pieces(self, nodes: Sequence[NodeInfo], *, except_for: str | None = None) -> set[Piece]:
        """Return the accelerators that are free, as far as is known."""
        return {
            piece
            for node in nodes
            for piece in pieces_on(node)
            if not self.of(piece, except_for=except_for) and not self.somewhere.get(node.rank)
        }


def pieces_on(node: NodeInfo) -> list[Piece]:
    """Return the accelerators of a node."""
    return [Piece(node.rank, ACCELERATOR, local) for local in range(node.num_accelerators)]


def resource_of(node: NodeInfo) -> str:
    """Return Ray's name for the resource of the node's accelerators."""
    return accelerator_types()[node.accelerator_type].resource


class OccupancyReader:
    """Reads who has which accelerator, again and again while a caller waits.

    It keeps its proxies to the jobs' managers. A proxy made for one question is dropped right after it, and a Ctrl-C
    that arrives while Python deletes Ray's handle is lost: what is raised in `__del__` is ignored.
    """

    def __init__(self, nodes: Sequence[NodeInfo]) -> None:
        self._nodes = nodes
        self._managers: dict[str, NodeManager] = {}
        self._names: dict[str, str] = {}

    def read(self, seconds: float = HOLDERS_SECONDS) -> Holdings:
        """Ask the jobs of Roost and Ray's head who has what; all jobs that hang take `seconds` together."""
        deadline = Deadline.after(seconds)
        reserved: dict[str, list[HeldSlot]] = {}
        for namespace in job_namespaces():
            # A job that hangs, or runs another version of Roost, has what Ray's tables say.
            with contextlib.suppress(Exception):
                try:
                    reserved[namespace] = self._managers[namespace].until(deadline).get_slots()
                except (KeyError, ManagerDied):
                    # A job that is new to us, or one that took over the namespace of a job that ended.
                    self._managers[namespace] = NodeManager.get_proxy(namespace)
                    self._names.pop(namespace, None)
                    reserved[namespace] = self._managers[namespace].until(deadline).get_slots()
        for namespace, slots in reserved.items():
            if slots and namespace not in self._names:
                left = max(0.1, deadline.left)
                self._names[namespace] = describe_job(namespace, self._managers[namespace], left)
        return combine(self._nodes, reserved, self._names, read_ray_state())


def find_holdings(nodes: Sequence[NodeInfo]) -> Holdings:
    """Ask once who has what."""
    return OccupancyReader(nodes).read()


def combine(
    nodes: Sequence[NodeInfo],
    reserved: Mapping[str, Sequence[HeldSlot]],
    job_names: Mapping[str, str],
    state: RayState,
) -> Holdings:
    """Combine what the jobs say with what Ray's tables say."""
    by_id = {node.ray_id: node for node in nodes if node.accelerators}
    found: defaultdict[Piece, list[Holding]] = defaultdict(list)
    somewhere: defaultdict[int, list[Holding]] = defaultdict(list)
    ours = {held.slot.group.id.hex() for slots in reserved.values() for held in slots}
    there = {group.id for group in state.groups}
    for namespace, slots in reserved.items():
        for held in slots:
            # A job may not know yet that its placement group was removed.
            if held.slot.ray_id in by_id and (not there or held.slot.group.id.hex() in there):
                piece = Piece(by_id[held.slot.ray_id].rank, ACCELERATOR, held.slot.piece.local_rank)
                users = tuple(dict.fromkeys(name_of(user) for user, _ in held.users))
                text = f"reserved by job {job_names[namespace]}"
                found[piece].append(Holding(amount=1, holder=text, namespace=namespace, users=users))
    # What foreign placement groups hold on each node, less what their actors show.
    foreign = {group.id: group for group in state.groups if group.id not in ours}
    hidden: defaultdict[tuple[str, str], float] = defaultdict(float)
    for group in foreign.values():
        for ray_id, resources in group.bundles:
            if ray_id in by_id:
                hidden[group.id, ray_id] += resources.get(resource_of(by_id[ray_id]), 0)
    seen: set[tuple[str, Piece]] = set()
    for actor in state.actors:
        node = by_id.get(actor.ray_id)
        if node is None or actor.group_id in ours:
            continue
        for local, amount in actor.amounts.get(resource_of(node), {}).items():
            piece = Piece(node.rank, ACCELERATOR, local)
            if actor.group_id in foreign:
                hidden[actor.group_id, actor.ray_id] -= (actor.group_id, piece) not in seen
                seen.add((actor.group_id, piece))
                amount = 1
            found[piece].append(Holding(amount=amount, holder=_held_by(actor, state)))
    for (group_id, ray_id), amount in hidden.items():
        if amount > _LEAST:
            holding = Holding(amount=amount, holder=_held_by(foreign[group_id], state))
            somewhere[by_id[ray_id].rank].append(holding)
    free = {node.rank: state.free.get(node.ray_id, {}).get(resource_of(node), 0.0) for node in by_id.values()}
    for node in by_id.values() if state.free else ():
        named = [item.amount for piece in pieces_on(node) for item in found.get(piece, ())]
        named += [item.amount for item in somewhere.get(node.rank, ())]
        rest = node.num_accelerators - free[node.rank] - sum(named)
        if rest > _LEAST:
            text = "held by something that Ray does not name, such as a task"
            somewhere[node.rank].append(Holding(amount=rest, holder=text))
    return Holdings(by_piece=found, somewhere=somewhere, free=free)


def _held_by(holder: ActorEntry | GroupEntry, state: RayState) -> str:
    return f"held by {holder} of {state.jobs.get(holder.ray_job) or name_of_job(holder.ray_job)}"
