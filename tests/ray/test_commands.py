"""The commands for a live cluster."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import warm
from roost import AcceleratorsTaken, Cluster, Topology, make_plan
from waiting import is_gone, wait_until

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "two_components"
JOB = """\
cluster:
  num_nodes: 3
  component_placement:
    actor: 0-7
    env: {node_group: node, placement: 2:0-3}
"""


def roost(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["roost", *words],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env=warm.environment() | (env or {}),
    )


@pytest.mark.usefixtures("roost_local_cluster")
def test_nodes_as_table_map_json_and_inventory(tmp_path):
    table = roost("nodes").stdout
    lines = table.splitlines()
    assert lines[0].split()[:4] == ["NODE", "ADDRESS", "NAME", "ACCELERATORS"]
    assert lines[1].startswith("0 (head)")
    assert "local-1  4 x H100" in lines[2]
    assert "local-3  - " in lines[4]
    drawn = roost("nodes", "--format", "map").stdout
    assert "4 nodes · 12 accelerators\n" in drawn
    assert "no accelerators" in drawn
    nodes = json.loads(roost("nodes", "--format", "json").stdout)
    assert [node["rank"] for node in nodes] == [0, 1, 2, 3]
    assert nodes[1]["accelerators"][2] == {
        "type": "nvidia", "device": "2", "model": "H100", "memory": None, "uuid": None, "pci": None, "numa": None,
        "nic": None,
    }  # fmt: skip
    inventory = tmp_path / "inventory.yaml"
    assert roost("nodes", "--format", "inventory", "--out", str(inventory)).returncode == 0
    topology = Topology.from_file(inventory)
    assert [len(node.accelerators) for node in topology.nodes] == [4, 4, 4, 0]
    (tmp_path / "job.yaml").write_text(JOB)
    planned = roost("plan", str(tmp_path / "job.yaml"), "--inventory", str(inventory), "--format", "json")
    live = roost("plan", str(tmp_path / "job.yaml"), "--live", "--format", "json")
    assert json.loads(planned.stdout)["components"] == json.loads(live.stdout)["components"]


@pytest.mark.usefixtures("roost_local_cluster")
def test_plan_live_uses_the_first_nodes_and_says_so(tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text(JOB)
    done = roost("plan", str(job), "--live")
    assert done.returncode == 0, done.stderr
    assert "3 nodes · 12 accelerators · 12 workers" in done.stdout
    assert "note: the cluster has 4 nodes and num_nodes is 3: node 3 (" in done.stderr
    job.write_text(JOB.replace("num_nodes: 3", "num_nodes: 9"))
    done = roost("plan", str(job), "--live")
    assert done.returncode == 3
    assert "num_nodes is 9, but the cluster has 4 nodes now: 127." in done.stderr
    done = roost("plan", str(job), "--live", "--cluster", "2x8")
    assert done.returncode == 2
    assert "--cluster and --live both describe the hardware" in done.stderr
    done = roost("where", str(job), "actor:0", "--live")
    assert done.returncode == 3


def test_status_shows_jobs_and_workers(roost_cluster, roost_local_cluster):
    roost_cluster.allocate(dict, "one", 0, 0, {})
    done = roost("status")
    assert done.returncode == 0, done.stderr
    assert f"Ray at {roost_local_cluster.address}  4 nodes, 12 accelerators" in done.stdout
    assert f"job roost, run {Path(roost_cluster.run_dir).name}  pid {os.getpid()} on " in done.stdout
    assert "  workers   1 re" in done.stdout
    assert "  managers  NodeManager, WorkerManager and CollectiveManager" in done.stdout
    answer = json.loads(roost("status", "--format", "json").stdout)
    assert answer["jobs"][0]["driver"]["pid"] == os.getpid()
    assert answer["leftovers"] == []


EVIL = "\x1b]0;title\x07\x1b[2J\u202e\njob fake  pid 1"
NEIGHBOUR = f"""
import os, sys
if len(sys.argv) == 1:
    arguments = [{EVIL!r}, "--wandb-key=sekret", "--password", "sekret"]
    os.execv(sys.executable, [sys.executable, "-u", __file__, *arguments])
import ray
from ray.util.placement_group import placement_group
from roost import Cluster
with Cluster(num_nodes=1, quiet=True):
    evil = ray.remote(num_gpus=0.5)(type({EVIL!r}, (), {{}})).options(name={EVIL!r}).remote()
    ray.get(evil.__ray_ready__.remote())
    ray.get(placement_group([{{"GPU": 0.5}}], name={EVIL!r}, strategy="STRICT_PACK").ready())
    print("ready", flush=True)
    sys.stdin.readline()
"""


def test_names_and_commands_of_other_users_upset_no_terminal_and_show_no_secret(driver, small_local_cluster, tmp_path):
    neighbour = driver(NEIGHBOUR, small_local_cluster)
    while neighbour.line() != "ready":
        pass
    job = tmp_path / "job.yaml"
    job.write_text("cluster:\n  num_nodes: 1\n  component_placement:\n    actor: 0\n")
    texts = {command: roost(*command.split()) for command in ("status", f"plan {job} --live")}
    with Cluster(num_nodes=1, quiet=True) as cluster, pytest.raises(AcceleratorsTaken) as caught:
        cluster.reserve(make_plan(job, cluster), timeout=0.5)
    texts["reserve"] = caught.value
    for command, done in texts.items():
        text = str(done) if isinstance(done, Exception) else done.stdout + done.stderr
        assert "title" in text, (command, text)
        assert text.replace("\n", "").isprintable(), (command, text)
        assert "\njob fake" not in text, command
        assert "sekret" not in text, (command, text)
    assert texts["status"].stdout.count("--wandb-key=*** --password ***") >= 2, "of the job, and of its Ray job"


def test_an_address_can_be_given_and_a_wrong_one_is_an_error(small_local_cluster, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS")
    done = roost("nodes", "--address", small_local_cluster.address)
    assert done.returncode == 0, done.stderr
    assert "1 x nvidia" in done.stdout
    done = roost("nodes", "--address", "127.0.0.1:9")
    assert done.returncode == 3
    assert "nothing answers at 127.0.0.1:9" in done.stderr
    done = roost("nodes", "--address", "nowhere")
    assert done.returncode == 2


@contextlib.contextmanager
def silent_port() -> Iterator[tuple[str, socket.socket]]:
    """A process that accepts connections and says nothing, as a head that hangs does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        yield f"127.0.0.1:{listener.getsockname()[1]}", listener


def test_a_ray_that_is_silent_is_an_error_at_the_deadline(tmp_path):
    (tmp_path / "job.yaml").write_text(JOB)
    with silent_port() as (address, _):
        for words in (["nodes"], ["status"], ["plan", str(tmp_path / "job.yaml"), "--live"]):
            done = roost(*words, "--timeout", "1", env={"RAY_ADDRESS": address})
            assert done.returncode == 3, done.stdout
            first = done.stderr.splitlines()[0]
            assert first == f"the process at {address} accepts connections and does not answer in 1 s"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_signal_ends_a_command_that_waits_for_ray_at_once(number, code):
    with silent_port() as (address, listener):
        command = [sys.executable, "-m", "roost", "nodes", "--address", address, "--timeout", "600"]
        waiting = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        connection, _ = listener.accept()
        with connection:
            children = [child.pid for child in psutil.Process(waiting.pid).children(recursive=True)]
            waiting.send_signal(number)
            assert waiting.wait(30) == code
            wait_until(lambda: all(is_gone(pid) for pid in children), "its child too")


@pytest.fixture
def own_folder() -> Iterator[Path]:
    """A short folder for sockets, so that a local cluster of the developer is not in the way."""
    with tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as folder:
        yield Path(folder)


def test_a_local_cluster_comes_up_is_found_and_goes_down(own_folder):
    env = {"TMPDIR": str(own_folder), "RAY_ADDRESS": ""}
    done = roost("up", "2x3:A100", "--cpus", "2", env=env)
    try:
        assert done.returncode == 0, done.stderr
        assert "local cluster 2x3:A100 is up at 127." in done.stdout
        assert "export RAY_ADDRESS=127." in done.stdout
        keeper = json.loads((own_folder / f"roost-{os.getuid()}" / "local-cluster.json").read_text())["keeper_pid"]
        processes = psutil.Process(keeper).children(recursive=True)
        assert len(processes) >= 4
        again = roost("up", "1x1", env=env)
        assert again.returncode == 2
        assert "a local cluster 2x3:A100 is up already" in again.stderr
        nodes = roost("nodes", env=env)
        assert nodes.stdout.count("3 x A100") == 2, nodes.stderr
        address = nodes.stdout.splitlines()[1].split()[2]
        printed = next(line for line in done.stdout.splitlines() if "RAY_ADDRESS" in line).partition("=")[2]
        assert printed.startswith(address)
        by_address = roost("nodes", "--address", printed, env=env)
        assert by_address.stdout == nodes.stdout, "the address alone is enough"
        few = roost("run", str(EXAMPLE / "job.yaml"), "cluster.num_nodes=3", env=env | {"PYTHONPATH": str(EXAMPLE)})
        assert few.returncode == 3
        assert "the job wants 3 nodes, and the local cluster 2x3:A100 has 2" in few.stderr
        assert "roost up 3x4" in few.stderr
        code = "from roost import Cluster\nwith Cluster(num_nodes=2) as c: print(c.num_accelerators)"
        job = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=False, env=os.environ | env
        )
        assert job.stdout == "6\n", job.stderr
    finally:
        down = roost("down", env=env)
    assert down.stdout == "the local cluster 2x3:A100 is down\n"
    assert all(is_gone(process.pid) for process in processes)
    assert is_gone(keeper)
    assert roost("down", env=env).stdout == "no local cluster is up\n"


@pytest.mark.parametrize("after", [0.3, 0.6, 0.9])
def test_a_start_that_is_killed_leaves_no_local_cluster(own_folder, after):
    env = os.environ | {"TMPDIR": str(own_folder), "RAY_ADDRESS": ""}
    starting = subprocess.Popen([sys.executable, "-m", "roost", "up", "2x1"], env=env, stdout=subprocess.DEVNULL)
    with pytest.raises(subprocess.TimeoutExpired):
        starting.wait(after)
    started = starting.pid
    keepers = [child.pid for child in psutil.Process(started).children()]
    starting.kill()
    starting.wait(30)
    wait_until(lambda: all(is_gone(pid) for pid in keepers), "the keeper ended with the process that started it")
    assert roost("down", env={"TMPDIR": str(own_folder)}).stdout == "no local cluster is up\n"


def test_a_wrong_size_of_a_local_cluster_is_an_error():
    done = roost("up", "two")
    assert done.returncode == 2
    assert "not nodes x accelerators" in done.stderr
