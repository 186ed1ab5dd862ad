"""The changes from one plan to another: workers that move, appear or go, and hardware that changes hands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import groupby, zip_longest
from typing import Any

from roost.config.hardware import BARE_NODE, AcceleratorType
from roost.config.node_groups import NodeGroup
from roost.config.topology import Node, Topology
from roost.placement.placement import Piece, Placement, WorkerId, pieces_of
from roost.placement.plan import Plan
from roost.redact import hide, hide_in_data
from roost.text import plural


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A worker that is in both plans, on different hardware."""

    worker: WorkerId
    before: Placement
    after: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedVariables:
    """A worker that stays in its place and gets other variables, as (name, before, after)."""

    worker: WorkerId
    variables: tuple[tuple[str, str | None, str | None], ...]

    @property
    def shown(self) -> list[tuple[str, str | None, str | None]]:
        """The variables with their secrets hidden."""
        return [(name, a and hide(name, a), b and hide(name, b)) for name, a, b in self.variables]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedHands:
    """A piece of hardware that other components use than before."""

    piece: Piece
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedValue:
    """A value that differs between two plans, as JSON has it: of the job, a component, a node or a node group."""

    what: str
    of: str | int | None = None
    before: Any
    after: Any

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON has them."""
        return {"what": self.what, "of": self.of, "before": self.before, "after": self.after}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDiff:
    """The difference of two plans; false if they are equal."""

    moved: tuple[Moved, ...]
    appeared: tuple[WorkerId, ...]
    went: tuple[WorkerId, ...]
    changed_variables: tuple[ChangedVariables, ...]
    changed_hands: tuple[ChangedHands, ...]
    facts: tuple[tuple[str, str, str], ...]
    """Other differences, as (what, before, after): the mode, the number of nodes, the topology."""
    values: tuple[ChangedValue, ...] = ()
    """The facts as values instead of text."""

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) for field in fields(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the difference as JSON has it."""
        return {
            "moved": [
                {"worker": str(item.worker), "before": _seat_data(item.before), "after": _seat_data(item.after)}
                for item in self.moved
            ],
            "appeared": [str(worker) for worker in self.appeared],
            "went": [str(worker) for worker in self.went],
            "changed_variables": [
                {"worker": str(item.worker), "variables": {name: [a, b] for name, a, b in item.shown}}
                for item in self.changed_variables
            ],
            "changed_hands": [
                {
                    "node_rank": item.piece.node_rank,
                    "kind": item.piece.kind,
                    "local_rank": None if item.piece.kind == BARE_NODE else item.piece.local_rank,
                    "before": list(item.before),
                    "after": list(item.after),
                }
                for item in self.changed_hands
            ],
            "facts": [value.to_dict() for value in self.values],
        }


def diff_plans(before: Plan, after: Plan) -> PlanDiff:
    """Return what changes from `before` to `after`."""
    old, new = _workers(before), _workers(after)
    both = [worker for worker in old if worker in new]
    stayed = {worker for worker in both if pieces_of(old[worker]) == pieces_of(new[worker])}
    moved = (Moved(worker=item, before=old[item], after=new[item]) for item in both if item not in stayed)
    found = PlanDiff(
        moved=tuple(moved),
        appeared=tuple(worker for worker in new if worker not in old),
        went=tuple(worker for worker in old if worker not in new),
        changed_variables=tuple(_changed_variables(before, after, [item for item in both if item in stayed])),
        changed_hands=tuple(_changed_hands(before, after)),
        facts=tuple(_facts(before, after)),
        values=tuple(_values(before, after)),
    )
    if not found and before != after:
        # Every worker keeps its place and its variables, and still the plans differ.
        hashes = ChangedValue(what="plan", before=before.hash, after=after.hash)
        return replace(found, facts=(("plan", before.hash[:8], after.hash[:8]),), values=(hashes,))
    return found


def _workers(plan: Plan) -> dict[WorkerId, Placement]:
    return {WorkerId(item.name, placement.rank): placement for item in plan.components for placement in item.placements}


def _changed_variables(before: Plan, after: Plan, workers: list[WorkerId]) -> list[ChangedVariables]:
    found = []
    for worker in workers:
        old, new = before.environment(*worker), after.environment(*worker)
        names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        if names:
            changes = tuple((name, old.get(name), new.get(name)) for name in names)
            found.append(ChangedVariables(worker=worker, variables=changes))
    return found


def _changed_hands(before: Plan, after: Plan) -> list[ChangedHands]:
    old, new = before.occupants(), after.occupants()
    found = []
    for piece in sorted({*old, *new}):
        had = tuple(dict.fromkeys(worker.component for worker in old.get(piece, ())))
        has = tuple(dict.fromkeys(worker.component for worker in new.get(piece, ())))
        if set(had) != set(has):
            found.append(ChangedHands(piece=piece, before=had, after=has))
    return found


def _facts(before: Plan, after: Plan) -> list[tuple[str, str, str]]:
    facts = [
        ("mode", before.mode.value, after.mode.value),
        ("num_nodes", str(before.num_nodes or "not set"), str(after.num_nodes or "not set")),
        ("components", ", ".join(before.names), ", ".join(after.names)),
        ("parallel sizes ignored", before.sizes_ignored or "no", after.sizes_ignored or "no"),
    ]
    for name in (name for name in before.names if name in after.names):
        old, new = before.component(name), after.component(name)
        had, has = (", ".join(item.node_groups) or "cluster" for item in (old, new))
        facts += [(f"node groups of {name}", had, has), (f"stride of {name}", str(old.stride), str(new.stride))]
        facts.append((f"shape of {name}", old.shape or "not known", new.shape or "not known"))
    found = [fact for fact in facts if fact[1] != fact[2]]
    if before.topology != after.topology:
        found += _cluster_facts(before.topology, after.topology)
    return found


def _values(before: Plan, after: Plan) -> Iterator[ChangedValue]:
    """Yield the facts as values."""
    pairs: list[tuple[str, str | int | None, Any, Any]] = [
        ("mode", None, before.mode.value, after.mode.value),
        ("num_nodes", None, before.num_nodes, after.num_nodes),
        ("components", None, before.names, after.names),
        ("sizes_ignored", None, before.sizes_ignored, after.sizes_ignored),
    ]
    for name in (name for name in before.names if name in after.names):
        old, new = before.component(name), after.component(name)
        pairs += [
            ("node_groups", name, list(old.node_groups), list(new.node_groups)),
            ("stride", name, old.stride, new.stride),
            ("shape", name, old.shape, new.shape),
        ]
    if before.topology != after.topology:
        pairs.append(("cluster", None, _shape(before.topology), _shape(after.topology)))
        pairs += [
            ("node", rank, _node_data(old_node), _node_data(new_node))
            for rank, (old_node, new_node) in enumerate(zip_longest(before.topology.nodes, after.topology.nodes))
            if old_node != new_node
        ]
    for what, of, one, other in pairs:
        if one != other:
            yield ChangedValue(what=what, of=of, before=one, after=other)
    groups = [{group.label: group for group in plan.topology.groups} for plan in (before, after)]
    for label in {**groups[0], **groups[1]}:
        sides = [side.get(label) for side in groups]
        if sides[0] != sides[1]:
            # Two groups may differ in a secret alone, and then look alike.
            shown = [None if group is None else hide_in_data(group.to_dict()) for group in sides]
            yield ChangedValue(what="node_group", of=label, before=shown[0], after=shown[1])


def _shape(topology: Topology) -> dict[str, int]:
    return {"num_nodes": topology.num_nodes, "num_accelerators": topology.num_accelerators}


def _node_data(node: Node | None) -> Any:
    return None if node is None else Topology(nodes=(node,)).to_dict()["nodes"][0]


def _seat_data(placement: Placement) -> dict[str, Any]:
    return {
        "node_rank": placement.cluster_node_rank,
        "kind": placement.hardware_type,
        "local_ranks": list(placement.local_hardware_ranks),
    }


def _cluster_facts(before: Topology, after: Topology) -> list[tuple[str, str, str]]:
    """Return where two topologies differ: their sizes, their nodes, their groups."""
    old_shape, new_shape = (
        f"{plural(item.num_nodes, 'node')}, {plural(item.num_accelerators, 'accelerator')}" for item in (before, after)
    )
    found = [("cluster", old_shape, new_shape)] if old_shape != new_shape else []
    for rank, (old_node, new_node) in enumerate(zip_longest(before.nodes, after.nodes)):
        if old_node != new_node:
            found.append((f"node {rank}", *_unlike(old_node, new_node)))
    old, new = ({group.label: group for group in item.groups} for item in (before, after))
    for label in {**old, **new}:
        if old.get(label) != new.get(label):
            found.append((f"node group {label!r}", _group(old.get(label)), _group(new.get(label))))
    return found


def _unlike(before: Node | None, after: Node | None) -> tuple[str, str]:
    """Return the values of two nodes in the fields that differ."""
    old = {} if before is None else _node_facts(before)
    new = {} if after is None else _node_facts(after)
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    if not old or not new:
        names = [name for name in names if "not set" not in {**old, **new}[name]]
    sides = [", ".join(side[name] for name in names if name in side) or "none" for side in (old, new)]
    return sides[0], sides[1]


def _node_facts(node: Node) -> dict[str, str]:
    runs = [(accelerator, len(list(same))) for accelerator, same in groupby(node.accelerators)]
    accelerators = [
        f"{count} x {item.model or item.type}"
        + (f" ({item.type})" if item.model and item.type != AcceleratorType.NVIDIA else "")
        + (f" of {item.memory} bytes" if item.memory is not None else "")
        for item, count in runs
    ]
    return {
        "accelerators": " + ".join(accelerators) or "no accelerators",
        "name": f"name {node.name or 'not set'}",
        "address": f"address {node.address or 'not set'}",
        "labels": "labels " + (", ".join(f"{name}={value}" for name, value in node.labels) or "not set"),
        "cpus": f"cpus {'not set' if node.cpus is None else node.cpus}",
        "memory": f"memory {'not set' if node.memory is None else node.memory}",
    }


def _group(group: NodeGroup | None) -> str:
    return "none" if group is None else json.dumps(hide_in_data(group.to_dict()), ensure_ascii=False)
