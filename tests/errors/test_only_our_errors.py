"""Any input raises only ConfigError or PlacementError, which can be pickled and do not come from an `assert`."""

from __future__ import annotations

import ast
import copy
import json
import pickle
import time
from contextlib import suppress
from pathlib import Path

import pytest

import roost
from roost import (
    ConfigError,
    FlexiblePlacementStrategy,
    JobConfig,
    PackedPlacementStrategy,
    PlacementError,
    Plan,
    RoostError,
    Topology,
    make_plan,
)
from roost.placement.lint import lint
from roost.render.grid import make_grid

SOURCE = Path(roost.__file__).parent

TWO_NODES = Topology.from_shorthand("2x8")
JOB = "cluster:\n  num_nodes: 2\n  component_placement:\n    actor: ${where}\nwhere: 0-3\n"
BROKEN = {
    "a file with several mistakes": lambda: JobConfig.from_text("cluster: {num_nodes: 0, nodes: 1}", name="job.yaml"),
    "text that is not YAML": lambda: JobConfig.from_text("cluster: [", name="job.yaml"),
    "a dict": lambda: make_plan({"cluster": {"component_placement": {"actor": "0-99", "rollout": "x"}}}, TWO_NODES),
    "a shorthand": lambda: Topology.from_shorthand("8"),
    "a strategy that is made wrongly": lambda: PackedPlacementStrategy(0, 7, -1),
    "a strategy that leaves its node": lambda: FlexiblePlacementStrategy([[7, 8]]).get_placement(TWO_NODES),
    "a plan that was edited": lambda: Plan.from_dict(edited_plan()),
}


def edited_plan():
    data = make_plan({"cluster": {"component_placement": {"actor": "0-3"}}}, TWO_NODES).to_dict()
    data["components"]["actor"]["placements"][0]["cluster_node_rank"] = 1
    return data


@pytest.mark.parametrize("carry", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])  # noqa: S301
@pytest.mark.parametrize("name", BROKEN)
def test_an_error_survives_pickling_and_copying(name, carry):
    with pytest.raises(RoostError) as caught:
        BROKEN[name]()
    arrived = carry(caught.value)
    assert type(arrived) is type(caught.value)
    assert str(arrived) == str(caught.value)
    assert arrived.problems == caught.value.problems


def test_errors_are_caught_as_what_the_documents_promise():
    with pytest.raises(AssertionError) as broken_rule:
        PackedPlacementStrategy(0, 7, 3)
    with pytest.raises(ValueError, match="nodes x accelerators") as not_read:
        Topology.from_shorthand("8")
    assert isinstance(broken_rule.value, PlacementError)
    assert isinstance(broken_rule.value, ValueError)
    assert not isinstance(not_read.value, AssertionError)


def test_no_rule_relies_on_an_assert_statement():
    files = sorted(SOURCE.rglob("*.py"))
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assert)
    ]
    assert SOURCE / "errors.py" in files
    assert found == []


@pytest.mark.parametrize(
    "extra",
    [
        "seed: " + "1" * 5000,
        "seed: !!int x",
        "seed: !!float x",
        "day: !!timestamp 2001-99-99",
        "x: &x [*x]",
        "? [a]\n: b",
    ],
    ids=["5000 digits", "no int", "no float", "no date", "a circle", "a list as a key"],
)
def test_a_strange_value_elsewhere_does_not_crash_an_interpolation(extra):
    with suppress(ConfigError):  # OmegaConf reads the whole file or nothing
        job = JobConfig.from_text(f"{JOB}{extra}\n")
        assert make_plan(job, TWO_NODES).component("actor").world_size == 4


@pytest.mark.parametrize(
    "text",
    ["x: \ud800\n" + JOB, "cluster: {component_placement: {actor: '\udcff'}}"],
    ids=["in another section", "in a placement"],
)
def test_half_a_surrogate_pair_is_refused(text):
    with pytest.raises(ConfigError):
        JobConfig.from_text(text)


@pytest.mark.parametrize("as_number", [4090, "no"])
def test_an_interpolation_works_under_a_key_that_yaml_1_1_reads_differently(as_number):
    text = JOB.replace("actor", str(as_number))
    assert make_plan(JobConfig.from_text(text), TWO_NODES).component(str(as_number)).world_size == 4


def test_json_escapes_are_read_as_in_json(tmp_path):
    path = tmp_path / "job.json"
    job = {"note": "\U0001f680", "cluster": {"component_placement": {"actor": "0-3"}}}
    path.write_text(json.dumps(job, ensure_ascii=True), encoding="utf-8")
    assert make_plan(path, TWO_NODES).component("actor").world_size == 4


def test_a_job_may_have_thousands_of_components():
    names = [f"c{number}" for number in range(3000)]
    text = "cluster:\n  component_placement:\n" + "".join(f"    {name}: 0\n" for name in names)
    assert [item.name for item in make_plan(JobConfig.from_text(text), TWO_NODES).components] == names


def test_the_time_for_thousands_of_components_is_in_proportion():
    names = [f"c{number}" for number in range(8000)]
    text = "cluster:\n  component_placement:\n" + "".join(f"    {name}: {at % 16}\n" for at, name in enumerate(names))
    began = time.process_time()
    plan = make_plan(JobConfig.from_text(text), TWO_NODES)
    strips = [strip for row in make_grid(plan).rows for strip in row.strips]
    assert [len(strip.lanes) for strip in strips] == [500, 500]
    assert len(lint(plan)) == 16
    assert time.process_time() - began < 40, "with the square of their number, it takes minutes"


NOT_A_PLAN = {
    "nothing": "",
    "half of it": '{"version": 1, "components": {"actor"',
    "null": "null",
    "a list": "[]",
    "a number": "5",
    "an empty object": "{}",
    "another version": '{"version": 2, "components": {}}',
    "no topology": '{"version": 1, "components": {}}',
    "components as a list": '{"version": 1, "components": [], "topology": {"nodes": [{"accelerators": 1}]}}',
    "brackets without end": "[" * 100_000,
    "a number of 5000 digits": '{"version": 1, "components": {}, "num_nodes": ' + "7" * 5000 + "}",
    "no text": b"\xff",
}


@pytest.mark.parametrize("name", NOT_A_PLAN)
def test_a_value_that_is_not_a_plan_is_refused(name):
    with pytest.raises(ConfigError, match="plan"):
        Plan.from_json(NOT_A_PLAN[name])


def test_a_plan_that_was_edited_anywhere_is_refused():
    original = make_plan({"cluster": {"num_nodes": 2, "component_placement": {"actor": "4-7"}}}, TWO_NODES).to_dict()
    accepted = []
    tried = 0
    for value in (None, 5, -1, "x", [5], {"x": 5}, 1.5, 10**30):
        for path in paths(original):
            data = copy.deepcopy(original)
            holder = data
            for step in path[:-1]:
                holder = holder[step]
            holder[path[-1]] = value
            if data == original:
                continue
            tried += 1
            try:
                Plan.from_dict(data)
            except ConfigError:
                continue
            accepted.append(path)
    assert tried > 300
    assert sorted(set(accepted)) == []


def paths(value, path=()):
    """Return every place in a plan; only the first two of a list."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from paths(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value[:2]):
            yield from paths(item, (*path, index))
