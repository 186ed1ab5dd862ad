"""Mistakes in the arguments of the strategies: refused when the strategy is made, or when it places."""

from __future__ import annotations

import pytest

from roost import (
    ConfigError,
    FlexiblePlacementStrategy,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    PlacementError,
    Topology,
)

TWO_NODES = Topology.from_shorthand("2x8")
HUGE = 10**12
EDGE = "\n  hint: a process never leaves its node, and node rank 1 starts at hardware rank 8"
GROUPS = "\n  hint: there are 'cluster' and 'node'"
BARE = "\n  hint: use NodePlacementStrategy for bare nodes"
BELOW = "end_hardware_rank 0 is below start_hardware_rank 7\n  hint: both ends are included"

MADE_WRONGLY = [
    (PackedPlacementStrategy, (), {}, "start_hardware_rank must be a whole number, not None"),
    (PackedPlacementStrategy, (0,), {}, "end_hardware_rank must be a whole number, not None"),
    (PackedPlacementStrategy, ("0", "7"), {}, "start_hardware_rank must be a whole number, not '0'"),
    (PackedPlacementStrategy, (0.0, 7), {}, "start_hardware_rank must be a whole number, not 0.0"),
    (PackedPlacementStrategy, (False, 7), {}, "start_hardware_rank must be a whole number, not False"),
    (PackedPlacementStrategy, ([0], 7), {}, "start_hardware_rank must be a whole number, not [0]"),
    (PackedPlacementStrategy, (-1, 7), {}, "start_hardware_rank is -1, and must be at least 0"),
    (PackedPlacementStrategy, (0, -1), {}, "end_hardware_rank is -1, and must be at least 0"),
    (PackedPlacementStrategy, (7, 0), {}, BELOW),
    (PackedPlacementStrategy, (0, 7, 0), {}, "num_hardware_per_process is 0, and must be at least 1"),
    (PackedPlacementStrategy, (0, 7, -1), {}, "num_hardware_per_process is -1, and must be at least 1"),
    (PackedPlacementStrategy, (0, 7, True), {}, "num_hardware_per_process must be a whole number, not True"),
    (PackedPlacementStrategy, (0, 7, 2.0), {}, "num_hardware_per_process must be a whole number, not 2.0"),
    (PackedPlacementStrategy, (0, 7, 1, 0), {}, "stride is 0, and must be at least 1"),
    (PackedPlacementStrategy, (0, 7, 1, -2), {}, "stride is -2, and must be at least 1"),
    (PackedPlacementStrategy, (0, 7, 1, None), {}, "stride must be a whole number, not None"),
    (
        PackedPlacementStrategy,
        (0, 7, 3),
        {},
        "hardware ranks 0-7 are 8, which 3 per process x stride 1 = 3 does not divide\n  hint: take 6 or 9 ranks",
    ),
    (
        PackedPlacementStrategy,
        (0, 7, 2, 3),
        {},
        "hardware ranks 0-7 are 8, which 2 per process x stride 3 = 6 does not divide\n  hint: take 6 or 12 ranks",
    ),
    (
        PackedPlacementStrategy,
        (0, 7, HUGE),
        {},
        f"hardware ranks 0-7 are 8, which {HUGE} per process x stride 1 = {HUGE} does not divide\n"
        f"  hint: take at least {HUGE} ranks",
    ),
    (PackedPlacementStrategy, (0, 7), {"node_group": ""}, "a node group's label is empty"),
    (PackedPlacementStrategy, (0, 7), {"node_group": "a,,b"}, "a node group's label is empty"),
    (PackedPlacementStrategy, (0, 7), {"node_group": ["a", "a"]}, "node group 'a' is named twice"),
    (
        PackedPlacementStrategy,
        (0, 7),
        {"start_accelerator_id": 0},
        "start_hardware_rank is given twice, once as start_accelerator_id",
    ),
    (
        PackedPlacementStrategy,
        (),
        {"start_accelerator_id": 0, "end_accelerator_id": None},
        "end_hardware_rank must be a whole number, not None",
    ),
    (
        PackedPlacementStrategy,
        (),
        {"start_accelerator_id": 0, "end_accelerator_id": 7, "num_accelerators_per_process": -1},
        "num_hardware_per_process is -1, and must be at least 1",
    ),
    (FlexiblePlacementStrategy, (), {}, "FlexiblePlacementStrategy takes hardware_ranks_list exactly once"),
    (FlexiblePlacementStrategy, (None,), {}, "FlexiblePlacementStrategy takes hardware_ranks_list exactly once"),
    (
        FlexiblePlacementStrategy,
        ([[0]],),
        {"accelerator_id_lists": [[0]]},
        "FlexiblePlacementStrategy takes hardware_ranks_list exactly once",
    ),
    (FlexiblePlacementStrategy, ("01",), {}, "hardware_ranks_list is a list of lists of hardware ranks"),
    (FlexiblePlacementStrategy, (5,), {}, "hardware_ranks_list is a list of lists of hardware ranks"),
    (
        FlexiblePlacementStrategy,
        ([],),
        {},
        "hardware_ranks_list is empty\n  hint: name one list of hardware ranks for each process",
    ),
    (
        FlexiblePlacementStrategy,
        ([[0], []],),
        {},
        "process 1 has no hardware\n  hint: name at least one hardware rank",
    ),
    (FlexiblePlacementStrategy, ([0, 1],), {}, "hardware_ranks_list[0] is not a list of hardware ranks"),
    (FlexiblePlacementStrategy, ([[0], "1"],), {}, "hardware_ranks_list[1] is not a list of hardware ranks"),
    (FlexiblePlacementStrategy, ([[0], None],), {}, "hardware_ranks_list[1] is not a list of hardware ranks"),
    (FlexiblePlacementStrategy, ([[[0]]],), {}, "a hardware rank of process 0 must be a whole number, not [0]"),
    (FlexiblePlacementStrategy, ([["0"]],), {}, "a hardware rank of process 0 must be a whole number, not '0'"),
    (FlexiblePlacementStrategy, ([[True]],), {}, "a hardware rank of process 0 must be a whole number, not True"),
    (FlexiblePlacementStrategy, ([[0], [1.0]],), {}, "a hardware rank of process 1 must be a whole number, not 1.0"),
    (FlexiblePlacementStrategy, ([[None]],), {}, "a hardware rank of process 0 must be a whole number, not None"),
    (FlexiblePlacementStrategy, ([[-1]],), {}, "a hardware rank of process 0 is -1, and must be at least 0"),
    (FlexiblePlacementStrategy, ([[3, 1, 3]],), {}, "process 0 names a hardware rank twice: [1, 3, 3]"),
    (NodePlacementStrategy, (None,), {}, "node_ranks is a list of node ranks, one for each process"),
    (NodePlacementStrategy, (0,), {}, "node_ranks is a list of node ranks, one for each process"),
    (NodePlacementStrategy, ("01",), {}, "node_ranks is a list of node ranks, one for each process"),
    (NodePlacementStrategy, ([],), {}, "node_ranks is empty\n  hint: name one node rank for each process"),
    (NodePlacementStrategy, ([True],), {}, "a node rank must be a whole number, not True"),
    (NodePlacementStrategy, ([0.5],), {}, "a node rank must be a whole number, not 0.5"),
    (NodePlacementStrategy, ([None],), {}, "a node rank must be a whole number, not None"),
    (NodePlacementStrategy, ([[0]],), {}, "a node rank must be a whole number, not [0]"),
    (NodePlacementStrategy, ([-1],), {}, "a node rank is -1, and must be at least 0"),
    (NodePlacementStrategy, ([0], "node,node"), {}, "node group 'node' is named twice"),
]


@pytest.mark.parametrize(("strategy", "arguments", "options", "message"), MADE_WRONGLY)
def test_a_strategy_with_a_wrong_argument_is_not_made(strategy, arguments, options, message):
    with pytest.raises(PlacementError) as caught:
        strategy(*arguments, **options)
    assert str(caught.value) == message


DO_NOT_FIT = [
    (
        PackedPlacementStrategy(0, 16),
        "PackedPlacementStrategy asks for hardware rank 16 of node group 'cluster', which has 0-15",
    ),
    (
        PackedPlacementStrategy(0, HUGE),
        f"PackedPlacementStrategy asks for hardware rank {HUGE} of node group 'cluster', which has 0-15",
    ),
    (
        PackedPlacementStrategy(0, HUGE - 1, HUGE),
        f"PackedPlacementStrategy asks for hardware rank {HUGE - 1} of node group 'cluster', which has 0-15",
    ),
    (
        PackedPlacementStrategy(0, 15, 16),
        "process 0 takes hardware ranks 0-15, which are on nodes 0-1" + EDGE,
    ),
    (
        PackedPlacementStrategy(2, 13, 4),
        "process 1 takes hardware ranks 6-9, which are on nodes 0-1" + EDGE,
    ),
    (
        PackedPlacementStrategy(0, 15, 2, 8),
        "process 0 takes hardware ranks 0,8, which are on nodes 0-1" + EDGE,
    ),
    (PackedPlacementStrategy(0, 7, node_group="a800"), "there is no node group 'a800'" + GROUPS),
    (PackedPlacementStrategy(0, 7, node_group=4090), "there is no node group '4090'" + GROUPS),
    (
        PackedPlacementStrategy(0, 1, node_group="node"),
        "PackedPlacementStrategy places on hardware, and node group 'node' has none" + BARE,
    ),
    (
        PackedPlacementStrategy(0, 1, node_group=["cluster", "node"]),
        "node groups 'cluster' and 'node' cannot be used together: 'node' has bare nodes and the rest has hardware\n"
        "  hint: a component takes either hardware or nodes",
    ),
    (
        FlexiblePlacementStrategy([[0], [16]]),
        "the placement asks for hardware rank 16 of node group 'cluster', which has 0-15",
    ),
    (
        FlexiblePlacementStrategy([[HUGE]]),
        f"the placement asks for hardware rank {HUGE} of node group 'cluster', which has 0-15",
    ),
    (FlexiblePlacementStrategy([[0], [8, 7]]), "process 1 takes hardware ranks 7-8, which are on nodes 0-1" + EDGE),
    (
        FlexiblePlacementStrategy([[0]], "node"),
        "FlexiblePlacementStrategy places on hardware, and node group 'node' has none" + BARE,
    ),
    (
        NodePlacementStrategy([0, 2]),
        "NodePlacementStrategy asks for node rank 2 of node group 'cluster', which has 0-1",
    ),
    (
        NodePlacementStrategy([HUGE]),
        f"NodePlacementStrategy asks for node rank {HUGE} of node group 'cluster', which has 0-1",
    ),
    (NodePlacementStrategy([0], "spare"), "there is no node group 'spare'" + GROUPS),
]


@pytest.mark.parametrize(("strategy", "message"), DO_NOT_FIT)
def test_a_strategy_that_does_not_fit_the_hardware_is_refused(strategy, message):
    with pytest.raises(PlacementError) as caught:
        strategy.get_placement(TWO_NODES)
    assert str(caught.value) == message


@pytest.mark.parametrize("cluster", [None, "2x8", 16, {"nodes": []}], ids=repr)
def test_a_strategy_needs_a_topology(cluster):
    with pytest.raises(ConfigError) as caught:
        PackedPlacementStrategy(0, 7).get_placement(cluster)
    assert str(caught.value) == (
        f"a placement needs a Topology or something that has one, not a {type(cluster).__name__}\n"
        '  hint: for example Topology.from_shorthand("2x8")'
    )


def test_a_cluster_whose_topology_is_none_is_refused():
    class NotYetConnected:
        topology = None

    with pytest.raises(ConfigError):
        PackedPlacementStrategy(0, 7).get_placement(NotYetConnected())


@pytest.mark.parametrize("label", [3.5, object(), [None], True], ids=lambda label: type(label).__name__)
@pytest.mark.parametrize(
    "make",
    [
        lambda label: PackedPlacementStrategy(0, 7, node_group=label),
        lambda label: FlexiblePlacementStrategy([[0]], label),
        lambda label: NodePlacementStrategy([0], label),
    ],
    ids=["packed", "flexible", "node"],
)
def test_a_node_group_that_is_not_a_label_is_refused(make, label):
    with pytest.raises(PlacementError, match="node group"):
        make(label).get_placement(TWO_NODES)


def test_a_number_too_long_to_print_is_refused():
    with pytest.raises(PlacementError):
        PackedPlacementStrategy(0, -(10**5000))
    with pytest.raises(PlacementError):
        PackedPlacementStrategy(0, 10**5000).get_placement(TWO_NODES)


def test_a_topology_without_nodes_is_refused():
    with pytest.raises((ConfigError, PlacementError)):
        NodePlacementStrategy([0]).get_placement(Topology(nodes=()))
