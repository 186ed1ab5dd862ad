"""The job's lock is a lease of the one item of a channel: one holder, a line in order, and always given back."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from roost import CallTimedOut, Channel
from roost.rl.job_lock import JobLock
from roost.rl.manager_worker import LOCK
from waiting import wait_until


@pytest.fixture
def channel(request):
    made = Channel.create(request.node.name, local=True)
    made.put(None, key=LOCK)
    return made


def waiting(channel):
    return sum(channel.stats()["keys"][LOCK]["getters"].values())


def test_threads_get_the_lock_in_the_order_in_which_they_asked(channel):
    order = []

    def enter(number):
        with JobLock(channel, 60):
            order.append(number)

    with ThreadPoolExecutor(3) as aside, JobLock(channel, 60):
        for number in range(3):
            aside.submit(enter, number)
            wait_until(lambda number=number: waiting(channel) == number + 1, "it is in line")
        assert order == []
    assert order == [0, 1, 2]


def test_a_thread_can_take_it_again_and_a_block_that_raises_gives_it_back(channel):
    with pytest.raises(ZeroDivisionError), JobLock(channel, 60), JobLock(channel, 0):
        1 / 0  # noqa: B018
    with JobLock(channel, 0):
        assert channel.qsize(LOCK) == 0
    assert channel.qsize(LOCK) == 1


def test_who_does_not_get_it_in_time_is_told_who_has_it_and_how_many_wait(channel):
    def try_lock(timeout):
        with JobLock(channel, timeout):
            pass

    with ThreadPoolExecutor(2) as aside, JobLock(channel, 60):
        with pytest.raises(CallTimedOut, match=r"not free for 0\.01 s: it is held by this process for 0 s$"):
            aside.submit(try_lock, 0.01).result(60)
        late = aside.submit(try_lock, 60)
        wait_until(lambda: waiting(channel) == 1, "it is in line")
        with pytest.raises(CallTimedOut, match="held by this process for 0 s, 2 waiting"):
            aside.submit(try_lock, 0.01).result(60)
        done = threading.Event()
        late.add_done_callback(lambda _: done.set())
    assert done.wait(60)


def test_a_task_that_is_cancelled_while_it_waits_never_gets_it(channel):
    async def enter():
        async with JobLock(channel, 60):
            pytest.fail("it was cancelled")

    async def use():
        async with JobLock(channel, 60):
            task = asyncio.create_task(enter())
            while not waiting(channel):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(use())
    with JobLock(channel, 0):
        pass
