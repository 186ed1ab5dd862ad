"""Findings on a legal plan that its author should know before paying for the hardware."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from roost.config.hardware import ACCELERATOR, BARE_NODE
from roost.config.ranks import format_ranks
from roost.errors import Where
from roost.placement.placement import Piece, WorkerId
from roost.placement.plan import ComponentPlan, Plan
from roost.text import join_words, plural

_Occupants = dict[Piece, list[WorkerId]]
_Sharing = dict[tuple[str, ...], dict[int, list[int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding: a stable code, its level, and the message.

    What a reader of another framework finds may be an error, which that framework refuses, and has a place and a hint.
    """

    code: str
    level: Literal["error", "warning", "info"]
    message: str
    hint: str = ""
    where: Where | None = None

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.level}: {self.message} [{self.code}]" + (f"\n  hint: {self.hint}" if self.hint else "")


def lint(plan: Plan) -> tuple[Finding, ...]:
    """Return the findings on a plan, warnings first."""
    occupants = plan.occupants()
    groups = _sharing(occupants)
    pairs = _partial_overlaps(occupants, groups)
    found = [("num-nodes", _num_nodes(plan)), ("sizes-ignored", _sizes_ignored(plan))]
    found += [("overlap", _overlap(plan, *pair, groups)) for pair in pairs]
    found += [("idle", _idle(plan, occupants))]
    for component in plan.components:
        # Other frameworks place by count, or say GPU by GPU what they mean.
        if not (component.by_count or component.parallel):
            found += [("uneven", _uneven(plan, component)), ("apart", _far_apart(component))]
        if not component.parallel:
            found += [("tensor-parallel-cut", _cut_by_node(component)), ("left-over", _left_over(component))]
    warnings = [Finding(code=code, level="warning", message=message) for code, message in found if message]
    cuts = [cut for component in plan.components for cut in _cut_groups(plan, component)]
    warnings += [cut for cut in cuts if cut.level == "warning"]
    shared = {names: ranks for names, ranks in groups.items() if names not in pairs}
    infos = [Finding(code="shared", level="info", message=message) for message in _shared(shared)]
    return (*warnings, *(cut for cut in cuts if cut.level == "info"), *infos)


def _num_nodes(plan: Plan) -> str:
    there = plan.topology.num_nodes
    if plan.num_nodes is None or plan.num_nodes == there:
        return ""
    return f"cluster.num_nodes is {plan.num_nodes}, but the plan is for {plural(there, 'node')}"


def _sizes_ignored(plan: Plan) -> str:
    if not plan.sizes_ignored:
        return ""
    placed = "every worker is where component_placement says"
    return f"the job has parallel sizes, but they do not place it: {plan.sizes_ignored}; {placed}"


def _idle(plan: Plan, occupants: _Occupants) -> str:
    used = {(piece.node_rank, piece.local_rank) for piece in occupants if piece.kind == ACCELERATOR}
    idle: dict[int, list[int]] = {}
    for node_rank, node in enumerate(plan.topology.nodes):
        free = [local for local in range(len(node.accelerators)) if (node_rank, local) not in used]
        if free:
            idle[node_rank] = free
    total = sum(map(len, idle.values()))
    accelerators = plural(plan.topology.num_accelerators, "accelerator")
    return f"{total} of {accelerators} idle: {_by_node(idle)}" if idle else ""


def _by_node(ranks: dict[int, list[int]]) -> str:
    """Format ranks by node, as `node 0: 4-7; nodes 2-3: 0-7`; nodes with the same ranks share an entry."""
    nodes: dict[str, list[int]] = {}
    for node_rank, local in ranks.items():
        nodes.setdefault(format_ranks(local), []).append(node_rank)
    parts = [f"node{'s' * (len(same) > 1)} {format_ranks(same)}: {local}" for local, same in nodes.items()]
    return "; ".join(parts[:6]) + (f"; and {len(parts) - 6} more" if len(parts) > 6 else "")


def _sharing(occupants: _Occupants) -> _Sharing:
    """Return the accelerators that several components are on, local ranks by node, for each set of components."""
    groups: _Sharing = {}
    for piece, workers in occupants.items():
        names = tuple(dict.fromkeys(worker.component for worker in workers))
        if piece.kind == ACCELERATOR and len(names) > 1:
            groups.setdefault(names, {}).setdefault(piece.node_rank, []).append(piece.local_rank)
    return groups


def _shared(groups: _Sharing) -> Iterator[str]:
    for names, ranks in groups.items():
        count = sum(map(len, ranks.values()))
        where = _by_node({node: sorted(local) for node, local in sorted(ranks.items())})
        yield f"{join_words(names)} share {plural(count, 'accelerator')}: {where}"


def _partial_overlaps(occupants: _Occupants, groups: _Sharing) -> list[tuple[str, str]]:
    """Return the pairs of components that share accelerators, while each also has some without the other."""
    has: Counter[str] = Counter()
    for piece, workers in occupants.items():
        if piece.kind == ACCELERATOR:
            has.update({worker.component for worker in workers})
    common: Counter[tuple[str, str]] = Counter()
    for names, ranks in groups.items():
        size = sum(map(len, ranks.values()))
        # One with no other accelerator is within all that share these.
        wider = [name for name in names if has[name] > size]
        common.update(dict.fromkeys(combinations(wider, 2), size))
    return [pair for pair, count in common.items() if count < min(has[pair[0]], has[pair[1]])]


def _overlap(plan: Plan, one: str, other: str, groups: _Sharing) -> str:
    first, second = plan.component(one), plan.component(other)
    if first.node_groups != second.node_groups:
        # Their ranks are counted over different node groups, so only nodes tell where they meet.
        both: dict[int, list[int]] = {}
        for names, ranks in groups.items():
            for node, local in ranks.items() if {one, other} <= set(names) else ():
                both[node] = sorted({*both.get(node, ()), *local})
        return f"{one} and {other} overlap in part: both are on accelerators of {_by_node(dict(sorted(both.items())))}"
    common = sorted(set(first.hardware_ranks) & set(second.hardware_ranks))
    unit = "hardware rank" if len(common) == 1 else "hardware ranks"
    return (
        f"{one} ({format_ranks(first.hardware_ranks)}) and {other} ({format_ranks(second.hardware_ranks)}) overlap "
        f"in part: both have {unit} {format_ranks(common)}"
    )


def _uneven(plan: Plan, component: ComponentPlan) -> str:
    per_node = Counter(placement.cluster_node_rank for placement in component.placements)
    counts = Counter(per_node.values())
    kind = component.placements[0].hardware_type
    # A component that fills different nodes equally is even: each node has workers in proportion to its hardware.
    has = {rank: _pieces_on(plan, rank, kind) for rank in per_node}
    alike = len({workers / max(1, has[rank]) for rank, workers in per_node.items()}) == 1
    # On bare nodes the first ones take one more if the number does not divide.
    if alike or max(counts) - min(counts) <= (1 if kind == BARE_NODE else 0):
        return ""
    parts = [f"{size} on {plural(nodes, 'node')}" for size, nodes in sorted(counts.items(), reverse=True)]
    spread = join_words(parts) if len(parts) < 4 else f"{min(counts)} to {max(counts)} on {len(per_node)} nodes"
    return f"{component.name} is spread unevenly: {spread}"


def _pieces_on(plan: Plan, node_rank: int, kind: str) -> int:
    if kind == ACCELERATOR:
        return len(plan.topology.nodes[node_rank].accelerators)
    return plan.topology.declared_on(node_rank).get(kind, 1)


def _far_apart(component: ComponentPlan) -> str:
    apart = []
    for placement in component.placements if component.stride <= 1 else ():
        ranks = placement.local_hardware_ranks
        if placement.hardware_type == ACCELERATOR and len(ranks) > 1 and ranks[-1] - ranks[0] + 1 > len(ranks):
            apart.append(placement)
    if not apart:
        return ""
    first, ranks = apart[0], apart[0].local_hardware_ranks
    more = f" (and {len(apart) - 1} more like it)" if len(apart) > 1 else ""
    return (
        f"{component.name}:{first.rank} has accelerators {format_ranks(ranks)} of node {first.cluster_node_rank}, "
        f"which are apart where {plural(len(ranks), 'neighbour')} would do{more}"
    )


def _cut_by_node(component: ComponentPlan) -> str:
    size = component.tensor_parallel_size
    cut = []
    for first in range(0, component.world_size - size + 1, size) if size > 1 else ():
        nodes = sorted({item.cluster_node_rank for item in component.placements[first : first + size]})
        if len(nodes) > 1:
            cut.append((first, nodes))
    if not cut:
        return ""
    first, nodes = cut[0]
    group = f"{component.name}:{first}-{first + size - 1}"
    more = f" (and {len(cut) - 1} more groups)" if len(cut) > 1 else ""
    return f"the tensor-parallel group {group} is cut by a node's edge: nodes {format_ranks(nodes)}{more}"


def _cut_groups(plan: Plan, component: ComponentPlan) -> Iterator[Finding]:
    """Find groups of accelerators that talk all the time and are on several nodes, in a split that names its sizes."""
    split = dict(component.parallel)
    pieces = [
        Piece(item.cluster_node_rank, item.hardware_type, local)
        for item in component.placements
        for local in item.local_hardware_ranks
    ]
    expert = split.get("EP", 1) * split.get("ETP", 1)
    for code, name, size in (
        ("tensor-parallel-cut", "tensor", split.get("TP", 1)),
        ("expert-parallel-cut", "expert", expert),
    ):
        groups = [pieces[at : at + size] for at in range(0, len(pieces) - size + 1, size)] if size > 1 else []
        cut = [group for group in groups if len({piece.node_rank for piece in group}) > 1]
        if not cut:
            continue
        nodes = sorted({piece.node_rank for piece in cut[0]})
        widest = max(len(plan.topology.nodes[rank].accelerators) for rank in nodes)
        cost = _cost_of_network(plan, nodes[0])
        where = f"{len(cut)} of {plural(len(groups), f'{name}-parallel group')} of {component.name}, {size} each,"
        verb = "is" if len(cut) == 1 else "are"
        if size > widest:
            message = f"{where} {verb} on several nodes, which have {widest} each{cost}"
            yield Finding(code=code, level="info", message=message)
        else:
            first = f"the first is on nodes {format_ranks(nodes)}"
            message = f"{where} {verb} cut by a node's edge: {first}{cost}"
            yield Finding(code=code, level="warning", message=message, hint="let the role begin where a node begins")


_NVLINK = {"A100": 600, "A800": 400, "H100": 900, "H200": 900, "H800": 400, "H20": 900, "B200": 1800, "B300": 1800}
_NETWORK = 50
"""GB/s between two GPUs of a node, from the makers' data sheets, and of a network card of 400 Gb/s."""


def _cost_of_network(plan: Plan, node_rank: int) -> str:
    """Say what it costs to leave the node, where the hardware is known."""
    model = (plan.topology.nodes[node_rank].accelerators[0].model or "").upper().removeprefix("G")
    speed = _NVLINK.get(model)
    if speed is None:
        return ""
    return (
        f"; within a node {model} has {speed} GB/s, and a 400 Gb/s network {_NETWORK}: {speed // _NETWORK} times less"
    )


def _left_over(component: ComponentPlan) -> str:
    size = component.model_parallel_size
    over = component.world_size % size
    has = f"{component.name} has {component.world_size} workers"
    return f"{has}, and {size} hold one copy of the model: {over} left over" if over else ""
