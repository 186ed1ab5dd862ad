"""The conformance cases: the results of a faithful implementation of the documents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roost import (
    ComponentPlacement,
    ConfigError,
    FlexiblePlacementStrategy,
    ModelParallelComponentPlacement,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    Placement,
    PlacementError,
    Topology,
)

VECTORS = Path(__file__).parent / "vectors"
STRATEGIES = {
    "packed": PackedPlacementStrategy,
    "flexible": FlexiblePlacementStrategy,
    "node": NodePlacementStrategy,
}


def cases(name: str) -> list[pytest.param]:
    lines = (VECTORS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [pytest.param(case, id=case["id"]) for case in map(json.loads, lines)]


def fields(placement: Placement, like: dict[str, object]) -> dict[str, object]:
    values = {name: getattr(placement, name) for name in like}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def same(placements: list[Placement], expected: list[dict[str, object]]) -> None:
    assert len(placements) == len(expected)
    assert [fields(item, like) for item, like in zip(placements, expected, strict=True)] == expected


@pytest.mark.parametrize("case", cases("placement"))
def test_placements_are_as_documented(case):
    topology = Topology.from_dict(case["topology"])
    isolate = case["isolate_accelerator"]
    expected = case["expect"]

    def run():
        if case["kind"] != "component":
            return STRATEGIES[case["kind"]](**case["args"]).get_placement(topology, isolate)
        config = {"cluster": {"num_nodes": topology.num_nodes, **case["args"]}}
        placement = ComponentPlacement(config, topology)
        return placement, {
            name: placement.get_strategy(name).get_placement(topology, isolate) for name in placement.components
        }

    if "error" in expected:
        with pytest.raises((PlacementError, ConfigError)):
            run()
    elif case["kind"] == "component":
        placement, placements = run()
        assert set(placement.components) == set(expected["components"])
        for name, want in expected["components"].items():
            assert placement.get_world_size(name) == want["world_size"]
            assert placement.get_hardware_ranks(name) == want["hardware_ranks"]
            same(placements[name], want["placements"])
    else:
        same(run(), expected["placements"])


@pytest.mark.parametrize("case", cases("model_parallel"))
def test_model_parallel_placements_are_as_documented(case):
    topology = Topology.from_dict(case["topology"])
    expected = case["expect"]
    if "error" in expected:
        with pytest.raises((PlacementError, ConfigError)):
            ModelParallelComponentPlacement(case["args"]["config"], topology)
        return
    placement = ModelParallelComponentPlacement(case["args"]["config"], topology)
    assert placement.placement_mode.value == expected["mode"]
    for name in set(expected) - {"mode", "components"}:
        assert getattr(placement, name) == expected[name], name
    assert set(placement.components) == set(expected["components"])
    for name, want in expected["components"].items():
        assert placement.get_hardware_ranks(name) == want["hardware_ranks"]
        same(placement.get_strategy(name).get_placement(topology), want["placements"])
