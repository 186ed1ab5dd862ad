"""Every file under examples/ does what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from roost import RoostError, Topology, lint, make_plan

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
HARDWARE = {
    "job": "2x8:H100,1x0",
    "collocated": "2x8",
    "disaggregated": "2x8",
    "heterogeneous": "heterogeneous-inventory.yaml",
}


def topology(said: str) -> Topology:
    return Topology.from_file(EXAMPLES / said) if said.endswith(".yaml") else Topology.from_shorthand(said)


def test_every_job_is_known_here():
    jobs = {path.stem for path in EXAMPLES.glob("*.yaml")} - {"heterogeneous-inventory", "broken"}
    assert jobs == set(HARDWARE)


@pytest.mark.parametrize("name", HARDWARE)
def test_an_example_plans_without_a_warning_that_it_does_not_mean(name):
    plan = make_plan(EXAMPLES / f"{name}.yaml", topology(HARDWARE[name]))
    warnings = [finding.code for finding in lint(plan) if finding.level == "warning"]
    # The documents' own example has 101, 100, 156 and 155 agents on its four nodes.
    assert warnings == (["uneven"] if name == "heterogeneous" else [])


def test_the_broken_example_is_broken():
    with pytest.raises(RoostError) as caught:
        make_plan(EXAMPLES / "broken.yaml", Topology.from_shorthand("2x8"))
    assert len(caught.value.problems) == 3


def test_the_demo_runs(tmp_path):
    folder = tmp_path / "clone"
    folder.mkdir()
    (folder / "examples").symlink_to(EXAMPLES)
    script = (EXAMPLES / "demo.sh").read_text().replace('cd "$(dirname "$0")/.."', f"cd {folder}")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-c", script],  # noqa: S607 - the shell of the demo
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path, "COLUMNS": "80"},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "(exit code 2)" in done.stdout
    assert (folder / "runs" / "map.html").exists()
