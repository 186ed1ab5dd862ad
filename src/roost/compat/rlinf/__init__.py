"""RLinf's scheduler on Roost: import this in the place of `rlinf.scheduler`, with the same names and arguments.

What only differs in words is here, and nowhere else in Roost. RLinf's own parts below the scheduler are refused by
name when they are used, so that modules that only import them load.
"""

from __future__ import annotations

from typing import Any

from roost.comm.options import CollectiveGroupOptions as CollectiveGroupOptions
from roost.compat.rlinf.channels import Channel as Channel
from roost.compat.rlinf.channels import ChannelWorker as ChannelWorker
from roost.compat.rlinf.hardware import Accelerator as Accelerator
from roost.compat.rlinf.hardware import AcceleratorType as AcceleratorType
from roost.compat.rlinf.hardware import DOSW1HWInfo as DOSW1HWInfo
from roost.compat.rlinf.hardware import DualFrankaHWInfo as DualFrankaHWInfo
from roost.compat.rlinf.hardware import FrankaHWInfo as FrankaHWInfo
from roost.compat.rlinf.hardware import GimArmHWInfo as GimArmHWInfo
from roost.compat.rlinf.hardware import HardwareInfo as HardwareInfo
from roost.compat.rlinf.hardware import HardwareResource as HardwareResource
from roost.compat.rlinf.hardware import NodeGroupEnvConfig as NodeGroupEnvConfig
from roost.compat.rlinf.hardware import NodeGroupInfo as NodeGroupInfo
from roost.compat.rlinf.hardware import NodeInfo as NodeInfo
from roost.compat.rlinf.hardware import Turtle2HWInfo as Turtle2HWInfo
from roost.compat.rlinf.placement import ComponentPlacement as ComponentPlacement
from roost.compat.rlinf.placement import FlexiblePlacementStrategy as FlexiblePlacementStrategy
from roost.compat.rlinf.placement import NodePlacementStrategy as NodePlacementStrategy
from roost.compat.rlinf.placement import PackedPlacementStrategy as PackedPlacementStrategy
from roost.compat.rlinf.placement import Placement as Placement
from roost.compat.rlinf.placement import PlacementStrategy as PlacementStrategy
from roost.compat.rlinf.refused import refused
from roost.compat.rlinf.routing import CommMapper as CommMapper
from roost.compat.rlinf.routing import build_route_channel_key as build_route_channel_key
from roost.compat.rlinf.routing import build_send_key as build_send_key
from roost.compat.rlinf.routing import get_batch_size as get_batch_size
from roost.compat.rlinf.routing import get_group_world_size as get_group_world_size
from roost.compat.rlinf.routing import infer_batch_size as infer_batch_size
from roost.compat.rlinf.routing import merge_batches as merge_batches
from roost.compat.rlinf.routing import split_batch as split_batch
from roost.compat.rlinf.workers import Cluster as Cluster
from roost.compat.rlinf.workers import Worker as Worker
from roost.compat.rlinf.workers import WorkerAddress as WorkerAddress
from roost.compat.rlinf.workers import WorkerGroup as WorkerGroup
from roost.compat.rlinf.workers import WorkerInfo as WorkerInfo
from roost.config.job import ClusterConfig as ClusterConfig
from roost.runtime.groups.result import CallResult as WorkerGroupFuncResult  # noqa: F401 - RLinf's name for it

_BELOW = (
    "channel channel.channel channel.channel_worker cluster cluster.cluster cluster.config cluster.node cluster.utils "
    "collective collective.async_work collective.collective collective.collective_group collective.multi_channel_pg "
    "dynamic_scheduler dynamic_scheduler.manager dynamic_scheduler.scheduler_worker dynamic_scheduler.utils hardware "
    "hardware.accelerators hardware.accelerators.accelerator hardware.hardware manager manager.coll_manager "
    "manager.lock_manager manager.manager manager.node_manager manager.tracer manager.worker_manager worker "
    "worker.routing worker.worker worker.worker_group"
)
_STRATEGIES = "placement placement.flexible placement.node placement.packed placement.placement placement.strategy"
REPLACES: dict[str, str] = {
    "rlinf.scheduler": __name__,
    "rlinf.utils.placement": f"{__name__}.placement",
    **{f"rlinf.scheduler.{name}": __name__ for name in _BELOW.split()},
    **{f"rlinf.scheduler.{name}": f"{__name__}.{name}" for name in _STRATEGIES.split()},
}
TRIED: tuple[str, ...] = ("0.4.0",)
"""At commit a3816b5 of August 2026."""


def __getattr__(name: str) -> Any:
    return refused(name, __name__)
