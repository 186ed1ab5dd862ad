"""Sends or receives in the main thread of a process, where a handler of a signal raises again and again, for tests.

python tests/interrupted.py receive 5000
"""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from typing import Any

import numpy as np

from roost.comm.messages import Messages
from roost.comm.process import PlainDirectory
from roost.comm.wire.connection import PeerInfo
from roost.comm.wire.endpoint import Endpoint, own_instance
from roost.comm.wire.loop import let_main_thread_read


class Interrupt(Exception):  # noqa: N818 - what happened
    """What the handler raises: a time limit, as many programs have one."""


class Interrupts:
    """Raises once in each block, at a random moment; the signals come all the time."""

    def __init__(self) -> None:
        self.count = 0
        self._is_armed = False
        signal.signal(signal.SIGALRM, self._handle)
        self._set_timer()

    def _set_timer(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.00002, 0.0006))  # noqa: S311 - it is no secret

    def _handle(self, *_: object) -> None:
        self._set_timer()
        if self._is_armed:
            self._is_armed = False
            self.count += 1
            raise Interrupt

    def __enter__(self) -> None:
        self._is_armed = True

    def __exit__(self, *_: object) -> None:
        self._is_armed = False

    def stop(self) -> None:
        # First, since the handler of a signal that has come already would set the timer again.
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)


def thing(number: int) -> Any:
    """The message of that number; some travel through shared memory."""
    return np.full(20_000, number) if number % 100 == 0 else number


def number_of(got: Any) -> int:
    return int(got[0]) if isinstance(got, np.ndarray) else got


def receive(one: Messages, two: Messages, count: int, interrupts: Interrupts) -> list[int]:
    def say() -> None:
        for number in range(count):
            one.send(thing(number), "b:0").wait(60)
            if number % 20 == 0:
                # The receiver waits now and then, and now and then finds a message.
                time.sleep(random.uniform(0, 0.0005))  # noqa: S311 - likewise

    threading.Thread(target=say, daemon=True).start()
    got = []
    while len(got) < count:
        arrived = None
        try:
            with interrupts:
                arrived = two.wait_for_next("a:0", None, None, 10)
        except Interrupt:
            if arrived is None:
                continue
        got.append(number_of(arrived))
    return got


def send(one: Messages, two: Messages, count: int, interrupts: Interrupts) -> list[int]:
    """Returns what arrived; of what was sent without an interrupt, all has to be there."""
    sent = []
    for number in range(count):
        try:
            with interrupts:
                one.send(thing(number), "b:0")
                sent.append(number)
        except Interrupt:
            pass
    interrupts.stop()
    one.send(count, "b:0")
    got = []
    while (number := number_of(two.wait_for_next("a:0", None, None, 60))) < count:
        got.append(number)
    missing = {*sent} - {*got}
    if missing:
        sys.exit(f"{len(missing)} were sent and did not arrive")
    return got


def main() -> None:
    how, count = {"send": send, "receive": receive}[sys.argv[1]], int(sys.argv[2])
    # As in a worker.
    let_main_thread_read()
    directory = PlainDirectory()

    def make(address: str) -> Messages:
        own = PeerInfo(address=address, instance=own_instance(), node="node 0", node_rank=0)
        return Messages(Endpoint(own, b"secret", directory, "127.0.0.1"))

    one, two = make("a:0"), make("b:0")
    interrupts = Interrupts()
    got = how(one, two, count, interrupts)
    interrupts.stop()
    if got != sorted({*got}):
        sys.exit(f"{len(got) - len({*got})} came twice, in order: {got == sorted(got)}")
    if how is receive and got != list(range(count)):
        sys.exit(f"{len({*range(count)} - {*got})} are missing")
    print("interrupts", interrupts.count)
    one.endpoint.close()
    two.endpoint.close()


if __name__ == "__main__":
    main()
