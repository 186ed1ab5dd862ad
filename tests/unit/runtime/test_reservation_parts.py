"""The decisions of a reservation, without Ray: users of slots, holders of accelerators, what would fit instead."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roost import AcceleratorType, FlexiblePlacementStrategy, PlacementError, Topology, make_plan
from roost.placement.fit import nearest_fit
from roost.placement.plan import Piece
from roost.runtime.managers.ledgers.reservations import HeldSlot, Slot, SlotLedger
from roost.runtime.nodes.info import AcceleratorInfo, NodeInfo
from roost.runtime.nodes.placement_groups import Ask
from roost.runtime.nodes.ray_state import ActorEntry, GroupEntry, RayJob, RayState
from roost.runtime.reserve.occupancy import combine


@dataclass(frozen=True)
class Id:
    text: str

    def hex(self) -> str:
        return self.text


@dataclass(frozen=True)
class Group:
    """Stands for a placement group: the ledger only compares them."""

    id: Id


def piece(local: int, node: int = 0) -> Piece:
    return Piece(node, "accelerator", local)


def slot(local: int, group: str = "g", node: int = 0) -> Slot:
    return Slot(piece=piece(local, node), device=str(local), ray_id=f"id{node}", group=Group(Id(group)), bundle=local)


def node(rank: int, count: int) -> NodeInfo:
    return NodeInfo(
        rank=rank,
        ray_id=f"id{rank}",
        address=f"10.0.0.{rank + 1}",
        name=f"n{rank}",
        hostname="h",
        is_head=rank == 0,
        cpus=8,
        memory=1,
        interpreter="python",
        python="3.11",
        ray="2.60",
        network="x",
        ephemeral_ports=(32768, 60999),
        accelerators=tuple(AcceleratorInfo(type=AcceleratorType.NVIDIA, device=str(i)) for i in range(count)),
    )


def test_a_slot_is_released_with_its_last_user():
    ledger = SlotLedger()
    wanted = {piece(0): None, piece(1): None}
    assert ledger.ask("plan", wanted) == ([], [piece(0), piece(1)])
    ledger.add_drafts("plan", None, [Group(Id("g")), Group(Id("too much"))])
    assert ledger.take("plan", wanted, [slot(0), slot(1)]) == ([], [Group(Id("too much"))])
    assert ledger.ask("actor", {piece(1): 0.8}) == ([slot(1)], [])
    assert ledger.take("actor", {piece(1): 0.8}, []) == ([], [])
    assert ledger.release("plan") == [], "a placement group stays while one of its slots is used"
    assert ledger.release("actor") == [Group(Id("g"))]
    assert ledger.held == []
    assert ledger.release("actor") == []


def test_slots_lost_between_asking_and_taking_are_reported_and_nothing_is_taken():
    ledger = SlotLedger()
    ledger.take("one", {piece(0): None}, [slot(0, "a")])
    ledger.release("one")
    ledger.add_drafts("two", None, [Group(Id("b"))])
    gone = ledger.take("two", {piece(0): None, piece(1): None}, [slot(1, "b")])
    assert gone == ([piece(0)], [Group(Id("b"))])
    assert ledger.held == []


def test_seats_of_a_pool_that_was_closed_are_gone_although_their_accelerators_are_reserved_again():
    ledger = SlotLedger()
    ledger.take("pool", {piece(0): None, piece(1): None}, [slot(0, "a"), slot(1, "a")])
    seats = [slot(0, "a"), slot(1, "a")]
    assert ledger.take("actor", dict.fromkeys([piece(0), piece(1)]), [], seats) == ([], [])
    ledger.release("actor")
    ledger.release("pool")
    ledger.take("other", {piece(0): None}, [slot(0, "b")])
    assert sorted(ledger.take("late", dict.fromkeys([piece(0), piece(1)]), [], seats)[0]) == [piece(0), piece(1)]
    assert [item.users for item in ledger.held] == [(("other", None),)]


def test_drafts_of_a_user_that_gave_up_or_died_are_removed():
    ledger = SlotLedger()
    ledger.add_drafts("one", None, [Group(Id("a")), Group(Id("b"))])
    ledger.discard_drafts("one", [Group(Id("a"))])
    assert ledger.release("one") == [Group(Id("b"))]
    ledger.add_drafts("two", "actor:0", [Group(Id("c"))])
    assert ledger.owners == {"actor:0"}
    assert ledger.release_owner("actor:0") == [Group(Id("c"))]
    assert ledger.owners == set()


def test_slots_of_an_owner_are_released_when_it_dies():
    ledger = SlotLedger()
    ledger.take("actor", {piece(0): None}, [slot(0, "a")])
    ledger.add_drafts("actor:0:child", "actor:0", [Group(Id("b"))])
    ledger.take("actor:0:child", {piece(0): None, piece(1): None}, [slot(1, "b")])
    assert ledger.owners == {"actor:0"}
    assert ledger.release_owner("actor:0") == [Group(Id("b"))]
    assert [held.slot.piece for held in ledger.held] == [piece(0)]


def test_slots_go_with_their_placement_group():
    ledger = SlotLedger()
    ledger.take("actor", {piece(0): None, piece(1): None}, [slot(0, "a"), slot(1, "b")])
    ledger.take("actor", {piece(2): 0.9}, [slot(2, "a")])
    assert ledger.drop([piece(0)]) == [], "something is left of it"
    assert ledger.drop([piece(2), piece(3)]) == [Group(Id("a"))]
    assert ledger.ask("actor", {piece(0): None, piece(1): None}) == ([slot(1, "b")], [piece(0)])
    assert ledger.ask("other", {piece(2): 0.9}) == ([], [piece(2)]), "a lost slot has no users"


def test_shares_add_up_to_at_most_one():
    ledger = SlotLedger()
    ledger.take("actor#1", {piece(0): 0.8}, [slot(0)])
    ledger.take("rollout#2", {piece(0): 0.2}, [])
    ledger.take("watcher#3", {piece(0): None}, [])
    for ask in (ledger.ask, lambda user, shares: ledger.take(user, shares, [])):
        with pytest.raises(PlacementError, match=r"node 0 add up to 1.1: actor 0.8, rollout 0.2 and more 0.1"):
            ask("more#4", {piece(0): 0.1})
    ledger.release("rollout#2")
    assert ledger.take("actor#4", {piece(0): 0.1}, []) == ([], [])
    with pytest.raises(PlacementError, match=r"add up to 1.1: actor 0.8, actor 0.1 and actor 0.2"):
        ledger.ask("actor#5", {piece(0): 0.2})


def test_a_bundle_without_a_cpu_asks_for_none():
    assert Ask(resource="NPU", node_ranks=(0, 3), cpus=0).bundles == [{"NPU": 1}, {"NPU": 1}]
    assert Ask(resource="GPU", node_ranks=(1,), cpus=1).bundles == [{"GPU": 1, "CPU": 1}]


def test_occupancy_combines_what_jobs_say_with_rays_tables():
    nodes = [node(0, 4), node(1, 4), node(2, 0)]
    accounts = RayState(
        actors=(
            ActorEntry(
                name="t", class_name="T", pid=5, ray_job="02", ray_id="id1", amounts={"GPU": {3: 0.5}}, group_id=""
            ),
            ActorEntry(
                name="", class_name="U", pid=6, ray_job="09", ray_id="id1", amounts={"GPU": {1: 0.1}}, group_id="pg"
            ),
            # In one of our slots: the job itself reports that.
            ActorEntry(
                name="w", class_name="W", pid=7, ray_job="01", ray_id="id0", amounts={"GPU": {0: 1}}, group_id="g"
            ),
            ActorEntry(name="c", class_name="C", pid=8, ray_job="01", ray_id="id2", amounts={}, group_id=""),
        ),
        groups=(
            GroupEntry(id="g", name="roost:x", bundles=(("id0", {"GPU": 1}),)),
            GroupEntry(id="pg", name="theirs", bundles=(("id1", {"GPU": 1}), ("id1", {"GPU": 1, "CPU": 1}))),
            GroupEntry(id="cpus", name="", bundles=(("id1", {"CPU": 1}), ("", {"GPU": 1}))),
        ),
        jobs={"02": RayJob(id="02", pid=50, address="10.0.0.9", entrypoint="python t.py")},
        free={"id0": {"GPU": 2.0}, "id1": {"GPU": 1.5}},
    )
    reserved = {"roost": [HeldSlot(slot=slot(0), users=(("actor#1", 0.8), ("rollout#2", None)))]}
    found = combine(nodes, reserved, {"roost": "'roost' (pid 1)"}, accounts)
    assert str(found.of(piece(0))[0]) == "reserved by job 'roost' (pid 1)"
    assert found.of(piece(0))[0].users == ("actor", "rollout")
    assert found.of(piece(0), except_for="roost") == []
    assert str(found.of(piece(3, 1))[0]) == (
        "0.5 of it held by actor 't' (T, pid 5) of Ray job 02 (pid 50 on 10.0.0.9: python t.py)"
    )
    assert str(found.of(piece(1, 1))[0]) == "held by an actor (U, pid 6) of Ray job 09"
    assert [(item.amount, item.holder.split(" of Ray")[0]) for item in found.somewhere[1]] == [
        (1, "held by placement group 'theirs'")
    ]
    assert found.somewhere[0][0].amount == 1, "4, of which 2 are free and 1 is named"
    assert found.free == {0: 2.0, 1: 1.5}
    assert found.free_pieces(nodes) == set(), "on a node with an unknown holder nothing is known to be free"
    empty = combine(nodes, {}, {}, RayState())
    assert len(empty.free_pieces(nodes)) == 8


PLACEMENTS = [
    {"actor": "0-3"},
    {"actor": "0-3", "rollout": "0-3:0-1"},
    {"actor": "0-1:0-3", "rollout": "2-3:0"},
    {"actor": "0-1", "rollout": "4-7:0-1"},
    {"actor": "1,3", "rollout": "6"},
]


@given(st.sampled_from(PLACEMENTS), st.sets(st.integers(0, 11), max_size=12))
def test_a_suggested_fit_can_be_planned_and_uses_only_free_accelerators(placements, free_ranks):
    topology = Topology.from_shorthand("1x4,1x6,1x2")
    plan = make_plan({"cluster": {"num_nodes": 3, "component_placement": placements}}, topology)
    space = topology.space()
    free = {Piece(spot.node_rank, "accelerator", spot.local_rank) for spot in map(space.locate, free_ranks)}
    components = {component.name: component.placements for component in plan.components}
    fit = nearest_fit(topology, components, free)
    wanted = set(plan.occupants())
    if wanted <= free:
        assert fit is not None
    if fit is None:
        return
    again = make_plan({"cluster": {"num_nodes": 3, "component_placement": fit}}, topology)
    assert set(again.occupants()) <= free
    assert [component.world_size for component in again.components] == [c.world_size for c in plan.components]
    sizes = [[len(p.local_hardware_ranks) for p in component.placements] for component in plan.components]
    assert [[len(p.local_hardware_ranks) for p in component.placements] for component in again.components] == sizes
    if wanted <= free:
        assert set(again.occupants()) == wanted, "a layout that fits stays where it is"


def test_processes_that_shared_accelerators_still_do_in_the_suggested_fit():
    topology = Topology.from_shorthand("1x4,1x4")
    actor = FlexiblePlacementStrategy([[0], [1], [2], [3]]).get_placement(topology)
    rollout = FlexiblePlacementStrategy([[0, 1], [2, 3]]).get_placement(topology)
    free = {piece(local, 1) for local in range(4)} | {piece(2), piece(3)}
    assert nearest_fit(topology, {"actor": actor, "rollout": rollout}, free) == {
        "actor": "2-5:0-3",
        "rollout": "2-5:0-1",
    }
