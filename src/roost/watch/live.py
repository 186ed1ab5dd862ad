"""A run that may be running: its events, its record, and whether its driver is still there. Or a recorded run."""

from __future__ import annotations

import gzip
import json
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from roost.config.yaml_file import PLAN_FILE_LIMIT
from roost.deadline import Deadline
from roost.errors import ConfigError
from roost.machine.folders import open_regular
from roost.placement.plan import Plan
from roost.runtime.events.format import DRIVER
from roost.runtime.runs.index import is_free, read_run
from roost.runtime.runs.record import PLAN_FILE, RunRecord, Status
from roost.watch.limits import CLOCK_SECONDS, JUDGE_SECONDS, LAUNCH_SECONDS, RECORD_SECONDS, SKEW_SECONDS
from roost.watch.model import RunModel
from roost.watch.reading import EventReader, Line, parse_lines
from roost.watch.verdict import judge
from roost.watch.views import Layout, RunView, Verdict

SEARCH_FILE = "search.json"
"""The output of `roost search --format json`, if the user has put it into the run folder."""
_SEARCH_LIMIT = 2**22
_RECORDING = "demo.jsonl.gz"
"""The files of events of `roost demo --mode disagg`, one after the other, the driver's first."""


class LiveRun:
    """The view of a run folder, brought up to date by `refresh`. It reads only, so any number can read one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.title = folder.name
        """Which run it is, and the job or script."""
        self.status = "running"
        """Whether it runs, or how it ended."""
        self.bound: float | None = None
        """The least seconds that a step can take, by the search in the run folder."""
        self.layout = Layout()
        """The columns and colours of its plan, as far as it has one."""
        self.model = RunModel()
        self._reader = EventReader(folder)
        self._clock = _Clock()
        self._next_look = Deadline.after(0)
        self.record: RunRecord | None = None
        """Its record, as far as it has one."""
        self._is_gone = False
        self._judge = _Judge()
        if not self._reader.exists and not (folder / "run.json").is_file():
            raise no_events(folder)

    def refresh(self) -> RunView:
        """Read what was added, and return the run as it is now."""
        self.model.take(self._reader.read())
        if self._next_look.is_over:
            self._next_look = Deadline.after(RECORD_SECONDS)
            try:
                self.record = read_run(self.folder)
                self.title, self.status = self.record.title, str(self.record.outcome)
                if self.record.plan != self.layout.hash:
                    self.layout = _read_layout(self.folder / PLAN_FILE)
                self._is_gone = self.record.outcome.status is not Status.RUNNING
            except (ConfigError, OSError):
                # A run without a record, or one whose folder was removed.
                self._is_gone = is_free(self.folder)
                if self.record is None:
                    self.status = "ended" if self._is_gone else "running"
            self.bound = read_bound(self.folder / SEARCH_FILE)
        now, trouble = self._clock.now(self.model.latest), self._reader.trouble
        notices = trouble.words()
        if not self.folder.is_dir():
            notices.append("the run folder is gone: this is what was read before")
        elif not self._reader.exists:
            notices.append("this run has no events")
        if abs(self._clock.skew) > SKEW_SECONDS:
            differs = f"differs by about {self._clock.skew:+.0f} s from the run's, which is the one shown"
            notices.append(f"the clock here {differs}")
        if trouble.skipped:
            notices.append("a long run: calls and idle shares are those of its last part")
        return self._judge(self.model, self.model.view(now, notices, has_ended=self._is_gone), self.bound)


class PlayedRun:
    """A recorded run whose lines come when they came. It ends as the run did."""

    title = "a recorded run of roost demo"
    folder: Path | None = None
    bound: float | None = None
    layout = Layout()

    def __init__(self, lines: Sequence[Line], skip: float = 0.0) -> None:
        """Take the lines of a run, in any order, and how many seconds of it are over at the beginning."""
        self.model = RunModel()
        # A call is written when it ends. Of lines that were written together the driver's come first.
        timed = []
        for line in lines:
            seconds = line.values.get("d", 0.0)
            timed.append((line.when + (seconds if isinstance(seconds, int | float) else 0.0), line))
        self._left = deque(sorted(timed, key=lambda item: (item[0], item[1].process.who != DRIVER)))
        self._first = self._left[0][0] if self._left else 0.0
        self._began = time.monotonic() - skip
        self._judge = _Judge()

    @classmethod
    def shipped(cls) -> PlayedRun:
        """Return the recording in the package."""
        data = gzip.decompress((files("roost.watch") / _RECORDING).read_bytes())
        return cls(parse_lines(data.split(b"\n")), skip=LAUNCH_SECONDS)

    @property
    def status(self) -> str:
        """Whether it is being played."""
        return "playing a recording" if self._left else "the recording has ended"

    def refresh(self) -> RunView:
        """Take the lines whose time has come."""
        now = self._first + time.monotonic() - self._began
        while self._left and self._left[0][0] <= now:
            self.model.take([self._left.popleft()[1]])
        return self._judge(self.model, self.model.view(now), self.bound)


WatchedRun = LiveRun | PlayedRun
"""A run that the page and the terminal show: it may go on, or be a recording that is played."""


class _Judge:
    """Adds what limits a run to views of it, and judges again only after a while: that costs more than a view."""

    def __init__(self) -> None:
        self._verdict: Verdict | None = None
        self._next = Deadline.after(0)

    def __call__(self, model: RunModel, view: RunView, bound: float | None) -> RunView:
        if self._next.is_over:
            began = time.monotonic()
            self._verdict = judge(model, view, bound)
            self._next = Deadline.after(max(JUDGE_SECONDS, 20 * (time.monotonic() - began)))
        return replace(view, verdict=self._verdict)


class _Clock:
    """The time of day where a run writes, which need not be that of the machine where it is read.

    No line is of the future, so a reader whose clock is behind knows it at once. If its clock is ahead, all processes
    look silent: it knows that from lines that come and have old times all the same.
    """

    def __init__(self) -> None:
        self.skew = 0.0
        """How far this machine's clock is ahead, as far as is known."""
        here = time.monotonic()
        self._ahead = time.time() - here
        self._latest = 0.0
        self._fresh: deque[tuple[float, float]] = deque()
        """When a line was read that was newer than all before, and how far its time was ahead of that moment."""

    def now(self, latest: float) -> float:
        """Return the present time of the run, whose newest line has the time `latest`."""
        here = time.monotonic()
        if latest > self._latest:
            # What is read first may be old.
            if self._latest:
                self._fresh.append((here, latest - here))
            self._latest = latest
        while self._fresh and self._fresh[0][0] < here - 2 * CLOCK_SECONDS:
            self._fresh.popleft()
        ahead = max(self._ahead, latest - here)
        if self._fresh and self._fresh[0][0] < here - CLOCK_SECONDS:
            newest = max(ahead for _, ahead in self._fresh)
            # A process writes a moment after what it writes about.
            if ahead > newest + CLOCK_SECONDS:
                ahead = newest
        self.skew += self._ahead - ahead
        self._ahead = ahead
        return here + ahead


def read_whole(folder: Path) -> RunModel:
    """Return what all events of a run say; ConfigError if it has none."""
    reader, model = EventReader(folder, whole=True), RunModel(keeps_all=True)
    model.take(reader.read())
    if not model.processes and not model.events:
        raise no_events(folder)
    return model


def _read_layout(path: Path) -> Layout:
    """Return the columns of the plan of a run; none if it cannot be read."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            plan = Plan.from_json(file.read(PLAN_FILE_LIMIT).decode())
    except (OSError, ValueError, ConfigError):
        return Layout()
    columns = {rank: len(node.accelerators) for rank, node in enumerate(plan.topology.nodes)}
    return Layout(hash=plan.hash, columns=columns, components=tuple(plan.names))


def no_events(folder: Path) -> ConfigError:
    """Make the error of a run that recorded nothing."""
    hint = "the run launched nothing, used Cluster(record=False) or ROOST_EVENTS=off, or is older"
    return ConfigError(f"there are no events in {folder}", hint=hint)


def read_bound(path: Path) -> float | None:
    """Return the bound of a step in a file that `roost search` wrote; None if there is none."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            found = json.loads(file.read(_SEARCH_LIMIT))["bound_seconds"]
        bound = float(found)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return bound if math.isfinite(bound) and bound > 0 else None
