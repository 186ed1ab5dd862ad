"""Golden pictures of jobs of other frameworks: two of each, written by us, as `roost plan` and `roost check` show them.

`make golden` writes them again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from roost import Plan, make_plan
from roost.cli.plans import Flags, Loaded, plan_job, read_job
from roost.config.readers.reading import FRAMEWORKS

HERE = Path(__file__).parent
JOBS = sorted(path for path in (HERE / "jobs").iterdir() if not path.stem.endswith("-model") and path.is_file())


def load(path: Path, *settings: str, **flags: object) -> Loaded:
    given = Flags(**flags)  # type: ignore[arg-type]
    return plan_job(read_job(path, settings, given), given)


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_the_map_and_the_findings_of_a_job(path, roost, golden, monkeypatch):
    monkeypatch.chdir(HERE / "jobs")
    code, out, err = roost("plan", path.name)
    checked, said, _ = roost("check", path.name)
    assert code == checked
    golden(HERE / "files/frameworks" / f"{path.name}.txt", f"{out}\n{err}\n{said}")


@pytest.mark.parametrize("name", ["verl-apart.sh", "slime-apart.sh"])
def test_an_engine_on_two_nodes_points_to_where_it_goes_on(name, roost, monkeypatch):
    monkeypatch.chdir(HERE / "jobs")
    for form in ("map", "svg", "html"):
        text = roost("plan", name, "--format", form)[1]
        assert "▶" in text
        assert "◀" in text


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_a_plan_of_another_framework_is_a_plan_like_any_other(path, roost, tmp_path, monkeypatch):
    """It survives JSON, compares equal to itself, and can be asked where a worker is."""
    monkeypatch.chdir(HERE / "jobs")
    plan = load(path).plan
    assert Plan.from_json(plan.to_json()) == plan
    saved = tmp_path / "plan.json"
    saved.write_text(plan.to_json())
    assert roost("diff", str(saved), path.name)[0] == 0
    name = plan.names[0]
    code, out, _ = roost("where", path.name, f"{name}:0")
    assert (code, f"{name}:0 of" in out) == (0, True)


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_the_job_that_is_written_for_roost_has_the_same_ranks(path, roost, tmp_path, monkeypatch):
    monkeypatch.chdir(HERE / "jobs")
    found = load(path)
    job = tmp_path / "job.yaml"
    job.write_text(roost("plan", path.name, "--format", "job")[1])
    again = make_plan(job, found.plan.topology)
    for name in found.plan.names:
        assert again.component(name).placements == found.plan.component(name).placements


def test_each_framework_has_two_jobs_here():
    for name in FRAMEWORKS:
        assert len([path for path in JOBS if path.name.startswith(f"{name}-")]) >= 2, name
