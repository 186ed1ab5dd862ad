"""Reservations on real Ray: exactly the accelerators of the plan, and no other job can take them."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group

import warm
from foreign import Foreign, all_is_free, foreign, free_devices
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
from roost.rl import RolloutManager, create_placement_groups
from roost.runtime.nodes.placement_groups import Ask, make_group, probe, remove_groups, settle
from roost.runtime.reserve.occupancy import OccupancyReader, find_holdings
from roost.runtime.reserve.reservation import Reservation
from roost.runtime.reserve.reserver import Reserver
from roost.testing import LocalCluster, LocalNode, NumpyEngine, local_cluster
from waiting import press_ctrl_c, stop, wait_until
from workers import Performer, Waiter


def plan_of(cluster: Cluster, **placements: str) -> Plan:
    config = {"cluster": {"num_nodes": cluster.num_nodes, "component_placement": placements}}
    return make_plan(config, cluster)


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
def test_exactly_the_accelerators_of_the_plan_are_taken_and_no_more(free_cluster, placements):
    plan = plan_of(free_cluster, **placements)
    wanted = {(piece.node_rank, piece.local_rank) for piece in plan.occupants()}
    with free_cluster.reserve(plan) as held:
        assert set(held.accelerators) == wanted
        assert len(held) == len(wanted), "what is shared is reserved once"
        for slot in held.slots:
            assert slot.device == str(slot.piece.local_rank)
            assert slot.ray_id == free_cluster.nodes[slot.piece.node_rank].ray_id
        mine = {(piece.node_rank, piece.local_rank) for piece in find_holdings(free_cluster.nodes).by_piece}
        assert mine == wanted
        node_rank = 1
        left = {local for local in range(4) if (node_rank, local) not in wanted}
        assert free_devices(free_cluster, node_rank, len(left)) == left, "others get what is left"
    assert free_cluster.node_manager.get_slots() == []


def test_a_node_that_others_use_in_part_gives_exactly_what_was_planned(free_cluster):
    other = foreign(free_cluster, 0)
    assert ray.get(other.devices.remote(), timeout=60) == [0]
    with (
        Performer.create_group().launch(free_cluster, FlexiblePlacementStrategy([[1], [2, 3]]), name="exact") as group,
    ):
        assert group.environment().wait(60)[1]["CUDA_VISIBLE_DEVICES"] == "2,3"
        assert [
            (held.slot.piece.node_rank, held.slot.piece.local_rank) for held in free_cluster.node_manager.get_slots()
        ] == [
            (0, 1),
            (0, 2),
            (0, 3),
        ]
        assert free_devices(free_cluster, 0, 0) == set()
    ray.kill(other)


@pytest.mark.parametrize("amount", [1, 0.5], ids=["wholly", "in part"])
def test_what_a_foreign_actor_holds_is_named_with_who_holds_it_and_what_would_fit(free_cluster, amount):
    other = foreign(free_cluster, 0, amount, name="their-trainer")
    ray.get(other.devices.remote(), timeout=60)
    plan = plan_of(free_cluster, actor="0-1", rollout="0-1:0")
    with pytest.raises(AcceleratorsTaken) as caught:
        free_cluster.reserve(plan, timeout=0)
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
    with free_cluster.reserve(plan_of(free_cluster, actor=fit[1], rollout=fit[2])) as held:
        assert held.accelerators == [(0, 1), (0, 2)]
    wait_until(lambda: not find_holdings(free_cluster.nodes).of(Piece(0, "accelerator", 1)), "nothing is kept of it")
    ray.kill(other)


def test_a_waiting_reservation_takes_what_is_given_back(free_cluster, capsys):
    other = foreign(free_cluster, 1)
    assert ray.get(other.devices.remote(), timeout=60) == [0]
    seen: list[str] = []

    def give_back() -> None:
        pipes = {"capture_output": True, "text": True, "timeout": 120, "check": False, "env": warm.environment()}
        try:
            wait_until(
                lambda: "waiting for accelerator 0 of node 1" in capsys.readouterr().err, "it says what it waits for"
            )
            seen.append(subprocess.run(["roost", "status"], **pipes).stdout)
        finally:
            ray.kill(other)

    helper = threading.Thread(target=give_back)
    helper.start()
    with free_cluster.reserve(plan_of(free_cluster, actor="4"), timeout=180) as held:
        assert held.accelerators == [(1, 0)]
    helper.join(60)
    assert re.search(r"  plan waits for accelerator 0 of node 1 \(.*\), held by ", seen[0]), seen
    assert not free_cluster.node_manager.get_waits(), "it waits no more"


def test_without_reserve_nothing_is_reserved_in_ray(free_cluster):
    with Performer.create_group().launch(
        free_cluster, FlexiblePlacementStrategy([[0]]), name="loose", reserve=False
    ) as group:
        assert group.environment().wait(60)[0]["CUDA_VISIBLE_DEVICES"] == "0"
        assert all_is_free(free_cluster)
        assert free_devices(free_cluster, 0, 4) == {0, 1, 2, 3}


def test_groups_share_one_reservation_with_declared_shares_that_add_up(free_cluster):
    strategy = FlexiblePlacementStrategy([[0], [1]])
    with Performer.create_group().launch(free_cluster, strategy, name="train", share=0.7) as train:
        with Performer.create_group().launch(free_cluster, strategy, name="serve", share=0.3) as serve:
            both = train.take_turns(5), serve.take_turns(5)
            for first, second in zip(*(turns.wait(60) for turns in both), strict=True):
                assert not [(a, b) for a, b in first for c, d in second if a < d and c < b], "the device lock"
            held = free_cluster.node_manager.get_slots()
            assert [sorted((user.partition("#")[0], share) for user, share in item.users) for item in held] == [
                [("serve", 0.3), ("train", 0.7)]
            ] * 2
            with pytest.raises(PlacementError) as caught:
                Performer.create_group().launch(free_cluster, strategy, name="third", share=0.1)
            assert "the shares of accelerator 0 of node 0 add up to 1.1: train 0.7, serve 0.3 and third 0.1" in str(
                caught.value
            )
        assert len(free_cluster.node_manager.get_slots()) == 2, "what another group uses stays"
        assert train.rank_of().wait(60) == [0, 1]
        # Two workers of one group on one accelerator count twice.
        with pytest.raises(PlacementError, match=r"add up to 1\.2"):
            Performer.create_group().launch(
                free_cluster, FlexiblePlacementStrategy([[2], [2]]), name="twice", share=0.6
            )
    with pytest.raises(PlacementError, match=r"add up to 1\.1: actor 0\.8 and rollout 0\.3"):
        free_cluster.reserve(plan_of(free_cluster, actor="0-1", rollout="0-1"), shares={"actor": 0.8, "rollout": 0.3})
    with pytest.raises(PlacementError, match="asks for hardware rank 12"):
        free_cluster.reserve(plan_of(free_cluster, actor="0-12"))


def test_tasks_that_a_worker_starts_stay_on_what_is_reserved(free_cluster):
    with Performer.create_group().launch(free_cluster, FlexiblePlacementStrategy([[2], [5]]), name="parent") as group:
        found = group.start_child_task().wait(60)
        slots = {held.slot.piece: held.slot for held in free_cluster.node_manager.get_slots()}
        for (group_id, node_id, devices), piece in zip(
            found, [Piece(0, "accelerator", 2), Piece(1, "accelerator", 1)], strict=True
        ):
            assert group_id == slots[piece].group.id.hex()
            assert node_id == slots[piece].ray_id
            assert devices == [str(piece.local_rank)], "a task that wants an accelerator gets the worker's own"


def test_a_reservation_that_is_removed_during_a_launch_is_reported(free_cluster, tmp_path):
    def remove() -> None:
        wait_until(lambda: list(tmp_path.glob("pid-*")), "the constructor runs")
        for held in free_cluster.node_manager.get_slots():
            remove_placement_group(held.slot.group)

    helper = threading.Thread(target=remove)
    helper.start()
    with pytest.raises(ReservationLost) as caught:
        Waiter.create_group(str(tmp_path)).launch(free_cluster, FlexiblePlacementStrategy([[1]]), name="robbed")
    helper.join(60)
    assert re.search(
        r"robbed:0 cannot be started: accelerator 1 of node 0 \(.*\) is not reserved any more", str(caught.value)
    )
    assert free_cluster.node_manager.get_slots() == []


def test_when_the_driver_is_killed_its_reservation_goes_away(free_cluster, driver):
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
        free_cluster.reserve(plan_of(free_cluster, actor="0-1"), timeout=0)
    text = str(caught.value)
    assert re.search(rf"accelerator 0 of node 0 \(.*\), reserved by job 'roost-2' \(pid {mine.process.pid} on", text), (
        text
    )
    assert "this would fit now: actor: 4-5:0-1" in text
    mine.end(signal.SIGKILL)
    with free_cluster.reserve(plan_of(free_cluster, actor="0-1"), timeout=60) as held:
        assert held.accelerators == [(0, 0), (0, 1)]


def test_status_and_plan_live_show_who_has_what(free_cluster, tmp_path):
    other = foreign(free_cluster, 2, 0.5, name="theirs")
    ray.get(other.devices.remote(), timeout=60)
    group = placement_group([{"GPU": 1, f"node:{free_cluster.nodes[2].address}": 0.001}], name="bare")
    job = tmp_path / "job.yaml"
    job.write_text("cluster: {num_nodes: 4, component_placement: {actor: 0-1, rollout: 8-9}}\n", encoding="utf-8")

    def roost(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["roost", *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
            env=warm.environment() | {"COLUMNS": "160"},
        )

    try:
        assert group.wait(30)
        with Performer.create_group().launch(free_cluster, FlexiblePlacementStrategy([[0], [1]]), name="mine"):
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
    wait_until(lambda: all_is_free(free_cluster), "all is free again")
    assert "this plan would start now: its accelerators are free" in roost("plan", str(job), "--live").stdout


CONTENDER = """
import random
from roost import AcceleratorsTaken, Cluster, FlexiblePlacementStrategy
from workers import Claimant

def main():
    choose = random.Random({seed})
    cluster = Cluster(num_nodes=4, quiet=True)
    had = 0
    for _ in range({rounds}):
        ranks = sorted(choose.sample(range(2, 6), choose.randint(1, 2)))
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


def contend(driver: Callable[..., Any], folder: Path, seeds: Sequence[int], rounds: int) -> None:
    """Let several jobs launch on four accelerators at once, each as often as `rounds` says."""
    drivers = [driver(CONTENDER.format(seed=seed, rounds=rounds, folder=str(folder))) for seed in seeds]
    outcomes = [item.finish() for item in drivers]
    for printed, errors in outcomes:
        assert re.search(r"^had \d+$", printed, re.MULTILINE), errors
    had = sum(int(re.search(r"had (\d+)", printed)[1]) for printed, _ in outcomes)
    assert had >= len(seeds) * rounds / 2, "most of them had their turn"
    assert not list(folder.glob("clash-*")), "no two jobs had the same accelerator"
    assert not list(folder.glob("claims-*")), "and all left"


@pytest.mark.usefixtures("free_cluster")
def test_no_accelerator_is_ever_held_by_two_jobs(driver, tmp_path):
    contend(driver, tmp_path, seeds=range(3), rounds=1)


@pytest.mark.soak
@pytest.mark.usefixtures("free_cluster")
def test_no_accelerator_is_held_by_two_of_many_jobs_for_minutes(driver, tmp_path, rounds):
    for number in rounds():
        contend(driver, tmp_path, seeds=range(4 * number, 4 * number + 4), rounds=5)


@pytest.mark.soak
def test_no_interrupt_is_lost_while_a_launch_waits(free_cluster, rounds):
    reader = OccupancyReader(free_cluster.nodes)
    reader.read()

    def interrupt(after: float) -> None:
        time.sleep(after)
        press_ctrl_c()

    def wait(helper: threading.Thread) -> None:
        # The interrupt may come while it starts.
        helper.start()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            reader.read()

    choose = random.Random(0)  # noqa: S311 - only when to interrupt
    for _ in rounds():
        for _ in range(100):
            helper = threading.Thread(target=interrupt, args=[choose.uniform(0, 0.05)])
            with pytest.raises(KeyboardInterrupt):
                wait(helper)
            helper.join()


HOLDING = """
import sys
from roost import Cluster, FlexiblePlacementStrategy, Worker
with Cluster(num_nodes=1, quiet=True) as cluster:
    group = Worker.create_group().launch(cluster, FlexiblePlacementStrategy([[{place}]]), name="holder")
    print("holds", flush=True)
    sys.stdin.read()
"""


def node_managers(local: LocalCluster) -> set[int]:
    """The processes of the node managers of all jobs."""
    processes = psutil.Process(local.keeper_pid).children(recursive=True)
    return {one.pid for one in processes if (one.cmdline() or [""])[0].startswith("ray::NodeManagerActor")}


@pytest.fixture(scope="module")
def few_cpus() -> Iterator[LocalCluster]:
    """A node with fewer CPUs than accelerators."""
    with local_cluster([LocalNode(accelerators=4, cpus=2)]) as local:
        yield local


def test_jobs_whose_managers_hang_hold_up_a_reservation_only_to_its_deadline(few_cpus, driver):
    with Cluster(num_nodes=1) as cluster:
        own = node_managers(few_cpus)
        others = [driver(HOLDING.format(place=place), few_cpus) for place in range(2)]
        assert [other.line() for other in others] == ["holds"] * 2
        managers = node_managers(few_cpus) - own
        assert len(managers) == 2
        for pid in managers:
            stop(pid)
        try:
            began = time.monotonic()
            with pytest.raises(ClusterError):
                cluster.reserve(plan_of(cluster, actor="0-3"), timeout=2)
            # Each of them alone would take two seconds, and is asked again and again.
            assert time.monotonic() - began < 8
        finally:
            for pid in managers:
                os.kill(pid, signal.SIGCONT)
        for other in others:
            other.finish()


def test_a_node_that_is_lost_after_reserving_is_reported_immediately():
    with local_cluster("1x0,2x2") as local, Cluster(num_nodes=3) as cluster:
        strategy = FlexiblePlacementStrategy([[0], [2]])
        with cluster.reserve(plan_of(cluster, actor="0,2")):
            group = make_group(Ask(resource="GPU", node_ranks=(1,), cpus=0), "mine", cluster.nodes)
            (bundle,) = settle([group])[group]
            local.kill_node(1)
            # Ray would wait until the node is back.
            with pytest.raises(ClusterError, match=r"local-1\) (died while its accelerators|failed)"):
                probe({bundle: "GPU"}, cluster.nodes)
            remove_groups([group])
            with pytest.raises(ClusterError) as caught:
                Performer.create_group().launch(cluster, strategy, name="gone", timeout=100)
            assert re.search(
                r"node [12] \(.*local-1\) is gone|on node [12] \(.*local-1\): it is gone", str(caught.value)
            )


def test_a_bundle_lands_on_its_own_node_where_two_nodes_share_an_address():
    shared = "127.77.3.4"
    nodes = [
        LocalNode(accelerators=2, address=shared),
        LocalNode(accelerators=2, address=shared),
        LocalNode(accelerators=1, address="127.77.3.5"),
    ]
    with local_cluster(nodes), Cluster(num_nodes=3) as cluster:
        wanted = [Piece(1, "accelerator", 0), Piece(1, "accelerator", 1), Piece(0, "accelerator", 1)]
        slots = Reserver(cluster.context, "mine", 30).reserve(dict.fromkeys(wanted), components={})
        assert {slot.piece: slot.ray_id for slot in slots} == {
            piece: cluster.nodes[piece.node_rank].ray_id for piece in wanted
        }
        mine = set(find_holdings(cluster.nodes).by_piece)
        assert mine == set(wanted)
        wait_until(lambda: sum(find_holdings(cluster.nodes).free.values()) == 2, "the rest was given back")
        Reservation(cluster.context, "mine", slots).close()
        wait_until(lambda: all_is_free(cluster), "all was given back")


@pytest.mark.usefixtures("few_cpus")
def test_accelerators_can_be_reserved_on_a_node_with_fewer_cpus_than_accelerators():
    with Cluster(num_nodes=1) as cluster:
        with cluster.reserve(plan_of(cluster, actor="0-3")) as held:
            assert len(held) == 4
        wait_until(lambda: all_is_free(cluster), "given back")
        # A foreign actor has the CPUs.
        busy = ray.remote(num_cpus=2)(Foreign.__ray_metadata__.modified_class).remote()
        ray.get(busy.devices.remote(), timeout=60)
        with cluster.reserve(plan_of(cluster, actor="1,3"), timeout=30) as held:
            assert held.accelerators == [(0, 1), (0, 3)]
        ray.kill(busy)


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
        args = {"rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 2, "debug_rollout_only": True}
        with (
            create_placement_groups(args) as groups,
            RolloutManager(args, NumpyEngine, groups["rollout"]) as manager,
        ):
            assert manager.engines.specs[1].url.startswith(f"http://[{address}]:")
            assert manager.engines.specs[1].dist_init_addr.startswith(f"[{address}]:")
            assert {manager.generate({"observations": [[1.0] * 4]})["engine"] for _ in range(2)} == {0, 1}


def _own_ipv6() -> str | None:
    """An address of this machine that is neither loopback nor of one link only: Ray rewrites those."""
    import ipaddress

    path = Path("/proc/net/if_inet6")
    for line in path.read_text(encoding="ascii").splitlines() if path.exists() else ():
        found = ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))
        if not found.is_loopback and not found.is_link_local:
            return str(found)
    return None


ATTACHED = """
import sys
from roost import Cluster, FlexiblePlacementStrategy
from workers import Performer
cluster = Cluster(quiet=True)
group = Performer.create_group().launch(cluster, FlexiblePlacementStrategy([[{rank}]]), name={name!r}, share={share})
print("launched", flush=True)
sys.stdin.readline()
group.close()
cluster.close()
"""


def test_a_process_that_attached_can_go_and_takes_nothing_of_the_others_along(free_cluster, driver):
    guest = driver(ATTACHED.format(rank=0, name="guest", share=0.5))
    assert guest.line() == "launched"
    with Performer.create_group().launch(
        free_cluster, FlexiblePlacementStrategy([[0]]), name="mine", share=0.5
    ) as mine:
        guest.process.stdin.write("go\n")
        guest.process.stdin.flush()
        assert guest.process.wait(60) == 0, guest.process.stderr.read()
        wait_until(
            lambda: len(free_cluster.node_manager.get_slots()[0].users) == 1, "the guest is not counted any more"
        )
        assert mine.rank_of().wait(60) == [0]
        assert Piece(0, "accelerator", 0) in find_holdings(free_cluster.nodes).by_piece
    killed = driver(ATTACHED.format(rank=1, name="killed", share=0.8))
    assert killed.line() == "launched"
    killed.end(signal.SIGKILL)
    wait_until(lambda: free_cluster.node_manager.get_slots() == [], "what it had was given back")
    with Performer.create_group().launch(free_cluster, FlexiblePlacementStrategy([[1]]), name="mine", share=0.5):
        assert len(free_cluster.node_manager.get_slots()) == 1


def test_a_launch_that_is_interrupted_while_it_waits_leaves_nothing(free_cluster, capsys, monkeypatch):
    other = foreign(free_cluster, 0)
    ray.get(other.devices.remote(), timeout=60)
    lookups: list[str] = []
    real = ray.get_actor
    monkeypatch.setattr(ray, "get_actor", lambda name, *args, **more: lookups.append(name) or real(name, *args, **more))

    def interrupt() -> None:
        wait_until(lambda: "stopped: waiting for accelerator 0" in capsys.readouterr().err, "it waits")
        press_ctrl_c()

    helper = threading.Thread(target=interrupt)
    helper.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            Performer.create_group().launch(free_cluster, FlexiblePlacementStrategy([[0], [1]]), name="stopped")
    finally:
        helper.join(60)
        ray.kill(other)
    # An interrupt is lost where it arrives while a handle is deleted: a poll must not make one to drop it again.
    assert lookups.count("NodeManager") <= 1, "one job is there, and it is looked up once for all polls"
    assert free_cluster.node_manager.get_slots() == []
    with Performer.create_group().launch(free_cluster, FlexiblePlacementStrategy([[0]]), name="stopped", share=0.9):
        pass


def test_finding_out_who_holds_what_does_not_cost_more_with_every_actor_that_has_ended(free_cluster):
    def cost() -> float:
        began = time.perf_counter()
        find_holdings(free_cluster.nodes)
        return time.perf_counter() - began

    @ray.remote(num_cpus=0, resources={"what no node has": 1})
    class Never:
        """It is in Ray's table, and takes no process."""

    before = min(cost() for _ in range(30))
    for actor in [Never.remote() for _ in range(2000)]:
        ray.kill(actor)
    # Ray kills in order, so this one is in the table after them.
    last = Foreign.remote()
    ray.get(last.devices.remote(), timeout=60)
    # With all of them in the table it took six times as long, and it did so for ever.
    wait_until(lambda: min(cost() for _ in range(10)) < 3 * before, "it costs what it did")
    ray.kill(last)
