"""Real Ray: one local cluster for the whole run, and drivers as processes of their own where a test ends them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from foreign import all_is_free
from roost import Cluster, ClusterError, WorkerGroup
from roost.testing import LocalCluster
from waiting import wait_until

TESTS = Path(__file__).resolve().parents[1]


# Workers import the modules of the tests that they were sent from.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))


class Driver:
    """A Python script that runs beside the test and says lines."""

    def __init__(self, path: Path, env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | env,
            cwd=path.parent,
        )

    def line(self) -> str:
        """The next line that it says."""
        line = self.process.stdout.readline()
        if not line:
            pytest.fail(f"the driver ended: {self.process.communicate(timeout=60)[1]}")
        return line.strip()

    def end(self, number: int) -> int:
        """Send a signal, and wait until it is gone."""
        self.process.send_signal(number)
        return self.process.wait(60)

    def finish(self) -> tuple[str, str]:
        """Wait until it ends by itself: what it said, and what it complained of."""
        return self.process.communicate(timeout=120)


Start = Callable[..., Driver]


@pytest.fixture
def driver(tmp_path: Path, roost_local_cluster: LocalCluster) -> Iterator[Start]:
    """Start scripts as drivers on the shared cluster, or on another one."""
    started: list[Driver] = []

    def start(code: str, local: LocalCluster = roost_local_cluster) -> Driver:
        path = tmp_path / f"driver{len(started)}.py"
        path.write_text(code, encoding="utf-8")
        started.append(Driver(path, local.environment))
        return started[-1]

    yield start
    for item in started:
        if item.process.poll() is None:
            item.process.kill()
        item.process.wait(30)
        item.process.stdin.close()
        item.process.stdout.close()
        item.process.stderr.close()


@pytest.fixture
def shared_cluster(roost_local_cluster: LocalCluster) -> Cluster:
    """A `Cluster` that tests in a row use one after the other, and none of them closes."""
    return Cluster(num_nodes=len(roost_local_cluster.nodes))


@pytest.fixture
def free_cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """The shared Cluster with nothing reserved, before and after."""
    wait_until(lambda: all_is_free(shared_cluster), "everything is free before the test")
    yield shared_cluster
    wait_until(lambda: all_is_free(shared_cluster), "everything was given back")


Keep = Callable[[str, Callable[[], WorkerGroup]], WorkerGroup]


@pytest.fixture
def keep(shared_cluster: Cluster) -> Keep:
    """Groups that tests in a row share: the first test launches one, and it ends with the Cluster."""

    def get(name: str, launch: Callable[[], WorkerGroup]) -> WorkerGroup:
        try:
            shared_cluster.worker_manager.get_group(name)
        except ClusterError:
            _kept[name] = launch()
        return _kept[name]

    return get


_kept: dict[str, WorkerGroup] = {}


@pytest.fixture(autouse=True, scope="module")
def _one_cluster_a_module() -> Iterator[None]:
    """The names of one module's groups are free in the next."""
    yield
    Cluster.close_if_open()


@pytest.fixture(autouse=True)
def _one_cluster_a_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test meets no Cluster of another one, unless both want to share."""
    shares = "shared_cluster" in request.fixturenames
    if not shares:
        Cluster.close_if_open()
    yield
    if not shares:
        Cluster.close_if_open()
