"""Pools of seats on real Ray: reserved first, launched into later, sliced and shared."""

from __future__ import annotations

import pickle
import re
import signal
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group_table, remove_placement_group

from foreign import all_is_free, foreign, free_devices
from roost import (
    AcceleratorsTaken,
    Cluster,
    ClusterError,
    ConfigError,
    FlexiblePlacementStrategy,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    PlacementError,
    Pool,
    ReservationLost,
    WorkerDied,
    make_plan,
)
from roost.config.hardware import BARE_NODE
from roost.runtime.reserve.occupancy import find_holdings
from roost.testing import local_cluster
from waiting import wait_until
from workers import Performer


def launch(cluster: Cluster, strategy: Any, name: str, **options: Any) -> Any:
    return Performer.create_group().launch(cluster, strategy, name=name, **options)


def seats_of(pool: Pool) -> list[tuple[int, tuple[int, ...]]]:
    return [(seat.node_rank, seat.accelerators) for seat in pool.seats]


def test_several_groups_go_into_slices_before_it_is_known_which(free_cluster):
    with free_cluster.reserve_seats([4, 2, 0, 3], name="late") as pool:
        assert len(pool) == 9
        assert seats_of(pool) == [*((0, (i,)) for i in range(4)), (1, (0,)), (1, (1,)), *[(3, ())] * 3]
        assert [seat.rank for seat in pool[4:6].seats] == [4, 5]
        assert [len(part) for part in pool] == [1] * 9
        assert seats_of(pool[-1]) == [(3, ())]
        assert seats_of(pool[::4]) == [(0, (0,)), (1, (0,)), (3, ())]
        assert free_devices(free_cluster, 1, 2) == {2, 3}, "others get what is left"
        with (
            launch(free_cluster, pool[2:6].strategy(share=0.4), "some") as some,
            launch(free_cluster, pool[:4].strategy(per_process=2, share=0.6), "pairs") as pairs,
            launch(free_cluster, pool[3:7:3].strategy(), "mixed") as mixed,
        ):
            assert [(who["node_rank"], who["devices"]) for who in some.who().wait(60)] == [
                (0, ("2",)),
                (0, ("3",)),
                (1, ("0",)),
                (1, ("1",)),
            ]
            assert [who["local_world_size"] for who in some.who().wait(60)] == [2] * 4
            assert [who["devices"] for who in pairs.who().wait(60)] == [("0", "1"), ("2", "3")]
            assert [(who["node_rank"], who["devices"]) for who in mixed.who().wait(60)] == [(0, ("3",)), (3, ())]
        assert len(free_cluster.node_manager.get_slots()) == 6, "the seats stay when their groups go"
    assert free_cluster.node_manager.get_slots() == []
    assert repr(pool) == "<Pool 'late' of 9 seats, closed>"


def test_shares_add_up_over_all_groups(free_cluster):
    with free_cluster.reserve_seats([2]) as pool:
        with launch(free_cluster, pool.strategy(share=0.6), "train"):
            with pytest.raises(PlacementError, match=r"add up to 1\.1: train 0\.6 and serve 0\.5"):
                launch(free_cluster, pool[1].strategy(share=0.5), "serve")
            with pytest.raises(ConfigError, match="share is given twice"):
                launch(free_cluster, pool.strategy(share=0.5), "serve", share=0.5)
            with launch(free_cluster, pool.strategy(), "serve", share=0.4) as serve:
                assert serve.rank_of().wait(60) == [0, 1]
        with launch(free_cluster, pool.strategy(share=1), "train"):
            pass
        for share in (1.1, 0, -1, "half", float("nan"), True):
            with pytest.raises(ConfigError, match=r"share is .*"):
                pool.strategy(share=share)
    assert free_cluster.node_manager.get_slots() == []


def test_a_strategy_and_a_plan_reserve_exactly_what_they_say(free_cluster):
    taken = foreign(free_cluster, 0)
    assert ray.get(taken.devices.remote(), timeout=60) == [0]
    with free_cluster.reserve_seats(FlexiblePlacementStrategy([[1, 3], [6, 7]])) as pool:
        assert seats_of(pool) == [(0, (1, 3)), (1, (2, 3))]
        with launch(free_cluster, pool.strategy(), "engines") as engines:
            assert [who["devices"] for who in engines.who().wait(60)] == [("1", "3"), ("2", "3")]
            found = {group_id for group_id, *_ in engines.start_child_task().wait(60)}
            assert found <= {group.id.hex() for group in pool.placement_groups}, "tasks of its workers stay in it"
    config = {"cluster": {"num_nodes": 4, "component_placement": {"actor": "1,2", "rollout": "2-3:0"}}}
    with free_cluster.reserve_seats(make_plan(config, free_cluster)) as pool:
        assert seats_of(pool) == [(0, (1,)), (0, (2,)), (0, (3,))], "a shared accelerator is one seat"
    with free_cluster.reserve_seats([2]) as pool, free_cluster.reserve_seats([1]) as second:
        assert seats_of(pool) == [(0, (1,)), (0, (2,))], "free ones, where the first is held"
        assert seats_of(second) == [(0, (3,))], "pools of a job have seats of their own"
        with pytest.raises(AcceleratorsTaken, match="held by an actor"):
            free_cluster.reserve_seats([1], timeout=0)
        assert len(free_cluster.node_manager.get_slots()) == 3, "what failed left nothing"
    ray.kill(taken)


def test_cpu_seats_have_a_node_and_reserve_nothing(free_cluster):
    with free_cluster.reserve_seats(NodePlacementStrategy([0, 3, 3])) as pool:
        assert [(seat.node_rank, seat.hardware_type) for seat in pool.seats] == [
            (0, BARE_NODE),
            (3, BARE_NODE),
            (3, BARE_NODE),
        ]
        assert pool.placement_groups == ()
        assert all_is_free(free_cluster)
        with launch(free_cluster, pool[1:].strategy(), "cpus") as cpus:
            assert [who["node_rank"] for who in cpus.who().wait(60)] == [3, 3]
        with launch(free_cluster, pool[1:].strategy(per_process=2), "one") as one:
            assert one.world_size == 1


def test_a_pool_that_is_closed_under_its_groups_names_them_and_is_given_back_with_them(free_cluster):
    pool = free_cluster.reserve_seats([3], name="seats")
    strategy = pool.strategy()
    group = launch(free_cluster, pool[0].strategy(), "tenant")
    with pytest.raises(ConfigError, match="part of a pool"):
        pool[:2].close()
    with pytest.raises(ClusterError, match="'seats' was closed under 1 group: tenant"):
        pool.close()
    assert group.rank_of().wait(60) == [0], "it goes on"
    pool.close()
    for late in (strategy, pool.strategy(), pool[1].strategy(share=0.5)):
        with pytest.raises(ClusterError, match="the pool 'seats' is closed"):
            launch(free_cluster, late, "late")
    group.close()
    assert free_cluster.node_manager.get_slots() == []
    left: list[Any] = []

    def fail_in_a_pool() -> None:
        with free_cluster.reserve_seats([1]) as pool:
            left.append(launch(free_cluster, pool.strategy(), "tenant"))
            raise ValueError("the block")

    with pytest.raises(ValueError, match="the block"):
        fail_in_a_pool()
    left[0].close()


def test_a_pool_is_not_used_by_a_group_that_has_its_name(free_cluster):
    pool = free_cluster.reserve_seats([1, 1], name="same")
    with launch(free_cluster, NodePlacementStrategy([0]), "same"):
        pool.close()
    with pytest.raises(PlacementError, match=r"'same' has no seats \[::0\]"):
        pool[::0]


def test_a_placement_group_that_is_removed_from_outside_is_noticed_and_named(free_cluster):
    with free_cluster.reserve_seats([2, 1]) as pool:
        first, second = pool.placement_groups
        assert placement_group_table(first)["state"] == "CREATED"
        with launch(free_cluster, pool.strategy(), "both") as both:
            remove_placement_group(first)
            with pytest.raises(WorkerDied):
                both.hang_here().wait(60)
        for _ in range(2):
            with pytest.raises(ReservationLost) as caught:
                launch(free_cluster, pool[1:].strategy(), "again")
            assert re.search(
                r"'again' cannot be launched: accelerator 1 of node 0 \(.*\) is not reserved any more",
                str(caught.value),
            )
        with launch(free_cluster, pool[2].strategy(), "rest") as rest:
            assert rest.who().wait(60)[0]["node_rank"] == 1, "the seats on the other node are there"
        assert pool.placement_groups == (first, second)
    assert free_cluster.node_manager.get_slots() == []


def test_seats_whose_placement_groups_were_removed_can_be_reserved_again(free_cluster):
    old = free_cluster.reserve_seats([4])
    dead = launch(free_cluster, old.strategy(share=0.8), "first")
    for group in old.placement_groups:
        remove_placement_group(group)
    with free_cluster.reserve_seats([4]) as pool, launch(free_cluster, pool.strategy(share=0.8), "second") as second:
        assert second.rank_of().wait(60) == [0, 1, 2, 3]
        dead.close()
        old.close()
        assert second.rank_of().wait(60) == [0, 1, 2, 3], "what it has is another reservation"
    assert free_cluster.node_manager.get_slots() == []


def test_a_group_can_sit_on_the_seats_of_two_pools(free_cluster):
    with free_cluster.reserve_seats([0, 1], name="second") as second, free_cluster.reserve_seats([2]) as pool:
        both = second + pool[1]
        assert seats_of(both) == [(1, (0,)), (0, (1,))]
        with launch(free_cluster, both.strategy(), "both") as group:
            assert [(who["node_rank"], who["devices"]) for who in group.who().wait(60)] == [(1, ("0",)), (0, ("1",))]
        with pytest.raises(ConfigError, match="a sum of pools"):
            both.close()
        with pytest.raises(TypeError):
            second + "pool"
        second.close()
        with pytest.raises(ClusterError, match=r"'second\+pool' is closed"):
            launch(free_cluster, both.strategy(), "both")


def test_when_the_driver_is_killed_its_pool_goes(free_cluster, driver):
    code = """
import time
from roost import Cluster
pool = Cluster(num_nodes=4).reserve_seats([4, 0, 4], name="theirs")
print("reserved", flush=True)
time.sleep(600)
"""
    mine = driver(code)
    assert mine.line() == "reserved"
    with pytest.raises(AcceleratorsTaken) as caught:
        free_cluster.reserve_seats([1, 1], timeout=0)
    assert re.search(
        rf"accelerator 0 of node 0 \(.*\), reserved by job 'roost-2' \(pid {mine.process.pid} on", str(caught.value)
    )
    mine.end(signal.SIGKILL)
    with free_cluster.reserve_seats([1, 1]) as pool:
        assert seats_of(pool) == [(0, (0,)), (1, (0,))]


CONTENDER = """
from roost import Cluster, AcceleratorsTaken
from workers import Claimant

cluster = Cluster(num_nodes=4, quiet=True)
for number in range({rounds}):
    with cluster.reserve_seats([{first}, {second}], timeout=120) as pool:
        with Claimant.create_group({folder!r}).launch(cluster, pool.strategy(), name="claim") as group:
            group.check().wait(60)
print("done", flush=True)
cluster.close()
"""


@pytest.mark.usefixtures("free_cluster")
def test_no_seat_is_held_by_two_of_competing_drivers(driver, tmp_path):
    folder = str(tmp_path)
    sizes = [(3, 1), (2, 2), (1, 3)]
    drivers = [driver(CONTENDER.format(rounds=2, first=a, second=b, folder=folder)) for a, b in sizes]
    for printed, errors in [item.finish() for item in drivers]:
        assert printed.strip().endswith("done"), errors
    assert not list(tmp_path.glob("clash-*")), "no two jobs had the same accelerator"


def test_a_node_that_dies_takes_its_seats_and_the_others_can_be_used():
    with local_cluster("2x2") as local, Cluster(num_nodes=2) as cluster:
        with cluster.reserve_seats([2, 2]) as pool:
            local.kill_node(1)
            wait_until(lambda: cluster.dead_nodes == (1,), "its death is known")
            with pytest.raises(ReservationLost, match=r"node 1 \(.*\) is gone, and what was reserved there"):
                launch(cluster, pool[1:3].strategy(), "across")
            with launch(cluster, pool[:2].strategy(), "left") as left:
                assert left.rank_of().wait(60) == [0, 1]
        assert cluster.node_manager.get_slots() == []
        with pytest.raises(ClusterError, match="gone"):
            cluster.reserve_seats([1, 1])
        wait_until(lambda: not find_holdings(cluster.nodes).by_piece, "all was given back")


@pytest.mark.parametrize(
    "seats",
    [
        *(None, 4, "44", b"44", [], [0, 0], [4.0], [True], [None], [-1], [[4]], {}, {4}, {0: 4}, ..., [10**30]),
        *([5], [0, 0, 0, 0, 1], PlacementError, Performer, ["4"], PackedPlacementStrategy(0, 99)),
    ],
    ids=lambda seats: repr(seats).partition(" at 0x")[0],
)
def test_seats_that_cannot_be_are_refused_by_name(free_cluster, seats):
    with pytest.raises((ConfigError, PlacementError)) as caught:
        free_cluster.reserve_seats(seats)
    assert "\n  File" not in str(caught.value)


def test_slices_and_other_arguments_that_cannot_be_are_refused_by_name(free_cluster):
    for arguments in ({"name": ""}, {"name": 3}, {"name": "a#b"}, {"timeout": -1}, {"timeout": "soon"}):
        with pytest.raises(ConfigError):
            free_cluster.reserve_seats([1], **arguments)
    with free_cluster.reserve_seats([2, 1]) as pool:
        for which in (
            3,
            -4,
            slice(2, 6),
            slice(1, 1),
            slice(-5, 2),
            "a",
            None,
            1.0,
            [0],
            slice("a", 2),
            slice(0, 2, 0),
        ):
            with pytest.raises(PlacementError, match=r"'pool' has no seats \[.*\]: it has 3 seats"):
                pool[which]
        for count in (0, -1, 2, None, "2", 1.0, True):
            with pytest.raises(PlacementError):
                pool.strategy(per_process=count)
        with pytest.raises(PlacementError, match="process 0 takes seats 1-2 of 'pool', which are on nodes 0 and 1"):
            pool[1:].strategy(per_process=2)
        with pytest.raises(ConfigError, match="reserve is False"):
            launch(free_cluster, pool.strategy(), "loose", reserve=False)
        with pytest.raises(TypeError, match="belongs to the process"):
            pickle.dumps(pool)
    assert free_cluster.node_manager.get_slots() == []
