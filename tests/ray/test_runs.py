"""Runs on real Ray: recorded while they run, however they end, found by their ids and run again."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import warm
from roost import Cluster, PackedPlacementStrategy, Plan, WorkerDied
from roost.runtime.runs.index import read_run
from roost.runtime.runs.record import Status, read_record
from roost.testing import LocalCluster
from waiting import wait_until
from workers import Performer

JOB = Path(__file__).resolve().parents[2] / "examples" / "two_components"

SCRIPT = """
import sys, time
from roost import Cluster, PackedPlacementStrategy
from workers import Performer

cluster = Cluster(num_nodes=4, run_dir=sys.argv[1] if len(sys.argv) > 1 else "out", quiet=True)
actor = Performer.create_group().launch(cluster, PackedPlacementStrategy(0, 1), name="actor")
print("launched", flush=True)
WHAT
"""
WAIT = "for _ in range(6000): time.sleep(0.1)"
FAIL = "actor.fail([1]).wait(60)"


@pytest.fixture
def own() -> Iterator[dict[str, str]]:
    """An environment with its own list of runs; pytest's folders are too long for the sockets in TMPDIR."""
    folder = tempfile.mkdtemp(prefix="roost-runs-")
    yield {"TMPDIR": folder, "XDG_STATE_HOME": folder}
    shutil.rmtree(folder, ignore_errors=True)


def roost(local: LocalCluster, own: dict[str, str], folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = warm.environment() | local.environment | own | {"NO_COLOR": "1", "COLUMNS": "100"}
    return subprocess.run(["roost", *words], cwd=folder, capture_output=True, text=True, env=environment, timeout=300)


def printed(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines that a command printed."""
    return done.stdout.splitlines()


def test_a_script_that_fails_is_recorded_as_failed_and_can_be_run_again(driver, roost_local_cluster, own, tmp_path):
    script = driver(SCRIPT.replace("WHAT", FAIL))
    _, complained = script.finish()
    assert "ValueError: bad reward on 1" in complained
    record = read_record(tmp_path / "out")
    outcome = record.outcome
    assert (str(outcome), outcome.message, outcome.worker) == ("failed: ValueError", "bad reward on 1", "actor:1")
    assert Path(outcome.log) == tmp_path / "out" / "logs" / "actor" / "1.log"
    assert record.what == "driver0.py"
    assert [(node.name, node.accelerators) for node in record.nodes] == [
        *((f"local-{rank}", (("H100", 4),)) for rank in range(3)),
        ("local-3", ()),
    ]
    (group,) = record.groups
    assert (group.name, group.class_name, group.world_size) == ("actor", "workers.Performer", 2)
    phases = dict(group.phases)
    assert 0 < phases["reserved"] <= phases["process up"] <= phases["ready"] <= group.seconds + 0.001 <= record.seconds
    plan = Plan.from_json((tmp_path / "out" / "plan.json").read_text())
    assert plan.hash == record.plan
    assert plan.component("actor").hardware_ranks == (0, 1)
    there = tmp_path / "elsewhere"
    there.mkdir()
    (tmp_path / "out").rename(there / "kept")
    again = roost(roost_local_cluster, own, there, "rerun", "./kept")
    assert (again.returncode, again.stdout) == (1, "launched\n"), again.stderr
    assert f"driver0.py\n  in {tmp_path}\n" in again.stderr
    assert read_record(tmp_path / "out").plan == record.plan


def test_a_killed_driver_has_died_and_a_live_one_is_running(driver, tmp_path):
    script = driver(SCRIPT.replace("WHAT", WAIT))
    assert script.line() == "launched"
    running = read_run(tmp_path / "out")
    assert (running.outcome.status, running.pid, running.num_workers) == (Status.RUNNING, script.process.pid, 2)
    script.end(signal.SIGKILL)
    assert read_run(tmp_path / "out").outcome.status is Status.DIED


def test_a_restart_is_recorded_with_its_reason(shared_cluster: Cluster):
    strategy = PackedPlacementStrategy(0, 1)
    with Performer.create_group().launch(shared_cluster, strategy, name="again", restarts=1) as group:
        with pytest.raises(WorkerDied):
            group.end(1, "kill").wait(60)
        record = shared_cluster.recorder.record
        folder = Path(shared_cluster.run_dir)
        wait_until(lambda: read_record(folder).restarts, "the restart is recorded")
        (restart,) = read_record(folder).restarts
    assert (restart.worker, restart.error) == ("again:1", "")
    assert "killed" in restart.reason
    assert record.outcome.status is Status.RUNNING


def test_a_cluster_with_record_false_keeps_no_record(roost_local_cluster, tmp_path):
    with Cluster(num_nodes=len(roost_local_cluster.nodes), run_dir=tmp_path / "run", record=False):
        pass
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_job_is_recorded_and_run_again_from_its_record(roost_local_cluster, own, tmp_path):
    shutil.copytree(JOB, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "job.yaml"
    text = path.read_text()
    first = roost(roost_local_cluster, own, tmp_path, "run", "job.yaml", "-q", "--run-dir", "first")
    assert first.returncode == 0, first.stderr
    assert (tmp_path / "first" / "job.yaml").read_text() == text
    path.write_text(text.replace("steps: 3", "steps: 1").replace("rollout: 4-7:0-1", "rollout: 4-7:0-3"))
    there = tmp_path / "elsewhere"
    there.mkdir()
    again = roost(roost_local_cluster, own, there, "rerun", "first", "--same", "--run-dir", "second")
    assert again.returncode == 0, again.stderr
    assert printed(again) == printed(first)
    record = read_record(there / "second")
    assert f"the plan is the same: {record.plan[:8]}" in again.stderr
    assert (record.job.rerun_of, record.what, record.cwd) == ("first", "job.yaml", str(tmp_path))
    listed = json.loads(roost(roost_local_cluster, own, there, "runs", "--all", "--format", "json").stdout)
    assert [(item["id"], item["workers"], item["outcome"]["status"]) for item in listed] == [
        ("second", 6, "finished"),
        ("first", 6, "finished"),
    ]
    compared = roost(roost_local_cluster, own, there, "diff", "first", "second")
    assert compared.returncode == 0, compared.stderr
    assert compared.stdout.startswith("the plans are alike\nthe runs (")
    assert "~ job: job.yaml --quiet --run-dir first -> job.yaml --quiet --run-dir" in compared.stdout
    # As if the cluster were a different one now: the plan differs.
    stored = there / "second" / "job.yaml"
    stored.write_text(stored.read_text().replace("rollout: 4-7:0-1", "rollout: 4-7:0-3"))
    looked = roost(roost_local_cluster, own, tmp_path, "rerun", "second", "--dry-run")
    assert (looked.returncode, looked.stdout) == (0, "")
    assert "the plan differs:\n  moved (2)" in looked.stderr
    refused = roost(roost_local_cluster, own, tmp_path, "rerun", "second", "--same", "--run-dir", "third")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "the plan is not that of run second, and --same was given" in refused.stderr
    assert str(read_record(tmp_path / "third").outcome) == "failed: PlanDiffers"
