"""The fair lock: one holder, a line in order, and no dead process in either."""

from __future__ import annotations

import asyncio
import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roost.errors import CallTimedOut, ClusterError, ConfigError
from roost.rl.fair_lock import FairLock

LONG = 60.0


def on_a_loop(test):
    """Run a test that is a coroutine function."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))

    return run


async def rounds():
    for _ in range(5):
        await asyncio.sleep(0)


async def ask(lock, *holders):
    """Let holders ask for the lock one after another, and return their tasks."""
    tasks = []
    for holder in holders:
        tasks.append(asyncio.create_task(lock.acquire(holder, LONG)))
        await rounds()
    return tasks


@on_a_loop
async def test_the_first_to_ask_holds_the_lock_and_the_others_wait_in_line():
    lock = FairLock()
    first, *others = await ask(lock, "actor:0", "actor:1", "actor:2")
    assert (lock.holder, lock.line) == ("actor:0", ("actor:0", "actor:1", "actor:2"))
    assert first.done()
    assert not any(task.done() for task in others)


@on_a_loop
async def test_a_holder_that_asks_again_keeps_the_lock_and_its_time():
    now = [1.0]
    lock = FairLock(clock=lambda: now[0])
    await ask(lock, "a", "b")
    now[0] = 5.0
    await lock.acquire("a", 0)
    assert lock.line == ("a", "b")
    assert str(lock) == "held by a for 4 s, 1 waiting"


@on_a_loop
async def test_a_release_hands_the_lock_to_the_next_in_line():
    now = [1.0]
    lock = FairLock(clock=lambda: now[0])
    _, b, c = await ask(lock, "a", "b", "c")
    now[0] = 7.0
    lock.release("a")
    await b
    assert not c.done()
    assert str(lock) == "held by b for 0 s, 1 waiting"
    await ask(lock, "a")
    assert lock.line == ("b", "c", "a"), "the last holder goes to the end of the line"


@on_a_loop
async def test_the_last_release_leaves_the_lock_free():
    lock = FairLock()
    await lock.acquire("a", LONG)
    lock.release("a")
    assert (lock.holder, lock.line, str(lock)) == (None, (), "free")
    await lock.acquire("b", 0)
    assert lock.holder == "b"


@on_a_loop
async def test_only_the_holder_can_release_the_lock_and_the_error_says_who_that_is():
    lock = FairLock(clock=lambda: 0.0)
    with pytest.raises(ConfigError, match="b cannot release the lock: it is free"):
        lock.release("b")
    await ask(lock, "actor:3", "b")
    with pytest.raises(ConfigError, match="b cannot release the lock: it is held by actor:3 for 0 s, 1 waiting"):
        lock.release("b")
    assert lock.line == ("actor:3", "b")


@on_a_loop
async def test_one_that_waits_in_vain_leaves_the_line_and_learns_who_has_the_lock():
    now = [1.0]
    lock = FairLock(clock=lambda: now[0])
    await ask(lock, "actor:3")
    now[0] = 5.2
    with pytest.raises(
        CallTimedOut, match=r"b did not get the lock in 0.01 s: it is held by actor:3 for 4 s, 1 waiting"
    ):
        await lock.acquire("b", 0.01)
    assert lock.line == ("actor:3",)


@on_a_loop
async def test_one_that_is_cancelled_while_it_waits_leaves_the_line():
    lock = FairLock()
    _, b, c = await ask(lock, "a", "b", "c")
    b.cancel()
    await rounds()
    assert lock.line == ("a", "c")
    lock.release("a")
    await c


@on_a_loop
async def test_one_that_gives_up_while_it_waits_never_gets_the_lock():
    lock = FairLock()
    _, b, _ = await ask(lock, "a", "b", "c")
    lock.leave("b")
    lock.leave("unknown")
    with pytest.raises(ClusterError, match="b no longer waits for the lock"):
        await b
    lock.release("a")
    await rounds()
    assert lock.line == ("c",)


@on_a_loop
async def test_one_that_gives_up_and_asks_again_goes_to_the_end_of_the_line():
    lock = FairLock()
    _, old, _ = await ask(lock, "a", "b", "c")
    lock.leave("b")
    (new,) = await ask(lock, "b")
    with pytest.raises(ClusterError, match="b no longer waits"):
        await old
    assert lock.line == ("a", "c", "b")
    lock.release("a")
    lock.release("c")
    await new


@on_a_loop
async def test_the_dead_lose_the_lock_and_their_places():
    lock = FairLock()
    _, _, c, _, e = await ask(lock, "a", "b", "c", "d", "e")
    for dead in ("a", "b", "d"):
        lock.leave(dead)
    await c
    assert lock.line == ("c", "e")
    lock.leave("c")
    await e


steps = st.tuples(st.sampled_from(["ask", "leave", "release"]), st.sampled_from("abcdef"))


@given(st.lists(steps, max_size=40))
@on_a_loop
async def test_in_any_order_of_events_the_lock_goes_to_the_one_that_waited_longest(todo):
    lock, line, tasks = FairLock(), [], {}
    for step, name in todo:
        if step == "ask":
            if name not in line:
                line.append(name)
                (tasks[name],) = await ask(lock, name)
        elif step == "release" and line[:1] != [name]:
            with pytest.raises(ConfigError):
                lock.release(name)
        else:
            line = [one for one in line if one != name]
            getattr(lock, step)(name)
            await rounds()
        assert list(lock.line) == line
        for one in line:
            assert tasks[one].done() == (one == line[0])
    await asyncio.gather(*(task for name, task in tasks.items() if name not in line), return_exceptions=True)
    for name in line:
        lock.leave(name)
    await asyncio.gather(*tasks.values(), return_exceptions=True)
