"""The buffer between rollout and training: in order, bounded, and nobody waits in vain."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roost.errors import CallTimedOut, ClusterError, ConfigError
from roost.rl.data_buffer import BufferStats, DataBuffer
from waiting import wait_until

LONG = 60.0


@pytest.fixture
def aside():
    """Threads that run beside the test."""
    with ThreadPoolExecutor(max_workers=16) as pool:
        yield pool


def waits_in(line, count, what):
    """Wait until so many stand in a line; nothing public says so, and a test that guesses cannot be relied on."""
    wait_until(lambda: len(line) == count, what)


def test_samples_come_out_in_the_order_in_which_they_went_in():
    buffer = DataBuffer(5)
    buffer.put(["a", "b"], version=1)
    buffer.put(["c"], version=2)
    assert buffer.get(2) == ["a", "b"]
    buffer.put(["d"], version=2)
    assert buffer.get(2) == ["c", "d"]
    assert buffer.size == 0


def test_the_stats_count_what_went_through():
    buffer = DataBuffer(5)
    empty = BufferStats(size=0, capacity=5, put=0, taken=0, dropped=0, oldest_version=None, newest_version=None)
    assert buffer.stats() == empty
    buffer.put([1, 2], version=7)
    buffer.put([3, 4], version=6)
    buffer.get(1)
    now = BufferStats(size=3, capacity=5, put=4, taken=1, dropped=0, oldest_version=6, newest_version=7)
    assert buffer.stats() == now


def test_a_put_that_finds_no_room_says_how_full_it_is_and_leaves_nothing_behind():
    buffer = DataBuffer(3)
    buffer.put([1, 2], version=0)
    with pytest.raises(CallTimedOut, match=r"no room for 2 samples within 0 s: 2 of 3 places are taken"):
        buffer.put([3, 4], version=0, timeout=0)
    assert buffer.stats().put == buffer.size == 2
    buffer.put([3], version=0, timeout=0)
    assert buffer.get(3) == [1, 2, 3]


def test_a_get_that_finds_too_few_says_so_and_takes_none():
    buffer = DataBuffer(3)
    buffer.put([1, 2], version=0)
    with pytest.raises(CallTimedOut, match=r"not 3 samples within 0\.01 s: 2 of 3 places are taken"):
        buffer.get(3, timeout=0.01)
    assert buffer.get(2) == [1, 2]


def test_a_put_waits_for_room_and_a_get_for_samples(aside):
    buffer = DataBuffer(2)
    buffer.put([1, 2], version=0)
    put = aside.submit(buffer.put, [3, 4], 0, LONG)
    waits_in(buffer._putters, 1, "the put waits")
    assert buffer.get(2) == [1, 2]
    put.result(LONG)
    assert buffer.get(2) == [3, 4]

    got = aside.submit(buffer.get, 2, LONG)
    waits_in(buffer._getters, 1, "the get waits")
    buffer.put([5], version=0)
    buffer.put([6], version=0)
    assert got.result(LONG) == [5, 6]


def test_samples_that_are_too_old_are_dropped_wherever_they_stand():
    buffer = DataBuffer(6)
    buffer.put(["new"], version=3)
    buffer.put(["old", "older"], version=1)
    buffer.put(["newest"], version=4)
    assert buffer.get(2, min_version=3) == ["new", "newest"]
    stats = buffer.stats()
    assert (stats.size, stats.put, stats.taken, stats.dropped) == (0, 4, 2, 2)


def test_a_get_that_drops_old_samples_makes_room_for_who_waits_with_new_ones(aside):
    buffer = DataBuffer(2)
    buffer.put(["old", "old"], version=1)
    put = aside.submit(buffer.put, ["new", "new too"], 2, LONG)
    waits_in(buffer._putters, 1, "the put waits")
    assert buffer.get(2, timeout=LONG, min_version=2) == ["new", "new too"]
    put.result(LONG)
    assert buffer.stats().dropped == 2


def test_old_samples_that_come_while_a_get_waits_are_dropped_too(aside):
    buffer = DataBuffer(2)
    got = aside.submit(buffer.get, 1, LONG, 5)
    waits_in(buffer._getters, 1, "the get waits")
    buffer.put(["old"], version=4)
    buffer.put(["new"], version=5)
    assert got.result(LONG) == ["new"]
    assert buffer.stats().dropped == 1


def test_a_large_get_is_not_overtaken_by_small_ones(aside):
    buffer = DataBuffer(4)
    large = aside.submit(buffer.get, 3, LONG)
    waits_in(buffer._getters, 1, "the large get waits")
    small = aside.submit(buffer.get, 1, LONG)
    waits_in(buffer._getters, 2, "the small get waits behind it")
    buffer.put([0], version=0)
    with pytest.raises(CallTimedOut, match="1 of 4 places are taken"):
        buffer.get(1, timeout=0)
    for number in range(1, 4):
        buffer.put([number], version=0)
    assert large.result(LONG) == [0, 1, 2]
    assert small.result(LONG) == [3]


def test_who_gives_up_waiting_lets_the_next_in_line_go_on(aside):
    buffer = DataBuffer(4)
    buffer.put([1], version=0)
    large = aside.submit(buffer.get, 4, 0.3)
    wait_until(lambda: buffer._getters or large.done(), "the large get waits")
    small = aside.submit(buffer.get, 1, LONG)
    with pytest.raises(CallTimedOut):
        large.result(LONG)
    assert small.result(LONG) == [1]


def test_closing_wakes_everybody_who_waits_and_refuses_who_comes_later(aside):
    full, empty = DataBuffer(1), DataBuffer(1)
    full.put([1], version=0)
    waiters = [aside.submit(full.put, [2], 0) for _ in range(3)] + [aside.submit(empty.get, 1) for _ in range(3)]
    waits_in(full._putters, 3, "the puts wait")
    waits_in(empty._getters, 3, "the gets wait")
    for buffer in (full, empty, full):
        buffer.close()
    for waiter in waiters:
        with pytest.raises(ClusterError, match="the buffer is closed"):
            waiter.result(LONG)
    with pytest.raises(ClusterError, match="the buffer is closed"):
        full.get(1)
    with pytest.raises(ClusterError, match="the buffer is closed"):
        empty.put([1], version=0)


def test_what_can_never_fit_is_refused_at_once():
    with pytest.raises(ConfigError, match="3 samples can never be in a buffer for 2"):
        DataBuffer(2).put([1, 2, 3], version=0)
    for count in (0, 3, -1, 1.0):
        with pytest.raises(ConfigError, match="can never be taken at once"):
            DataBuffer(2).get(count)
    for capacity in (0, -1, 2.5, True):
        with pytest.raises(ConfigError, match="capacity of a buffer"):
            DataBuffer(capacity)


def test_a_put_of_nothing_changes_nothing():
    buffer = DataBuffer(1)
    buffer.put([], version=3, timeout=0)
    assert buffer.stats().put == 0
    assert buffer.stats().newest_version is None


def test_with_many_threads_every_sample_comes_out_once_and_the_bound_holds(aside):
    buffer = DataBuffer(7)
    sizes = []
    over = threading.Event()

    def produce(name):
        for start in range(0, 60, 3):
            buffer.put([(name, start + one) for one in range(3)], 0, LONG)

    def consume():
        return [sample for _ in range(30) for sample in buffer.get(2, LONG)]

    def look():
        while not over.wait(0.001):
            sizes.append(buffer.size)

    looking = aside.submit(look)
    consumers = [aside.submit(consume) for _ in range(4)]
    producers = [aside.submit(produce, name) for name in "abcd"]
    for producer in producers:
        producer.result(LONG)
    taken = [consumer.result(LONG) for consumer in consumers]
    over.set()
    looking.result(LONG)
    assert sorted(sample for samples in taken for sample in samples) == [
        (name, number) for name in "abcd" for number in range(60)
    ]
    for samples in taken:
        for name in "abcd":
            numbers = [number for one, number in samples if one == name]
            assert numbers == sorted(numbers)
    assert max(sizes, default=0) <= 7
    assert buffer.stats().taken == buffer.stats().put == 240


@given(st.lists(st.one_of(st.lists(st.integers(), max_size=4), st.integers(1, 4)), max_size=30), st.integers(1, 6))
def test_it_is_a_plain_queue_whatever_is_put_and_taken(todo, capacity):
    buffer, expected = DataBuffer(capacity), []
    for one in todo:
        if isinstance(one, list):
            if len(one) > capacity:
                continue
            if len(expected) + len(one) > capacity:
                with pytest.raises(CallTimedOut):
                    buffer.put(one, version=0, timeout=0)
            else:
                buffer.put(one, version=0, timeout=0)
                expected += one
        elif one <= len(expected):
            assert buffer.get(one, timeout=0) == expected[:one]
            del expected[:one]
        elif one <= capacity:
            with pytest.raises(CallTimedOut):
                buffer.get(one, timeout=0)
        assert buffer.size == len(expected)
