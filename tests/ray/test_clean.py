"""`roost clean`: what dead jobs left behind is shown and ended, and nothing else."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
from ray.util import list_named_actors

import warm
from roost.machine.folders import socket_folder
from roost.machine.processes import find_processes
from roost.runtime.leftovers import Remnant, end_remnants, find_remnants
from roost.testing import LocalCluster, local_cluster
from waiting import is_gone, wait_until

# A job of which a process, an actor and a placement group outlive the driver.
JOB = """
import os, subprocess, sys, time
import ray
from ray.util import placement_group
from roost import Cluster

class Cache:
    def get_pid(self):
        return os.getpid()

class Leaver:
    def leave(self):
        code = "import os, time\\nif os.fork() == 0:\\n    os.setsid()\\n    time.sleep(1000)"
        subprocess.run([sys.executable, "-c", code], check=True)
        ray.remote(num_cpus=0)(Cache).options(name="cache", lifetime="detached").remote()
        ray.get(placement_group([{"CPU": 1}], name="roost:roost:left", lifetime="detached").ready(), timeout=60)
        return os.getpid()

cluster = Cluster(num_nodes=2, quiet=True)
worker = cluster.allocate(Leaver, "leaver", 1, 0, {})
print(ray.get(worker.leave.remote(), timeout=60), flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def roost_local_cluster() -> Iterator[LocalCluster]:
    with local_cluster("2x1") as local:
        yield local


def clean_and_refuse() -> tuple[int, str]:
    """Run `roost clean` on a terminal and answer no; return the exit code and what it printed."""
    ours, theirs = pty.openpty()
    pipes = {"stdin": theirs, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(["roost", "clean"], **pipes, text=True, env=warm.environment()) as asked:
        os.write(ours, b"n\n")
        printed, _ = asked.communicate(timeout=180)
    os.close(ours)
    os.close(theirs)
    return asked.returncode, printed


def children_of(job: psutil.Process) -> set[int]:
    """The processes that the workers of a job left."""
    mark = f":{job.pid}:"
    return {item.pid for item in find_processes("ROOST_JOB") if mark in item.environment["ROOST_JOB"]}


def named_actors(local: LocalCluster) -> set[tuple[str, str]]:
    ray.init(address=local.address, namespace="look", logging_level="error")
    try:
        return {(entry["namespace"], entry["name"]) for entry in list_named_actors(all_namespaces=True)}
    finally:
        ray.shutdown()


def test_what_a_killed_job_left_is_shown_and_ended_and_a_living_job_is_left_alone(driver, roost_local_cluster):
    dead, living = driver(JOB), driver(JOB)
    workers = [int(item.line()) for item in (dead, living)]
    left, kept = children_of(dead.process), children_of(living.process)
    assert len(left) == len(kept) == 1
    # The worker first, so that it cannot end its child.
    os.kill(workers[0], signal.SIGKILL)
    dead.end(signal.SIGKILL)
    pid = left.pop()
    found: list[Remnant] = []

    def has_all() -> bool:
        found[:], why = find_remnants()
        return why == "" and len(on_ray(found)) == 3

    wait_until(has_all, "all three are found")
    code, printed = clean_and_refuse()
    assert code == 1
    kinds = {item.to_dict()["kind"]: item for item in on_ray(found)}
    assert set(kinds) == {"process", "actor", "placement group"}
    assert kinds["process"].name == str(pid)
    assert kinds["actor"].name == "cache"
    assert all(f"{item}\n" in printed for item in on_ray(found))
    assert "things? [y/N]:" in printed
    assert printed.endswith("nothing was ended: --yes ends them\n")
    assert not is_gone(pid), "it only showed them"
    assert end_remnants(on_ray(found)) == ()
    assert is_gone(pid)
    assert not is_gone(kept.pop())
    assert living.process.poll() is None
    namespaces = [namespace for namespace, name in named_actors(roost_local_cluster) if name == "cache"]
    assert len(namespaces) == 1


def on_ray(found: list[Remnant]) -> list[Remnant]:
    """What is left over on the cluster of these tests."""
    return [item for item in found if item.where != "on this machine"]


def test_a_process_whose_cluster_is_gone_and_the_folder_of_a_dead_local_cluster_are_found(monkeypatch):
    # Short, since sockets go there.
    own = Path("/tmp") / f"roost-clean-{os.getpid()}"  # noqa: S108 - a folder of this test alone
    own.mkdir(mode=0o700)
    monkeypatch.setattr("tempfile.tempdir", str(own))
    try:
        local = local_cluster("1x1")
        local.start()
        mark = f"{local.address}|roost:elsewhere:1:1/actor:0"
        # As a child of a worker: it knows its job and its raylet.
        environment = os.environ | {"ROOST_JOB": mark, "RAY_RAYLET_PID": str(local.pids[0][-1])}
        left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], env=environment)
        young = local.folder.with_name("ray-young")
        (socket_folder() / "token.999999999").touch()
        assert here() == [("file", "token.999999999")], "the cluster is up"
        os.kill(local.keeper_pid, signal.SIGKILL)
        wait_until(lambda: all(is_gone(pid) for pids in local.pids.values() for pid in pids), "its nodes are gone")
        young.mkdir()
        os.utime(local.folder, (time.time() - 60, time.time() - 60))
        wanted = [("file", "token.999999999"), ("folder", local.folder.name), ("process", str(left.pid))]
        assert sorted(here()) == wanted
        found = [item for item in find_remnants()[0] if (item.kind, Path(item.name).name) in wanted]
        assert end_remnants(found) == ()
        assert is_gone(left.pid)
        assert here() == []
        assert young.is_dir()
        assert not local.folder.exists()
    finally:
        left.kill()
        left.wait()
        local.stop()
        subprocess.run(["rm", "-rf", str(own)], check=True)


def here() -> list[tuple[str, str]]:
    """What is left over on this machine, of this test."""
    found = [item for item in find_remnants()[0] if item.where == "on this machine"]
    mine = [item for item in found if item.kind != "process" or "roost:elsewhere:1:1/" in item.what]
    return [(str(item.kind), Path(item.name).name) for item in mine]
