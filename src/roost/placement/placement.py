"""Where one worker goes. Every worker's process loads this module, so it holds little."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from roost.config.hardware import ACCELERATOR, BARE_NODE, AcceleratorType

Item = TypeVar("Item")


class Listed(tuple[Item, ...]):
    """A tuple that also equals a list of the same items, since documents and users compare it with one.

    >>> Listed(("0", "1")) == ["0", "1"]
    True
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return tuple.__eq__(self, tuple(other) if isinstance(other, list) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one worker goes, and which accelerators it sees."""

    rank: int
    """The worker's rank in its component."""
    cluster_node_rank: int
    """The rank of its node in the cluster."""
    placement_node_rank: int
    """The rank of its node among the component's nodes, in order of first appearance."""
    local_accelerator_rank: int
    """The first accelerator that it sees, or -1 where there is none."""
    accelerator_type: AcceleratorType
    """The type of its node's accelerators."""
    local_rank: int
    """Its index among the component's workers on its node."""
    local_world_size: int
    """How many workers of the component are on its node."""
    visible_accelerators: tuple[str, ...]
    """The accelerators that it sees, as the visible-devices variable names them."""
    isolate_accelerator: bool
    """Whether accelerators that are not its own are hidden from it."""
    local_hardware_ranks: tuple[int, ...]
    """Its own hardware on its node; empty on a bare node."""
    node_group_label: str
    """The node group through which it was placed."""
    hardware_type: str = ACCELERATOR
    """The hardware that `local_hardware_ranks` counts: `accelerator`, a declared kind, or `node` for a bare node."""

    # Names that older documents use.

    @property
    def node_id(self) -> int:
        """Older name of `cluster_node_rank`."""
        return self.cluster_node_rank

    @property
    def node_rank(self) -> int:
        """Older name of `cluster_node_rank`."""
        return self.cluster_node_rank

    @property
    def local_accelerator_id(self) -> int:
        """Older name of `local_accelerator_rank`."""
        return self.local_accelerator_rank


class WorkerId(NamedTuple):
    """One worker by component and rank; `actor:3` in text."""

    component: str
    rank: int

    def __str__(self) -> str:
        return f"{self.component}:{self.rank}"


class Piece(NamedTuple):
    """One piece of hardware: its node, its kind, and its rank on that node (-1 for a node itself)."""

    node_rank: int
    kind: str
    local_rank: int

    def __str__(self) -> str:
        return f"node {self.node_rank}" if self.kind == BARE_NODE else f"{self.node_rank}:{self.local_rank}"


def pieces_of(placement: Placement) -> list[Piece]:
    """Return the hardware that a worker has: its own pieces, or its node if it has none."""
    node_rank, kind = placement.cluster_node_rank, placement.hardware_type
    if not placement.local_hardware_ranks:
        return [Piece(node_rank, BARE_NODE, -1)]
    return [Piece(node_rank, kind, local_rank) for local_rank in placement.local_hardware_ranks]


def seat(placement: Placement) -> str:
    """Describe where a worker is: `node 1, accelerator 0,2`."""
    if not placement.local_hardware_ranks:
        return f"node {placement.cluster_node_rank}"
    ranks = ",".join(map(str, placement.local_hardware_ranks))
    return f"node {placement.cluster_node_rank}, {placement.hardware_type} {ranks}"
