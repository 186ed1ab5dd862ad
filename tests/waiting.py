"""Waiting for other processes, and interrupting this one."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import psutil


def wait_until(done: Callable[[], object], what: str, seconds: float = 60) -> None:
    """Wait until `done()` is true; the limit is far above what it takes."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


def press_ctrl_c() -> None:
    """Interrupt the main thread, from another one, as a terminal does."""
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def stop(pid: int) -> None:
    """Let a process hang; on a busy machine its threads run on for a while after the signal, until each has seen it."""
    os.kill(pid, signal.SIGSTOP)
    states = [f"/proc/{pid}/task/{thread.id}/stat" for thread in psutil.Process(pid).threads()]

    def runs(path: str) -> bool:
        # A thread that was about to end may be gone.
        with contextlib.suppress(OSError), open(path) as file:
            return file.read().rpartition(")")[2].split()[0] not in "TtZX"
        return False

    wait_until(lambda: not any(map(runs, states)), f"process {pid} hangs")


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Let a process hang, and go on after the block if it is still there."""
    stop(pid)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def is_gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
