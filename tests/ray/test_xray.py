"""`roost xray` on real Ray, beside jobs that do not know Roost."""

from __future__ import annotations

import json
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roost.deadline import Deadline
from roost.testing import LocalCluster, LocalNode
from roost.xray.facts import Actor, Node
from roost.xray.gather import _Sight
from waiting import stopped, wait_until

Look = Callable[..., dict[str, Any]]

BEGIN = """
import os, sys, time
import ray
from ray.util.placement_group import placement_group
ray.init(namespace="theirs", log_to_driver=False)
"""
END = """
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    local = LocalCluster([LocalNode(accelerators=4, cpus=4) for _ in range(2)])
    local.start()
    yield local
    local.stop()


@pytest.fixture
def look(roost, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> Look:
    """X-ray the cluster, until there is a finding with these words; return it, with `whole` for the rest."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)

    def until(*words: str, flags: tuple[str, ...] = ()) -> dict[str, Any]:
        found: list[dict[str, Any]] = []
        seen: list[str] = []

        def is_there() -> bool:
            code, out, err = roost("xray", cluster.address, "--format", "json", *flags)
            assert code == 0, err
            whole = json.loads(out)
            seen[:] = [" | ".join([item["text"], *item["evidence"]]) for item in whole["findings"]]
            fitting = [index for index, text in enumerate(seen) if all(word in text for word in words)]
            found[:] = [{**whole["findings"][index], "all": seen[index], "whole": whole} for index in fitting]
            return bool(found)

        try:
            wait_until(is_there, f"a finding with {words}")
        except AssertionError:
            pytest.fail(f"no finding has {words}: {seen}")
        return found[0]

    return until


def test_a_group_that_waits_for_cpus(look, cluster, driver):
    code = """
@ray.remote(num_cpus=3)
class Greedy: pass
greedy = [Greedy.options(name=f"greedy_{index}").remote() for index in range(4)]
ray.get([item.__ray_ready__.remote() for item in greedy[:2]])
group = placement_group([{"CPU": 2}] * 4, name="wants-cpus", strategy="SPREAD")
big = placement_group([{"GPU": 9}], name="wants-nine")
"""
    job = driver(BEGIN + code + END, cluster)
    assert job.line() == "ready"
    found = look("'wants-cpus'", "no node has enough CPU left", "greedy_0")
    assert found["level"] == "problem"
    assert "waits for " in found["text"]
    assert "of 4 (2 CPU; SPREAD)" in found["text"]
    assert f"pid {job.process.pid}" in found["all"], "who has them, and for which job"
    found = look("'wants-nine'", "too small for it even when it is free")
    assert "4 of 4 GPU left" in found["all"]


def test_a_full_cluster_with_the_owner_of_its_gpus(look, cluster, driver):
    code = """
@ray.remote(num_gpus=4, num_cpus=0)
class Owner: pass
owners = [Owner.options(name=f"owner_{index}").remote() for index in range(2)]
ray.get([item.__ray_ready__.remote() for item in owners])
late = Owner.options(name="late").remote()
@ray.remote(num_gpus=1, num_cpus=0)
def score(): pass
@ray.remote(num_gpus=99)
def impossible(): pass
calls = [score.remote(), score.remote(), impossible.remote()]
"""
    job = driver(BEGIN + code + END, cluster)
    assert job.line() == "ready"
    found = look("actor late waits for ", "for 4 GPU", "no node has enough GPU left", "held: 8 GPU: owner_0-1")
    assert f"pid {job.process.pid}" in found["all"]
    found = look("task impossible waits", "99 GPU", "too small")
    assert found["level"] == "problem"
    assert look("2 tasks score wait", "owner_0-1")["level"] == "note"
    gpus = {item["name"]: item["holds"] for item in found["whole"]["actors"] if item["state"] == "ALIVE"}
    assert gpus["owner_0"].keys() == {"0", "1", "2", "3"}
    found = look("actor late", flags=("--stacks",))
    owners = [item["id"] for item in found["whole"]["actors"] if item["state"] == "ALIVE"]
    assert [item["place"] for item in found["whole"]["stacks"] if item["id"] in owners] == ["no call"] * 2


def test_an_actor_whose_bundle_another_one_has(look, cluster, driver):
    code = """
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
group = placement_group([{"GPU": 1}, {"GPU": 1}], name="pair")
ray.get(group.ready())
@ray.remote(num_gpus=1, num_cpus=0)
class Member: pass
inside = PlacementGroupSchedulingStrategy(group, 0)
members = [Member.options(name=name, scheduling_strategy=inside).remote() for name in ("first", "second")]
ray.get(members[0].__ray_ready__.remote())
"""
    assert driver(BEGIN + code + END, cluster).line() == "ready"
    found = look("actor second waits for ", "for placement group 'pair', which has no bundle with 1 GPU left")
    assert (found["level"], found["evidence"]) == ("problem", ["in it: first"])


def test_a_constructor_without_memory_on_its_gpu(look, cluster, driver):
    code = """
@ray.remote(num_cpus=0)
class Model:
    def __init__(self):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
model = Model.options(name="model").remote()
"""
    assert driver(BEGIN + code + END, cluster).line() == "ready"
    found = look("actor model is dead", "RuntimeError: CUDA out of memory. Tried to allocate 2 GiB")
    assert found["text"] == "actor model is dead: the constructor raised an exception"


def test_a_constructor_that_hangs(look, cluster, driver):
    code = """
@ray.remote(num_cpus=0)
class Slow:
    def __init__(self):
        print("loading weights", flush=True)
        self.load()
    def load(self): time.sleep(3600)
slow = Slow.options(name="slow").remote()
"""
    assert driver(BEGIN + code + END, cluster).line() == "ready"
    found = look("actor slow runs its constructor for ", "loading weights", flags=("--stacks",))
    assert [item["place"][:10] for item in found["whole"]["stacks"] if "load" in item["place"]] == ["Slow.load "]


def test_gpus_are_called_what_the_node_was_started_with(roost, driver, monkeypatch):
    code = """
@ray.remote(num_gpus=1, num_cpus=0)
class Owner:
    def ids(self): return ray.get_gpu_ids()
owners = [Owner.options(name=f"owner_{index}").remote() for index in range(2)]
told = {"CUDA_VISIBLE_DEVICES": "0", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
judge = Owner.options(name="judge", num_gpus=0, runtime_env={"env_vars": told}).remote()
ray.get([item.__ray_ready__.remote() for item in (*owners, judge)])
print(*sorted(int(one) for some in ray.get([item.ids.remote() for item in owners]) for one in some), flush=True)
"""
    with LocalCluster([LocalNode(accelerators=2, cpus=2, env={"CUDA_VISIBLE_DEVICES": "4,6"})]) as local:
        for name, value in local.environment.items():
            monkeypatch.setenv(name, value)
        assert driver(BEGIN + code + END, local).line() == "4 6"
        _, out, _ = roost("xray", local.address, "--format", "json")
        found = json.loads(out)
    assert sorted(key for item in found["actors"] for key in item["holds"]) == ["4", "6"]
    assert [item["ids"] for item in found["nodes"]] == [[4, 6]]
    assert found["findings"] == [], "the one that is told to use GPU 0 shares it with nobody"


def test_a_dashboard_that_hangs_is_asked_for_no_log_after_the_time_is_up():
    asked = []

    class Dashboard(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b":")

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Dashboard) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        tables = SimpleNamespace(sockets={"far": ""}, value=lambda *_: f"127.0.0.1:{server.server_address[1]}")
        sight = _Sight(tables, [Node(id="far", address="192.0.2.9")], [])
        dead = Actor(id="a", class_name="A", job="01", state="DEAD", node="far", pid=7, worker="w")
        assert sight.read_logs((dead,), Deadline.after(0)) == (dead,)
        assert asked == ["/api/version"]
        assert sight.read_logs((dead,), Deadline.after(60)) == (dead,)
        assert len(asked) == 3, "what it printed as an error, and the rest"
        server.shutdown()


def test_two_actors_on_one_gpu(look, cluster, driver):
    code = """
@ray.remote(num_cpus=0)
class Trainer: pass
env = {"env_vars": {"CUDA_VISIBLE_DEVICES": "2", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
node = ray.get_runtime_context().get_node_id()
where = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False)
alike = {"num_gpus": 0, "runtime_env": env, "scheduling_strategy": where}
pair = [Trainer.options(name=name, **alike).remote() for name in ("pair_0", "pair_1")]
ray.get([item.__ray_ready__.remote() for item in pair])
"""
    assert driver(BEGIN + code + END, cluster).line() == "ready"
    found = look("GPU 2 of", "owners", "pair_0-1", "num_gpus=0")
    assert found["level"] == "warning"


def test_a_hang_in_all_reduce_with_one_straggler(look, cluster, driver, tmp_path):
    code = """
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
@ray.remote(num_cpus=0)
class Learner:
    def run(self, rank, path):
        import torch
        torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=3)
        open(f"{path}{rank}", "w").close()
        if rank == 2:
            self.load()
        torch.distributed.all_reduce(torch.ones(1))
    def load(self):
        from torch.utils.data import DataLoader, Dataset
        class Slow(Dataset):
            def __len__(self): return 1
            def __getitem__(self, index): time.sleep(3600)
        next(iter(DataLoader(Slow(), num_workers=1)))
learners = [Learner.options(name=f"learner_{rank}").remote() for rank in range(3)]
calls = [item.run.remote(rank, PATH) for rank, item in enumerate(learners)]
while not all(os.path.exists(f"{PATH}{rank}") for rank in range(3)):
    time.sleep(0.1)
""".replace("PATH", repr(str(tmp_path / "store")))
    job = driver(BEGIN + code + END, cluster)
    assert job.line() == "ready"
    bundle = tmp_path / "report.zip"
    with stopped(job.process.pid):
        # The driver hangs, too: nobody asks it.
        found = look("2 of 3 Learner in all_reduce", "learner_2 in", flags=("--bundle", str(bundle)))
    assert found["level"] == "problem"
    assert "__next__" in found["text"] or "load" in found["text"]
    with zipfile.ZipFile(bundle) as archive:
        assert {"xray.html", "xray.txt", "xray.json", "stacks/learner_2.txt"} <= {*archive.namelist()}
        assert "dataloader" in archive.read("stacks/learner_2.txt").decode()
        assert "2 of 3 Learner in all_reduce" in archive.read("xray.html").decode()


def test_it_leaves_nothing_on_the_cluster(look, cluster, driver):
    assert driver(BEGIN + "held = placement_group([{'GPU': 1}], name='empty')" + END, cluster).line() == "ready"
    first = look("'empty'", "no actor is in it")["whole"]
    again = look("'empty'", "no actor is in it")["whole"]
    assert [item["id"] for item in first["drivers"]] == [item["id"] for item in again["drivers"]]
    assert len(again["drivers"]) == 1, "it is no driver itself"


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:1", "nothing answers at 127.0.0.1:1"),
        ("nowhere", "is not an address of a Ray cluster"),
        ("ray://127.0.0.1:10001", "is an address of the Ray client"),
    ],
)
def test_an_address_where_no_cluster_is(roost, address, words):
    code, out, err = roost("xray", address)
    assert code in (2, 3)
    assert words in err
    assert not out
    assert "Traceback" not in err


@pytest.mark.usefixtures("look")
def test_a_report_that_cannot_be_written(roost, cluster, tmp_path: Path):
    code, _, err = roost("xray", cluster.address, "--bundle", str(tmp_path / "no" / "report.zip"))
    assert code == 2
    assert "No such file or directory" in err
    code, out, _ = roost("xray", cluster.address, "--watch")
    assert (code, out.startswith(f"Ray at {cluster.address}")) == (0, True), "once, where there is no terminal"
    code, _, err = roost("xray", cluster.address, "--watch", "--format", "json")
    assert code == 2
    assert "--watch shows on the terminal only" in err


def test_an_actor_that_ray_killed_for_memory(look, cluster, driver, request):
    code = """
@ray.remote(num_cpus=0, resources={"narrow": 1}, max_restarts=0)
class Eater:
    def eat(self):
        print("WANDB_API_KEY=abcdefgh: eating", flush=True)
        time.sleep(3600)
eater = Eater.options(name="eater").remote()
call = eater.eat.remote()
try:
    ray.get(call)
except Exception:
    pass
"""
    # A node whose memory Ray always takes for full, which is less of a danger than to fill it.
    settings = {"RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "100"}
    rank = cluster.add_node(LocalNode(env=settings, resources={"narrow": 1}))
    request.addfinalizer(lambda: cluster.kill_node(rank))
    assert driver(BEGIN + code + END, cluster).line() == "ready"
    found = look("actor eater is dead: killed for memory")
    assert found["level"] == "problem"
    assert "abcdefgh" not in json.dumps(found["whole"])
