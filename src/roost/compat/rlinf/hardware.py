"""RLinf's descriptions of nodes and hardware, and a topology made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

from roost.config import hardware
from roost.config.node_groups import NODE, RESERVED, DeclaredHardware, NodeGroup
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


class HardwareInfo(SimpleNamespace):
    """One piece of hardware: its `type` and `model`, and the settings of one that was declared in `config`."""


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


_ROBOTS = {cls.__name__: cls for cls in HardwareInfo.__subclasses__()}


def info_of(piece: DeclaredHardware) -> HardwareInfo:
    """Return declared hardware as RLinf's robots describe it."""
    config = SimpleNamespace(node_rank=piece.node_rank, **piece.settings)
    return _ROBOTS.get(f"{piece.type}HWInfo", HardwareInfo)(type=piece.type, model=piece.type, config=config)


class HardwareResource(SimpleNamespace):
    """The hardware of one kind on one node: its `type` and the `infos` of the pieces."""


class NodeInfo(SimpleNamespace):
    """One node: its `node_rank`, `hardware_resources` and more."""

    hardware_resources: tuple[HardwareResource, ...] = ()

    @property
    def num_accelerators(self) -> int:
        return self.get_hw_resource_count(Accelerator.HW_TYPE)

    def get_hw_resource_count(self, hw_type: str | None) -> int:
        return sum(len(item.infos) for item in self.hardware_resources if item.type == hw_type)


class NodeGroupEnvConfig(SimpleNamespace):
    """The environment of a group's workers on the nodes `node_ranks`."""

    env_vars: tuple[Mapping[str, Any], ...] = ()
    python_interpreter_path: str | None = None


class NodeGroupInfo(SimpleNamespace):
    """A `label` over `nodes`."""

    DEFAULT_GROUP_LABEL = "cluster"
    NODE_PLACEMENT_GROUP_LABEL = NODE
    nodes: list[NodeInfo]
    hardware_type: str | None = None
    ignore_hardware = False
    env_configs: tuple[NodeGroupEnvConfig, ...] = ()

    def get_node_env_vars(self, node_rank: int) -> dict[str, str]:
        pairs = [pair for item in self.env_configs if node_rank in item.node_ranks for pair in item.env_vars]
        return {str(name): str(value) for pair in pairs for name, value in pair.items()}

    def get_node_python_interpreter_path(self, node_rank: int) -> str | None:
        return next((item.python_interpreter_path for item in self.env_configs if node_rank in item.node_ranks), None)

    def to_group(self) -> NodeGroup:
        """Return it as a topology has it."""
        kind = "" if self.hardware_type in (None, Accelerator.HW_TYPE) else str(self.hardware_type)
        ranks = [(node.node_rank, node.get_hw_resource_count(kind)) for node in self.nodes]
        return NodeGroup(
            label=self.label,
            node_ranks=tuple(sorted(rank for rank, _ in ranks)),
            hardware=tuple(DeclaredHardware.make(kind, rank) for rank, count in ranks for _ in range(count)),
            ignore_hardware=self.ignore_hardware,
        )


def seen(cluster: Any) -> HasTopology:
    """Return what a placement is made on: a Cluster or Topology, or the nodes and groups of one of RLinf's."""
    if not isinstance(getattr(cluster, "_node_groups", None), dict):
        found: HasTopology = cluster
        return found
    nodes = [cluster.get_node_info(rank) for rank in range(cluster.num_nodes)]
    groups = [group.to_group() for group in cluster._node_groups.values() if group.label not in RESERVED]
    own = Topology(nodes=tuple(Node(accelerators=(OneAccelerator(),) * node.num_accelerators) for node in nodes))
    return replace(own, groups=tuple(groups))
