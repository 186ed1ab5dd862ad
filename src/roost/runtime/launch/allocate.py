"""Starts one actor of any class on a given node, with given accelerators and environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from roost.config.hardware import visible_devices
from roost.errors import ClusterError, ConfigError, NameTaken
from roost.runtime.connect.calls import on_node
from roost.runtime.launch.launch import start_actor
from roost.runtime.managers.control import JobControl
from roost.runtime.managers.job_info import JOB_VARIABLE
from roost.runtime.managers.ledgers.workers import WorkerRecord
from roost.runtime.managers.namespaces import MANAGER_NAMES
from roost.runtime.process.environment import build_environment, check_variables
from roost.runtime.process.packing import pack
from roost.runtime.process.plain_actor import make_plain_actor_class


def allocate(
    context: JobControl,
    cls: type,
    worker_name: str,
    node_rank: int,
    gpu_id: int | None,
    env_vars: Mapping[str, str],
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
) -> ActorHandle[Any]:
    """Start the actor on the node, and nowhere else; NameTaken if the name is in use."""
    context.check_open()
    node = context.node(node_rank)
    if node_rank in context.watch.dead_nodes:
        raise ClusterError(f"{node} is gone", hint="choose another node, or make a new Cluster")
    count = node.num_accelerators
    if gpu_id is not None and (type(gpu_id) is not int or not 0 <= gpu_id < count):
        has = f"has 0-{count - 1}" if count > 1 else "has only 0" if count else "has none"
        hint = "" if count else "give gpu_id=None for an actor without an accelerator"
        raise ConfigError(f"there is no accelerator {gpu_id!r} on node {node_rank}, which {has}", hint=hint)
    check_variables(env_vars)
    if not isinstance(cls, type):
        raise ConfigError(f"allocate starts a class, and {cls!r} is not one", hint="pass the class without @ray.remote")
    if not isinstance(worker_name, str) or not worker_name.strip():
        raise ConfigError(f"worker_name is {worker_name!r}: it is the actor's name, unique in the job")
    if worker_name in MANAGER_NAMES:
        raise NameTaken(f"{worker_name!r} is the name of a manager of the job")
    devices = {}
    if count:
        # One accelerator of the node, or all of them.
        seen = visible_devices(node.accelerator_type)
        shown = node.accelerators if gpu_id is None else (node.accelerators[gpu_id],)
        devices[seen.variable] = seen.value([item.device for item in shown])
    layers = [devices, env_vars, {JOB_VARIABLE: f"{context.job.id}/{worker_name}"}]
    late, early = build_environment(layers, dict(node.search_paths))
    context.actors[worker_name] = handle = start_actor(
        ray.remote(make_plain_actor_class(cls)),
        worker_name,
        context.job.namespace,
        pack(((cls, *arguments), dict(keywords))),
        late,
        scheduling_strategy=on_node(node.ray_id),
        runtime_env={"env_vars": early} if early else None,
    )
    accelerators = () if gpu_id is None else (gpu_id,)
    record = WorkerRecord(address=worker_name, node_rank=node_rank, accelerators=accelerators)
    context.worker_manager.register([record], are_actors=True)
    return handle
