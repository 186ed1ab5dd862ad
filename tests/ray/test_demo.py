"""The demo as a new user runs it, and its training on several seeds."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest

from roost import Cluster, Plan, make_plan
from roost.demo.tasks import Goal, Mode, make_job
from roost.demo.training import train
from waiting import wait_until

ROOST = [sys.executable, "-u", "-m", "roost"]


class Silent:
    """A watcher that shows nothing."""

    def __getattr__(self, _name):
        return lambda *_: None


@pytest.mark.soak
@pytest.mark.usefixtures("roost_local_cluster")
@pytest.mark.parametrize("mode", Mode)
def test_the_return_rises_with_other_seeds(mode, rounds):
    # The whole demo covers seed 0. Half the number of workers is enough to learn.
    job = make_job(mode, workers=2)
    goal = Goal(mean_return=90, seconds=150)
    with Cluster(cluster_cfg=job["cluster"], quiet=True) as cluster:
        plan = make_plan(job, cluster)
        for number in rounds():
            seed = number + 1
            trained = train(cluster, plan, mode, seed=seed, goal=goal, kill=False, watcher=Silent())
            assert trained.before < 45, f"seed {seed} starts from an untrained policy"
            assert trained.after >= 90, f"seed {seed}: {[round(item.mean_return) for item in trained.rounds]}"
            behind = {item.behind for item in trained.rounds}
            assert behind == ({0} if mode is Mode.COLOCATE else {0, 1}), "only the disaggregated mode is asynchronous"


@pytest.mark.shown
def test_the_demo_trains_both_modes_survives_a_kill_and_leaves_the_promised_files(tmp_path):
    done = subprocess.run([*ROOST, "demo"], cwd=tmp_path, capture_output=True, text=True, timeout=500, env=_env(80))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    shown = done.stdout
    assert shown.count("node 2 local-2\nno accelerators  [env 0-3 ") == 2, "the map of each mode"
    assert re.search(
        r"killing rollout:2 \(pid \d+\) on purpose\n    rollout:2 on node 1 .* died in 'serve': its", shown
    )
    assert re.search(r"rollout:2 is back in place after [0-9.]+ s: node 1, accelerator 0,1, now pid \d+", shown)
    assert "(raylet)" not in shown
    if find_spec("starlette") and find_spec("uvicorn"):
        assert len(re.findall(r"^live page: http://127\.0\.0\.1:\d+/[\w-]{32}/$", shown, re.M)) == 1
    assert re.search(r"^  open its page      roost watch \S+-colocate$", shown, re.M)
    assert max(map(len, (line for line in shown.splitlines() if "rollout:2 " not in line))) <= 80
    folders = sorted((tmp_path / "runs").iterdir())
    assert [folder.name.rpartition("-")[2] for folder in folders] == ["colocate", "disagg"]
    for folder in folders:
        _check_folder(folder)
        assert re.search(rf"{folder.name[16:]}  mean(.|\n)*?  env +[█▒░]+ +\d+ % busy", shown), "who was at work"
        before, after = map(int, re.search(rf"{folder.name[16:]}  mean return (\d+) -> (\d+)", shown).groups())
        assert after >= 3 * before
    assert _left_in(tmp_path) == []


def _check_folder(folder: Path) -> None:
    mode = folder.name.rpartition("-")[2]
    plan = Plan.from_json((folder / "plan.json").read_text())
    assert plan.names == ["actor", "rollout", "env"]
    drawing = ElementTree.fromstring((folder / "map.svg").read_text())  # noqa: S314 - we drew it
    assert drawing.tag.endswith("svg")
    with (folder / "returns.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert float(rows[-1]["mean_return"]) >= 3 * float(rows[0]["mean_return"])
    assert {row["behind"] for row in rows} == ({"0"} if mode == "colocate" else {"0", "1"})
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    threads = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert threads >= {f"{name}:{rank}" for name in ("actor", "rollout", "env") for rank in range(4)}
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["name"] for event in spans} >= {"learn", "play"}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    marks = [event["name"] for event in events if event["ph"] == "i" and event["name"].startswith("rollout:2 ")]
    assert marks == (["rollout:2 died", "rollout:2 restarted"] if mode == "colocate" else [])
    logs = {str(path.relative_to(folder / "logs")) for path in (folder / "logs").rglob("*.log")}
    assert {"env/2.log", "rollout/2.log", "actor/0.log"} <= logs
    killed = (folder / "logs" / "env" / "2.log").read_text()
    assert ("rollout:2 on node 1" in killed and "waiting for it" in killed) == (mode == "colocate")


def test_ctrl_c_during_the_launch_leaves_no_process_behind(tmp_path):
    process = subprocess.Popen(
        [*ROOST, "demo", "--mode", "disagg", "--minutes", "5"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=_env(80),
    )
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("  actor "):
            break
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=120)
    assert process.returncode not in (0, None), rest
    assert "Traceback" not in rest, rest
    wait_until(lambda: _left_in(tmp_path) == [], "all processes of the demo are gone")
    assert (next((tmp_path / "runs").iterdir()) / "plan.json").exists(), "".join(lines)


def _env(columns: int) -> dict[str, str]:
    return {**os.environ, "COLUMNS": str(columns)}


def _left_in(folder: Path) -> list[str]:
    """Return the command lines of running processes whose working directory is `folder`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found
