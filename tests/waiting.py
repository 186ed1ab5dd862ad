"""Waiting for what happens in other processes."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil


def wait_until(done: Callable[[], object], what: str, seconds: float = 60) -> None:
    """Wait for something that happens elsewhere; the limit is far above what it takes."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


def is_gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
