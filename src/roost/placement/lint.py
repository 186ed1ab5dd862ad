"""Findings on a legal plan that its author should know before paying for the hardware."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from roost.config.hardware import ACCELERATOR, BARE_NODE
from roost.config.ranks import format_ranks
from roost.placement.placement import Piece, WorkerId
from roost.placement.plan import ComponentPlan, Plan
from roost.text import join_words, plural

_Occupants = dict[Piece, list[WorkerId]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding: a stable code, its level, and the message."""

    code: str
    level: Literal["warning", "info"]
    message: str

    def __str__(self) -> str:
        return f"{self.level}: {self.message} [{self.code}]"


def lint(plan: Plan) -> tuple[Finding, ...]:
    """Return the findings on a plan, warnings first."""
    occupants = plan.occupants()
    found: list[Finding] = []
    found += _num_nodes(plan)
    found += _sizes_ignored(plan)
    found += _idle(plan, occupants)
    for component in plan.components:
        found += _uneven(plan, component)
        found += _far_apart(component)
        found += _cut_by_node(component)
        found += _left_over(component)
    found += _shared(occupants)
    return tuple(sorted(found, key=lambda finding: finding.level != "warning"))


def _num_nodes(plan: Plan) -> Iterator[Finding]:
    there = plan.topology.num_nodes
    if plan.num_nodes is not None and plan.num_nodes != there:
        message = f"cluster.num_nodes is {plan.num_nodes}, but the plan is for {plural(there, 'node')}"
        yield Finding(code="num-nodes", level="warning", message=message)


def _sizes_ignored(plan: Plan) -> Iterator[Finding]:
    if plan.sizes_ignored:
        message = (
            f"the job has parallel sizes, but they do not place it: {plan.sizes_ignored}; "
            f"every worker is where component_placement says"
        )
        yield Finding(code="sizes-ignored", level="warning", message=message)


def _idle(plan: Plan, occupants: _Occupants) -> Iterator[Finding]:
    used = {(piece.node_rank, piece.local_rank) for piece in occupants if piece.kind == ACCELERATOR}
    idle: dict[int, list[int]] = {}
    for node_rank, node in enumerate(plan.topology.nodes):
        free = [local for local in range(len(node.accelerators)) if (node_rank, local) not in used]
        if free:
            idle[node_rank] = free
    if not idle:
        return
    total = sum(map(len, idle.values()))
    where = _by_node(idle)
    message = f"{total} of {plural(plan.topology.num_accelerators, 'accelerator')} idle: {where}"
    yield Finding(code="idle", level="warning", message=message)


def _by_node(ranks: dict[int, list[int]]) -> str:
    """Format ranks by node, as `node 0: 4-7; nodes 2-3: 0-7`; nodes with the same ranks share an entry."""
    nodes: dict[str, list[int]] = {}
    for node_rank, local in ranks.items():
        nodes.setdefault(format_ranks(local), []).append(node_rank)
    parts = [f"node{'s' * (len(same) > 1)} {format_ranks(same)}: {local}" for local, same in nodes.items()]
    return "; ".join(parts[:6]) + (f"; and {len(parts) - 6} more" if len(parts) > 6 else "")


def _shared(occupants: _Occupants) -> Iterator[Finding]:
    groups: dict[tuple[str, ...], dict[int, list[int]]] = {}
    for piece, workers in occupants.items():
        names = tuple(dict.fromkeys(worker.component for worker in workers))
        if piece.kind == ACCELERATOR and len(names) > 1:
            groups.setdefault(names, {}).setdefault(piece.node_rank, []).append(piece.local_rank)
    for names, ranks in groups.items():
        count = sum(map(len, ranks.values()))
        where = _by_node({node: sorted(local) for node, local in sorted(ranks.items())})
        message = f"{join_words(names)} share {plural(count, 'accelerator')}: {where}"
        yield Finding(code="shared", level="info", message=message)


def _uneven(plan: Plan, component: ComponentPlan) -> Iterator[Finding]:
    per_node = Counter(placement.cluster_node_rank for placement in component.placements)
    counts = Counter(per_node.values())
    kind = component.placements[0].hardware_type
    # A component that fills different nodes equally is even: each node has workers in proportion to its hardware.
    has = {rank: _pieces_on(plan, rank, kind) for rank in per_node}
    alike = len({workers / max(1, has[rank]) for rank, workers in per_node.items()}) == 1
    # On bare nodes the first ones take one more if the number does not divide.
    if not alike and max(counts) - min(counts) > (1 if kind == BARE_NODE else 0):
        parts = [f"{size} on {plural(nodes, 'node')}" for size, nodes in sorted(counts.items(), reverse=True)]
        spread = join_words(parts) if len(parts) < 4 else f"{min(counts)} to {max(counts)} on {len(per_node)} nodes"
        message = f"{component.name} is spread unevenly: {spread}"
        yield Finding(code="uneven", level="warning", message=message)


def _pieces_on(plan: Plan, node_rank: int, kind: str) -> int:
    if kind == ACCELERATOR:
        return len(plan.topology.nodes[node_rank].accelerators)
    return plan.topology.declared_on(node_rank).get(kind, 1)


def _far_apart(component: ComponentPlan) -> Iterator[Finding]:
    if component.stride > 1:
        return
    apart = []
    for placement in component.placements:
        ranks = placement.local_hardware_ranks
        if placement.hardware_type == ACCELERATOR and len(ranks) > 1 and ranks[-1] - ranks[0] + 1 > len(ranks):
            apart.append(placement)
    if not apart:
        return
    first = apart[0]
    more = f" (and {len(apart) - 1} more like it)" if len(apart) > 1 else ""
    message = (
        f"{component.name}:{first.rank} has accelerators {format_ranks(first.local_hardware_ranks)} of node "
        f"{first.cluster_node_rank}, which are apart where {plural(len(first.local_hardware_ranks), 'neighbour')} "
        f"would do{more}"
    )
    yield Finding(code="apart", level="warning", message=message)


def _cut_by_node(component: ComponentPlan) -> Iterator[Finding]:
    size = component.tensor_parallel_size
    if size < 2:
        return
    cut = []
    for first in range(0, component.world_size - size + 1, size):
        nodes = sorted({item.cluster_node_rank for item in component.placements[first : first + size]})
        if len(nodes) > 1:
            cut.append((first, nodes))
    if cut:
        first, nodes = cut[0]
        more = f" (and {len(cut) - 1} more groups)" if len(cut) > 1 else ""
        message = (
            f"the tensor-parallel group {component.name}:{first}-{first + size - 1} is cut by a node's edge: "
            f"nodes {format_ranks(nodes)}{more}"
        )
        yield Finding(code="tensor-parallel-cut", level="warning", message=message)


def _left_over(component: ComponentPlan) -> Iterator[Finding]:
    size = component.model_parallel_size
    over = component.world_size % size
    if over:
        message = (
            f"{component.name} has {component.world_size} workers, and {size} hold one copy of the model: "
            f"{over} left over"
        )
        yield Finding(code="left-over", level="warning", message=message)
