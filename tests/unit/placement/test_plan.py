"""The plan as a value: JSON, hash, environment, diff, findings."""

from __future__ import annotations

import dataclasses
import json
import pickle
from xml.etree import ElementTree

import pytest

from roost import ConfigError, ModelParallelComponentPlacement, PlacementError, Plan, Topology, lint, make_plan
from roost.placement.environment import worker_interpreter
from roost.placement.plan import Piece, WorkerId

TOPOLOGY = Topology.from_dict(
    {
        "nodes": [
            {"accelerators": 4},
            {"accelerators": {"count": 4, "type": "amd"}},
            {"accelerators": {"count": 2, "type": "intel"}},
            {"accelerators": {"count": 2, "type": "ascend"}},
            {"accelerators": 0},
        ],
        "groups": [
            {
                "label": "g",
                "node_ranks": "0-1",
                "env_configs": [
                    {"node_ranks": 0, "env_vars": {"A": "zero", "B": "0"}},
                    {"node_ranks": 1, "env_vars": {"A": "one"}, "python_interpreter_path": "/opt/py"},
                ],
            },
            {"label": "r", "node_ranks": 0, "hardware": {"type": "Franka", "configs": [{"node_rank": 0}]}},
        ],
    }
)


def plan(topology=TOPOLOGY, **components) -> Plan:
    return make_plan({"cluster": {"num_nodes": topology.num_nodes, "component_placement": components}}, topology)


def on(group, placement):
    return {"node_group": group, "placement": placement}


def codes(made: Plan) -> list[str]:
    return [finding.code for finding in lint(made)]


def test_a_plan_survives_json():
    made = plan(actor=on("g", "0-7:0-3"), env=on("node", "0-4:0-9"), arm=on("r", "all"))
    data = json.loads(made.to_json())
    assert data["version"] == 1
    assert data["components"]["actor"]["world_size"] == 4
    assert data["components"]["actor"]["placements"][0]["local_hardware_ranks"] == [0, 1]
    assert Plan.from_json(made.to_json()) == made
    assert pickle.loads(pickle.dumps(made)) == made  # noqa: S301 - our own bytes


def test_the_hash_is_the_same_on_every_machine_and_differs_with_the_content():
    made = plan(Topology.from_shorthand("1x2"), actor="0-1")
    assert made.hash == "01e63e9e887a63528a98382040e8ee1be94bbf8e597efb89469be61c3e2e4f13"
    assert plan(Topology.from_shorthand("1x2"), actor="0-1").hash == made.hash
    assert plan(Topology.from_shorthand("1x2"), actor="0").hash != made.hash
    assert plan(Topology.from_shorthand("1x2:H100"), actor="0-1").hash != made.hash


def test_a_plan_that_was_edited_is_refused():
    data = plan(actor="0-1").to_dict()
    data["components"]["actor"]["placements"][0]["cluster_node_rank"] = 1
    with pytest.raises(ConfigError, match="edited after it was made"):
        Plan.from_dict(data)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"version": 2, "components": {}}', '{"version": 1, "components": 3, "topology": {}}']
)
def test_a_value_that_is_not_a_plan_is_refused(text):
    with pytest.raises(ConfigError):
        Plan.from_json(text)


def test_a_plan_cannot_be_changed():
    made = plan(actor="0")
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.components[0].placements[0].rank = 3


def test_an_isolated_worker_gets_its_own_devices_and_local_rank_zero():
    made = plan(actor=on("g", "0-7:0-3"))
    assert made.environment("actor", 3) == {
        "A": "one",
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "1",
        "HIP_VISIBLE_DEVICES": "2,3",
    }
    assert made.environment("actor", 0)["A"] == "zero"
    assert [worker_interpreter(made.topology, made.placement("actor", rank)) for rank in (0, 3)] == [None, "/opt/py"]


def test_a_worker_that_is_not_isolated_sees_all_and_keeps_its_local_rank():
    config = {"cluster": {"component_placement": {"actor": "0-3"}}}
    made = make_plan(config, TOPOLOGY, isolate_accelerator=False)
    variables = made.environment("actor", 2)
    assert (variables["CUDA_VISIBLE_DEVICES"], variables["LOCAL_RANK"]) == ("0,1,2,3", "2")


def test_each_vendor_has_its_variable():
    made = plan(actor="0,4,9,11")
    told = [made.environment("actor", rank) for rank in range(4)]
    assert told[0]["CUDA_VISIBLE_DEVICES"] == "0"
    assert told[1]["HIP_VISIBLE_DEVICES"] == "0"
    assert told[2]["ONEAPI_DEVICE_SELECTOR"] == "level_zero:1"
    assert told[3]["ASCEND_RT_VISIBLE_DEVICES"] == "1"


def test_workers_without_accelerators_of_their_own_see_what_their_node_has():
    made = plan(env=on("node", "0:0-1,4:2"), arm=on("r", "0"))
    assert made.environment("env", 1)["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert made.environment("env", 1)["LOCAL_RANK"] == "1"
    assert made.environment("arm", 0)["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert not [name for name in made.environment("env", 2) if "VISIBLE" in name]


def test_the_error_for_a_missing_worker_names_those_that_exist():
    made = plan(actor="0-1", env=on("node", "0"))
    with pytest.raises(PlacementError, match=r"no rank 2: it has ranks 0-1"):
        made.environment("actor", 2)
    with pytest.raises(PlacementError, match="has no rank a"):
        made.placement("actor", "a")
    with pytest.raises(PlacementError, match=r"no component 'rollout'(.|\n)*'actor' and 'env'"):
        made.placement("rollout", 0)


def test_occupants_are_the_workers_of_each_piece():
    made = plan(actor="0-1:0", reward="0", env=on("node", "4:0-1"))
    assert made.occupants() == {
        Piece(0, "accelerator", 0): [WorkerId("actor", 0), WorkerId("reward", 0)],
        Piece(0, "accelerator", 1): [WorkerId("actor", 0)],
        Piece(4, "node", -1): [WorkerId("env", 0), WorkerId("env", 1)],
    }


def test_a_diff_lists_workers_that_moved_appeared_and_went():
    topology = Topology.from_shorthand("2x4")
    before = plan(topology, actor="0-3", rollout="4-5", old="6")
    after = plan(topology, actor="0-1,4-5", rollout="6-7", new="2")
    found = before.diff(after)
    assert [str(item.worker) for item in found.moved] == ["actor:2", "actor:3", "rollout:0", "rollout:1"]
    assert [str(worker) for worker in found.appeared] == ["new:0"]
    assert [str(worker) for worker in found.went] == ["old:0"]
    assert [(str(item.piece), item.before, item.after) for item in found.changed_hands] == [
        ("0:2", ("actor",), ("new",)),
        ("0:3", ("actor",), ()),
        ("1:0", ("rollout",), ("actor",)),
        ("1:1", ("rollout",), ("actor",)),
        ("1:2", ("old",), ("rollout",)),
        ("1:3", (), ("rollout",)),
    ]
    assert {item.worker.rank for item in found.changed_variables} == {0, 1}  # LOCAL_WORLD_SIZE is 2, not 4
    assert found.to_dict()["moved"][0] == {
        "worker": "actor:2",
        "before": {"node_rank": 0, "kind": "accelerator", "local_ranks": [2]},
        "after": {"node_rank": 1, "kind": "accelerator", "local_ranks": [0]},
    }
    assert found.to_dict()["facts"] == [
        {
            "what": "components",
            "of": None,
            "before": ["actor", "rollout", "old"],
            "after": ["actor", "rollout", "new"],
        }
    ]


def test_a_diff_as_json_has_the_hardware_as_an_inventory_has_it():
    groups = [{"label": "g", "node_ranks": 0}]
    small = Topology.from_dict({"nodes": [{"accelerators": 4}], "groups": groups})
    before, after = plan(small, actor="0-3"), plan(Topology.from_shorthand("1x4:H100,1x0"), actor="0-3")
    facts = [tuple(item.values()) for item in before.diff(after).to_dict()["facts"]]
    assert facts == [
        ("num_nodes", None, 1, 2),
        ("cluster", None, {"num_nodes": 1, "num_accelerators": 4}, {"num_nodes": 2, "num_accelerators": 4}),
        ("node", 0, {"accelerators": 4}, {"accelerators": {"count": 4, "type": "nvidia", "model": "H100"}}),
        ("node", 1, None, {"accelerators": 0}),
        ("node_group", "g", small.groups[0].to_dict(), None),
    ]


def test_a_diff_covers_more_than_places():
    small, large = Topology.from_shorthand("1x4"), Topology.from_shorthand("1x4,1x0")
    found = plan(small, actor="0-3").diff(plan(large, actor="0-3"))
    assert found.facts == (
        ("num_nodes", "1", "2"),
        ("cluster", "1 node, 4 accelerators", "2 nodes, 4 accelerators"),
        ("node 1", "none", "no accelerators"),
    )
    assert found
    assert not found.moved


def test_lint_finds_nothing_in_a_good_plan():
    assert lint(plan(Topology.from_shorthand("2x4"), actor="0-7")) == ()


def test_lint_finds_idle_accelerators():
    (finding,) = lint(plan(Topology.from_shorthand("3x4"), actor="0-3"))
    assert str(finding) == "warning: 8 of 12 accelerators idle: nodes 1-2: 0-3 [idle]"


def test_lint_reports_sharing_as_information():
    (finding,) = lint(plan(Topology.from_shorthand("1x4"), actor="0-3", reward="1-2"))
    assert str(finding) == "info: actor and reward share 2 accelerators: node 0: 1-2 [shared]"


def test_lint_warns_of_components_that_overlap_in_part():
    made = plan(Topology.from_shorthand("4x8"), actor="0-15", rollout="8-23", reward="24-31")
    (finding,) = lint(made)
    assert (finding.code, finding.level) == ("overlap", "warning")
    assert finding.message == "actor (0-15) and rollout (8-23) overlap in part: both have hardware ranks 8-15"


def test_an_overlap_of_components_on_different_node_groups_is_told_by_node():
    groups = [{"label": "a", "node_ranks": "0-1"}, {"label": "b", "node_ranks": "1-2"}]
    topology = Topology.from_dict({"nodes": [{"accelerators": 2}] * 3, "groups": groups})
    made = plan(topology, actor={"node_group": "a", "placement": "all"}, env={"node_group": "b", "placement": "all"})
    (finding,) = lint(made)
    assert finding.message == "actor and env overlap in part: both are on accelerators of node 1: 0-1"


def test_three_components_have_each_pair_that_overlaps():
    made = plan(Topology.from_shorthand("1x8"), a="0-3", b="2-5", c="3-7", d="0-7")
    assert [item.message.partition(" overlap")[0] for item in lint(made) if item.code == "overlap"] == [
        "a (0-3) and b (2-5)",
        "a (0-3) and c (3-7)",
        "b (2-5) and c (3-7)",
    ]


def test_lint_finds_an_uneven_spread():
    (finding,) = lint(plan(Topology.from_shorthand("2x4"), actor="0-3,4:4-6,5-7:7-9"))
    assert str(finding) == "warning: actor is spread unevenly: 6 on 1 node and 4 on 1 node [uneven]"
    assert codes(plan(Topology.from_shorthand("2x0"), env=on("node", "0-1:0-2"))) == []


def test_lint_accepts_a_component_that_fills_different_nodes():
    assert codes(plan(Topology.from_shorthand("1x8:H100,1x4:4090"), actor="all")) == []
    assert codes(plan(Topology.from_shorthand("2x4"), actor="0-4")) == ["idle", "uneven"]
    # One more is uneven on hardware, but not on bare nodes.
    assert "uneven" in codes(plan(Topology.from_shorthand("2x4"), actor="0-3,4-6"))


def test_lint_finds_parallel_sizes_that_place_nothing():
    config = {
        "cluster": {"component_placement": {"actor,rollout,critic": "0-3"}},
        "actor": {"model": {"tensor_model_parallel_size": 4}},
        "rollout": {"tensor_parallel_size": 2},
    }
    (warning,) = [item for item in lint(make_plan(config, Topology.from_shorthand("1x4"))) if item.level == "warning"]
    assert warning.code == "sizes-ignored"
    assert "there is 'critic' besides actor, rollout, inference and reward" in warning.message
    del config["rollout"]
    config["cluster"]["component_placement"] = {"actor,rollout": "0-3"}
    (warning,) = [item for item in lint(make_plan(config, Topology.from_shorthand("1x4"))) if item.level == "warning"]
    assert "only actor.model.tensor_model_parallel_size is given" in warning.message
    config["actor"]["model"]["tensor_model_parallel_size"] = 1
    assert "sizes-ignored" not in codes(make_plan(config, Topology.from_shorthand("1x4")))
    asked = make_plan(config, Topology.from_shorthand("1x4"), placement="hybrid")
    assert "sizes-ignored" not in codes(asked)


def test_lint_finds_accelerators_that_are_apart():
    from roost import ComponentPlan, FlexiblePlacementStrategy

    topology = Topology.from_shorthand("1x4")
    placements = tuple(FlexiblePlacementStrategy([[0, 3], [1, 2]]).get_placement(topology))
    component = ComponentPlan(name="a", node_groups=(), hardware_ranks=(0, 1, 2, 3), placements=placements)
    made = Plan(topology=topology, components=(component,))
    assert [finding.message for finding in lint(made)] == [
        "a:0 has accelerators 0,3 of node 0, which are apart where 2 neighbours would do"
    ]


def model_parallel(shape, components, *, tp=1, pp=1, rollout_tp=1, inference=None) -> Plan:
    config = {
        "cluster": {"component_placement": components},
        "algorithm": {"recompute_logprobs": True},
        "actor": {"model": {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}},
        "rollout": {"tensor_parallel_size": rollout_tp},
    }
    if inference:
        config["inference"] = {"model": {"tensor_model_parallel_size": inference}}
    return ModelParallelComponentPlacement(config, Topology.from_shorthand(shape)).plan()


def test_lint_accepts_a_strided_rollout():
    assert codes(model_parallel("1x4", {"actor,rollout": "0-3"}, tp=4, rollout_tp=2)) == ["shared"]


def test_lint_finds_a_tensor_parallel_group_cut_by_a_node():
    made = model_parallel("2x4", {"actor": "2-5", "rollout": "6-7"}, tp=4)
    (finding,) = [finding for finding in lint(made) if finding.code == "tensor-parallel-cut"]
    assert finding.message == "the tensor-parallel group actor:0-3 is cut by a node's edge: nodes 0-1"


def test_lint_finds_inference_workers_that_are_left_over():
    made = model_parallel("1x8", {"actor": "0", "rollout": "1", "inference": "2-7"}, inference=4)
    messages = [finding.message for finding in lint(made) if finding.code == "left-over"]
    assert messages == ["inference has 6 workers, and 4 hold one copy of the model: 2 left over"]


def test_lint_finds_a_num_nodes_that_differs_from_the_cluster():
    made = make_plan({"cluster": {"num_nodes": 3, "component_placement": {"a": "0-7"}}}, Topology.from_shorthand("2x4"))
    assert [str(finding) for finding in lint(made)] == [
        "warning: cluster.num_nodes is 3, but the plan is for 2 nodes [num-nodes]"
    ]


def test_a_diff_of_nodes_lists_the_fields_that_differ():
    def of(**fields) -> Plan:
        return plan(Topology.from_dict({"nodes": [{"accelerators": 2, **fields}]}), actor="0")

    one = [{"model": "A", "memory": 1}, {"model": "B"}]
    other = [{"model": "A"}, {"model": "B", "memory": 1}]
    assert of(accelerators=one).diff(of(accelerators=other)).facts == (
        ("node 0", "1 x A of 1 bytes + 1 x B", "1 x A + 1 x B of 1 bytes"),
    )
    assert of(name="h").diff(of(address="h")).facts == (
        ("node 0", "name h, address not set", "name not set, address h"),
    )


def test_hardware_changes_hands_only_between_components():
    topology = Topology.from_shorthand("1x4")
    before, after = plan(topology, actor="0", reward="0"), plan(topology, reward="0", actor="0")
    assert before.diff(after).changed_hands == ()


def test_a_component_without_workers_is_refused():
    from roost import ComponentPlan

    with pytest.raises(PlacementError, match="has no workers"):
        ComponentPlan(name="a", node_groups=(), hardware_ranks=(), placements=())


def test_a_plan_cannot_be_changed_through_what_it_returns():
    made = plan(arm=on("r", "0"))
    before = made.hash
    made.topology.groups[1].hardware[0].settings["x"] = 1
    made.to_dict()["topology"]["groups"][1]["hardware"]["configs"][0]["x"] = 1
    assert made.hash == before


def test_a_group_is_made_once_however_many_workers_ask_for_it():
    # Each worker's environment needs its group: without a cache, a comparison would be quadratic.
    topology = Topology.from_shorthand("3x8")
    assert topology.group("cluster") is topology.group("cluster")
    assert topology.group("node") is topology.group("node")


def test_only_keeps_the_components_that_are_named():
    made = plan(actor="0", reward="1")
    assert [component.name for component in made.only(["reward"]).components] == ["reward"]
    with pytest.raises(PlacementError):
        made.only(["nobody"])


def test_a_plan_shows_itself_where_it_is_printed_and_in_a_notebook():
    job = {"cluster": {"num_nodes": 1, "component_placement": {"actor": "0-3", "rollout": "4-7:0-1"}}}
    plan = make_plan(job, Topology.from_shorthand("1x8"))
    lines = str(plan).splitlines()
    assert lines[0].startswith("1 node · 8 accelerators · 6 workers")
    assert "[rollout 0 ════][rollout 1 ════]" in str(plan)
    assert max(map(len, lines)) <= 80
    assert ElementTree.fromstring(plan._repr_svg_()).tag == "{http://www.w3.org/2000/svg}svg"  # noqa: S314 - our own
