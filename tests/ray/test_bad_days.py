"""What goes wrong with nodes, each on a cluster of its own, and what Roost reports."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import ray

import warm
from roost import (
    CheckFailed,
    Cluster,
    ClusterError,
    ConfigError,
    NodePlacementStrategy,
    NodesMissing,
    WorkerDied,
)
from roost.cli.text.status import nodes_table
from roost.runtime.status import get_hardware, get_nodes
from roost.testing import LocalCluster, LocalNode, local_cluster
from waiting import is_gone, press_ctrl_c, wait_until
from workers import Performer


class Looker:
    """Returns what it sees."""

    def see(self, name: str) -> str | None:
        return os.environ.get(name)


def test_fewer_nodes_than_asked_names_who_came(caplog):
    with local_cluster("2x1") as local, caplog.at_level(logging.WARNING):
        with pytest.raises(NodesMissing) as caught:
            Cluster(num_nodes=4, timeout=8)
        text = str(caught.value)
        assert re.search(r"^2 of 4 nodes did not come in \d+ s; there are 2: ", text)
        assert f"{local.address.partition(':')[0]} (local-0) and 127." in text
        assert "(local-1)" in text
        assert f"ray start --address={local.address}" in text
        assert "num_nodes=2" in text
        assert isinstance(caught.value, TimeoutError)
        assert "waiting for 2 of 4 nodes; here: " in caplog.text
        assert not ray.is_initialized()


def test_a_node_that_comes_while_waiting_is_taken():
    with local_cluster("1x1") as local:
        late = threading.Timer(1, local.add_node, [LocalNode(accelerators=3)])
        late.start()
        with Cluster(num_nodes=2, timeout=60) as cluster:
            assert cluster.num_accelerators == 4
        late.join()


def test_a_node_that_dies_while_waiting_is_named():
    with local_cluster("2x1") as local:
        death = threading.Timer(1, local.kill_node, [1])
        death.start()
        with pytest.raises(NodesMissing, match=r"there is 1: .*local-0\); .*local-1\) came and went"):
            Cluster(num_nodes=3, timeout=6)
        death.join()


def test_a_node_that_dies_during_discovery_is_named():
    with local_cluster("3x1") as local:
        # It is still registered and will never answer: that is how a dying machine looks.
        os.kill(local.pids[2][0], signal.SIGSTOP)

        def die() -> None:
            wait_until(ray.is_initialized, "discovery begins")
            time.sleep(2)
            local.kill_node(2)

        death = threading.Thread(target=die)
        death.start()
        with pytest.raises(CheckFailed, match=r"\(local-2\) is gone"):
            Cluster(num_nodes=3, timeout=60)
        death.join()
        assert not ray.is_initialized()
        with Cluster(num_nodes=2, timeout=60) as cluster:
            assert [node.name for node in cluster.nodes] == ["local-0", "local-1"]


def test_a_node_that_hangs_is_named_at_the_deadline():
    with local_cluster("2x1") as local:
        os.kill(local.pids[1][0], signal.SIGSTOP)
        with pytest.raises((CheckFailed, NodesMissing), match="local-1"):
            Cluster(num_nodes=2, timeout=5)
        os.kill(local.pids[1][0], signal.SIGCONT)


def test_a_node_that_dies_later_is_noticed_and_reported(caplog):
    with local_cluster("2x1") as local, caplog.at_level(logging.ERROR):
        with Cluster(num_nodes=2) as cluster:
            assert cluster.dead_nodes == ()
            local.kill_node(1)
            wait_until(lambda: cluster.dead_nodes == (1,), "the watch noticed")
            with pytest.raises(ClusterError, match=r"node 1 \(.*local-1\) is gone"):
                cluster.allocate(Looker, "late", 1, 0, {})
            fine = cluster.allocate(Looker, "fine", 0, 0, {})
            assert ray.get(fine.see.remote("CUDA_VISIBLE_DEVICES"), timeout=60) == "0"
        assert "local-1) is gone: what ran there has ended" in caplog.text


def test_a_node_that_hangs_later_may_still_run_its_workers_which_end_when_it_wakes(caplog):
    with (
        local_cluster("2x1") as local,
        caplog.at_level(logging.ERROR),
        Cluster(num_nodes=2) as cluster,
        Performer.create_group().launch(cluster, NodePlacementStrategy([1]), name="far") as group,
    ):
        (pid,) = group.pid().wait(60)
        os.kill(local.pids[1][0], signal.SIGSTOP)
        wait_until(lambda: cluster.dead_nodes == (1,), "Ray has given it up")
        wait_until(lambda: "local-1) does not answer, and Ray has given it up" in caplog.text, "the watch says so")
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
        os.kill(local.pids[1][0], signal.SIGCONT)
        wait_until(lambda: "local-1) is gone: what ran there has ended" in caplog.text, "the watch noticed")
        wait_until(lambda: is_gone(pid), "its worker has ended")


def without_roost(folder: Path) -> dict[str, str]:
    """The environment of a node that cannot import Roost."""
    (folder / "roost.py").write_text("raise ModuleNotFoundError(\"No module named 'roost'\")\n")
    return {"PYTHONPATH": str(folder)}


def test_a_sick_node_that_is_not_needed_blocks_no_job_and_is_shown(tmp_path):
    sick = without_roost(tmp_path)
    with local_cluster([LocalNode(accelerators=1), LocalNode(accelerators=1), LocalNode(env=sick)]) as local:
        with Cluster(num_nodes=2, timeout=60) as cluster:
            assert [node.name for node in cluster.nodes] == ["local-0", "local-1"]
        status = subprocess.run(
            ["roost", "status"], capture_output=True, text=True, timeout=180, check=False, env=warm.environment()
        )
        assert status.returncode == 0, status.stderr
        live = get_nodes()
        for text in (status.stdout, nodes_table(live.nodes, live.sick).plain):
            assert re.search(r"node 2 is sick: 127\..*local-2\): .*No module named 'roost'\n", text), text
            assert "local-1" in text, "the rest is shown as ever"
        assert [node.to_dict()["name"] for node in (*live.nodes, *live.sick)] == ["local-0", "local-1", "local-2"]
        assert "node 2 (" in get_hardware(2).note, "a plan for two nodes does not use it"
        # A job that needs it is told so, and how to do without it.
        local.add_node(LocalNode(accelerators=1))
        with pytest.raises(CheckFailed, match=r"local-2\): probe failed there(.|\n)*`ray stop`") as caught:
            Cluster(num_nodes=3, timeout=60)
        assert len(caught.value.problems) == 1
        os.kill(local.pids[2][0], signal.SIGSTOP)
        with Cluster(num_nodes=2, timeout=60) as cluster:
            assert cluster.num_nodes == 2, "nor does one that hangs"


def test_a_sick_node_that_does_not_tell_its_rank_is_not_needed_if_all_others_are_there(tmp_path):
    nodes = with_ranks("1", "0", "2")
    nodes[0] = replace(nodes[0], env={**nodes[0].env, **without_roost(tmp_path)})
    with local_cluster([nodes[1], nodes[2], nodes[0]]):
        with pytest.raises(CheckFailed, match=r"local-2\): probe failed there"):
            Cluster(num_nodes=2, timeout=60)
        live = get_nodes()
        assert [(node.rank, node.name) for node in live.nodes] == [(0, "local-0"), (2, "local-1")]
        assert [(node.rank, node.name) for node in live.sick] == [(None, "local-2")]
        with Cluster(num_nodes=1, timeout=60) as cluster:
            assert cluster.nodes[0].name == "local-0"


def test_only_the_nodes_that_are_needed_are_probed_and_only_one_of_those_that_are_alike():
    def with_workers(local: LocalCluster) -> set[int]:
        raylets = {rank: psutil.Process(pids[-1]) for rank, pids in local.pids.items()}
        names = {rank: [child.name() for child in raylet.children(recursive=True)] for rank, raylet in raylets.items()}
        return {rank for rank, found in names.items() if any(not name.startswith("sh") for name in found)}

    different = [LocalNode(env={"WHICH": str(rank)}) for rank in range(3)]
    with local_cluster([*different, LocalNode(), LocalNode(), LocalNode(accelerators=2)]) as local:
        with Cluster(num_nodes=2):
            assert with_workers(local) == {0, 1}
        with Cluster(num_nodes=6) as cluster:
            assert [node.num_accelerators for node in cluster.nodes] == [0, 0, 0, 0, 0, 2]
            assert with_workers(local) == {0, 1, 2, 3}


def with_ranks(*ranks: str | None) -> list[LocalNode]:
    return [LocalNode(accelerators=1, env={} if rank is None else {"ROOST_NODE_RANK": rank}) for rank in ranks]


def test_the_users_own_ranks_decide_and_are_the_same_in_every_run():
    with local_cluster(with_ranks("2", "0", "1")):
        for _ in range(2):
            with Cluster(num_nodes=3) as cluster:
                assert [node.name for node in cluster.nodes] == ["local-1", "local-2", "local-0"]
                assert cluster.master_address == cluster.nodes[0].address
                assert [node.is_head for node in cluster.nodes] == [False, False, True]


def test_wrong_ranks_of_nodes_are_named_all_at_once():
    with local_cluster(with_ranks("1", "1", "two", "9", None)):
        with pytest.raises(ConfigError) as caught:
            Cluster(num_nodes=5)
        text = str(caught.value)
        assert re.search(r"ROOST_NODE_RANK is set on 4 nodes of 5, and not on 127\..*local-4", text), text
        assert "on every node, or on none" in text
        assert "ROOST_NODE_RANK is 1 on both 127." in text
        assert "ROOST_NODE_RANK is 'two' on 127." in text
        assert "not a whole number" in text
        assert "ROOST_NODE_RANK is 9 on 127." in text
        assert "there are 5 nodes" in text


def test_a_nodes_own_visible_devices_are_the_tokens_its_workers_get():
    uuids = ["GPU-11111111-aaaa", "GPU-22222222-bbbb"]
    nodes = [
        LocalNode(accelerators=2, env={"CUDA_VISIBLE_DEVICES": "3,1"}),
        LocalNode(accelerators=2, env={"CUDA_VISIBLE_DEVICES": ",".join(uuids)}),
        LocalNode(accelerators=2),
    ]
    with local_cluster(nodes), Cluster(num_nodes=3) as cluster:
        assert [[item.device for item in node.accelerators] for node in cluster.nodes] == [
            ["3", "1"],
            uuids,
            ["0", "1"],
        ]
        places = [(node, gpu) for node in range(3) for gpu in range(2)]
        workers = [cluster.allocate(Looker, f"w{node}{gpu}", node, gpu, {}) for node, gpu in places]
        seen = ray.get([worker.see.remote("CUDA_VISIBLE_DEVICES") for worker in workers], timeout=60)
        assert seen == ["3", "1", *uuids, "0", "1"]
        from roost import make_plan

        plan = make_plan({"cluster": {"component_placement": {"actor": "0-5"}}}, cluster)
        assert [plan.environment("actor", rank)["CUDA_VISIBLE_DEVICES"] for rank in range(6)] == seen


def test_a_node_that_offers_less_than_ray_counts_is_reported():
    message = r"Ray counts 4 accelerators on .*CUDA_VISIBLE_DEVICES=0,1, which names 2"
    node = LocalNode(accelerators=4, env={"CUDA_VISIBLE_DEVICES": "0,1"})
    with local_cluster([node]), pytest.raises(CheckFailed, match=message):
        Cluster(num_nodes=1)


def test_another_vendor_is_found_by_what_ray_calls_it():
    nodes = [
        LocalNode(resources={"NPU": 8}),
        LocalNode(accelerators=2, model="AMD-Instinct-MI300X-OAM"),
        LocalNode(accelerators=1, model="Intel-GPU-Max-1550"),
    ]
    with local_cluster(nodes), Cluster(num_nodes=3) as cluster:
        assert [node.accelerator_type for node in cluster.nodes] == ["ascend", "amd", "intel"]
        workers = [cluster.allocate(Looker, f"w{node}", node, 0, {}) for node in range(3)]
        names = ["ASCEND_RT_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ONEAPI_DEVICE_SELECTOR"]
        seen = [ray.get(worker.see.remote(name), timeout=60) for worker, name in zip(workers, names, strict=True)]
        assert seen == ["0", "0", "level_zero:0"]


def test_nodes_that_share_an_address_are_distinct_and_in_a_stable_order():
    shared = "127.9.9.1"
    nodes = [LocalNode(accelerators=count, address=shared, name=f"n{10 - count}") for count in (1, 2, 3)]
    with local_cluster(nodes):
        orders = []
        for _ in range(2):
            with Cluster(num_nodes=3) as cluster:
                assert {node.address for node in cluster.nodes} == {shared}
                worker = cluster.allocate(Looker, "w", 1, 2, {})
                assert ray.get(worker.see.remote("CUDA_VISIBLE_DEVICES"), timeout=60) == "2"
                orders.append([(node.name, node.ray_id) for node in cluster.nodes])
        assert orders[0] == orders[1]
        assert [name for name, _ in orders[0]] == ["n9", "n7", "n8"], "the head, then by name"


def test_a_probe_that_raises_is_reported_with_its_node_and_cause(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import platform\n"
        "def python_version():\n    raise RuntimeError('this node is not well')\n"
        "platform.python_version = python_version\n"
    )
    nodes = [LocalNode(accelerators=1), LocalNode(accelerators=1, env={"PYTHONPATH": str(tmp_path)})]
    with local_cluster(nodes):
        with pytest.raises(CheckFailed) as caught:
            Cluster(num_nodes=2, timeout=60)
        assert len(caught.value.problems) == 1
        assert "local-1" in str(caught.value)
        assert "this node is not well" in str(caught.value)
        assert not ray.is_initialized()


def test_a_node_without_roost_gets_a_hint_what_to_install(tmp_path):
    (tmp_path / "roost.py").write_text("raise ModuleNotFoundError(\"No module named 'roost'\")\n")
    nodes = [LocalNode(), LocalNode(env={"PYTHONPATH": str(tmp_path)})]
    with local_cluster(nodes), pytest.raises(CheckFailed, match="install Roost and the job's own packages"):
        Cluster(num_nodes=2, timeout=60)


def test_ctrl_c_while_waiting_leaves_nothing_open():
    with local_cluster("1x1"):
        timer = threading.Timer(1.5, press_ctrl_c)
        timer.start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            Cluster(num_nodes=2, timeout=300)
        assert time.monotonic() - began < 200
        timer.join()
        assert not ray.is_initialized()
        with Cluster(num_nodes=1) as cluster:
            assert cluster.namespace == "roost"
