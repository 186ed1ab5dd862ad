"""The environment of a worker: what torch, NCCL and the user read. Roost itself never reads it back."""

from __future__ import annotations

from roost.config.hardware import ACCELERATOR, visible_devices
from roost.config.topology import Topology
from roost.placement.placement import Placement


def worker_environment(topology: Topology, placement: Placement, world_size: int) -> dict[str, str]:
    """Return the variables of one worker: its node group's, its place in the component, the devices it sees."""
    env_config = topology.env_config(placement.node_group_label, placement.cluster_node_rank)
    variables = dict(env_config.env_vars) if env_config else {}
    isolated = placement.isolate_accelerator and placement.hardware_type == ACCELERATOR
    variables |= {
        "RANK": str(placement.rank),
        "WORLD_SIZE": str(world_size),
        # Libraries use LOCAL_RANK as a device index, which starts at 0 if a worker sees only its own devices.
        "LOCAL_RANK": "0" if isolated else str(placement.local_rank),
        "LOCAL_WORLD_SIZE": str(placement.local_world_size),
        "NODE_RANK": str(placement.placement_node_rank),
    }
    if variable := visible_variable(placement):
        variables[variable] = visible_devices(placement.accelerator_type).value(placement.visible_accelerators)
    return variables


def visible_variable(placement: Placement) -> str | None:
    """Return the variable that says which devices a worker sees; None for a worker without accelerators."""
    return visible_devices(placement.accelerator_type).variable if placement.visible_accelerators else None


def worker_interpreter(topology: Topology, placement: Placement) -> str | None:
    """Return the interpreter that the worker's node group requires on its node, if any."""
    env_config = topology.env_config(placement.node_group_label, placement.cluster_node_rank)
    return env_config.python_interpreter_path if env_config else None
