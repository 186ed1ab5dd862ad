"""The managers: thousands of workers, leases that never overlap, and reports of a manager's death."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray

from roost import (
    Cluster,
    ClusterError,
    CollectiveManager,
    ConfigError,
    ManagerDied,
    NameTaken,
    NodeManager,
    NodePlacementStrategy,
    PortLease,
    PortsExhausted,
    WorkerManager,
    WorkerRecord,
    WorkerState,
)
from roost.deadline import Deadline
from roost.runtime.launch.launch import GroupPort
from waiting import stopped, wait_until
from workers import Performer


def records(count: int, prefix: str = "actor") -> list[WorkerRecord]:
    return [
        WorkerRecord(address=f"{prefix}:{rank}", group=prefix, rank=rank, node_rank=rank % 4, accelerators=(rank % 8,))
        for rank in range(count)
    ]


@pytest.mark.usefixtures("small_cluster")
def test_ten_thousand_workers_are_registered_and_read_back_in_one_call_each():
    manager = WorkerManager.get_proxy()
    manager.register(records(10_000))
    found = manager.get_workers()
    assert len(found) == 10_000
    assert [item.address for item in found] == [f"actor:{rank}" for rank in range(10_000)]
    assert found[4321].accelerators == (4321 % 8,)
    assert all(item.state is WorkerState.REQUESTED and item.since > 0 for item in found)
    assert manager.get_workers(["actor:9999", "actor:0"])[0].rank == 9999
    manager.set_ready({"actor:7": 4711})
    assert manager.get_workers(["actor:7"])[0].pid == 4711
    with pytest.raises(ClusterError, match="no worker is registered as critic:0"):
        manager.get_workers(["critic:0"])
    with pytest.raises(NameTaken, match="1 worker is registered under that name already: actor:5"):
        manager.register([*records(2, "critic"), *records(6)[5:]])
    assert len(manager.get_workers()) == 10_000, "all or none"


def test_a_communication_group_is_the_same_for_all_its_members(shared_cluster):
    manager = CollectiveManager.get_proxy()
    members = ["actor:0", "actor:1", "actor:2"]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: manager.create_group("train", members, 1), range(8)))
    assert len(set(found)) == 1
    assert found[0].address == shared_cluster.get_node_ip(1)
    assert found[0].members == tuple(members)
    assert manager.get_group("train") == found[0]
    other = manager.create_group("eval", members[:1], 1)
    assert other.port != found[0].port
    assert {group.name for group in manager.get_groups()} == {"train", "eval"}
    with pytest.raises(NameTaken, match="with other members"):
        manager.create_group("train", members[:2], 1)
    with pytest.raises(ConfigError, match="has no members"):
        manager.create_group("empty", [], 1)
    leased = NodeManager.get_proxy().count_leased_ports()
    manager.remove_group("eval")
    assert NodeManager.get_proxy().count_leased_ports() == leased - 1
    with pytest.raises(ClusterError, match="no communication group 'eval'"):
        manager.get_group("eval")


def test_a_communication_group_ends_with_the_member_that_listens(shared_cluster):
    manager, nodes = CollectiveManager.get_proxy(), NodeManager.get_proxy()
    members = ["meeting:0", "meeting:1"]
    before = nodes.count_leased_ports()
    found = []
    for node in (0, 1):
        strategy = NodePlacementStrategy([node, node])
        with Performer.create_group().launch(shared_cluster, strategy, name="meeting") as group:
            found.append(manager.create_group("tp", members, node))
            assert manager.create_group("tp", members, node) == found[-1]
            with pytest.raises(NameTaken, match=f"'tp' exists already, on node {node}, not on node 2"):
                manager.create_group("tp", members, 2)
            if node:
                os.kill(group[0].pid().wait(60)[0], 9)
                wait_until(lambda: "tp" not in {item.name for item in manager.get_groups()}, "it has ended")
                group.restart(0)
                found.append(manager.create_group("tp", members, 2))
    assert [item.address for item in found] == [shared_cluster.get_node_ip(node) for node in range(3)]
    with pytest.raises(ClusterError, match="no communication group 'tp'"):
        manager.get_group("tp")
    wait_until(lambda: nodes.count_leased_ports() == before, "no port stays leased")


def test_a_thousand_leases_from_sixteen_callers_have_no_port_twice(shared_cluster):
    with ThreadPoolExecutor(16) as pool:
        leases = list(pool.map(lambda index: shared_cluster.lease_ports(index % 4, 1 + index % 3), range(1000)))
    # The nodes of a local cluster are one machine, and share its ports.
    ports = [port for lease in leases for port in lease.ports]
    assert len(ports) == len(set(ports)) == sum(1 + index % 3 for index in range(1000))
    assert shared_cluster.master_port not in ports
    low = shared_cluster.nodes[0].ephemeral_ports[0]
    assert all(20000 <= port < low for port in ports)
    assert [lease.address for lease in leases[:4]] == [node.address for node in shared_cluster.nodes]
    before = NodeManager.get_proxy().count_leased_ports()
    NodeManager.get_proxy().release_ports(leases)
    assert NodeManager.get_proxy().count_leased_ports() == before - len(ports)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((4,), "no node 4"), ((0, 0), "0 ports were asked for: ask for 1 to"), ((0, 5000), "ask for 1 to")],
)
def test_a_wrong_request_for_ports_raises(shared_cluster, arguments, message):
    with pytest.raises(ConfigError, match=message):
        shared_cluster.lease_ports(*arguments)


@pytest.mark.usefixtures("roost_local_cluster")
def test_a_port_in_use_is_skipped_and_a_full_range_raises():
    first = 31_000
    everything = set(range(first, first + 10))
    with Cluster(num_nodes=4, port_range=(first, first + 9)) as cluster, socket.socket() as other:
        ours = {cluster.master_port}
        assert ours <= everything
        # Strangers on this machine may have some of the ten for a while, too.
        other.bind(("", _free_port(everything - ours)))
        held = other.getsockname()[1]
        leases: list[PortLease] = []
        with pytest.raises(PortsExhausted) as caught:
            leases.extend(cluster.lease_ports(index % 4) for index in range(10))
        lease = leases[-1]
        ours |= {item.port for item in leases}
        assert held not in ours
        assert f"{len(ours)} of 10 are leased by this job, {10 - len(ours)} are in use by others" in str(caught.value)
        assert "port_range" in str(caught.value)
        other.close()
        again = cluster.lease_ports(3)
        assert again.port in everything - ours, "what has become free is found"
        cluster.release_ports(lease)
        assert cluster.lease_ports(0).port in everything - ours - {again.port} | {lease.port}
        with pytest.raises(PortsExhausted, match="no 2 free ports in a row"):
            cluster.lease_ports(0, 2)


def _free_port(ports: set[int]) -> int:
    for port in sorted(ports):
        with socket.socket() as trial, contextlib.suppress(OSError):
            trial.bind(("", port))
            return port
    pytest.skip("strangers have every port that this test could use")


class Holder:
    """Leases ports for itself."""

    def lease(self, count: int) -> tuple[str | None, list[int]]:
        lease = Cluster().lease_ports(1, count)
        return lease.holder, list(lease.ports)

    def pid(self) -> int:
        return os.getpid()


def test_ports_come_back_when_their_holder_dies(shared_cluster):
    manager = NodeManager.get_proxy()
    before = manager.count_leased_ports()
    holder = shared_cluster.allocate(Holder, "holder", 1, 0, {})
    name, ports = ray.get(holder.lease.remote(5), timeout=60)
    assert name == "holder"
    assert ports == list(range(ports[0], ports[0] + 5))
    assert manager.count_leased_ports() == before + 5
    os.kill(ray.get(holder.pid.remote(), timeout=60), 9)
    wait_until(lambda: manager.count_leased_ports() == before, "the ports came back")


def test_a_manager_that_is_killed_is_noticed_and_reported(small_cluster, caplog):
    groups, workers, nodes = (kind.get_proxy() for kind in (CollectiveManager, WorkerManager, NodeManager))
    calls = {
        groups: lambda: groups.get_group("x"),
        workers: lambda: workers.get_workers(),
        nodes: lambda: small_cluster.lease_ports(0),
    }
    for manager, call in calls.items():
        with caplog.at_level(logging.ERROR):
            ray.kill(manager.handle)
            text = f"the {manager.NAME} of 'roost' is gone"
            wait_until(lambda text=text: text in caplog.text, "the driver says so without being asked")
        with pytest.raises(ManagerDied, match=text):
            call()
        wait_until(lambda manager=manager: _is_unknown(type(manager)), "its name is unknown")


def _is_unknown(manager: type) -> bool:
    try:
        manager.get_proxy()
    except ManagerDied:
        return True
    return False


def test_without_a_cluster_there_is_no_manager():
    with pytest.raises(ClusterError, match="this process has no Cluster"):
        WorkerManager.get_proxy()


def test_ports_that_a_launch_could_not_release_are_released_later(small_cluster):
    manager = small_cluster.node_manager
    before = manager.count_leased_ports()
    port = GroupPort(manager, 0, None)
    candidates = port.propose(Deadline.after(30))
    pid = ray.get(manager.handle.__ray_call__.remote(lambda _: os.getpid()), timeout=60)
    # So that the next process knows it.
    ray.get(manager.handle.save_again.remote(), timeout=60)
    with stopped(pid):
        with pytest.raises(ClusterError):
            port.choose(candidates[0], Deadline.after(0.5))
        # With what it was asked to do; Ray restarts it.
        os.kill(pid, signal.SIGKILL)
    port.release(Deadline.after(30))
    assert manager.count_leased_ports() == before
