"""Joining a Ray, with its token, and starting one: what it listens on, and what ends with the driver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from roost import Cluster, ClusterError
from roost.runtime.connect.find_head import find_heads
from roost.testing import LocalCluster
from waiting import is_gone, wait_until

OWN_RAY = """
import sys, time
import psutil
from roost import Cluster
cluster = Cluster(num_nodes=1, address="local", quiet=True, record=False)
print(cluster.address, *[process.pid for process in psutil.Process().children(recursive=True)], flush=True)
sys.stdin.readline()
"""


class Home:
    """A home folder without a token, and an environment that says nothing about tokens."""

    def __init__(self, folder: Path, local: LocalCluster) -> None:
        self.local = local
        self.token = Path(local.environment["RAY_AUTH_TOKEN_PATH"]).read_text()
        self.file = folder / ".ray" / "auth_token"

    def join(self) -> int:
        with Cluster(num_nodes=1, address=self.local.address, record=False) as cluster:
            return cluster.num_nodes


@pytest.fixture
def home(tmp_path: Path, small_local_cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return Home(tmp_path, small_local_cluster)


def test_the_token_that_is_here_is_used_for_an_address_as_ray_does_on_its_own(home, monkeypatch):
    home.file.parent.mkdir()
    home.file.write_text(home.token + "\n")
    assert home.join() == 1
    home.file.unlink()
    monkeypatch.setenv("RAY_AUTH_TOKEN", home.token)
    assert home.join() == 1
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_ADDRESS", home.local.address)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", home.local.environment["RAY_AUTH_TOKEN_PATH"])
    with Cluster(num_nodes=1, record=False) as cluster:
        assert cluster.address == home.local.address


def test_without_the_token_of_a_cluster_the_error_says_what_is_missing(home, monkeypatch):
    where = f"the Ray at {home.local.address}"
    with pytest.raises(ClusterError, match=f"{where} wants a token, and there is none here") as caught:
        home.join()
    assert "RAY_AUTH_TOKEN_PATH" in str(caught.value)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    with pytest.raises(ClusterError, match=f"{where} wants a token that is not ours"):
        home.join()
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ClusterError, match=f"{where} wants a token, and RAY_AUTH_MODE is 'disabled'"):
        home.join()
    assert not ray.is_initialized()
    # In an interpreter of its own, as Ray's warnings come when it is loaded.
    done = subprocess.run(
        [sys.executable, "-m", "roost", "nodes", "--address", home.local.address],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 3
    lines = done.stderr.splitlines()
    assert lines[0] == f"{where} wants a token, and RAY_AUTH_MODE is 'disabled'", "and no warnings of Ray"


def test_a_local_cluster_is_not_joined_by_accident(small_local_cluster):
    assert small_local_cluster.address not in find_heads()


def test_a_ray_that_roost_starts_is_on_this_machine_alone_and_ends_with_its_driver(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"HOME": str(tmp_path), "RAY_AUTH_MODE": "disabled"}
    with subprocess.Popen(
        [sys.executable, "-c", OWN_RAY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as driver:
        address, *words = driver.stdout.readline().split()
        pids = [driver.pid, *map(int, words)]
        assert len(pids) > 5
        listening = {
            (psutil.Process(pid).name(), connection.laddr.ip)
            for pid in pids
            for connection in psutil.Process(pid).net_connections()
            if connection.status == psutil.CONN_LISTEN
        }
        assert {name for name, _ in listening} >= {"gcs_server", "raylet"}
        assert {ip.removeprefix("::ffff:") for _, ip in listening} == {"127.0.0.1"}, listening
        # Other processes of this machine can join it.
        nodes = subprocess.run(
            [sys.executable, "-m", "roost", "nodes", "--address", address],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=environment,
        )
        assert "0 (head)  127.0.0.1" in nodes.stdout, nodes.stderr
        driver.send_signal(signal.SIGKILL)
        wait_until(lambda: all(is_gone(pid) for pid in pids), "what Ray started is gone", 20)
