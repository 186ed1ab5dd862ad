"""Who a worker is: one value, made by whoever launches it, that the worker finds in its process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from roost.config.hardware import BARE_NODE, AcceleratorType
from roost.placement.placement import Placement

if TYPE_CHECKING:
    from roost.config.node_groups import DeclaredHardware


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """What a worker knows of itself and its group."""

    group_name: str
    placement: Placement
    world_size: int
    node: str
    """Its node, as messages name it."""
    master_address: str = "127.0.0.1"
    master_port: int = 0
    hardware: tuple[DeclaredHardware, ...] = ()
    """The pieces of declared hardware that it was given, such as its robots."""

    @property
    def rank(self) -> int:
        """Its rank in the group."""
        return self.placement.rank

    @property
    def address(self) -> str:
        """Its name in the job: `actor:3`, or `actor:3:1` for a worker that actor:3 launched."""
        return f"{self.group_name}:{self.rank}"


def alone(name: str, rank: int = 0, world_size: int = 1) -> WorkerIdentity:
    """The identity of a worker in a plain process, on a node of its own without accelerators."""
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


def current_identity() -> WorkerIdentity | None:
    """Who this process is, if it was launched as a worker."""
    return _current


def assume(identity: WorkerIdentity | None) -> None:
    """Be this worker from now on."""
    global _current
    _current = identity
