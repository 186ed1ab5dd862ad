"""Who a worker is: one value, made by the process that launches it and kept in the worker's process."""

from __future__ import annotations

from dataclasses import dataclass

from roost.config.hardware import BARE_NODE, AcceleratorType
from roost.config.node_groups import DeclaredHardware
from roost.placement.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """A worker's name, place and group."""

    group_name: str
    placement: Placement
    world_size: int
    node: str
    """Its node, as messages name it."""
    hardware: tuple[DeclaredHardware, ...] = ()
    """The pieces of declared hardware it was given, such as its robots."""

    @property
    def rank(self) -> int:
        """Its rank in the group."""
        return self.placement.rank

    @property
    def address(self) -> str:
        """Its name in the job: `actor:3`, or `actor:3:1` for a worker that actor:3 launched."""
        return f"{self.group_name}:{self.rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Master:
    """Where rank 0 of a group listens."""

    address: str = "127.0.0.1"
    port: int = 0


def alone(name: str, rank: int = 0, world_size: int = 1) -> WorkerIdentity:
    """Return the identity of a worker in a plain process: a node without accelerators, no Ray."""
    placement = Placement(
        rank=rank,
        cluster_node_rank=0,
        placement_node_rank=0,
        local_accelerator_rank=-1,
        accelerator_type=AcceleratorType.NONE,
        local_rank=rank,
        local_world_size=world_size,
        visible_accelerators=(),
        isolate_accelerator=True,
        local_hardware_ranks=(),
        node_group_label=BARE_NODE,
        hardware_type=BARE_NODE,
    )
    return WorkerIdentity(group_name=name, placement=placement, world_size=world_size, node="this process")


_current: WorkerIdentity | None = None
_master = Master()


def current_identity() -> WorkerIdentity | None:
    """Return this process's identity, or None if it was not launched as a worker."""
    return _current


def current_master() -> Master:
    """Return where rank 0 of this process's group listens; port 0 in a plain process."""
    return _master


def assume(identity: WorkerIdentity | None, master: Master | None = None) -> None:
    """Set this process's identity."""
    global _current, _master
    _current, _master = identity, master or Master()
