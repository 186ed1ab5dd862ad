"""Make a plan from groups that a script places and launches one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from roost.config.node_groups import CLUSTER
from roost.config.topology import Topology
from roost.placement.placement import Placement
from roost.placement.plan import ComponentPlan, Plan, PlannedStrategy
from roost.placement.strategies import (
    FlexiblePlacementStrategy,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    PlacementStrategy,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The placements of one group, and the strategy that made them, if any."""

    placements: Sequence[Placement]
    strategy: PlacementStrategy | None = None


def gather_plan(topology: Topology, groups: Mapping[str, Placed]) -> Plan:
    """Make a plan with one component for each group; groups from one plan keep its mode and its order.

    >>> from roost import PackedPlacementStrategy
    >>> topology = Topology.from_shorthand("1x4")
    >>> strategy = PackedPlacementStrategy(2, 3)
    >>> plan = gather_plan(topology, {"actor": Placed(placements=strategy.get_placement(topology))})
    >>> plan.names, plan.component("actor").hardware_ranks
    (['actor'], (2, 3))
    """
    planned = [placed.strategy.plan for placed in groups.values() if isinstance(placed.strategy, PlannedStrategy)]
    base = planned[-1] if planned else Plan(topology=topology, components=())
    order = [name for name in base.names if name in groups]
    order += [name for name in groups if name not in order]
    components = tuple(_component(topology, name, groups[name]) for name in order)
    return replace(base, topology=topology, components=components)


def _component(topology: Topology, name: str, placed: Placed) -> ComponentPlan:
    if isinstance(placed.strategy, PlannedStrategy):
        found = placed.strategy.plan.component(placed.strategy.component)
        return replace(found, name=name, placements=tuple(placed.placements))
    labels = _labels(placed)
    return ComponentPlan(
        name=name,
        node_groups=labels,
        hardware_ranks=_ranks(topology, labels or (CLUSTER,), placed.placements),
        placements=tuple(placed.placements),
        stride=placed.strategy.stride if isinstance(placed.strategy, PackedPlacementStrategy) else 1,
    )


def _labels(placed: Placed) -> tuple[str, ...]:
    """Return the node groups over which hardware ranks are counted; none means the cluster."""
    known = (PackedPlacementStrategy, FlexiblePlacementStrategy, NodePlacementStrategy)
    if isinstance(placed.strategy, known):
        return placed.strategy.node_groups
    found = tuple(dict.fromkeys(placement.node_group_label for placement in placed.placements))
    return () if found == (CLUSTER,) else found


def _ranks(topology: Topology, labels: Sequence[str], placements: Sequence[Placement]) -> tuple[int, ...]:
    """Return the ranks in use, of hardware or of nodes, counted over the node groups."""
    if not any(placement.local_hardware_ranks for placement in placements):
        nodes = topology.node_space(labels)
        return tuple(sorted({nodes.rank_of(placement.cluster_node_rank, 0) for placement in placements}))
    space = topology.space(labels)
    found = {
        space.rank_of(placement.cluster_node_rank, local, placement.hardware_type)
        for placement in placements
        for local in placement.local_hardware_ranks
    }
    return tuple(sorted(found))
