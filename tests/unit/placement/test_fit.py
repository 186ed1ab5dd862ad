"""Memory and rules of a job: what the plan says, and where it is heeded."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import yaml
from typer.testing import CliRunner

from roost import ConfigError, PlacementError, Topology, make_plan
from roost.cli.main import app
from roost.config.run import read_run_draft
from roost.placement.domains import domains_of, label_of
from roost.placement.ledger import make_ledger, start_at_once_problems
from roost.render.fit import brackets

JOB = """
cluster:
  num_nodes: 1
  component_placement:
    actor,rollout: 0-3
flow:
  step: rollout.generate -> actor.train
memory:
  actor: {train: 50GiB, asleep: 1GiB}
  rollout: {generate: 40GiB, asleep: 2GiB}
phases:
  generate: {rollout: generate, actor: asleep}
  train: {actor: train, rollout: asleep}
"""
PROFILE = """
version: 1
calls:
  rollout.generate: {seconds: {2: 10.0, 4: 5.0}}
  actor.train: {seconds: {2: 10.0, 4: 5.0}}
"""


def nodes(memory="80GiB", host="100GiB"):
    return {"nodes": [{"accelerators": {"count": 4, "memory": memory}, "memory": host}]}


def test_a_file_is_refused_that_a_dict_of_the_user_s_own_sections_is_not(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    small = Topology.from_dict(nodes("50GiB"))
    with pytest.raises(PlacementError, match=r"'train'.*has 50\.0 GiB and would hold 52\.0 GiB"):
        make_plan(path, small)
    assert make_plan(path, small, allow_overflow=True).names == ["actor", "rollout"]
    assert make_plan({"cluster": {"component_placement": {"a": "0"}}, "memory": "mine", "keep": 3}, small).names == [
        "a"
    ]


@pytest.mark.parametrize(("memory", "hint"), [("5.5GiB", "3.5GiB"), ("3GiB", "1GiB"), ("2.5GiB", "512MiB")])
def test_the_nearest_size_that_fits_is_told_in_round_numbers(memory, hint):
    job = yaml.safe_load(JOB)
    job["memory"] = {"actor": {"train": "4GiB"}, "rollout": {"asleep": "2GiB"}}
    job["phases"].pop("generate")
    with pytest.raises(PlacementError) as caught:
        make_plan(read_run_draft(job), Topology.from_dict(nodes(memory)))
    assert caught.value.problems[0].hint == f"actor train at most {hint}"


def test_the_ledger_names_an_order_and_what_it_does_not_know():
    draft = read_run_draft(yaml.safe_load(JOB))
    ledger = make_ledger(make_plan(draft, Topology.from_dict(nodes())), draft.memory)
    assert not ledger.problems
    assert [str(change) for change in ledger.changes] == [
        "generate → train: rollout to asleep, then actor to train",
        "train → generate: actor to asleep, then rollout to generate",
    ]
    assert not ledger.unknown
    blind = make_ledger(make_plan(draft, Topology.from_shorthand("1x4")), draft.memory)
    assert not blind.problems
    assert blind.unknown == ("how much memory the accelerators of node 0 have; an inventory can say",)


def test_staggered_starts_are_for_scripts():
    from roost.runtime.job import run_job

    text = JOB.replace("{train: 50GiB", "{start_at_once: 2, train: 50GiB")
    job = yaml.safe_load(text) | {"workers": {"actor": "a.B", "rollout": "a.B"}, "entry": "a.main"}
    draft = read_run_draft(job)
    (problem,) = start_at_once_problems(draft.memory)
    assert problem.where.key == "memory.actor.start_at_once"
    with pytest.raises(ConfigError, match="roost run starts all workers at the same time"):
        run_job(draft)


@pytest.mark.parametrize(
    ("memory", "host", "shared"), [("80GiB", "100GiB", True), ("51GiB", "100GiB", False), ("80GiB", "9GiB", False)]
)
def test_a_search_shares_devices_only_where_everything_fits(tmp_path, memory, host, shared):
    host_job = JOB.replace("actor: {train: 50GiB", "actor: {host: 2GiB, train: 50GiB").replace(
        "generate: 40GiB", "generate: 40GiB, host: 2GiB"
    )
    (tmp_path / "job.yaml").write_text(host_job)
    (tmp_path / "profile.yaml").write_text(PROFILE)
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(nodes(memory, host)))
    command = ["search", str(tmp_path / "job.yaml"), "--profile", str(tmp_path / "profile.yaml"), "--inventory"]
    done = CliRunner().invoke(app, [*command, str(tmp_path / "cluster.yaml"), "--format", "json", "--prove",
                                    str(tmp_path / "proof.json")])  # fmt: skip
    if host == "9GiB":
        # What the node decides has no proof.
        assert "there is no proof" in str(done.exception)
        done = CliRunner().invoke(app, [*command, str(tmp_path / "cluster.yaml"), "--format", "json"])
    else:
        assert CliRunner().invoke(app, ["search", "--check", str(tmp_path / "proof.json")]).exit_code == 0
    assert done.exit_code == 0, done.output
    assert ('"rollout": "0-3' in done.output) == shared, done.output


def test_an_accelerator_s_label_goes_before_its_node_s_and_the_level_s_name_before_others():
    topology = Topology.from_dict(
        {
            "nodes": [
                {"accelerators": [{"labels": {"nvlink": "x"}}, {"model": "y"}], "labels": {"nvlink": "n"}},
                {"accelerators": 1, "labels": {"nvidia.com/gpu.clique": "c", "topology.kubernetes.io/zone": "z"}},
            ]
        }
    )
    assert Topology.from_dict(topology.to_dict()) == topology
    assert domains_of(topology, "nvlink") == {(0, -1): "n", (0, 0): "x", (0, 1): "n", (1, -1): None, (1, 0): None}
    assert label_of(topology, "zone") == "topology.kubernetes.io/zone"
    assert label_of(topology, "spine") is None
    assert domains_of(topology, "node")[1, 0] == "1"


def test_ranks_by_count_need_not_be_in_the_order_of_the_hardware():
    fabric = [{"accelerators": [{"labels": {"x": one}} for one in "abab"]}]
    job = {"cluster": {"component_placement": {"a": {"count": 4}}}, "mesh": {"a": {"p": 2, "q": 2}}}
    plan = make_plan(job | {"keep": ["a.q within x"]}, Topology.from_dict({"nodes": fabric}))
    assert [item.local_hardware_ranks for item in plan.component("a").placements] == [(0,), (2,), (1,), (3,)]
    assert plan.component("a").hardware_ranks == (0, 1, 2, 3)
    assert type(plan).from_json(plan.to_json()) == plan
    again = plan.get_strategy("a").get_placement(plan.topology)
    assert [item.rank for item in again] == [0, 1, 2, 3]


def test_a_mesh_that_is_far_too_large_is_refused_before_its_ranks_are_listed():
    job = {
        "cluster": {"component_placement": {"actor": {"count": 2_000_000}}},
        "mesh": {"actor": {"dp": 1_000_000, "tp": 2}},
        "keep": ["actor.tp within node"],
    }
    with pytest.raises(PlacementError, match="actor 2000000 by count, and 4 accelerators of 1 nodes are free"):
        make_plan(job, Topology.from_dict(nodes()))


def test_a_label_without_a_value_is_no_domain():
    topology = Topology.from_shorthand("2x1")
    named = replace(topology, nodes=tuple(replace(one, labels=(("rack", ""),)) for one in topology.nodes))
    assert set(domains_of(named, "rack").values()) == {None}


def test_neighbours_with_the_same_text_share_a_bracket():
    assert brackets(["cores 0-7", "cores 0-7", "any core", "cores 0-7"]) == (
        (0, 1, "cores 0-7", None),
        (2, 2, "any core", None),
        (3, 3, "cores 0-7", None),
    )


VERL = """python3 -m verl.trainer.main_ppo \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=${TP:-8} \\
    actor_rollout_ref.actor.strategy=megatron \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \\
    trainer.n_gpus_per_node=4 trainer.nnodes=4
"""
NEMO_RL = """
policy:
  megatron_cfg: {{enabled: true, tensor_model_parallel_size: 1, expert_model_parallel_size: 8}}
  generation:
    backend: vllm
    vllm_cfg: {{tensor_parallel_size: 4, pipeline_parallel_size: 1}}
    colocated: {{enabled: true, resources: {{num_nodes: null, gpus_per_node: null}}}}
cluster: {{num_nodes: {nodes}, gpus_per_node: 4, segment_size: {segment}}}
"""


def fabric(tmp_path, domains):
    """Write an inventory of nodes with 4 accelerators, in these NVLink domains; `-` is a node without a label."""
    labels = [{} if domain == "-" else {"nvidia.com/gpu.clique": domain} for domain in domains]
    path = tmp_path / "fabric.yaml"
    path.write_text(yaml.safe_dump({"nodes": [{"accelerators": 4, "labels": own} for own in labels]}))
    return ["--inventory", str(path)]


@pytest.mark.parametrize(
    ("domains", "said"),
    [
        ("aabb", None),
        ("abbb", "rollout:0-7 is on nvlink a and b (nodes 0-1)"),
        ("aab-", "rollout:8-15 is on nvlink b (nodes 2-3), and node 3 without a label for it"),
        ("----", None),
    ],
)
def test_a_verl_script_whose_tensor_parallel_group_crosses_an_nvlink_domain_is_told_so(roost, tmp_path, domains, said):
    script = tmp_path / "run.sh"
    script.write_text(VERL)
    code, out, err = roost("check", str(script), *fabric(tmp_path, domains))
    told = [line for line in (out + err).splitlines() if "within nvlink" in line]
    assert code == 0
    assert told == ([f"warning: 'rollout.TP within nvlink' does not hold: {said} [preferred]"] if said else [])
    map_ = roost("plan", str(script), *fabric(tmp_path, domains))[1]
    assert ("nvlink " in map_) == (domains != "----")


@pytest.mark.parametrize(
    ("domains", "nodes", "segment", "on", "said"),
    [
        ("aabb", 4, 2, [0, 1, 2, 3], None),
        # Whole segments of each domain come first, as NeMo-RL takes them.
        ("aaabb-", 4, 2, [0, 1, 3, 4], None),
        ("-abab", 4, 2, [1, 3, 2, 4], None),
        ("aaab", 4, 2, [0, 1, 2, 3], "policy:8-15 is on nvlink a and b (nodes 2-3)"),
        ("a-a-", 4, 2, [0, 2, 1, 3], "policy:8-15 is on no nvlink (nodes 1,3), and nodes 1,3 without a label for it"),
        ("aaab", 4, "null", [0, 1, 2, 3], None),
        ("----", 4, 2, [0, 1, 2, 3], None),
    ],
)
def test_segment_size_of_nemo_rl_is_a_rule(roost, tmp_path, domains, nodes, segment, on, said):
    config = tmp_path / "grpo.yaml"
    config.write_text(NEMO_RL.format(nodes=nodes, segment=segment))
    arguments = [str(config), "--from", "nemo-rl", *fabric(tmp_path, domains)]
    code, out, err = roost("check", *arguments)
    told = [line for line in (out + err).splitlines() if "policy.segment" in line]
    assert told == ([f"error: 'policy.segment within nvlink' does not hold: {said} [segments]"] if said else [])
    assert code == (2 if said else 0)
    plan = json.loads(roost("plan", *arguments, "--format", "json")[1])
    assert [one["cluster_node_rank"] for one in plan["components"]["policy"]["placements"]][::4] == on


@pytest.mark.parametrize(("nodes", "segment"), [(3, 2), (4, -2)])
def test_a_segment_that_does_not_divide_the_nodes_is_refused(roost, tmp_path, nodes, segment):
    config = tmp_path / "grpo.yaml"
    config.write_text(NEMO_RL.format(nodes=nodes, segment=segment))
    code, out, err = roost("check", str(config), "--from", "nemo-rl", *fabric(tmp_path, "aaaa"))
    assert code == 2
    assert f"segment_size is {segment}, which does not divide the {nodes} nodes of policy" in out + err
