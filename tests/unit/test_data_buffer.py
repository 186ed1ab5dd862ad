"""The buffer between rollout and training: in order, bounded, and fair to those that wait."""

from __future__ import annotations

import asyncio
import functools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roost.errors import CallTimedOut, ConfigError
from roost.rl.data_buffer import BufferStats, DataBuffer
from roost.rl.manager import ManagerWorker

LONG = 60.0


def on_a_loop(test):
    """Run a test that is a coroutine function."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))

    return run


async def start(coroutine):
    """Start a task and let it run until it waits."""
    task = asyncio.create_task(coroutine)
    for _ in range(5):
        await asyncio.sleep(0)
    return task


@on_a_loop
async def test_samples_come_out_in_the_order_in_which_they_went_in():
    buffer = DataBuffer(5)
    await buffer.put(["a", "b"], version=1)
    await buffer.put(["c"], version=2)
    assert await buffer.get(2) == ["a", "b"]
    await buffer.put(["d"], version=2)
    assert await buffer.get(2) == ["c", "d"]
    assert buffer.stats().size == 0


@on_a_loop
async def test_the_stats_count_what_went_through():
    buffer = DataBuffer(5)
    empty = BufferStats(size=0, capacity=5, put=0, taken=0, dropped=0, oldest_version=None, newest_version=None)
    assert buffer.stats() == empty
    await buffer.put([1, 2], version=7)
    await buffer.put([3, 4], version=6)
    await buffer.get(1)
    now = BufferStats(size=3, capacity=5, put=4, taken=1, dropped=0, oldest_version=6, newest_version=7)
    assert buffer.stats() == now


@on_a_loop
async def test_a_put_that_finds_no_room_says_how_full_the_buffer_is_and_leaves_nothing_behind():
    buffer = DataBuffer(3)
    await buffer.put([1, 2], version=0)
    with pytest.raises(CallTimedOut, match=r"no room for 2 samples within 0 s: 2 of 3 places are taken"):
        await buffer.put([3, 4], version=0, timeout=0)
    assert buffer.stats().put == buffer.stats().size == 2
    await buffer.put([3], version=0, timeout=0)
    assert await buffer.get(3) == [1, 2, 3]


@on_a_loop
async def test_a_get_that_finds_too_few_says_so_and_takes_none():
    buffer = DataBuffer(3)
    await buffer.put([1, 2], version=0)
    with pytest.raises(CallTimedOut, match=r"not 3 samples within 0\.01 s: 2 of 3 places are taken"):
        await buffer.get(3, timeout=0.01)
    assert await buffer.get(2) == [1, 2]


@on_a_loop
async def test_a_put_waits_for_room_and_a_get_for_samples():
    buffer = DataBuffer(2)
    await buffer.put([1, 2], version=0)
    put = await start(buffer.put([3, 4], 0, LONG))
    assert not put.done()
    assert await buffer.get(2) == [1, 2]
    await put
    assert await buffer.get(2) == [3, 4]

    got = await start(buffer.get(2, LONG))
    await buffer.put([5], version=0)
    assert not got.done()
    await buffer.put([6], version=0)
    assert await got == [5, 6]


@on_a_loop
async def test_samples_that_are_too_old_are_dropped_wherever_they_are():
    buffer = DataBuffer(6)
    await buffer.put(["new"], version=3)
    await buffer.put(["old", "older"], version=1)
    await buffer.put(["newest"], version=4)
    assert await buffer.get(2, min_version=3) == ["new", "newest"]
    stats = buffer.stats()
    assert (stats.size, stats.put, stats.taken, stats.dropped) == (0, 4, 2, 2)


@on_a_loop
async def test_a_get_that_drops_old_samples_makes_room_for_a_put_that_waits_with_new_ones():
    buffer = DataBuffer(2)
    await buffer.put(["old", "old"], version=1)
    put = await start(buffer.put(["new", "new too"], 2, LONG))
    assert await buffer.get(2, timeout=LONG, min_version=2) == ["new", "new too"]
    await put
    assert buffer.stats().dropped == 2


@on_a_loop
async def test_old_samples_that_come_while_a_get_waits_are_dropped_too():
    buffer = DataBuffer(2)
    got = await start(buffer.get(1, LONG, 5))
    await buffer.put(["old"], version=4)
    await buffer.put(["new"], version=5)
    assert await got == ["new"]
    assert buffer.stats().dropped == 1


@on_a_loop
async def test_a_large_get_is_not_overtaken_by_a_stream_of_small_ones():
    buffer = DataBuffer(4)
    large = await start(buffer.get(4, LONG))
    small = [await start(buffer.get(1, LONG)) for _ in range(3)]
    await buffer.put([0], version=0)
    with pytest.raises(CallTimedOut, match="1 of 4 places are taken"):
        await buffer.get(1, timeout=0)
    for number in range(1, 7):
        await buffer.put([number], 0, LONG)
    assert await large == [0, 1, 2, 3]
    assert [await one for one in small] == [[4], [5], [6]]


@on_a_loop
async def test_a_large_get_from_the_manager_does_not_starve_behind_small_ones_that_take_each_sample():
    manager = object.__new__(ManagerWorker)  # without Ray: only its buffer matters here
    manager._buffer = DataBuffer(8)

    async def take_one_by_one():
        return [await manager.get(1, LONG, None) for _ in range(8)]

    large = await start(manager.get(4, LONG, None))
    small = await start(take_one_by_one())
    for number in range(12):
        await manager.put([number], 1, LONG)
        deadline = time.monotonic() + 0.05
        while manager._buffer.stats().size and time.monotonic() < deadline:
            await asyncio.sleep(0.001)
    assert await large == [0, 1, 2, 3]
    assert await small == [[number] for number in range(4, 12)]


@on_a_loop
async def test_a_large_put_is_not_overtaken_by_a_stream_of_small_ones():
    buffer = DataBuffer(3)
    await buffer.put([0, 1], version=0)
    large = await start(buffer.put(["a", "b", "c"], 0, LONG))
    small = await start(buffer.put(["d"], 0, LONG))
    assert await buffer.get(2) == [0, 1]
    assert await buffer.get(3, LONG) == ["a", "b", "c"]
    await large
    await small
    assert await buffer.get(1) == ["d"]


@on_a_loop
@pytest.mark.parametrize("how", ["it times out", "it is cancelled"])
async def test_a_get_that_stops_waiting_lets_the_next_in_line_go_on(how):
    buffer = DataBuffer(4)
    await buffer.put([1], version=0)
    large = await start(buffer.get(4, 0.05 if how == "it times out" else LONG))
    small = await start(buffer.get(1, LONG))
    if how == "it is cancelled":
        large.cancel()
    with pytest.raises((CallTimedOut, asyncio.CancelledError)):
        await large
    assert await small == [1]


@on_a_loop
async def test_what_can_never_fit_is_refused_immediately():
    with pytest.raises(ConfigError, match="3 samples can never fit in a buffer for 2"):
        await DataBuffer(2).put([1, 2, 3], version=0)
    for count in (0, 3, -1, 1.0):
        with pytest.raises(ConfigError, match="a get can never take"):
            await DataBuffer(2).get(count)
    for capacity in (0, -1, 2.5, True):
        with pytest.raises(ConfigError, match="capacity of a buffer"):
            DataBuffer(capacity)


@on_a_loop
async def test_a_put_of_nothing_changes_nothing():
    buffer = DataBuffer(1)
    await buffer.put([], version=3, timeout=0)
    assert buffer.stats().put == 0
    assert buffer.stats().newest_version is None


@on_a_loop
async def test_with_many_tasks_every_sample_comes_out_once_and_the_bound_holds():
    buffer, sizes = DataBuffer(7), []

    async def produce(name):
        for first in range(0, 60, 3):
            await buffer.put([(name, first + one) for one in range(3)], 0, LONG)
            sizes.append(buffer.stats().size)

    async def consume():
        return [sample for _ in range(30) for sample in await buffer.get(2, LONG)]

    *taken, _ = await asyncio.gather(*(consume() for _ in range(4)), asyncio.gather(*map(produce, "abcd")))
    assert sorted(sample for samples in taken for sample in samples) == [
        (name, number) for name in "abcd" for number in range(60)
    ]
    for samples in taken:
        for name in "abcd":
            numbers = [number for one, number in samples if one == name]
            assert numbers == sorted(numbers)
    assert max(sizes) <= 7
    assert buffer.stats().taken == buffer.stats().put == 240


@given(st.lists(st.one_of(st.lists(st.integers(), max_size=4), st.integers(1, 4)), max_size=30), st.integers(1, 6))
@on_a_loop
async def test_it_is_a_plain_queue_whatever_is_put_and_taken(todo, capacity):
    buffer, expected = DataBuffer(capacity), []
    for one in todo:
        if isinstance(one, list):
            if len(one) > capacity:
                continue
            if len(expected) + len(one) > capacity:
                with pytest.raises(CallTimedOut):
                    await buffer.put(one, version=0, timeout=0)
            else:
                await buffer.put(one, version=0, timeout=0)
                expected += one
        elif one <= len(expected):
            assert await buffer.get(one, timeout=0) == expected[:one]
            del expected[:one]
        elif one <= capacity:
            with pytest.raises(CallTimedOut):
                await buffer.get(one, timeout=0)
        assert buffer.stats().size == len(expected)
