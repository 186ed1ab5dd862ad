"""What a probe found out about a node."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from roost.config.hardware import AcceleratorType
from roost.config.node_groups import DeclaredHardware
from roost.config.topology import Accelerator, Node


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorInfo:
    """One accelerator as its node offers it; what the vendor's library does not tell is None."""

    type: AcceleratorType
    device: str
    """What the visible-devices variable calls it: an index or a UUID."""
    model: str | None = None
    memory: int | None = None
    uuid: str | None = None
    pci: str | None = None
    numa: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """One node of the live cluster: its rank, who Ray says it is, and what it has."""

    rank: int
    ray_id: str
    address: str
    name: str
    hostname: str
    is_head: bool
    cpus: int
    memory: int
    interpreter: str
    python: str
    ray: str
    network: str
    """The same for all nodes that share one machine's ports."""
    ephemeral_ports: tuple[int, int]
    """The ports that the kernel hands out by itself, first and last."""
    accelerators: tuple[AcceleratorInfo, ...] = ()
    hardware: tuple[DeclaredHardware, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    search_paths: tuple[tuple[str, str], ...] = ()
    """PATH, PYTHONPATH and the like, as the node was started with them."""

    @property
    def node_ip(self) -> str:
        """The address, under the name that the documents use."""
        return self.address

    @property
    def num_cpus(self) -> int:
        """How many CPUs Ray counts on the node."""
        return self.cpus

    @property
    def num_accelerators(self) -> int:
        """How many accelerators the node offers."""
        return len(self.accelerators)

    @property
    def num_gpus(self) -> int:
        """How many accelerators the node offers, under the name that the documents use."""
        return len(self.accelerators)

    @property
    def accelerator_type(self) -> AcceleratorType:
        """The vendor's type of the node's accelerators, or NONE."""
        return self.accelerators[0].type if self.accelerators else AcceleratorType.NONE

    def to_dict(self) -> dict[str, Any]:
        """The node as JSON can say it."""
        out = asdict(self)
        out["hardware"] = [{"type": item.type, **item.settings} for item in self.hardware]
        out["labels"] = dict(self.labels)
        out["search_paths"] = dict(self.search_paths)
        return out

    def __str__(self) -> str:
        """`node 2 (10.0.0.7, worker-7)`, as messages name it."""
        return f"node {self.rank} ({self.address}, {self.name})"


def describe_node(address: str, name: str) -> str:
    """A node that has no rank yet: `10.0.0.7 (worker-7)`."""
    return address if name in ("", address) else f"{address} ({name})"


def topology_node(info: NodeInfo, *, name_is_unique: bool) -> Node:
    """The node as the planner knows it."""
    return Node(
        accelerators=tuple(
            Accelerator(
                type=item.type,
                model=item.model,
                memory=item.memory,
                device=None if item.device == str(index) else item.device,
            )
            for index, item in enumerate(info.accelerators)
        ),
        name=info.name if name_is_unique else None,
        address=info.address,
        labels=info.labels,
        cpus=info.cpus,
        memory=info.memory,
    )
