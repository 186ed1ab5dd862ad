"""Mistakes in the sections `workers` and `entry` of a job: each is reported with its place, all in one error."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from roost import ComponentPlacement, ConfigError, Topology, make_plan
from roost.cli.main import app
from roost.config.run import read_job_text, read_run_config
from roost.config.values import LEAST_SHARE, share_problem
from roost.runtime.process.environment import check_variables
from roost.runtime.reserve.reservation import check_share

CLUSTER = "cluster: {num_nodes: 1, component_placement: {actor: 0-1, rollout: 2-3}}\n"


def read(text: str):
    return read_run_config(read_job_text(CLUSTER + text, name="job.yaml"))


def test_the_short_and_the_long_form_are_read():
    config = read(
        """
workers:
  rollout: my_job:Rollout
  actor:
    class: my.job.Actor
    args: [1, two]
    kwargs: {lr: 0.1, name: no}
    env_vars: {A: 1, B: text, C: 0x10}
    max_concurrency: 4
    restarts: 2
    preload: [torch, os.path, torch]
entry: my.job.main
"""
    )
    assert config.entry == "my.job.main"
    actor, rollout = config.workers
    assert (actor.component, actor.target, actor.args) == ("actor", "my.job.Actor", (1, "two"))
    assert actor.kwargs == {"lr": 0.1, "name": "no"}
    assert actor.env_vars == {"A": "1", "B": "text", "C": "0x10"}
    assert (actor.max_concurrency, actor.restarts) == (4, 2)
    assert actor.preload == ("torch", "os.path")
    assert (rollout.target, rollout.args, rollout.restarts, rollout.preload) == ("my_job.Rollout", (), 0, ())


def test_one_class_can_be_named_for_several_components():
    config = read("workers: {'actor, rollout': my.Job}\nentry: my.main\n")
    assert [worker.target for worker in config.workers] == ["my.Job", "my.Job"]


@pytest.mark.parametrize("more", ["", "flow: {step: rollout.generate -> actor.train, weights: actor -> rollout}\n"])
def test_one_slip_in_the_name_of_a_component_is_one_message(more):
    text = f"cluster: {{num_nodes: 1, component_placement: {{actor: 0-1, rollot: 2-3}}}}\n{more}"
    text += "workers: {actor: a.B, rollout: a.B}\nentry: a.b\n"
    with pytest.raises(ConfigError) as caught:
        read_run_config(read_job_text(text, name="job.yaml"))
    (problem,) = caught.value.problems
    assert (problem.message, problem.hint) == ("workers: the job has no component 'rollout'", "did you mean 'rollot'?")


@pytest.mark.parametrize(
    ("slip", "message", "hint"),
    [
        (("memory: {actor", "memory: {actr"), "memory: the job has no component 'actr'", "did you mean 'actor'?"),
        (("phases:", "phase:"), "memory without phases", "it has 'phase': did you mean 'phases'?"),
        (("memory:", "memry:"), "phases without memory", "it has 'memry': did you mean 'memory'?"),
    ],
)
def test_one_slip_in_what_a_job_holds_is_one_message(slip, message, hint):
    text = "workers: {actor: a.B, rollout: a.B}\nentry: a.b\nphases: {train: {actor: train, rollout: asleep}}\n"
    text += "memory: {actor: {train: 1GiB}, rollout: {asleep: 1GiB}}\n"
    with pytest.raises(ConfigError) as caught:
        read(text.replace(*slip))
    (problem,) = caught.value.problems
    assert problem.message.startswith(message)
    assert problem.hint == hint


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("entry: a.b\n", ["the job has no section 'workers'", "workers: {actor: my_job.Actor}"]),
        ("workers: {actor: a.B, rollout: a.B}\n", ["the job has no 'entry'"]),
        ("workers: {actor: a.B}\nentry: a.b\n", ["component 'rollout' has no class"]),
        ("workers: {actor: a.B, rolout: a.B}\nentry: a.b\n", ["no component 'rolout'", "rollout"]),
        ("workers: {actor: a.B, rollout: B}\nentry: a.b\n", ["'B' cannot be imported", "write module.Name"]),
        ("workers: {actor: a.B, rollout: 'os.system(1)'}\nentry: a.b\n", ["'os.system(1)' cannot be imported"]),
        ("workers: {actor: a.B, rollout: {kwargs: {}}}\nentry: a.b\n", ["'class'"]),
        (
            "workers: {actor: a.B, rollout: {class: a.B, kwargs: [1]}}\nentry: a.b\n",
            ["kwargs must be a mapping, not a list"],
        ),
        (
            "workers: {actor: a.B, rollout: {class: a.B, args: {a: 1}}}\nentry: a.b\n",
            ["args must be a list, not a mapping"],
        ),
        ("workers: {actor: a.B, rollout: {class: a.B, restarts: -1}}\nentry: a.b\n", ["restarts"]),
        ("workers: {actor: a.B, rollout: {class: a.B, max_concurrency: 0}}\nentry: a.b\n", ["max_concurrency"]),
        ("workers: {actor: a.B, rollout: {class: a.B, preload: torch}}\nentry: a.b\n", ["preload must be a list"]),
        (
            "workers: {actor: a.B, rollout: {class: a.B, preload: [to rch, 7, ../x, torch]}}\nentry: a.b\n",
            [
                "'to rch' is not the name of a module",
                "'7' is not the name",
                "'../x' is not",
                "write it as an import does",
            ],
        ),
        ("workers: {actor: a.B, rollout: {clas: a.B}}\nentry: a.b\n", ["did you mean 'class'?"]),
        (
            "workers: {actor: a.B, rollout: {class: a.B, env_vars: {A: [1]}}}\nentry: a.b\n",
            ["the variable A must be a single value"],
        ),
        (
            "workers: {actor: a.B, rollout: {class: a.B, env_vars: {A: null}}}\nentry: a.b\n",
            ["the variable A has no value", "write"],
        ),
        (
            "workers: {actor: a.B, rollout: {class: a.B, env_vars: {1A: x}}}\nentry: a.b\n",
            ["'1A' cannot name an environment variable"],
        ),
        ("workers: [a, b]\nentry: a.b\n", ["workers"]),
        ("workers: {actor: a.B, rollout: a.B}\nentry: [a]\n", ["entry"]),
        ("workers: {actor: a.B, rollout: ''}\nentry: a.b\n", ["worker 'rollout'"]),
    ],
)
def test_a_mistake_is_reported_with_its_place(text, messages):
    with pytest.raises(ConfigError) as caught:
        read(text)
    for message in messages:
        assert message in str(caught.value)
    assert "job.yaml" in str(caught.value)


def test_all_mistakes_come_in_one_error():
    with pytest.raises(ConfigError) as caught:
        read("workers: {actr: a.B, rollout: 7}\nentry: x\n")
    assert len(caught.value.problems) == 3, "that actor has no class is the same slip"


COMPONENTS = "".join(f"    role{number}: 0-7\n" for number in range(8))
WORKERS = "".join(f"  role{number}: my.Role{number}\n" for number in range(8))
FLOW = "flow:\n  step: role0.make -> role1.take\n"


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("component_placement:", "component_placment:", "did you mean 'component_placement'?"),
        ("cluster:", "clustr:", "is that 'clustr'?"),
        ("workers:", "worker:", "it has 'worker': did you mean 'workers'?"),
        ("entry:", "entri:", "it has 'entri': did you mean 'entry'?"),
    ],
)
def test_one_typo_in_the_name_of_a_section_gives_one_message(right, wrong, message):
    text = f"cluster:\n  component_placement:\n{COMPONENTS}workers:\n{WORKERS}entry: my.main\n{FLOW}"
    assert len(read_run_config(read_job_text(text, name="job.yaml")).workers) == 8
    with pytest.raises(ConfigError) as caught:
        read_run_config(read_job_text(text.replace(right, wrong), name="job.yaml"))
    (problem,) = caught.value.problems
    assert problem.hint == message


NONSENSE = """
workers: {actr: {clas: nothing, share: 7}}
entry: "not a target"
"""


@pytest.mark.parametrize("command", [["plan"], ["run", "--dry-run"], ["check"]])
def test_commands_that_read_a_job_refuse_nonsense_in_what_runs(tmp_path, command):
    job = tmp_path / "job.yaml"
    job.write_text(CLUSTER + NONSENSE)
    done = CliRunner().invoke(app, [*command, str(job), "--cluster", "1x8"])
    assert done.exit_code != 0
    with pytest.raises(ConfigError) as caught:
        make_plan(job, Topology.from_shorthand("1x8"))
    assert len(caught.value.problems) == 5
    assert {problem.where.line for problem in caught.value.problems if problem.where} == {3, 4}


@pytest.mark.parametrize("text", ["", "entry: my.main\n", "workers: {'actor, rollout': my.Job}\n"])
def test_a_job_without_one_of_the_sections_can_be_planned(tmp_path, text):
    job = tmp_path / "job.yaml"
    job.write_text(CLUSTER + text)
    assert make_plan(job, Topology.from_shorthand("1x8")).names == ["actor", "rollout"]


@pytest.mark.parametrize("other", [{"workers": 8}, {"workers": {"dataloader": 4}, "entry": ["anything"]}])
def test_a_config_from_python_may_have_other_sections_of_these_names(other):
    config = {"cluster": {"component_placement": {"actor": "0-7"}}, **other}
    hardware = Topology.from_shorthand("1x8")
    assert ComponentPlacement(config, hardware).get_world_size("actor") == 8
    assert make_plan(config, hardware).names == ["actor"]


@pytest.mark.parametrize("share", [0, -1, 0.00005, 1.0001, 7, float("nan"), True, "half", None])
def test_the_reader_and_the_launcher_refuse_the_same_shares(share):
    assert share_problem(share)
    with pytest.raises(ConfigError, match=r"from 0\.0001 to 1"):
        read_run_config(job_of(share=share))
    if share is not None:
        with pytest.raises(ConfigError, match=r"share is .*from 0\.0001 to 1"):
            check_share(share, "share")


@pytest.mark.parametrize("share", [LEAST_SHARE, 0.5, 1])
def test_the_reader_and_the_launcher_accept_the_same_shares(share):
    assert read_run_config(job_of(share=share)).workers[0].share == share
    check_share(share, "share")


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "ROOST_JOB"])
def test_a_worker_cannot_set_the_variables_that_roost_sets(name):
    with pytest.raises(ConfigError, match=f"worker 'actor': {name} is set by Roost"):
        read_run_config(job_of(env_vars={name: "1"}))


@pytest.mark.parametrize("value", [True, False])
def test_a_boolean_is_refused_as_a_variable_wherever_it_is_written(value):
    group = {"label": "a", "node_ranks": 0, "env_configs": [{"node_ranks": 0, "env_vars": {"A": value}}]}
    cluster = {"component_placement": {"actor": 0}, "node_groups": [group]}
    for read in (
        lambda: read_run_config(job_of(env_vars={"A": value})),
        lambda: make_plan({"cluster": cluster}, Topology.from_shorthand("1x8")),
        lambda: check_variables({"A": value}),
    ):
        with pytest.raises(ConfigError, match=f"the variable A is the boolean {value}") as caught:
            read()
        assert "quote it" in caught.value.problems[0].hint


def job_of(**worker):
    cluster = {"component_placement": {"actor": "0-7"}}
    return {"cluster": cluster, "workers": {"actor": {"class": "my_job.Actor", **worker}}, "entry": "my_job.main"}
