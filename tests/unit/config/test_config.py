"""Reading a job: files, dicts and DictConfigs are equivalent, and the user's sections are ignored."""

from __future__ import annotations

import warnings

import pytest
from omegaconf import OmegaConf

from roost import ConfigError, JobConfig, PlacementError, Topology, make_plan
from roost.config.job import read_job_draft

YAML = """\
defaults: [base]
cluster:
  num_nodes: 2
  component_placement:
    "actor,critic": 0-3
    rollout: {node_group: 4090, placement: "0-3:0-1"}
    env: {node_group: [robot, 4090], placement: all}
    no: {node_group: node, placement: [0, "1:1-3"]}
  node_groups:
    - label: 4090
      node_ranks: [1]
      env_configs:
        - node_ranks: 1
          env_vars: [{A: 1}, {B: no}]
          python_interpreter_path: /opt/python
    - {label: robot, node_ranks: 0-1, hardware: {type: Franka, configs: [{node_rank: 0, ip: 10.0.0.1, grip: [1, 2.5]}]}}
    - {label: bare, node_ranks: "0", ignore_hardware: true}
actor: {model: {anything: !custom [1, 2]}, 8: 0}
"""


def names(config: JobConfig) -> list[str]:
    return [component.name for component in config.cluster.components]


def test_a_file_keeps_what_was_typed():
    config = JobConfig.from_text(YAML)
    assert names(config) == ["actor", "critic", "rollout", "env", "no"]
    assert config.cluster.components[2].node_groups == ("4090",)
    assert config.cluster.components[3].node_groups == ("robot", "4090")
    group = config.cluster.node_groups[0]
    assert group.label == "4090"
    assert group.env_configs[0].env_vars == (("A", "1"), ("B", "no"))
    assert group.env_configs[0].python_interpreter_path == "/opt/python"
    robot = config.cluster.node_groups[1].hardware[0]
    assert dict(robot.settings) == {"ip": "10.0.0.1", "grip": [1, 2.5]}
    plan = make_plan(config, Topology.from_shorthand("2x8"))
    assert [component.world_size for component in plan.components] == [4, 4, 2, 9, 4]


def test_components_without_their_level_are_read_where_they_can_be_nothing_else():
    long = {"actor": {"node_group": "node", "placement": 0}, "env": ["0-3", 5], "rollout,critic": "all"}
    for cluster in (long, {"num_nodes": 1, **long}, OmegaConf.create(long)):
        job = JobConfig.from_dict({"cluster": cluster})
        assert names(job) == ["actor", "env", "rollout", "critic"]
    plan = make_plan(job, Topology.from_shorthand("1x8"))
    assert plan == make_plan({"cluster": {"component_placement": long}}, Topology.from_shorthand("1x8"))


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ({"num_node": 1, "actor": "0-7"}, "did you mean 'num_nodes'"),
        ({"component_placements": {"actor": "0-7"}}, "did you mean 'component_placement'"),
        ({"working_dirs": "all", "actor": "0-7"}, "did you mean 'working_dir'"),
        ({"gpus": 8}, "cluster has no key 'gpus'"),
        ({"gpus": "8", "actor": "0-7"}, "cluster has no key 'gpus'"),
        ({"actor": "0-"}, "cluster has no key 'actor'"),
        ({"actor": {"placements": "0-7"}}, "cluster has no key 'actor'"),
        ({"actor": None}, "cluster has no key 'actor'"),
        ({"actor": "0-7", "tracer": "all"}, "it is for RLinf's tracer"),
        ({"a" * 300: "0-3", "actor": "0-7"}, "has 300 characters"),
        ({"num_nodes": 1}, "cluster lacks 'component_placement'"),
        ({"actor": "0-3", "component_placement": {"rollout": "4-7"}}, "one level deeper"),
    ],
)
def test_a_wrong_key_of_a_cluster_is_no_component(cluster, said):
    with pytest.raises(ConfigError, match=said):
        JobConfig.from_dict({"cluster": cluster})


def test_a_dictconfig_says_the_same_as_a_dict():
    data = {"cluster": {"num_nodes": 1, "component_placement": {"actor": "0-3", "env": {"placement": 0}}}}
    topology = Topology.from_shorthand("1x4")
    assert make_plan(OmegaConf.create(data), topology) == make_plan(data, topology)


def test_interpolations_are_resolved_in_files_and_in_dictconfigs(tmp_path):
    text = "n: 2\ncluster:\n  num_nodes: ${n}\n  component_placement:\n    actor: ${ranks.actor}\nranks: {actor: 0-7}\n"
    path = tmp_path / "job.yaml"
    path.write_text(text)
    from_file = make_plan(path, Topology.from_shorthand("2x8"))
    assert (from_file.num_nodes, from_file.components[0].world_size) == (2, 8)
    assert make_plan(OmegaConf.load(path), Topology.from_shorthand("2x8")) == from_file


def test_anchors_and_merges_work():
    text = """\
base: &base {node_group: node, placement: 0}
more: &more {placement: 1}
cluster:
  component_placement:
    a: *base
    b: {<<: *base, placement: 1}
    c: {<<: [*more, *base]}
"""
    config = JobConfig.from_text(text)
    assert [str(component.segments[0]) for component in config.cluster.components] == ["0", "1", "1"]
    assert {component.node_groups for component in config.cluster.components} == {("node",)}


def test_merged_keys_come_first():
    text = "b: &b {x: 0, y: 0}\ncluster:\n  component_placement: {z: 1, <<: *b, x: 2}\n"
    config = JobConfig.from_text(text)
    assert names(config) == ["y", "z", "x"]
    # Versions of OmegaConf differ in the order, and in nothing else.
    assert sorted(names(JobConfig.from_dict(OmegaConf.create(text)))) == ["x", "y", "z"]
    assert str(config.cluster.components[2].segments[0]) == "2"


def test_a_mapping_that_is_merged_keeps_its_own_keys_over_those_that_it_merges():
    text = "b: &b {x: 0, y: 0}\nm: &m {<<: *b, x: 1}\ncluster:\n  component_placement: {<<: *m, z: 2}\n"
    for config in (JobConfig.from_text(text), JobConfig.from_dict(OmegaConf.create(text))):
        found = {component.name: str(component.segments[0]) for component in config.cluster.components}
        assert found == {"x": "1", "y": "0", "z": "2"}


def test_aliases_that_expand_without_end_are_refused():
    group = "&g {label: a, node_ranks: 0, env_configs: [" + ",".join(["*e"] * 2000) + "]}"
    text = f"e: &e {{node_ranks: 0, env_vars: {{A: 1}}}}\ng: {group}\ncluster:\n  component_placement: {{a: 0}}\n"
    text += "  node_groups: [" + ",".join(["*g"] * 2000) + "]\n"
    with pytest.raises(ConfigError, match="expand without end"):
        JobConfig.from_text(text)


def test_a_yaml_1_1_pair_is_kept_in_a_file_and_hinted_at_in_a_dict():
    text = "cluster:\n  component_placement:\n    actor: 8:0\n"
    plan = make_plan(JobConfig.from_text(text), Topology.from_shorthand("2x8"))
    assert plan.components[0].hardware_ranks == (8,)
    with pytest.raises(PlacementError, match="unquoted 8:0 as 480"):
        make_plan({"cluster": {"component_placement": {"actor": 480}}}, Topology.from_shorthand("2x8"))


@pytest.mark.parametrize("extra", ["", "\n# comment\n", "x: " + "[" * 30 + "]" * 30 + "\n"])
def test_other_sections_than_cluster_do_not_matter(extra):
    assert names(JobConfig.from_text(extra + "\ncluster: {component_placement: {actor: 0}}\n")) == ["actor"]


def test_an_invalid_placement_kind_is_refused():
    with pytest.raises(ConfigError, match="auto, hybrid or model-parallel"):
        make_plan({"cluster": {"component_placement": {"a": 0}}}, Topology.from_shorthand("1x1"), placement="bogus")


def test_a_draft_that_failed_on_one_cluster_can_be_planned_on_another():
    draft = read_job_draft({"cluster": {"component_placement": {"actor": "0-7"}}})
    with pytest.raises(PlacementError):
        make_plan(draft, Topology.from_shorthand("1x4"))
    assert make_plan(draft, Topology.from_shorthand("1x8")).component("actor").world_size == 8


def test_a_config_is_read_once_even_if_it_is_wrong():
    calls = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its newer name is not in every version that we take
        OmegaConf.register_new_resolver("roost_test_count", lambda: calls.append(1) or 0, replace=True)
    data = {"cluster": {"num_nodes": "${roost_test_count:}", "component_placement": {"actor": "0"}}}
    with pytest.raises(ConfigError, match="num_nodes is 0"):
        make_plan(OmegaConf.create(data), Topology.from_shorthand("1x1"))
    assert calls == [1]


@pytest.mark.parametrize(
    ("config", "hint"),
    [
        ({"num_nodes": 1, "component_placement": {"actor": 0}}, "pass the whole config"),
        ({"clus ter": {}}, "is that 'clus ter'?"),
        ({"defaults": ["a"]}, "Hydra config that is not composed"),
    ],
)
def test_the_hint_for_a_missing_cluster_section_depends_on_the_other_keys(config, hint):
    with pytest.raises(ConfigError) as caught:
        make_plan(config, Topology.from_shorthand("1x1"))
    assert hint in str(caught.value)


def test_the_input_is_not_changed():
    data = OmegaConf.create({"cluster": {"component_placement": {"actor": "0-3"}}, "actor": {"a": "${cluster}"}})
    before = OmegaConf.to_container(data, resolve=False)
    make_plan(data, Topology.from_shorthand("1x4"))
    assert OmegaConf.to_container(data, resolve=False) == before


def test_a_large_file_is_refused_without_being_read(tmp_path):
    path = tmp_path / "large.yaml"
    path.write_text("cluster: {component_placement: {actor: 0}}\n" + "# filler\n" * 1_200_000)
    assert path.stat().st_size > 10 * 2**20
    with pytest.raises(ConfigError, match=r"the file has 10\.3 MiB, and at most 4 MiB are read"):
        JobConfig.from_file(path)


def test_a_missing_file_and_a_folder_are_config_errors(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        JobConfig.from_file(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        JobConfig.from_file(tmp_path)


def test_a_huge_range_is_refused_and_never_expanded():
    # Expanding any of these would take all memory: the test is that it returns.
    for text in ("0-999999999999", "0:0-999999999999", "0-99999999999999:0-9999", "all:0-99999999999"):
        with pytest.raises(PlacementError):
            make_plan({"cluster": {"component_placement": {"actor": text}}}, Topology.from_shorthand("2x8"))


def test_all_mistakes_in_a_file_come_in_one_error():
    text = """\
cluster:
  num_nodes: 0
  component_placement:
    actor: 0-99
    rollout: 3-1
    env: {node_group: nowhere, placement: 0}
  node_group: []
"""
    with pytest.raises(PlacementError) as caught:
        make_plan_text(text)
    assert [problem.where.line for problem in caught.value.problems] == [2, 4, 5, 6, 7]


def test_a_group_that_is_declared_wrongly_is_reported_once():
    text = """\
cluster:
  component_placement:
    env: {node_group: a, placement: 0}
    actor: {node_group: b, placement: 0}
  node_groups: [{label: a, node_ranks: x}]
"""
    with pytest.raises(PlacementError) as caught:
        make_plan_text(text)
    assert [problem.where.line for problem in caught.value.problems] == [4, 5]


def make_plan_text(text):
    from roost.config.yaml_file import parse_text

    return make_plan(parse_text(text, name="job.yaml"), Topology.from_shorthand("2x8"))


def test_a_job_of_far_too_many_components_is_refused_at_once():
    lines = "".join(f"    c{index}: 0-7\n" for index in range(50_000))
    with pytest.raises(ConfigError, match="it has 50,000 components, and a job has at most 10,000") as error:
        JobConfig.from_text(f"cluster:\n  num_nodes: 1\n  component_placement:\n{lines}")
    assert error.value.problems[0].where.line == 4


def test_a_feature_of_rlinf_that_is_not_placement_is_refused_by_its_name():
    text = "cluster:\n  num_nodes: 1\n  component_placement: {actor: 0}\n  tracer: {enable: true}\n"
    with pytest.raises(ConfigError, match="it is for RLinf's tracer, which Roost does not have") as error:
        JobConfig.from_text(text)
    assert error.value.problems[0].hint == "leave it out: it decides no placement"
