"""One rollout manager and its bad days: processes that die, hang or are interrupted while they use it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray

from rl_workers import Holder, PlainHolder, TellingEngine, hold_and_die
from roost import CallTimedOut, Cluster, ClusterError, ConfigError, NodePlacementStrategy, WorkerGroup
from roost.rl import RolloutManager, RouterOptions, create_placement_groups
from roost.watch.live import LiveRun
from roost.watch.measures import prometheus_text
from waiting import is_gone, press_ctrl_c, stop, stopped, wait_until

REQUEST = {"observations": [[1.0] * 4]}
WEIGHTS = {"w": [[0.0, 9.0]] * 4, "b": [0.0, 0.0]}
_kept: list[RolloutManager] = []


def make_manager(cluster: Cluster, **options: float) -> RolloutManager:
    """Make a manager with two engines, whose router has some options."""
    args = argparse.Namespace(rollout_num_gpus=2, debug_rollout_only=True)
    groups = create_placement_groups(args, cluster=cluster)
    return RolloutManager(
        args,
        TellingEngine,
        groups["rollout"],
        buffer_size=8,
        router_options=RouterOptions(**options),
        engine_kwargs={"slow": 0.02},
    )


@pytest.fixture
def manager(shared_cluster: Cluster) -> RolloutManager:
    """A manager that the tests of this file share, with two engines; each test leaves it as it was."""
    if not _kept:
        _kept.append(make_manager(shared_cluster, check_timeout=0.5, hang_seconds=0.5))
    assert _kept[0].buffer_stats().size == _kept[0].buffer_stats().leased == 0
    assert _kept[0].lock_holder() is None
    return _kept[0]


@pytest.fixture
def worker(shared_cluster: Cluster, keep: Callable[..., WorkerGroup]) -> WorkerGroup:
    """A worker whose group has a name with a space."""
    group = keep(
        "my actor",
        lambda: Holder.create_group().launch(
            shared_cluster, NodePlacementStrategy([0]), name="my actor", max_concurrency=4
        ),
    )
    if not group.alive:
        group.restart(0)
    return group


def pid_of(address: str) -> int:
    return next(one.pid for one in Cluster().worker_manager.get_workers() if one.address == address)


def times_out(call: Callable[[], object]) -> str:
    """The message of a call that times out, or nothing."""
    try:
        call()
    except CallTimedOut as error:
        return str(error)
    return ""


def has_waiting_get(manager: RolloutManager) -> bool:
    """Whether a get is in line: then a smaller one cannot have the sample that is there."""
    if times_out(lambda: manager.get(1, timeout=0.1)):
        return True
    manager.put(["first"])
    return False


def has_waiting_put(manager: RolloutManager) -> bool:
    """Whether a put is in line: then a smaller one cannot have the room that is there."""
    if times_out(lambda: manager.put(["there"], timeout=0.1)):
        return True
    manager.get(1)
    return False


def interrupted(call: Callable[[], object], is_time: Callable[[], object]) -> None:
    """Make a call that waits, and press Ctrl-C when it is time."""
    with ThreadPoolExecutor(1) as aside:
        pressing = aside.submit(lambda: (wait_until(is_time, "it waits"), press_ctrl_c()))
        with pytest.raises(KeyboardInterrupt):
            call()
        pressing.result()


def test_the_death_of_an_engine_s_worker_takes_it_out_of_a_router_that_checks_no_engine(shared_cluster):
    while _kept:
        _kept.pop().close()
    with contextlib.closing(make_manager(shared_cluster, check_seconds=3600)) as manager:
        os.kill(pid_of("rollout:1"), signal.SIGKILL)
        wait_until(lambda: any(one.is_dead for one in manager.engine_states()), "the router is told")
        assert {manager.generate(REQUEST)["engine"] for _ in range(20)} == {0}


def test_no_sample_is_lost_to_one_that_dies_or_is_interrupted(manager, worker):
    before = manager.buffer_stats()
    manager.put(["first"])
    worker.take(manager, 4)
    wait_until(lambda: has_waiting_get(manager), "the worker waits")
    os.kill(pid_of("my actor:0"), signal.SIGKILL)
    manager.put([1, 2, 3])
    assert manager.get(4, timeout=30) == ["first", 1, 2, 3]

    manager.put(["first"])
    interrupted(lambda: manager.get(4, timeout=60), lambda: has_waiting_get(manager))
    manager.put([1, 2, 3])
    assert manager.get(4, timeout=30) == ["first", 1, 2, 3]

    manager.put(["first"])
    assert "not 4 samples within 0.2 s" in times_out(lambda: manager.get(4, timeout=0.2))
    manager.put([1, 2, 3])
    assert manager.get(4, timeout=30) == ["first", 1, 2, 3]

    manager.put(["there"] * 6)
    interrupted(lambda: manager.put(["late"] * 4, timeout=60), lambda: has_waiting_put(manager))
    assert "no room for 4 samples within 0.1 s" in times_out(lambda: manager.put(["late"] * 4, timeout=0.1))
    assert manager.get(6, timeout=30) == ["there"] * 6
    assert "not 1 sample within 0.1 s" in times_out(lambda: manager.get(1, timeout=0.1))
    after = manager.buffer_stats()
    assert (after.size, after.leased, after.dropped) == (0, 0, 0)
    assert after.put - before.put == after.taken - before.taken


def test_the_lock_has_one_holder_whatever_its_name_and_none_that_was_interrupted(manager, worker, tmp_path):
    gate = tmp_path / "gate"
    holding = worker.hold(manager, str(gate))
    wait_until(lambda: manager.lock_holder() == "my actor:0", "the worker has it")

    def try_lock(timeout: float) -> str:
        with manager.lock(timeout):
            return "got it"

    assert "held by my actor:0" in times_out(lambda: try_lock(0.5))
    interrupted(lambda: try_lock(60), lambda: "2 waiting" in times_out(lambda: try_lock(0.1)))
    gate.touch()
    holding.wait(60)
    wait_until(lambda: manager.lock_holder() is None, "the one that was interrupted does not have it")
    with ThreadPoolExecutor(1) as aside:
        assert aside.submit(try_lock, 30).result(60) == "got it"


def test_a_manager_that_hangs_holds_up_nobody_who_releases_the_lock(manager):
    with contextlib.ExitStack() as hang:
        with manager.lock(timeout=2):
            hang.enter_context(stopped(pid_of("rollout_manager:0")))
        assert "does not answer" in times_out(manager.lock(timeout=0.1).__enter__)
    wait_until(lambda: manager.lock_holder() is None, "nobody has the lock when it answers again")


def test_coroutines_exclude_each_other_and_a_task_can_take_the_lock_again(manager):
    inside, most = 0, 0

    async def enter() -> None:
        nonlocal inside, most
        async with manager.lock():
            inside += 1
            most = max(most, inside)
            async with manager.lock(timeout=0.1):
                manager.update_weights(WEIGHTS, version=0)
            await asyncio.sleep(0.01)
            inside -= 1

    async def block() -> None:
        with manager.lock():
            pass

    async def enter_all() -> None:
        await asyncio.gather(*(enter() for _ in range(3)))
        async with manager.lock():
            with pytest.raises(ConfigError, match="another task of this thread has the lock"):
                await asyncio.create_task(block())
            waiting = asyncio.create_task(enter())
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        await block()

    asyncio.run(enter_all())
    assert most == 1
    assert manager.lock_holder() is None


@pytest.mark.parametrize("kind", ["Ray actor", "Ray task"])
def test_a_holder_that_roost_did_not_launch_loses_the_lock_when_it_dies(manager, kind, tmp_path):
    if kind == "Ray actor":
        holder = PlainHolder.remote()
        pid, name = ray.get(holder.hold.remote(manager), timeout=60)
        assert manager.lock_holder() == name
        os.kill(pid, signal.SIGKILL)
    else:
        with pytest.raises(ray.exceptions.WorkerCrashedError):
            ray.get(hold_and_die.remote(manager, str(tmp_path / "seen")), timeout=60)
        name = (tmp_path / "seen").read_text()
    assert name.startswith(f"{kind} ")
    with manager.lock(timeout=30):
        assert manager.lock_holder().startswith("driver ")


def test_a_manager_that_dies_or_hangs_comes_back_in_front_of_the_same_engines(manager, worker):
    url, engines = manager.router_url, manager.engines.specs
    worker.take(manager, 0).outcomes(60)  # it has attached to the manager's first process
    manager.put([1])
    with stopped(pid_of("rollout_manager:0")):
        began = time.monotonic()
        assert times_out(lambda: manager.put([2], timeout=0.1))
        assert times_out(lambda: manager.get(1, timeout=0.1))
        assert time.monotonic() - began < 20
    assert manager.get(1, timeout=30) == [1], "what was given up is not done later"
    assert manager.buffer_stats().size == manager.buffer_stats().leased == 0

    os.kill(gone := pid_of("rollout_manager:0"), signal.SIGKILL)
    wait_until(lambda: is_gone(gone), "it is dead")
    with pytest.raises(ClusterError, match=r"cannot be reached[\s\S]*manager\.restart\(\)"):
        manager.generate(REQUEST)
    manager.restart()
    assert (manager.router_url, manager.engines.specs) == (url, engines)
    assert manager.generate(REQUEST, timeout=60)["engine"] in (0, 1), "it waits until the router has found the engines"
    manager.put([3])
    wait_until(lambda: worker.take(manager, 1).outcomes(60)[0].value == [3], "other processes reach it too")

    with stopped(pid_of("rollout_manager:0")):
        manager.restart()
        assert manager.generate(REQUEST, timeout=60)["engine"] in (0, 1)
    assert manager.router_url == url


def test_requests_leave_an_engine_that_hangs_and_it_is_restarted_in_time(manager):
    manager.update_weights(WEIGHTS, version=5)
    assert manager.engine_versions() == [5, 5]
    over, pid = threading.Event(), pid_of("rollout:0")

    def keep_asking() -> set[int]:
        engines = set()
        while not over.is_set():
            engines.add(manager.generate(REQUEST, timeout=60)["engine"])
        return engines

    with ThreadPoolExecutor(8) as aside, stopped(pid):
        os.kill(pid, signal.SIGCONT)
        asking = [aside.submit(keep_asking) for _ in range(8)]
        served = manager.engine_states()[0].served
        wait_until(lambda: manager.engine_states()[0].served > served, "engine 0 serves")
        stop(pid)
        wait_until(lambda: manager.engine_states()[0].busy == 0, "its requests are elsewhere")
        assert not any(one.done() for one in asking), "none has failed"
        assert manager.engine_versions(timeout=1) == [None, 5]
        began = time.monotonic()
        # Older weights than it had: its process is new.
        manager.restart_engine(0, WEIGHTS, version=4, timeout=20)
        assert time.monotonic() - began < 20
        over.set()
        assert {engine for one in asking for engine in one.result(60)} == {0, 1}
    assert pid_of("rollout:0") != pid
    assert manager.engine_versions() == [4, 5]
    with pytest.raises(ConfigError, match="takes no weights of version 4: version 5 was asked for"):
        manager.update_weights(WEIGHTS, version=4)
    manager.update_weights(WEIGHTS, version=6)
    assert manager.engine_versions() == [6, 6]


def test_weights_that_a_call_brings_are_shown_as_those_of_a_link_are(manager):
    manager.update_weights(WEIGHTS, version=7)
    live = LiveRun(Path(Cluster().run_dir))
    wait_until(lambda: 'roost_weights_version{link="driver -> rollout"} 7' in prometheus_text(live.refresh()), "it is")
    assert 'roost_weights_update_seconds{link="driver -> rollout"}' in prometheus_text(live.refresh())


def test_the_death_of_an_engine_s_worker_takes_it_out_of_the_router_at_once(manager):
    url, pid = manager.engines.urls[1], pid_of("rollout:1")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: any(one.is_dead for one in manager.engine_states()), "the router knows")
    (dead,) = (one for one in manager.engine_states() if not one.healthy)
    assert (dead.url, dead.why.startswith("rollout:1 ")) == (url, True)
    # Whoever has its port now is not even asked for a proof.
    with socket.create_server((manager.engines.specs[1].address, manager.engines.specs[1].port)) as taken:
        assert {manager.generate(REQUEST)["engine"] for _ in range(20)} == {0}
        taken.setblocking(False)
        with pytest.raises(BlockingIOError):
            taken.accept()
    before = manager.engines.specs[1]
    manager.restart_engine(1, WEIGHTS, version=6)
    assert manager.engines.specs[1].secret != before.secret
    assert {manager.generate(REQUEST)["engine"] for _ in range(20)} == {0, 1}
    assert not any(one.is_dead for one in manager.engine_states())


def test_router_and_engines_refuse_strangers_and_have_a_secret_each(manager):
    secrets = [manager.secret, *(spec.secret for spec in manager.engines.specs)]
    assert len(set(secrets)) == 3
    for url, secret in zip((manager.router_url, *manager.engines.urls), secrets, strict=True):
        for status, key in [(401, ""), *((200 if one == secret else 401, f"Bearer {one}") for one in secrets)]:
            headers = {"Authorization": key}
            with contextlib.closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)) as line:
                line.request("GET", "/health", headers=headers)
                assert (url, line.getresponse().status) == (url, status)
    assert not [one for one in secrets if one in repr(manager.engines.specs)]
    files = [path.read_bytes() for path in Path(Cluster().run_dir).rglob("*") if path.is_file()]
    assert not [one for one in secrets if any(one.encode() in file for file in files)], "they are in no file of the run"
