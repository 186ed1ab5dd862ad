"""Jobs as processes: two at the same time, attaching from outside, and every way for a driver to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import textwrap
from collections.abc import Iterator

import pytest
import ray

import warm
from roost import Cluster, ClusterError, NameTaken, NodeManager, WorkerGroup
from roost.runtime.runs.record import read_record
from roost.runtime.status import get_status
from roost.testing import LocalCluster, local_cluster
from waiting import is_gone, stop, wait_until

# A job that prints its namespace and its processes, and then does what the test wants.
JOB = """
import os, signal, subprocess, sys, time
import ray
from roost import Cluster, NodeManager

class Worker:
    def hello(self):
        return os.getpid(), Cluster().namespace

    def leave_a_child(self):
        # As a server that becomes a daemon: no process is its parent any more.
        code = "import os, time\\nif os.fork() == 0:\\n    os.setsid()\\n    time.sleep(1000)"
        subprocess.run([sys.executable, "-c", code], check=True)

def main():
    cluster = Cluster(num_nodes=2)
    worker = cluster.allocate(Worker, "worker", 1, 0, {})
    pid, namespace = ray.get(worker.hello.remote(), timeout=60)
    print(cluster.namespace, namespace, pid, cluster.master_port, flush=True)
    BODY

main()
"""
HEADLESS = """
import os, sys
from roost import Cluster
cluster = Cluster(num_nodes=2)
print("open", flush=True)
sys.stdin.readline()
cluster.close()
print("closed", flush=True)
os._exit(5)
"""
STOPPED = """
import os
from roost import Cluster, NodePlacementStrategy
from workers import Performer

with Cluster(num_nodes=2, run_dir="out", quiet=True) as cluster:
    with Performer.create_group().launch(cluster, NodePlacementStrategy([1, 1]), name="actor") as group:
        cluster.on_stop(lambda: 1 / 0)
        cluster.on_stop(lambda: print("saved by", group[1].rank_of().wait(60), flush=True), seconds=60)
        try:
            print(*group.pid().wait(60), flush=True)
            group[0].wait_for(os.getcwd(), "never").wait()
        finally:
            print("finally", flush=True)
"""
# A signal that arrives just before a sleep begins interrupts nothing until the sleep is over.
WAIT = "print('waiting', flush=True)\nfor _ in range(6000): time.sleep(0.1)"
OWN_HANDLER = f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n{WAIT}"


@pytest.fixture(scope="module")
def roost_local_cluster() -> Iterator[LocalCluster]:
    """A smaller cluster than the other tests use, because many drivers join it one after the other."""
    with local_cluster("2x1") as local:
        yield local


def job(body: str) -> str:
    return JOB.replace("    BODY", textwrap.indent(textwrap.dedent(body).strip(), "    "))


def look_from_elsewhere() -> dict:
    done = subprocess.run(
        ["roost", "status", "--format", "json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=warm.environment(),
    )
    return json.loads(done.stdout)


def test_two_jobs_at_the_same_time_have_separate_namespaces(driver):
    jobs = [driver(job(WAIT)) for _ in range(2)]
    said = [item.line().split() for item in jobs]
    names = sorted(words[0] for words in said)
    assert names == ["roost", "roost-2"]
    for mine, workers, _, _ in said:
        assert mine == workers, "a worker finds its own job"
    assert said[0][3] != said[1][3], "each job's master port is its own"
    with pytest.raises(ClusterError) as caught:
        Cluster()
    assert "there are 2 jobs on this Ray cluster: 'roost' (pid " in str(caught.value)
    assert "Cluster(namespace='roost')" in str(caught.value)
    with pytest.raises(NameTaken, match="another job has namespace 'roost-2'"):
        Cluster(num_nodes=2, namespace="roost-2")
    with Cluster(namespace="roost-2") as attached:
        assert attached.namespace == "roost-2"
        assert attached.num_nodes == 2
        assert str(attached.master_port) in (said[0][3], said[1][3])
    with Cluster(namespace="roost-2"):
        assert NodeManager.get_proxy().get_nodes(), "one that attached takes nothing away when it leaves"
    assert all(item.process.poll() is None for item in jobs)


KEEPING = """
import sys
from roost import Cluster, NodePlacementStrategy
from workers import Performer
with Cluster(num_nodes=2, quiet=True) as cluster:
    group = Performer.create_group().launch(cluster, NodePlacementStrategy([0, 1]), name="kept")
    print("open", flush=True)
    sys.stdin.readline()
    print(group.rank_of().wait(60), flush=True)
"""


def test_a_driver_that_is_stopped_keeps_its_job(driver):
    mine = driver(KEEPING)
    assert mine.line() == "open"
    stop(mine.process.pid)
    with Cluster():
        assert WorkerGroup.attach("kept").rank_of().wait(60) == [0, 1]
    mine.process.send_signal(signal.SIGCONT)
    mine.process.stdin.write("go\n")
    mine.process.stdin.flush()
    assert mine.line() == "[0, 1]"
    assert mine.process.wait(60) == 0


def test_from_another_process_cluster_attaches_to_the_only_job(driver):
    mine = driver(job(WAIT))
    _, _, pid, port = mine.line().split()
    with Cluster() as attached:
        assert attached.namespace == "roost"
        assert str(attached.master_port) == port
        assert NodeManager.get_proxy().get_job().pid == mine.process.pid
        assert attached.allocate(dict, "guest", 0, 0, {}) is not None
    assert not is_gone(int(pid))


@pytest.mark.parametrize(
    ("body", "number", "code"),
    [
        ("return", None, 0),
        ("cluster.close()\nsys.exit(7)", None, 7),
        ("raise ValueError('mine')", None, 1),
        (WAIT, signal.SIGKILL, -signal.SIGKILL),
        (OWN_HANDLER, signal.SIGTERM, 9),
    ],
)
def test_however_a_driver_ends_what_it_started_is_gone_and_its_exit_code_is_its_own(driver, body, number, code):
    mine = driver(job(body))
    _, _, pid, _ = mine.line().split()
    if number is None:
        found = mine.process.wait(60)
    else:
        assert mine.line() == "waiting"
        found = mine.end(number)
    assert found == code
    wait_until(lambda: is_gone(int(pid)), "its worker is gone")
    wait_until(lambda: get_status().jobs == (), "nor are its managers")


@pytest.mark.parametrize(
    ("number", "code", "outcome"),
    [
        (signal.SIGTERM, 143, "interrupted: SIGTERM"),
        (signal.SIGINT, -signal.SIGINT, "interrupted"),
    ],
)
def test_a_driver_that_is_told_to_stop_unwinds_and_saves_while_its_workers_live(
    driver, tmp_path, number, code, outcome
):
    mine = driver(STOPPED)
    pids = [int(pid) for pid in mine.line().split()]
    wait_until((tmp_path / "waiting-0").exists, "a worker is at it")
    mine.process.send_signal(number)
    assert mine.line() == "finally"
    assert mine.line() == "saved by [1]"
    assert mine.process.wait(60) == code
    assert "ZeroDivisionError" in mine.finish()[1], "a hook that fails holds up nothing"
    assert str(read_record(tmp_path / "out").outcome) == outcome
    wait_until(lambda: all(map(is_gone, pids)), "its workers are gone")
    wait_until(lambda: get_status().jobs == (), "nor are its managers")


def test_after_a_kill_a_new_driver_starts_clean_and_leftovers_are_named(driver, roost_local_cluster):
    mine = driver(job("ray.get(worker.leave_a_child.remote(), timeout=60)\nprint('left', flush=True)\n" + WAIT))
    words = mine.line().split()
    assert mine.line() == "left"
    # The worker first, so that Ray has no chance to clean up after it.
    os.kill(int(words[2]), signal.SIGKILL)
    mine.end(signal.SIGKILL)
    with Cluster(num_nodes=2) as cluster:
        assert cluster.allocate(dict, "worker", 1, 0, {}) is not None, "the name is free"
    wait_until(lambda: get_status().leftovers, "the leftover is found")
    left = get_status().leftovers
    try:
        assert len(left) == 1
        assert left[0].job.startswith("roost:")
        assert left[0].job.endswith("/worker")
        assert f":{mine.process.pid}:" in left[0].job
        done = subprocess.run(
            ["roost", "status"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=warm.environment() | roost_local_cluster.environment,
        )
        assert done.returncode == 0, done.stderr
        assert "left over from jobs that have ended (1)" in done.stdout
        assert f"pid {left[0].pid} on node " in done.stdout
        assert "`roost clean` ends them" in done.stdout
    finally:
        for item in left:
            os.kill(item.pid, signal.SIGKILL)
    assert get_status().leftovers == ()


def test_ctrl_c_in_the_middle_of_start_leaves_nothing(driver):
    code = "import sys\nfrom roost import Cluster\nprint('go', flush=True)\nCluster(num_nodes=9, timeout=300)\n"
    mine = driver(code)
    mine.line()
    # Somewhere between the import of Ray and the wait for nodes that never come.
    with pytest.raises(subprocess.TimeoutExpired):
        mine.process.wait(3)
    assert mine.end(signal.SIGINT) == -signal.SIGINT
    assert "KeyboardInterrupt" in mine.finish()[1]
    assert get_status().jobs == ()
    status = json.loads(json.dumps(get_status().to_dict()))
    assert status["jobs"] == []
    assert len(status["nodes"]) == 2


def test_when_the_head_is_gone_close_comes_back_and_the_driver_lives(driver):
    with local_cluster("2x1") as local:
        mine = driver(HEADLESS, local)
        assert mine.line() == "open"
        local.kill_node(0)
        mine.process.stdin.write("go\n")
        mine.process.stdin.flush()
        assert mine.line() == "closed"
        assert mine.process.wait(60) == 5


@pytest.mark.usefixtures("roost_cluster")
def test_an_actor_of_other_code_with_the_name_of_a_manager_is_not_a_job():
    foreign = ray.remote(num_cpus=0)(dict).options(name="NodeManager", namespace="theirs").remote()
    try:
        found = {item["namespace"]: item for item in look_from_elsewhere()["jobs"]}
        assert found["theirs"]["driver"] is None
        assert found["roost"]["driver"]["pid"] == os.getpid()
    finally:
        ray.kill(foreign)


def test_status_names_a_job_that_lost_its_manager(driver, roost_local_cluster):
    mine = driver(job("ray.kill(NodeManager.get_proxy().handle)\nprint('done', flush=True)\n" + WAIT))
    mine.line()
    mine.line()
    wait_until(lambda: "NodeManager" not in get_status().jobs[0].managers, "the manager is gone")
    found = get_status().jobs
    assert [item.namespace for item in found] == ["roost"]
    assert found[0].missing_managers == ("NodeManager",)
    assert found[0].job is None
    assert sum(count for _, count in found[0].workers) == 1
    assert roost_local_cluster.address == get_status().address


REMARK = """
from ray._private import worker
from ray._private.ray_logging import global_worker_stdstream_dispatcher as printer
from roost import Cluster

with Cluster(num_nodes=1, quiet=True):
    print("from the job")
    # As the thread does that gets it from the nodes; local clusters do not collect what is printed.
    remark = {"is_err": False, "lines": ["many processes"], "pid": "raylet", "ip": "10.0.0.1"}
    remark |= {"actor_name": None, "task_name": None, "job": None}
    printer.emit(remark)
    worker.print_to_stdstream({**remark, "lines": ["a worker died"]}, ignore_prefix=False)
"""


def test_standard_output_is_the_jobs_and_what_ray_prints_goes_to_standard_error(driver):
    out, err = driver(REMARK).finish()
    assert out == "from the job\n"
    assert "many processes" in err
    assert "a worker died" in err
