"""What goes wrong with nodes, and what Roost reports.

Most tests share a cluster of two healthy nodes, add the one that fails, and end it.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import ray

import warm
from roost import (
    CheckFailed,
    Cluster,
    ClusterError,
    NodePlacementStrategy,
    NodesMissing,
    WorkerDied,
    make_plan,
)
from roost.cli.commands.nodes import nodes_table
from roost.runtime.status import get_hardware, get_nodes
from roost.testing import LocalCluster, LocalNode, local_cluster
from waiting import is_gone, press_ctrl_c, stop, stopped, wait_until
from workers import Performer


class Looker:
    """Returns what it sees."""

    def see(self, name: str) -> str | None:
        return os.environ.get(name)


Add = Callable[[LocalNode], int]


@pytest.fixture(scope="module")
def pair() -> Iterator[LocalCluster]:
    """Two healthy nodes, which no test harms."""
    with local_cluster("2x1") as local:
        yield local


@pytest.fixture
def add(pair: LocalCluster) -> Iterator[Add]:
    """Add nodes to the pair for one test; it returns their ranks."""
    added: list[int] = []

    def start(node: LocalNode = LocalNode(accelerators=1)) -> int:  # noqa: B008 - frozen
        added.append(pair.add_node(node))
        return added[-1]

    yield start
    for rank in added:
        if rank in pair.pids:
            pair.kill_node(rank)
    ray.init(log_to_driver=False)
    wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == 2, "Ray noticed that they are gone")
    ray.shutdown()


def test_fewer_nodes_than_asked_names_who_came(pair, caplog):
    with caplog.at_level(logging.WARNING):
        with pytest.raises(NodesMissing) as caught:
            Cluster(num_nodes=4, timeout=4)
        text = str(caught.value)
        assert re.search(r"^2 of 4 nodes did not come in \d+ s; there are 2: ", text)
        assert f"{pair.address.partition(':')[0]} (local-0) and 127." in text
        assert "(local-1)" in text
        assert f"ray start --address={pair.address}" in text
        assert "num_nodes=2" in text
        assert isinstance(caught.value, TimeoutError)
        assert "waiting for 2 of 4 nodes; here: " in caplog.text
        assert not ray.is_initialized()


@pytest.mark.usefixtures("pair")
def test_ctrl_c_while_waiting_leaves_nothing_open():
    timer = threading.Timer(1.5, press_ctrl_c)
    timer.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        Cluster(num_nodes=3, timeout=300)
    assert time.monotonic() - began < 200
    timer.join()
    assert not ray.is_initialized()
    with Cluster(num_nodes=1) as cluster:
        assert cluster.namespace == "roost"


def test_a_node_that_comes_while_waiting_is_taken(add):
    late = threading.Timer(1, add, [LocalNode(accelerators=3)])
    late.start()
    with Cluster(num_nodes=3, timeout=60) as cluster:
        assert cluster.num_accelerators == 5
    late.join()


def test_a_node_that_dies_while_waiting_is_named(pair, add):
    rank = add()
    death = threading.Timer(1, pair.kill_node, [rank])
    death.start()
    with pytest.raises(NodesMissing, match=rf"there are 2: .*local-1\); .*local-{rank}\) came and went"):
        Cluster(num_nodes=4, timeout=5)
    death.join()


def test_a_node_that_dies_during_discovery_is_named(pair, add):
    rank = add()
    # It is still registered and will never answer: that is how a dying machine looks.
    stop(pair.pids[rank][0])

    def die() -> None:
        wait_until(ray.is_initialized, "discovery begins")
        time.sleep(2)
        pair.kill_node(rank)

    death = threading.Thread(target=die)
    death.start()
    with pytest.raises(CheckFailed, match=rf"\(local-{rank}\) is gone"):
        Cluster(num_nodes=3, timeout=60)
    death.join()
    assert not ray.is_initialized()
    with Cluster(num_nodes=2, timeout=60) as cluster:
        assert [node.name for node in cluster.nodes] == ["local-0", "local-1"]


def test_a_node_that_hangs_is_named_at_the_deadline(pair, add):
    rank = add()
    with stopped(pair.pids[rank][0]), pytest.raises((CheckFailed, NodesMissing), match=f"local-{rank}"):
        Cluster(num_nodes=3, timeout=5)


def test_a_node_that_dies_later_is_noticed_and_reported(pair, add, caplog):
    rank = add()
    with caplog.at_level(logging.ERROR), Cluster(num_nodes=3) as cluster:
        assert cluster.dead_nodes == ()
        pair.kill_node(rank)
        wait_until(lambda: cluster.dead_nodes == (2,), "the watch noticed")
        with pytest.raises(ClusterError, match=rf"node 2 \(.*local-{rank}\) is gone"):
            cluster.allocate(Looker, "late", 2, 0, {})
        fine = cluster.allocate(Looker, "fine", 0, 0, {})
        assert ray.get(fine.see.remote("CUDA_VISIBLE_DEVICES"), timeout=60) == "0"
    assert f"local-{rank}) is gone: what ran there has ended" in caplog.text


def test_a_node_that_hangs_later_may_still_run_its_workers_which_end_when_it_wakes(pair, add, caplog):
    rank = add()
    with (
        caplog.at_level(logging.ERROR),
        Cluster(num_nodes=3) as cluster,
        Performer.create_group().launch(cluster, NodePlacementStrategy([2]), name="far") as group,
    ):
        (pid,) = group.pid().wait(60)
        stop(pair.pids[rank][0])
        wait_until(lambda: cluster.dead_nodes == (2,), "Ray has given it up")
        given_up = f"local-{rank}) does not answer, and Ray has given it up"
        wait_until(lambda: given_up in caplog.text, "the watch says so")
        assert "what ran there may still run" in caplog.text
        assert "has ended" not in caplog.text
        assert not is_gone(pid), "which is so"

        def is_given_up() -> bool:
            # Until Ray has told this process, the worker still answers.
            try:
                group.pid().wait(60)
            except WorkerDied as error:
                return "its node does not answer, it may still run" in str(error)
            return False

        wait_until(is_given_up, "its worker is given up too")
        os.kill(pair.pids[rank][0], signal.SIGCONT)
        wait_until(lambda: f"local-{rank}) is gone: what ran there has ended" in caplog.text, "the watch noticed")
        wait_until(lambda: is_gone(pid), "its worker has ended")


def without_roost(folder: Path) -> dict[str, str]:
    """The environment of a node that cannot import Roost."""
    (folder / "roost.py").write_text("raise ModuleNotFoundError(\"No module named 'roost'\")\n")
    return {"PYTHONPATH": str(folder)}


def test_a_sick_node_that_is_not_needed_blocks_no_job_and_is_shown(pair, add, tmp_path):
    rank = add(LocalNode(env=without_roost(tmp_path)))
    with Cluster(num_nodes=2, timeout=60) as cluster:
        assert [node.name for node in cluster.nodes] == ["local-0", "local-1"]
    status = subprocess.run(
        ["roost", "status"], capture_output=True, text=True, timeout=180, check=False, env=warm.environment()
    )
    assert status.returncode == 0, status.stderr
    live = get_nodes()
    for text in (status.stdout, nodes_table(live.nodes, live.sick).plain):
        assert re.search(rf"node 2 is sick: 127\..*local-{rank}\): .*No module named 'roost'\n", text), text
        assert "local-1" in text, "the rest is shown as ever"
    assert [node.to_dict()["name"] for node in (*live.nodes, *live.sick)] == ["local-0", "local-1", f"local-{rank}"]
    assert "node 2 (" in get_hardware(2).note, "a plan for two nodes does not use it"
    # A job that needs it is told so, and how to do without it.
    add()
    with pytest.raises(CheckFailed, match=rf"local-{rank}\): probe failed there(.|\n)*`ray stop`") as caught:
        Cluster(num_nodes=3, timeout=60)
    assert len(caught.value.problems) == 1
    assert "install Roost and the job's own packages" in str(caught.value)
    stop(pair.pids[rank][0])
    with Cluster(num_nodes=2, timeout=60) as cluster:
        assert cluster.num_nodes == 2, "nor does one that hangs"


def test_a_probe_that_raises_is_reported_with_its_node_and_cause(add, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import platform\n"
        "def python_version():\n    raise RuntimeError('this node is not well')\n"
        "platform.python_version = python_version\n"
    )
    rank = add(LocalNode(accelerators=1, env={"PYTHONPATH": str(tmp_path)}))
    with pytest.raises(CheckFailed) as caught:
        Cluster(num_nodes=3, timeout=60)
    assert len(caught.value.problems) == 1
    assert f"local-{rank}" in str(caught.value)
    assert "this node is not well" in str(caught.value)
    assert not ray.is_initialized()


def test_only_the_nodes_that_are_needed_are_probed_and_only_one_of_those_that_are_alike(pair, add):
    ranks = [add(node) for node in (LocalNode(env={"WHICH": "other"}), LocalNode(), LocalNode(accelerators=2))]

    def with_workers() -> list[int]:
        found = {rank: psutil.Process(pair.pids[rank][-1]).children(recursive=True) for rank in ranks}
        return [rank for rank in ranks if any(not child.name().startswith("sh") for child in found[rank])]

    with Cluster(num_nodes=2):
        assert with_workers() == []
    with Cluster(num_nodes=5) as cluster:
        assert [node.num_accelerators for node in cluster.nodes] == [1, 1, 0, 0, 2]
        assert with_workers() == ranks[:1], "the others are like the first two"


UUIDS = ["GPU-11111111-aaaa", "GPU-22222222-bbbb"]


@pytest.fixture(scope="module")
def mixed() -> Iterator[None]:
    """Nodes with their own ranks, some with visible devices of their own, and some of other vendors."""
    nodes = [
        LocalNode(accelerators=2, env={"ROOST_NODE_RANK": "2"}),
        LocalNode(accelerators=2, env={"ROOST_NODE_RANK": "0", "CUDA_VISIBLE_DEVICES": "3,1"}),
        LocalNode(accelerators=2, env={"ROOST_NODE_RANK": "1", "CUDA_VISIBLE_DEVICES": ",".join(UUIDS)}),
        LocalNode(resources={"NPU": 8}, env={"ROOST_NODE_RANK": "3"}),
        LocalNode(accelerators=2, model="AMD-Instinct-MI300X-OAM", env={"ROOST_NODE_RANK": "4"}),
        LocalNode(accelerators=1, model="Intel-GPU-Max-1550", env={"ROOST_NODE_RANK": "5"}),
    ]
    with local_cluster(nodes):
        yield


@pytest.mark.usefixtures("mixed")
def test_the_users_own_ranks_decide_and_are_the_same_in_every_run():
    """In each run, workers also get the tokens of their node: its own visible devices, and another vendor's names."""
    for count, look in ((3, devices_of_nodes), (6, devices_of_other_vendors)):
        with Cluster(num_nodes=count) as cluster:
            assert [node.name for node in cluster.nodes[:3]] == ["local-1", "local-2", "local-0"]
            assert cluster.master_address == cluster.nodes[0].address
            assert [node.is_head for node in cluster.nodes[:3]] == [False, False, True]
            look(cluster)


def devices_of_nodes(cluster: Cluster) -> None:
    """A node's own visible devices are the tokens that its workers get."""
    devices = [[item.device for item in node.accelerators] for node in cluster.nodes]
    assert devices == [["3", "1"], UUIDS, ["0", "1"]]
    places = [(node, gpu) for node in range(3) for gpu in range(2)]
    workers = [cluster.allocate(Looker, f"w{node}{gpu}", node, gpu, {}) for node, gpu in places]
    seen = ray.get([worker.see.remote("CUDA_VISIBLE_DEVICES") for worker in workers], timeout=60)
    assert seen == ["3", "1", *UUIDS, "0", "1"]
    plan = make_plan({"cluster": {"component_placement": {"actor": "0-5"}}}, cluster)
    assert [plan.environment("actor", rank)["CUDA_VISIBLE_DEVICES"] for rank in range(6)] == seen


def devices_of_other_vendors(cluster: Cluster) -> None:
    """Another vendor is found by what Ray calls it."""
    assert [node.accelerator_type for node in cluster.nodes[3:]] == ["ascend", "amd", "intel"]
    workers = [cluster.allocate(Looker, f"w{node}", node, 0, {}) for node in (3, 4, 5)]
    names = ["ASCEND_RT_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ONEAPI_DEVICE_SELECTOR"]
    seen = [ray.get(worker.see.remote(name), timeout=60) for worker, name in zip(workers, names, strict=True)]
    assert seen == ["0", "0", "level_zero:0"]
