"""Mistakes in a config that is a dict or a DictConfig: there are no lines, so messages name the key."""

from __future__ import annotations

import pytest
from omegaconf import DictConfig, OmegaConf

from roost import ConfigError, JobConfig, PlacementError, Topology, make_plan

TWO_NODES = Topology.from_shorthand("2x8")
SIZES = {"actor": {"model": {"tensor_model_parallel_size": 2}}, "rollout": {"tensor_parallel_size": 2}}


def job(placement, **more):
    return {"cluster": {"num_nodes": 2, "component_placement": placement, **more}}


DICTS = [
    (
        "an empty dict",
        {},
        ConfigError,
        (
            "the config: the job has no section 'cluster'\n"
            "  hint: put num_nodes, component_placement and node_groups under 'cluster:'"
        ),
    ),
    ("cluster is a list", {"cluster": []}, ConfigError, "cluster: cluster must be a mapping, not a list"),
    ("cluster is text", {"cluster": "2x8"}, ConfigError, "cluster: cluster must be a mapping, not '2x8'"),
    ("cluster is None", {"cluster": None}, ConfigError, "cluster: cluster must be a mapping, not nothing"),
    (
        "component_placement is missing",
        {"cluster": {"num_nodes": 2}},
        ConfigError,
        "cluster: cluster lacks 'component_placement'",
    ),
    (
        "component_placement is a list",
        job(["0-7"]),
        ConfigError,
        "cluster.component_placement: component_placement must be a mapping, not a list",
    ),
    (
        "an unknown key",
        {"cluster": {"num_node": 2, "component_placement": {"actor": "0-7"}}},
        ConfigError,
        ("cluster.num_node: cluster has no key 'num_node'\n  hint: did you mean 'num_nodes'?"),
    ),
    (
        "num_nodes is True",
        {"cluster": {"num_nodes": True, "component_placement": {"actor": "0-7"}}},
        ConfigError,
        "cluster.num_nodes: num_nodes must be a whole number, not True",
    ),
    (
        "num_nodes is a fraction",
        {"cluster": {"num_nodes": 2.0, "component_placement": {"actor": "0-7"}}},
        ConfigError,
        "cluster.num_nodes: num_nodes must be a whole number, not 2.0",
    ),
    (
        "num_nodes is not a number",
        {"cluster": {"num_nodes": float("nan"), "component_placement": {"actor": "0-7"}}},
        ConfigError,
        "cluster.num_nodes: num_nodes must be a whole number, not nan",
    ),
    (
        "num_nodes is None",
        {"cluster": {"num_nodes": None, "component_placement": {"actor": "0-7"}}},
        ConfigError,
        "cluster.num_nodes: num_nodes has no value",
    ),
    (
        "num_nodes may have been a pair",
        {"cluster": {"num_nodes": 60_000_001, "component_placement": {"actor": "0-7"}}},
        ConfigError,
        (
            "cluster.num_nodes: num_nodes is 60000001, and may be at most 1000000\n"
            "  hint: YAML 1.1 reads an unquoted 1000000:1 as 60000001: if that was meant, quote it"
        ),
    ),
    (
        "8:0 that YAML made 480",
        job({"actor": 480}),
        PlacementError,
        (
            "cluster.component_placement.actor: component 'actor' asks for hardware rank 480 of node group "
            "'cluster', which has 0-15\n"
            "    480\n"
            "    ^^^\n"
            "  hint: YAML 1.1 reads an unquoted 8:0 as 480: if that was meant, quote it"
        ),
    ),
    (
        "0-3:0-1 with one end that YAML made a number",
        job({"actor": {"placement": 600}}),
        PlacementError,
        (
            "cluster.component_placement.actor.placement: component 'actor' asks for hardware rank 600 of "
            "node group 'cluster', which has 0-15\n"
            "    600\n"
            "    ^^^\n"
            "  hint: YAML 1.1 reads an unquoted 10:0 as 600: if that was meant, quote it"
        ),
    ),
    (
        "a node group's pair that YAML made 60",
        job({"actor": {"node_group": "node", "placement": 60}}),
        PlacementError,
        (
            "cluster.component_placement.actor.placement: component 'actor' asks for node rank 60 of node "
            "group 'node', which has 0-1\n"
            "    60\n"
            "    ^^\n"
            "  hint: YAML 1.1 reads an unquoted 1:0 as 60: if that was meant, quote it"
        ),
    ),
    (
        "no that YAML made False",
        job({False: "0-7"}),
        ConfigError,
        (
            "cluster.component_placement.False: a key of component_placement is the boolean False\n"
            "  hint: YAML 1.1 reads an unquoted no, off or false as a boolean: quote it"
        ),
    ),
    (
        "on that YAML made True",
        job({True: "0-7"}),
        ConfigError,
        (
            "cluster.component_placement.True: a key of component_placement is the boolean True\n"
            "  hint: YAML 1.1 reads an unquoted yes, on or true as a boolean: quote it"
        ),
    ),
    (
        "a placement of False",
        job({"actor": False}),
        ConfigError,
        (
            "cluster.component_placement.actor: component 'actor': the placement is the boolean False\n"
            "  hint: YAML 1.1 reads an unquoted no, off or false as a boolean: quote it"
        ),
    ),
    (
        "a placement that is a fraction",
        job({"actor": 1.5}),
        ConfigError,
        (
            "cluster.component_placement.actor: component 'actor': the placement is the number 1.5\n"
            "  hint: quote it to keep it as typed"
        ),
    ),
    (
        "a placement of None",
        job({"actor": None}),
        ConfigError,
        "cluster.component_placement.actor: component 'actor': the placement has no value",
    ),
    (
        "a placement below zero",
        job({"actor": -1}),
        PlacementError,
        (
            "cluster.component_placement.actor: component 'actor': ranks cannot be negative\n"
            "    -1\n"
            "    ^\n"
            "  hint: ranks count from 0"
        ),
    ),
    (
        "a placement that is an object",
        job({"actor": {1, 2}}),
        ConfigError,
        "cluster.component_placement.actor: a value of the type set is not allowed here",
    ),
    (
        "a placement of bytes",
        job({"actor": b"0-7"}),
        ConfigError,
        "cluster.component_placement.actor: a value of the type bytes is not allowed here",
    ),
    (
        "a placement out of range",
        job({"actor": "0-3,8-16"}),
        PlacementError,
        (
            "cluster.component_placement.actor: component 'actor' asks for hardware rank 16 of node group "
            "'cluster', which has 0-15\n"
            "    0-3,8-16\n"
            "          ^^\n"
            "  hint: ranges include both ends; write 8-15"
        ),
    ),
    (
        "a placement with a word",
        job({"actor": "0-3,x"}),
        PlacementError,
        (
            "cluster.component_placement.actor: component 'actor': expected a resource rank, found 'x'\n"
            "    0-3,x\n"
            "        ^\n"
            "  hint: ranks are numbers from 0 on"
        ),
    ),
    (
        "a list out of range",
        job({"actor": ["0-3", 16]}),
        PlacementError,
        (
            "cluster.component_placement.actor[1]: component 'actor' asks for hardware rank 16 of node group "
            "'cluster', which has 0-15\n"
            "    16\n"
            "    ^^\n"
            "  hint: ranks count from 0"
        ),
    ),
    (
        "a list that holds None",
        job({"actor": [0, None]}),
        ConfigError,
        "cluster.component_placement.actor[1]: component 'actor': the placement has no value",
    ),
    (
        "a list that holds a dict",
        job({"actor": [{"0": "3"}]}),
        ConfigError,
        "cluster.component_placement.actor[0]: component 'actor': the placement must be a single value, not a mapping",
    ),
    (
        "a name that is a fraction",
        job({4.5: "0-7"}),
        ConfigError,
        (
            "cluster.component_placement.4.5: a key of component_placement is the number 4.5\n"
            "  hint: quote it to keep it as typed"
        ),
    ),
    (
        "a name that is None",
        job({None: "0-7"}),
        ConfigError,
        "cluster.component_placement.None: a key of component_placement has no value",
    ),
    (
        "a name that is a tuple",
        job({("actor", "rollout"): "0-7"}),
        ConfigError,
        (
            "cluster.component_placement.('actor', 'rollout'): a key of component_placement must be a single "
            "value, not a list"
        ),
    ),
    (
        "one name as text and as a number",
        job({4090: "0-3", "4090": "4-7"}),
        ConfigError,
        "cluster.component_placement.4090: component_placement names '4090' twice",
    ),
    (
        "a component named twice",
        job({"actor": "0-3", "rollout,actor": "4-7"}),
        ConfigError,
        "cluster.component_placement.rollout,actor: component 'actor' is named twice",
    ),
    (
        "a label that is a fraction",
        job({"actor": "0"}, node_groups=[{"label": 4090.5, "node_ranks": 0}]),
        ConfigError,
        (
            "cluster.node_groups[0].label: the node group label is the number 4090.5\n"
            "  hint: quote it to keep it as typed"
        ),
    ),
    (
        "a label that is False",
        job({"actor": "0"}, node_groups=[{"label": False, "node_ranks": 0}]),
        ConfigError,
        (
            "cluster.node_groups[0].label: the node group label is the boolean False\n"
            "  hint: YAML 1.1 reads an unquoted no, off or false as a boolean: quote it"
        ),
    ),
    (
        "a label named as a number and as text",
        job({"actor": "0"}, node_groups=[{"label": 4090, "node_ranks": 0}, {"label": "4090", "node_ranks": 1}]),
        ConfigError,
        "cluster.node_groups[1].label: node group '4090' is declared twice",
    ),
    (
        "a node group that is not there",
        job({"actor": {"node_group": 4090, "placement": "0-7"}}),
        PlacementError,
        (
            "cluster.component_placement.actor.node_group: component 'actor': there is no node group '4090'\n"
            "  hint: there are 'cluster' and 'node'"
        ),
    ),
    (
        "node ranks that are a fraction",
        job({"actor": "0"}, node_groups=[{"label": "a", "node_ranks": 0.5}]),
        ConfigError,
        (
            "cluster.node_groups[0].node_ranks: node group 'a': node_ranks is the number 0.5\n"
            "  hint: quote it to keep it as typed"
        ),
    ),
    (
        "node ranks that may have been a pair",
        job({"actor": "0"}, node_groups=[{"label": "a", "node_ranks": 60}]),
        ConfigError,
        (
            "cluster.node_groups[0].node_ranks: node group 'a' names node rank 60, but num_nodes is 2, so "
            "node ranks are 0-1\n"
            "  hint: node ranks count from 0, and ranges include both ends"
        ),
    ),
    (
        "node ranks below zero in a list",
        job({"actor": "0"}, node_groups=[{"label": "a", "node_ranks": [0, -1]}]),
        ConfigError,
        (
            "cluster.node_groups[0].node_ranks[1]: node group 'a': node_ranks: ranks cannot be negative\n"
            "    -1\n"
            "    ^\n"
            "  hint: ranks count from 0"
        ),
    ),
    (
        "ignore_hardware that is a number",
        job({"actor": "0"}, node_groups=[{"label": "a", "node_ranks": 0, "ignore_hardware": 1}]),
        ConfigError,
        "cluster.node_groups[0].ignore_hardware: node group 'a': ignore_hardware must be true or false, not 1",
    ),
    (
        "a variable that is True",
        job(
            {"actor": "0"},
            node_groups=[
                {"label": "a", "node_ranks": 0, "env_configs": [{"node_ranks": 0, "env_vars": {"DEBUG": True}}]}
            ],
        ),
        ConfigError,
        (
            "cluster.node_groups[0].env_configs[0].env_vars.DEBUG: node group 'a': the variable DEBUG is the "
            "boolean True\n"
            "  hint: YAML 1.1 reads an unquoted yes, on or true as a boolean: quote it"
        ),
    ),
    (
        "a variable's name that is a number",
        job(
            {"actor": "0"},
            node_groups=[{"label": "a", "node_ranks": 0, "env_configs": [{"node_ranks": 0, "env_vars": {1: "x"}}]}],
        ),
        ConfigError,
        ("cluster.node_groups[0].env_configs[0].env_vars.1: node group 'a': '1' cannot name an environment variable"),
    ),
    (
        "a hardware setting that is an object",
        job(
            {"actor": "0"},
            node_groups=[
                {
                    "label": "a",
                    "node_ranks": 0,
                    "hardware": {"type": "Franka", "configs": [{"node_rank": 0, "arm": {1, 2}}]},
                }
            ],
        ),
        ConfigError,
        "cluster.node_groups[0].hardware.configs[0].arm: a value of the type set is not allowed here",
    ),
    (
        "several mistakes",
        {"cluster": {"num_nodes": 0, "component_placement": {"actor": "0-99", "rollout": "4-x", "reward": 1.5}}},
        PlacementError,
        (
            "cluster.num_nodes: num_nodes is 0, and must be at least 1\n"
            "cluster.component_placement.rollout: component 'rollout': expected a resource rank, found 'x'\n"
            "    4-x\n"
            "      ^\n"
            "  hint: ranks are numbers from 0 on\n"
            "cluster.component_placement.reward: component 'reward': the placement is the number 1.5\n"
            "  hint: quote it to keep it as typed\n"
            "cluster.component_placement.actor: component 'actor' asks for hardware rank 99 of node group "
            "'cluster', which has 0-15\n"
            "    0-99\n"
            "      ^^\n"
            "  hint: ranges include both ends; write 0-15"
        ),
    ),
]


@pytest.mark.parametrize(("config", "error", "message"), [case[1:] for case in DICTS], ids=[case[0] for case in DICTS])
def test_a_mistake_in_a_dict_is_explained_with_its_key(config, error, message):
    with pytest.raises(error) as caught:
        make_plan(config, TWO_NODES)
    assert str(caught.value) == message


DICTCONFIGS = [
    (
        "a value that is still missing",
        {"cluster": {"num_nodes": "???", "component_placement": {"actor": "0-7"}}},
        ConfigError,
        "cluster.num_nodes: ??? has no value yet",
    ),
    (
        "a placement still to be given",
        job({"actor": "???"}),
        ConfigError,
        "cluster.component_placement.actor: ??? has no value yet",
    ),
    (
        "the section still to be given",
        {"cluster": "???"},
        ConfigError,
        "cluster: ??? has no value yet",
    ),
    (
        "an interpolation of a key that is missing",
        job({"actor": "${where}"}),
        ConfigError,
        "cluster.component_placement.actor: cannot be read: Interpolation key 'where' not found",
    ),
    (
        "an interpolation of an unknown resolver",
        job({"actor": "${hydra:where}"}),
        ConfigError,
        "cluster.component_placement.actor: cannot be read: Unsupported interpolation type hydra",
    ),
    (
        "an interpolation in a circle",
        {**job({"actor": "${a}"}), "a": "${b}", "b": "${a}"},
        ConfigError,
        "cluster.component_placement.actor: cannot be read: Recursive interpolation detected",
    ),
    (
        "an interpolation that gives a mistake",
        {"last": 16, **job({"actor": "0-${last}"})},
        PlacementError,
        (
            "cluster.component_placement.actor: component 'actor' asks for hardware rank 16 of node group "
            "'cluster', which has 0-15\n"
            "    0-16\n"
            "      ^^\n"
            "  hint: ranges include both ends; write 0-15"
        ),
    ),
    (
        "an interpolation that gives a pair as a number",
        {"where": 480, **job({"actor": "${where}"})},
        PlacementError,
        (
            "cluster.component_placement.actor: component 'actor' asks for hardware rank 480 of node group "
            "'cluster', which has 0-15\n"
            "    480\n"
            "    ^^^\n"
            "  hint: YAML 1.1 reads an unquoted 8:0 as 480: if that was meant, quote it"
        ),
    ),
    (
        "an interpolation inside a list",
        job({"actor": "0"}, node_groups=[{"label": "a", "node_ranks": ["${nope}"]}]),
        ConfigError,
        "cluster.node_groups[0].node_ranks[0]: cannot be read: Interpolation key 'nope' not found",
    ),
]


@pytest.mark.parametrize(
    ("config", "error", "message"), [case[1:] for case in DICTCONFIGS], ids=[case[0] for case in DICTCONFIGS]
)
def test_a_mistake_in_a_dictconfig_is_explained_with_its_key(config, error, message):
    with pytest.raises(error) as caught:
        make_plan(OmegaConf.create(config), TWO_NODES)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in DICTS
        if case[0] not in ("a placement that is an object", "a hardware setting that is an object")
    ],
    ids=lambda case: case[0],
)
def test_a_dictconfig_gets_the_same_message_as_a_dict(case):
    _, config, error, message = case
    try:
        config = OmegaConf.create(config)
    except Exception as refused:
        pytest.skip(f"OmegaConf itself refuses it: {type(refused).__name__}")
    with pytest.raises(error) as caught:
        make_plan(config, TWO_NODES)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("components", "message"),
    [
        (
            {"rollout": "0-7"},
            "cluster.component_placement: a model-parallel job needs the component 'actor'",
        ),
        (
            {"actor": "0-7", "reward": "0"},
            "cluster.component_placement: a model-parallel job needs the component 'rollout'",
        ),
    ],
    ids=["no actor", "no rollout"],
)
def test_a_model_parallel_job_needs_actor_and_rollout(components, message):
    with pytest.raises(PlacementError) as caught:
        make_plan({**job(components), **SIZES}, TWO_NODES, placement="model-parallel")
    assert str(caught.value) == message


def test_all_mistakes_in_sizes_come_in_one_error():
    sizes = {"actor": {"model": {"tensor_model_parallel_size": True}}, "rollout": {"tensor_parallel_size": 2.0}}
    with pytest.raises(ConfigError) as caught:
        make_plan({**job({"actor": "0-7", "rollout": "0-7"}), **sizes}, TWO_NODES)
    assert str(caught.value) == (
        "actor.model.tensor_model_parallel_size: tensor_model_parallel_size must be a whole number, not True\n"
        "rollout.tensor_parallel_size: tensor_parallel_size must be a whole number, not 2.0"
    )


@pytest.mark.parametrize(
    "extra",
    [{"checkpoint": "???"}, {"log_dir": "${hydra:runtime.cwd}/logs"}, {"seed": "${nowhere}"}],
    ids=["a value that is still missing", "a resolver of Hydra", "an interpolation of a key that is missing"],
)
def test_missing_values_in_the_users_sections_are_ignored(extra):
    plan = make_plan(job({"actor": "0-7"}), TWO_NODES)
    assert make_plan(OmegaConf.create({**extra, **job({"actor": "0-7"})}), TWO_NODES) == plan
    lines = "".join(f"{key}: {value}\n" for key, value in extra.items())
    text = lines + "cluster:\n  num_nodes: 2\n  component_placement:\n    actor: 0-7\n"
    assert make_plan(JobConfig.from_text(text), TWO_NODES) == plan


def test_missing_values_next_to_the_sizes_are_ignored():
    sizes = {"actor": {"checkpoint": "???", **SIZES["actor"]}, "rollout": {"dir": "${nowhere}", **SIZES["rollout"]}}
    config = {**job({"actor,rollout": "0-7"}), **SIZES}
    assert make_plan(OmegaConf.create({**config, **sizes}), TWO_NODES) == make_plan(config, TWO_NODES)


@pytest.mark.parametrize("key", [("a", "b"), b"a", None, 1.5], ids=repr)
def test_keys_in_the_users_sections_may_be_anything(key):
    plan = make_plan(job({"actor": "0-7"}), TWO_NODES)
    assert make_plan({key: 1, **job({"actor": "0-7"})}, TWO_NODES) == plan


@pytest.mark.parametrize(
    "config",
    [
        DictConfig(None),
        DictConfig("???"),
        DictConfig("${nowhere}"),
        {"cluster": DictConfig(None)},
        job(DictConfig("???")),
    ],
    ids=["None", "to be given", "unresolved", "cluster", "component_placement"],
)
def test_an_empty_dictconfig_is_refused(config):
    with pytest.raises(ConfigError):
        make_plan(config, TWO_NODES)


@pytest.mark.parametrize(
    "config", [None, 5, b"job.yaml", [], OmegaConf.create([])], ids=lambda value: type(value).__name__
)
def test_a_value_that_is_not_a_config_is_refused(config):
    with pytest.raises(ConfigError) as caught:
        make_plan(config, TWO_NODES)
    assert str(caught.value) == (
        f"a config is a path, a dict or a DictConfig, not a {type(config).__name__}\n"
        "  hint: for YAML text use roost.JobConfig.from_text"
    )


@pytest.mark.parametrize("text", ["cluster:\n  num_nodes: 1\n", "a\0b", "\udcff.yaml"], ids=ascii)
def test_text_that_is_not_a_path_is_refused(text):
    with pytest.raises(ConfigError):
        make_plan(text, TWO_NODES)


@pytest.mark.parametrize(
    "make",
    [
        lambda number: {"cluster": {"num_nodes": number, "component_placement": {"actor": "0"}}},
        lambda number: job({"actor": number}),
        lambda number: job({number: "0"}),
        lambda number: {"cluster": {number: 1, "component_placement": {"actor": "0"}}},
        lambda number: job({"actor": "0"}, node_groups=[{"label": number, "node_ranks": 0}]),
        lambda number: job({"actor": "0"}, node_groups=[{"label": "a", "node_ranks": number}]),
    ],
    ids=["num_nodes", "placement", "name", "key", "label", "node_ranks"],
)
def test_a_number_too_long_to_print_is_refused(make):
    with pytest.raises((ConfigError, PlacementError)):
        make_plan(make(10**5000), TWO_NODES)


def robot(setting):
    hardware = {"type": "Franka", "configs": [{"node_rank": 0, "arm": setting}]}
    return job(
        {"env": {"node_group": "robot", "placement": "0"}},
        node_groups=[{"label": "robot", "node_ranks": 0, "hardware": hardware}],
    )


def test_a_setting_that_contains_itself_is_refused():
    circle: list[object] = []
    circle.append(circle)
    with pytest.raises(ConfigError):
        make_plan(robot(circle), TWO_NODES)


def test_a_setting_nested_too_deep_is_refused():
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(ConfigError):
        make_plan(robot(deep), TWO_NODES)


def test_a_plan_for_all_of_no_nodes_is_refused():
    with pytest.raises((ConfigError, PlacementError)):
        make_plan(job({"actor": "all"}), Topology(nodes=()))


def test_an_unknown_kind_of_placement_is_refused():
    with pytest.raises(ConfigError, match="model-parallel"):
        make_plan(job({"actor": "0-7"}), TWO_NODES, placement="modelparallel")
