"""Settings of the command line in place of those of a job's file."""

from __future__ import annotations

import pytest

from roost import ConfigError
from roost.config.overrides import override
from roost.config.run import read_job_text, read_run_config
from roost.config.yaml_file import parse_text

JOB = """\
cluster:
  num_nodes: 2
  component_placement:
    actor: 0-3
    rollout: {placement: 4-7}
workers:
  actor: my_job.Actor
  rollout: {class: my_job.Rollout, kwargs: {lr: 0.1}}
entry: my_job.main
base: &base {lr: 1, deep: {steps: 3}}
first: *base
second: {<<: *base, own: 1}
rate: ${base.lr}
layers: [1, {size: 2}]
model.name: small
"""


def changed(*settings: str) -> dict:
    return override(parse_text(JOB, name="job.yaml"), settings).plain()


@pytest.mark.parametrize(
    ("setting", "path", "value"),
    [
        ("cluster.num_nodes=4", ("cluster", "num_nodes"), 4),
        ("cluster.component_placement.actor=0-3:0-7", ("cluster", "component_placement", "actor"), "0-3:0-7"),
        ("entry=my_job.other", ("entry",), "my_job.other"),
        ("layers.1.size=5", ("layers", 1, "size"), 5),
        ("layers={a: [1, no]}", ("layers", "a"), [1, "no"]),
        ("model.name=large", ("model.name",), "large"),
        ("base.lr=", ("base", "lr"), None),
        ("base.lr='2'", ("base", "lr"), "2"),
        ("rate=${base.deep.steps}", ("rate",), 3),
        ("+new.deep.key=1", ("new", "deep", "key"), 1),
        ("+base.lr=7", ("base", "lr"), 7),
        ("second.deep.steps=9", ("second", "deep", "steps"), 9),
    ],
)
def test_a_setting_replaces_one_value(setting, path, value):
    found = changed(setting)
    for part in path:
        found = found[part]
    assert found == value


def test_what_shares_an_anchor_is_not_changed_with_it():
    found = changed("first.deep.steps=9", "second.lr=5")
    assert (found["base"]["deep"]["steps"], found["first"]["deep"]["steps"]) == (3, 9)
    assert (found["base"]["lr"], found["second"]["lr"], found["second"]["deep"]["steps"]) == (1, 5, 3)


def test_interpolations_see_the_settings_and_later_ones_win():
    assert changed("base.lr=2", "base.lr=3")["rate"] == 3


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("steps", "'steps' is not a setting"),
        ("=3", "'=3' is not a setting"),
        ("cluster..x=3", "'cluster..x=3' is not a setting"),
        (
            "cluster.nmu_nodes=3",
            "command line:1:9: cluster has no 'nmu_nodes'\n    cluster.nmu_nodes=3\n            ^^^^^^^^^",
        ),
        ("cluster.nmu_nodes=3", "did you mean 'num_nodes'? +cluster.nmu_nodes=… adds it"),
        ("entry.deep=3", "command line:1:7: entry has no keys"),
        ("layers.7=3", "layers is a list, and has no '7'"),
        ("entry=[a", "command line:1:7: not YAML: this '[' is not closed"),
    ],
)
def test_a_setting_that_does_not_fit_is_shown_as_it_was_typed(setting, message):
    with pytest.raises(ConfigError) as caught:
        changed(setting)
    assert message in str(caught.value)


def test_all_wrong_settings_are_reported_together_and_values_are_checked_as_in_the_file():
    with pytest.raises(ConfigError) as caught:
        changed("nothing=1", "cluster.nodes=2")
    assert len(caught.value.problems) == 2
    settings = ["cluster.num_nodes=two", "workers.actor=Actor", "+cluster.extra=1"]
    with pytest.raises(ConfigError) as caught:
        read_run_config(read_job_text(JOB, name="job.yaml", overrides=settings))
    shown = str(caught.value)
    assert "command line:1:19: num_nodes must be a whole number, not 'two'\n    cluster.num_nodes=two" in shown
    assert "command line:1:15: worker 'actor'" in shown
    assert "    +cluster.extra=1\n" in shown
