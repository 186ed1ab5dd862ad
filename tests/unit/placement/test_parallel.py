"""Model-parallel placement beyond the conformance cases: node groups, and when it applies."""

from __future__ import annotations

import pytest

from roost import ModelParallelComponentPlacement, PlacementError, PlacementMode, Topology, make_plan

TOPOLOGY = Topology.from_dict(
    {
        "nodes": [{"accelerators": 4}, {"accelerators": 4}],
        "groups": [{"label": "a", "node_ranks": 0}, {"label": "b", "node_ranks": 1}],
    }
)


def place(actor, rollout, tp=1, rollout_tp=1, rollout_pp=1):
    config = {
        "cluster": {"component_placement": {"actor": actor, "rollout": rollout}},
        "actor": {"model": {"tensor_model_parallel_size": tp}},
        "rollout": {"tensor_parallel_size": rollout_tp, "pipeline_parallel_size": rollout_pp},
    }
    return ModelParallelComponentPlacement(config, TOPOLOGY)


def on(group, placement):
    return {"node_group": group, "placement": placement}


def test_the_same_ranks_of_two_groups_are_different_accelerators():
    assert place(on("a", "0-3"), on("b", "0-3")).placement_mode is PlacementMode.DISAGGREGATED


def test_different_ranks_can_be_the_same_accelerators():
    placement = place("4-7", on("b", "0-3"), tp=4, rollout_tp=2)
    assert placement.placement_mode is PlacementMode.COLLOCATED
    assert [item.local_hardware_ranks for item in placement.get_placement("rollout")] == [(0, 2), (1, 3)]
    assert {item.cluster_node_rank for item in placement.get_placement("rollout")} == {1}


def test_the_sources_of_actor_and_rollout_meet_on_the_same_accelerators():
    placement = place("0-7", "0-7", tp=4, rollout_tp=2)
    actor = [(item.cluster_node_rank, item.local_hardware_ranks[0]) for item in placement.get_placement("actor")]
    sources = actor[::4]
    firsts = [(i.cluster_node_rank, i.local_hardware_ranks[0]) for i in placement.get_placement("rollout")]
    assert set(sources) <= set(firsts)


def test_a_rollout_engine_that_would_leave_its_node_is_refused():
    with pytest.raises(PlacementError, match="never leaves its node"):
        place("0-1", "2-7", rollout_tp=3)


def test_an_unknown_group_is_pointed_at():
    with pytest.raises(PlacementError, match=r"component_placement\.actor\.node_group.*no node group 'c'"):
        place(on("c", "0"), "0")


def test_a_model_cannot_go_on_bare_nodes():
    with pytest.raises(PlacementError, match="needs accelerators"):
        place(on("node", "0"), "0")


def test_process_ranks_cannot_contradict_the_sizes():
    assert place("0-3", "4-7:0-1", rollout_tp=2).get_world_size("rollout") == 2
    with pytest.raises(PlacementError, match="asks for 4 processes, but its parallel sizes make 2"):
        place("0-3", "4-7:0-3", rollout_tp=2)


def test_the_same_accelerators_in_another_order_do_not_meet():
    with pytest.raises(PlacementError, match="but not in the same order"):
        place(on("a,b", "0-7"), on("b,a", "0-7"), tp=4, rollout_tp=2)


@pytest.mark.parametrize("placement", [{"actor": "0-3", "rollout": "2-7"}, {"actor,rollout": "0-2"}])
def test_mistakes_in_other_components_come_with_those_of_the_model(placement):
    config = {
        "cluster": {"component_placement": {**placement, "reward": "0-99"}},
        "actor": {"model": {"tensor_model_parallel_size": 2}},
        "rollout": {"tensor_parallel_size": 2},
    }
    with pytest.raises(PlacementError, match="'reward' asks for hardware rank 99") as caught:
        make_plan(config, TOPOLOGY)
    assert len(caught.value.problems) > 1


def test_a_missing_component_is_named():
    config = {"cluster": {"component_placement": {"actor": "0-3"}}}
    with pytest.raises(PlacementError, match="needs the component 'rollout'"):
        ModelParallelComponentPlacement(config, TOPOLOGY)


SIZES = {"actor": {"model": {"tensor_model_parallel_size": 4}}, "rollout": {"tensor_parallel_size": 2}}


@pytest.mark.parametrize(
    ("components", "sizes", "mode"),
    [
        ({"actor,rollout": "0-7"}, SIZES, "collocated"),
        ({"actor": "0-3", "rollout": "4-7", "reward": "0"}, SIZES, "disaggregated"),
        ({"actor,rollout": "0-7", "env": "0"}, SIZES, "hybrid"),
        ({"actor,rollout": "0-7"}, {}, "hybrid"),
        ({"actor": "0-7"}, SIZES, "hybrid"),
    ],
)
def test_auto_chooses_model_parallel_only_for_such_a_job(components, sizes, mode):
    plan = make_plan({"cluster": {"component_placement": components}, **sizes}, TOPOLOGY)
    assert plan.mode.value == mode


def test_the_choice_can_be_explicit():
    config = {"cluster": {"component_placement": {"actor,rollout": "0-7"}}, **SIZES}
    assert make_plan(config, TOPOLOGY, placement="hybrid").component("rollout").world_size == 8
    assert make_plan(config, TOPOLOGY, placement="model-parallel").component("rollout").world_size == 4
