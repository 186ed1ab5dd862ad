"""Jobs of other frameworks: which are found, what is asked for, how roles are laid out, what is wrong with them."""

from __future__ import annotations

import pytest

from roost.config.readers.framework import Gpus, Settings, fitted
from roost.config.readers.reading import FRAMEWORKS, ForeignJob, VariablesMissing, framework, read_foreign
from roost.errors import ConfigError, PlacementError

VERL = "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=vllm "
SLIME = "python3 train.py --actor-num-nodes 1 "


def job(text: str, *extra: str, name: str = "run.sh", **options: object) -> ForeignJob:
    found = read_foreign(name, text, extra, **options)  # type: ignore[arg-type]
    assert found is not None
    return found


def roles(found: ForeignJob, sizes: tuple[int, ...] | None = None) -> dict[str, list[tuple[int, ...]]]:
    nodes, gpus = found.size
    return {role.name: list(role.processes) for role in found.lay_out(sizes or [gpus] * nodes)}


def codes(found: ForeignJob, sizes: tuple[int, ...] | None = None) -> list[tuple[str, str]]:
    roles(found, sizes)
    return [(item.level, item.code) for item in found.remarks]


def shapes(found: ForeignJob) -> dict[str, dict[str, int]]:
    nodes, gpus = found.size
    return {role.name: dict(role.parallel) for role in found.lay_out([gpus] * nodes)}


# What is asked for, and what is taken for granted.


def test_a_variable_of_the_environment_is_asked_for_by_name_with_its_place():
    found = job("trainer=4\n" + VERL + "trainer.nnodes=$NNODES trainer.n_gpus_per_node=$((GPUS / 2))")
    with pytest.raises(VariablesMissing) as error:
        found.size  # noqa: B018 - asks
    messages = [(str(item.where), item.message, item.hint) for item in error.value.problems]
    assert messages[0][:2] == ("run.sh:2:70", "NNODES=? : trainer.nnodes depends on it")
    assert messages[0][2] == "give NNODES=1 on the command line, or add --assume to take verl's default"
    assert messages[1][1] == "GPUS=? : trainer.n_gpus_per_node depends on it"
    assert job("trainer=4\n" + VERL + "trainer.nnodes=$NNODES", "NNODES=4").size == (4, 8)


def test_with_assume_the_default_is_taken_and_said():
    found = job(VERL + "trainer.nnodes=$NNODES trainer.n_gpus_per_node=4", assume=True)
    assert found.size == (1, 4)
    assert found.settings.assumed == ["trainer.nnodes=1"]


def test_a_variable_that_decides_no_placement_is_not_asked_for():
    assert job(VERL + "trainer.experiment_name=$NAME data.train_files=$HOME/x data.train_batch_size=$B").size == (1, 8)
    assert codes(job(VERL + "data.train_batch_size=$B")) == []


def test_a_choice_that_the_script_knows_is_offered():
    text = 'case "$DEVICE" in gpu) N=8 ;; npu) N=16 ;; *) exit 1 ;; esac\n' + VERL + "trainer.n_gpus_per_node=$N"
    with pytest.raises(VariablesMissing, match="the script knows gpu or npu") as error:
        job(text).size  # noqa: B018 - asks
    assert "DEVICE=gpu" in error.value.problems[0].hint
    assert job(text, "DEVICE=npu").size == (1, 16)


def test_settings_after_the_variables_go_to_the_job_even_if_its_script_passes_none_on():
    for script in (VERL + "trainer.nnodes=1 $@", VERL + "trainer.nnodes=1"):
        assert job(script, "trainer.nnodes=3").size == (3, 8)
    assert job(SLIME, "--actor-num-gpus-per-node", "4", "--colocate").size == (1, 4)


def test_a_given_name_that_is_no_variable_and_no_setting_is_refused():
    with pytest.raises(ConfigError, match=r"run.sh has no variable NODES"):
        job(VERL + "trainer.nnodes=1", "NODES=4")
    found = job("NNODES=2\n" + VERL + "trainer.nnodes=$NNODES", "NNODES=4")
    assert codes(found) == [("info", "given-in-vain")]
    assert found.size == (2, 8)


def test_a_script_of_nothing_known_is_refused():
    with pytest.raises(ConfigError, match="starts no program of a framework"):
        job("python train_something.py --lr 1")
    with pytest.raises(ConfigError, match="it starts no program of slime"):
        job(VERL, chosen="slime")
    with pytest.raises(ConfigError, match="did you mean 'slime'"):
        job(VERL, chosen="slim")


def test_lines_that_a_missing_backslash_cuts_off_are_found():
    found = job(VERL + "\\\n trainer.nnodes=2\n trainer.n_gpus_per_node=4 \\\n trainer.x=1\n")
    assert found.size == (2, 8)
    (remark,) = [item for item in found.remarks if item.code == "lost-line"]
    assert (remark.level, remark.where.line) == ("error", 3)
    assert codes(job("X=(\n --a 1)\n" + SLIME + "--colocate --num-gpus-per-node 8 \\\n # c\n --x 1")) == [
        ("error", "lost-line")
    ]


def test_each_framework_has_a_table_with_a_version():
    for name in FRAMEWORKS:
        table = framework(name)
        assert table.name == name
        assert table.version
        for default in table.defaults.values():
            if isinstance(default, str) and default.startswith("="):
                assert default[1:] in table.defaults
        assert set(table.older.values()) <= set(table.defaults)


@pytest.mark.parametrize(
    ("value", "number"),
    [
        ("8", 8),
        ("'8'", 8),
        ("8.0", 8),
        ("1e1", 10),
        ("1_000", 1000),
        ("null", 0),
        ("${trainer.x}", 0),
        ("${oc.env:A,4}", 4),
    ],
)
def test_a_whole_number_is_read_as_the_framework_reads_it(value, number):
    settings = Settings(framework("verl"), job(VERL + f"'trainer.nnodes={value}'").settings.given)
    assert settings.whole("trainer.nnodes") == (number or (0 if value == "null" else 1))


# The GPUs of an empty cluster.


def test_groups_on_one_node_go_where_most_is_free():
    gpus = Gpus([8, 8])
    assert [gpus.on_one_node(4, "x") for _ in range(4)] == [
        [0, 1, 2, 3],
        [8, 9, 10, 11],
        [4, 5, 6, 7],
        [12, 13, 14, 15],
    ]
    with pytest.raises(PlacementError, match="x takes 1 GPU of one node, and 0 are the most"):
        gpus.on_one_node(1, "x")
    assert Gpus([4, 8]).pack(6, "x") == [4, 5, 6, 7, 8, 9]
    assert Gpus([4, 8]).pack(10, "x") == [4, 5, 6, 7, 8, 9, 10, 11, 0, 1]
    assert Gpus([8, 8]).pack(12, "x", bundle=4) == [*range(8), 8, 9, 10, 11]
    with pytest.raises(PlacementError, match="x takes 13 GPUs, and 12 are free of 12"):
        Gpus([4, 8]).pack(13, "x")


def test_a_cluster_for_groups_has_nodes_of_eight():
    assert [fitted(groups) for groups in ([7, 1], [8, 8, 4], [16, 4], [2, 2], [])] == [
        (1, 8),
        (3, 8),
        (2, 16),
        (1, 4),
        (1, 8),
    ]


# verl.


def test_verl_puts_every_role_on_the_pool_of_the_trainer():
    found = job(VERL + "trainer.nnodes=2 trainer.n_gpus_per_node=4 actor_rollout_ref.actor.use_kl_loss=True")
    one_each = [(rank,) for rank in range(8)]
    assert roles(found) == {"actor": one_each, "ref": one_each, "critic": one_each, "rollout": one_each}
    assert shapes(found)["rollout"] == {"TP": 2, "engines": 4}
    # On larger nodes, each node of the pool still has a node of its own while there is one.
    assert roles(found, (8, 8))["actor"] == [(rank,) for rank in (0, 1, 2, 3, 8, 9, 10, 11)]
    assert roles(found, (8,))["actor"] == one_each


def test_verl_needs_a_critic_for_gae_and_a_reference_for_kl():
    names = {
        "algorithm.adv_estimator=grpo": ["actor", "rollout"],
        "algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=True": ["actor", "ref", "rollout"],
        "algorithm.adv_estimator=grpo actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.model.lora_rank=8": [
            "actor",
            "rollout",
        ],
        "critic.enable=False": ["actor", "rollout"],
        "algorithm.adv_estimator=grpo critic.enable=True": ["actor", "critic", "rollout"],
    }
    assert {text: list(roles(job(VERL + text))) for text in names} == names


def test_verl_pools_of_their_own_take_nodes_after_the_trainer():
    text = VERL + "algorithm.adv_estimator=grpo reward_model.enable=True reward_model.enable_resource_pool=True "
    text += "reward_model.nnodes=1 reward_model.n_gpus_per_node=4 reward_model.rollout.tensor_model_parallel_size=4"
    found = job(text)
    assert found.size == (2, 8)
    assert roles(found)["reward"] == [(8,), (9,), (10,), (11,)]
    apart = job(
        text.replace("main_ppo", "main_ppo") + " trainer.v1.trainer_mode=separate_async "
        "actor_rollout_ref.rollout.nnodes=1 actor_rollout_ref.rollout.n_gpus_per_node=8"
    )
    assert list(roles(apart)) == ["actor", "rollout", "rollout_standalone", "reward"]


def test_verl_with_the_rollout_apart_gives_each_engine_its_own_nodes():
    text = (
        VERL.replace("trainer.main_ppo", "experimental.one_step_off_policy.main_ppo") + "algorithm.adv_estimator=grpo "
    )
    found = job(
        text + "rollout.nnodes=2 rollout.n_gpus_per_node=4 actor_rollout_ref.rollout.tensor_model_parallel_size=8"
    )
    # An engine of 8 on nodes of 4 has two groups of four GPUs.
    assert found.size == (2, 8)
    assert roles(found, (8, 4, 4))["rollout"] == [(rank,) for rank in range(8, 16)]
    assert found.lay_out((8, 4, 4))[-1].together == 8


def test_verl_refuses_what_does_not_divide():
    text = VERL + "algorithm.adv_estimator=grpo trainer.nnodes=3 "
    tp = "actor_rollout_ref.rollout.tensor_model_parallel_size=16"
    assert codes(job(text + tp)) == [("error", "not-divisible"), ("error", "batch-not-divisible")]
    assert codes(job(text + "actor_rollout_ref.actor.use_dynamic_bsz=True")) == []
    megatron = "model_engine=megatron actor_rollout_ref.actor.megatron.tensor_model_parallel_size="
    assert codes(job(text + megatron + "5")) == [("error", "not-divisible")]
    assert codes(job(text + megatron + "4 actor_rollout_ref.actor.use_dynamic_bsz=True")) == []
    small = "data.train_batch_size=24 actor_rollout_ref.actor.ppo_mini_batch_size=48"
    assert codes(job(text + small)) == [("error", "batch-too-small")]
    remark = next(item for item in job_with_roles(text + tp).remarks if item.code == "not-divisible")
    assert remark.message == "the number of GPUs of rollout is 24, which TP 16 does not divide"
    assert remark.hint == "take 16 or 32"
    assert remark.where.text[remark.where.offset :].startswith(
        "actor_rollout_ref.rollout.tensor_model_parallel_size=16"
    )


def job_with_roles(text: str) -> ForeignJob:
    found = job(text)
    roles(found)
    return found


def test_verl_asks_for_more_than_there_is():
    with pytest.raises(
        PlacementError, match="the pool of the trainer takes 4 x 8 GPUs, and of 2 x 8 16 are free"
    ) as error:
        roles(job(VERL + "trainer.nnodes=4"), (8, 8))
    assert error.value.problems[0].where.line == 1


def test_verl_reads_the_yaml_beside_a_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config/base.yaml").write_text("trainer: {nnodes: 2, n_gpus_per_node: 4}\n")
    (tmp_path / "config/mine.yaml").write_text("defaults: [base, ppo_trainer, _self_]\ntrainer: {n_gpus_per_node: 2}\n")
    text = 'C="$PWD/config"\n' + VERL + '--config-path="$C" --config-name=mine algorithm.adv_estimator=grpo '
    assert job(text).size == (2, 2)
    assert job(text + "trainer.nnodes=3").size == (3, 2)


def test_verl_trains_supervised_with_one_process_for_each_gpu():
    text = "torchrun --standalone --nnodes=2 --nproc_per_node=$N -m verl.trainer.sft_trainer data.x=1"
    assert roles(job(text, "N=2"), (2, 2)) == {"sft": [(0,), (1,), (2,), (3,)]}


# slime and miles.


def test_slime_packs_training_and_engines_in_the_order_of_gpus():
    found = job(SLIME + "--actor-num-gpus-per-node 4 --rollout-num-gpus 8 --rollout-num-gpus-per-engine 4")
    assert roles(found) == {"actor": [(0,), (1,), (2,), (3,)], "rollout": [(4, 5, 6, 7), (8, 9, 10, 11)]}
    assert found.size == (2, 8)


def test_slime_colocates_engines_on_the_gpus_of_training():
    found = job(SLIME + "--actor-num-gpus-per-node 8 --colocate --rollout-num-gpus-per-engine 2")
    assert roles(found)["rollout"] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    more = job(SLIME + "--colocate --rollout-num-gpus 16 --rollout-num-gpus-per-engine 16 --actor-num-gpus-per-node 8")
    assert roles(more)["rollout"] == [tuple(range(8)), tuple(range(8, 16))]
    # miles takes as many for the rollout as for training, whatever is given.
    same = job(SLIME + "--colocate --rollout-num-gpus 16 --actor-num-gpus-per-node 8", chosen="miles")
    assert len(roles(same)["rollout"]) == 8


@pytest.mark.parametrize(
    "flag", ["--debug-train-only", "--rollout-external-engine-addrs a:1", "--load-debug-rollout-data x"]
)
def test_slime_without_engines_of_its_own_places_training_alone(flag):
    assert list(roles(job(SLIME + flag + " --actor-num-gpus-per-node 8"))) == ["actor"]


def test_slime_finds_flags_that_contradict_each_other():
    few = SLIME + "--colocate --actor-num-gpus-per-node 4 "
    assert codes(job(few)) == [("warning", "gpus-per-node")]
    assert codes(job(few + "--num-gpus-per-node 4")) == []
    assert codes(job(few + "--num-gpus-per-node 4 --update-weight-mode delta")) == [("error", "colocate-contradicts")]
    assert codes(job(SLIME + "--actor-num-gpus-per-node 8")) == [("error", "no-rollout-gpus")]
    assert codes(job(SLIME + "--actor-num-gpus-per-node 8 --rollout-num-gpus 6 --rollout-num-gpus-per-engine 4")) == [
        ("error", "not-divisible")
    ]
    expert = "--expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --pipeline-model-parallel-size 2"
    assert codes(job(SLIME + f"--actor-num-gpus-per-node 8 --debug-train-only {expert}")) == [
        ("error", "not-divisible")
    ]
    steps = "--debug-train-only --rollout-batch-size 32 --n-samples-per-prompt 8 --num-steps-per-rollout 4 "
    steps += "--global-batch-size "
    assert codes(job(SLIME + steps + "64")) == []
    assert codes(job(SLIME + steps + "128")) == [("error", "batch-not-divisible")]


def test_miles_has_engines_for_evaluation_and_prefill():
    text = SLIME + "--actor-num-gpus-per-node 2 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 2 "
    found = job(text + "--prefill-num-servers 1 --eval-num-gpus 2 --eval-num-gpus-per-engine 1", chosen="miles")
    assert {name: len(own) for name, own in roles(found).items()} == {
        "actor": 2,
        "rollout_prefill": 1,
        "rollout_decode": 1,
        "eval": 2,
    }


# Speed and size.


def test_a_thousand_nodes_are_read_at_once():
    found = job(VERL + "trainer.nnodes=1000 algorithm.adv_estimator=grpo")
    assert len(roles(found)["actor"]) == 8000
    with pytest.raises(ConfigError, match="asks for 999999999999 nodes"):
        job(VERL + "trainer.nnodes=999999999999").size  # noqa: B018 - asks
