"""The proof that a placement is the best: a schedule that keeps its step time, and why nothing else is quicker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from roost.search.graph import Cycle, earliest_starts
from roost.search.packing import packs
from roost.search.problem import Family, Problem, digest
from roost.search.tree import Branch, Tree


def make_proof(problem: Problem, family: Family, ranks: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return the proof as JSON has it; `check` describes it."""
    tree = Tree(problem)
    graph = tree.graph
    goal = graph.slowest_cycle(family).ratio
    step_time = Fraction(goal, graph.scale)
    starts = earliest_starts(graph.times(family), graph.edges(family), goal)
    part = graph.scale // step_time.denominator
    proof = {
        "version": 1,
        "problem": problem.to_dict(),
        "step_time": [step_time.numerator, step_time.denominator],
        "ranks": {role: list(own) for role, own in ranks.items()},
        "schedule": {name: start // part for name, start in zip(graph.names, starts, strict=True)},
        "tree": _refuted(tree, tree.root(), goal),
    }
    return {**proof, "digest": digest(proof)}


def _refuted(tree: Tree, branch: Branch, goal: int) -> list[list[Any]]:
    """Return every way in which a role can join, with why nothing below it is better than the goal."""
    return [[*_way(tree, branch, child), _why(tree, child, goal)] for child in tree.children(branch)]


def _why(tree: Tree, branch: Branch, goal: int) -> Any:
    if tree.overflows(branch):
        return "memory"
    cycle = tree.slowest_cycle(branch, Cycle(goal - 1), any_slower=True)
    if cycle.events:
        return [tree.graph.names[event] for event in cycle.events]
    room = tree.least_room(branch, 0)
    if room is None or room >= goal:
        return "room"
    if branch.left:
        return _refuted(tree, branch, goal)
    if packs(tree.problem, branch.family):
        raise AssertionError("a placement is better than the best")
    return "nodes"


def _way(tree: Tree, branch: Branch, child: Branch) -> tuple[str, int, str]:
    (role,) = set(branch.left) - set(child.left)
    at, group = next((at, group) for at, group in enumerate(child.family) if role in group.roles)
    kinds = len(tree.problem.devices)
    inside = group.kind if group.parent is None else kinds + group.parent
    place = f"={kinds + at}" if len(group.roles) > 1 else f"<{inside}"
    return tree.problem.roles[role].name, group.devices, place
