"""A plan from the roles of another framework's job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from roost.config.readers.framework import Role
from roost.config.readers.reading import ForeignJob
from roost.config.readers.roles import in_chunks
from roost.config.rules import Mesh, Rule, RulesConfig
from roost.config.topology import Topology
from roost.placement.domains import Place, domains_of, label_of
from roost.placement.plan import ComponentPlan, PlacementMode, Plan
from roost.placement.strategies import place

_LEVEL = "nvlink"


def lay_out(job: ForeignJob, topology: Topology) -> tuple[tuple[Role, ...], RulesConfig | None]:
    """Return the roles of a job, and where NVLink domains are known the rules about them.

    Ranks of a tensor-parallel group had better be in one domain. A framework that splits nodes into segments takes
    whole segments of each domain first, and fails without enough of them.
    """
    sizes = [len(node.accelerators) for node in topology.nodes]
    roles = job.lay_out(sizes)
    if label_of(topology, _LEVEL) is None:
        return roles, None
    if segment := max(role.segment for role in roles):
        order = _segments_first(domains_of(topology, _LEVEL), len(sizes), segment)
        ranks = [sum(sizes[:node]) + local for node in order for local in range(sizes[node])]
        roles = tuple(
            replace(role, processes=tuple(tuple(ranks[at] for at in own) for own in role.processes))
            for role in job.lay_out([sizes[node] for node in order])
        )
    found = [rule for role in roles if (rule := _rule(role, topology)) is not None]
    return roles, RulesConfig(meshes={rule.component: mesh for rule, mesh in found}, rules=tuple(r for r, _ in found))


def _segments_first(domains: Mapping[Place, str | None], count: int, segment: int) -> list[int]:
    """Return the nodes with whole segments first, by domain, and then those that are left."""
    by_domain: dict[str, list[int]] = {}
    for node in range(count):
        if (domain := domains[node, -1]) is not None:
            by_domain.setdefault(domain, []).append(node)
    whole = [node for own in by_domain.values() for node in own[: len(own) // segment * segment]]
    return whole + [node for node in range(count) if node not in set(whole)]


def _rule(role: Role, topology: Topology) -> tuple[Rule, Mesh] | None:
    """Return which processes of a role belong into one domain; None if no such group is on more than one node."""
    space = topology.space()
    nodes = [space.locate(own[0]).node_rank for own in role.processes]
    tensor = dict(role.parallel).get("TP", 1) // len(role.processes[0])
    axis, size = ("segment", role.segment * len(nodes) // len(set(nodes))) if role.segment else ("TP", tensor)
    if size < 2 or len(nodes) % size or all(len(set(own)) == 1 for own in in_chunks(nodes, size)):
        return None
    rule = Rule(
        component=role.name,
        level=_LEVEL,
        text=f"{role.name}.{axis} within {_LEVEL}",
        axes=(axis,),
        is_preferred=not role.segment,
    )
    return rule, Mesh(axes=((f"{axis} groups", len(nodes) // size), (axis, size)))


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
