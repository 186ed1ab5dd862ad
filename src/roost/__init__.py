"""Roost: say which worker process sits on which hardware, see it before you pay for it, launch it on Ray.

The public names are loaded on first use, so that `import roost` is quick and brings in no more than it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from roost.placement.config import ClusterConfig, JobConfig
    from roost.placement.diff import PlanDiff
    from roost.placement.groups import DeclaredHardware, EnvConfig, NodeGroup
    from roost.placement.hardware import AcceleratorType, register_accelerator_type
    from roost.placement.kinds import register_hardware
    from roost.placement.lint import Finding, lint
    from roost.placement.parallel import ModelParallelComponentPlacement
    from roost.placement.placement import (
        FlexiblePlacementStrategy,
        NodePlacementStrategy,
        PackedPlacementStrategy,
        PlacementStrategy,
    )
    from roost.placement.plan import ComponentPlan, PlacementMode, Plan
    from roost.placement.planner import make_plan
    from roost.placement.spot import Placement
    from roost.placement.topology import Accelerator, Node, Topology
    from roost.runtime.cluster import Cluster
    from roost.runtime.failures import Failure
    from roost.runtime.group import WorkerGroup
    from roost.runtime.job_run import Job
    from roost.runtime.ledgers import CollectiveGroup, WorkerRecord, WorkerState
    from roost.runtime.managers import CollectiveManager, NodeManager, WorkerManager
    from roost.runtime.node_info import AcceleratorInfo, NodeInfo
    from roost.runtime.ports import PortLease
    from roost.runtime.reservation import Reservation
    from roost.runtime.result import CallResult, Outcome, OutcomeKind
    from roost.runtime.worker import Worker

__version__ = "0.1.0"

_HOME = {
    "Accelerator": "placement.topology",
    "AcceleratorInfo": "runtime.node_info",
    "AcceleratorType": "placement.hardware",
    "AcceleratorsTaken": "errors",
    "CallResult": "runtime.result",
    "CallTimedOut": "errors",
    "CheckFailed": "errors",
    "Cluster": "runtime.cluster",
    "ClusterConfig": "placement.config",
    "ClusterError": "errors",
    "CollectiveGroup": "runtime.ledgers",
    "CollectiveManager": "runtime.managers",
    "ComponentPlacement": "placement.components",
    "ComponentPlan": "placement.plan",
    "ConfigError": "errors",
    "DeclaredHardware": "placement.groups",
    "EnvConfig": "placement.groups",
    "Failure": "runtime.failures",
    "Finding": "placement.lint",
    "FlexiblePlacementStrategy": "placement.placement",
    "HybridComponentPlacement": "placement.components",
    "Job": "runtime.job_run",
    "JobConfig": "placement.config",
    "LaunchTimedOut": "errors",
    "ManagerDied": "errors",
    "ModelParallelComponentPlacement": "placement.parallel",
    "NameTaken": "errors",
    "Node": "placement.topology",
    "NodeGroup": "placement.groups",
    "NodeInfo": "runtime.node_info",
    "NodeManager": "runtime.managers",
    "NodePlacementStrategy": "placement.placement",
    "NodesMissing": "errors",
    "Outcome": "runtime.result",
    "OutcomeKind": "runtime.result",
    "PackedPlacementStrategy": "placement.placement",
    "Placement": "placement.spot",
    "PlacementError": "errors",
    "PlacementMode": "placement.plan",
    "PlacementStrategy": "placement.placement",
    "Plan": "placement.plan",
    "PlanDiff": "placement.diff",
    "PortLease": "runtime.ports",
    "PortsExhausted": "errors",
    "Reservation": "runtime.reservation",
    "ReservationLost": "errors",
    "RoostError": "errors",
    "Topology": "placement.topology",
    "Worker": "runtime.worker",
    "WorkerDied": "errors",
    "WorkerFailed": "errors",
    "WorkerGroup": "runtime.group",
    "WorkerManager": "runtime.managers",
    "WorkerRecord": "runtime.ledgers",
    "WorkerState": "runtime.ledgers",
    "WrongPlace": "errors",
    "lint": "placement.lint",
    "make_plan": "placement.planner",
    "register_accelerator_type": "placement.hardware",
    "register_hardware": "placement.kinds",
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
