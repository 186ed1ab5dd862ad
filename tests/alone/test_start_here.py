"""If no Ray runs on the machine, `Cluster` starts it and stops it again.

These tests run apart from the others: Ray finds every cluster on a machine, and the other tests start some.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest

from waiting import is_gone, wait_until

CODE = """
import sys, time
from roost import Cluster
cluster = Cluster(num_nodes=1, timeout=120)
import psutil
print(*[f"{p.pid}:{p.name()}" for p in psutil.Process().children(recursive=True)], flush=True)
print(cluster.num_nodes, cluster.nodes[0].is_head, cluster.namespace, flush=True)
BODY
"""


def is_ray_here() -> bool:
    # Names are asked for at once: a process of another program may end in the meantime.
    return any(process.info["name"] in ("raylet", "gcs_server") for process in psutil.process_iter(["name"]))


def wait_for_no_ray():
    try:
        # The one before ends.
        wait_until(lambda: not is_ray_here(), "no Ray runs on this machine", 20)
    except AssertionError:
        pytest.skip("a Ray cluster is running on this machine, and would be joined")


@pytest.fixture(scope="module")
def no_other_ray():
    """Wait once for another Ray that goes on, rather than in each test."""
    wait_for_no_ray()


@pytest.fixture
def environment(no_other_ray, tmp_path, monkeypatch):  # noqa: ARG001 - it looks first
    wait_for_no_ray()
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    # Ray writes a token to the home folder.
    monkeypatch.setenv("HOME", str(tmp_path))
    # Sockets need short paths, so Ray keeps its default folder.
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")


Start = Callable[[str], tuple[subprocess.Popen[str], dict[int, str]]]


@pytest.fixture
def start(environment) -> Iterator[Start]:  # noqa: ARG001 - it prepares the machine
    """Start drivers that start Ray, and kill what is left of them after the test."""
    drivers: list[subprocess.Popen[str]] = []
    processes: list[psutil.Process] = []

    def begin(body: str) -> tuple[subprocess.Popen[str], dict[int, str]]:
        command = [sys.executable, "-c", CODE.replace("BODY", body)]
        driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        drivers.append(driver)
        words = [word.partition(":") for word in driver.stdout.readline().split() if ":" in word]
        processes.extend(psutil.Process(driver.pid).children(recursive=True))
        pids = {int(pid): name for pid, _, name in words}
        assert pids, "Ray runs as a child of the driver"
        assert driver.stdout.readline() == "1 True roost\n"
        return driver, pids

    yield begin
    for driver in drivers:
        driver.kill()
        driver.wait(60)
        driver.stdout.close()
    for process in processes:
        # psutil does not kill another process that has the same pid by now.
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.mark.parametrize(
    ("body", "number", "code"),
    [
        ("cluster.close(); import ray; print(ray.is_initialized())", None, 0),
        # So does every other end in order: tests/ray/test_drivers.py has them.
        ("time.sleep(600)", signal.SIGTERM, 143),
        ("time.sleep(600)", signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_ray_is_started_here_and_goes_with_the_driver(start, body, number, code):
    driver, pids = start(body)
    if number == signal.SIGKILL:
        # Ray's agents take a minute to notice that their raylet is gone, which Roost cannot change.
        workers = {pid: name for pid, name in pids.items() if name.startswith("ray::") and not name.endswith("Agent")}
        pids = workers | {pid: name for pid, name in pids.items() if name in ("gcs_server", "raylet")}
        assert {"gcs_server", "raylet"} <= set(pids.values())
    if number is not None:
        driver.send_signal(number)
    assert driver.wait(120) == code
    wait_until(lambda: all(is_gone(pid) for pid in pids), "Ray is gone", seconds=120)


@pytest.mark.usefixtures("environment")
def test_with_no_ray_there_is_nothing_to_join():
    code = "from roost import Cluster; Cluster()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "there is no Ray cluster to join" in done.stderr
    assert "ray start --head" in done.stderr


@pytest.mark.usefixtures("environment")
def test_commands_say_that_there_is_no_cluster():
    for command in (["nodes"], ["status"], ["plan", "examples/job.yaml", "--live"]):
        done = subprocess.run(
            [sys.executable, "-m", "roost", *command], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 3, done.stderr
        assert "there is no Ray cluster to join" in done.stderr


@pytest.mark.usefixtures("environment")
def test_a_job_of_two_nodes_says_at_once_that_there_is_no_cluster(tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text("cluster: {num_nodes: 2, component_placement: {a: 0}}\nworkers: {a: w.A}\nentry: w.main\n")
    (tmp_path / "w.py").write_text("from roost import Worker\nclass A(Worker): pass\ndef main(job): pass\n")
    command = [sys.executable, "-m", "roost", "run", "job.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 3, done.stderr
    assert "there is no Ray cluster to join, and the job wants 2 nodes" in done.stderr
    assert "`roost up 2x4`" in done.stderr
