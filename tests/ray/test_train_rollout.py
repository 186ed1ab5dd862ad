"""Training and rollout on one placement group: the modes, engines on what they really have, and their bad days."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engine_parts import spec_here
from foreign import foreign
from rl_workers import LateEngine, SquattedEngine, TellingEngine, Trainer
from roost import (
    AcceleratorsTaken,
    CallTimedOut,
    Cluster,
    ClusterError,
    ConfigError,
    LaunchTimedOut,
    PlacementError,
    WorkerDied,
)
from roost.rl import (
    InfoActor,
    RayTrainGroup,
    RolloutManager,
    create_placement_groups,
    create_rollout_engines,
    make_flags_plan,
    sort_key,
)
from roost.rl.json_request import ask
from roost.testing import LocalCluster, LocalNode, NumpyEngine, local_cluster
from waiting import is_gone, wait_until


def flags(**given: object) -> argparse.Namespace:
    """Parsed arguments, with something in them that is the job's own."""
    return argparse.Namespace(**{"actor_num_nodes": 1, "learning_rate": 0.1, **given})


@pytest.mark.parametrize(
    ("given", "count", "offset"),
    [
        ({"actor_num_gpus_per_node": 4, "debug_train_only": True}, 4, 0),
        ({"rollout_num_gpus": 6, "debug_rollout_only": True}, 6, 0),
        ({"actor_num_gpus_per_node": 4, "actor_num_nodes": 2, "colocate": True}, 8, 0),
        ({"actor_num_gpus_per_node": 4, "rollout_num_gpus": 6, "rollout_num_gpus_per_engine": 2}, 10, 4),
        ({"actor_num_gpus_per_node": 2, "rollout_num_gpus": 4, "colocate": True}, 4, 0),
        ({"actor_num_gpus_per_node": 4, "rollout_num_gpus": 4, "rollout_external": True}, 4, 4),
    ],
    ids=["debug_train_only", "debug_rollout_only", "colocate", "dis-agg", "more rollout", "external"],
)
def test_the_modes_of_the_documents(free_cluster, given, count, offset):
    args = flags(**given)
    with create_placement_groups(args) as groups:
        (group, indices), (same, rollout) = groups["actor"], groups["rollout"]
        assert group == same
        assert group.bundle_specs == [{"GPU": 1, "CPU": 1}] * count or "node:" in str(group.bundle_specs)
        assert sorted(indices) == list(range(count))
        assert rollout == indices[offset:]
        # Measured the documents' way: one actor in each bundle, in order.
        probes = [
            InfoActor.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            ).remote()
            for index in indices[:: max(1, count // 3)]
        ]
        found = [(place, *ray.get(probe.get_ip_and_gpu_id.remote(), timeout=60)) for place, probe in enumerate(probes)]
        assert found == sorted(found, key=sort_key), "the order is that of the documents"
        for probe in probes:
            ray.kill(probe)
        plan = make_flags_plan(args, free_cluster.topology)
        planned = sorted({(piece.node_rank, piece.local_rank) for piece in plan.occupants()})
        assert groups.reservation.accelerators == planned, "the same as the plan of the flags"


def test_more_than_the_cluster_has_and_shares_above_one_are_refused_immediately(free_cluster):
    with pytest.raises(ConfigError, match=r"ask for 16 accelerators .*, and the cluster has 12"):
        create_placement_groups(flags(actor_num_nodes=2, actor_num_gpus_per_node=8, colocate=True))
    with pytest.raises(ConfigError, match=r"num_gpus_per_actor 0.9 and num_gpus_per_engine 0.2 add up to 1.1"):
        create_placement_groups(flags(actor_num_gpus_per_node=4, colocate=True, num_gpus_per_actor=0.9))
    args = flags(actor_num_gpus_per_node=1, colocate=True)
    with (
        create_placement_groups(args) as groups,
        RayTrainGroup(args, Trainer, groups["actor"]),
        pytest.raises(PlacementError, match=r"add up to 1.3: actor 0.8 and rollout 0.5"),
    ):
        create_rollout_engines(args, NumpyEngine, groups["rollout"], num_gpus_per_engine=0.5)
    assert free_cluster.node_manager.get_slots() == []


def test_a_foreign_job_on_a_node_leaves_the_rest_in_order(free_cluster):
    other = foreign(free_cluster, 0)
    assert ray.get(other.devices.remote(), timeout=60) == [0]
    args = flags(actor_num_gpus_per_node=2, rollout_num_gpus=4, rollout_num_gpus_per_engine=2)
    try:
        with create_placement_groups(args) as groups:
            found = groups.reservation.accelerators
            assert (0, 0) not in found
            assert found == sorted(found)
            with create_rollout_engines(
                args, TellingEngine, groups["rollout"], engine_kwargs={"features": 3}
            ) as engines:
                check_measured(free_cluster, engines)
        with pytest.raises(AcceleratorsTaken, match=r"12 accelerators could not be reserved in \d+ s, 11 are free"):
            create_placement_groups(flags(actor_num_gpus_per_node=12, debug_train_only=True), timeout=0)
    finally:
        ray.kill(other)


def check_measured(cluster, engines) -> None:
    """Each process finds on its node what its spec says."""
    ports = set()
    for spec, told in zip(engines.specs, engines.group.generate("tell").wait(60), strict=True):
        node = cluster.nodes[spec.cluster_node_rank]
        assert told["node_id"] == node.ray_id
        assert told["visible"] == ",".join(spec.devices)
        assert told["spec"].address == spec.address == node.address
        first = next(s for s in engines.specs if s.engine_rank == spec.engine_rank and s.node_rank == 0)
        assert spec.dist_init_addr == first.dist_init_addr
        assert spec.dist_init_addr.startswith(first.address), "node 0's own address"
        own = [spec.port, spec.nccl_port, *spec.dp_attention_ports]
        if spec.node_rank == 0:
            own.insert(2, int(spec.dist_init_addr.rpartition(":")[2]))
        assert own == list(range(own[0], own[0] + len(own))), "in a row"
        assert not ports & set(own), "no other process has them"
        ports |= set(own)


@pytest.mark.parametrize(
    ("given", "layout"),
    [
        # A split that is not on a node's edge, nodes with 4 accelerators: a two-node engine next to a one-node one.
        ({"actor_num_gpus_per_node": 2, "rollout_num_gpus": 6, "rollout_num_gpus_per_engine": 3},
         [(0, 0, 0, ("2", "3")), (0, 1, 1, ("0",)), (1, 0, 1, ("1", "2", "3"))]),
        # An engine that is larger than a node has a worker on each of its nodes.
        ({"rollout_num_gpus": 12, "rollout_num_gpus_per_engine": 12, "debug_rollout_only": True},
         [(0, 0, 0, ("0", "1", "2", "3")), (0, 1, 1, ("0", "1", "2", "3")), (0, 2, 2, ("0", "1", "2", "3"))]),
    ],
    ids=["off the edge", "three nodes"],
)  # fmt: skip
def test_engines_are_on_their_own_slots_as_measured(free_cluster, given, layout):
    args = flags(**given, dp_attention_size=2)
    with (
        create_placement_groups(args) as groups,
        create_rollout_engines(args, TellingEngine, groups["rollout"]) as engines,
    ):
        found = [(s.engine_rank, s.node_rank, s.cluster_node_rank, s.devices) for s in engines.specs]
        assert found == layout
        check_measured(free_cluster, engines)
        assert engines.health() == [True] * engines.num_engines
        plan = make_flags_plan(args, free_cluster.topology)
        assert [p.visible_accelerators for p in plan.component("rollout").placements] == [
            s.devices for s in engines.specs
        ]
    assert free_cluster.node_manager.get_slots() == []


def test_unequal_nodes_with_as_many_cpus_as_accelerators_run_the_whole_of_it():
    nodes = [LocalNode(accelerators=1, cpus=1), LocalNode(accelerators=3, cpus=3)]
    args = flags(actor_num_gpus_per_node=1, rollout_num_gpus=3, rollout_num_gpus_per_engine=3, dp_attention_size=3)
    # Every CPU is in a bundle: manager, lock and router start all the same.
    with (
        local_cluster(nodes),
        Cluster(num_nodes=2) as cluster,
        create_placement_groups(args) as groups,
        RayTrainGroup(args, Trainer, groups["actor"]) as train,
        RolloutManager(args, TellingEngine, groups["rollout"]) as manager,
    ):
        assert train.world_size == 1
        assert manager.engines.specs[0].devices == ("0", "1", "2")
        check_measured(cluster, manager.engines)
        with manager.lock():
            assert manager.lock_holder().startswith("driver ")
        assert manager.generate({"observations": [[0.0] * 4]})["version"] == 0


def take_and_give(manager: RolloutManager) -> None:
    with manager.lock(timeout=120):
        pass


@pytest.mark.usefixtures("free_cluster")
def test_train_and_rollout_share_accelerators_buffer_and_lock():
    args = flags(actor_num_gpus_per_node=2, colocate=True)
    with create_placement_groups(args) as groups, RayTrainGroup(args, Trainer, groups["actor"], restarts=1) as train:
        assert len(train._actor_handlers) == len(train) == 2
        told = train.init("x").wait(60)
        assert [item["rank"] for item in told] == [0, 1]
        assert [item["visible"] for item in told] == ["0", "1"]
        assert [item["gpu_ids"] for item in told] == [["0"], ["1"]], "Ray says so too"
        assert len({item["master"] for item in told}) == 1, "all know where rank 0 listens"
        with RolloutManager(args, NumpyEngine, groups["rollout"], buffer_size=8) as manager:
            for method in ("train", "eval", "save", "update", "offload", "onload"):
                assert getattr(train, method)().wait(60) == [f"{method} 0", f"{method} 1"]
            manager.put([1, 2, 3, 4], version=0)
            with pytest.raises(CallTimedOut):
                manager.put(list(range(6)), version=1, timeout=0.2)
            assert sorted(train.group.take(manager, 2).wait(60)) == [[1, 2], [3, 4]], "a manager can be sent to workers"
            assert manager.buffer_stats().taken == 4
            manager.update_weights({"w": [[0.0, 9.0]] * 4, "b": [0.0, 0.0]}, version=3)
            assert manager.generate({"observations": [[1.0] * 4] * 3}) | {"logprobs": []} == {
                "actions": [1, 1, 1], "logprobs": [], "version": 3, "engine": manager.generate(
                    {"observations": [[1.0] * 4]})["engine"] ^ 1}  # fmt: skip
            with pytest.raises(ClusterError, match="answered 400"):
                manager.generate({"nonsense": 1})
            # A rank takes the lock and dies with it.
            with pytest.raises(WorkerDied):
                train.group[1].die_with_lock(manager).wait(60)
            wait_until(lambda: train.group.alive == [0, 1], "it is started again, under the same name")
            with manager.lock(timeout=30):
                assert manager.lock_holder().startswith("driver ")
                manager.update_weights({"w": [[0.0, 9.0]] * 4, "b": [0.0, 0.0]}, version=4)
                assert manager.lock_holder().startswith("driver "), "its holder can take it again"
                with pytest.raises(CallTimedOut, match=r"driver .* for "):
                    train.group[0].try_lock(manager, 0.3).wait(60)
            assert train.group[0].try_lock(manager, 30).wait(60) == ["actor:0"]
            # Many together: those that wait do not block the one that gives it back.
            with ThreadPoolExecutor(300) as threads:
                assert len(list(threads.map(lambda _: take_and_give(manager), range(300)))) == 300


@pytest.mark.usefixtures("free_cluster")
def test_a_router_alone_serves_engines_that_run_elsewhere():
    args = flags(rollout_num_gpus=0, debug_rollout_only=True, actor_num_nodes=0, actor_num_gpus_per_node=0)
    elsewhere = NumpyEngine()
    spec = spec_here("the engine's own")
    elsewhere.start(spec)
    with contextlib.ExitStack() as stack, create_placement_groups(args) as groups:
        stack.callback(elsewhere.stop)
        assert groups == {"actor": (None, []), "rollout": (None, [])}
        with RolloutManager(args, NumpyEngine, groups["rollout"]) as manager:
            assert (manager.engines.num_engines, manager.engine_states(), manager.engine_versions()) == (0, [], [])
            with pytest.raises(ClusterError, match="no engine has joined"):
                manager.generate({"observations": [[1.0] * 4]}, timeout=0.2)
            joining = {"url": spec.url, "secret": spec.secret}
            ask(manager.router_url, "/engines", joining, secret=manager.secret, timeout=60, who="the router")
            assert manager.generate({"observations": [[1.0] * 4]}, timeout=60)["engine"] == 0
            manager.update_weights({"w": 1}, version=1)
            manager.put([1], version=1)
            assert manager.get(1) == [1]
            with pytest.raises(ClusterError, match="there are no engines: the flags ask for no accelerators"):
                manager.engines.offload()
            with pytest.raises(ClusterError, match="there are no engines"):
                manager.restart_engine(0)


@pytest.mark.usefixtures("free_cluster")
def test_a_critic_trains_on_the_accelerators_of_the_actor():
    args = flags(actor_num_gpus_per_node=2, rollout_num_gpus=2, colocate=True, use_critic=True)
    with (
        create_placement_groups(args) as groups,
        RayTrainGroup(args, Trainer, groups["actor"]) as actor,
        RayTrainGroup(args, Trainer, groups["critic"], name="critic") as critic,
        create_rollout_engines(args, NumpyEngine, groups["rollout"]) as engines,
    ):
        assert groups["critic"] == groups["actor"]
        assert critic.train().wait(60) == actor.train().wait(60) == ["train 0", "train 1"]
        placed = [[place.visible_accelerators for place in one.group.placements] for one in (actor, critic, engines)]
        assert placed[0] == placed[1] == placed[2]


def test_an_engine_that_dies_while_serving_loses_no_request(free_cluster):
    args = flags(rollout_num_gpus=2, debug_rollout_only=True)
    with (
        create_placement_groups(args) as groups,
        RolloutManager(args, TellingEngine, groups["rollout"], engine_kwargs={"slow": 0.05}) as manager,
    ):
        pid = manager.engines.group[0].generate("tell").wait(60)[0]["pid"]
        with ThreadPoolExecutor(8) as threads:
            calls = [threads.submit(manager.generate, {"observations": [[1.0] * 4]}) for _ in range(40)]
            wait_until(lambda: manager.engine_states()[0].served > 1, "engine 0 serves")
            os.kill(pid, signal.SIGKILL)
            answers = [call.result(timeout=60) for call in calls]
        assert len(answers) == 40
        assert {answer["engine"] for answer in answers} == {0, 1}
        state = manager.engine_states()[0]
        assert not state.healthy
        assert state.why
        assert manager.engines.health() == [False, True]
        assert manager.generate({"observations": [[1.0] * 4]})["engine"] == 1
        leased = free_cluster.node_manager.count_leased_ports()
        manager.restart_engine(0, weights={"w": [[0.0, 9.0]] * 4, "b": [0.0, 0.0]}, version=7)
        assert manager.engines.health() == [True, True]
        assert all(item.healthy for item in manager.engine_states()), "the router sends to it again"
        answers = [manager.generate({"observations": [[1.0] * 4]}) for _ in range(4)]
        assert {(answer["engine"], answer["version"]) for answer in answers} == {(0, 7), (1, 0)}
        manager.restart_engine(1)
        assert free_cluster.node_manager.count_leased_ports() <= leased + 4, (
            "the ports of an engine that lives went back"
        )


def test_an_engine_that_does_not_become_healthy_is_named_with_its_log(free_cluster):
    args = flags(rollout_num_gpus=2, debug_rollout_only=True)
    leased = free_cluster.node_manager.count_leased_ports()
    with create_placement_groups(args) as groups:
        with pytest.raises(LaunchTimedOut) as caught:
            create_rollout_engines(args, LateEngine, groups["rollout"], health_timeout=1)
        text = str(caught.value)
        assert "1 process of the engines did not become healthy in 1 s" in text
        assert "engine 1 (rollout:1 on node 0 (" in text
        assert "still loading the model" in text, "the end of its log"
        with pytest.raises(ConfigError, match="dict is not a rollout engine: it has no start, health, generate"):
            create_rollout_engines(args, dict, groups["rollout"])
    wait_until(lambda: free_cluster.node_manager.count_leased_ports() <= leased, "the ports went back")


@pytest.mark.usefixtures("free_cluster")
def test_a_port_that_another_program_takes_between_lease_and_use_is_replaced(tmp_path):
    args = flags(rollout_num_gpus=2, debug_rollout_only=True)
    with create_placement_groups(args) as groups:
        with create_rollout_engines(args, SquattedEngine, groups["rollout"], engine_args=(str(tmp_path),)) as engines:
            stolen = {int(path.name.removeprefix("stolen-")) for path in tmp_path.glob("stolen-*")}
            assert len(stolen) == 1
            assert not stolen & {spec.port for spec in engines.specs}
            assert engines.health() == [True, True]
            assert engines.generate({"observations": [[1.0] * 4]}, 0).wait(60)[0]["engine"] == 0
        for path in tmp_path.glob("pid-*"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.name.removeprefix("pid-")), signal.SIGKILL)


@pytest.mark.usefixtures("free_cluster")
def test_rank_0_that_dies_before_it_reports_its_address_is_named(roost_local_cluster: LocalCluster):
    args = flags(actor_num_nodes=2, actor_num_gpus_per_node=2, debug_train_only=True)
    # A worker that was forked need not descend from the raylet of its own node.
    keeper = psutil.Process(roost_local_cluster.keeper_pid)
    before: set[int] = set()
    stopped = threading.Event()
    killed: list[int] = []

    def kill_new_ones() -> None:
        while not stopped.wait(0.005):
            for process in keeper.children(recursive=True):
                if process.pid not in before and not is_gone(process.pid):
                    killed.append(process.pid)
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()

    with create_placement_groups(args) as groups:
        for process in keeper.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                # Ray may use one that is idle.
                if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::IDLE"):
                    process.kill()
                else:
                    before.add(process.pid)
        killer = threading.Thread(target=kill_new_ones)
        killer.start()
        try:
            with pytest.raises((WorkerDied, LaunchTimedOut)) as caught:
                RayTrainGroup(args, Trainer, groups["actor"], timeout=6)
        finally:
            stopped.set()
            killer.join(30)
    assert killed
    assert "actor:0 on node 0" in str(caught.value)
