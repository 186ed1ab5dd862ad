"""Mistakes in the sections `workers` and `entry` of a job: each told with its place, all at once."""

from __future__ import annotations

import pytest

from roost import ConfigError
from roost.config.job import read_job_draft
from roost.config.run import read_run_config
from roost.config.yaml_file import parse_text

CLUSTER = "cluster: {num_nodes: 1, component_placement: {actor: 0-1, rollout: 2-3}}\n"


def read(text: str):
    return read_run_config(read_job_draft(parse_text(CLUSTER + text, name="job.yaml")))


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
entry: my.job.main
"""
    )
    assert config.entry == "my.job.main"
    actor, rollout = config.workers
    assert (actor.component, actor.target, actor.args) == ("actor", "my.job.Actor", (1, "two"))
    assert actor.kwargs == {"lr": 0.1, "name": "no"}
    assert actor.env_vars == {"A": "1", "B": "text", "C": "0x10"}
    assert (actor.max_concurrency, actor.restarts) == (4, 2)
    assert (rollout.target, rollout.args, rollout.restarts) == ("my_job.Rollout", (), 0)


def test_one_class_can_be_named_for_several_components():
    config = read("workers: {'actor, rollout': my.Job}\nentry: my.main\n")
    assert [worker.target for worker in config.workers] == ["my.Job", "my.Job"]


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("entry: a.b\n", ["the job has no section 'workers'", "workers: {actor: my_job.Actor}"]),
        ("workers: {actor: a.B, rollout: a.B}\n", ["the job has no 'entry'"]),
        ("workers: {actor: a.B}\nentry: a.b\n", ["component 'rollout' has no class"]),
        ("workers: {actor: a.B, rolout: a.B}\nentry: a.b\n", ["no component 'rolout'", "rollout"]),
        ("workers: {actor: a.B, rollout: B}\nentry: a.b\n", ["'B' names nothing", "write module.Name"]),
        ("workers: {actor: a.B, rollout: 'os.system(1)'}\nentry: a.b\n", ["names nothing that can be imported"]),
        ("workers: {actor: a.B, rollout: {kwargs: {}}}\nentry: a.b\n", ["'class'"]),
        (
            "workers: {actor: a.B, rollout: {class: a.B, kwargs: [1]}}\nentry: a.b\n",
            ["kwargs has to be a mapping, and this is a list"],
        ),
        (
            "workers: {actor: a.B, rollout: {class: a.B, args: {a: 1}}}\nentry: a.b\n",
            ["args has to be a list, and this is a mapping"],
        ),
        ("workers: {actor: a.B, rollout: {class: a.B, restarts: -1}}\nentry: a.b\n", ["restarts"]),
        ("workers: {actor: a.B, rollout: {class: a.B, max_concurrency: 0}}\nentry: a.b\n", ["max_concurrency"]),
        ("workers: {actor: a.B, rollout: {clas: a.B}}\nentry: a.b\n", ["did you mean 'class'?"]),
        ("workers: {actor: a.B, rollout: {class: a.B, env_vars: {A: [1]}}}\nentry: a.b\n", ["the value of A is text"]),
        ("workers: {actor: a.B, rollout: {class: a.B, env_vars: {A: null}}}\nentry: a.b\n", ["the value of A is text"]),
        ("workers: {actor: a.B, rollout: {class: a.B, env_vars: {1A: x}}}\nentry: a.b\n", ["'1A' cannot be set"]),
        ("workers: [a, b]\nentry: a.b\n", ["workers"]),
        ("workers: {actor: a.B, rollout: a.B}\nentry: [a]\n", ["entry"]),
        ("workers: {actor: a.B, rollout: ''}\nentry: a.b\n", ["worker 'rollout'"]),
    ],
)
def test_a_mistake_is_told_with_its_place(text, messages):
    with pytest.raises(ConfigError) as caught:
        read(text)
    for message in messages:
        assert message in str(caught.value)
    assert "job.yaml" in str(caught.value)


def test_all_mistakes_come_at_once():
    with pytest.raises(ConfigError) as caught:
        read("workers: {actr: a.B, rollout: 7}\nentry: x\n")
    assert len(caught.value.problems) == 4
