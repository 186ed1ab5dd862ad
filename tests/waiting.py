"""Waiting for what happens in other processes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import psutil


def wait_until(done: Callable[[], object], what: str, seconds: float = 60) -> None:
    """Wait for something that happens elsewhere; the limit is far above what it takes."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


def take_signals() -> None:
    """For a process that a test will interrupt: a run in the background hands on that Ctrl-C is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def is_gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
