"""Starting one actor on a given node, with the accelerators and the environment that it is to have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roost.config.hardware import visible_devices
from roost.config.topology import Topology
from roost.errors import ConfigError, NameTaken
from roost.runtime.launch.launch import start_process
from roost.runtime.managers.ledgers.workers import WorkerRecord
from roost.runtime.managers.proxies import JOB_VARIABLE, MANAGER_NAMES, WorkerManager
from roost.runtime.nodes.info import NodeInfo
from roost.runtime.process.environment import check_variables, join_environments, split_environment
from roost.runtime.process.packing import pack
from roost.runtime.process.plain_actor import make_shell


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where an actor goes: its node, the accelerators it is given, and what the variable for them says."""

    node_rank: int
    accelerators: tuple[int, ...]
    variables: tuple[tuple[str, str], ...]


def choose_seat(topology: Topology, node_rank: int, gpu_id: int | None) -> Seat:
    """The seat at one accelerator of a node, or at all of them; ConfigError where it is not there."""
    node = topology.nodes[node_rank]
    count = len(node.accelerators)
    if gpu_id is not None and (type(gpu_id) is not int or not 0 <= gpu_id < count):
        has = f"has 0-{count - 1}" if count > 1 else "has only 0" if count else "has none"
        hint = "" if count else "give gpu_id=None for an actor without an accelerator"
        raise ConfigError(f"there is no accelerator {gpu_id!r} on node {node_rank}, which {has}", hint=hint)
    local_ranks = tuple(range(count)) if gpu_id is None else (gpu_id,)
    variables: tuple[tuple[str, str], ...] = ()
    if local_ranks:
        seen = visible_devices(node.accelerator_type)
        variables = ((seen.variable, seen.value([node.devices[local] for local in local_ranks])),)
    return Seat(node_rank=node_rank, accelerators=() if gpu_id is None else local_ranks, variables=variables)


def make_environment(seat: Seat, env_vars: Mapping[str, str], mark: str, node: NodeInfo) -> dict[str, str]:
    """The environment of an actor: what its seat says, over it what the caller says, and whose it is."""
    check_variables(env_vars)
    return join_environments([dict(seat.variables), env_vars, {JOB_VARIABLE: mark}], dict(node.search_paths))


def start_actor(
    cls: type,
    worker_name: str,
    *,
    node: NodeInfo,
    environment: Mapping[str, str],
    namespace: str,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
) -> ActorHandle[Any]:
    """Start the actor on the node, and nowhere else; NameTaken where the name is in use."""
    if not isinstance(cls, type):
        raise ConfigError(
            f"allocate starts a class, and {cls!r} is none", hint="hand over the class without @ray.remote"
        )
    if not isinstance(worker_name, str) or not worker_name.strip():
        raise ConfigError(f"worker_name is {worker_name!r}: it is the actor's name, unique in the job")
    if worker_name in MANAGER_NAMES:
        raise NameTaken(f"{worker_name!r} is the name of a manager of the job")
    late, early = split_environment(environment)
    packed = pack((cls, tuple(arguments), dict(keywords)))
    return start_process(
        ray.remote(make_shell(cls)),
        worker_name,
        namespace,
        {"env_vars": early} if early else {},
        packed,
        late,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node.ray_id, soft=False),
    )


def register(manager: WorkerManager, worker_name: str, seat: Seat) -> None:
    """Let the worker manager know of the actor, without waiting for it."""
    record = WorkerRecord(address=worker_name, node_rank=seat.node_rank, accelerators=seat.accelerators)
    manager.register_actors([record])
