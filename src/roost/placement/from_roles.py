"""A plan from the roles of another framework's job."""

from __future__ import annotations

from collections.abc import Sequence

from roost.config.readers.framework import Role
from roost.config.topology import Topology
from roost.placement.plan import ComponentPlan, PlacementMode, Plan
from roost.placement.strategies import place


def plan_roles(roles: Sequence[Role], topology: Topology, num_nodes: int) -> Plan:
    """Return the plan that has each role as a component, its processes in the framework's order."""
    space = topology.space()
    components = []
    for role in roles:
        parallel = dict(role.parallel)
        one_each = all(len(ranks) == 1 for ranks in role.processes)
        components.append(
            ComponentPlan(
                name=role.name,
                node_groups=(),
                hardware_ranks=tuple(sorted({rank for ranks in role.processes for rank in ranks})),
                placements=tuple(place(topology, space, role.processes, isolate_accelerator=True)),
                tensor_parallel_size=parallel.get("TP", 1) if one_each else 1,
                parallel=role.parallel,
                together=role.together,
                by_count=role.by_count,
            )
        )
    return Plan(topology=topology, components=tuple(components), num_nodes=num_nodes, mode=_mode(components))


def _mode(components: Sequence[ComponentPlan]) -> PlacementMode:
    ranks = {component.name: set(component.hardware_ranks) for component in components}
    if len(ranks) < 2:
        return PlacementMode.HYBRID
    if all(own == ranks[components[0].name] for own in ranks.values()):
        return PlacementMode.COLLOCATED
    apart = sum(map(len, ranks.values())) == len(set().union(*ranks.values()))
    return PlacementMode.DISAGGREGATED if apart else PlacementMode.HYBRID
