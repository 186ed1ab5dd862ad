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


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Let a process hang, and go on after the block if it is still there."""
    os.kill(pid, signal.SIGSTOP)
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
