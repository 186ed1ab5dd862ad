"""Channels on real processes, and what is left of them when some of these die."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import numpy as np
import psutil
import pytest

import warm
from channel_workers import Stage, Talker
from roost import (
    CallTimedOut,
    Channel,
    ChannelClosed,
    ChannelWorker,
    Cluster,
    ClusterError,
    ConfigError,
    NameTaken,
    NodePlacementStrategy,
    WorkerDied,
    WorkerGroup,
)
from roost.testing import local_cluster
from shared_memory import shared_memory
from waiting import is_gone, press_ctrl_c, stop, wait_until

_names = (f"channel-{number}" for number in itertools.count())


@pytest.fixture
def talkers(shared_cluster, keep):
    """Two workers on node 0 and one on node 1."""
    group = keep(
        "talkers",
        lambda: Talker.create_group().launch(shared_cluster, NodePlacementStrategy([0, 0, 1]), name="talkers"),
    )
    for rank in set(range(3)) - set(group.alive):
        group.restart(rank)
    return group


@pytest.fixture
def channel(shared_cluster):
    assert shared_cluster.is_open
    with Channel.create(next(_names)) as made:
        yield made


@pytest.fixture
def small(shared_cluster):
    """A channel with room for one item."""
    assert shared_cluster.is_open
    with Channel.create(next(_names), maxsize=1) as made:
        yield made


def roost(*words):
    return subprocess.run(
        ["roost", *words], capture_output=True, text=True, timeout=180, check=True, env=warm.environment()
    )


def line(channel, key="default_queue"):
    return channel.stats()["keys"].get(key, {"getters": {}, "putters": {}, "depth": 0, "leased": 0})


def wait_for_getter(channel, who):
    wait_until(lambda: who in line(channel)["getters"], f"{who} waits for an item")


def wait_for_putter(channel, who):
    wait_until(lambda: who in line(channel)["putters"], f"{who} waits for room")


def kill(group, rank):
    pid = group[rank].pid().wait()[0]
    return lambda: os.kill(pid, signal.SIGKILL)


def test_items_go_from_any_process_to_any_other_in_order(channel, talkers):
    assert talkers[0].put(channel, "a", {"b": [1]}).wait() == [2]
    assert channel.qsize() == 2
    channel.put("c")
    assert talkers[2].get(channel, 2).wait() == [["a", {"b": [1]}]]
    assert channel.get() == "c"
    assert channel.empty()
    assert not channel.full()


@pytest.mark.parametrize("taker", [1, 2], ids=["same node", "another node"])
def test_arrays_of_all_sizes_arrive_as_they_were(channel, talkers, taker):
    arrays = [np.arange(9.0).reshape(3, 3)[:, ::2], np.zeros((0, 4)), np.float32(3), np.ones(3 << 20, np.uint8)]
    talkers[0].put(channel, *arrays).wait()
    ((*found,),) = talkers[taker].get(channel, len(arrays)).wait()
    for sent, got in zip(arrays, found, strict=True):
        assert (sent.dtype, sent.shape) == (got.dtype, got.shape)
        assert (sent == got).all()


def test_each_key_is_a_queue_and_batches_keep_the_order(channel, talkers):
    talkers[0].do(channel, "put_many", list(range(5000)), key="shard 3").wait()
    channel.put("other", key=7)
    assert channel.qsize("shard 3") == 5000
    assert channel.get_many(10, "shard 3") == list(range(10))
    ((*rest,),) = talkers[1].do(channel, "get_many", 10**5, "shard 3", wait=1).wait()
    assert rest == list(range(10, 5000))
    assert channel.get(7) == "other"


def test_arrays_in_batches_arrive_as_they_were(channel, talkers):
    items = [np.full(40_000, number % 250, np.uint8) for number in range(40)]
    talkers[0].do(channel, "put_many", items).wait()
    for number, got in enumerate(channel.get_many(40)):
        assert (got == number).all()


def test_it_can_be_found_by_name(channel, talkers):
    assert talkers[2].connected(channel.name).wait() == [repr(channel)]
    with pytest.raises(ClusterError, match=r"the job has no channel 'nowhere' after 0.1 s"):
        Channel.connect("nowhere", timeout=0.1)
    with pytest.raises(NameTaken, match="'talkers' is a group of workers, not a channel"):
        Channel.connect("talkers")


def test_a_worker_creates_a_channel_under_exactly_that_name(talkers):
    name = next(_names)
    (made,) = talkers[1].create(name, maxsize=2).wait()
    made.put(1)
    assert Channel.connect(name).get() == 1
    assert Channel.create(name, maxsize=2).maxsize == 2


def test_a_name_that_is_taken_with_other_arguments_says_which(channel):
    assert repr(Channel.create(channel.name)) == repr(channel)
    with pytest.raises(
        NameTaken, match=r"exists with other arguments: maxsize is 0, not 3; nodes is \(0,\), not \(1,\)"
    ):
        Channel.create(channel.name, maxsize=3, node_rank=1)


def test_calls_that_do_not_wait_raise_what_asyncio_raises(small):
    with pytest.raises(asyncio.QueueEmpty):
        small.get_nowait()
    small.put_nowait(1)
    with pytest.raises(asyncio.QueueFull):
        small.put_nowait(2)
    assert small.full()
    assert small.get_nowait() == 1


def test_timeouts_say_what_is_missing_and_leave_nothing_behind(small):
    with pytest.raises(CallTimedOut, match=r"has no item after 0.05 s"):
        small.get(timeout=0.05)
    with pytest.raises(CallTimedOut, match=r"has no batch of weight 3 after 0.05 s"):
        small.get_batch(3, timeout=0.05)
    small.put(1)
    with pytest.raises(CallTimedOut, match=r"was full for 0.05 s; nothing was put"):
        small.put(2, timeout=0.05)
    with pytest.raises(CallTimedOut, match=r"was full for 0.05 s; nothing was put"):
        small.put_many([2, 3], timeout=0.05)
    assert line(small)["putters"] == line(small)["getters"] == {}
    assert small.get() == 1
    assert small.empty()


def test_weights_that_do_not_fit_end_that_batch_alone(channel, talkers):
    batch = talkers[0].do(channel, "get_batch", 5)
    wait_for_getter(channel, "talkers:0")
    single = talkers[1].get(channel)
    wait_for_getter(channel, "talkers:1")
    channel.put("heavy", weight=9)
    with pytest.raises(ConfigError, match="has weight 9, more than the target 5"):
        batch.wait()
    assert single.wait() == [["heavy"]]


def test_two_batches_at_once_both_end(channel, talkers):
    batches = [talkers[rank].do(channel, "get_batch", 4) for rank in (0, 1)]
    for rank in (0, 1):
        wait_for_getter(channel, f"talkers:{rank}")
    for number in range(8):
        channel.put(number, weight=1)
    assert sorted(batch.wait()[0] for batch in batches) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_handle_that_is_dropped_takes_nothing_along(channel):
    handle = channel.get(async_op=True)
    wait_until(lambda: line(channel)["getters"], "it waits")
    del handle
    wait_until(lambda: not line(channel)["getters"], "it is withdrawn")
    unread = channel.get(async_op=True)
    channel.put("kept")
    wait_until(unread.done, "it arrived")
    del unread
    assert channel.get(timeout=60) == "kept"


def test_a_loop_that_is_left_returns_what_it_had_ahead(channel, talkers):
    channel.put_many(range(100))
    assert talkers[0].consume(channel, 3).wait() == [[0, 1, 2]]
    assert channel.get_many(97) == list(range(3, 100))


def test_iterations_share_the_items_and_end_when_it_is_closed(channel, talkers):
    loops = [talkers[rank].consume(channel) for rank in range(3)]
    channel.put_many(range(500))
    for number in range(500, 600):
        channel.put(number)
    channel.close()
    found = [result.wait()[0] for result in loops]
    assert sorted(itertools.chain(*found)) == list(range(600))
    with pytest.raises(ChannelClosed):
        channel.get()
    with pytest.raises(ChannelClosed):
        channel.put(1)


def test_what_one_has_ahead_goes_to_another_that_waits(channel):
    channel.put_many([1, 2, 3])
    ahead = iter(channel)
    assert next(ahead) == 1
    assert channel.get(timeout=60) == 2
    assert next(ahead) == 3


def test_async_iteration_and_leases(channel):
    async def use():
        async with channel.lease() as item:
            assert item == 1
        return [item async for item in channel]

    channel.put_many([1, 2, 3])
    channel.close()
    assert asyncio.run(use()) == [2, 3]


def test_a_lease_whose_block_raises_goes_back(channel):
    channel.put_many([1, 2])
    with pytest.raises(ZeroDivisionError), channel.lease() as item:
        item / 0
    with channel.lease() as item:
        assert item == 1
    assert channel.get() == 2


def test_ctrl_c_in_a_wait_loses_nothing(small):
    for wait in (small.get, lambda: small.get_batch(3), lambda: next(iter(small))):
        waits = threading.Thread(target=lambda: (wait_until(lambda: line(small)["getters"], "waits"), press_ctrl_c()))
        waits.start()
        with pytest.raises(KeyboardInterrupt):
            wait()
        waits.join()
        wait_until(lambda: not line(small)["getters"], "it is withdrawn")
    small.put("first")
    waits = threading.Thread(target=lambda: (wait_until(lambda: line(small)["putters"], "waits"), press_ctrl_c()))
    waits.start()
    with pytest.raises(KeyboardInterrupt):
        small.put("second")
    waits.join()
    assert small.get() == "first"
    wait_until(lambda: not line(small)["putters"], "it is withdrawn")
    assert small.empty()


def test_two_threads_and_two_loops_use_one_worker(channel, talkers):
    (found,) = talkers[0].from_threads_and_loops(channel, 50).wait()
    assert found == [(number, place) for number in range(4) for place in range(50)]


def test_a_producer_that_is_killed_leaves_what_it_put_and_nothing_else(small, talkers):
    end = kill(talkers, 0)
    talkers[0].put_ones(small, 3 << 20).wait()
    waits = talkers[0].put_ones(small, 3 << 20)
    wait_for_putter(small, "talkers:0")
    other = talkers[1].put(small, "next")
    wait_for_putter(small, "talkers:1")
    end()
    with pytest.raises(WorkerDied):
        waits.wait()
    wait_until(lambda: "talkers:0" not in line(small)["putters"], "the dead producer's put is gone")
    assert (small.get() == np.ones(3 << 20, np.uint8)).all()
    assert small.get(timeout=60) == "next"
    other.wait()
    assert small.empty()
    # A new process of that name talks again.
    talkers.restart(0)
    talkers[0].put(small, "again").wait()
    assert small.get() == "again"


def test_a_consumer_that_is_killed_while_it_waits_takes_nothing_along(channel, talkers):
    end = kill(talkers, 0)
    waits = talkers[0].get(channel)
    wait_for_getter(channel, "talkers:0")
    end()
    with pytest.raises(WorkerDied):
        waits.wait()
    wait_until(lambda: not line(channel)["getters"], "its death is noticed")
    channel.put("kept")
    assert talkers[1].get(channel).wait() == [["kept"]]


def test_what_a_killed_process_had_leased_goes_back_to_the_front(channel, talkers):
    with Channel.create(next(_names)) as seen:
        end = kill(talkers, 0)
        channel.put_many(["leased", "next"])
        stays = talkers[0].lease_and_stay(channel, seen)
        assert seen.get() == "leased"
        assert line(channel)["leased"] == 1
        assert channel.qsize() == 1
        waits = talkers[1].get(channel, 2)
        end()
        with pytest.raises(WorkerDied):
            stays.wait()
        ((*found,),) = waits.wait()
        # The other process may have been quicker than the news of the death.
        assert sorted(found) == ["leased", "next"]


def test_what_a_killed_process_had_ahead_goes_to_another(channel, talkers):
    with Channel.create(next(_names)) as seen:
        end = kill(talkers, 0)
        channel.put_many(range(50))
        loop = talkers[0].consume_one_and_stay(channel, seen)
        assert seen.get() == 0
        end()
        with pytest.raises(WorkerDied):
            loop.wait()
        assert channel.get_many(49, timeout=60) == list(range(1, 50))


def test_the_death_of_a_home_names_it_and_harms_no_other_channel(shared_cluster, channel, talkers):
    doomed = Channel.create(next(_names))
    other = talkers[1].get(channel)
    waits = [talkers[0].get(doomed), talkers[2].do(doomed, "get_batch", 5)]
    for who in ("talkers:0", "talkers:2"):
        wait_until(lambda who=who: who in line(doomed)["getters"], f"{who} waits")
    mine = doomed.get(async_op=True)
    record = shared_cluster.worker_manager.get_workers([f"{doomed.name}:0"])[0]
    os.kill(record.pid, signal.SIGKILL)
    for result in (*waits, mine):
        with pytest.raises(WorkerDied, match=f"{doomed.name}:0 on node 0 .* is gone"):
            result.wait()
    with pytest.raises(WorkerDied, match=f"{doomed.name}:0"):
        doomed.put(1)
    channel.put("unharmed")
    assert other.wait() == [["unharmed"]]


def test_a_node_that_is_killed_under_a_channel_is_named_and_other_channels_go_on():
    with local_cluster("1x1,1x0") as local, Cluster(num_nodes=2, quiet=True) as cluster:
        taker = Talker.create_group().launch(cluster, NodePlacementStrategy([0]), name="taker", max_concurrency=2)
        with Channel.create("here") as here:
            there = Channel.create("there", node_rank=1)
            there.put("lost with its node")
            waits, other = taker.get(there, key="empty"), taker.get(here)
            wait_until(lambda: "taker:0" in line(there, "empty")["getters"], "it waits at the node")
            local.kill_node(1)
            with pytest.raises(WorkerDied, match="there:0 on node 1"):
                waits.wait(60)
            with pytest.raises(WorkerDied, match="there:0"):
                there.get(timeout=60)
            here.put("unharmed")
            assert other.wait(60) == [["unharmed"]]


FLOODING = """
import time
import numpy as np
from channel_workers import Stage, Talker
from roost import Channel, Cluster, NodePlacementStrategy
with Cluster(num_nodes=1, quiet=True) as cluster:
    group = Talker.create_group().launch(cluster, NodePlacementStrategy([0, 0]), name="flood")
    channel = Channel.create("samples", max_bytes=1 << 20)
    group[0].put_async(channel, 1 << 20, 20).wait()
    group[1].send_array("flood", 0)
    (home,) = [one.pid for one in cluster.worker_manager.get_workers() if one.address == "samples:0"]
    print(*group.pid().wait(), home, flush=True)
    time.sleep(600)
"""


def listening() -> set[int]:
    return {one.laddr.port for one in psutil.net_connections() if one.status == "LISTEN"}


def test_a_driver_that_is_killed_with_messages_in_flight_leaves_nothing(driver, small_local_cluster):
    mine = driver(FLOODING, small_local_cluster)
    pids = [int(word) for word in mine.line().split()]
    ports = [one.laddr.port for pid in pids for one in psutil.Process(pid).net_connections() if one.status == "LISTEN"]
    mine.end(signal.SIGKILL)
    for pid in pids:
        wait_until(lambda pid=pid: is_gone(pid), "its process has ended")
    assert ports
    # A process shows as ended before the last of its threads has let go of its sockets.
    wait_until(lambda: not set(ports) & listening(), "its ports are free")
    assert not [path for path in shared_memory() if "roost" in path.name]


def test_a_home_that_is_stopped_lets_deadlines_hold(shared_cluster, small, monkeypatch):
    small.put(1)
    (record,) = shared_cluster.worker_manager.get_workers([f"{small.name}:0"])
    stop(record.pid)
    try:
        with pytest.raises(CallTimedOut, match=f"{small.name}:0 does not answer after 0.1 s: channel .* has no item"):
            small.get("other", timeout=0.1)
        with pytest.raises(CallTimedOut, match=r"whether the item is in channel .* is not known"):
            small.put(2, timeout=0.1)
        # What is answered at once has a deadline that nobody needs to give.
        monkeypatch.setattr("roost.comm.channels.channel.ASK_SECONDS", 0.2)
        for call in (small.qsize, small.empty, small.full, small.stats, small.get_nowait, lambda: small.put_nowait(3)):
            with pytest.raises(CallTimedOut, match=f"{small.name}:0 (has not answered|does not answer) after 0.[12]"):
                call()
    finally:
        os.kill(record.pid, signal.SIGCONT)
    assert small.get(timeout=60) == 1
    assert small.get_many(3, wait=0) == [], "what was asked in vain was withdrawn"


def test_a_producer_that_is_too_fast_waits_and_memory_is_bounded(talkers):
    with Channel.create(next(_names), max_bytes=4 << 20) as channel:
        assert talkers[0].put_async(channel, 1 << 18, 400).wait()[0] < 100
        talkers[2].put_async(channel, 1 << 18, 100).wait()
        for _ in range(500):
            assert channel.stats()["bytes"] <= 4 << 20
            # At most a window of each producer waits in the home besides.
            assert sum(line(channel)["putters"].values()) <= 2 * 32
            channel.get()
        assert [talkers[rank].wait_for_kept().wait() for rank in (0, 2)] == [[400], [100]]
        assert channel.empty()


@pytest.mark.soak
def test_a_producer_that_is_too_fast_for_minutes_does_not_grow_memory(talkers, rounds):
    with Channel.create(next(_names), max_bytes=4 << 20) as channel:
        (home,) = [one.pid for one in Cluster().worker_manager.get_workers() if one.address == f"{channel.name}:0"]
        used = []
        for _ in rounds():
            talkers[0].put_async(channel, 1 << 18, 400).wait()
            for _ in range(400):
                channel.get(timeout=60)
                time.sleep(0.002)
            talkers[0].wait_for_kept().wait(60)
            used.append(sum(psutil.Process(pid).memory_info().rss for pid in (home, *talkers[0].pid().wait())))
        # The first rounds fill what processes keep.
        assert max(used) <= max(used[:3]) + (64 << 20)


def test_an_item_that_cannot_be_unpickled_is_named_and_is_not_in_the_way(channel, talkers):
    talkers[0].put_odd(channel).wait()
    with pytest.raises(ClusterError, match=f"an item of channel '{channel.name}' cannot be unpickled"):
        channel.get()
    with pytest.raises(ConfigError, match="cannot be sent"):
        channel.put(threading.Lock())
    channel.put("next")
    assert channel.get() == "next"


def test_a_distributed_channel_has_a_home_on_each_node_and_each_key_has_one_of_them(talkers):
    with Channel.create(next(_names), distributed=True) as channel:
        homes = channel.stats()["homes"]
        assert [home["address"] for home in homes] == [f"{channel.name}:{rank}" for rank in range(4)]
        for number in range(40):
            talkers[number % 3].put(channel, number, key=number).wait()
        stats = [WorkerGroup.attach(channel.name)[rank].channel_stats().wait()[0]["keys"] for rank in range(4)]
        assert all(stats)
        assert sorted(int(key) for keys in stats for key in keys) == list(range(40))
        for number in range(40):
            assert talkers[(number + 1) % 3].get(channel, key=number).wait() == [[number]]
        assert channel.qsize("never used") == 0


@pytest.mark.parametrize("taker", [1, 2], ids=["same node", "another node"])
def test_plain_values_of_every_kind_arrive_as_they_were(channel, talkers, taker):
    talkers[0].put_plain(channel).wait()
    assert talkers[taker].take_plain(channel).wait() == [True]


def test_an_item_whose_unpickling_ends_the_process_ends_three_and_no_more(channel, talkers):
    talkers[0].put_deadly(channel).wait()
    channel.put("next")
    for _ in range(3):
        with pytest.raises(WorkerDied):
            talkers[0].get(channel).wait()
        talkers.restart(0)
    assert talkers[0].get(channel).wait() == [["next"]]
    assert line(channel)["set_aside"] == 1


def test_a_million_nones_take_no_more_memory_than_the_channel_may_have(talkers):
    limit = 4 << 20
    with Channel.create(next(_names), max_bytes=limit) as channel:
        (home,) = [one.pid for one in Cluster().worker_manager.get_workers() if one.address == f"{channel.name}:0"]
        channel.put(None)
        assert channel.get() is None
        before = psutil.Process(home).memory_info().rss
        putting = talkers[0].do(channel, "put_many", [None] * 1_000_000)
        wait_until(lambda: line(channel)["putters"], "it waits for room")
        assert channel.stats()["bytes"] <= limit
        assert psutil.Process(home).memory_info().rss - before < 5 * limit
        taken = 0
        while taken < 1_000_000:
            taken += len(channel.get_many(4096, wait=1))
        assert psutil.Process(home).memory_info().rss - before < 5 * limit
        putting.wait()


def pipeline(cluster, folder, kills, choose):
    """Let numbers go through three stages of two workers each, of which some are killed, and restarted in place."""
    count = 100 * (kills + 1)
    folder.mkdir()
    stages = [
        Stage.create_group().launch(cluster, NodePlacementStrategy([0, 1]), name=next(_names), restarts=kills)
        for _ in range(3)
    ]
    with contextlib.ExitStack() as stack:
        for group in stages:
            stack.enter_context(group)
        first, second = (stack.enter_context(Channel.create(next(_names), maxsize=32)) for _ in range(2))
        producers, relays, consumers = stages

        def got():
            noted = "".join(path.read_text() for path in folder.glob("got*"))
            return [tuple(map(int, one.split())) for one in noted.splitlines()]

        running = [
            producers.keep_calling("produce", first, folder, count),
            relays.keep_calling("relay", first, second),
            consumers.keep_calling("consume", second, folder),
        ]
        for number in range(kills):
            wait_until(lambda number=number: len(got()) >= (2 * count * number) // kills, "some have come")
            address = f"{choose.choice(stages).name}:{choose.randrange(2)}"
            (pid,) = [one.pid for one in cluster.worker_manager.get_workers() if one.address == address]
            # It may be on its way up again: without a pid yet, or still with that of the one that died.
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for kept, channel in zip(running, (first, second, None), strict=True):
            assert kept.result(240) == [None, None]
            if channel is not None:
                channel.close()
        came = Counter(got())
        set_aside = sum(line(channel)["set_aside"] for channel in (first, second))
    sent = {(rank, number) for rank in range(2) for number in range(count)}
    assert came.keys() <= sent
    # Nothing that a put acknowledged is lost, but what three processes died with; and a process that is killed after it
    # has passed an item on, and before it has said so, leaves that one item to be passed on again.
    assert len(sent - came.keys()) <= set_aside
    assert sum(came.values()) - len(came) <= kills


def test_a_pipeline_whose_workers_are_killed_loses_nothing_that_was_acknowledged(shared_cluster, tmp_path):
    pipeline(shared_cluster, tmp_path / "once", 6, random.Random(6))  # noqa: S311 - to be repeated


@pytest.mark.soak
def test_pipelines_whose_workers_are_killed_for_minutes_lose_nothing(shared_cluster, tmp_path, rounds):
    seed = int(os.environ.get("SOAK_SEED") or time.time())
    print(f"SOAK_SEED={seed}")
    choose = random.Random(seed)  # noqa: S311 - likewise
    for number in rounds():
        pipeline(shared_cluster, tmp_path / str(number), 20, choose)


def test_it_can_be_launched_as_a_group(shared_cluster):
    group = ChannelWorker.create_group(maxsize=2).launch(
        shared_cluster, NodePlacementStrategy([1]), name=next(_names), reserve=False
    )
    with group:
        channel = Channel.connect(group.name)
        assert (channel.maxsize, repr(channel)) == (2, f"<Channel {group.name!r} on node 1, maxsize 2>")
        channel.put(1)
        assert channel.get() == 1


def test_the_command_shows_depth_bytes_and_who_waits(small, talkers):
    small.put("x" * 3000)
    talkers[0].put(small, "more")
    wait_for_putter(small, "talkers:0")
    get = talkers[2].get(small, key="wanted")
    wait_until(lambda: line(small, "wanted")["getters"], "it waits")
    shown = roost("status", "--channels", "--verbose").stdout
    # The counts of other channels that are empty are shown too.
    (row,) = [text.split() for text in shown.splitlines() if "default_queue" in text and "talkers:0" in text]
    assert row == ["default_queue", "1", "0", "3", "KiB", "1", "0", "-", "talkers:0"]
    assert f"talkers:2 to {small.name}:0: network" in shown
    assert f"talkers:0 to {small.name}:0: shared memory" in shown
    found = {
        item["name"]: item["homes"] for item in json.loads(roost("status", "--channels", "--format", "json").stdout)
    }
    assert found[small.name][0]["stats"]["keys"]["wanted"]["getters"] == {"talkers:2": 1}
    small.put("done", key="wanted")
    get.wait()


def test_closing_with_items_in_flight_leaves_nothing(shared_cluster, talkers):
    name = next(_names)
    files = talkers[1].shared_files().wait()
    with Channel.create(name, max_bytes=1 << 20) as channel:
        talkers[1].put_async(channel, 1 << 20, 20).wait()
        (record,) = shared_cluster.worker_manager.get_workers([f"{name}:0"])
        waiting = channel.get("other", async_op=True)
    with pytest.raises(WorkerDied, match=f"{name}:0"):
        waiting.wait()
    wait_until(lambda: is_gone(record.pid), "the process of its home has ended")
    with pytest.raises(WorkerDied):
        talkers[1].wait_for_kept().wait()
    talkers[1].drop_kept().wait()
    wait_until(lambda: talkers[1].shared_files().wait()[0] <= files[0] + 1, "its shared memory is given back")


@pytest.mark.wants("torch")
@pytest.mark.parametrize("taker", [1, 2], ids=["same node", "another node"])
def test_tensors_of_every_kind_go_there_and_back_as_they_were(channel, talkers, taker):
    pytest.importorskip("torch")
    from tensors import are_equal, of_every_kind

    things = of_every_kind()
    channel.put_many(things)
    talkers[taker].pass_on(channel, len(things)).wait()
    assert all(map(are_equal, channel.get_many(len(things), "back"), things))


SCRIPT = """
import enum
import numpy as np
from roost import Channel, Cluster, NodePlacementStrategy, Worker

class Own:
    def __init__(self, value):
        self.value = value
    def __eq__(self, other):
        return type(other) is type(self) and repr(other.value) == repr(self.value)

class Part(Own):
    __slots__ = ("rest",)

class Colour(enum.Enum):
    RED = 1

def double(number):
    return 2 * number

class Passer(Worker):
    def pass_on(self, channel, count):
        for _ in range(count):
            channel.put(channel.get(), key="back")
        channel.put_many(channel.get_many(count), key="back")

THINGS = [Own(1), Own(b"x" * 10_000), Part(None), [Own(np.arange(20_000))], {"a": (Colour.RED, Own)}, Colour.RED, Own]

if __name__ == "__main__":
    with Cluster(num_nodes=1, quiet=True) as cluster, Channel.create("things") as channel:
        passer = Passer.create_group().launch(cluster, NodePlacementStrategy([0]), name="passer")
        for call in (lambda: [channel.put(one) for one in THINGS], lambda: channel.put_many(THINGS)):
            call()
            assert channel.get_many(len(THINGS)) == THINGS, "from the script to itself"
        [channel.put(one) for one in THINGS]
        channel.put_many(THINGS)
        passed = passer.pass_on(channel, len(THINGS))
        assert [channel.get("back") for _ in range(2 * len(THINGS))] == THINGS * 2, "there and back"
        passed.wait()
        channel.put(double)
        assert channel.get()(4) == 8
        print("all the same", flush=True)
"""


def test_classes_of_a_script_go_through_channels(small_local_cluster, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT, encoding="utf-8")
    env = {**os.environ, **small_local_cluster.environment}
    ended = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=180, env=env)
    assert (ended.returncode, ended.stdout.strip()) == (0, "all the same"), ended.stderr
