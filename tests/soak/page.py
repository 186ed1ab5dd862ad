"""Reads the runs of a round as pages do: with the clock of the machine, an hour ahead and an hour behind, and compares.

A program of its own, which looks until its standard input ends.
"""

from __future__ import annotations

import select
import sys
import time
from pathlib import Path

from roost.errors import ConfigError
from roost.watch.live import LiveRun
from roost.watch.views import RunView, State
from soak.record import Recorder, true_time

LOOK_SECONDS = 0.5
MOST_SECONDS = 12.0
"""How long a reader may need to find that its clock is wrong."""
CLOSE_SECONDS = 5.0
"""How far the present time of two readers may be apart: what is written comes in steps."""
ALIVE_SECONDS = 2.0
"""A run that has written nothing for longer does not tell a reader what time it is."""
HOUR = 3600.0


class Readers:
    """A run as readers with different clocks see it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs = {hours: _at(hours, lambda: LiveRun(folder)) for hours in (0, -1, 1)}
        self._differs_since: dict[int, float] = {}

    def look(self) -> list[str]:
        """Return what has been wrong for a while."""
        views = {hours: _at(hours, run.refresh) for hours, run in self._runs.items()}
        true, found = views[0], []
        is_alive = not true.is_over and self._runs[0].model.latest > true.now - ALIVE_SECONDS
        for hours in (-1, 1):
            if not is_alive or not (wrong := _difference(true, views[hours])):
                self._differs_since.pop(hours, None)
                continue
            since = self._differs_since.setdefault(hours, time.monotonic())
            if time.monotonic() - since > MOST_SECONDS:
                found.append(f"with a clock {hours:+} h off, the page of {self.folder.name} has {wrong}")
        return found


def _difference(true: RunView, other: RunView) -> str:
    if abs(true.now - other.now) > CLOSE_SECONDS:
        return f"a present time that is {other.now - true.now:+.1f} s off"
    states = {worker.address: worker.state for worker in true.workers}
    for worker in other.workers:
        if (worker.state is State.SILENT) != (states.get(worker.address) is State.SILENT):
            return f"{worker.address} as {worker.state}, which is {states.get(worker.address)}"
    return ""


def _at(hours: int, act):
    """Do something as a process does whose clock is wrong."""
    time.time = lambda: true_time() + hours * HOUR
    try:
        return act()
    finally:
        time.time = true_time


def main() -> None:
    """Look at all runs below the first argument, and write into the folder of the second what is wrong."""
    below, recorder = Path(sys.argv[1]), Recorder(Path(sys.argv[2]), "page")
    runs: dict[Path, Readers] = {}
    said = set()
    while not select.select([sys.stdin], [], [], LOOK_SECONDS)[0]:
        for folder in below.iterdir():
            try:
                wrong = runs.setdefault(folder, Readers(folder)).look() if folder.is_dir() else []
            except ConfigError:
                # It has written nothing yet.
                continue
            for text in wrong:
                if (kind := text.partition(" has ")[0]) not in said:
                    said.add(kind)
                    recorder.note("page", text=text)


if __name__ == "__main__":
    main()
