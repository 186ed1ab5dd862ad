"""Topologies: the shorthand, the inventory, groups, and ranks that convert both ways."""

from __future__ import annotations

import json

import pytest
import yaml

from roost import (
    Accelerator,
    AcceleratorType,
    ConfigError,
    DeclaredHardware,
    EnvConfig,
    Node,
    NodeGroup,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    PlacementError,
    Topology,
    register_accelerator_type,
)
from roost.config.hardware import visible_devices
from roost.config.topology import topology_of

INVENTORY = {
    "nodes": [
        {
            "accelerators": {"count": 8, "type": "nvidia", "model": "H100", "memory": "80GiB"},
            "name": "a",
            "address": "10.0.0.2",
            "labels": {"rack": "r1", "nvlink": "x"},
            "cpus": 128,
            "memory": "1TiB",
        },
        {"accelerators": [{"type": "amd", "model": "MI300X"}, {"type": "amd", "model": "MI250"}]},
        {"accelerators": 0},
    ],
    "groups": [
        {"label": "h100", "node_ranks": [0]},
        {
            "label": "robot",
            "node_ranks": [1, 2],
            "hardware": {"type": "Franka", "configs": [{"node_rank": 2, "ip": "10.0.0.9"}, {"node_rank": 1}]},
            "env_configs": [{"node_ranks": [2], "env_vars": {"A": "1"}, "python_interpreter_path": "/opt/py"}],
        },
        {"label": "bare", "node_ranks": [0, 1], "ignore_hardware": True},
    ],
}


def test_the_shorthand_counts_nodes_and_accelerators():
    topology = Topology.from_shorthand("4x8:H100, 2x4:4090,1x0")
    assert [len(node.accelerators) for node in topology.nodes] == [8, 8, 8, 8, 4, 4, 0]
    assert [node.accelerators[0].model for node in topology.nodes[3:5]] == ["H100", "4090"]
    assert (topology.num_nodes, topology.num_accelerators) == (7, 40)


@pytest.mark.parametrize("text", ["", "8", "2x", "x8", "2x8x2", "0x8", "-1x8", "2x8,", "2x8:", "999999999x8", "2x9999"])
def test_an_invalid_shorthand_is_refused(text):
    with pytest.raises(ConfigError):
        Topology.from_shorthand(text)


def test_an_inventory_reads_every_key():
    topology = Topology.from_dict(INVENTORY)
    first = topology.nodes[0]
    assert first.accelerators[0] == Accelerator(model="H100", memory=80 * 2**30)
    assert (first.name, first.address, first.cpus, first.memory) == ("a", "10.0.0.2", 128, 2**40)
    assert dict(first.labels) == {"rack": "r1", "nvlink": "x"}
    assert [item.model for item in topology.nodes[1].accelerators] == ["MI300X", "MI250"]
    assert topology.nodes[1].accelerator_type == "amd"
    assert topology.nodes[2].accelerator_type == "none"


def test_an_inventory_survives_being_written_as_yaml_and_as_json(tmp_path):
    topology = Topology.from_dict(INVENTORY)
    for name, text in (("i.yaml", yaml.safe_dump(topology.to_dict())), ("i.json", json.dumps(topology.to_dict()))):
        (tmp_path / name).write_text(text)
        assert Topology.from_file(tmp_path / name) == topology


def test_a_json_inventory_may_be_indented_with_tabs(tmp_path):
    (tmp_path / "i.json").write_text(json.dumps(INVENTORY, indent="\t"))
    assert Topology.from_file(tmp_path / "i.json") == Topology.from_dict(INVENTORY)


def test_declared_hardware_is_ranked_by_node_and_then_as_declared():
    space = Topology.from_dict(INVENTORY).space("robot")
    assert [(spot.node_rank, spot.local_rank, spot.kind) for spot in map(space.locate, range(2))] == [
        (1, 0, "Franka"),
        (2, 0, "Franka"),
    ]


def test_the_reserved_groups_need_no_declaration():
    topology = Topology.from_dict(INVENTORY)
    assert topology.space().count == topology.space("cluster").count == 10
    assert topology.space("node").count == 3
    assert topology.space("node").is_bare
    assert topology.space("bare").is_bare


def test_a_cluster_without_accelerators_counts_nodes():
    assert Topology.from_shorthand("3x0").space().is_bare


def test_ranks_continue_over_several_groups():
    space = Topology.from_dict(INVENTORY).space("robot,h100")
    assert space.count == 10
    assert space.locate(1).kind == "Franka"
    assert space.locate(2) == (0, 0, "accelerator", "h100")
    assert space.rank_of(0, 7, "accelerator") == 9


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ("nowhere", "there is no node group 'nowhere'"),
        ("h100,h100", "named twice"),
        ("h100,cluster", "both hold the accelerator hardware of node rank 0"),
        ("h100,bare", "bare nodes and the rest has hardware"),
        ("h100,", "label is empty"),
    ],
)
def test_groups_that_cannot_be_used_together_are_refused(labels, said):
    with pytest.raises(PlacementError, match=said):
        Topology.from_dict(INVENTORY).space(labels)


def test_a_place_that_does_not_exist_has_no_rank():
    space = Topology.from_shorthand("2x8").space()
    for place in ((0, 8), (2, 0), (0, -1)):
        with pytest.raises(PlacementError):
            space.rank_of(*place)


def test_a_topology_can_be_made_in_code():
    topology = Topology(nodes=(Node(accelerators=(Accelerator(model="H100"),) * 2), Node()))
    assert topology.space().count == 2
    assert topology_of(topology) is topology


def test_anything_with_a_topology_is_a_cluster():
    class Cluster:
        topology = Topology.from_shorthand("1x2")

    assert topology_of(Cluster()).num_accelerators == 2
    with pytest.raises(ConfigError, match="needs a Topology"):
        topology_of("2x8")


def test_groups_of_the_job_join_those_of_the_inventory():
    topology = Topology.from_dict(INVENTORY)
    assert topology.with_groups(topology.groups) == topology
    other = Topology.from_dict({**INVENTORY, "groups": [{"label": "h100", "node_ranks": [1]}]})
    with pytest.raises(ConfigError, match="they differ"):
        topology.with_groups(other.groups)


def test_a_group_outside_the_nodes_is_refused():
    with pytest.raises(ConfigError, match="names node ranks 1-2, but the inventory has 1 node"):
        Topology.from_dict({"nodes": [{"accelerators": 1}], "groups": [{"label": "a", "node_ranks": "0-2"}]})
    groups = Topology.from_dict(INVENTORY).groups
    with pytest.raises(ConfigError, match="the cluster has only 0"):
        Topology.from_shorthand("1x8").with_groups(groups)


def test_a_new_vendor_is_registered_once():
    register_accelerator_type("testchip", variable="TESTCHIP_VISIBLE", prefix="dev:")
    register_accelerator_type("testchip", variable="TESTCHIP_VISIBLE", prefix="dev:")
    assert visible_devices("testchip").value(["0", "2"]) == "dev:0,2"
    topology = Topology.from_dict({"nodes": [{"accelerators": {"count": 1, "type": "testchip"}}]})
    assert topology.nodes[0].accelerator_type == "testchip"
    for name, variable in (("testchip", "OTHER"), ("none", "X"), ("Bad Name", "X"), ("good", "NOT A NAME")):
        with pytest.raises(ConfigError):
            register_accelerator_type(name, variable=variable)
    with pytest.raises(ConfigError, match="is not known"):
        visible_devices("nochip")


def test_conversions_stay_fast_on_a_large_cluster():
    space = Topology.from_shorthand("100000x8").space()
    assert space.locate(799_999) == (99_999, 7, "accelerator", "cluster")
    assert space.rank_of(99_999, 7) == 799_999


def test_hardware_declared_by_job_and_inventory_is_refused():
    groups = [{"label": "r", "node_ranks": 0, "hardware": {"type": "Franka", "configs": [{"node_rank": 0}]}}]
    one = Topology.from_dict({"nodes": [{"accelerators": 0}], "groups": groups})
    other = Topology.from_dict({"nodes": [{"accelerators": 0}], "groups": [{**groups[0], "label": "s"}]})
    with pytest.raises(ConfigError, match="both declare 'Franka' on node rank 0"):
        one.with_groups(other.groups)


TWO = (Node(), Node())
ARM = DeclaredHardware.make("Franka", 0)


def grouped(**fields) -> Topology:
    return Topology(nodes=TWO, groups=(NodeGroup(**{"label": "a", "node_ranks": (0,), **fields}),))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Topology(nodes=()),
        lambda: Topology(nodes=[Node()]),
        lambda: Topology(nodes=(Node(accelerators=(Accelerator(), Accelerator(type=AcceleratorType.AMD))),)),
        lambda: grouped(node_ranks=()),
        lambda: grouped(node_ranks=(1, 0)),
        lambda: grouped(node_ranks=(-1,)),
        lambda: grouped(node_ranks=(2,)),
        lambda: grouped(node_ranks=[0]),
        lambda: grouped(node_ranks=("0",)),
        lambda: grouped(label="a,b"),
        lambda: grouped(label="a b"),
        lambda: grouped(label=5),
        lambda: grouped(label="node"),
        lambda: grouped(hardware=(DeclaredHardware.make("Franka", 1),)),
        lambda: grouped(hardware=(ARM, DeclaredHardware.make("Other", 0))),
        lambda: grouped(hardware=(DeclaredHardware.make("accelerator", 0),)),
        lambda: grouped(hardware=(DeclaredHardware.make("node", 0),)),
        lambda: grouped(hardware=(ARM,), ignore_hardware=True),
        lambda: grouped(env_configs=(EnvConfig(node_ranks=(1,)),)),
        lambda: grouped(env_configs=(EnvConfig(node_ranks=(0,)), EnvConfig(node_ranks=(0,)))),
    ],
)
def test_a_topology_made_in_code_is_checked_as_a_file_is(make):
    with pytest.raises(ConfigError):
        make()


def test_values_without_an_order_are_sorted():
    variables = (("B", "2"), ("A", "1"))
    arms = (DeclaredHardware.make("Franka", 1), ARM)
    made = grouped(node_ranks=(0, 1), hardware=arms, env_configs=(EnvConfig(node_ranks=(0,), env_vars=variables),))
    assert [item.node_rank for item in made.groups[0].hardware] == [0, 1]
    assert Topology.from_dict(made.to_dict()) == made


def test_settings_that_are_not_json_are_refused():
    for value in (float("nan"), object()):
        with pytest.raises(ConfigError, match="cannot be written as JSON"):
            DeclaredHardware.make("Franka", 0, {"x": value})


def test_a_topology_can_be_hashed():
    group = NodeGroup(
        label="r",
        node_ranks=(0,),
        hardware=(DeclaredHardware.make("Franka", 0, {"ip": ["10.0.0.1"]}),),
        env_configs=(EnvConfig(node_ranks=(0,), env_vars=(("A", "1"),)),),
    )
    made = Topology(nodes=TWO, groups=(group,))
    assert hash(made) == hash(Topology.from_dict(made.to_dict()))
    assert made.env_config("r", 0).env_vars == (("A", "1"),)
    assert made.env_config("r", 1) is None


def test_strategies_are_values():
    assert PackedPlacementStrategy(0, 3) == PackedPlacementStrategy(start_accelerator_id=0, end_accelerator_id=3)
    assert "stride=2" in repr(PackedPlacementStrategy(0, 3, 2, 2))
    with pytest.raises(AttributeError):
        PackedPlacementStrategy(0, 3).stride = 5


def test_a_node_in_two_groups_cannot_have_two_ranks():
    topology = Topology.from_dict(
        {
            "nodes": [{"accelerators": 0}] * 3,
            "groups": [{"label": "a", "node_ranks": "0-1"}, {"label": "b", "node_ranks": "1-2"}],
        }
    )
    with pytest.raises(PlacementError, match="both hold node rank 1"):
        NodePlacementStrategy([0, 1, 2, 3], ["a", "b"]).get_placement(topology)


def test_isolation_is_true_or_false():
    with pytest.raises(PlacementError, match="True or False, not 'no'"):
        PackedPlacementStrategy(0, 1).get_placement(Topology.from_shorthand("1x2"), "no")
