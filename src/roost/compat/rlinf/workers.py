"""RLinf's `Cluster`, `Worker` and `WorkerGroup`."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple, Self, TypeVar, cast

from ray.actor import ActorHandle

from roost.comm import worker as comm_worker
from roost.compat.rlinf.hardware import Accelerator, AcceleratorType, HardwareInfo, info_of
from roost.compat.rlinf.routing import RoutingWorker
from roost.config.hardware import ACCELERATOR
from roost.placement.strategies import NodePlacementStrategy, PlacementStrategy
from roost.runtime import cluster as clusters
from roost.runtime.groups import group as groups
from roost.runtime.process.addresses import WorkerAddress as WorkerAddress
from roost.runtime.process.identity import alone, current_identity
from roost.runtime.process.timers import take_durations
from roost.runtime.worker import current_worker, fact, own_methods, process_fact

Class = TypeVar("Class")
_MOST_CALLS = 1000
"""RLinf's channels ask for 2^31 calls at a time, for which Ray would start threads."""


class WorkerInfo(SimpleNamespace):
    """RLinf's environments learn this about their worker."""

    address: WorkerAddress

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(self.address)


class Cluster(clusters.Cluster):
    """The job on Ray."""

    def __new__(
        cls,
        num_nodes: int | None = None,
        cluster_cfg: Mapping[str, Any] | None = None,
        distributed_log_dir: str | None = None,
    ) -> Self:
        """Open a job, or return the one of this process; `num_nodes=0` takes all nodes that there are."""
        if num_nodes == 0:
            num_nodes, cluster_cfg = None, cluster_cfg or {"component_placement": {}}
        return cast(Self, super().__new__(cls, num_nodes, cluster_cfg, run_dir=distributed_log_dir))

    @property
    def _num_nodes(self) -> int:
        return self.num_nodes


class WorkerRank(NamedTuple):
    """One worker of a group."""

    rank: int
    worker: ActorHandle[Any]


class WorkerGroup(groups.WorkerGroup[Class]):
    """Workers that are called together."""

    @classmethod
    def from_group_name(cls, worker_cls: type[Class], group_name: str) -> WorkerGroup[Class]:
        """Return a group that another process launched."""
        del worker_cls
        found = cls.attach(group_name)
        return cls(found._members, found.ranks)

    @property
    def worker_group_name(self) -> str:
        return self.name

    @property
    def worker_info_list(self) -> list[WorkerRank]:
        return [WorkerRank(rank, handle) for rank, handle in zip(self.ranks, self.actor_handles, strict=True)]

    def execute_on(self, *ranks: int | Iterable[int]) -> WorkerGroup[Class]:
        """Return the group of these ranks, in the order in which they are given."""
        flat = [rank for item in ranks for rank in (item if isinstance(item, Iterable) else [item])]
        # Refuses ranks that are not there.
        self.on(*flat)
        return WorkerGroup(self._members, flat)

    def _close(self) -> None:
        self.close()


class GroupDraft(groups.GroupDraft[Class]):
    """A group that is not launched yet."""

    def launch(  # type: ignore[override]
        self,
        cluster: clusters.Cluster,
        placement_strategy: PlacementStrategy | None = None,
        name: str | None = None,
        max_concurrency: int | None = None,
        isolate_gpu: bool = True,
        catch_system_failure: bool | None = None,
        disable_distributed_log: bool = False,
    ) -> WorkerGroup[Class]:
        """Start the workers; Roost always tells of a failure, and keeps every worker's log."""
        del catch_system_failure, disable_distributed_log
        if placement_strategy is None and not cluster.num_accelerators:
            placement_strategy = NodePlacementStrategy([0])
        group = super().launch(
            cluster,
            placement_strategy,
            name=f"worker_group_{self._cls.__name__}" if name is None else name,
            isolate_accelerator=isolate_gpu,
            max_concurrency=None if max_concurrency is None else min(max_concurrency, _MOST_CALLS),
        )
        return WorkerGroup(group._members, group.ranks)


class Worker(RoutingWorker, comm_worker.Worker):  # type: ignore[misc]
    """One process of a group."""

    _roost_is_base = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._load_user_extensions()

    def _load_user_extensions(self) -> None:
        """Let a module of the user's register its environments and models, if RLINF_EXT_MODULE names one."""
        if name := os.environ.get("RLINF_EXT_MODULE"):
            importlib.import_module(name).register()

    @classmethod
    def create_group(cls, *args: Any, **kwargs: Any) -> GroupDraft[Self]:
        """Describe a group; it has the name that it is given, also where a worker launches it."""
        return GroupDraft(cls, own_methods(cls), args, kwargs, is_top=True)

    @process_fact
    def torch_device_type(self) -> str | None:  # type: ignore[override]
        """Torch's name for the accelerators; None if it sees none."""
        from roost.comm.devices import torch_device_type  # torch loads when it is used

        found = torch_device_type((current_identity() or alone("worker")).placement)
        return None if found == "cpu" else found

    @process_fact
    def torch_platform(self) -> Any:
        kind = self.torch_device_type
        return None if kind is None else getattr(importlib.import_module("torch"), kind)

    @process_fact
    def accelerator_type(self) -> str:
        return (current_identity() or alone("worker")).placement.accelerator_type

    @process_fact
    def logger(self) -> logging.Logger:
        """The log of this process's worker."""
        worker = current_worker()
        return logging.getLogger("rlinf") if worker is None else worker._roost_logger

    @property
    def _logger(self) -> logging.Logger:
        return self._roost_logger

    # By these names RLinf's workers ask where they are. In RLinf the two local ones are the environment's.
    _local_rank = fact(lambda _: int(os.environ.get("LOCAL_RANK", "-1")))
    _local_world_size = fact(lambda _: int(os.environ.get("LOCAL_WORLD_SIZE", "-1")))
    _node_local_rank = fact(lambda worker: worker.placement.local_rank)
    _cluster_node_rank = fact(lambda worker: worker.placement.cluster_node_rank)
    _local_accelerator_rank = fact(lambda worker: worker.placement.local_accelerator_rank)
    worker_address = fact(lambda worker: worker.address)
    has_accelerator = fact(lambda worker: worker.accelerator_type != AcceleratorType.NO_ACCEL)

    @property
    def worker_info(self) -> WorkerInfo:
        place, infos = self.placement, [info_of(piece) for piece in self.hardware]
        if place.hardware_type == ACCELERATOR:
            there = self.cluster.get_node_info(place.cluster_node_rank).accelerators
            models = [there[rank].model or "" for rank in place.local_hardware_ranks]
            infos = [HardwareInfo(type=Accelerator.HW_TYPE, model=model) for model in models]
        return WorkerInfo(
            address=self.address,
            rank=self.rank,
            group_world_size=self.world_size,
            cluster_node_rank=place.cluster_node_rank,
            accelerator_type=self.accelerator_type,
            hardware_infos=infos,
        )

    def get_name(self) -> str:
        return self.address.get_name()

    def get_parent_rank(self) -> int:
        """Return the rank of the worker above it, or 0."""
        path = self.address.rank_path
        return path[-2] if len(path) > 1 else 0

    def acquire_free_port(self, max_port_num: int | None = None) -> int:
        """Lease a port on this node, until this worker ends; the job's `port_range` bounds it."""
        del max_port_num
        return self.cluster.lease_ports(self._cluster_node_rank).port

    def log_on_first_rank(self, msg: object) -> None:
        if self.rank == 0:
            self.log_info(msg)

    def create_channel(self, channel_name: str, *args: Any, **kwargs: Any) -> Any:
        from roost.compat.rlinf.channels import Channel  # it needs this module

        return Channel.create(channel_name, *args, **kwargs)

    def connect_channel(self, channel_name: str, **wait: Any) -> Any:
        from roost.compat.rlinf.channels import Channel  # likewise

        return Channel.connect(channel_name, self, **wait)

    def pop_execution_times(self) -> dict[str, float]:
        """Return the seconds that the current call has timed since the last time, by tag."""
        return take_durations()

    def pop_execution_time(self, tag: str) -> float:
        """Return the seconds of one tag."""
        return take_durations(tag)[tag]
