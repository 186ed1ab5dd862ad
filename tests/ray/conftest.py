"""Real Ray: one local cluster for the whole run, and separate driver processes for tests that end a driver."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import warm
from foreign import all_is_free
from roost import Cluster, ClusterError, WorkerGroup
from roost.runtime.connect.authentication import refresh_authentication
from roost.testing import LocalCluster, local, local_cluster
from waiting import wait_until

TESTS = Path(__file__).resolve().parents[1]


# Workers import the modules of the tests that they were sent from.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
# `test_local_cluster.py` starts the keepers of its clusters as users do.
local.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": warm.start_keeper})


class Driver:
    """A Python script that runs next to the test and prints lines."""

    def __init__(self, path: Path, env: dict[str, str]) -> None:
        self.process = warm.start(path, env)

    def line(self) -> str:
        """The next line that it prints."""
        line = self.process.stdout.readline()
        if not line:
            pytest.fail(f"the driver ended: {self.process.communicate(timeout=60)[1]}")
        return line.strip()

    def end(self, number: int) -> int:
        """Send a signal and wait until the process has ended."""
        self.process.send_signal(number)
        return self.process.wait(60)

    def finish(self) -> tuple[str, str]:
        """Wait until it ends: what it wrote to standard output and to standard error."""
        return self.process.communicate(timeout=120)


Start = Callable[..., Driver]


@contextlib.contextmanager
def _drivers(folder: Path, default: LocalCluster | None = None) -> Iterator[Start]:
    started: list[Driver] = []

    def start(code: str, local: LocalCluster | None = default) -> Driver:
        path = folder / f"driver{len(started)}.py"
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
def driver(tmp_path: Path, roost_local_cluster: LocalCluster) -> Iterator[Start]:
    """Start scripts as drivers on the shared cluster, or on another one."""
    with _drivers(tmp_path, roost_local_cluster) as start:
        yield start


@pytest.fixture(scope="module")
def lasting_driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start scripts as drivers of a given cluster, for all tests of a file."""
    with _drivers(tmp_path_factory.mktemp("drivers")) as start:
        yield start


@pytest.fixture
def shared_cluster(roost_local_cluster: LocalCluster) -> Cluster:
    """A `Cluster` that the tests of a file share; none of them closes it."""
    return Cluster(num_nodes=len(roost_local_cluster.nodes))


@pytest.fixture(scope="session")
def _small_local_cluster() -> Iterator[LocalCluster]:
    local = local_cluster("1x1")
    local.start()
    yield local
    local.stop()


@pytest.fixture
def small_local_cluster(_small_local_cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    """A local cluster of one node, for tests that open a `Cluster`: that starts a process on every node."""
    # Not a context of its own: a test that changes one of these too must be undone before this is.
    for name, value in _small_local_cluster.environment.items():
        monkeypatch.setenv(name, value)
    refresh_authentication()
    yield _small_local_cluster
    Cluster.close_if_open()


@pytest.fixture
def small_cluster(small_local_cluster: LocalCluster) -> Iterator[Cluster]:
    """A `Cluster` of one node for one test, which may break or close it."""
    with Cluster(num_nodes=len(small_local_cluster.nodes)) as cluster:
        yield cluster


@pytest.fixture
def free_cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """The shared Cluster, with nothing reserved before and after the test."""
    wait_until(lambda: all_is_free(shared_cluster), "everything is free before the test")
    yield shared_cluster
    wait_until(lambda: all_is_free(shared_cluster), "everything is given back")


Rounds = Callable[[], Iterator[int]]


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> Rounds:
    """The rounds of a soak test: as many as its share of SOAK_MINUTES has time for, at most SOAK_ROUNDS."""

    def weight(item: pytest.Item) -> float:
        marker = item.get_closest_marker("soak")
        return 0 if marker is None else marker.kwargs.get("weight", 1)

    share = weight(request.node) / sum(map(weight, request.session.items))
    seconds = 60 * float(os.environ.get("SOAK_MINUTES", "10")) * share
    most = int(os.environ.get("SOAK_ROUNDS", 10**6))

    def count() -> Iterator[int]:
        began = time.monotonic()
        for number in itertools.count():
            passed = time.monotonic() - began
            # One more round must fit in.
            if number >= most or (number and passed + passed / number > seconds):
                return
            print(f"{request.node.name}: round {number + 1}, {passed:.0f} of {seconds:.0f} s", flush=True)
            yield number

    return count


Keep = Callable[[str, Callable[[], WorkerGroup]], WorkerGroup]


@pytest.fixture
def keep(shared_cluster: Cluster) -> Keep:
    """Groups that the tests of a file share: the first test launches one, and it ends with the Cluster."""

    def get(name: str, launch: Callable[[], WorkerGroup]) -> WorkerGroup:
        try:
            shared_cluster.worker_manager.get_group(name)
        except ClusterError:
            _kept[name] = launch()
        return _kept[name]

    return get


_kept: dict[str, WorkerGroup] = {}


# The files that take longest come first, so that two workers of pytest-xdist end together.
LONGEST_FIRST = (
    *("docs_live", "examples", "demo", "weights", "drivers", "group_failures", "liveness", "bad_days"),
    *("reservations", "local_cluster", "run", "groups", "engines", "commands", "channels", "messages", "cluster"),
    *("train_rollout", "clean", "logs", "search", "chaining", "runs", "rollout_manager", "connect", "managers"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files by how long they take, and in each file let the tests that share a Cluster come first."""
    weights = {f"test_{name}.py": place for place, name in enumerate(LONGEST_FIRST)}
    files = {item.path: None for item in items}
    places = {path: (weights.get(path.name, len(weights)), place) for place, path in enumerate(files)}
    items.sort(key=lambda item: (places[item.path], "shared_cluster" not in getattr(item, "fixturenames", ())))


@pytest.fixture(autouse=True, scope="module")
def _one_cluster_a_module() -> Iterator[None]:
    """Close the Cluster after each file, so that the names of its groups are free in the next."""
    yield
    Cluster.close_if_open()


@pytest.fixture(autouse=True)
def _wanted(request: pytest.FixtureRequest) -> None:
    """Let the workers of a test have imported what its marker names: torch takes longer than most tests."""
    marker = request.node.get_closest_marker("wants")
    for name in {"roost_local_cluster", "_small_local_cluster"} & set(request.fixturenames):
        request.getfixturevalue(name).preload(*(marker.args if marker is not None else ()))


@pytest.fixture(autouse=True)
def _one_cluster_a_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give a test no Cluster of another one, unless both share it."""
    shares = "shared_cluster" in request.fixturenames
    if not shares:
        Cluster.close_if_open()
    yield
    if not shares:
        Cluster.close_if_open()
