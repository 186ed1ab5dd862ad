"""The record of a run: how it is written and read, and how runs are found again."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from roost import (
    ClusterError,
    ConfigError,
    FlexiblePlacementStrategy,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    Plan,
    Topology,
    make_plan,
)
from roost.config.hardware import AcceleratorType
from roost.machine.folders import socket_folder, state_folder
from roost.placement.from_groups import Placed, gather_plan
from roost.runtime.failures.failure import Failure, FailureKind
from roost.runtime.managers.job_info import JobInfo
from roost.runtime.nodes.info import AcceleratorInfo, NodeInfo
from roost.runtime.runs import index as index_module
from roost.runtime.runs import recorder as recorder_module
from roost.runtime.runs.diff import diff_records
from roost.runtime.runs.folder import RunDir, make_run_dir, own_run_dir
from roost.runtime.runs.index import add_run, find_run, find_running, is_gone, list_runs, read_run
from roost.runtime.runs.record import (
    GitState,
    RunGroup,
    RunJob,
    RunNode,
    RunOutcome,
    RunRecord,
    RunRestart,
    Status,
    files_of_others,
    outcome_of,
    read_record,
    text_hash,
    what_of,
)
from roost.runtime.runs.recorder import JobSource, Recorder
from roost.runtime.runs.snapshot import environment_of, git_state, loaded_versions, with_changes

TOPOLOGY = Topology.from_shorthand("2x4:H100")
BEGAN = "2026-03-01T10:00:00.000+01:00"
NODE = NodeInfo(
    rank=0,
    ray_id="a",
    address="10.0.0.2",
    name="train-0",
    hostname="train-0",
    is_head=True,
    cpus=8,
    memory=1,
    interpreter="/usr/bin/python",
    python="3.11",
    ray="2.47.0",
    network="net",
    ephemeral_ports=(32768, 60999),
    accelerators=(AcceleratorInfo(type=AcceleratorType.NVIDIA, device="0", model="H100"),),
)
RECORD = RunRecord(
    id="first",
    began=BEGAN,
    ended="2026-03-01T10:00:30.000+01:00",
    seconds=30.0,
    command=("/usr/bin/python", "train.py", "--lr", "1"),
    cwd="/home/me",
    user="me",
    host="train-0",
    pid=17,
    pid_began=1.5,
    address="10.0.0.2:6379",
    namespace="roost",
    versions={"ray": "2.60.0"},
    git=GitState(commit="a" * 40, branch="main", changed=True),
    environment={"NCCL_DEBUG": "INFO", "RAY_TOKEN": None},
    job=RunJob(file="job.yaml", hash="ff", flags=(("--no-reserve", True), ("--placement", "hybrid"))),
    nodes=(RunNode(rank=0, name="train-0", address="10.0.0.2", accelerators=(("H100", 4),)),),
    plan="ab" * 32,
    groups=(
        RunGroup(
            name="actor",
            class_name="my.Actor",
            began=BEGAN,
            placements=("node 0, accelerator 0", "node 0, accelerator 1"),
            seconds=2.0,
            phases=(("process up", 1.5), ("ready", 2.0)),
        ),
    ),
    restarts=(RunRestart(worker="actor:1", when=BEGAN, reason="it crashed", seconds=0.5),),
    outcome=RunOutcome(status=Status.FAILED, error="ValueError", message="bad", worker="actor:1", log="/logs/1.log"),
)


@pytest.fixture(autouse=True)
def own(monkeypatch, tmp_path_factory) -> Iterator[Path]:
    """An empty index of runs, and an empty folder for sockets with the short path that Ray needs."""
    base = tmp_path_factory.mktemp("user")
    folder = tempfile.mkdtemp(prefix="roost-", dir="/tmp")
    monkeypatch.setattr(tempfile, "tempdir", folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(base))
    monkeypatch.delenv("ROOST_RUNS_DIR", raising=False)
    found = base / "roost" / "runs"
    found.mkdir(parents=True)
    yield found
    shutil.rmtree(folder)


def begin(run_dir: RunDir) -> Recorder:
    """Begin a record as a driver does."""
    recorder = Recorder()
    job = JobInfo.of_this_process("10.0.0.2:6379", "roost", run_dir, keeps_events=False)
    recorder.begin(job, [NODE], TOPOLOGY)
    return recorder


def ids() -> set[str]:
    return {run.id for run in list_runs()}


def launch(recorder: Recorder, name: str, strategy=None, fails: bool = False) -> None:
    placements = (strategy or PackedPlacementStrategy(0, 7)).get_placement(TOPOLOGY)
    with recorder.launching(name, Recorder, strategy, placements) as note:
        if fails:
            raise LookupError("no luck")
        note({"process up": 1.25, "ready": 2.0})


def finished_run(folder: Path, *strategies, error: BaseException | None = None) -> Path:
    """Record a run that launches some groups and ends."""
    recorder = begin(make_run_dir(folder))
    for number, strategy in enumerate(strategies):
        launch(recorder, f"group{number}", strategy)
    recorder.note_error(error)
    recorder.end()
    return folder


def written(folder: Path, record: RunRecord) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(record.to_json())
    return folder


def test_a_record_comes_back_as_it_was_written():
    assert RunRecord.from_json(RECORD.to_json()) == RECORD
    bare = replace(RECORD, git=None, job=None, ended=None, seconds=None, plan=None, groups=(), restarts=())
    assert RunRecord.from_json(bare.to_json()) == bare


def test_every_field_is_written_under_its_own_name():
    @dataclass(frozen=True, slots=True, kw_only=True)
    class NamedNode(RunNode):
        host_name: str

    node = NamedNode(rank=0, name="train-0", address="10.0.0.2", accelerators=(), host_name="box")
    (written,) = replace(RECORD, nodes=(node,)).to_dict()["nodes"]
    assert written == {"rank": 0, "name": "train-0", "address": "10.0.0.2", "accelerators": {}, "host_name": "box"}
    (group,) = RECORD.to_dict()["groups"]
    assert list(group) == ["name", "class", "began", "placements", "seconds", "phases", "error", "world_size"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "has version 2, and this Roost reads 1"),
        ({"version": None}, "has version None"),
        ({"outcome": {"status": "odd", "error": "", "message": "", "worker": "", "log": ""}}, "'odd'"),
        ({"command": [1]}, "1 is not text"),
        ({"command": "python"}, "'python' is not a list"),
        ({"began": "yesterday"}, "yesterday"),
        ({"began": "2026-03-01T10:00:00"}, "no time zone"),
        ({"seconds": "many"}, "'many' is not a number"),
        ({"nodes": [{}]}, "KeyError: 'rank'"),
        ({"groups": 3}, "TypeError: 3 is not a list"),
        ({"versions": []}, "[] is not a map"),
        ({"pid": -1}, "-1 is not a process id"),
        ({"pid": float("inf")}, "inf is not a whole number"),
        ({"git": ""}, "TypeError: '' is not a map"),
        ({"job": []}, "TypeError: [] is not a map"),
        ({"began": "0001-01-01T00:00:00+14:00"}, "OverflowError"),
    ],
)
def test_a_wrong_record_is_an_error_that_names_the_file_and_the_mistake(tmp_path, change, said):
    (tmp_path / "run.json").write_text(json.dumps(RECORD.to_dict() | change))
    with pytest.raises(ConfigError) as caught:
        read_record(tmp_path)
    assert said in str(caught.value)
    assert str(tmp_path / "run.json") in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"version": 1}', "[" * 100_000])
def test_a_file_that_is_not_a_record_is_an_error(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ConfigError, match=r"run\.json: "):
        read_record(tmp_path)
    with pytest.raises(ConfigError, match=r"there is no run\.json"):
        read_record(tmp_path / "nowhere")
    (tmp_path / "run.json").unlink()
    os.mkfifo(tmp_path / "run.json")
    with pytest.raises(ConfigError, match=r"run\.json: not a file"):
        read_record(tmp_path)


def test_variables_that_matter_are_kept_and_secrets_are_not():
    kept = environment_of(
        {
            "HOME": "/home/me",
            "NCCL_DEBUG": "INFO",
            "SLURM_JOB_ID": "12",
            "RAY_ADDRESS": "10.0.0.2:6379",
            "RAY_AUTH_TOKEN": "abc",
            "ROOST_API_KEY": "abc",
            "TORCH_PASSWORD": "abc",
            "VLLM_Secret_2": "abc",
            "HYDRA_CREDENTIALS": "abc",
            "RAY_REDIS_ADDRESS": "redis://me:abc@10.0.0.2",
            "ROOST_INDEX": "https://abc@git.example.org/me",
            "RAY_JOB_CONFIG_JSON_ENV_VAR": '{"runtime_env": {"env_vars": {"MINE": "abc"}}}',
            "VLLM_EXTRA": '{"api_key": "abc"}',
            "SGLANG_ARGS": "--port 1 --token=abc",
            "PYTHONPATH": "/home/monkey:/code",
            "WANDB_API_KEY": "abc",
        }
    )
    assert {name: value for name, value in kept.items() if value is not None} == {
        "NCCL_DEBUG": "INFO",
        "PYTHONPATH": "/home/monkey:/code",
        "RAY_ADDRESS": "10.0.0.2:6379",
        "SLURM_JOB_ID": "12",
    }
    assert "WANDB_API_KEY" not in kept
    assert kept["RAY_AUTH_TOKEN"] is None
    assert "abc" not in str(kept)


def test_versions_are_those_of_the_loaded_packages(monkeypatch):
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    found = loaded_versions()
    assert {"python", "roost", "ray"} <= set(found)
    assert "jax" not in found


@pytest.mark.parametrize(
    ("command", "what"),
    [
        (["python", "/a/train.py", "-m", "x"], "train.py"),
        (["python", "-X", "dev", "-u", "train.py"], "train.py"),
        (["python", "-m", "my.train", "--lr", "1"], "my.train"),
        (["python", "-m", "roost", "demo"], "roost demo"),
        (["python", "-c", "print()"], "python -c"),
        (["python", "-"], "standard input"),
        (["python"], "python"),
        ([], "python"),
    ],
)
def test_a_command_has_a_short_name(command, what):
    assert what_of(command) == what


def test_the_outcome_describes_the_exception():
    assert outcome_of(None).status is Status.FINISHED
    assert outcome_of(SystemExit(0)).status is Status.FINISHED
    assert outcome_of(SystemExit(3)) == RunOutcome(status=Status.FAILED, error="SystemExit", message="3")
    assert str(outcome_of(KeyboardInterrupt())) == "interrupted"
    error = ValueError("first\n" + "line\n" * 100)
    failure = Failure(kind=FailureKind.EXCEPTION, address="actor:3", rank=3, node="", what="", log_path="/logs/3.log")
    error.worker_failures = (failure,)
    found = outcome_of(error)
    assert (found.error, found.worker, found.log) == ("ValueError", "actor:3", "/logs/3.log")
    assert found.message.startswith("first\nline")
    assert found.message.endswith("… and 89 more lines")


def test_an_exception_without_a_message_is_still_a_failure():
    class OddError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    found = outcome_of(OddError())
    assert (str(found), found.message) == ("failed: OddError", "(its str() raises RuntimeError)")


def test_a_run_is_recorded_while_it_runs(tmp_path):
    recorder = begin(make_run_dir(tmp_path / "today"))
    running = read_record(tmp_path / "today")
    assert (running.id, running.outcome.status, running.plan) == ("today", Status.RUNNING, None)
    assert running.command == tuple(sys.orig_argv)
    assert running.nodes[0].accelerators == (("H100", 1),)
    launch(recorder, "actor", PackedPlacementStrategy(0, 3))
    with pytest.raises(LookupError):
        launch(recorder, "rollout", PackedPlacementStrategy(4, 7), fails=True)
    recorder.note_restart("actor:1", "it crashed", 0.25, None)
    recorder.note_restart("actor:1", "it crashed", 0.25, TimeoutError("too late"))
    seen = read_record(tmp_path / "today")
    assert [(group.name, group.world_size, group.error) for group in seen.groups] == [
        ("actor", 4, ""),
        ("rollout", 4, "LookupError"),
    ]
    assert seen.groups[0].phases == (("process up", 1.25), ("ready", 2.0))
    assert [item.error for item in seen.restarts] == ["", "TimeoutError: too late"]
    plan = Plan.from_json((tmp_path / "today" / "plan.json").read_text())
    assert (plan.names, plan.hash) == (["actor", "rollout"], seen.plan)
    recorder.note_error(ValueError("bad"))
    recorder.note_close()
    recorder.end()
    ended = read_record(tmp_path / "today")
    assert (str(ended.outcome), ended.outcome.message) == ("failed: ValueError", "bad")
    assert ended.seconds is not None
    assert sorted(path.name for path in (tmp_path / "today").iterdir() if not path.name.startswith(".")) == [
        "plan.json",
        "run.json",
    ]
    assert (tmp_path / "today" / "run.json").stat().st_mode & 0o077 == 0, "readable by the user alone"
    before = ended.to_json()
    launch(recorder, "late")
    recorder.end()
    assert read_record(tmp_path / "today").to_json() == before, "nothing is written after the end"


def test_the_whole_plan_of_a_job_is_kept(tmp_path):
    job = {"cluster": {"num_nodes": 2, "component_placement": {"actor": "0-3", "rollout": "4-7"}}}
    plan = make_plan(job, TOPOLOGY)
    recorder = begin(make_run_dir(tmp_path / "run"))
    recorder.note_job(JobSource(text="the text", job=RunJob(file="a/job.yaml", hash="ff")))
    recorder.note_plan(plan)
    launch(recorder, "actor", plan.get_strategy("actor"))
    recorder.end()
    assert Plan.from_json((tmp_path / "run" / "plan.json").read_text()) == plan
    assert (tmp_path / "run" / "job.yaml").read_text() == "the text"
    assert read_record(tmp_path / "run").what == "job.yaml"
    begin(make_run_dir(tmp_path / "run")).end()
    assert not (tmp_path / "run" / "plan.json").exists(), "the plan of an earlier run is removed"


def test_groups_that_are_launched_together_are_recorded_in_the_order_of_the_plan(tmp_path):
    job = {"cluster": {"num_nodes": 2, "component_placement": {"actor": "0-3", "rollout": "4-7"}}}
    recorder = begin(make_run_dir(tmp_path / "run"))
    recorder.note_plan(make_plan(job, TOPOLOGY))
    for name in ("helpers", "rollout", "actor"):
        launch(recorder, name)
    recorder.end()
    assert [group.name for group in read_record(tmp_path / "run").groups] == ["actor", "rollout", "helpers"]


def test_the_users_own_files_in_the_run_folder_are_left_alone(tmp_path, caplog):
    mine = {"plan.json": "my plan", "job.yaml": "my job"}
    for name, text in mine.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o644)
    for file, text in (("other.yaml", "another job"), ("job.yaml", "my job"), ("other.yaml", "another job")):
        recorder = begin(make_run_dir(tmp_path))
        recorder.note_job(JobSource(text=text, job=RunJob(file=str(tmp_path / file), hash=text_hash(text))))
        launch(recorder, "actor")
        recorder.end()
        record = read_record(tmp_path)
        assert (record.plan, record.job is None, record.num_workers) == (None, text != "my job", 8)
        assert {name: (tmp_path / name).read_text() for name in mine} == mine
    assert "job.yaml is a file of yours; give the run a folder of its own" in caplog.records[0].message
    (tmp_path / "run.json").write_text("my own")
    begin(make_run_dir(tmp_path)).end()
    assert (tmp_path / "run.json").read_text() == "my own"
    (tmp_path / "run.json").unlink()
    os.mkfifo(tmp_path / "run.json")
    assert files_of_others(tmp_path) == {"run.json", *mine}, "a pipe is not read"


def test_a_record_that_cannot_be_written_gives_one_warning(tmp_path, caplog):
    recorder = begin(make_run_dir(tmp_path / "run"))
    shutil.rmtree(tmp_path / "run")
    with caplog.at_level(logging.WARNING):
        launch(recorder, "actor")
        recorder.note_restart("actor:1", "it crashed", 0.25, None)
        recorder.end()
    assert [record.message.startswith("this run's record is not complete") for record in caplog.records] == [True]


def test_the_record_of_very_many_groups_is_complete_at_the_end(tmp_path, monkeypatch):
    recorder = begin(make_run_dir(tmp_path / "run"))
    monkeypatch.setattr(recorder_module, "RECORD_WRITE_SECONDS", -1.0)
    for number in range(3):
        launch(recorder, f"group{number}")
    recorder.note_restart("group0:1", "it crashed", 0.25, None)
    assert not (tmp_path / "run" / "plan.json").exists()
    behind = read_record(tmp_path / "run")
    assert (behind.plan, behind.groups, behind.restarts) == (None, (), ())
    recorder.end()
    whole = read_record(tmp_path / "run")
    assert ([group.seconds is None for group in whole.groups], len(whole.restarts)) == ([False] * 3, 1)
    plan = Plan.from_json((tmp_path / "run" / "plan.json").read_text())
    assert (plan.names, plan.hash) == (["group0", "group1", "group2"], read_record(tmp_path / "run").plan)


def test_a_recorder_writes_nothing_before_it_begins(tmp_path):
    recorder = Recorder()
    launch(recorder, "actor")
    recorder.note_plan(Plan(topology=TOPOLOGY, components=()))
    recorder.end()
    assert recorder.record is None
    assert not list(tmp_path.iterdir())


def test_a_run_whose_cluster_is_closed_by_an_exception_has_failed(tmp_path):
    def outcome(close) -> str:
        recorder = begin(make_run_dir(tmp_path / "run"))
        close(recorder)
        recorder.end()
        return str(read_record(tmp_path / "run").outcome)

    def in_finally(recorder: Recorder) -> None:
        try:
            try:
                raise ValueError("bad")
            finally:
                recorder.note_close()
        except ValueError:
            pass

    assert outcome(in_finally) == "failed: ValueError"
    assert outcome(Recorder.note_close) == "finished"
    assert outcome(Recorder.note_exit) == "ended"
    assert outcome(lambda recorder: recorder.note_signal("SIGTERM")) == "interrupted: SIGTERM"
    try:
        raise LookupError("handled before the run began")
    except LookupError:
        assert outcome(Recorder.note_close) == "finished"


def test_the_exception_that_ended_the_script_is_the_outcome(tmp_path, monkeypatch):
    recorder = begin(make_run_dir(tmp_path / "run"))
    monkeypatch.setattr(sys, "last_value", KeyError("lost"), raising=False)
    recorder.note_exit()
    recorder.end()
    assert str(read_record(tmp_path / "run").outcome) == "failed: KeyError"


def test_a_driver_that_is_gone_without_an_outcome_has_died(tmp_path):
    recorder = begin(make_run_dir(tmp_path / "run"))
    (tmp_path / "run" / ".roost-lock").touch()
    record = recorder.record
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    with (tmp_path / "run" / ".roost-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not is_gone(record, tmp_path / "run")
        assert is_gone(replace(record, pid=ended.pid), tmp_path / "run")
        assert is_gone(replace(record, pid_began=0.0), tmp_path / "run"), "another process has its pid now"
        elsewhere = replace(record, host="elsewhere", pid=ended.pid)
        assert not is_gone(elsewhere, tmp_path / "run")
    assert is_gone(elsewhere, tmp_path / "run")
    written(tmp_path / "run", replace(record, pid=ended.pid))
    assert read_run(tmp_path / "run").outcome == RunOutcome(status=Status.DIED)
    assert read_record(tmp_path / "run").outcome.status is Status.RUNNING, "reading does not change the file"


def test_the_id_of_a_run_is_the_name_of_its_folder_unless_it_is_taken(own, tmp_path):
    chosen = [finished_run(tmp_path / name / "out") for name in "abc"]
    assert [read_record(folder).id for folder in chosen] == ["out", "out-2", "out-3"]
    assert read_record(finished_run(chosen[1])).id == "out-2", "the same folder again"
    recorder = begin(make_run_dir(None))
    assert find_run(recorder.record.id) == own / recorder.record.id
    (tmp_path / "latest").mkdir()
    assert add_run(tmp_path / "latest").startswith("20"), "this name has a meaning"
    dated = finished_run(tmp_path / "runs" / "20261115-221530-colocate")
    assert find_run("20261115-221530-colocate") == dated
    assert ids() == {"out", "out-2", "out-3", recorder.record.id, "20261115-221530-colocate"}


def test_runs_in_the_folder_of_the_variable_are_found(tmp_path, monkeypatch):
    monkeypatch.setenv("ROOST_RUNS_DIR", str(tmp_path / "many"))
    recorder = begin(make_run_dir(None))
    recorder.end()
    (found,) = (tmp_path / "many").iterdir()
    assert [(run.id, run.folder) for run in list_runs()] == [(found.name, found)]


def test_links_to_missing_folders_are_removed_and_so_are_the_oldest_of_too_many(own, tmp_path):
    gone, stays = (finished_run(tmp_path / name) for name in ("gone", "stays"))
    shutil.rmtree(gone)
    assert ids() == {"stays"}
    for number in range(205):
        (tmp_path / f"run{number}").mkdir()
        (own / f"run{number}").symlink_to(tmp_path / f"run{number}")
        os.utime(own / f"run{number}", (number, number), follow_symlinks=False)
    make_run_dir(tmp_path / "another")
    links = {item.name for item in own.iterdir()}
    assert "gone" not in links
    assert {"stays", "another", "run204"} <= links
    assert len(links) == 201
    assert "run0" not in links
    assert (tmp_path / "run0").is_dir(), "folders that the user chose are left alone"
    assert stays.is_dir()


def test_a_folder_on_a_dead_file_server_delays_neither_a_job_nor_the_list(own, tmp_path, monkeypatch):
    released = threading.Event()
    look = os.stat

    def stat(path, *args, **kwargs):
        # The link itself is here; only what it leads to is on the server.
        if "far" in Path(path).parts and kwargs.get("follow_symlinks", True):
            released.wait(60)
        return look(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(index_module, "RUN_LOCK_SECONDS", 0.2)
    (own / "far").symlink_to("/nowhere/far")
    assert read_record(finished_run(tmp_path / "near")).id == "near"
    near, far = list_runs()
    assert (near.id, find_run("near")) == ("near", tmp_path / "near")
    assert (far.id, str(far.record)) == ("far", "the run's folder does not answer\n  hint: is its file server up?")
    released.set()


def test_a_job_that_cannot_be_listed_runs_and_is_recorded(own, tmp_path, caplog):
    for folder in (own, socket_folder() / "runs"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.write_text("in the way")
    assert read_record(finished_run(tmp_path / "run")).id == "run"
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "this run is not in the list of your runs"
    ]


def test_runs_outlive_the_temporary_folder(own, tmp_path):
    folder = finished_run(tmp_path / "chosen")
    made = make_run_dir(None)
    begin(made).end()
    shutil.rmtree(socket_folder())
    assert state_folder() == own.parent
    assert ids() == {"chosen", made.id}
    assert (find_run("chosen"), find_run(made.id)) == (folder, own / made.id)


def test_runs_that_an_older_roost_left_in_the_temporary_folder_are_found(own, tmp_path):
    old = socket_folder() / "runs"
    written(old / "20250101-000000-abcdef", replace(RECORD, id="20250101-000000-abcdef"))
    written(tmp_path / "a" / "out", replace(RECORD, id="out"))
    (old / "out").symlink_to(tmp_path / "a" / "out")
    (old / "latest").symlink_to(tmp_path / "a" / "out")
    assert ids() == {"20250101-000000-abcdef", "out"}
    assert find_run("2025") == old / "20250101-000000-abcdef"
    assert read_record(finished_run(tmp_path / "b" / "out")).id == "out-2", "the old run keeps its id"
    assert (find_run("out"), find_run("latest")) == (tmp_path / "a" / "out", tmp_path / "b" / "out")
    assert read_record(finished_run(tmp_path / "a" / "out")).id == "out", "a new run in its folder takes it over"
    assert {item.name for item in own.iterdir()} == {"out", "out-2"}


@pytest.mark.parametrize("reason", ["read-only", "full", "no home"])
def test_runs_go_to_the_temporary_folder_where_the_state_folder_cannot_be_written(own, tmp_path, monkeypatch, reason):
    finished_run(tmp_path / "before")
    if reason == "read-only":
        is_allowed = os.access
        monkeypatch.setattr(os, "access", lambda path, mode: path != own.parent and is_allowed(path, mode))
    elif reason == "full":
        for name in ("mkdir", "symlink_to", "write_text"):
            monkeypatch.setattr(Path, name, full_disk(own.parent, getattr(Path, name)))
    else:
        monkeypatch.delenv("XDG_STATE_HOME")
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    chosen = finished_run(tmp_path / "chosen")
    recorder = begin(make_run_dir(None))
    recorder.end()
    home = socket_folder() / "runs"
    assert {item.name for item in home.iterdir()} >= {"chosen"} | ids() - {"before", "chosen"}
    assert (find_run("chosen"), find_run("latest").parent) == (chosen, home)
    assert ("before" in ids()) == (reason != "no home"), "older runs can be read"
    assert not list(Path.cwd().glob("~*"))


def test_without_a_home_and_a_private_temporary_folder_a_job_needs_a_run_dir(tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    socket_folder().chmod(0o755)
    with pytest.raises(ClusterError, match="is not a folder of yours alone"):
        make_run_dir(None)
    assert read_record(finished_run(tmp_path / "run")).id == "run"
    assert [record.message for record in caplog.records] == [
        "this run is not in the list of your runs: there is no folder for the list"
    ]


def full_disk(folder: Path, method):
    def call(self: Path, *args, **kwargs):
        if self.is_relative_to(folder):
            raise OSError(28, "No space left on device")
        return method(self, *args, **kwargs)

    return call


def test_drivers_that_start_together_get_different_ids(tmp_path):
    folders = [tmp_path / str(number) / "out" for number in range(16)]
    made = []
    threads = [threading.Thread(target=lambda folder=folder: made.append(make_run_dir(folder))) for folder in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {item.id for item in made} == {"out", *(f"out-{number}" for number in range(2, 17))}


def test_an_unreadable_folder_does_not_hide_the_other_runs(tmp_path, monkeypatch):
    good, closed = (finished_run(tmp_path / name) for name in ("good", "closed"))
    look = os.stat

    def stat(path, *args, **kwargs):
        if str(path).startswith(f"{closed}/"):
            raise PermissionError(13, "Permission denied")
        return look(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", stat)
    assert ids() == {"good"}
    assert find_run("good") == good
    with pytest.raises(ConfigError, match="there is no run"):
        find_run("x" * 5000)


def test_a_job_runs_on_a_file_system_without_locks(tmp_path, monkeypatch):
    def flock(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with own_run_dir(tmp_path / "run") as made:
        recorder = begin(made)
        assert not is_gone(recorder.record, tmp_path / "run")


def test_an_old_run_that_is_still_running_is_not_removed(own):
    for number in range(22):
        folder = own / f"20200101-0000{number:02d}-abcdef"
        folder.mkdir()
        (folder / ".roost-lock").touch()
        os.utime(folder / ".roost-lock", (1, 1))
        os.utime(folder, (1, 1))
    with (own / "20200101-000000-abcdef" / ".roost-lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        make_run_dir(None)
    left = {path.name for path in own.iterdir()}
    assert "20200101-000000-abcdef" in left
    assert "20200101-000001-abcdef" not in left


def test_latest_is_the_newest_run_of_this_project_and_stop_ends_no_other(own, tmp_path, monkeypatch, roost):
    assert not list(own.iterdir())
    projects = {name: tmp_path / name for name in ("mine", "other", "new")}
    for folder in projects.values():
        (folder / ".git").mkdir(parents=True)
        (folder / "jobs").mkdir()

    def running(project, name):
        """A run that goes on: this process has its folder locked."""
        monkeypatch.chdir(projects[project] / "jobs")
        made = stack.enter_context(own_run_dir(tmp_path / "runs" / name))
        return begin(made)

    with contextlib.ExitStack() as stack:
        first = running("mine", "first")
        running("other", "second")
        # In any folder of the project.
        monkeypatch.chdir(projects["mine"])
        assert find_run("latest") == find_running() == tmp_path / "runs" / "first"
        assert roost("show")[1].split()[:2] == ["run", "first"]
        monkeypatch.chdir(projects["new"])
        with pytest.raises(ConfigError, match=r"new, has no runs yet\n.*there are 2 runs of other projects"):
            find_run("latest")
        for words in (("stop",), ("stop", "latest")):
            code, _, err = roost(*words)
            assert (code, "new, is running" in err) == (2, True)
        third = running("mine", "third")
        for words in (("stop",), ("stop", "latest")):
            code, _, err = roost(*words)
            assert code == 2
            assert err == "2 runs of this project are running\n  hint: say which: third or first\n"
        third.end()
        assert find_running() == tmp_path / "runs" / "first", "the newest has ended"
        first.end()
        with pytest.raises(ConfigError, match="no run of this project"):
            find_running()


def test_a_run_that_waits_for_accelerators_is_listed_so(own, tmp_path, roost):
    assert not list(own.iterdir())
    with own_run_dir(tmp_path / "run") as made:
        recorder = begin(made)
        recorder.note_wait("actor", "2 accelerators of node 0")
        _, out, _ = roost("runs")
        assert "waiting for 2 accelerators of node 0 (actor)" in out
        assert json.loads(roost("runs", "--format", "json")[1])[0]["waits"] == {"actor": "2 accelerators of node 0"}
        recorder.note_wait("actor", "")
        assert "waiting" not in roost("runs")[1]
        recorder.end()
    # The records of 0.1.0 do not have it.
    record = json.loads((tmp_path / "run/run.json").read_text())
    del record["waits"]
    assert RunRecord.from_json(json.dumps(record)).waits == {}


def test_a_run_is_found_by_the_beginning_of_its_id(tmp_path):
    for name in ("alpha-1", "alpha-2", "beta"):
        finished_run(tmp_path / name)
    assert find_run("beta") == find_run("b") == find_run(str(tmp_path / "beta")) == tmp_path / "beta"
    assert find_run("latest") == tmp_path / "beta"
    for name, said in (
        ("alpha", "2 runs begin with 'alpha'\n  hint: write more of alpha-1 or alpha-2"),
        ("btea", "there is no run 'btea'\n  hint: did you mean beta?"),
        ("zzz", "the newest are beta, alpha-2 and alpha-1"),
        ("", "there is no run ''"),
        ("/nowhere/beta", "there is no folder /nowhere/beta"),
    ):
        with pytest.raises(ConfigError) as caught:
            find_run(name)
        assert said in str(caught.value)


def test_the_list_begins_with_the_newest_run_and_ends_with_the_broken_ones(own):
    for day, name in enumerate("abc", start=1):
        written(own / name, replace(RECORD, id=name, began=f"2026-03-0{4 - day}T10:00:00+00:00"))
    written(own / "broken", RECORD)
    (own / "broken" / "run.json").write_text("{")
    found = list_runs()
    assert [run.id for run in found] == ["a", "b", "c", "broken"]
    assert isinstance(found[-1].record, ConfigError)


def test_two_runs_are_compared_in_everything_but_the_plan():
    other = replace(
        RECORD,
        id="second",
        command=("/other/python", "train.py", "--lr", "2"),
        versions={"ray": "2.61.0", "torch": "2.9"},
        environment={"NCCL_DEBUG": "WARN", "RAY_TOKEN": None, "CUDA_HOME": "/cuda"},
        job=replace(RECORD.job, hash="ee", flags=()),
        git=None,
        seconds=31.0,
        groups=(replace(RECORD.groups[0], seconds=3.0),),
        restarts=(),
        outcome=RunOutcome(status=Status.FINISHED),
    )
    assert diff_records(RECORD, RECORD) == []
    assert diff_records(RECORD, other) == [
        ("job", "job.yaml --no-reserve --placement hybrid", "job.yaml"),
        ("text of the job", "ff", "ee"),
        ("command", "train.py --lr 1", "train.py --lr 2"),
        ("git", "aaaaaaaaaaaa (main), with changes", "no checkout"),
        ("version of ray", "2.60.0", "2.61.0"),
        ("version of torch", "not loaded", "2.9"),
        ("NCCL_DEBUG", "INFO", "WARN"),
        ("CUDA_HOME", "unset", "/cuda"),
        ("outcome", "failed: ValueError", "finished"),
        ("restarts", "1", "0"),
        ("seconds", "30.0", "31.0"),
        ("launch of actor", "2.0", "3.0"),
    ]


def test_the_commit_of_a_checkout_is_read_from_its_files(tmp_path):
    git = tmp_path / "code" / ".git"
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert git_state(tmp_path / "code") is None, "no commit yet"
    (git / "packed-refs").write_text(f"# pack-refs\n{'b' * 40} refs/heads/main\n")
    assert git_state(tmp_path / "code" / "deep" / "down") == GitState(commit="b" * 40, branch="main")
    (git / "refs" / "heads" / "main").write_text("a" * 40 + "\n")
    assert git_state(tmp_path / "code").commit == "a" * 40
    tree = git / "worktrees" / "other"
    tree.mkdir(parents=True)
    (tree / "HEAD").write_text("ref: refs/heads/main\n")
    (tree / "commondir").write_text("../..\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".git").write_text(f"gitdir: {tree}\n")
    assert git_state(tmp_path / "other") == GitState(commit="a" * 40, branch="main")
    (git / "HEAD").write_text("c" * 40)
    assert git_state(tmp_path / "code") == GitState(commit="c" * 40)
    (git / "HEAD").write_bytes(b"\xff")
    assert git_state(tmp_path / "code") is None


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_changes_to_a_checkout_are_recorded(tmp_path):
    def git(*words: str) -> None:
        identity = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-q", "-m", "first")
    state = git_state(tmp_path)
    assert with_changes(state, tmp_path).changed is False
    (tmp_path / "file").write_text("two")
    assert with_changes(state, tmp_path).changed is True
    assert with_changes(state, tmp_path / "nowhere").changed is None


def test_groups_of_a_plan_give_that_plan_again():
    job = {
        "cluster": {
            "num_nodes": 2,
            "component_placement": {
                "actor": "0-3",
                "rollout": "4-7:0-1",
                "env": {"node_group": "node", "placement": 1},
            },
        }
    }
    plan = make_plan(job, TOPOLOGY)
    order = ["env", "rollout", "actor"]
    placed = {
        name: Placed(placements=plan.component(name).placements, strategy=plan.get_strategy(name)) for name in order
    }
    assert gather_plan(TOPOLOGY, placed) == plan


def test_groups_placed_by_hand_give_a_plan():
    strategies = {
        "packed": PackedPlacementStrategy(0, 3, num_hardware_per_process=2, stride=2),
        "flexible": FlexiblePlacementStrategy([[7], [4, 5]]),
        "nodes": NodePlacementStrategy([1, 1, 0]),
    }
    placed = {
        name: Placed(placements=strategy.get_placement(TOPOLOGY), strategy=strategy)
        for name, strategy in strategies.items()
    }
    placed["all"] = Placed(placements=PackedPlacementStrategy(0, 7).get_placement(TOPOLOGY))
    plan = gather_plan(TOPOLOGY, placed)
    assert {item.name: item.hardware_ranks for item in plan.components} == {
        "packed": (0, 1, 2, 3),
        "flexible": (4, 5, 7),
        "nodes": (0, 1),
        "all": tuple(range(8)),
    }
    assert plan.component("packed").stride == 2
    assert Plan.from_json(plan.to_json()) == plan


def test_the_commands_show_runs(own, tmp_path, roost):
    assert roost("runs") == (0, "there are no runs yet\n", "")
    code, _, err = roost("show")
    assert (code, err) == (2, "there are no runs yet\n  hint: run a job first, or give the folder of a run\n")
    finished_run(tmp_path / "good", PackedPlacementStrategy(0, 3))
    finished_run(tmp_path / "bad", PackedPlacementStrategy(0, 1), error=ValueError("no \x1b[2J reward"))
    (own / "broken").mkdir()
    (own / "broken" / "run.json").write_text("{")
    code, out, _ = roost("runs")
    lines = [line.split() for line in out.splitlines()]
    assert code == 0
    assert lines[0] == ["ID", "WHEN", "WHAT", "PLAN", "WORKERS", "SECONDS", "OUTCOME"]
    assert [line[0] for line in lines[1:]] == ["bad", "good", "broken"]
    assert lines[1][-2:] == ["failed:", "ValueError"]
    assert "unreadable: see roost show broken" in out
    assert roost("runs", "-n", "1")[1].endswith("and 2 more: see roost runs -n 3\n")
    listed = json.loads(roost("runs", "--format", "json")[1])
    assert [item["id"] for item in listed] == ["bad", "good", "broken"]
    assert (listed[1]["workers"], listed[1]["outcome"]["status"]) == (4, "finished")
    code, out, _ = roost("show")
    assert code == 0
    for said in ("failed: ValueError", "no \\x1b[2J reward", "train-0, 10.0.0.2: 1 x H100", "[group0 1"):
        assert said in out, said
    assert json.loads(roost("show", "good", "--format", "json")[1])["outcome"]["status"] == "finished"
    assert roost("show", "good", "--svg", str(tmp_path / "map.svg"))[0] == 0
    assert (tmp_path / "map.svg").read_text().startswith("<svg ")
    code, _, err = roost("show", "broken")
    assert (code, "run.json: not JSON" in err) == (2, True)


def test_a_run_can_be_given_in_place_of_a_plan(tmp_path, roost, monkeypatch):
    finished_run(tmp_path / "one", PackedPlacementStrategy(0, 3))
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    finished_run(tmp_path / "two", PackedPlacementStrategy(0, 2))
    finished_run(tmp_path / "empty")
    code, out, _ = roost("diff", "one", str(tmp_path / "two"))
    assert code == 1
    assert out.startswith("went (1)\n  - group0:3\n")
    assert "the runs (" in out
    assert "  ~ NCCL_DEBUG: unset -> INFO\n" in out
    code, out, _ = roost("diff", "one", "two", "--format", "json")
    assert (code, json.loads(out)["runs"]["NCCL_DEBUG"]) == (1, ["unset", "INFO"])
    saved = tmp_path / "saved.json"
    saved.write_text((tmp_path / "one" / "plan.json").read_text())
    assert roost("diff", str(saved), "one") == (0, "the plans are alike\n", "")
    assert "CUDA_VISIBLE_DEVICES=2" in roost("where", "two", "group0:2")[1]
    assert roost("diff", "one", "empty")[2].startswith("run empty has no plan")
    code, _, err = roost("diff", "one", "tow")
    assert (code, err) == (2, "there is no file 'tow', and no run with that name\n  hint: did you mean two?\n")
    assert "No such file" in roost("plan", "nowhere.yaml")[2]


def test_logs_are_found_by_the_id_of_their_run(tmp_path, roost):
    folder = finished_run(tmp_path / "run")
    (folder / "logs" / "actor").mkdir(parents=True)
    (folder / "logs" / "actor" / "0.log").write_text("hello\n")
    for words in (["run", "actor:0"], [str(folder), "actor:0"], ["actor:0"], ["actor:0", "--run", "run"]):
        assert roost("logs", *words) == (0, "hello\n", "")
    assert roost("logs", "actor") == (0, "hello\n", ""), "one word is a group where the newest run has a log of it"
    assert roost("logs", "run") == roost("logs", "--run", "run"), "and otherwise a run"
    assert "there is no run 'actr', and " in roost("logs", "actr")[2]
    lines = roost("logs", "run", "actor:0", "--format", "json")[1].splitlines()
    assert [json.loads(line) for line in lines] == [{"worker": "actor:0", "line": "hello"}]
    listed = json.loads(roost("logs", "--run", "run", "--format", "json")[1])
    assert listed["run"] == str(folder)
    assert [(log["worker"], log["bytes"]) for log in listed["logs"]] == [("actor:0", 6)]
    code, _, err = roost("logs", "rum", "actor:0")
    assert (code, "did you mean run?" in err) == (2, True)


def test_rerun_prints_what_it_would_do_and_what_has_changed(tmp_path, roost, monkeypatch):
    record = begin(make_run_dir(tmp_path / "run")).record
    script = replace(record, job=None, command=("/usr/bin/python", "my script.py", "--lr", "1"), cwd=str(tmp_path))
    written(tmp_path / "run", script)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    code, out, err = roost("rerun", "run", "--dry-run")
    assert (code, out) == (0, "")
    assert err == (
        f"{sys.executable} 'my script.py' --lr 1\n  in {tmp_path}\n"
        "the environment has changed:\n  ~ NCCL_DEBUG: unset -> INFO\n"
    )
    code, out, _ = roost("rerun", "run", "--dry-run", "--format", "json")
    assert code == 0
    assert json.loads(out) == {
        "command": [sys.executable, "my script.py", "--lr", "1"],
        "folder": str(tmp_path),
        "environment": {"NCCL_DEBUG": {"before": "unset", "after": "INFO"}},
    }
    for changed, options, said in (
        (replace(script, cwd="/no/such/place"), [], "which no longer exists"),
        (replace(script, command=("python", "-")), [], "what was typed is not kept"),
        (replace(script, command=("python", "-u", "-", "--lr", "1")), [], "what was typed is not kept"),
        (replace(script, command=("python", "-u")), [], "what was typed is not kept"),
        (replace(script, command=("python",)), [], "what was typed is not kept"),
        (script, ["--same"], "leave out --same"),
        (replace(script, job=RECORD.job), [], "job.yaml: No such file"),
    ):
        written(tmp_path / "run", changed)
        code, _, err = roost("rerun", "run", "--dry-run", *options)
        assert (code, said in err) == (2, True), err


def test_rerun_reports_a_changed_copy_of_the_job(tmp_path, roost):
    text = "cluster:\n  num_nodes: 1\n  component_placement:\n    actor: 0\n"
    recorder = begin(make_run_dir(tmp_path / "run"))
    recorder.note_job(JobSource(text=text, job=RunJob(file="job.yaml", hash=text_hash(text))))
    path = tmp_path / "run" / "job.yaml"
    nowhere = ("--dry-run", "--address", "127.0.0.1:9")
    code, _, err = roost("rerun", "run", *nowhere)
    assert (code, f"with the file as it was: {path}\n" in err) == (0, True), err
    path.write_text(text.replace("actor: 0", "actor: 0-1"))
    written(tmp_path / "run", replace(read_record(tmp_path / "run"), plan="ff"))
    code, _, err = roost("rerun", "run", *nowhere)
    assert "run run has no plan" in err, "it continues without one"
    assert (code, f"with a file that has changed since: {path}\n" in err) == (0, True), err
    code, out, _ = roost("rerun", "run", *nowhere, "--format", "json")
    answer = json.loads(out)
    assert (code, answer["command"][:3], answer["plan"]) == (0, ["roost", "run", "job.yaml"], None)
    assert (answer["file"], answer["file_changed"]) == (str(path), True)
    code, _, err = roost("rerun", "run", "--format", "json")
    assert (code, "--format json is for --dry-run" in err) == (2, True)


def test_a_run_from_another_machine_is_shown_with_its_logs_and_without_control_characters(tmp_path, roost):
    finished_run(tmp_path / "run", PackedPlacementStrategy(0, 3))
    copied = tmp_path / "copied" / "run"
    shutil.copytree(tmp_path / "run", copied)
    record = read_record(copied)
    written(copied, replace(record, job=RunJob(file="\x1b[2Jjob.yaml", hash="ff")))
    assert " roost logs run\n" in roost("show", "run")[1]
    out = roost("show", str(copied))[1]
    assert f" roost logs {copied}\n" in out
    assert "\x1b" not in out


def test_many_threads_write_whole_records(tmp_path):
    recorder = begin(make_run_dir(tmp_path / "run"))
    threads = [
        threading.Thread(target=recorder.note_restart, args=(f"actor:{rank}", "it crashed", 0.1, None))
        for rank in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {item.worker for item in read_record(tmp_path / "run").restarts} == {f"actor:{rank}" for rank in range(16)}
