"""Broken profiles, each with the exact message that the user gets, in a file next to it.

A case is `profiles/<name>.yaml` with `<name>.txt`. It is searched on 4x8, or on what `<name>.cluster` says, after
`--interpolate` if that is wanted.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from roost import ConfigError, PlacementError, Topology
from roost.config.profile import read_profile
from roost.config.run import read_job_text
from roost.config.topology import Accelerator, Node
from roost.search.answer import search
from roost.search.setup import make_setup

CASES = Path(__file__).parent / "profiles"
NAMES = sorted(path.name for path in CASES.glob("*.yaml"))
JOB = """
cluster:
  component_placement: {rollout: 0-7, actor: 8-15}
flow:
  step: STEP
  weights: actor -> rollout
"""
MEMORY = {"nodes": [{"accelerators": {"count": 8, "memory": "80GiB"}}] * 4}


@pytest.mark.parametrize("name", NAMES)
def test_a_broken_profile_is_explained(name, golden, monkeypatch):
    monkeypatch.chdir(CASES)
    path = Path(name)
    has_score = "rollout.score" in path.read_text()
    step = "rollout.generate -> rollout.score -> actor.train" if has_score else "rollout.generate -> actor.train"
    flow = read_job_text(JOB.replace("STEP", step), name="job.yaml").flow
    file = path.with_suffix(".cluster")
    said = file.read_text().split() if file.exists() else ["4x8"]
    topology = Topology.from_dict(MEMORY) if said == ["memory.inventory"] else Topology.from_shorthand(said[-1])
    with pytest.raises((ConfigError, PlacementError)) as caught:
        search(make_setup(flow, read_profile(path), topology, interpolate="--interpolate" in said))
    golden(CASES / f"{path.stem}.txt", f"{caught.value}\n")


def test_all_mistakes_of_a_profile_are_told_at_once(tmp_path):
    path = tmp_path / "profile.yaml"
    path.write_text("version: 1\ncalls:\n  a.x: {seconds: {8: -1}}\n  b.y: {seconds: {8: soon}, memry: 3}\n")
    with pytest.raises(ConfigError) as caught:
        read_profile(path)
    assert len(caught.value.problems) == 3


def test_a_cluster_that_cannot_be_searched_is_refused():
    flow = read_job_text(JOB.replace("STEP", "rollout.generate -> actor.train"), name="job.yaml").flow
    profile = read_profile(
        {"version": 1, "calls": {name: {"seconds": {8: 3.0}} for name in ("rollout.generate", "actor.train")}}
    )
    with pytest.raises(ConfigError, match="no accelerators"):
        make_setup(flow, profile, Topology.from_shorthand("2x0"))
    mixed = Topology(nodes=(Node(accelerators=(Accelerator(model="H100"), Accelerator(model="4090"))),))
    with pytest.raises(ConfigError, match="node 0 has several kinds of accelerator: 4090 and H100"):
        make_setup(flow, profile, mixed)
