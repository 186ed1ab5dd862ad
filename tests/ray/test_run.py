"""`roost run` as a user types it, and the script of the documents with Hydra."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ray.util import list_named_actors

from roost import Cluster
from roost.runtime.runs.record import read_record
from roost.testing import LocalCluster

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "examples" / "two_components"

HYDRA = """
import hydra
from roost import Cluster, ComponentPlacement, Worker

class TestWorker(Worker):
    def __init__(self):
        super().__init__()

    def run(self):
        self.log_info(f"Hello from TestWorker rank {self._rank}!")

# Example usage: the YAML config file is named "conf.yaml"
@hydra.main(version_base=None, config_path=".", config_name="conf")
def main(cfg):
    cluster = Cluster(cluster_cfg=cfg.cluster)
    placement = ComponentPlacement(cfg, cluster)
    strategy = placement.get_strategy("test_worker")
    worker = TestWorker.create_group().launch(cluster, placement_strategy=strategy)
    worker.run().wait()

main()
"""
STOPPED = """

def wait(job):
    import threading
    job.cluster.on_stop(lambda: print("saved", len(job.groups["actor"].train([1.0]).wait(60)), "weights", flush=True))
    try:
        print("waiting", flush=True)
        threading.Event().wait(600)
    finally:
        print("finally", flush=True)
"""
CONF = """
cluster:
  num_nodes: 1
  component_placement:
    test_worker: # Component name
      node_group: a800
      placement: 0-3 # Place one process on each of the GPUs 0-3 of node group 'a800' (contains only node 0)

  node_groups:
    - label: a800
      node_ranks: 0
"""


def run(local: LocalCluster, folder: Path, *arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "roost", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | local.environment
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, timeout=300)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    shutil.copytree(JOB, tmp_path / "job")
    return tmp_path / "job"


def edit(job: Path, before: str, after: str) -> None:
    path = job / "job.yaml"
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def test_a_job_is_placed_launched_and_run(roost_local_cluster, job):
    done = run(roost_local_cluster, job, "run", "job.yaml", "--run-dir", "out")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "step 0: 8 samples, weight 6.00, timed ['train', 'update']",
        "step 1: 8 samples, weight 9.00, timed ['train', 'update']",
        "step 2: 8 samples, weight 10.50, timed ['train', 'update']",
    ]
    assert "actor: 4 workers ready on 1 node in" in done.stderr
    assert "actor:0 | " in done.stderr
    assert sorted(str(path.relative_to(job / "out" / "logs")) for path in (job / "out" / "logs").rglob("*.log")) == [
        *(f"actor/{rank}.log" for rank in range(4)),
        *(f"rollout/{rank}.log" for rank in range(2)),
    ]
    assert "the weight is 10.50" in (job / "out" / "logs" / "actor" / "0.log").read_text()


def test_all_mistakes_are_reported_before_anything_starts(roost_local_cluster, job):
    edit(job, "class: two_components.Rollout", "clas: two_components.Rollout")
    edit(job, "entry: two_components.main", "entry: main")
    edit(job, "  actor:\n    class", "  actr:\n    class")
    done = run(roost_local_cluster, job, "run", "job.yaml")
    assert done.returncode == 2
    for text in (
        "did you mean 'class'?",
        "'main' cannot be imported",
        "no component 'actr'",
        "'actor'",
    ):
        assert text in done.stderr, text
    assert "job.yaml:" in done.stderr


def test_an_exception_in_the_entry_point_is_the_users_and_leaves_nothing(shared_cluster, roost_local_cluster, job):
    module = job / "two_components.py"
    module.write_text(module.read_text() + "\n\ndef bad(job):\n    job.groups['actor'].train([]).wait()\n")
    edit(job, "entry: two_components.main", "entry: two_components.bad")
    done = run(roost_local_cluster, job, "run", "job.yaml", "-q")
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "in actor:" in done.stderr
    first = next(line for line in done.stderr.splitlines() if line.startswith("  File "))
    assert str(module) in first, "the way through the command line is left out"
    assert isinstance(shared_cluster, Cluster)
    assert not [entry for entry in list_named_actors(all_namespaces=True) if entry["name"].startswith("actor:")]


def test_a_job_that_gets_sigterm_saves_and_is_recorded_as_interrupted(roost_local_cluster, job):
    module = job / "two_components.py"
    module.write_text(module.read_text() + STOPPED)
    edit(job, "entry: two_components.main", "entry: two_components.wait")
    command = [sys.executable, "-m", "roost", "run", "job.yaml", "-q", "--run-dir", "out"]
    environment = os.environ | roost_local_cluster.environment
    with subprocess.Popen(command, cwd=job, stdout=subprocess.PIPE, text=True, env=environment) as running:
        assert running.stdout.readline() == "waiting\n"
        running.terminate()
        assert running.stdout.read() == "finally\nsaved 4 weights\n"
        assert running.wait(60) == 143
    assert str(read_record(job / "out").outcome) == "interrupted: SIGTERM"


def test_the_script_of_the_documents_with_hydra(roost_local_cluster, tmp_path):
    (tmp_path / "train.py").write_text(HYDRA)
    (tmp_path / "conf.yaml").write_text(CONF)
    command = [sys.executable, "train.py", "hydra.run.dir=.", "hydra.output_subdir=null"]
    environment = os.environ | roost_local_cluster.environment
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "TestWorker: 4 workers ready on 1 node" in done.stderr
    for rank in range(4):
        assert f"Hello from TestWorker rank {rank}!" in done.stderr
