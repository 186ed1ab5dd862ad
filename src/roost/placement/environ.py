"""The environment of a worker: what torch, NCCL and the user read. Roost itself never reads it back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roost.placement.hardware import ACCELERATOR, visible_devices

if TYPE_CHECKING:
    from roost.placement.plan import Plan


def worker_environment(plan: Plan, component: str, rank: int) -> dict[str, str]:
    """The variables of one worker: its node group's, its place in the component, the devices it sees."""
    placement = plan.placement(component, rank)
    env_config = plan.topology.env_config(placement.node_group_label, placement.cluster_node_rank)
    variables = dict(env_config.env_vars) if env_config else {}
    isolated = placement.isolate_accelerator and placement.hardware_type == ACCELERATOR
    variables |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(plan.component(component).world_size),
        # Libraries use LOCAL_RANK as a device index. A worker that sees its own devices only starts at 0.
        "LOCAL_RANK": "0" if isolated else str(placement.local_rank),
        "LOCAL_WORLD_SIZE": str(placement.local_world_size),
        "NODE_RANK": str(placement.placement_node_rank),
    }
    if placement.visible_accelerators:
        devices = visible_devices(placement.accelerator_type)
        variables[devices.variable] = devices.value(placement.visible_accelerators)
    return variables


def worker_interpreter(plan: Plan, component: str, rank: int) -> str | None:
    """The interpreter that the worker's node group asks for on its node, if any."""
    placement = plan.placement(component, rank)
    env_config = plan.topology.env_config(placement.node_group_label, placement.cluster_node_rank)
    return env_config.python_interpreter_path if env_config else None
