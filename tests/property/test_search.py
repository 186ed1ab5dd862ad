"""The search against brute force, its proofs against the checker, and what must hold for every problem.

SEARCH_INSTANCES says how many random problems are tried; `make soak-search` tries 100,000.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brute_force import ranked, step_time
from roost import ConfigError, Topology, make_plan
from roost.search.check import check_proof
from roost.search.find import find_best, in_order, kinds_of, shared_devices, sharing
from roost.search.layout import lay_out, placement_text
from roost.search.problem import Call, Problem, digest
from roost.search.proof import make_proof
from search_problems import random_problem

pytestmark = pytest.mark.heavy

INSTANCES = int(os.environ.get("SEARCH_INSTANCES", "1000"))
CHUNKS = 10
SEEDS = st.integers(0, 10**9)


def counts_of(family, roles):
    """Return the devices of each role."""
    counts = [0] * roles
    for group in family:
        for role in group.roles:
            counts[role] = group.devices
    return counts


def key_of(problem, found):
    """What placements are ranked by, from the groups that the search found."""
    used = sum(group.devices for group in found.family if group.parent is None)
    counts = tuple(counts_of(found.family, len(problem.roles)))
    apart = sharing(found.family, len(problem.roles))
    return found.step_time, used, shared_devices(found.family), counts, kinds_of(found.family), apart


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_the_search_agrees_with_brute_force_and_the_checker_accepts_its_proof(chunk):
    for seed in range(chunk, INSTANCES, CHUNKS):
        problem = random_problem(seed)
        expected = ranked(problem)
        found = list(islice(in_order(problem), 3))
        assert [key_of(problem, one) for one in found] == [key for key, _ in expected[:3]], seed
        if not found:
            continue
        ranks = lay_out(problem, found[0].family)
        sets = tuple(frozenset(ranks[role.name]) for role in problem.roles)
        assert step_time(problem, sets) == found[0].step_time, seed
        check_proof(json.loads(json.dumps(make_proof(problem, found[0].family, ranks))))


def numbers_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every number in a proof."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in items for found in numbers_in(item, (*path, key))]


def proof_of(problem: Problem) -> dict[str, Any]:
    best = find_best(problem)[0]
    return json.loads(json.dumps(make_proof(problem, best.family, lay_out(problem, best.family))))


def legal_problem(seed: int) -> Problem:
    """The first problem from a seed on that has a legal placement and whose steps take time."""
    return next(one for at in range(seed, seed + 100) if (one := random_problem(at)) and takes_time(one))


def takes_time(problem: Problem) -> bool:
    best = next(in_order(problem), None)
    return bool(problem.roles) and best is not None and best.step_time > 0


@given(SEEDS, st.data())
@settings(max_examples=100)
def test_a_proof_with_any_number_changed_is_refused(seed, data):
    proof = proof_of(legal_problem(seed))
    *path, last = data.draw(st.sampled_from(numbers_in(proof)))
    holder: Any = proof
    for key in path:
        holder = holder[key]
    holder[last] += data.draw(st.sampled_from([-3, -1, 1, 2, 1000]))
    with pytest.raises(ConfigError, match="does not hold"):
        check_proof(proof)


@given(
    SEEDS,
    st.sampled_from(["sooner", "never", "fewer ways", "wrong cycle", "no memory", "early start", "other devices"]),
)
@settings(max_examples=150)
def test_a_false_proof_is_refused_even_if_its_digest_fits(seed, lie):
    problem = legal_problem(seed)
    proof = proof_of(problem)
    false = copy.deepcopy(proof)
    if lie == "sooner":
        false["step_time"][0] -= 1
    elif lie == "never":
        # Infinity is not before infinity, and JSON has it.
        false["step_time"][0] -= 1
        false["schedule"] = dict.fromkeys(false["schedule"], math.inf)
    elif lie == "fewer ways":
        false["tree"].pop()
    elif lie == "wrong cycle":
        quick = [name for name in false["schedule"] if name != "weights"][:1]
        false["step_time"] = [10**12, 1]
        false["tree"] = [[*way[:3], quick] for way in false["tree"]]
    elif lie == "no memory":
        false["tree"] = [[*way[:3], "memory"] for way in false["tree"]]
    elif lie == "early start":
        # The slowest cycle leaves no slack, so one of its events cannot begin earlier.
        for name in false["schedule"]:
            false["schedule"][name] -= 10**12 if name == list(false["schedule"])[-1] else 0
        if len(false["schedule"]) == 1:
            return
    else:
        name = next(iter(false["ranks"]))
        false["ranks"][name] = [*false["ranks"][name], sum(problem.nodes)]
    false["digest"] = digest(false)
    if lie == "early start" and not _is_bound(problem, list(false["schedule"])[-1]):
        return
    with pytest.raises(ConfigError, match="does not hold"):
        check_proof(false)


@given(SEEDS, st.data())
@settings(max_examples=200)
def test_a_proof_that_is_accepted_is_true_whatever_was_changed_in_it(seed, data):
    proof = proof_of(legal_problem(seed))
    *path, last = data.draw(st.sampled_from(places_in(proof)))
    holder: Any = proof
    for key in path:
        holder = holder[key]
    others = [0, 1, 2, 7, 100, 1.0, math.inf, True, "room", "nodes", "memory", "<1", "=0", "<0", [], ["role0.a"], None]
    holder[last] = data.draw(st.sampled_from(others))
    proof["digest"] = digest(proof)
    try:
        check_proof(proof)
    except ConfigError:
        return
    problem = Problem.from_dict(proof["problem"])
    assert find_best(problem)[0].step_time == Fraction(*proof["step_time"])


def places_in(proof: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return the path of every value of a proof outside its problem, and of the times in that."""

    def inside(value: Any, path: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        return [path, *(found for key, item in items for found in inside(item, (*path, key)))]

    times = [
        ("problem", "calls", at, "times", kind, count)
        for at, call in enumerate(proof["problem"]["calls"])
        for kind, times in enumerate(call["times"])
        for count in times
    ]
    parts = [path for key in ("step_time", "ranks", "schedule", "tree") for path in inside(proof[key], (key,))]
    return times + parts


def _is_bound(problem: Problem, name: str) -> bool:
    """Tell whether a call waits for another one in its own step."""
    return any(other == name for _, other in problem.edges) or name == "weights"


def times_changed(call: Call, change: Callable[[int], int]) -> Call:
    return replace(call, times=tuple({count: change(time) for count, time in own.items()} for own in call.times))


@given(SEEDS)
@settings(max_examples=100)
def test_more_devices_are_never_worse(seed):
    problem = legal_problem(seed)
    larger = replace(problem, nodes=(*problem.nodes, problem.nodes[0]), kinds=(*problem.kinds, problem.kinds[0]))
    assert find_best(larger)[0].step_time <= find_best(problem)[0].step_time


@given(SEEDS, st.integers(2, 1000))
@settings(max_examples=100)
def test_all_times_scaled_scale_the_answer_and_change_nothing_else(seed, factor):
    problem = legal_problem(seed)
    weights = problem.weights and replace(problem.weights, time=problem.weights.time * factor)
    scaled = replace(
        problem,
        roles=tuple(replace(role, wake=role.wake * factor, sleep=role.sleep * factor) for role in problem.roles),
        calls=tuple(times_changed(call, lambda time: time * factor) for call in problem.calls),
        weights=weights,
    )
    before, after = find_best(problem)[0], find_best(scaled)[0]
    assert (after.step_time, after.family) == (before.step_time * factor, before.family)


@given(SEEDS)
@settings(max_examples=100)
def test_renamed_roles_change_nothing(seed):
    problem = legal_problem(seed)
    data = re.sub(r"role(\d)", lambda match: f"part{9 - int(match[1])}", json.dumps(problem.to_dict()))
    assert find_best(Problem.from_dict(json.loads(data))) == find_best(problem)


@given(SEEDS)
@settings(max_examples=100)
def test_a_quicker_call_is_never_worse(seed):
    problem = legal_problem(seed)
    halved = times_changed(problem.calls[0], lambda time: time // 2)
    quicker = replace(problem, calls=(halved, *problem.calls[1:]))
    assert find_best(quicker)[0].step_time <= find_best(problem)[0].step_time


@given(SEEDS)
@settings(max_examples=100)
def test_ranks_are_consecutive_on_every_node_and_as_many_as_the_role_has(seed):
    problem = legal_problem(seed)
    best = find_best(problem)[0]
    ranks = lay_out(problem, best.family)
    assert [len(ranks[role.name]) for role in problem.roles] == counts_of(best.family, len(problem.roles))
    for own in ranks.values():
        assert list(own) == sorted(set(own))
        assert own[-1] < sum(problem.nodes)


@given(SEEDS)
@settings(max_examples=100)
def test_the_answer_plans_as_it_was_found(seed):
    problem = legal_problem(seed)
    ranks = lay_out(problem, find_best(problem)[0].family)
    placed = {name: placement_text(problem, name, own) for name, own in ranks.items()}
    topology = Topology.from_shorthand(
        ",".join(f"1x{n}:K{kind}" for n, kind in zip(problem.nodes, problem.kinds, strict=True))
    )
    plan = make_plan({"cluster": {"component_placement": placed}}, topology)
    for role in problem.roles:
        component = plan.component(role.name)
        assert component.hardware_ranks == ranks[role.name]
        assert {len(one.local_hardware_ranks) for one in component.placements} == {role.devices_per_worker}
