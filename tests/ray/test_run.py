"""`roost run` as a user types it, and the script of the documents with Hydra."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from ray.util import list_named_actors

import warm
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
        # A signal that arrives just before a wait begins interrupts nothing until the wait is over.
        for _ in range(6000):
            threading.Event().wait(0.1)
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
    command = [sys.executable, "-c", code] if code else ["roost", *arguments]
    environment = {name: value for name, value in warm.environment().items() if name != "PYTHONPATH"}
    environment |= local.environment
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


PRELOADING = """
import sys
from roost import Worker

class Actor(Worker):
    def loaded(self):
        return [name for name in ("sqlite3", "wave", "my_job") if name in sys.modules]

def main(job):
    print(job.groups["actor"].loaded().wait(60))
"""


def test_workers_of_a_job_share_the_imports_that_it_names_and_those_of_the_next_job_do_not(
    roost_local_cluster, tmp_path
):
    (tmp_path / "my_job.py").write_text(PRELOADING)
    job = "cluster: {num_nodes: 1, component_placement: {actor: 0-1}}\nentry: my_job.main\nworkers:\n  actor: "
    found = []
    for preload, section in (("[sqlite3, my_job]", "{class: my_job.Actor, preload: [wave]}"), ("[]", "my_job.Actor")):
        (tmp_path / "job.yaml").write_text(f"{job}{section}\n")
        done = run(roost_local_cluster, tmp_path, "run", "job.yaml", f"+cluster.preload={preload}")
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.strip())
    # The module of the user's own is loaded by the worker, from where it is now.
    assert found == [str([["sqlite3", "wave", "my_job"]] * 2), str([["my_job"]] * 2)]


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
    command = ["warm-python", "train.py", "hydra.run.dir=.", "hydra.output_subdir=null"]
    environment = warm.environment() | roost_local_cluster.environment
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "TestWorker: 4 workers ready on 1 node" in done.stderr
    for rank in range(4):
        assert f"Hello from TestWorker rank {rank}!" in done.stderr


TOGETHER = """
import time
from pathlib import Path
from roost import Worker

HERE = Path(__file__).parent

class Meets(Worker):
    def __init__(self, others, fails=False):
        super().__init__()
        (HERE / f"{self.group_name}.here").touch()
        deadline = time.monotonic() + 60
        while not all((HERE / f"{name}.here").exists() for name in others):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.group_name} is alone")
            time.sleep(0.02)
        if fails:
            raise ValueError("no model")
        if "waits" in others:
            time.sleep(600)

def main(job):
    print(sorted(job.groups), job.config["steps"])
"""
MEETING = """
cluster:
  num_nodes: 2
  component_placement: {a: 0-1, b: 2, c: 4-5}
workers:
  a: {class: meet.Meets, kwargs: {others: [b, c]}}
  b: {class: meet.Meets, kwargs: {others: [a, c]}}
  c: {class: meet.Meets, kwargs: {others: [a, b]}}
entry: meet.main
steps: 1
"""


@pytest.fixture
def meeting(tmp_path: Path) -> Path:
    (tmp_path / "meet.py").write_text(TOGETHER)
    (tmp_path / "job.yaml").write_text(MEETING)
    return tmp_path


def test_groups_are_launched_at_the_same_time_and_overrides_are_recorded(roost_local_cluster, meeting):
    done = run(roost_local_cluster, meeting, "run", "job.yaml", "steps=7", "--name", "base", "--note", "a try")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['a', 'b', 'c'] 7\n"
    folder = meeting / "runs" / "base"
    record = read_record(folder)
    lines = f"run {record.id} in {folder}\n  roost top {record.id}\n  roost watch {record.id}\n"
    assert lines in done.stderr
    for words in (["top", record.id, "--once"], ["top", "latest", "--once"], ["show", record.id]):
        assert f"{record.id}: job.yaml" in run(roost_local_cluster, meeting, *words).stdout
    assert record.job.arguments == ["steps=7", "--name", "base", "--note", "a try"]
    assert (record.note, record.project) == ("a try", str(meeting))
    for path in meeting.glob("*.here"):
        path.unlink()
    again = run(roost_local_cluster, meeting, "rerun", str(meeting / "runs" / "base"))
    assert again.stdout == "['a', 'b', 'c'] 7\n", again.stderr
    assert sorted(path.name for path in (meeting / "runs").iterdir()) == [".gitignore", "base", "base-2"]
    listed = run(roost_local_cluster, meeting, "runs").stdout
    assert [line.split()[0] for line in listed.splitlines()] == ["ID", "base-2", "base"]
    assert listed.splitlines()[1].endswith("a try")
    (meeting / "elsewhere").mkdir()
    assert "this project has no runs yet" in run(roost_local_cluster, meeting / "elsewhere", "runs").stdout
    assert "base-2" in run(roost_local_cluster, meeting / "elsewhere", "runs", "--all").stdout


def test_groups_that_are_launched_together_fail_together(shared_cluster, roost_local_cluster, meeting):
    (meeting / "waits.here").touch()
    wait = ["workers.a.kwargs.others=[b, waits]", "workers.c.kwargs.others=[a, waits]"]
    done = run(roost_local_cluster, meeting, "run", "job.yaml", *wait, "+workers.b.kwargs.fails=true")
    assert done.returncode == 1
    assert "ValueError: no model\nin b:0 on node 0" in done.stderr
    (folder,) = (meeting / "runs").glob("2*")
    assert done.stderr.endswith(f"run {folder.name} has failed; its folder: {folder}\n")
    assert isinstance(shared_cluster, Cluster)
    left = [entry["name"] for entry in list_named_actors(all_namespaces=True)]
    assert not [name for name in left if name in ("a:0", "a:1", "b:0", "c:0", "c:1")]


def test_a_run_is_stopped_by_its_name(roost_local_cluster, job):
    module = job / "two_components.py"
    module.write_text(module.read_text() + STOPPED)
    command = [sys.executable, "-m", "roost", "run", "job.yaml", "-q", "entry=two_components.wait", "--name", "long"]
    environment = os.environ | roost_local_cluster.environment
    with (
        subprocess.Popen(command, cwd=job, stdout=subprocess.PIPE, text=True, env=environment) as running,
        contextlib.ExitStack() as undo,
    ):
        undo.callback(running.kill)
        assert running.stdout.readline() == "waiting\n"
        stopped = run(roost_local_cluster, job, "stop", str(job / "runs" / "long"))
        assert (stopped.returncode, stopped.stderr) == (0, "run long has ended: interrupted: SIGTERM\n")
        assert running.stdout.read() == "finally\nsaved 4 weights\n"
    again = run(roost_local_cluster, job, "stop", str(job / "runs" / "long"))
    assert again.returncode == 2
    assert "run long is not running: interrupted: SIGTERM" in again.stderr


def test_a_run_starts_a_local_cluster_of_its_own_and_leaves_nothing_of_it(job):
    command = ["roost", "run", "job.yaml", "-q", "--local", "2x4", "--name", "alone"]
    environment = {name: value for name, value in warm.environment().items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=job, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("step 0: 8 samples")
    address = read_record(job / "runs" / "alone").address
    assert not any(address in " ".join(item.info["cmdline"] or ()) for item in psutil.process_iter(["cmdline"]))


def test_following_without_a_worker_follows_all(roost_local_cluster, job):
    assert run(roost_local_cluster, job, "run", "job.yaml", "-q", "--name", "said").returncode == 0
    command = ["roost", "logs", "--follow", "--run", str(job / "runs" / "said")]
    with subprocess.Popen(command, cwd=job, stdout=subprocess.PIPE, text=True, env=warm.environment()) as following:
        seen = {following.stdout.readline().split()[0] for _ in range(2)}
        following.kill()
    assert seen <= {f"{name}:{rank}" for name in ("actor", "rollout") for rank in range(4)}


CARRIED = """
import os
from pathlib import Path
from roost import Worker

class Reads(Worker):
    def read(self):
        import carried
        return os.path.dirname(carried.__file__) == os.getcwd(), Path("data.txt").read_text()

def main(job):
    print(job.groups["a"].read().wait())
"""


def test_a_working_dir_is_copied_to_every_node(roost_local_cluster, tmp_path):
    (tmp_path / "carried.py").write_text(CARRIED)
    (tmp_path / "data.txt").write_text("hello")
    text = "cluster: {num_nodes: 2, working_dir: ., component_placement: {a: '0,4'}}\n"
    (tmp_path / "job.yaml").write_text(f"{text}workers: {{a: carried.Reads}}\nentry: carried.main\n")
    done = run(roost_local_cluster, tmp_path, "run", "job.yaml", "-q")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("[(True, 'hello'), (True, 'hello')]\n")
    wrong = run(roost_local_cluster, tmp_path, "run", "job.yaml", "cluster.working_dir=nowhere")
    assert "working_dir is 'nowhere', which is not a folder here" in wrong.stderr
