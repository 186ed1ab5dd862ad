"""The process that ends the rest of a Ray which a driver started, if the driver is killed before it can.

The kernel ends most of Ray's processes with the driver. The agents, which the raylet starts, notice it on their own,
after about a minute.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys

import psutil

from roost.runtime.limits import GUARD_END_SECONDS, GUARD_POLL_SECONDS

_STARTED = b"+"
_LET_GO = b"."


class Guard:
    """The driver's side of a guard."""

    def __init__(self) -> None:
        # -P: a file in the current folder must not replace a module.
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            # Ctrl-C goes to the driver, which then ends Ray in order.
            start_new_session=True,
        )

    def note_start(self) -> None:
        """Guard the Ray that this process has started."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(_STARTED)
                self._process.stdin.flush()

    def stop(self) -> None:
        """End the guard: this process has ended Ray in order."""
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._process.communicate(_LET_GO, timeout=GUARD_END_SECONDS)


def main() -> None:
    """Wait until the driver lets go, or is gone: then kill what its raylet started."""
    driver = psutil.Process(os.getppid())
    guarded: list[psutil.Process] = []
    # A process that the driver forked may hold the other end of the pipe for longer than the driver lives.
    while os.getppid() == driver.pid:
        if select.select([0], [], [], GUARD_POLL_SECONDS)[0]:
            said = os.read(0, 1)
            if said == _LET_GO:
                return
            if not said:
                break
            # A process may end while it is asked.
            with contextlib.suppress(psutil.Error):
                raylets = [child for child in driver.children() if child.name() == "raylet"]
                guarded = [child for raylet in raylets for child in raylet.children(recursive=True)]
    for process in guarded:
        # Nothing happens to a later process with the same pid.
        with contextlib.suppress(psutil.Error):
            process.kill()


if __name__ == "__main__":
    main()
