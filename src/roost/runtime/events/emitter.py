"""The emitter: takes what happens in this process, and lets a thread write it into the run folder.

Taking costs a call less than a microsecond. It never blocks and never raises: what finds the buffer full is counted
and dropped, and a thread that the system does not start now is started later. It sleeps while nothing happens.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roost.machine.folders import open_regular
from roost.runtime.events.file import EventFile, is_ours
from roost.runtime.events.format import DRIVER, DRIVER_FILE, EVENTS_FOLDER, header, line_of, mebibytes, metrics_file
from roost.runtime.events.metrics import MetricLines, Value
from roost.runtime.events.pending import Call, Pending, Running
from roost.runtime.limits import (
    EVENTS_ASLEEP_SECONDS,
    EVENTS_CLOCK_SECONDS,
    EVENTS_CLOSE_SECONDS,
    EVENTS_EVERY_SECONDS,
    EVENTS_GAUGE_SECONDS,
    EVENTS_RETRY_SECONDS,
    EVENTS_USAGE_SECONDS,
    LEAST_WAIT_SECONDS,
)

if TYPE_CHECKING:
    from roost.runtime.runs.folder import RunDir

EVENTS_VARIABLE = "ROOST_EVENTS"
"""Set to `off`, the processes of a job write no events."""
MOST_WAITING = 10_000
"""How many calls, and how many other events, wait at most to be written."""
_MOST_VALUES = 60_000
"""How many values of metrics: those of a minute of a busy process, as a file server may take to come back."""
_LONGEST_NAME = 100
_HEADER_EVERY = 2**20
_QUIET_TICKS = 5
_GAUGES_PER_SECOND = 4

Gauge = tuple[str, str, dict[str, Any]]
"""The kind of a line, its name, and its values."""


class Emitter:
    """The events of one process. Before `start` and after `stop` it takes nothing and costs nothing."""

    def __init__(self) -> None:
        self.is_on: bool = False
        self.has_calls: bool = False
        """Whether this process serves calls, as a worker does."""
        self._calls: deque[Call] = deque()
        self._running: dict[int, tuple[str | Callable[[], str], float, bool]] = {}
        """By key: the method that is called, or what says for whom a thread waits; since when; whether aside."""
        self._values: deque[Value] = deque()
        self._notes: deque[tuple[str, str, dict[str, Any], float]] = deque()
        self._gauges: list[weakref.WeakMethod[Callable[[], Iterable[Gauge]]]] = []
        self._gauged: dict[tuple[str, str], dict[str, Any]] = {}
        """The last values written of each gauge."""
        self._dropped = 0
        self._missing: Counter[str] = Counter()
        """By reason: how many events were lost, as long as the file does not say so."""
        self._is_asleep = False
        self._wake = threading.Event()
        self._stopped = False
        self._flushed = threading.Event()
        self._flushed.set()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._next_start = math.inf
        """When the thread may be started again, if the system did not start it."""
        self._file: EventFile | None = None
        self._metrics_file: EventFile | None = None
        self._pending: Pending | None = None
        self._metrics: MetricLines | None = None
        self._epoch = 0.0
        self._on_tick: Callable[[], None] | None = None

    def start(
        self,
        base: Path,
        name: Path,
        who: str,
        *,
        run: str,
        node: int | None = None,
        devices: tuple[int, ...] = (),
        on_tick: Callable[[], None] | None = None,
    ) -> None:
        """Begin to write to a file below the run folder; `on_tick` is called by the thread every few seconds."""
        if self.is_on:
            return
        self._epoch = time.perf_counter()
        first = header(
            who, run=run, pid=os.getpid(), host=socket.gethostname(), wall=time.time(), node=node, devices=devices
        )
        self._file = EventFile(base, name, first)
        self._metrics_file = EventFile(base, metrics_file(name), first, _HEADER_EVERY)
        self._pending, self._metrics = Pending(self._epoch), MetricLines(self._epoch)
        self._on_tick = on_tick
        self.has_calls = node is not None
        self._stopped = False
        self.is_on = True
        self._start_thread()

    def _start_thread(self) -> None:
        with self._starting:
            if self._thread is not None:
                return
            thread = threading.Thread(target=self._run, name="roost-events", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                # The system allows no more threads now. Recording must not end what it records.
                self._next_start = time.perf_counter() + EVENTS_RETRY_SECONDS
            else:
                self._thread, self._next_start = thread, math.inf

    def stop(self) -> None:
        """Write what waits, and nothing after that. Waits a second at most, as for a file server that hangs."""
        self.is_on = False
        self._stopped = True
        self._wake.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(EVENTS_CLOSE_SECONDS)

    def flush(self, seconds: float) -> None:
        """Write what waits now, and return when that is done or after some seconds."""
        if self.is_on:
            self._flushed.clear()
            self._wake.set()
            self._flushed.wait(seconds)

    def call_began(self, key: int, method: str, started: float) -> None:
        """Take note of a call; `started` is of `time.perf_counter`."""
        self._running[key] = (method, started, False)
        if self._is_asleep:
            self._wake.set()
        elif started > self._next_start:
            self._start_thread()

    def call_ended(self, key: int, method: str, started: float, is_ok: bool) -> None:
        """Take note of the end of a call."""
        # In this order, so that the thread always sees it in one of them.
        if len(self._calls) < MOST_WAITING:
            self._calls.append(Call(method, started, time.perf_counter(), is_ok))
        else:
            self._dropped += 1
        self._running.pop(key, None)
        if self._is_asleep:
            self._wake.set()

    def wait_began(self, key: int, whom: Callable[[], str], started: float, is_aside: bool = False) -> None:
        """Take note of a thread that waits; `whom` is called, in another thread, if that takes long."""
        self._running[key] = (whom, started, is_aside)
        if self._is_asleep:
            self._wake.set()

    def wait_ended(self, key: int, whom: Callable[[], str], started: float, is_aside: bool = False) -> None:
        """Take note of the end of a wait."""
        now = time.perf_counter()
        if self.is_on and now - started >= LEAST_WAIT_SECONDS and self._has_room(len(self._calls)):
            self._calls.append(Call(_words(whom), started, now, True, True, is_aside))
        self._running.pop(key, None)

    def add_gauge(self, read: Callable[[], Iterable[Gauge]]) -> None:
        """Let the thread call a method about once a second, and write what changed, while its object is there."""
        self._gauges.append(weakref.WeakMethod(read))

    def metric(self, name: str, value: float, step: float | None = None) -> None:
        """Take a value of a metric."""
        if self.is_on and self._has_room(len(self._values), _MOST_VALUES):
            now = time.perf_counter()
            self._values.append(Value(name[:_LONGEST_NAME], value, step, now))
            if now > self._next_start:
                self._start_thread()

    def note(self, what: str, who: str, text: str = "", **values: Any) -> None:
        """Take an event in words: `note("died", "actor:3", "killed by signal 9")`."""
        if self.is_on and self._has_room(len(self._notes)):
            self._notes.append((what, who, {"text": text or None, **values}, time.perf_counter()))
            # These are rare, and people want to see them at once.
            self._wake.set()

    def _has_room(self, waiting: int, most: int = MOST_WAITING) -> bool:
        if self._is_asleep:
            self._wake.set()
        if waiting < most:
            return True
        self._dropped += 1
        return False

    def _run(self) -> None:
        with contextlib.suppress(Exception):
            self._write_until_stopped()
        # Events that come from now on are not written.
        self.is_on = False

    def _write_until_stopped(self) -> None:
        cpu_before, measured = time.process_time(), time.perf_counter()
        began = measured
        next_usage, next_clock, next_tick, next_gauge, quiet = began, began + EVENTS_CLOCK_SECONDS, began, began, 0
        while True:
            now = time.perf_counter()
            notes = []
            if now >= next_usage:
                next_usage = now + EVENTS_USAGE_SECONDS
                cpu = time.process_time()
                share = (cpu - cpu_before) / max(now - measured, 1e-3)
                cpu_before, measured = cpu, now
                memory = None
                with contextlib.suppress(OSError, ValueError), open("/proc/self/statm", encoding="ascii") as file:
                    memory = mebibytes(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
                notes.append(line_of("usage", round(share, 3), t=round(now - self._epoch, 4), memory=memory))
            if now >= next_clock:
                next_clock = now + EVENTS_CLOCK_SECONDS
                notes.append(line_of("clock", round(time.time(), 4), t=round(now - self._epoch, 4)))
                # Values that have not changed are written again, for readers that begin at the end of a file.
                self._gauged.clear()
            gauges = self._read_gauges(now) if now >= next_gauge or self._stopped else []
            if now >= next_gauge:
                next_gauge = now + max(EVENTS_GAUGE_SECONDS, len(gauges) / _GAUGES_PER_SECOND)
            notes += gauges
            is_last, is_asked = self._stopped, not self._flushed.is_set()
            is_quiet = self._write(now, notes, takes_all=is_last or is_asked, is_last=is_last)
            if is_asked or is_last:
                self._flushed.set()
            if is_last:
                return
            if self._on_tick is not None and now >= next_tick:
                next_tick = now + EVENTS_ASLEEP_SECONDS
                self._on_tick()
            quiet = quiet + 1 if is_quiet and not gauges else 0
            if quiet < _QUIET_TICKS:
                self._wake.clear()
                if self._flushed.is_set() and not self._stopped:
                    self._wake.wait(EVENTS_EVERY_SECONDS)
                continue
            self._wake.clear()
            self._is_asleep = True
            has_news = self._calls or self._values or self._notes or not self._flushed.is_set()
            if not has_news and not self._stopped:
                self._wake.wait(EVENTS_ASLEEP_SECONDS)
            self._is_asleep = False

    def _read_gauges(self, now: float) -> list[str]:
        """Return a line for each gauge that has changed."""
        out = []
        for gauge in [*self._gauges]:
            if (read := gauge()) is None:
                self._gauges.remove(gauge)
                continue
            with contextlib.suppress(Exception):
                for kind, name, values in read():
                    if self._gauged.get((kind, name)) != values:
                        self._gauged[kind, name] = values
                        out.append(line_of(kind, name, t=round(now - self._epoch, 4), **values))
        return out

    def _write(self, now: float, notes: list[str], *, takes_all: bool, is_last: bool) -> bool:
        """Write what waits; return whether there was nothing, and no call is under way that is not known yet."""
        pending, file, metrics, file_of_metrics = self._pending, self._file, self._metrics, self._metrics_file
        if pending is None or file is None or metrics is None or file_of_metrics is None:
            return True
        running = [
            Running(what, started) if isinstance(what, str) else Running(_words(what), started, True, is_aside)
            for what, started, is_aside in self._running.copy().values()
        ]
        # Taken one by one, because other threads append.
        calls = [self._calls.popleft() for _ in range(len(self._calls))]
        values = [self._values.popleft() for _ in range(len(self._values))]
        words = [self._notes.popleft() for _ in range(len(self._notes))]
        before = metrics.written
        measured = metrics.lines(now, values) + (metrics.rest() if takes_all else [])
        if measured and not file_of_metrics.write(measured):
            self._missing["disk"] += metrics.written - before
        notes += [line_of(what, who, t=round(when - self._epoch, 4), **more) for what, who, more, when in words]
        dropped, self._dropped = self._dropped, 0
        self._missing += Counter({"buffer": dropped})
        self._missing += Counter({f"rate {rate}": count for rate, count in metrics.left_out.items()})
        metrics.left_out.clear()
        missing, self._missing = self._missing, Counter()
        said = [line_of("dropped", count, t=round(now - self._epoch, 4), why=why) for why, count in missing.items()]
        lines = pending.lines(now, calls, running=running, notes=notes, age=EVENTS_EVERY_SECONDS / 2)
        if takes_all:
            lines += pending.rest()
        if is_last:
            lines.append(line_of("stopped", "", t=round(now - self._epoch, 4)))
        if (said or lines) and not file.write([*said, *lines]):
            # The lines about what is missing are no loss of their own.
            self._missing += missing + Counter({"disk": len(lines)})
        if is_last:
            file.close()
            file_of_metrics.close()
        return not (calls or values or words or pending.merged or metrics.waiting)


def _words(whom: Callable[[], str]) -> str:
    try:
        return whom()
    except Exception:
        return "another process"


emitter: Emitter = Emitter()
"""That of this process."""


# Write nothing in a fork: the thread is not there, and may have held a lock when the fork was made.
os.register_at_fork(after_in_child=lambda: Emitter.__init__(emitter))


def start_driver_events(run_dir: RunDir) -> None:
    """Remove the events of an earlier run in the same folder, and begin to write the events of this process."""
    folder = Path(run_dir.path) / EVENTS_FOLDER
    for path in [] if folder.is_symlink() else [*folder.rglob("*.jsonl")]:
        with contextlib.suppress(OSError):
            with open(path, "rb", opener=open_regular) as file:
                was_ours = is_ours(file.read(64))
            if was_ours:
                path.unlink()
    emitter.start(Path(run_dir.path), Path(EVENTS_FOLDER, DRIVER_FILE), DRIVER, run=run_dir.token)
