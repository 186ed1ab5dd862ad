"""Starting one actor on a given node, with the accelerators and the environment that it is to have."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roost.errors import ConfigError, NameTaken, clipped
from roost.placement.hardware import visible_devices
from roost.placement.topology import Topology
from roost.runtime.bootstrap import make_shell, pack, split_environment
from roost.runtime.ledgers import WorkerRecord
from roost.runtime.managers import JOB_VARIABLE, MANAGER_NAMES, WorkerManager
from roost.runtime.node_info import NodeInfo


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


def make_environment(seat: Seat, env_vars: Mapping[str, str], mark: str) -> dict[str, str]:
    """The environment of an actor: what its seat says, over it what the caller says, and whose it is."""
    for name, value in env_vars.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ConfigError(
                f"env_vars: {name!r} is {value!r}: names and values are text", hint=f"write {str(value)!r}"
            )
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or "\0" in value:
            raise ConfigError(f"env_vars: {clipped(name)!r} cannot be set as an environment variable")
    return {**dict(seat.variables), **env_vars, JOB_VARIABLE: mark}


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
    options: dict[str, Any] = {
        "name": worker_name,
        "namespace": namespace,
        # Which accelerator it sees is said by its variable: Ray's own count would choose another.
        "num_cpus": 0,
        "num_gpus": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node.ray_id, soft=False),
    }
    if early:
        options["runtime_env"] = {"env_vars": early}
    data, refs = pack(cls, arguments, keywords)
    try:
        remote: Any = ray.remote(make_shell(cls))
        handle: ActorHandle[Any] = remote.options(**options).remote(data, refs, late)
    except ValueError as error:
        if "already" not in str(error):
            raise
        raise NameTaken(
            f"a worker named {worker_name!r} is there already", hint="names are unique in a job: choose another"
        ) from None
    return handle


def register(manager: WorkerManager, worker_name: str, seat: Seat) -> None:
    """Let the worker manager know of the actor, without waiting for it."""
    manager.register_actor(WorkerRecord(address=worker_name, node_rank=seat.node_rank, accelerators=seat.accelerators))
