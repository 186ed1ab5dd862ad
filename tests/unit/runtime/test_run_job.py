"""Jobs before they start: their options, and mistakes reported without a Ray cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import warm
from roost import ConfigError, JobConfig
from roost.cli.main import app
from roost.cli.report import user_report
from roost.config.job import read_job_draft
from roost.runtime.job import load, run_job
from roost.runtime.options import ClusterOptions, RunOptions
from roost.runtime.runs.record import RunJob

JOB = Path(__file__).resolve().parents[3] / "examples" / "two_components"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("two_components.Actor", "two_components.Actr", "did you mean two_components.Actor?"),
        ("two_components.Actor", "nowhere.Actor", "there is no module 'nowhere'"),
        ("two_components.Actor", "two_components.main", "derive the class from roost.Worker"),
        ("entry: two_components.main", "entry: two_components.__doc__", "cannot be called"),
        ("learning_rate: 0.5", "rate: 0.5", "worker 'actor': Actor.create_group: missing a required argument"),
        ("learning_rate: 0.5", "lerning_rate: 0.5", "'lerning_rate' is none: did you mean 'learning_rate'?"),
        ("num_nodes: 2", "num_nodes: 2\n  node_group: 1", "node_group"),
    ],
)
def test_a_mistake_in_the_job_is_an_error(monkeypatch, tmp_path, before, after, message):
    monkeypatch.syspath_prepend(str(JOB))
    text = (JOB / "job.yaml").read_text()
    assert before in text
    path = tmp_path / "job.yaml"
    path.write_text(text.replace(before, after))
    with pytest.raises(ConfigError) as caught:
        run_job(read_job_draft(path))
    assert message in str(caught.value)


def test_a_module_with_a_failing_import_is_not_called_missing(monkeypatch, tmp_path):
    (tmp_path / "needs_more.py").write_text("import something_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="something_that_is_not_there"):
        load("needs_more.Actor")


@pytest.mark.parametrize(
    ("code", "frames", "end"),
    [
        ("def low():\n    open('/nowhere/at/all')\nlow()\n", 2, "FileNotFoundError: [Errno 2]"),
        ("import missing_here\n", 1, "ModuleNotFoundError: No module named 'missing_here'"),
        ("def low(:\n", 1, "SyntaxError: invalid syntax"),
    ],
)
def test_a_traceback_of_user_code_begins_where_that_code_begins(tmp_path, code, frames, end):
    (tmp_path / "mine.py").write_text(code)
    text = (JOB / "job.yaml").read_text().replace("two_components.Actor", "mine.Actor")
    (tmp_path / "job.yaml").write_text(text)
    command = [sys.executable, "-m", "roost", "run", "job.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    shown = [line for line in done.stderr.splitlines() if line.startswith("  File ")]
    assert [f'"{tmp_path}/mine.py"' in line for line in shown] == [True] * frames
    assert done.stderr.splitlines()[-1].startswith(end)


def test_a_traceback_of_roost_itself_is_shown_whole():
    ours = {"__name__": "roost.cli.plans", "json": json}
    exec("def load(): json.loads('{')", ours)  # noqa: S102 - stands for a module with a bug
    with pytest.raises(ValueError, match="Expecting") as raised:
        ours["load"]()
    # From the command down, as the command line sees it.
    error = raised.value.with_traceback(raised.value.__traceback__.tb_next)
    assert user_report(error) is None


def test_an_exception_from_a_workers_constructor_is_shown_with_its_notes():
    error = FileNotFoundError(2, "No such file or directory", "model.bin")
    error.add_note("in actor:0 on node 1")
    assert user_report(error) is None, "so far it is an error of Roost"
    error.worker_failures = ()
    shown = "FileNotFoundError: [Errno 2] No such file or directory: 'model.bin'\nin actor:0 on node 1\n"
    assert user_report(error) == shown


def test_a_dry_run_is_the_plan():
    job = str(JOB / "job.yaml")
    dry = CliRunner().invoke(app, ["run", job, "--dry-run", "--cluster", "2x4"])
    assert dry.exit_code == 0
    assert dry.stdout == CliRunner().invoke(app, ["plan", job, "--cluster", "2x4"]).stdout
    assert "rollout" in dry.stdout
    refused = CliRunner().invoke(app, ["run", job, "--cluster", "2x4"])
    assert isinstance(refused.exception, ConfigError)


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        (RunOptions(), {}),
        (RunOptions(placement="hybrid", isolate_accelerator=False), {"--placement": "hybrid", "--no-isolate": True}),
        (RunOptions(reserve=False, quiet=True), {"--no-reserve": True, "--quiet": True}),
        (
            RunOptions(overrides=("steps=5", "+lr=0.1"), name="base", note="a first try", wait=7200.0, local="2x4"),
            {
                "steps=5": True,
                "+lr=0.1": True,
                "--local": "2x4",
                "--name": "base",
                "--note": "a first try",
                "--wait": "7200s",
            },
        ),
        (RunOptions(address="10.0.0.1:6379", run_dir="out"), {"--address": "10.0.0.1:6379", "--run-dir": "out"}),
    ],
)
def test_the_options_of_a_run_are_kept_as_flags_and_read_back(options, flags):
    job = RunJob(file="job.yaml", hash="ff", flags=options.to_flags())
    assert dict(job.flags) == flags
    assert RunOptions.from_flags(job.flags) == options


def test_a_cluster_config_that_was_read_is_not_read_again():
    groups = [{"label": "train", "node_ranks": "0-1"}]
    section = {"num_nodes": 2, "component_placement": {"actor": "0-7"}, "node_groups": groups}
    config = JobConfig.from_dict({"cluster": section}).cluster
    options = ClusterOptions.check(cluster_cfg=config, quiet=True)
    assert options == ClusterOptions.check(cluster_cfg=section, quiet=True)
    assert (options.num_nodes, options.groups is config.node_groups, options.attaches) == (2, True, False)
    assert ClusterOptions.check(namespace="mine").attaches
    with pytest.raises(AttributeError):
        options.num_nodes = 3
    with pytest.raises(ConfigError, match="num_nodes is 3, and cluster_cfg says 2"):
        ClusterOptions.check(3, config)
    with pytest.raises(ConfigError, match="record is 1: it is True or False"):
        ClusterOptions.check(record=1)


def test_check_reports_all_that_can_be_known_without_a_cluster(tmp_path):
    text = (JOB / "job.yaml").read_text()
    (tmp_path / "job.yaml").write_text(text.replace("two_components.Actor", "two_components.Actr"))
    (tmp_path / "two_components.py").write_text((JOB / "two_components.py").read_text())

    def check(*words: str) -> subprocess.CompletedProcess[str]:
        command = ["roost", "check", "job.yaml", "--cluster", "2x4", *words]
        environment = warm.environment()
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)

    done = check("entry=two_components.mian", "cluster.component_placement.rollout=6-9")
    assert done.returncode == 2
    assert done.stderr.count("hint:") == 3, done.stderr
    assert "job.yaml:11:12: two_components.Actr: module 'two_components' has no 'Actr'" in done.stderr
    assert "did you mean two_components.main?" in done.stderr
    assert "component 'rollout' asks for hardware rank 9" in done.stderr
    right = check("workers.actor.class=two_components.Actor")
    assert right.returncode == 0, right.stderr
    assert right.stdout.startswith("job.yaml can run: 2 components, 6 workers, entry two_components.main, plan ")
    flow = (tmp_path / "job.yaml").read_text() + "flow:\n  step: rollout.sampls -> actor.train\n"
    (tmp_path / "job.yaml").write_text(flow)
    misspelt = check("workers.actor.class=two_components.Actor")
    assert misspelt.returncode == 2
    line = flow.splitlines().index("  step: rollout.sampls -> actor.train") + 1
    said = f"job.yaml:{line}:9: flow: rollout.sampls: two_components.Rollout has no method 'sampls'"
    assert said in misspelt.stderr
    assert "did you mean rollout.samples?" in misspelt.stderr
    assert misspelt.stderr.count("hint:") == 1
    nowhere = check("workers.actor.class=nowhere.Actor", "workers.rollout.class=nowhere.Rollout", "entry=nowhere.main")
    assert nowhere.stderr.count("there is no module 'nowhere'") == nowhere.stderr.count("hint:") == 1
    said = "raises WorkerDied, although it is restarted; two_components.main does not handle that, and the job ends"
    (tmp_path / "job.yaml").write_text(flow.replace("sampls", "samples"))
    kept = ("workers.actor.class=two_components.Actor", "+workers.rollout.restarts=1")
    assert f"info: rollout: a call in which a worker dies {said} [death-unhandled]" in check(*kept).stdout
    module = tmp_path / "two_components.py"
    text = module.read_text()
    for handled in ("except WorkerDied:", "except (OSError, roost.ClusterError):", "except:"):
        module.write_text(f"{text}\n\ndef more():\n    try:\n        pass\n    {handled}\n        pass\n")
        assert "death-unhandled" not in check(*kept).stdout
    module.write_text(f"{text}\n\ndef more():\n    try:\n        pass\n    except KeyError:\n        pass\n")
    assert "death-unhandled" in check(*kept).stdout
    module.write_text(text)
    wrong = check("workers.actor.class=two_components.Actor", "+workers.actor.kwargs.speed=1")
    assert "worker 'actor': Actor.create_group: got an unexpected keyword argument 'speed'" in wrong.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--local", "2x4", "--address", "auto"], "--local and --address contradict each other"),
        (["--name", "a", "--run-dir", "b"], "--name and --run-dir contradict each other"),
        (["--name", "a/b"], "'a/b' cannot name a run"),
        (["--name", "latest"], "'latest' cannot name a run"),
        (["--wait", "soon"], "'soon' is not a time"),
        (["stepps=3"], "the file has no 'stepps'"),
    ],
)
def test_wrong_options_of_a_run_are_refused_before_anything_starts(words, message):
    refused = CliRunner().invoke(app, ["run", str(JOB / "job.yaml"), *words])
    assert isinstance(refused.exception, ConfigError)
    assert message in str(refused.exception)
