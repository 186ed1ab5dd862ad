"""The flags of a train/rollout job, and the same layout as a placement: both ways, the same plan."""

from __future__ import annotations

import argparse
import socket

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from roost import ConfigError, Topology, make_plan
from roost.rl import Mode, TrainRolloutFlags, config_to_flags, flags_to_config, make_flags_plan, read_flags, sort_key
from roost.rl.flags import engine_parts


@st.composite
def jobs(draw: st.DrawFn) -> tuple[TrainRolloutFlags, Topology]:
    """Flags, and unequal nodes that they fit on."""
    nodes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    total = sum(nodes)
    assume(total >= 2)
    train_nodes = draw(st.integers(1, 3))
    per_node = draw(st.integers(1, 6))
    per_engine = draw(st.integers(1, 5))
    engines = draw(st.integers(0, 4))
    mode = draw(st.sampled_from(list(Mode)))
    given_flags = {
        "actor_num_nodes": train_nodes,
        "actor_num_gpus_per_node": per_node,
        "rollout_num_gpus_per_engine": per_engine,
        "dp_attention_size": draw(st.integers(1, 4)),
        "num_gpus_per_actor": draw(st.sampled_from([0.8, 0.25])),
        "use_critic": draw(st.booleans()),
        "rollout_external": draw(st.sampled_from([False, False, False, True])),
        "colocate": mode is Mode.COLOCATE,
        "debug_train_only": mode is Mode.TRAIN_ONLY,
        "debug_rollout_only": mode is Mode.ROLLOUT_ONLY,
        "rollout_num_gpus": per_engine * engines,
    }
    flags = TrainRolloutFlags(**given_flags)
    # A router alone is placed on no accelerator.
    assume(0 < flags.num_gpus <= total)
    shorthand = ",".join(f"1x{count}" for count in nodes)
    return flags, Topology.from_shorthand(shorthand)


@given(jobs())
def test_flags_become_yaml_and_come_back_with_the_same_plan(job):
    flags, topology = job
    config = flags_to_config(flags, topology)
    plan = make_plan(config, topology)
    again = config_to_flags(config, topology)
    assert make_plan(flags_to_config(again, topology), topology) == plan
    assert again.mode == flags.mode
    assert again.num_engines == flags.num_engines
    assert make_flags_plan(flags, topology) == plan
    pieces = sorted(plan.occupants())
    assert len(pieces) == flags.num_gpus, "as many accelerators as the documents count"
    if flags.use_critic and "actor" in plan.names:
        assert plan.component("critic").placements == plan.component("actor").placements
    if flags.mode is Mode.DISAGGREGATED:
        train = {
            p
            for place in plan.component("actor").placements
            for p in [(place.cluster_node_rank, *place.local_hardware_ranks)]
        }
        assert len(train) == flags.train_num_gpus
        assert flags.rollout_offset == flags.train_num_gpus
        if flags.num_engines:
            assert plan.component("rollout").hardware_ranks[0] == flags.rollout_offset
    if "rollout" in plan.names:
        for placement in plan.component("rollout").placements:
            assert len(placement.local_hardware_ranks) <= flags.rollout_num_gpus_per_engine


@given(st.lists(st.integers(0, 4), min_size=1, max_size=24), st.integers(1, 6))
def test_every_slot_belongs_to_one_process_and_no_process_has_two_nodes(nodes, per_engine):
    nodes = sorted(nodes)
    engines = engine_parts(len(nodes), per_engine, nodes)
    places = [place for engine in engines for part in engine for place in part]
    assert places == list(range(len(nodes) // per_engine * per_engine))
    for engine in engines:
        assert sum(map(len, engine)) == per_engine
        for part in engine:
            assert len({nodes[place] for place in part}) == 1
        assert len({nodes[part[0]] for part in engine}) == len(engine), "one process on each of its nodes"


@pytest.mark.parametrize(
    "args",
    [
        {"actor_num_nodes": 2, "actor_num_gpus_per_node": 3, "colocate": True, "lr": 1},
        argparse.Namespace(actor_num_nodes=2, actor_num_gpus_per_node=3, colocate=True, rollout_num_gpus=None, lr=1),
        OmegaConf.create({"actor_num_nodes": 2, "actor_num_gpus_per_node": 3, "colocate": True, "lr": 1}),
        TrainRolloutFlags(actor_num_nodes=2, actor_num_gpus_per_node=3, colocate=True),
    ],
    ids=["dict", "namespace", "config", "flags"],
)
def test_flags_come_from_whatever_has_them(args):
    flags = read_flags(args)
    assert flags.num_gpus == 6
    assert flags.mode is Mode.COLOCATE
    assert (flags.num_gpus_per_actor, flags.num_gpus_per_engine) == (0.8, 0.2)


SLIME = {"actor_num_nodes": 1, "actor_num_gpus_per_node": 2, "rollout_num_gpus": 2}


@pytest.mark.parametrize(
    ("changes", "reserved", "engines", "offset"),
    [
        ({}, 4, 2, 2),
        ({"colocate": True}, 2, 2, 0),
        ({"colocate": True, "rollout_num_gpus": 6}, 6, 6, 0),
        ({"rollout_external": True}, 2, 0, 2),
        ({"rollout_external_engine_addrs": ["10.0.0.7:20300"], "rollout_num_gpus": None}, 2, 0, 2),
        ({"rollout_external": True, "colocate": True}, 2, 0, 2),
        ({"rollout_num_gpus": 0}, 2, 0, 2),
        ({"rollout_num_gpus": 0, "colocate": True}, 2, 0, 0),
        (
            {"rollout_num_gpus": 0, "debug_rollout_only": True, "actor_num_nodes": 0, "actor_num_gpus_per_node": 0},
            0,
            0,
            0,
        ),
        ({"use_critic": True}, 4, 2, 2),
        ({"use_critic": True, "critic_num_nodes": 1, "critic_num_gpus_per_node": 2}, 4, 2, 2),
        ({"debug_train_only": True, "rollout_external": True}, 2, 0, 0),
    ],
)
def test_as_many_accelerators_are_reserved_as_slime_reserves(changes, reserved, engines, offset):
    flags = read_flags(argparse.Namespace(**(SLIME | changes)))
    assert (flags.num_gpus, flags.engines_num_gpus, flags.rollout_offset) == (reserved, engines, offset)


def test_a_critic_shares_the_accelerators_of_the_actor():
    flags = read_flags(SLIME | {"colocate": True, "use_critic": True})
    assert (flags.num_gpus_per_actor, flags.num_gpus_per_engine) == (0.4, 0.2)
    config = flags_to_config(flags, Topology.from_shorthand("1x2"))
    assert config["cluster"]["component_placement"] == {"actor": "0-1:0-1", "critic": "0-1:0-1", "rollout": "0-1:0-1"}
    with pytest.raises(ConfigError, match=r"with use_critic an accelerator is shared: .* add up to 1.2"):
        read_flags(SLIME | {"use_critic": True, "num_gpus_per_actor": 0.6})
    with pytest.raises(ConfigError, match="critic_num_nodes is 3, and actor_num_nodes is 1"):
        read_flags(SLIME | {"use_critic": True, "critic_num_nodes": 3})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("rolout_num_gpus", "rollout_num_gpus"),
        ("collocate", "colocate"),
        ("actor_num_gpu_per_node", "actor_num_gpus_per_node"),
        ("rollout_num_gpus_per_engines", "rollout_num_gpus_per_engine"),
        ("use_critics", "use_critic"),
    ],
)
def test_a_name_that_looks_like_a_flag_is_an_error_with_the_flag_that_is_meant(name, meant):
    for args in (SLIME | {name: 1}, argparse.Namespace(**SLIME, **{name: 1}), OmegaConf.create(SLIME | {name: 1})):
        with pytest.raises(ConfigError, match=f"there is no flag '{name}'") as caught:
            read_flags(args)
        assert caught.value.problems[0].hint == f"did you mean {meant!r}?"


def test_names_of_a_job_that_look_like_no_flag_are_its_own():
    # slime's own, those that are most like flags of Roost.
    names = "num_gpus_per_node rollout_num_process rollout_global_dataset actor_lr rollout_seed num_rollout critic_lr"
    names += " rollout_batch_size rollout_function_path offload_rollout debug_rollout_data num_steps_per_rollout"
    assert read_flags(argparse.Namespace(**SLIME, **dict.fromkeys(names.split(), 8))) == TrainRolloutFlags(**SLIME)
    # Megatron's and SGLang's, and what nobody has set.
    names = "num_nodes num_gpus world_size sglang_nnodes num_experts eval_iters train_iters router_servers"
    own = dict.fromkeys(names.split(), 8) | {"critic_num_gpus": None, "reward_num_gpus": 0, "rollout_nodes": ["a"]}
    assert read_flags(argparse.Namespace(**SLIME, **own)) == TrainRolloutFlags(**SLIME)


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("reward_num_gpus", 4, "did you mean 'rollout_num_gpus'? Otherwise leave it out"),
        ("rollout_num_servers", "2", "did you mean 'rollout_num_gpus'? Otherwise leave it out"),
        ("ref_gpus", 1, "leave it out, or write the placement into a job.yaml"),
        ("sglang_config", "groups.yaml", "leave it out, or write the placement into a job.yaml"),
        ("eval_num_gpus", 2, "leave it out, or write the placement into a job.yaml"),
    ],
)
def test_a_flag_that_says_how_much_hardware_something_has_and_is_none_of_roosts_is_an_error(name, value, hint):
    with pytest.raises(ConfigError, match=f"{name} is {value!r}: Roost has no such flag") as caught:
        read_flags(SLIME | {name: value})
    assert caught.value.problems[0].hint.startswith(hint)


@pytest.mark.parametrize(
    ("given_flags", "message"),
    [
        ({"actor_num_nodes": 0}, "actor_num_nodes is 0: it is a whole number, from 1 to 1000000"),
        ({"actor_num_nodes": "2"}, "actor_num_nodes is '2'"),
        ({"rollout_num_gpus": True}, "rollout_num_gpus is True"),
        ({"colocate": 1}, "colocate is 1: it is true or false"),
        ({}, "rollout_num_gpus is missing"),
        ({"debug_rollout_only": True}, "rollout_num_gpus is missing"),
        ({"debug_rollout_only": True, "debug_train_only": True}, "exclude each other"),
        (
            {"rollout_num_gpus": 3, "rollout_num_gpus_per_engine": 2},
            "3 accelerators cannot be divided among engines of 2",
        ),
        ({"rollout_num_gpus": -1}, "rollout_num_gpus is -1: it is a whole number, from 0 to 1000000"),
        ({"colocate": True, "num_gpus_per_engine": 0.3}, "add up to 1.1"),
        ({"rollout_num_gpus": 1, "num_gpus_per_actor": 1.5}, "num_gpus_per_actor is 1.5"),
        ({"rollout_num_gpus": 1, "num_gpus_per_engine": 0}, "num_gpus_per_engine is 0"),
    ],
)
def test_wrong_flags_are_named(given_flags, message):
    with pytest.raises(ConfigError) as caught:
        TrainRolloutFlags(**given_flags)
    assert message in str(caught.value)


def test_one_error_has_all_mistakes_of_the_flags():
    with pytest.raises(ConfigError) as caught:
        TrainRolloutFlags(actor_num_nodes=-1, num_gpus_per_actor=7, colocate="yes")
    assert len(caught.value.problems) == 3
    with pytest.raises(ConfigError) as caught:
        TrainRolloutFlags(num_gpus_per_actor=7)
    assert [problem.message.split()[0] for problem in caught.value.problems] == [
        "num_gpus_per_actor",
        "rollout_num_gpus",
    ]


def test_what_has_no_flags_and_what_flags_cannot_express_is_refused():
    topology = Topology.from_shorthand("2x4")
    with pytest.raises(ConfigError, match="has no flags"):
        read_flags("--colocate")
    with pytest.raises(ConfigError, match="ask for 10 accelerators, and the cluster has 8"):
        flags_to_config({"actor_num_gpus_per_node": 4, "rollout_num_gpus": 6}, topology)
    for placement, message in [
        ({"actor": "0-3", "reward": "4-7"}, "places reward too"),
        ({"actor": "0-3", "critic": "4-7"}, "'critic' is not placed as flags would place it"),
        ({"actor": "4-7"}, "is not placed as flags would place it"),
        ({"actor": "0-3", "rollout": "6-7"}, "is not placed as flags would place it"),
    ]:
        with pytest.raises(ConfigError, match=message):
            config_to_flags({"cluster": {"num_nodes": 2, "component_placement": placement}}, topology)
    config = flags_to_config({"actor_num_gpus_per_node": 4, "colocate": True}, topology)
    config["train_rollout"]["num_gpu_per_actor"] = 0.1
    with pytest.raises(ConfigError, match="there is no flag 'num_gpu_per_actor'"):
        config_to_flags(config, topology)


def test_the_sort_key_returns_what_that_of_the_documents_returns(monkeypatch):
    def resolve(name: str) -> str:
        if name == "worker-a":
            return "10.0.0.5"
        raise socket.gaierror(name)

    monkeypatch.setattr("socket.gethostbyname", resolve)
    assert sort_key((0, "10.0.0.10", 3)) == ([10, 0, 0, 10], 3)
    assert sort_key((1, "worker-a", "GPU-5f")) == ([10, 0, 0, 5], "GPU-5f")
    assert sort_key((2, "host", 0)) == ([ord(character) for character in "host"], 0)
    assert sort_key((3, "fe80::1", 0)) == ([ord(character) for character in "fe80::1"], 0)
    found = [(0, "host", 0), (1, "10.0.0.10", 1), (2, "10.0.0.10", 0), (3, "10.0.0.9", 10), (4, "10.0.0.9", 9)]
    assert [item[0] for item in sorted(found, key=sort_key)] == [4, 3, 2, 1, 0]
    shared = [(0, "10.0.0.1", 1, "b"), (1, "10.0.0.1", 0, "b"), (2, "10.0.0.1", 1, "a"), (3, "10.0.0.1", 0, "a")]
    assert [item[0] for item in sorted(shared, key=sort_key)] == [3, 2, 1, 0], "one node after the other"
