"""The buffer between rollout and training: in order, bounded, fair to those that wait, and nothing in it is lost."""

from __future__ import annotations

import asyncio
import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roost.errors import CallTimedOut, ConfigError
from roost.rl.data_buffer import BufferStats, DataBuffer

LONG = 60.0


def on_a_loop(test):
    """Run a test that is a coroutine function."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))

    return run


async def add(buffer, *args, **kwargs):
    """Put samples in and confirm it, as a caller does."""
    ticket = object()
    await buffer.draft(ticket, *args, **kwargs)
    await buffer.confirm(ticket)


async def take(buffer, *args, **kwargs):
    """Lease samples and confirm them, as a caller does."""
    ticket = object()
    samples = await buffer.lease(ticket, *args, **kwargs)
    await buffer.confirm(ticket)
    return samples


async def start(coroutine):
    """Start a task and let it run until it waits."""
    task = asyncio.create_task(coroutine)
    for _ in range(5):
        await asyncio.sleep(0)
    return task


@on_a_loop
async def test_samples_come_out_in_the_order_in_which_they_went_in():
    buffer = DataBuffer(5)
    await add(buffer, ["a", "b"], version=1)
    await add(buffer, ["c"], version=2)
    assert await take(buffer, 2) == ["a", "b"]
    await add(buffer, ["d"], version=2)
    assert await take(buffer, 2) == ["c", "d"]
    assert buffer.stats().size == 0


@on_a_loop
async def test_the_stats_count_what_went_through():
    buffer = DataBuffer(5)
    empty = BufferStats(
        size=0, capacity=5, put=0, taken=0, leased=0, dropped=0, oldest_version=None, newest_version=None
    )
    assert buffer.stats() == empty
    await add(buffer, [1, 2], version=7)
    await add(buffer, [3, 4], version=6)
    await take(buffer, 1)
    await buffer.lease("mine", 1)
    now = BufferStats(size=2, capacity=5, put=4, taken=1, leased=1, dropped=0, oldest_version=6, newest_version=6)
    assert buffer.stats() == now


@on_a_loop
async def test_a_put_that_finds_no_room_says_how_full_the_buffer_is_and_leaves_nothing_behind():
    buffer = DataBuffer(3)
    await add(buffer, [1, 2], version=0)
    with pytest.raises(CallTimedOut, match=r"no room for 2 samples within 0 s: 2 of 3 places are taken"):
        await add(buffer, [3, 4], version=0, timeout=0)
    assert buffer.stats().put == buffer.stats().size == 2
    await add(buffer, [3], version=0, timeout=0)
    assert await take(buffer, 3) == [1, 2, 3]


@on_a_loop
async def test_a_get_that_finds_too_few_says_so_and_takes_none():
    buffer = DataBuffer(3)
    await add(buffer, [1, 2], version=0)
    with pytest.raises(CallTimedOut, match=r"not 3 samples within 0\.01 s: 2 of 3 places are taken"):
        await take(buffer, 3, timeout=0.01)
    assert await take(buffer, 2) == [1, 2]


@on_a_loop
async def test_a_put_waits_for_room_and_a_get_for_samples():
    buffer = DataBuffer(2)
    await add(buffer, [1, 2], version=0)
    put = await start(add(buffer, [3, 4], 0, LONG))
    assert not put.done()
    assert await take(buffer, 2) == [1, 2]
    await put
    assert await take(buffer, 2) == [3, 4]

    got = await start(take(buffer, 2, LONG))
    await add(buffer, [5], version=0)
    assert not got.done()
    await add(buffer, [6], version=0)
    assert await got == [5, 6]


@on_a_loop
async def test_samples_that_are_too_old_are_dropped_wherever_they_are():
    buffer = DataBuffer(6)
    await add(buffer, ["new"], version=3)
    await add(buffer, ["old", "older"], version=1)
    await add(buffer, ["newest"], version=4)
    assert await take(buffer, 2, min_version=3) == ["new", "newest"]
    stats = buffer.stats()
    assert (stats.size, stats.put, stats.taken, stats.dropped) == (0, 4, 2, 2)


@on_a_loop
async def test_a_get_that_drops_old_samples_makes_room_for_a_put_that_waits_with_new_ones():
    buffer = DataBuffer(2)
    await add(buffer, ["old", "old"], version=1)
    put = await start(add(buffer, ["new", "new too"], 2, LONG))
    assert await take(buffer, 2, timeout=LONG, min_version=2) == ["new", "new too"]
    await put
    assert buffer.stats().dropped == 2


@on_a_loop
async def test_old_samples_that_come_while_a_get_waits_are_dropped_too():
    buffer = DataBuffer(2)
    got = await start(take(buffer, 1, LONG, 5))
    await add(buffer, ["old"], version=4)
    await add(buffer, ["new"], version=5)
    assert await got == ["new"]
    assert buffer.stats().dropped == 1


@on_a_loop
async def test_a_large_get_is_not_overtaken_by_a_stream_of_small_ones():
    buffer = DataBuffer(4)
    large = await start(take(buffer, 4, LONG))
    small = [await start(take(buffer, 1, LONG)) for _ in range(3)]
    await add(buffer, [0], version=0)
    with pytest.raises(CallTimedOut, match="1 of 4 places are taken"):
        await take(buffer, 1, timeout=0)
    for number in range(1, 7):
        await add(buffer, [number], 0, LONG)
    assert await large == [0, 1, 2, 3]
    assert [await one for one in small] == [[4], [5], [6]]


@on_a_loop
async def test_a_large_put_is_not_overtaken_by_a_stream_of_small_ones():
    buffer = DataBuffer(3)
    await add(buffer, [0, 1], version=0)
    large = await start(add(buffer, ["a", "b", "c"], 0, LONG))
    small = await start(add(buffer, ["d"], 0, LONG))
    assert await take(buffer, 2) == [0, 1]
    assert await take(buffer, 3, LONG) == ["a", "b", "c"]
    await large
    await small
    assert await take(buffer, 1) == ["d"]


@on_a_loop
@pytest.mark.parametrize("how", ["it times out", "it is cancelled"])
async def test_a_get_that_stops_waiting_lets_the_next_in_line_go_on(how):
    buffer = DataBuffer(4)
    await add(buffer, [1], version=0)
    large = await start(take(buffer, 4, 0.05 if how == "it times out" else LONG))
    small = await start(take(buffer, 1, LONG))
    if how == "it is cancelled":
        large.cancel()
    with pytest.raises((CallTimedOut, asyncio.CancelledError)):
        await large
    assert await small == [1]


@on_a_loop
async def test_samples_that_are_given_back_are_in_their_old_places():
    buffer = DataBuffer(6)
    await add(buffer, [1, 2, 3, 4, 5], version=0)
    assert [await buffer.lease(name, 2) for name in "ab"] == [[1, 2], [3, 4]]
    await buffer.give_back("a")
    await buffer.give_back("b")
    await buffer.give_back("never leased")
    stats = buffer.stats()
    assert (stats.size, stats.taken, stats.leased) == (5, 0, 0)
    assert await take(buffer, 5) == [1, 2, 3, 4, 5]


@on_a_loop
async def test_leased_samples_keep_their_room_until_they_are_confirmed():
    buffer = DataBuffer(2)
    await add(buffer, [1, 2], version=0)
    await buffer.lease("mine", 2)
    put = await start(add(buffer, [3], 0, LONG))
    with pytest.raises(CallTimedOut, match="no room for 1 sample within 0 s: 2 of 2 places are taken"):
        await add(buffer, [3], version=0, timeout=0)
    assert not put.done()
    await buffer.confirm("mine")
    await put
    await buffer.give_back("mine")
    assert await take(buffer, 1) == [3]


@on_a_loop
async def test_samples_go_in_when_their_sender_confirms_and_not_at_all_if_it_gives_up():
    buffer = DataBuffer(3)
    await buffer.draft("gone", [1, 2], version=0)
    await buffer.draft("mine", [3], version=0)
    with pytest.raises(CallTimedOut, match="3 of 3 places are taken"):
        await take(buffer, 1, timeout=0)
    put = await start(add(buffer, [4, 5], 0, LONG))
    await buffer.give_back("gone")
    await put
    await buffer.confirm("gone")
    await buffer.confirm("mine")
    assert await take(buffer, 3) == [4, 5, 3]
    assert buffer.stats().put == buffer.stats().taken == 3


@on_a_loop
async def test_one_can_wait_for_what_is_not_confirmed_yet():
    buffer = DataBuffer(4)
    await buffer.settle(0)
    await buffer.draft("a", [1], version=0)
    await buffer.draft("b", [2], version=0)
    settling = await start(buffer.settle(LONG))
    await buffer.confirm("a")
    await buffer.lease("later", 1)
    assert not settling.done()
    await buffer.give_back("b")
    await settling
    await buffer.settle(0.01)
    assert buffer.unconfirmed == ("later",)


@on_a_loop
async def test_samples_that_are_given_back_go_to_a_get_that_waits():
    buffer = DataBuffer(2)
    await add(buffer, [1, 2], version=0)
    await buffer.lease("dead", 2)
    got = await start(take(buffer, 2, LONG))
    await buffer.give_back("dead")
    assert await got == [1, 2]


@on_a_loop
async def test_what_can_never_fit_is_refused_immediately():
    with pytest.raises(ConfigError, match="3 samples can never fit in a buffer for 2"):
        await DataBuffer(2).draft("mine", [1, 2, 3], version=0)
    for count in (0, 3, -1, 1.0):
        with pytest.raises(ConfigError, match="a get can never take"):
            await DataBuffer(2).lease("mine", count)
    for capacity in (0, -1, 2.5, True):
        with pytest.raises(ConfigError, match="capacity of a buffer"):
            DataBuffer(capacity)


@on_a_loop
async def test_a_put_of_nothing_changes_nothing():
    buffer = DataBuffer(1)
    await add(buffer, [], version=3, timeout=0)
    assert buffer.stats().put == 0
    assert buffer.stats().newest_version is None


@on_a_loop
async def test_with_many_tasks_every_sample_comes_out_once_and_the_bound_holds():
    buffer, sizes = DataBuffer(7), []

    async def produce(name):
        for first in range(0, 60, 3):
            await add(buffer, [(name, first + one) for one in range(3)], 0, LONG)
            sizes.append(buffer.stats().size)

    async def consume():
        return [sample for _ in range(30) for sample in await take(buffer, 2, LONG)]

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


steps = st.one_of(st.lists(st.integers(), max_size=4), st.integers(-4, -1), st.integers(1, 4))


@given(st.lists(steps, max_size=30), st.integers(1, 6))
@on_a_loop
async def test_it_is_a_plain_queue_whatever_is_put_taken_and_given_back(todo, capacity):
    buffer, expected = DataBuffer(capacity), []
    for one in todo:
        if isinstance(one, list):
            if len(one) > capacity:
                continue
            if len(expected) + len(one) > capacity:
                with pytest.raises(CallTimedOut):
                    await add(buffer, one, version=0, timeout=0)
            else:
                await add(buffer, one, version=0, timeout=0)
                expected += one
        elif one < 0:
            # A get whose caller dies before it confirms.
            if -one <= len(expected):
                assert await buffer.lease("dead", -one, timeout=0) == expected[:-one]
                await buffer.give_back("dead")
        elif one <= len(expected):
            assert await take(buffer, one, timeout=0) == expected[:one]
            del expected[:one]
        elif one <= capacity:
            with pytest.raises(CallTimedOut):
                await take(buffer, one, timeout=0)
        stats = buffer.stats()
        assert stats.size == len(expected) == stats.put - stats.taken
