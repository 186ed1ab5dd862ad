"""A head, a manager or a network that hangs, dies or is away for a moment: what survives, and what is reported."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import psutil
import pytest

from foreign import all_is_free
from roost import Cluster, ClusterError, ConfigError, NodePlacementStrategy, PackedPlacementStrategy, WorkerManager
from roost.runtime.nodes.ray_state import read_ray_state
from roost.testing import LocalCluster, local_cluster
from waiting import stopped, wait_until
from workers import Performer


@pytest.fixture(scope="module")
def roost_local_cluster() -> Iterator[LocalCluster]:
    """A cluster of its own, whose processes the tests stop and kill."""
    with local_cluster("2x2") as local:
        yield local


@pytest.fixture
def cluster(roost_local_cluster) -> Iterator[Cluster]:
    with Cluster(num_nodes=len(roost_local_cluster.nodes), quiet=True) as opened:
        yield opened


def pid_of(name: str) -> int:
    """The process of a named actor."""
    return next(actor.pid for actor in read_ray_state().actors if actor.name == name)


def head_of(local: LocalCluster) -> int:
    (pid,) = [pid for pid in local.pids[0] if psutil.Process(pid).name() == "gcs_server"]
    return pid


def test_managers_that_are_killed_come_back_with_what_they_knew(cluster, caplog):
    strategy = PackedPlacementStrategy(0, 1)
    group = Performer.create_group().launch(cluster, strategy, name="actor", restarts=3)
    port = cluster.master_port
    leased = cluster.node_manager.count_leased_ports()
    with caplog.at_level(logging.WARNING):
        # One after the other: each keeps what another one knows.
        for name in ("WorkerManager", "NodeManager", "CollectiveManager", "WorkerManager"):
            before = pid_of(name)
            os.kill(before, signal.SIGKILL)
            wait_until(lambda name=name: f"the {name} is back" in caplog.text, "the watch says so")
            caplog.clear()
            assert pid_of(name) != before
    assert [item.address for item in cluster.worker_manager.get_workers()] == ["actor:0", "actor:1"]
    assert cluster.node_manager.get_master_port() == port
    assert cluster.node_manager.count_leased_ports() == leased
    assert [held.users[0][0].partition("#")[0] for held in cluster.node_manager.get_slots()] == ["actor", "actor"]
    with contextlib.suppress(ClusterError):
        group.end(1, "kill").wait(60)
    wait_until(lambda: group[1].rank_of().outcomes(60)[0].is_ok, "the rank was restarted in its place")
    with Performer.create_group().launch(cluster, NodePlacementStrategy([1]), name="new") as other:
        assert other.rank_of().wait(60) == [0]
    group.close()
    wait_until(lambda: all_is_free(cluster), "a manager that was restarted gives the accelerators back")


@pytest.mark.parametrize("name", ["WorkerManager", "NodeManager"])
def test_a_manager_that_hangs_holds_nothing_up_for_longer_than_its_deadline(cluster, name):
    group = Performer.create_group().launch(cluster, PackedPlacementStrategy(0, 1), name="actor")
    with stopped(pid_of(name)):
        began = time.monotonic()
        with pytest.raises(ClusterError, match=f"the {name} of 'roost' did not answer"):
            Performer.create_group().launch(cluster, PackedPlacementStrategy(2, 3), name="late", timeout=5)
        with pytest.raises(ClusterError, match=f"'actor' could not be closed in 2 s; still there: .*{name}"):
            group.close(timeout=2)
        assert time.monotonic() - began < 30, "a call of a manager has a minute by default"
    group.close()
    wait_until(lambda: all_is_free(cluster), "what could not be closed is closed the second time")


def test_a_head_that_hangs_is_named_and_a_close_can_be_repeated(cluster, roost_local_cluster):
    group = Performer.create_group().launch(cluster, PackedPlacementStrategy(0, 1), name="actor")
    with stopped(head_of(roost_local_cluster)):
        began = time.monotonic()
        with pytest.raises(ClusterError, match="Ray did not list its actors in"):
            _ = group.alive
        with pytest.raises(ClusterError, match=r"could not be closed in 2 s; still there: actor:0, actor:1"):
            group.close(timeout=2)
        assert time.monotonic() - began < 55, "each of Ray's calls takes a minute"
        began = time.monotonic()
        with pytest.raises(ClusterError, match=r"'actor' could not be closed in [\d.]+ s; still there: ") as caught:
            group.close(timeout=40)
        took = time.monotonic() - began
        assert took < 35, "it gives up sooner than it may"
        said = float(re.search(r"in ([\d.]+) s", str(caught.value))[1])
        assert abs(said - took) < 1, "it says how long it has tried"
    group.close()
    wait_until(lambda: all_is_free(cluster), "closed the second time")


@contextlib.contextmanager
def blip(local: LocalCluster) -> Iterator[None]:
    """Cut the network to the head inside the block."""
    route = ["blackhole", f"{local.address.partition(':')[0]}/32", "table", "local"]
    ip = shutil.which("ip")
    if ip is None or subprocess.run([ip, "route", "add", *route], capture_output=True, check=False).returncode:
        pytest.skip("this user cannot change routes")
    try:
        yield
    finally:
        subprocess.run([ip, "route", "del", *route], check=True)


def test_after_a_blip_of_the_network_everything_goes_on(cluster, roost_local_cluster, caplog):
    strategy = PackedPlacementStrategy(0, 1)
    kept = Performer.create_group().launch(cluster, strategy, name="kept", restarts=3)
    closed = Performer.create_group().launch(cluster, NodePlacementStrategy([0, 1]), name="closed")
    kept.count().wait(60)
    with contextlib.ExitStack() as end, caplog.at_level(logging.WARNING):
        end.enter_context(blip(roost_local_cluster))
        threading.Timer(2.5, end.close).start()
        # Each of these waits until the head answers again, and believes nothing before.
        closed.close()
        assert kept.alive == [0, 1]
        with pytest.raises(ConfigError, match="kept:0 is alive"):
            kept.restart(0)
        assert "head" not in caplog.text, "a blip is not worth a word"
    assert kept.count().wait(60) == [2, 2], "no worker lost its state"
    with pytest.raises(ClusterError, match="no group 'closed'"):
        WorkerManager.get_proxy().get_group("closed")
    with contextlib.suppress(ClusterError):
        kept.end(1, "kill").wait(60)
    wait_until(lambda: kept[1].rank_of().outcomes(60)[0].is_ok, "the watch goes on, and restarts what dies")
    kept.close()


def test_a_driver_without_descriptors_takes_nothing_for_dead(cluster):
    with Performer.create_group().launch(cluster, NodePlacementStrategy([0, 1]), name="few") as group:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = [os.open(os.devnull, os.O_RDONLY)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(used) + 1, hard))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                used.append(os.open(os.devnull, os.O_RDONLY))
            assert group.alive == [0, 1]
            assert cluster.dead_nodes == ()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for descriptor in used:
                os.close(descriptor)


HEADLESS = """
import atexit, ctypes, time
# As the destructors of C++ now and then, while a thread of Ray's waits for the head.
libc = ctypes.CDLL(None)
libc.on_exit(ctypes.cast(libc.abort, ctypes.c_void_p), None)
from roost import Cluster, ClusterError, NodePlacementStrategy
from roost.runtime.connect import head
from workers import Performer
head.LOST_SECONDS = 6
atexit.register(lambda: print("at exit", flush=True))
with Cluster(num_nodes=2, quiet=True) as cluster:
    group = Performer.create_group().launch(cluster, NodePlacementStrategy([1]), name="actor")
    print("open", flush=True)
    try:
        group.hang_here().wait()
    except ClusterError as error:
        print(str(error).splitlines()[0], flush=True)
        try:
            group.rank_of()
        except ClusterError as again:
            print(str(again).splitlines()[0], flush=True)
    finally:
        print("finally", flush=True)
print("closed", flush=True)
"""


WAITING = """
import asyncio, threading, time
from roost import Cluster, ClusterError, NodePlacementStrategy, make_plan
from roost.runtime.connect import head
from workers import Performer
head.LOST_SECONDS = 6
nodes = NodePlacementStrategy([1])

def launch():
    with Performer.create_group().launch(cluster, nodes, name="other"):
        pass

def reserve():
    with cluster.reserve(plan):
        pass

async def ask():
    await group.hang_here()

with Cluster(num_nodes=2, quiet=True) as cluster:
    plan = make_plan({"cluster": {"component_placement": {"x": "0-1"}}}, cluster)
    group = Performer.create_group().launch(cluster, nodes, name="actor", max_concurrency=8)
    again = Performer.create_group().launch(cluster, nodes, name="again")
    calls = {
        "wait": lambda: group.hang_here().wait(),
        "await": lambda: asyncio.run(ask()),
        "iterate": lambda: list(group.hang_here()),
        "outcomes": lambda: group.hang_here().outcomes(),
        "stream": lambda: list(group.stream("ticks")),
        "alive": lambda: group.alive,
        "restart": lambda: again.restart(0, force=True),
        "launch": launch,
        "reserve": reserve,
    }
    def repeat(name):
        while True:
            is_lost = cluster.context.connection.head.is_given_up
            try:
                calls[name]()
            except ClusterError as error:
                if is_lost:
                    print(f"{name} {str(error).splitlines()[0]}\\n", end="", flush=True)
                    return
            # Others run on this machine.
            time.sleep(0.2)
    threads = [threading.Thread(target=repeat, args=(name,)) for name in calls]
    for thread in threads:
        thread.start()
    time.sleep(2)
    print("open", flush=True)
    for thread in threads:
        thread.join()
print("closed", flush=True)
"""


RAYLESS = """
import time
from roost import Cluster, ClusterError, NodePlacementStrategy
from workers import Performer
with Cluster(num_nodes=2, quiet=True) as cluster:
    group = Performer.create_group().launch(cluster, NodePlacementStrategy([1]), name="actor")
    # This goes through the store of the driver's node, and is lost with it.
    result = group.length(bytes(1_000_000))
    result.wait()
    print("open", flush=True)
    try:
        group.hang_here().wait()
    except ClusterError:
        print("> lost", flush=True)
    while not cluster.context.connection.head.is_given_up:
        time.sleep(0.1)
    for call in (lambda: result.wait(), group.rank_of, lambda: cluster.node_manager.get_view()):
        try:
            call()
        except ClusterError as error:
            print(f"> {str(error).splitlines()[0]}", flush=True)
print("> closed", flush=True)
"""

MAKING = """
import logging, sys
from roost import Cluster, ClusterError
logging.basicConfig(stream=sys.stdout, format="> %(message)s")
try:
    Cluster(num_nodes=3, quiet=True)
except ClusterError as error:
    print(f"> {str(error).splitlines()[0]}", flush=True)
"""


def lines_of(ended) -> list[str]:
    """What a driver has printed itself, when it has ended; Ray prints as well."""
    said, _ = ended.finish()
    return [re.sub(r"127[.:\d]+", "127.x", line[2:]) for line in said.splitlines() if line.startswith("> ")]


def test_a_driver_outlives_the_raylet_of_its_node_also_while_it_makes_its_cluster(driver):
    with local_cluster("2x1") as local:
        mine, making = driver(RAYLESS, local), driver(MAKING, local)
        assert mine.line() == "open"
        assert making.line().startswith("> waiting for 1 of 3 nodes")
        (raylet,) = [pid for pid in local.pids[0] if psutil.Process(pid).name() == "raylet"]
        os.kill(raylet, signal.SIGKILL)
        lost = "the raylet of this process, at 127.x, has ended"
        assert lines_of(mine) == ["lost", lost, lost, lost, "closed"]
        assert lines_of(making) == [f"{lost}: this process disconnects from Ray", lost]
        assert [mine.process.returncode, making.process.returncode] == [0, 0]
        with pytest.raises(ClusterError, match="could not be joined: the raylet of its node has ended"):
            Cluster(num_nodes=2, quiet=True)


OUTLIVING = """
import time
from roost import Cluster
from roost.runtime.connect import connection
connection.OUTLIVE_SECONDS = 3
with Cluster(num_nodes=1, quiet=True) as cluster:
    print("open", flush=True)
    time.sleep(600)
"""


STUCK = """
import time
import ray
from roost import Cluster, ClusterError
from roost.runtime.connect import head
head.LOST_SECONDS = 6
with Cluster(num_nodes=1, quiet=True):
    print("open", flush=True)
    while head.Head.current.is_there:
        time.sleep(0.1)
    try:
        head.within(60, ray.nodes, "list its nodes")
    except ClusterError:
        pass
    while not head.Head.current.is_given_up or ray.is_initialized():
        time.sleep(0.1)
try:
    Cluster(num_nodes=1, quiet=True)
except ClusterError as error:
    print(str(error).splitlines()[0], flush=True)
"""


DRIVERS = {"headless": HEADLESS, "waiting": WAITING, "outliving": OUTLIVING, "stuck": STUCK}


class Ended(NamedTuple):
    """What a driver left."""

    code: int
    printed: list[str]
    errors: str


@pytest.fixture(scope="module")
def bereaved(lasting_driver) -> tuple[str, dict[str, Ended]]:
    """The address of a head that was killed, and what the drivers left that were connected to it, by name."""
    with local_cluster("2x1") as local:
        started = {name: lasting_driver(code, local) for name, code in DRIVERS.items()}
        assert {name: item.line() for name, item in started.items()} == dict.fromkeys(started, "open")
        os.kill(head_of(local), signal.SIGKILL)
        found = {}
        for name, item in started.items():
            printed, errors = item.finish()
            found[name] = Ended(item.process.returncode, printed.splitlines(), errors)
        # Nodes without a head look for it all the time: they end before the tests that follow.
        return local.address, found


def test_whatever_waits_when_the_head_dies_returns_and_names_it(bereaved):
    address, drivers = bereaved
    waits = ["alive", "await", "iterate", "launch", "outcomes", "reserve", "restart", "stream", "wait"]
    assert sorted(line.partition(":")[0] for line in drivers["waiting"].printed) == sorted(
        [*(f"{name} Ray's head at {address.partition(':')[0]}" for name in waits), "closed"]
    )
    assert drivers["waiting"].code == 0


def test_how_long_ray_lets_a_driver_outlive_its_head_is_ours_to_say(bereaved):
    mine = bereaved[1]["outliving"]
    assert mine.code == 1
    assert "Failed to connect to GCS within 3 seconds" in mine.errors


def test_a_driver_outlives_its_head_and_unwinds(bereaved):
    address, drivers = bereaved
    mine = drivers["headless"]
    gone = f"Ray's head at {address} does not answer"
    assert mine.printed[:5] == [gone, gone, "finally", "closed", "at exit"]
    assert mine.code == 0
    assert "does not answer: this process disconnects from Ray" in mine.errors


def test_a_driver_with_a_call_that_never_returns_is_refused_another_ray(bereaved):
    address, drivers = bereaved
    waits = f"this process still waits for Ray at {address}, which it has lost"
    assert drivers["stuck"].printed[0] == f"{waits}, to list its nodes"
    assert drivers["stuck"].code == 0


LOSING = """
import sys, time
import ray
from roost import Channel, Cluster, ClusterError
from roost.runtime.connect import head
head.LOST_SECONDS = 6
with Cluster(num_nodes=1, quiet=True):
    print("open", flush=True)
    while not head.Head.current.is_given_up or ray.is_initialized():
        time.sleep(0.1)
    try:
        Channel.create("samples")
    except ClusterError as error:
        print(str(error).splitlines()[0], flush=True)
with Cluster(num_nodes=1, quiet=True, address=sys.stdin.readline().strip()) as cluster:
    print(cluster.num_nodes, flush=True)
"""


def test_a_driver_that_lost_its_head_can_use_another_cluster(driver, small_local_cluster):
    for _ in range(5):
        with local_cluster("1x1") as local:
            mine = driver(LOSING, local)
            assert mine.line() == "open"
            os.kill(head_of(local), signal.SIGKILL)
            assert f"head at {local.address}" in mine.line()
            mine.process.stdin.write(f"{small_local_cluster.address}\n")
            used, errors = mine.finish()
        # The head may die in the moment of a call, which never returns then: see the test before.
        if "which it has lost, to list its nodes" not in errors:
            break
    assert (used, mine.process.returncode) == ("1\n", 0), errors
