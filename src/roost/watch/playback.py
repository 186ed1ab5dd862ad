"""A recorded run that is played again at the speed at which it ran: what `roost watch --demo` shows."""

from __future__ import annotations

import gzip
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from roost.runtime.events.format import DRIVER
from roost.watch.limits import LAUNCH_SECONDS
from roost.watch.model import RunModel
from roost.watch.reading import Line, parse_lines
from roost.watch.views import RunView

_FILE = "demo.jsonl.gz"
"""The files of events of `roost demo --mode disagg`, one after the other, the driver's first."""


class PlayedRun:
    """A run whose lines come when they came. It ends as the run did."""

    title: str = "a recorded run of roost demo"
    folder: Path | None = None
    bound: float | None = None

    def __init__(self, lines: Sequence[Line], skip: float = 0.0) -> None:
        """Take the lines of a run, in any order, and how many seconds of it are over at the beginning."""
        self.model = RunModel()
        # A call is written when it ends. Of lines that were written together the driver's come first.
        self._lines = sorted(lines, key=lambda line: (_written(line), line.process.who != DRIVER))
        self._first = _written(self._lines[0]) if self._lines else 0.0
        self._next = 0
        self._began = time.monotonic() - skip

    @classmethod
    def shipped(cls) -> PlayedRun:
        """Return the recording in the package."""
        data = gzip.decompress((files("roost.watch") / _FILE).read_bytes())
        return cls(parse_lines(data.split(b"\n")), skip=LAUNCH_SECONDS)

    @property
    def status(self) -> str:
        """Whether it is being played."""
        return "playing a recording" if self._next < len(self._lines) else "the recording has ended"

    def refresh(self) -> RunView:
        """Take the lines whose time has come."""
        now = self._first + time.monotonic() - self._began
        due = self._next
        while due < len(self._lines) and _written(self._lines[due]) <= now:
            due += 1
        self.model.take(self._lines[self._next : due])
        self._next = due
        return self.model.view(now)


def _written(line: Line) -> float:
    seconds = line.values.get("d", 0.0)
    return line.when + (seconds if isinstance(seconds, int | float) else 0.0)
