"""Handles: their values, whoever waits for them and whatever interrupts that."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from roost import Channel
from roost.comm.channels.client import Arrival, Client, take_all, take_one
from roost.comm.wire.loop import Handle, Loop


@pytest.fixture
def loop():
    made = Loop("test")
    yield made
    made.stop()


def test_threads_that_wait_for_one_handle_all_get_its_value_and_not_the_raw_one(loop):
    opened = []

    def open_value(raw):
        opened.append(raw)
        time.sleep(0.1)
        return [raw]

    handle = Handle(loop, open_value)
    found = []
    threads = [threading.Thread(target=lambda: found.append(handle.wait(30))) for _ in range(8)]
    for thread in threads:
        thread.start()
    handle.complete("raw")
    for thread in threads:
        thread.join()
    assert found == [["raw"]] * 8
    assert opened == ["raw"]


def test_a_value_whose_opening_was_interrupted_can_still_be_taken(loop):
    attempts = iter([KeyboardInterrupt, None])

    def open_value(raw):
        interrupt = next(attempts)
        if interrupt is not None:
            raise interrupt
        return raw

    handle = Handle(loop, open_value)
    handle.complete(7)
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    assert [handle.wait(), handle.wait()] == [7, 7]


class Interrupting:
    """Items on which Ctrl-C comes while they are unpickled."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.acknowledged = 0
        self.channel = "channel"

    def unpack(self, *_):
        raise self.error

    unpack_many = unpack
    not_opened = Client.not_opened

    def cancel(self, number):
        pass

    def acknowledge(self, number):
        self.acknowledged += number


@pytest.mark.parametrize("take", [take_one, take_all])
def test_an_item_is_not_acknowledged_when_its_unpickling_is_interrupted(take):
    interrupted = Interrupting(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        take(Arrival(interrupted, 1, (1,)))
    assert interrupted.acknowledged == 0
    odd = Interrupting(ValueError())
    with pytest.raises(Exception, match="cannot be unpickled"):
        take(Arrival(odd, 1, (1,)))
    # All that came together go back, so that each can be taken alone.
    assert odd.acknowledged == (take is take_one)


def test_an_item_is_still_there_after_an_interrupted_get(monkeypatch):
    channel = Channel.create("interrupted", local=True)
    channel.put(1)
    with monkeypatch.context() as patch:
        patch.setattr("roost.comm.channels.client.LocalClient.unpack", Interrupting(KeyboardInterrupt()).unpack)
        with pytest.raises(KeyboardInterrupt):
            channel.get()
    assert channel.get() == 1


@pytest.mark.parametrize("how", ["receive", "send"])
def test_a_handler_of_a_signal_that_raises_at_any_moment_loses_doubles_and_reorders_nothing(how):
    script = Path(__file__).parents[2] / "interrupted.py"
    done = subprocess.run([sys.executable, script, how, "4000"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.removeprefix("interrupts ")) >= 10


def test_a_loop_that_is_stopped_ends_at_once_whoever_makes_calls_meanwhile():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(200):
            loop = Loop("stopped")
            loop.start()
            # It sleeps by now, or soon.
            loop.do(lambda: None)
            stopping = threading.Thread(target=loop.stop)
            stopping.start()
            while not loop._is_stopped:
                pass
            for _ in range(30):
                # In this thread, which handlers of signals may interrupt.
                loop.do(lambda: None)
            stopping.join(60)
            assert not loop._thread.is_alive(), "nothing took what wakes it"
    finally:
        sys.setswitchinterval(interval)
