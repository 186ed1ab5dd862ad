"""Accelerators that are really reserved: exactly those of the plan, out of the reach of all else on the same Ray."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roost import (
    AcceleratorsTaken,
    Cluster,
    ClusterError,
    FlexiblePlacementStrategy,
    PlacementError,
    Plan,
    ReservationLost,
    make_plan,
)
from roost.placement.plan import Piece
from roost.runtime.bundles import Pin
from roost.runtime.holdings import find_holdings
from roost.runtime.reservation import Reservation
from roost.runtime.reserve import Reserver
from roost.runtime.versions import has_bundle_labels
from roost.testing import LocalNode, local_cluster
from waiting import wait_until
from workers import Performer, Waiter


@ray.remote(num_cpus=0)
class Foreign:
    """Somebody else's actor, which takes accelerators as Ray gives them."""

    def devices(self) -> list[int]:
        return [int(device) for device in ray.get_gpu_ids()]


def foreign(cluster: Cluster, node_rank: int, amount: float = 1, name: str | None = None) -> ray.actor.ActorHandle:
    strategy = NodeAffinitySchedulingStrategy(cluster.nodes[node_rank].ray_id, soft=False)
    return Foreign.options(num_gpus=amount, name=name, scheduling_strategy=strategy).remote()


def plan_of(cluster: Cluster, **placements: str) -> Plan:
    config = {"cluster": {"num_nodes": cluster.num_nodes, "component_placement": placements}}
    return make_plan(config, cluster)


def free_devices(cluster: Cluster, node_rank: int, count: int) -> set[int]:
    """What is left for others on a node, once Ray's head counts as much, found out by taking all of it."""
    wait_until(lambda: find_holdings(cluster.nodes).free[node_rank] == count, "Ray's head knows what is free")
    if not count:
        return set()
    actor = foreign(cluster, node_rank, count)
    found = set(ray.get(actor.devices.remote(), timeout=60))
    ray.kill(actor)
    return found


def all_is_free(cluster: Cluster) -> bool:
    holdings = find_holdings(cluster.nodes)
    return not holdings.by_piece and not holdings.somewhere


@pytest.fixture
def quiet(shared_cluster: Cluster) -> Iterable[Cluster]:
    """The shared cluster with nothing taken, before and after."""
    wait_until(lambda: all_is_free(shared_cluster), "everything is free before the test")
    yield shared_cluster
    wait_until(lambda: all_is_free(shared_cluster), "everything was given back")


@pytest.mark.parametrize(
    "placements",
    [
        {"actor": "0-11"},
        {"actor": "0-3", "rollout": "0-3"},
        {"actor": "1,3", "rollout": "6-7:0,10:1"},
        {"actor": "0-1", "rollout": "5-6"},
    ],
    ids=["all", "colocated", "some in the middle", "first ones and others"],
)
def test_exactly_the_accelerators_of_the_plan_are_taken_and_no_more(quiet, placements):
    plan = plan_of(quiet, **placements)
    wanted = {(piece.node_rank, piece.local_rank) for piece in plan.occupants()}
    with quiet.reserve(plan) as held:
        assert set(held.accelerators) == wanted
        assert len(held) == len(wanted), "what is shared is reserved once"
        for slot in held.slots:
            assert slot.device == str(slot.piece.local_rank)
            assert slot.ray_id == quiet.nodes[slot.piece.node_rank].ray_id
        mine = {(piece.node_rank, piece.local_rank) for piece in find_holdings(quiet.nodes).by_piece}
        assert mine == wanted
        node_rank = 1
        left = {local for local in range(4) if (node_rank, local) not in wanted}
        assert free_devices(quiet, node_rank, len(left)) == left, "others get what is left"
    assert quiet.node_manager.get_slots() == []


def test_a_node_that_others_use_in_part_gives_exactly_what_was_planned(quiet):
    other = foreign(quiet, 0)
    assert ray.get(other.devices.remote(), timeout=60) == [0]
    with (
        Performer.create_group().launch(quiet, FlexiblePlacementStrategy([[1], [2, 3]]), name="exact") as group,
    ):
        assert group.environment().wait(60)[1]["CUDA_VISIBLE_DEVICES"] == "2,3"
        assert [(held.slot.piece.node_rank, held.slot.piece.local_rank) for held in quiet.node_manager.get_slots()] == [
            (0, 1),
            (0, 2),
            (0, 3),
        ]
        assert free_devices(quiet, 0, 0) == set()
    ray.kill(other)


@pytest.mark.parametrize("amount", [1, 0.5], ids=["wholly", "in part"])
def test_what_a_foreign_actor_holds_is_named_with_who_holds_it_and_what_would_fit(quiet, amount):
    other = foreign(quiet, 0, amount, name="their-trainer")
    ray.get(other.devices.remote(), timeout=60)
    plan = plan_of(quiet, actor="0-1", rollout="0-1:0")
    with pytest.raises(AcceleratorsTaken) as caught:
        quiet.reserve(plan, timeout=0)
    text = str(caught.value)
    part = "" if amount == 1 else "0.5 of it "
    assert re.search(
        rf"accelerator 0 of node 0 \(.*\), {part}held by actor 'their-trainer' \(Foreign, pid \d+\) "
        r"of Ray job \w+ \(pid \d+ on",
        text,
    ), text
    assert "accelerator 1 of" not in text, "only what is missing"
    fit = re.search(r"this would fit now: actor: (\S+), rollout: (\S+)$", text)
    assert fit, text
    with quiet.reserve(plan_of(quiet, actor=fit[1], rollout=fit[2])) as held:
        assert held.accelerators == [(0, 1), (0, 2)]
    wait_until(lambda: not find_holdings(quiet.nodes).of(Piece(0, "accelerator", 1)), "nothing is kept of it")
    ray.kill(other)


def test_what_is_given_back_while_one_waits_is_taken(quiet, capsys):
    other = foreign(quiet, 1)
    assert ray.get(other.devices.remote(), timeout=60) == [0]

    def give_back() -> None:
        wait_until(
            lambda: "waiting for accelerator 0 of node 1" in capsys.readouterr().err, "it says what it waits for"
        )
        ray.kill(other)

    helper = threading.Thread(target=give_back)
    helper.start()
    with quiet.reserve(plan_of(quiet, actor="4"), timeout=60) as held:
        assert held.accelerators == [(1, 0)]
    helper.join(60)


def test_without_reserve_ray_is_told_nothing(quiet):
    with Performer.create_group().launch(quiet, FlexiblePlacementStrategy([[0]]), name="loose", reserve=False) as group:
        assert group.environment().wait(60)[0]["CUDA_VISIBLE_DEVICES"] == "0"
        assert all_is_free(quiet)
        assert free_devices(quiet, 0, 4) == {0, 1, 2, 3}


def test_groups_share_one_reservation_with_declared_shares_that_add_up(quiet):
    strategy = FlexiblePlacementStrategy([[0], [1]])
    with Performer.create_group().launch(quiet, strategy, name="train", share=0.7) as train:
        with Performer.create_group().launch(quiet, strategy, name="serve", share=0.3):
            held = quiet.node_manager.get_slots()
            assert [sorted((user.partition("#")[0], share) for user, share in item.users) for item in held] == [
                [("serve", 0.3), ("train", 0.7)]
            ] * 2
            with pytest.raises(PlacementError) as caught:
                Performer.create_group().launch(quiet, strategy, name="third", share=0.1)
            assert "the shares of accelerator 0 of node 0 add up to 1.1: train 0.7, serve 0.3 and third 0.1" in str(
                caught.value
            )
        assert len(quiet.node_manager.get_slots()) == 2, "what another group uses stays"
        assert train.rank_of().wait(60) == [0, 1]
        # Two workers of one group on one accelerator count twice.
        with pytest.raises(PlacementError, match=r"add up to 1\.2"):
            Performer.create_group().launch(quiet, FlexiblePlacementStrategy([[2], [2]]), name="twice", share=0.6)
    with pytest.raises(PlacementError, match=r"add up to 1\.1: actor 0\.8 and rollout 0\.3"):
        quiet.reserve(plan_of(quiet, actor="0-1", rollout="0-1"), shares={"actor": 0.8, "rollout": 0.3})
    with pytest.raises(PlacementError, match="asks for hardware rank 12"):
        quiet.reserve(plan_of(quiet, actor="0-12"))


def test_tasks_that_a_worker_starts_stay_on_what_is_reserved(quiet):
    with Performer.create_group().launch(quiet, FlexiblePlacementStrategy([[2], [5]]), name="parent") as group:
        found = group.start_child_task().wait(60)
        slots = {held.slot.piece: held.slot for held in quiet.node_manager.get_slots()}
        for (group_id, node_id, devices), piece in zip(
            found, [Piece(0, "accelerator", 2), Piece(1, "accelerator", 1)], strict=True
        ):
            assert group_id == slots[piece].group.id.hex()
            assert node_id == slots[piece].ray_id
            assert devices == [str(piece.local_rank)], "a task that wants an accelerator gets the worker's own"


def test_a_reservation_that_is_removed_while_launching_is_said(quiet, tmp_path):
    def remove() -> None:
        wait_until(lambda: list(tmp_path.glob("pid-*")), "the constructor runs")
        for held in quiet.node_manager.get_slots():
            remove_placement_group(held.slot.group)

    helper = threading.Thread(target=remove)
    helper.start()
    with pytest.raises(ReservationLost) as caught:
        Waiter.create_group(str(tmp_path)).launch(quiet, FlexiblePlacementStrategy([[1]]), name="robbed")
    helper.join(60)
    assert re.search(
        r"robbed:0 cannot be started: accelerator 1 of node 0 \(.*\) is not reserved any more", str(caught.value)
    )
    assert quiet.node_manager.get_slots() == []


def test_when_the_driver_is_killed_its_reservation_goes_away(quiet, driver):
    code = """
import time
from roost import Cluster, make_plan
cluster = Cluster(num_nodes=4)
config = {"cluster": {"num_nodes": 4, "component_placement": {"actor": "0-3"}}}
cluster.reserve(make_plan(config, cluster))
print("reserved", flush=True)
time.sleep(600)
"""
    mine = driver(code)
    assert mine.line() == "reserved"
    with pytest.raises(AcceleratorsTaken) as caught:
        quiet.reserve(plan_of(quiet, actor="0-1"), timeout=0)
    text = str(caught.value)
    assert re.search(rf"accelerator 0 of node 0 \(.*\), reserved by job 'roost-2' \(pid {mine.process.pid} on", text), (
        text
    )
    assert "this would fit now: actor: 4-5:0-1" in text
    mine.end(signal.SIGKILL)
    with quiet.reserve(plan_of(quiet, actor="0-1"), timeout=60) as held:
        assert held.accelerators == [(0, 0), (0, 1)]


def test_status_and_plan_live_show_who_has_what(quiet, tmp_path):
    other = foreign(quiet, 2, 0.5, name="theirs")
    ray.get(other.devices.remote(), timeout=60)
    group = placement_group([{"GPU": 1, f"node:{quiet.nodes[2].address}": 0.001}], name="bare")
    job = tmp_path / "job.yaml"
    job.write_text("cluster: {num_nodes: 4, component_placement: {actor: 0-1, rollout: 8-9}}\n", encoding="utf-8")

    def roost(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "roost", *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
            env=os.environ | {"COLUMNS": "160"},
        )

    try:
        assert group.wait(30)
        with Performer.create_group().launch(quiet, FlexiblePlacementStrategy([[0], [1]]), name="mine"):
            status = roost("status").stdout
            assert re.search(r"0-1    reserved by job 'roost' \(pid \d+ on .*\): mine", status), status
            assert re.search(r"0      0.5 of it held by actor 'theirs' \(Foreign, pid \d+\) of Ray job", status), status
            assert re.search(r"of these 1 held by placement group 'bare' of Ray job", status), status
            answer = json.loads(roost("status", "--format", "json").stdout)
            held = {(i["node_rank"], i["local_rank"]): i["holders"] for i in answer["accelerators"] if i["holders"]}
            assert set(held) == {(0, 0), (0, 1), (2, 0)}
            assert held[0, 0][0]["users"] == ["mine"]
            assert answer["held_somewhere"][0]["amount"] == 1
            shown = roost("plan", str(job), "--live").stdout
            assert "! 3 taken by others" in shown
            assert re.search(r"node 0.* 0 ! +1 ! +2 +3", shown), shown
            assert "this plan would not start now: 3 accelerators of it taken" in shown
            assert re.search(r"0:1  reserved by job 'roost'", shown)
    finally:
        ray.kill(other)
        remove_placement_group(group)
    wait_until(lambda: all_is_free(quiet), "all is free again")
    assert "this plan would start now: its accelerators are free" in roost("plan", str(job), "--live").stdout


@pytest.mark.usefixtures("quiet")
def test_no_accelerator_is_ever_held_by_two_jobs(driver, tmp_path):
    code = """
import random
from roost import AcceleratorsTaken, Cluster, FlexiblePlacementStrategy
from workers import Claimant

def main():
    choose = random.Random({seed})
    cluster = Cluster(num_nodes=4, quiet=True)
    had = 0
    for _ in range({rounds}):
        ranks = sorted(choose.sample(range(3, 9), choose.randint(1, 3)))
        strategy = FlexiblePlacementStrategy([[rank] for rank in ranks])
        try:
            with Claimant.create_group({folder!r}).launch(cluster, strategy, name="claim", timeout=120) as group:
                group.check().wait(60)
                had += 1
        except AcceleratorsTaken:
            pass
    print("had", had, flush=True)
    cluster.close()

main()
"""
    drivers = [driver(code.format(seed=seed, rounds=6, folder=str(tmp_path))) for seed in range(4)]
    outcomes = [item.finish() for item in drivers]
    for said, complaints in outcomes:
        assert re.search(r"^had \d+$", said, re.MULTILINE), complaints
    had = sum(int(re.search(r"had (\d+)", said)[1]) for said, _ in outcomes)
    assert had >= 12, "most of them had their turn"
    claims = list(Path(tmp_path).glob("claims-*"))
    assert not list(Path(tmp_path).glob("clash-*")), "nobody met another one"
    assert claims == [], "and all left"


def test_a_node_that_is_lost_after_reserving_is_said_at_once():
    with local_cluster("1x0,2x2") as local, Cluster(num_nodes=3) as cluster:
        strategy = FlexiblePlacementStrategy([[0], [2]])
        with cluster.reserve(plan_of(cluster, actor="0,2")):
            local.kill_node(1)
            with pytest.raises(ClusterError) as caught:
                Performer.create_group().launch(cluster, strategy, name="gone", timeout=100)
            assert re.search(
                r"node [12] \(.*local-1\) is gone|on node [12] \(.*local-1\): it is gone", str(caught.value)
            )


def test_a_bundle_that_lands_on_another_node_is_not_taken_for_the_planned_one():
    shared = "127.77.3.4"
    nodes = [
        LocalNode(accelerators=2, address=shared),
        LocalNode(accelerators=2, address=shared),
        LocalNode(accelerators=1, address="127.77.3.5"),
    ]
    with local_cluster(nodes), Cluster(num_nodes=3) as cluster:
        wanted = [Piece(1, "accelerator", 0), Piece(1, "accelerator", 1), Piece(0, "accelerator", 1)]
        for pin in (Pin.ADDRESS, None):
            # By their address both nodes look the same to Ray: about half of what it places is on the wrong one.
            slots = Reserver(cluster, pin).reserve("mine", dict.fromkeys(wanted), timeout=30, components={})
            assert {slot.piece: slot.ray_id for slot in slots} == {
                piece: cluster.nodes[piece.node_rank].ray_id for piece in wanted
            }
            mine = set(find_holdings(cluster.nodes).by_piece)
            assert mine == set(wanted)
            wait_until(lambda: sum(find_holdings(cluster.nodes).free.values()) == 2, "the rest was given back")
            Reservation(cluster, "mine", slots).close()
            wait_until(lambda: all_is_free(cluster), "all was given back")


def test_where_there_are_fewer_cpus_than_accelerators_they_can_be_reserved_all_the_same():
    with local_cluster([LocalNode(accelerators=4, cpus=2)]), Cluster(num_nodes=1) as cluster:
        with cluster.reserve(plan_of(cluster, actor="0-3")) as held:
            assert len(held) == 4
        wait_until(lambda: all_is_free(cluster), "given back")
        # Somebody else's task has the CPUs.
        busy = ray.remote(num_cpus=2)(Foreign.__ray_metadata__.modified_class).remote()
        ray.get(busy.devices.remote(), timeout=60)
        with cluster.reserve(plan_of(cluster, actor="1,3"), timeout=30) as held:
            assert held.accelerators == [(0, 1), (0, 3)]


@pytest.mark.skipif(not has_bundle_labels(ray.__version__), reason="this Ray does not work with IPv6 addresses")
def test_a_node_with_an_ipv6_address():
    address = _own_ipv6()
    if address is None:
        pytest.skip("this machine has no IPv6 address that Ray would take")
    nodes = [LocalNode(accelerators=2), LocalNode(accelerators=2, address=address)]
    with local_cluster(nodes), Cluster(num_nodes=2) as cluster:
        assert cluster.nodes[1].address == address
        with Performer.create_group().launch(cluster, FlexiblePlacementStrategy([[1], [3]]), name="six") as group:
            assert group.environment().wait(60)[1]["CUDA_VISIBLE_DEVICES"] == "1"
            assert group[1].who().wait(60)[0]["node_rank"] == 1


def _own_ipv6() -> str | None:
    """An address of this machine that is neither loopback nor of one link only: Ray rewrites those."""
    import ipaddress

    path = Path("/proc/net/if_inet6")
    for line in path.read_text(encoding="ascii").splitlines() if path.exists() else ():
        found = ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))
        if not found.is_loopback and not found.is_link_local:
            return str(found)
    return None
