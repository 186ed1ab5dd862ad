"""Where one worker sits: `Placement` alone, since every worker's process loads it."""

from __future__ import annotations

from dataclasses import dataclass

from roost.config.hardware import ACCELERATOR, AcceleratorType


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one worker sits, and what it sees."""

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
    """What `local_hardware_ranks` counts: `accelerator`, a declared kind, or `node` for a bare node."""

    # The older names of the documents, all in this one place.

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
