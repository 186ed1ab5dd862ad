"""Who uses an accelerator, seen from inside the processes: locks that the kernel gives back when a process ends."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

WAIT_SECONDS = 1.0
"""How long a process that Ray is ending may still hold its accelerator."""

_held: list[int] = []


def claim(folder: Path, what: str, owner: str, wait: float = WAIT_SECONDS) -> str | None:
    """Hold something for an owner until this process ends; return the other owner that still holds it, if there is one.

    Any number of processes of one owner can hold the same thing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + wait
    while True:
        with (folder / f"{what}.mutex").open("w") as mutex:
            fcntl.flock(mutex, fcntl.LOCK_EX)
            file = os.open(folder / what, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_free = True
            except BlockingIOError:
                is_free = False
            other = os.pread(file, 1000, 0).decode()
            if is_free:
                os.ftruncate(file, 0)
                os.pwrite(file, owner.encode(), 0)
            if is_free or other == owner:
                fcntl.flock(file, fcntl.LOCK_SH)
                _held.append(file)
                return None
            os.close(file)
        if time.monotonic() >= deadline:
            return other
        time.sleep(0.02)


def release_all() -> None:
    """Release what this process holds."""
    while _held:
        os.close(_held.pop())
