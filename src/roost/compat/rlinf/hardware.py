"""RLinf's descriptions of nodes and hardware, and a topology made of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

from roost.config import hardware
from roost.config.node_groups import NODE, RESERVED, DeclaredHardware, EnvConfig, NodeGroup
from roost.config.topology import Accelerator as OneAccelerator
from roost.config.topology import HasTopology, Node, Topology


class AcceleratorType(hardware.AcceleratorType):
    """The vendors, under RLinf's names."""

    NV_GPU = hardware.AcceleratorType.NVIDIA
    AMD_GPU = hardware.AcceleratorType.AMD
    INTEL_GPU = hardware.AcceleratorType.INTEL
    NPU = hardware.AcceleratorType.ASCEND
    NO_ACCEL = hardware.AcceleratorType.NONE


class Accelerator:
    """The kind of hardware that is found and not declared."""

    HW_TYPE: ClassVar[str] = "Accelerator"


@dataclass
class HardwareInfo:
    """One piece of hardware: an accelerator, or one that was declared, with its settings in `config`."""

    type: str
    model: str
    config: Any = None


class FrankaHWInfo(HardwareInfo):
    """A Franka arm."""


class DualFrankaHWInfo(HardwareInfo):
    """Two Franka arms."""


class GimArmHWInfo(HardwareInfo):
    """A GimArm."""


class DOSW1HWInfo(HardwareInfo):
    """A DOS-W1."""


class Turtle2HWInfo(HardwareInfo):
    """A Turtle2."""


_ROBOTS = {cls.__name__: cls for cls in (FrankaHWInfo, DualFrankaHWInfo, GimArmHWInfo, DOSW1HWInfo, Turtle2HWInfo)}


def info_of(piece: DeclaredHardware) -> HardwareInfo:
    """Return declared hardware as RLinf's robots describe it."""
    config = SimpleNamespace(node_rank=piece.node_rank, **piece.settings)
    return _ROBOTS.get(f"{piece.type}HWInfo", HardwareInfo)(piece.type, piece.type, config)


@dataclass
class HardwareResource:
    """The hardware of one kind on one node."""

    type: str
    infos: list[HardwareInfo]

    @property
    def count(self) -> int:
        """How many pieces there are."""
        return len(self.infos)


@dataclass
class NodeGroupEnvConfig:
    """The environment of a group's workers on some of its nodes."""

    node_ranks: list[int]
    env_vars: Iterable[Mapping[str, Any]] | None = None
    python_interpreter_path: str | None = None

    @property
    def variables(self) -> dict[str, str]:
        """The variables, which a config has as a list of pairs."""
        return {str(name): str(value) for pair in self.env_vars or () for name, value in pair.items()}


@dataclass
class NodeInfo:
    """One node."""

    node_labels: list[str]
    node_rank: int
    ray_id: str
    node_ip: str
    num_cpus: int
    python_interpreter_path: str
    default_env_vars: dict[str, str]
    env_vars: dict[str, str]
    hardware_resources: list[HardwareResource] = field(default_factory=list)

    @property
    def num_accelerators(self) -> int:
        """How many accelerators it has."""
        return self.get_hw_resource_count(Accelerator.HW_TYPE)

    def get_hw_resource_count(self, hw_type: str | None) -> int:
        """Return how many pieces of a kind it has."""
        return sum(item.count for item in self.hardware_resources if item.type == hw_type)


@dataclass
class NodeGroupInfo:
    """A label over nodes."""

    label: str
    nodes: list[NodeInfo]
    hardware_type: str | None = None
    ignore_hardware: bool = False
    env_configs: list[NodeGroupEnvConfig] | None = None

    DEFAULT_GROUP_LABEL: ClassVar[str] = "cluster"
    NODE_PLACEMENT_GROUP_LABEL: ClassVar[str] = NODE

    def get_node_env_vars(self, node_rank: int) -> dict[str, str]:
        """Return the variables of its workers on a node."""
        return {name: value for item in self._configs(node_rank) for name, value in item.variables.items()}

    def get_node_python_interpreter_path(self, node_rank: int) -> str | None:
        """Return the Python of its workers on a node, if it has one of its own."""
        return next((path for item in self._configs(node_rank) if (path := item.python_interpreter_path)), None)

    def _configs(self, node_rank: int) -> list[NodeGroupEnvConfig]:
        return [item for item in self.env_configs or () if node_rank in item.node_ranks]

    def to_group(self) -> NodeGroup:
        """Return it as a topology has it."""
        kind = "" if self.hardware_type in (None, Accelerator.HW_TYPE) else str(self.hardware_type)
        return NodeGroup(
            label=self.label,
            node_ranks=tuple(sorted(node.node_rank for node in self.nodes)),
            hardware=tuple(
                DeclaredHardware.make(kind, node.node_rank)
                for node in self.nodes
                for _ in range(node.get_hw_resource_count(kind))
            ),
            ignore_hardware=self.ignore_hardware,
            env_configs=tuple(
                EnvConfig(
                    node_ranks=tuple(item.node_ranks),
                    env_vars=tuple(item.variables.items()),
                    python_interpreter_path=item.python_interpreter_path,
                )
                for item in self.env_configs or ()
            ),
        )


def seen(cluster: Any) -> HasTopology:
    """Return what a placement is made on: a Cluster or Topology, or the nodes and groups of one of RLinf's."""
    if not isinstance(getattr(cluster, "_node_groups", None), dict):
        found: HasTopology = cluster
        return found
    nodes = [cluster.get_node_info(rank) for rank in range(cluster.num_nodes)]
    groups = [group.to_group() for group in cluster._node_groups.values() if group.label not in RESERVED]
    own = Topology(nodes=tuple(Node(accelerators=(OneAccelerator(),) * node.num_accelerators) for node in nodes))
    return dataclasses.replace(own, groups=tuple(groups))
