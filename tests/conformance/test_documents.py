"""Every placement example of the documents, with its documented result."""

from __future__ import annotations

import copy
import json
import pickle

import pytest

from roost import (
    ComponentPlacement,
    FlexiblePlacementStrategy,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    PlacementError,
    Topology,
)

ONE_NODE = Topology.from_shorthand("1x8")
HETEROGENEOUS = Topology.from_dict(
    {
        "nodes": [{"accelerators": 16}, {"accelerators": 16}, {"accelerators": 0}, {"accelerators": 0}],
        "groups": [
            {"label": "a800", "node_ranks": [0]},
            {"label": "4090", "node_ranks": [1]},
            {
                "label": "robot",
                "node_ranks": [2, 3],
                "hardware": {"type": "Franka", "configs": [{"node_rank": rank} for rank in (2, 2, 3, 3)]},
            },
        ],
    }
)


def visible(strategy) -> list[list[int]]:
    return [list(map(int, item.visible_accelerators)) for item in strategy.get_placement(ONE_NODE)]


def text(yaml: str, topology: Topology, tmp_path) -> ComponentPlacement:
    path = tmp_path / "job.yaml"
    path.write_text(yaml)
    return ComponentPlacement(path, topology)


def test_packed_runs_one_process_on_each_accelerator():
    assert visible(PackedPlacementStrategy(start_hardware_rank=0, end_hardware_rank=3)) == [[0], [1], [2], [3]]


def test_packed_in_chunks_gives_each_process_neighbours():
    strategy = PackedPlacementStrategy(start_hardware_rank=0, end_hardware_rank=3, num_hardware_per_process=2)
    assert visible(strategy) == [[0, 1], [2, 3]]


def test_packed_strided_interleaves_the_processes_of_a_block():
    strategy = PackedPlacementStrategy(start_hardware_rank=0, end_hardware_rank=3, stride=2, num_hardware_per_process=2)
    assert visible(strategy) == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("stride", "end", "expected"),
    [(2, 5, [[0, 2, 4], [1, 3, 5]]), (3, 8, None)],  # "GPU 0, 2, 4 (stride 2) or GPU 0, 3, 6 (stride 3)"
)
def test_packed_strides_over_three_accelerators(stride, end, expected):
    strategy = PackedPlacementStrategy(0, end, num_hardware_per_process=3, stride=stride)
    nine = Topology.from_shorthand("1x9")
    found = [list(item.local_hardware_ranks) for item in strategy.get_placement(nine)]
    assert found == (expected or [[0, 3, 6], [1, 4, 7], [2, 5, 8]])


def test_packed_takes_isolate_accelerator_among_its_inputs():
    hidden, shown = PackedPlacementStrategy(0, 1), PackedPlacementStrategy(0, 1, isolate_accelerator=False)
    assert hidden.get_placement(ONE_NODE)[1].visible_accelerators == ["1"]
    everything = list("01234567")
    assert shown.get_placement(ONE_NODE)[1].visible_accelerators == everything
    assert hidden.get_placement(ONE_NODE, isolate_accelerator=False)[1].visible_accelerators == everything
    with pytest.raises(PlacementError, match="isolate_accelerator is True or False, not 1"):
        PackedPlacementStrategy(0, 1, isolate_accelerator=1)


def test_what_the_documents_call_a_list_compares_equal_to_one():
    first, second = PackedPlacementStrategy(0, 3, 2, stride=2).get_placement(ONE_NODE)
    assert first.visible_accelerators == ["0", "2"]
    assert second.visible_accelerators == ["1", "3"]
    assert [0, 2] == first.local_hardware_ranks == (0, 2)
    assert first.local_hardware_ranks != [0, 1]
    assert first.visible_accelerators != second.visible_accelerators
    sent = pickle.loads(pickle.dumps(first))  # noqa: S301 - our own
    assert len({first, copy.deepcopy(first), sent}) == 1
    assert sent.visible_accelerators == json.loads(json.dumps(first.visible_accelerators))
    with pytest.raises(TypeError):
        first.visible_accelerators[0] = "1"
    (bare,) = NodePlacementStrategy([0]).get_placement(Topology.from_shorthand("1x0"))
    assert bare.local_hardware_ranks == [] == bare.visible_accelerators


def test_a_job_may_place_no_component_and_a_group_may_take_all_nodes(tmp_path):
    two = Topology.from_shorthand("2x4")
    assert text("cluster: {num_nodes: 2, component_placement: {}}", two, tmp_path).components == []
    every = """
        cluster:
          num_nodes: 2
          component_placement: {actor: {node_group: every, placement: all}}
          node_groups:
            - label: every
              node_ranks: all
              env_configs: [{node_ranks: all, python_interpreter_path: null}]
    """
    assert text(every, two, tmp_path).get_hardware_ranks("actor") == list(range(8))


def test_packed_takes_the_older_names():
    older = PackedPlacementStrategy(start_accelerator_id=0, end_accelerator_id=3, num_accelerators_per_process=2)
    newer = PackedPlacementStrategy(0, 3, 2)
    assert older.get_placement(ONE_NODE) == newer.get_placement(ONE_NODE)


def test_packed_needs_a_multiple_of_the_block():
    with pytest.raises(AssertionError):
        PackedPlacementStrategy(0, 5, num_hardware_per_process=2, stride=2)


def test_packed_wraps_to_the_next_node():
    placements = PackedPlacementStrategy(0, 15).get_placement(Topology.from_shorthand("2x8"))
    assert [(item.cluster_node_rank, item.local_accelerator_rank) for item in placements[7:9]] == [(0, 7), (1, 0)]


def test_flexible_gives_each_process_the_ranks_it_names():
    assert visible(FlexiblePlacementStrategy([[0, 1], [2], [3]])) == [[0, 1], [2], [3]]


def test_flexible_takes_the_older_name():
    assert visible(FlexiblePlacementStrategy(accelerator_id_lists=[[0, 1], [2]])) == [[0, 1], [2]]


def test_flexible_sorts_within_and_across_processes():
    assert visible(FlexiblePlacementStrategy([[3, 2], [1, 0]])) == [[0, 1], [2, 3]]


def test_flexible_counts_global_ranks_over_nodes():
    (placement,) = FlexiblePlacementStrategy([[8, 15]]).get_placement(Topology.from_shorthand("2x8"))
    assert (placement.cluster_node_rank, placement.local_hardware_ranks) == (1, (0, 7))


def test_node_runs_four_processes_on_the_first_node():
    placements = NodePlacementStrategy([0] * 4).get_placement(ONE_NODE)
    assert [item.rank for item in placements] == [0, 1, 2, 3]
    assert {item.cluster_node_rank for item in placements} == {0}


def test_node_sorts_its_ranks():
    placements = NodePlacementStrategy([1, 0]).get_placement(Topology.from_shorthand("2x0"))
    assert [item.cluster_node_rank for item in placements] == [0, 1]


def test_the_older_names_of_a_placement_are_aliases():
    placement = PackedPlacementStrategy(9, 9).get_placement(Topology.from_shorthand("2x8"))[0]
    assert (placement.node_id, placement.node_rank, placement.local_accelerator_id) == (1, 1, 1)


@pytest.mark.parametrize("level", ["component_placement:\n    ", ""], ids=["below component_placement", "without it"])
def test_components_can_share_one_rule(tmp_path, level):
    # Two pages have this example, one of them without the level.
    placement = text(f"cluster:\n  num_nodes: 1\n  {level}actor,inference: 0-7\n", ONE_NODE, tmp_path)
    assert placement.components == ["actor", "inference"]
    for name in placement.components:
        assert [item.local_hardware_ranks for item in placement.get_placement(name)] == [(i,) for i in range(8)]


def test_the_large_example_plans_on_an_inventory_that_has_what_it_names(tmp_path):
    yaml = """\
cluster:
  num_nodes: 2
  component_placement:
    actor:
      node_group: a800
      placement: 0-8
    rollout:
      node_group: 4090
      placement: 0-8
    env:
      node_group: robot
      placement: 0-3:0-7
    agent:
      node_group: node
      placement: 0-1:0-200,2-3:201-511
"""
    placement = text(yaml, HETEROGENEOUS, tmp_path)
    assert {item.cluster_node_rank for item in placement.get_placement("actor")} == {0}
    assert {item.cluster_node_rank for item in placement.get_placement("rollout")} == {1}
    assert [(item.cluster_node_rank, item.local_hardware_ranks) for item in placement.get_placement("env")] == [
        (2, (0,)), (2, (0,)), (2, (1,)), (2, (1,)), (3, (0,)), (3, (0,)), (3, (1,)), (3, (1,)),
    ]  # fmt: skip
    nodes = [item.cluster_node_rank for item in placement.get_placement("agent")]
    assert [nodes.count(rank) for rank in range(4)] == [101, 100, 156, 155]
    assert nodes == sorted(nodes)
    assert len(nodes) == 512


def test_a_mixed_placement_deduces_the_ranks_between(tmp_path):
    yaml = "cluster:\n  num_nodes: 2\n  component_placement:\n    actor: 0-1:0-3,3-5,7-10:7-14\n"
    placements = text(yaml, Topology.from_shorthand("2x8"), tmp_path).get_placement("actor")
    where = [item.cluster_node_rank * 8 + item.local_hardware_ranks[0] for item in placements]
    assert where == [0, 0, 1, 1, 3, 4, 5, 7, 7, 8, 8, 9, 9, 10, 10]


def test_two_ranges_without_processes_continue_their_numbers(tmp_path):
    yaml = "cluster:\n  num_nodes: 1\n  component_placement:\n    actor: 0-3,4-7\n"
    assert text(yaml, ONE_NODE, tmp_path).get_world_size("actor") == 8


def test_five_resources_make_five_processes(tmp_path):
    yaml = "cluster:\n  num_nodes: 1\n  component_placement:\n    actor: 0-4\n"
    assert text(yaml, ONE_NODE, tmp_path).get_world_size("actor") == 5


def test_the_conf_of_the_test_worker_plans(tmp_path):
    yaml = """\
cluster:
  num_nodes: 1
  component_placement:
    test_worker: # Component name
      node_group: a800
      placement: 0-3 # one process on each of the GPUs 0-3 of node group 'a800'

  node_groups:
    - label: a800
      node_ranks: 0
"""
    placement = text(yaml, ONE_NODE, tmp_path)
    assert [item.visible_accelerators for item in placement.get_placement("test_worker")] == [
        ("0",), ("1",), ("2",), ("3",),
    ]  # fmt: skip
    assert {item.node_group_label for item in placement.get_placement("test_worker")} == {"a800"}


@pytest.mark.parametrize("labels", ["a800,4090", ["a800", "4090"], "a800, 4090"])
def test_hardware_ranks_run_through_several_groups_in_order(labels):
    topology = Topology.from_dict(
        {
            "nodes": [{"accelerators": 8}, {"accelerators": 8}],
            "groups": [{"label": "a800", "node_ranks": [0]}, {"label": "4090", "node_ranks": [1]}],
        }
    )
    config = {"cluster": {"component_placement": {"actor": {"node_group": labels, "placement": "0-15"}}}}
    placements = ComponentPlacement(config, topology).get_placement("actor")
    assert [item.node_group_label for item in placements] == ["a800"] * 8 + ["4090"] * 8


def test_groups_named_the_other_way_round_count_the_other_way_round():
    topology = Topology.from_dict(
        {
            "nodes": [{"accelerators": 8}, {"accelerators": 8}],
            "groups": [{"label": "a800", "node_ranks": [0]}, {"label": "4090", "node_ranks": [1]}],
        }
    )
    config = {"cluster": {"component_placement": {"actor": {"node_group": "4090,a800", "placement": "7-8"}}}}
    placements = ComponentPlacement(config, topology).get_placement("actor")
    assert [(item.cluster_node_rank, item.local_hardware_ranks) for item in placements] == [(1, (7,)), (0, (0,))]
    assert [item.placement_node_rank for item in placements] == [0, 1]


@pytest.mark.parametrize(
    "placement",
    [
        "0-3:1-4",  # process ranks must start at 0
        "0-1:0-1,2-3:3-4",  # and have no gap
        "0-1:0-1,2-3:1-2",  # and come once
        "0-3:0-2",  # one count divides the other
        "0-3:all",  # process ranks are never `all`
    ],
)
def test_a_broken_rule_is_an_assertion_error_as_the_documents_promise(placement):
    with pytest.raises(AssertionError) as caught:
        ComponentPlacement({"cluster": {"component_placement": {"actor": placement}}}, ONE_NODE)
    assert isinstance(caught.value, PlacementError)
    assert isinstance(caught.value, ValueError)


def test_a_process_never_has_two_nodes():
    with pytest.raises(PlacementError, match="never leaves its node"):
        PackedPlacementStrategy(6, 9, num_hardware_per_process=4).get_placement(Topology.from_shorthand("2x8"))
