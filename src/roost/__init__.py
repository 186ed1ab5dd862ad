"""Roost: say which worker process sits on which hardware, see it before you pay for it, launch it on Ray.

The public names are loaded on first use, so that `import roost` is quick and brings in no more than it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roost.errors import ConfigError, PlacementError, RoostError
    from roost.placement.components import ComponentPlacement, HybridComponentPlacement
    from roost.placement.config import ClusterConfig, JobConfig
    from roost.placement.diff import PlanDiff
    from roost.placement.groups import DeclaredHardware, EnvConfig, NodeGroup
    from roost.placement.hardware import AcceleratorType, register_accelerator_type
    from roost.placement.lint import Finding, lint
    from roost.placement.parallel import ModelParallelComponentPlacement
    from roost.placement.placement import (
        FlexiblePlacementStrategy,
        NodePlacementStrategy,
        PackedPlacementStrategy,
        Placement,
        PlacementStrategy,
    )
    from roost.placement.plan import ComponentPlan, PlacementMode, Plan
    from roost.placement.planner import make_plan
    from roost.placement.topology import Accelerator, Node, Topology

__version__ = "0.1.0"

_HOME = {
    "Accelerator": "placement.topology",
    "AcceleratorType": "placement.hardware",
    "ClusterConfig": "placement.config",
    "ComponentPlacement": "placement.components",
    "ComponentPlan": "placement.plan",
    "ConfigError": "errors",
    "DeclaredHardware": "placement.groups",
    "EnvConfig": "placement.groups",
    "Finding": "placement.lint",
    "FlexiblePlacementStrategy": "placement.placement",
    "HybridComponentPlacement": "placement.components",
    "JobConfig": "placement.config",
    "ModelParallelComponentPlacement": "placement.parallel",
    "Node": "placement.topology",
    "NodeGroup": "placement.groups",
    "NodePlacementStrategy": "placement.placement",
    "PackedPlacementStrategy": "placement.placement",
    "Placement": "placement.placement",
    "PlacementError": "errors",
    "PlacementMode": "placement.plan",
    "PlacementStrategy": "placement.placement",
    "Plan": "placement.plan",
    "PlanDiff": "placement.diff",
    "RoostError": "errors",
    "Topology": "placement.topology",
    "lint": "placement.lint",
    "make_plan": "placement.planner",
    "register_accelerator_type": "placement.hardware",
}

__all__ = [
    "Accelerator",
    "AcceleratorType",
    "ClusterConfig",
    "ComponentPlacement",
    "ComponentPlan",
    "ConfigError",
    "DeclaredHardware",
    "EnvConfig",
    "Finding",
    "FlexiblePlacementStrategy",
    "HybridComponentPlacement",
    "JobConfig",
    "ModelParallelComponentPlacement",
    "Node",
    "NodeGroup",
    "NodePlacementStrategy",
    "PackedPlacementStrategy",
    "Placement",
    "PlacementError",
    "PlacementMode",
    "PlacementStrategy",
    "Plan",
    "PlanDiff",
    "RoostError",
    "Topology",
    "__version__",
    "lint",
    "make_plan",
    "register_accelerator_type",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'roost' has no attribute {name!r}")
    return getattr(import_module(f"roost.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
