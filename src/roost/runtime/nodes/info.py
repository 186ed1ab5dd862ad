"""The nodes of a cluster: as Ray lists them, and as Roost knows them once each was probed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from roost.config.hardware import AcceleratorType
from roost.config.node_groups import DeclaredHardware
from roost.config.ranks import format_ranks

_HEAD_RESOURCE = "node:__internal_head__"


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """A node as Ray lists it."""

    ray_id: str
    address: str
    name: str
    port: int
    resources: Mapping[str, float]
    labels: Mapping[str, str]
    folder: str = ""
    """The one with the socket of its raylet."""

    @property
    def is_head(self) -> bool:
        """Whether Ray's own services run here."""
        return _HEAD_RESOURCE in self.resources

    def __str__(self) -> str:
        return name_node(None, self.address, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorInfo:
    """One accelerator as its node offers it; what the vendor's library does not report is None."""

    type: AcceleratorType
    device: str
    """Its name in the visible-devices variable: an index or a UUID."""
    model: str | None = None
    memory: int | None = None
    uuid: str | None = None
    pci: str | None = None
    numa: int | None = None
    nic: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """One node of the live cluster: its rank, its address in Ray, and its hardware."""

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
    """Equal for all nodes that share one machine's ports."""
    ephemeral_ports: tuple[int, int]
    """The first and the last port that the kernel gives to outgoing connections."""
    accelerators: tuple[AcceleratorInfo, ...] = ()
    hardware: tuple[DeclaredHardware, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    search_paths: tuple[tuple[str, str], ...] = ()
    """PATH, PYTHONPATH and the like, from the environment that the node was started with."""
    numa: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """The NUMA nodes, each with the cores that workers may use; none of a machine that has one."""

    @property
    def node_ip(self) -> str:
        """The same as `address`, under the name that the documents use."""
        return self.address

    @property
    def num_cpus(self) -> int:
        """The number of CPUs that Ray counts on the node."""
        return self.cpus

    @property
    def num_accelerators(self) -> int:
        """The number of accelerators that the node offers."""
        return len(self.accelerators)

    @property
    def num_gpus(self) -> int:
        """The same as `num_accelerators`, under the name that the documents use."""
        return len(self.accelerators)

    @property
    def accelerator_type(self) -> AcceleratorType:
        """The type of the node's accelerators, or NONE."""
        return self.accelerators[0].type if self.accelerators else AcceleratorType.NONE

    def to_dict(self) -> dict[str, Any]:
        """Return the node as plain values for JSON."""
        out = asdict(self)
        out["hardware"] = [{"type": item.type, **item.settings} for item in self.hardware]
        out["labels"] = dict(self.labels)
        out["search_paths"] = dict(self.search_paths)
        out["numa"] = {number: format_ranks(cores) for number, cores in self.numa}
        return out

    def __str__(self) -> str:
        """`node 2 (10.0.0.7, worker-7)`, as messages name it."""
        return name_node(self.rank, self.address, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SickNode:
    """A node that is in Ray's table, and could not be probed."""

    rank: int | None
    """None if other nodes have a rank from `ROOST_NODE_RANK`, which this one did not tell."""
    ray_id: str
    address: str
    name: str
    is_head: bool
    problem: str
    hint: str

    def to_dict(self) -> dict[str, Any]:
        """Return the node as plain values for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """As messages name it."""
        return name_node(self.rank, self.address, self.name)


def name_node(rank: int | None, address: str, name: str) -> str:
    """Name a node: `node 2 (10.0.0.7, worker-7)`, or without a rank `10.0.0.7 (worker-7)`."""
    own = "" if name == address else name
    if rank is None:
        return f"{address} ({own})" if own else address
    return f"node {rank} ({address}, {own})" if own else f"node {rank} ({address})"
