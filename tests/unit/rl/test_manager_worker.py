"""The process behind a RolloutManager: what waits there ends with its caller, and nothing is lost or comes late."""

from __future__ import annotations

import asyncio
import functools
import itertools

import pytest

from roost.errors import CallTimedOut
from roost.rl.manager_worker import ManagerWorker
from roost.rl.tickets import Ticket

LONG = 60.0
numbers = itertools.count()


def on_a_loop(test):
    """Run a test that is a coroutine function."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))

    return run


def ticket(name="trainer:0"):
    return Ticket(id=str(next(numbers)), name=name, process="a process", node="a node")


async def start(coroutine):
    """Start a task and let it run until it waits."""
    task = asyncio.create_task(coroutine)
    for _ in range(10):
        await asyncio.sleep(0)
    return task


async def put(manager, samples, version, timeout):
    mine = ticket()
    await manager.put(mine, samples, version, timeout)
    await manager.confirm(mine)


async def take(manager, count, timeout=LONG):
    mine = ticket()
    samples = await manager.get(mine, count, None, timeout)
    await manager.confirm(mine)
    return samples


async def counts(manager):
    stats = manager._buffer.stats()
    return stats.size, stats.put, stats.taken, stats.leased


@on_a_loop
async def test_a_get_that_was_given_up_while_it_waits_takes_nothing():
    manager, gone = ManagerWorker(8), ticket()
    waiting = await start(manager.get(gone, 4, None, LONG))
    await manager.give_up(gone)
    await waiting
    await put(manager, [1, 2, 3, 4], 0, LONG)
    assert await counts(manager) == (4, 4, 0, 0)
    assert await take(manager, 4) == [1, 2, 3, 4]
    assert await counts(manager) == (0, 4, 4, 0)


@on_a_loop
async def test_samples_whose_receiver_gave_up_before_it_confirmed_are_there_again():
    manager, gone = ManagerWorker(8), ticket()
    await put(manager, [1, 2, 3, 4], 0, LONG)
    assert await manager.get(gone, 2, None, LONG) == [1, 2]
    assert await counts(manager) == (2, 4, 0, 2)
    await manager.give_up(gone)
    assert await take(manager, 4) == [1, 2, 3, 4]


@on_a_loop
async def test_a_put_that_was_given_up_never_goes_in():
    manager, gone, early, late = ManagerWorker(2), ticket(), ticket(), ticket()
    await put(manager, [1, 2], 0, LONG)
    waiting = await start(manager.put(gone, [3], 0, LONG))
    await manager.give_up(gone)
    await manager.give_up(early)
    await waiting
    assert await take(manager, 2) == [1, 2]
    await manager.put(early, [4], 0, LONG)
    await manager.confirm(early)
    await manager.put(late, [5, 6], 0, LONG)
    await manager.give_up(late)
    await manager.confirm(late)
    assert await counts(manager) == (0, 2, 2, 0)


@on_a_loop
async def test_one_that_gave_up_before_its_call_arrives_never_gets_the_lock_or_samples():
    manager, gone = ManagerWorker(2), ticket()
    await put(manager, [1], 0, LONG)
    await manager.give_up(gone)
    await manager.acquire(gone, LONG)
    assert await manager.get(gone, 1, None, LONG) == []
    assert await manager.lock_holder() is None
    assert await counts(manager) == (1, 1, 0, 0)


@on_a_loop
async def test_one_that_gives_up_while_it_waits_for_the_lock_never_gets_it():
    manager, first, gone, last = ManagerWorker(1), ticket("a"), ticket("b"), ticket("c")
    await manager.acquire(first, LONG)
    waiting = [await start(manager.acquire(one, LONG)) for one in (gone, last)]
    await manager.give_up(gone)
    await manager.release(first)
    await waiting[1]
    assert await manager.lock_holder() == "c"
    await waiting[0]


@on_a_loop
async def test_requests_of_one_thread_exclude_each_other():
    manager, first, second = ManagerWorker(1), ticket("a"), ticket("a")
    await manager.acquire(first, LONG)
    with pytest.raises(CallTimedOut, match=r"a did not get the lock in 0\.01 s: it is held by a for 0 s, 1 waiting"):
        await manager.acquire(second, 0.01)
    await manager.release(first)
    await manager.acquire(second, 0)


@on_a_loop
async def test_a_large_get_does_not_starve_behind_small_ones_that_take_each_sample():
    manager = ManagerWorker(8)

    async def take_one_by_one():
        return [await take(manager, 1) for _ in range(8)]

    large = await start(take(manager, 4))
    small = await start(take_one_by_one())
    for number in range(12):
        await put(manager, [number], 1, LONG)
    assert await large == [0, 1, 2, 3]
    assert await small == [[number] for number in range(4, 12)]


@on_a_loop
async def test_many_that_give_up_are_not_remembered_for_ever():
    manager = ManagerWorker(1)
    for _ in range(10_100):
        await manager.give_up(ticket())
    assert len(manager._given_up) == 10_000
