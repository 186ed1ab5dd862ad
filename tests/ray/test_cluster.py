"""`Cluster` on a healthy cluster: one per process, what it finds, node groups, attaching."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import sys
import threading
from dataclasses import dataclass
from types import FrameType

import pytest
import ray
from omegaconf import OmegaConf
from ray.util import list_named_actors

from roost import (
    Channel,
    CheckFailed,
    Cluster,
    ClusterError,
    ConfigError,
    NodeManager,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    PlacementError,
    Worker,
    make_plan,
    register_hardware,
)
from waiting import wait_until
from workers import Performer


def test_the_nodes_are_found_in_order_with_what_they_have(shared_cluster, roost_local_cluster):
    nodes = shared_cluster.nodes
    assert [node.rank for node in nodes] == [0, 1, 2, 3]
    assert [node.address.rpartition(".")[2] for node in nodes] == ["1", "2", "3", "4"]
    assert [node.name for node in nodes] == ["local-0", "local-1", "local-2", "local-3"]
    assert [node.is_head for node in nodes] == [True, False, False, False]
    assert [node.num_accelerators for node in nodes] == [4, 4, 4, 0]
    assert {node.ray for node in nodes} == {ray.__version__}
    assert {node.interpreter for node in nodes} == {sys.executable}
    assert len({node.network for node in nodes}) == 1
    assert {item["NodeID"] for item in ray.nodes()} == {node.ray_id for node in nodes}
    assert shared_cluster.address == roost_local_cluster.address


def test_what_the_documents_ask_for_is_there(shared_cluster):
    assert shared_cluster.num_nodes == 4
    assert shared_cluster.num_accelerators == 12
    assert shared_cluster.accelerator_ranks == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), ())
    assert shared_cluster.get_node_ip(2) == shared_cluster.nodes[2].address
    assert shared_cluster.get_node_info(1).num_gpus == 4
    assert shared_cluster.get_node_group("cluster").node_ranks == (0, 1, 2, 3)
    assert shared_cluster.namespace == Cluster.NAMESPACE == "roost"
    proxy = NodeManager.get_proxy()
    assert proxy.get_nodes() == shared_cluster.nodes
    assert proxy.get_num_gpus_per_node() == [4, 4, 4, 0]
    assert proxy.get_master_ip() == shared_cluster.master_address == shared_cluster.nodes[0].address
    assert proxy.get_master_port() == shared_cluster.master_port
    assert proxy.get_topology() == shared_cluster.topology
    with pytest.raises(ConfigError, match="no node 4: the cluster has 0-3"):
        shared_cluster.get_node_info(4)


def test_the_live_topology_is_what_the_planner_takes(shared_cluster):
    job = {
        "cluster": {
            "num_nodes": 4,
            "component_placement": {"actor": "0-7", "env": {"node_group": "node", "placement": "3:0-1"}},
        }
    }
    plan = make_plan(job, shared_cluster)
    assert plan.placement("actor", 5).cluster_node_rank == 1
    assert plan.placement("env", 1).cluster_node_rank == 3
    assert plan.topology.nodes[0].accelerators[0].model == "H100"


@pytest.mark.usefixtures("small_local_cluster")
def test_a_process_has_one_cluster_and_contradictions_raise():
    cluster = Cluster(num_nodes=1)
    assert Cluster() is cluster
    assert Cluster(num_nodes=1) is cluster
    assert Cluster(num_nodes=1, namespace="roost", address=cluster.address) is cluster
    with pytest.raises(ConfigError, match="num_nodes is 1, not 2"):
        Cluster(num_nodes=2)
    with pytest.raises(ConfigError, match="the namespace is 'roost', not 'other'"):
        Cluster(namespace="other")
    with pytest.raises(ConfigError, match="port_range is"):
        Cluster(num_nodes=1, port_range=(1, 9))
    assert Cluster(record=True) is cluster
    with pytest.raises(ConfigError, match="record is True, not False"):
        Cluster(num_nodes=1, record=False)
    with pytest.raises(ConfigError, match="the node groups differ"):
        Cluster(cluster_cfg={"num_nodes": 1, "node_groups": [{"label": "a", "node_ranks": 0}]})
    cluster.close()
    cluster.close()
    assert not ray.is_initialized()
    assert "closed" in repr(cluster)
    assert cluster.namespace == "roost", "what is known stays known"
    for use in (lambda: cluster.lease_ports(0), lambda: cluster.allocate(dict, "x", 0, 0, {})):
        with pytest.raises(ClusterError, match="this Cluster is closed"):
            use()
    assert not ray.is_initialized(), "and nothing starts Ray again"
    with Cluster(num_nodes=1, namespace="mine", record=False) as again:
        assert again is not cluster
        assert Cluster() is Cluster(record=False) is again
        with pytest.raises(ConfigError, match="record is False, not True"):
            Cluster(record=True)
        assert again.namespace == "mine"


@pytest.mark.usefixtures("small_local_cluster")
def test_after_close_the_names_are_free_immediately():
    for _ in range(2):
        with Cluster(num_nodes=1) as cluster:
            assert cluster.namespace == "roost"
            assert sorted(list_named_actors()) == ["CollectiveManager", "NodeManager", "WorkerManager"]


@pytest.mark.usefixtures("roost_local_cluster")
def test_with_fewer_nodes_the_first_are_taken_and_the_others_named(caplog):
    with caplog.at_level(logging.WARNING), Cluster(num_nodes=2) as cluster:
        assert cluster.num_nodes == 2
        assert [node.name for node in cluster.nodes] == ["local-0", "local-1"]
    assert "num_nodes is 2: node 2 (" in caplog.text
    assert "local-3) are not used" in caplog.text


@pytest.mark.usefixtures("roost_local_cluster")
def test_the_section_of_a_config_gives_nodes_and_groups():
    variables = [{"node_ranks": "0-1", "env_vars": {"A": "1"}}]
    arms = {"type": "Arm", "configs": [{"node_rank": 2, "ip": "x"}]}
    config = OmegaConf.create(
        {
            "size": 3,
            "cluster": {
                "num_nodes": "${size}",
                "component_placement": {"actor": {"node_group": "train", "placement": "0-7"}},
                "node_groups": [
                    {"label": "train", "node_ranks": "0-1", "env_configs": variables},
                    {"label": "bare", "node_ranks": 2, "ignore_hardware": True},
                    {"label": "arms", "node_ranks": 2, "hardware": arms},
                ],
            },
        }
    )
    with Cluster(cluster_cfg=config.cluster) as cluster:
        assert cluster.num_nodes == 3
        assert cluster.get_node_group("train").node_ranks == (0, 1)
        assert cluster.topology.space("bare").is_bare
        assert cluster.topology.space("arms").count == 1
        assert [item.settings for item in cluster.get_node_info(2).hardware] == [{"ip": "x"}]
        assert make_plan(config, cluster).environment("actor", 0)["A"] == "1"
        with pytest.raises(PlacementError, match="no node group 'trian'"):
            cluster.get_node_group("trian")


@pytest.mark.usefixtures("roost_local_cluster")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_nodes": 0}, "num_nodes is 0"),
        ({"num_nodes": True}, "num_nodes is True"),
        ({"num_nodes": 2, "cluster_cfg": {"num_nodes": 3}}, "cluster_cfg says 3"),
        ({"cluster_cfg": {"num_node": 3}}, "num_nodes"),
        ({"cluster_cfg": {"cluster": {"num_nodes": 3}}}, "the whole config"),
        ({"num_nodes": 2, "timeout": 0}, "timeout is 0"),
        ({"num_nodes": 2, "port_range": (5, 4)}, "port_range"),
        ({"num_nodes": 2, "address": "ray://10.0.0.1:10001"}, "Ray client"),
        ({"num_nodes": 2, "address": "10.0.0.1"}, "host:port"),
        ({"cluster_cfg": {"node_groups": [{"label": "a", "node_ranks": 9}]}}, "node rank 9"),
    ],
)
def test_a_mistake_in_the_arguments_raises_and_nothing_stays_open(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Cluster(**arguments)
    assert not ray.is_initialized()


def test_an_address_where_nothing_answers_raises_with_that_address():
    with pytest.raises(ClusterError, match=r"nothing answers at 127\.0\.0\.1:9"):
        Cluster(num_nodes=1, address="127.0.0.1:9")


@pytest.mark.usefixtures("small_local_cluster")
def test_a_process_that_called_ray_init_itself_keeps_its_connection():
    ray.init(log_to_driver=False, namespace="theirs")
    theirs = ray.shutdown
    try:
        with pytest.raises(ClusterError, match="initialised already") as caught:
            Cluster()
        assert "num_nodes uses the connection that is there" in str(caught.value)
        for wrong in ({"address": "127.0.0.1:9"}, {"namespace": "ours"}, {"working_dir": "."}):
            with pytest.raises(ConfigError, match=f"this process called ray.init, and {next(iter(wrong))} is"):
                Cluster(num_nodes=1, **wrong)
        with Cluster(num_nodes=1) as cluster:
            assert cluster.namespace == "theirs"
            with Performer.create_group().launch(cluster, PackedPlacementStrategy(0, 0)) as group:
                assert group.who().wait(60)[0]["cluster_nodes"] == 1, "workers find the job"
        assert ray.is_initialized(), "the connection that other code made stays"
        again = Cluster(num_nodes=1)
        again.context.at_close.append(lambda: 1 / 0)
        with contextlib.suppress(ZeroDivisionError):
            ray.shutdown()
        assert not ray.is_initialized(), "also if the Cluster cannot be closed in order"
        assert not again.is_open, "it was closed before Ray"
        assert ray.shutdown is theirs
    finally:
        ray.shutdown()


@ray.remote(num_cpus=0)
class Runner:
    """An actor of a program that does not use Roost, which makes a Cluster of its own."""

    def run(self) -> list[int]:
        with (
            Cluster(num_nodes=1, quiet=True) as cluster,
            Performer.create_group().launch(cluster, PackedPlacementStrategy(0, 0)) as group,
        ):
            return group.rank_of().wait(60)


@pytest.mark.usefixtures("small_local_cluster")
def test_an_actor_of_a_program_without_roost_opens_a_job():
    ray.init(log_to_driver=False)
    try:
        runner = Runner.remote()
        assert [ray.get(runner.run.remote(), timeout=60) for _ in range(2)] == [[0], [0]]
        ray.kill(runner)
    finally:
        ray.shutdown()


@pytest.mark.usefixtures("small_local_cluster")
def test_an_old_ray_is_refused_with_both_versions(monkeypatch):
    monkeypatch.setattr(ray, "__version__", "2.54.1")
    with pytest.raises(ClusterError, match=r"Ray 2\.54\.1, and Roost needs Ray 2\.55\.0"):
        Cluster(num_nodes=1)
    assert not ray.is_initialized()


@pytest.mark.usefixtures("roost_local_cluster")
def test_an_interpreter_must_be_on_its_node_and_have_ray(tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'No module named ray' >&2; exit 1\n")
    plain = tmp_path / "notes.txt"
    plain.write_text("")
    broken.chmod(0o755)

    def group(label: str, rank: int, path: object) -> dict[str, object]:
        environment = {"node_ranks": rank, "python_interpreter_path": str(path)}
        return {"label": label, "node_ranks": rank, "env_configs": [environment]}

    paths = {"a": "/opt/nowhere/python", "b": broken, "c": plain, "d": sys.executable}
    groups = [group(label, rank, path) for rank, (label, path) in enumerate(paths.items())]
    with pytest.raises(CheckFailed) as caught:
        Cluster(cluster_cfg={"num_nodes": 4, "node_groups": groups})
    first, second, third = caught.value.problems
    assert "node group 'a' wants /opt/nowhere/python on node 0 (" in first.message
    assert "there is no such file" in first.message
    assert "node group 'b'" in second.message
    assert "No module named ray" in second.message
    assert "it cannot be executed" in third.message
    assert not ray.is_initialized()
    with Cluster(cluster_cfg={"num_nodes": 4, "node_groups": groups[3:]}) as cluster:
        assert cluster.get_node_group("d").node_ranks == (3,)


def robots(*configs: dict[str, object]) -> dict[str, object]:
    hardware = {"type": "TestArm", "configs": list(configs)}
    return {"num_nodes": 4, "node_groups": [{"label": "arms", "node_ranks": "2-3", "hardware": hardware}]}


@pytest.mark.usefixtures("roost_local_cluster")
def test_a_custom_kind_is_checked_on_its_own_node(tmp_path):
    @register_hardware("TestArm")
    @dataclass(frozen=True)
    class TestArm:
        node_rank: int
        path: str
        speed: float = 1.0

        def check(self) -> None:
            if self.speed > 5:
                raise ConnectionError(f"no arm moves at {self.speed}")
            with open(self.path, "a") as out:
                print(self.node_rank, ray.util.get_node_ip_address(), file=out)

    seen = tmp_path / "seen"
    fine = {"node_rank": 3, "path": str(seen), "speed": 2}
    with Cluster(cluster_cfg=robots(fine, fine, {"node_rank": 2, "path": str(seen)})) as cluster:
        addresses = {rank: cluster.get_node_ip(rank) for rank in (2, 3)}
    lines = sorted(seen.read_text().splitlines())
    assert lines == sorted([f"3 {addresses[3]}", f"3 {addresses[3]}", f"2 {addresses[2]}"])

    with pytest.raises(CheckFailed) as caught:
        Cluster(cluster_cfg=robots(fine, {"node_rank": 2, "path": "x", "speed": 9}))
    assert "hardware 'TestArm' on node 2 (" in str(caught.value)
    assert "ConnectionError: no arm moves at 9.0" in str(caught.value)
    assert "path='x'" in str(caught.value)
    assert "speed=9" in str(caught.value)

    with pytest.raises(ConfigError) as wrong:
        Cluster(cluster_cfg=robots({"node_rank": 3, "speed": "fast", "pth": "x"}))
    assert "did you mean 'path'?" in str(wrong.value)
    assert "'TestArm' lacks the setting 'path'" in str(wrong.value)
    assert "speed" in str(wrong.value)
    assert not ray.is_initialized()


@pytest.mark.usefixtures("small_local_cluster")
def test_inspecting_the_class_does_not_connect():
    assert callable(Cluster.allocate)
    assert dict(inspect.getmembers(Cluster))["allocate"].__doc__.startswith("Start an actor")
    assert not ray.is_initialized()


@pytest.mark.usefixtures("small_local_cluster")
def test_a_ray_shutdown_by_other_code_does_no_harm():
    cluster = Cluster(num_nodes=1)
    ray.shutdown()
    watch = cluster.context.watch
    wait_until(lambda: not watch._thread.is_alive(), "the watch has ended, and connects to nothing")
    assert not ray.is_initialized()
    cluster.close()
    with Cluster(num_nodes=1) as again:
        assert again.num_nodes == 1


class Visitor:
    """A worker that attaches."""

    def call_as_the_driver(self, **arguments: object) -> bool:
        return Cluster(**arguments) is Cluster()

    def visit(self) -> tuple[object, ...]:
        cluster = Cluster()
        assert Cluster(num_nodes=cluster.num_nodes) is cluster
        return cluster.namespace, cluster.topology, cluster.master_port, cluster.nodes

    def contradict(self) -> str:
        try:
            Cluster(num_nodes=99)
        except ConfigError as error:
            return str(error)
        return ""

    def close(self) -> str:
        Cluster().close()
        return Cluster().namespace


def test_a_worker_attaches_and_sees_the_same(shared_cluster):
    worker = shared_cluster.allocate(Visitor, "visitor", 2, 1, {})
    seen = ray.get(worker.visit.remote(), timeout=60)
    expected = (shared_cluster.namespace, shared_cluster.topology, shared_cluster.master_port, shared_cluster.nodes)
    assert seen == expected
    assert "num_nodes is 4, not 99" in ray.get(worker.contradict.remote(), timeout=60)
    same = {"num_nodes": 4, "address": shared_cluster.address, "namespace": "roost"}
    assert ray.get(worker.call_as_the_driver.remote(**same), timeout=60)
    assert ray.get(worker.close.remote(), timeout=60) == "roost", "a worker that lets go takes nothing away"
    assert NodeManager.get_proxy().get_nodes() == shared_cluster.nodes


class Talker(Worker):
    """A worker that puts something into a channel."""

    def count_modules(self) -> int:
        """Return how many modules of Roost run code at the first put."""
        ran = set()

        def note(frame: FrameType, event: str, _argument: object) -> None:
            if event == "call" and (name := frame.f_globals.get("__name__", "")).startswith("roost."):
                ran.add(name)

        threading.setprofile(note)
        sys.setprofile(note)
        try:
            self.connect_channel("talk").put(1)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        assert "roost.comm.channels.channel" in ran
        assert Cluster._current is None, "no Cluster is made for it"
        return len(ran)

    def put_after_a_mistake(self) -> str:
        with pytest.raises(ConfigError, match="num_nodes is 4, not 99"):
            Cluster(num_nodes=99)
        self.connect_channel("talk").put(2)
        same = Cluster()
        self.connect_channel("talk").put(3)
        return same.namespace


def test_a_worker_that_talks_needs_no_cluster_and_a_mistake_does_not_silence_it(shared_cluster):
    channel = Channel.create("talk")
    with Talker.create_group().launch(shared_cluster, NodePlacementStrategy([1]), name="talker") as talker:
        assert talker.count_modules().one(60) <= 40
        assert talker.put_after_a_mistake().one(60) == shared_cluster.namespace
    assert [channel.get(timeout=30) for _ in range(3)] == [1, 2, 3]
    channel.close()


@pytest.mark.usefixtures("small_local_cluster")
def test_a_task_attaches_too():
    with Cluster(num_nodes=1, namespace="tasks"):

        @ray.remote(num_cpus=0)
        def look() -> str:
            return Cluster().namespace

        assert ray.get(look.remote(), timeout=60) == "tasks"


@pytest.mark.usefixtures("small_local_cluster")
def test_with_no_job_there_is_nothing_to_attach_to():
    with pytest.raises(ClusterError, match="no job to attach to"):
        Cluster()
    with pytest.raises(ClusterError, match="no job in namespace 'roost-7'"):
        Cluster(namespace="roost-7")
    assert not ray.is_initialized()


def test_a_fork_does_not_take_the_parents_cluster(shared_cluster):
    child = os.fork()
    if child == 0:
        # Nothing of pytest may run in the child.
        os._exit(0 if Cluster._current is shared_cluster and shared_cluster._pid != os.getpid() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert NodeManager.get_proxy().get_nodes()
