"""A plan as a job of Roost: the same processes on the same hardware, to plan, search and run from there."""

from __future__ import annotations

from itertools import groupby

from roost.cli.plans import Loaded
from roost.config.ranks import format_ranks
from roost.errors import ConfigError
from roost.placement.fit import write_ranks

_CALLS = {
    "rollout": "generate",
    "reward": "score",
    "teacher": "score",
    "ref": "log_prob",
    "critic": "train",
    "actor": "train",
}
"""The work of a role in a step, by the beginning of its name, in the order of a step."""


def job_text(loaded: Loaded, name: str) -> str:
    """Write the placement of a plan as the YAML of a job, with exact ranks."""
    plan, foreign, topology = loaded.plan, loaded.foreign, loaded.plan.topology
    kinds = [
        (len(node.accelerators), node.accelerators[0].model if node.accelerators else None) for node in topology.nodes
    ]
    space = topology.space()
    runs = [(kind, len(list(same))) for kind, same in groupby(kinds)]
    hardware = ",".join(f"{nodes}x{count}" + (f":{model}" if model else "") for (count, model), nodes in runs)
    lines = [f"# From {name}" + (f", as {foreign.framework.name} places it on an empty cluster." if foreign else ".")]
    lines += ["cluster:", f"  num_nodes: {topology.num_nodes}", f"  hardware: {hardware}", "  component_placement:"]
    for component in plan.components:
        ranks = [
            [space.rank_of(item.cluster_node_rank, local) for local in item.local_hardware_ranks]
            for item in component.placements
        ]
        firsts = [own[0] for own in ranks if len(own) == 1]
        ascend = len(firsts) == len(ranks) and firsts == sorted(set(firsts))
        text = format_ranks(firsts) if ascend else write_ranks(ranks)
        if text is None:
            hint = f"it is on {format_ranks(component.hardware_ranks)}: place it with a strategy in Python"
            message = f"the order of {component.name} cannot be written in a job, whose ranks ascend"
            raise ConfigError(message, hint=hint)
        shape = f"  # {component.shape}" if component.shape else ""
        lines.append(f"    {component.name}: {text}{shape}")
    # The calls of a step, where the job has roles that make one.
    calls = [
        f"{own}.{call}"
        for role, call in _CALLS.items()
        for own in plan.names
        if own == role or own.startswith(f"{role}_")
    ]
    if "actor" in plan.names and calls[0].startswith("rollout"):
        weights = f"  weights: actor -> {calls[0].partition('.')[0]}"
        lines += ["flow:", f"  step: {' -> '.join(calls)}", weights]
    return "\n".join(lines) + "\n"
