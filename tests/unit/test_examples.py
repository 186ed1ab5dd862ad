"""Every file under examples/ does what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from roost import RoostError, Topology, lint, make_plan

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
HARDWARE = {
    "job": "2x8:H100,1x0",
    "collocated": "2x8",
    "disaggregated": "2x8",
    "heterogeneous": "heterogeneous-inventory.yaml",
    "weights": "2x8",
    "search": "4x8:H100",
}


def topology(said: str) -> Topology:
    return Topology.from_file(EXAMPLES / said) if said.endswith(".yaml") else Topology.from_shorthand(said)


def test_every_job_is_known_here():
    jobs = {path.stem for path in EXAMPLES.glob("*.yaml")} - {"heterogeneous-inventory", "search-profile", "broken"}
    assert jobs == set(HARDWARE)


@pytest.mark.parametrize("name", HARDWARE)
def test_an_example_plans_without_unintended_warnings(name):
    plan = make_plan(EXAMPLES / f"{name}.yaml", topology(HARDWARE[name]))
    warnings = [finding.code for finding in lint(plan) if finding.level == "warning"]
    # The specification's example has 101, 100, 156 and 155 agents on its four nodes.
    assert warnings == (["uneven"] if name == "heterogeneous" else [])


def test_the_broken_example_is_broken():
    with pytest.raises(RoostError) as caught:
        make_plan(EXAMPLES / "broken.yaml", Topology.from_shorthand("2x8"))
    assert len(caught.value.problems) == 3
