"""Roost: say which worker process sits on which hardware, see it before you pay for it, launch it on Ray.

The public names are loaded on first use, so that `import roost` is quick and brings in no more than it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roost.config.hardware import AcceleratorType, register_accelerator_type
    from roost.config.job import ClusterConfig, JobConfig
    from roost.config.kinds import register_hardware
    from roost.config.node_groups import DeclaredHardware, EnvConfig, NodeGroup
    from roost.config.topology import Accelerator, Node, Topology
    from roost.errors import (
        AcceleratorsTaken,
        CallTimedOut,
        CheckFailed,
        ClusterError,
        ConfigError,
        LaunchTimedOut,
        ManagerDied,
        NameTaken,
        NodesMissing,
        PlacementError,
        PortsExhausted,
        ReservationLost,
        RoostError,
        WorkerDied,
        WorkerFailed,
        WrongPlace,
    )
    from roost.placement.components import ComponentPlacement, HybridComponentPlacement
    from roost.placement.diff import PlanDiff
    from roost.placement.lint import Finding, lint
    from roost.placement.model_parallel import ModelParallelComponentPlacement
    from roost.placement.placement import Placement
    from roost.placement.plan import ComponentPlan, PlacementMode, Plan
    from roost.placement.planner import make_plan
    from roost.placement.strategies import (
        FlexiblePlacementStrategy,
        NodePlacementStrategy,
        PackedPlacementStrategy,
        PlacementStrategy,
    )
    from roost.runtime.cluster import Cluster
    from roost.runtime.failures.failure import Failure
    from roost.runtime.groups.group import WorkerGroup
    from roost.runtime.groups.result import CallResult, Outcome, OutcomeKind
    from roost.runtime.groups.worker import Worker
    from roost.runtime.job import Job
    from roost.runtime.managers.collective_manager import CollectiveManager
    from roost.runtime.managers.ledgers.collectives import CollectiveGroup
    from roost.runtime.managers.ledgers.ports import PortLease
    from roost.runtime.managers.ledgers.workers import WorkerRecord, WorkerState
    from roost.runtime.managers.node_manager import NodeManager
    from roost.runtime.managers.worker_manager import WorkerManager
    from roost.runtime.nodes.info import AcceleratorInfo, NodeInfo
    from roost.runtime.reserve.reservation import Reservation

__version__ = "0.1.0"

_HOME = {
    "Accelerator": "config.topology",
    "AcceleratorInfo": "runtime.nodes.info",
    "AcceleratorType": "config.hardware",
    "AcceleratorsTaken": "errors",
    "CallResult": "runtime.groups.result",
    "CallTimedOut": "errors",
    "CheckFailed": "errors",
    "Cluster": "runtime.cluster",
    "ClusterConfig": "config.job",
    "ClusterError": "errors",
    "CollectiveGroup": "runtime.managers.ledgers.collectives",
    "CollectiveManager": "runtime.managers.collective_manager",
    "ComponentPlacement": "placement.components",
    "ComponentPlan": "placement.plan",
    "ConfigError": "errors",
    "DeclaredHardware": "config.node_groups",
    "EnvConfig": "config.node_groups",
    "Failure": "runtime.failures.failure",
    "Finding": "placement.lint",
    "FlexiblePlacementStrategy": "placement.strategies",
    "HybridComponentPlacement": "placement.components",
    "Job": "runtime.job",
    "JobConfig": "config.job",
    "LaunchTimedOut": "errors",
    "ManagerDied": "errors",
    "ModelParallelComponentPlacement": "placement.model_parallel",
    "NameTaken": "errors",
    "Node": "config.topology",
    "NodeGroup": "config.node_groups",
    "NodeInfo": "runtime.nodes.info",
    "NodeManager": "runtime.managers.node_manager",
    "NodePlacementStrategy": "placement.strategies",
    "NodesMissing": "errors",
    "Outcome": "runtime.groups.result",
    "OutcomeKind": "runtime.groups.result",
    "PackedPlacementStrategy": "placement.strategies",
    "Placement": "placement.placement",
    "PlacementError": "errors",
    "PlacementMode": "placement.plan",
    "PlacementStrategy": "placement.strategies",
    "Plan": "placement.plan",
    "PlanDiff": "placement.diff",
    "PortLease": "runtime.managers.ledgers.ports",
    "PortsExhausted": "errors",
    "Reservation": "runtime.reserve.reservation",
    "ReservationLost": "errors",
    "RoostError": "errors",
    "Topology": "config.topology",
    "Worker": "runtime.groups.worker",
    "WorkerDied": "errors",
    "WorkerFailed": "errors",
    "WorkerGroup": "runtime.groups.group",
    "WorkerManager": "runtime.managers.worker_manager",
    "WorkerRecord": "runtime.managers.ledgers.workers",
    "WorkerState": "runtime.managers.ledgers.workers",
    "WrongPlace": "errors",
    "lint": "placement.lint",
    "make_plan": "placement.planner",
    "register_accelerator_type": "config.hardware",
    "register_hardware": "config.kinds",
}

__all__ = [
    "Accelerator",
    "AcceleratorInfo",
    "AcceleratorType",
    "AcceleratorsTaken",
    "CallResult",
    "CallTimedOut",
    "CheckFailed",
    "Cluster",
    "ClusterConfig",
    "ClusterError",
    "CollectiveGroup",
    "CollectiveManager",
    "ComponentPlacement",
    "ComponentPlan",
    "ConfigError",
    "DeclaredHardware",
    "EnvConfig",
    "Failure",
    "Finding",
    "FlexiblePlacementStrategy",
    "HybridComponentPlacement",
    "Job",
    "JobConfig",
    "LaunchTimedOut",
    "ManagerDied",
    "ModelParallelComponentPlacement",
    "NameTaken",
    "Node",
    "NodeGroup",
    "NodeInfo",
    "NodeManager",
    "NodePlacementStrategy",
    "NodesMissing",
    "Outcome",
    "OutcomeKind",
    "PackedPlacementStrategy",
    "Placement",
    "PlacementError",
    "PlacementMode",
    "PlacementStrategy",
    "Plan",
    "PlanDiff",
    "PortLease",
    "PortsExhausted",
    "Reservation",
    "ReservationLost",
    "RoostError",
    "Topology",
    "Worker",
    "WorkerDied",
    "WorkerFailed",
    "WorkerGroup",
    "WorkerManager",
    "WorkerRecord",
    "WorkerState",
    "WrongPlace",
    "__version__",
    "lint",
    "make_plan",
    "register_accelerator_type",
    "register_hardware",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'roost' has no attribute {name!r}")
    return getattr(import_module(f"roost.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
