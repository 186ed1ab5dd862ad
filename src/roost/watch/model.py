"""A model of a run: its events go in, and a view of what each worker does comes out. Pure, so tests compare values.

Lines go in with `take`, in any order of files; `view` says what is known at a moment. Times are of the driver's clock:
a node whose clock differs is noticed because its workers seem to begin before the job did or after they were launched.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from roost.runtime.events.format import DRIVER
from roost.runtime.events.metrics import RATES
from roost.text import join_words
from roost.watch.limits import (
    FIRST_HANG_SECONDS,
    HANG_SECONDS,
    RECENT_SECONDS,
    SILENT_SECONDS,
    SKEW_SECONDS,
    WINDOW_SECONDS,
)
from roost.watch.reading import WORDS, Line, Process, finite, metric_values
from roost.watch.traffic import KINDS, Traffic, rank_of
from roost.watch.views import Curve, Event, NodeView, RunView, Span, State, StepView, WorkerView

_MOST_SPANS = 4000
_MOST_EVENTS = 500
_MOST_POINTS = 2000
_MOST_CURVES = 1000
_MOST_LOADS = 600
_MOST_STEPS = 2000
_HANG_FACTOR = 5


class _BusySeconds:
    """How much of each second a worker was busy: sums that cost the same however many calls there were."""

    __slots__ = ("_seconds",)

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def add(self, span: Span) -> None:
        """Count a call, or the opposite for a wait."""
        share = min(1.0, span.busy / max(span.end - span.start, 1e-9)) * (-1 if span.is_wait else 1)
        start = max(span.start, span.end - WINDOW_SECONDS - 1)
        second, last = math.floor(start), math.floor(span.end)
        while second <= last:
            part = min(span.end, second + 1) - max(start, second)
            self._seconds[second] = self._seconds.get(second, 0.0) + share * part
            second += 1
        if len(self._seconds) > 4 * WINDOW_SECONDS:
            oldest = max(self._seconds) - 2 * WINDOW_SECONDS
            self._seconds = {key: busy for key, busy in self._seconds.items() if key >= oldest}

    def between(self, start: float, end: float) -> float:
        """Return the busy seconds in an interval; of its first and last second the part that is inside."""
        first, last = math.floor(start), math.floor(end)
        found = self._seconds
        whole = sum([found.get(second, 0.0) for second in range(first, last + 1)])
        return whole - found.get(first, 0.0) * (start - first)


_ODD = "odd"
_WHY = {
    "buffer": "{count} events were left out: they came faster than a thread could write them",
    "disk": "{count} events were left out: the disk was full, or the run folder could not be written",
    _ODD: "{count} lines of events were left out: they say what cannot be",
    "": "{count} events were dropped because a buffer or the disk was full",
}
"""The reasons in `dropped` lines; a version before them gave none."""
_RATE = "rate "
_RATES = {f"{_RATE}{rate}" for _, rate in RATES}


class _Points:
    """The values of a metric over a whole run, evenly spread: of too many every second one goes."""

    __slots__ = ("_count", "_every", "_kept", "_last")

    def __init__(self) -> None:
        self._kept: list[tuple[float | None, float, float]] = []
        self._last: tuple[float | None, float, float] | None = None
        self._every = 1
        self._count = 0

    def add(self, point: tuple[float | None, float, float]) -> None:
        self._last = point
        # Workers that log alike keep the same steps.
        if self._count % self._every == 0:
            self._kept.append(point)
            if len(self._kept) > _MOST_POINTS:
                del self._kept[1::2]
                self._every *= 2
        self._count += 1

    def all(self) -> tuple[tuple[float | None, float, float], ...]:
        newest = [] if self._last is None or self._kept[-1:] == [self._last] else [self._last]
        return (*self._kept, *newest)


class _UnderWay(NamedTuple):
    """A call or a wait that has not ended."""

    name: str
    since: float
    is_aside: bool = False


@dataclass(slots=True, kw_only=True)
class _Lane:
    spans: deque[Span]
    waiting: list[_UnderWay] = field(default_factory=list)
    """For whom it waits."""
    running: list[_UnderWay] = field(default_factory=list)
    """The calls it is in."""
    heard: float = 0.0
    progress: float = 0.0
    """When something last came of its work: a call or a wait that began or ended, a metric."""
    busy: _BusySeconds = field(default_factory=_BusySeconds)


@dataclass(slots=True, kw_only=True)
class _Worker(_Lane):
    process: Process
    calls: int = 0
    failed: int = 0
    last: Span | None = None
    cpu: float | None = None
    memory: int | None = None
    stopped: bool = False


class RunModel:
    """The state of a run, as far as its events tell."""

    def __init__(self, *, keeps_all: bool = False) -> None:
        """Keep the newest calls and events; with `keeps_all` every one."""
        self._keeps_all = keeps_all
        self._workers: dict[str, _Worker] = {}
        self._nodes: dict[int, NodeView] = {}
        self._events: deque[Event] = deque(maxlen=None if keeps_all else _MOST_EVENTS)
        self._curves: dict[tuple[str, str], _Points] = {}
        self._driver: Process | None = None
        self._driver_lane = _Lane(spans=deque(maxlen=None if keeps_all else _MOST_SPANS))
        self._is_over = False
        """Whether the driver wrote that it stopped, or is known to be gone."""
        self._has_stopped = False
        self._dropped: dict[str, dict[str, int]] = {}
        """By reason and process: how many events are missing."""
        self._hidden = 0
        """Values of metrics for which there is no room here."""
        self.latest = 0.0
        """The time of the newest line; 0 if there is none."""
        self._longest: dict[tuple[str, str], float] = {}
        """By component and method, or by whom was waited for: the longest that ended."""
        self._launched: dict[str, float] = {}
        self._raised: set[tuple[str, str]] = set()
        """By worker and method: exceptions that have lines of their own."""
        self._dead: dict[str, float] = {}
        self._closed: dict[str, float] = {}
        self._restarts: dict[str, int] = {}
        self._skews: dict[str, float] = {}
        self._traffic = Traffic()
        self._loads: dict[int, deque[tuple[float, float, float | None]]] = {}
        self._steps: dict[float, float] = {}
        """By step: when a worker reported a metric of it first."""

    def take(self, lines: Iterable[Line]) -> None:
        """Take lines; the driver's are expected before those of workers that were read at the same time."""
        for line in lines:
            process = line.process
            if self._driver is not None and process.run != self._driver.run and process.who != DRIVER:
                # Of an earlier run in the same folder.
                continue
            try:
                if process.who == DRIVER:
                    self._take_driver(line)
                elif line.kind in ("node", "process") and process.who == f"node {process.node}":
                    self._take_node(line)
                else:
                    self._take_worker(line)
            except (TypeError, ValueError, KeyError, AttributeError, OverflowError):
                self._drop(_ODD, process.who, 1)

    def _drop(self, why: str, who: str, count: int) -> None:
        table = self._dropped.setdefault(why if why in _WHY or why in _RATES else "", {})
        table[who] = table.get(who, 0) + count

    def _take_driver(self, line: Line) -> None:
        who = str(line.name)
        if line.kind == "process":
            if self._driver is not None and self._driver != line.process:
                # The folder is used by a new run.
                self.__init__(keeps_all=self._keeps_all)  # type: ignore[misc]
            self._driver = line.process
        elif line.kind == "stopped":
            self._has_stopped = True
        elif line.kind == "launched":
            self._launched[who] = line.when
            self._closed.pop(who, None)
            for table in (self._dead, self._restarts):
                for address in [address for address in table if _component(address) == who]:
                    # Of an earlier group of that name.
                    del table[address]
        elif line.kind == "closed":
            self._closed[who] = line.when
        elif line.kind == "restarted":
            self._restarts[who] = self._restarts.get(who, 0) + 1
            self._dead.pop(who, None)
        elif line.kind in ("died", "lost"):
            self._dead[who] = line.when
        self._take_common(self._driver_lane, line, line.when)

    def _take_common(self, lane: _Lane, line: Line, when: float) -> None:
        """Take what a worker and the driver write alike; a worker writes `WORDS` of groups that it launched itself."""
        self.latest = max(self.latest, when)
        name, values, address = str(line.name), line.values, line.process.who
        if line.kind == "wait":
            self._take_span(lane, line, when)
        elif line.kind == "waiting":
            lane.waiting.append(_UnderWay(name, when, "aside" in values))
        elif line.kind in KINDS:
            self._traffic.take(line, when)
        elif line.kind in ("metric", "metrics"):
            self._take_metric(lane, line, when)
        elif line.kind == "dropped":
            self._drop(str(values.get("why", "")), address, int(line.name))
        elif line.kind == "raised":
            method, text = str(values.get("method", "")), str(values.get("text", ""))
            self._raised.add((address, method))
            self._events.append(Event(when=when, what="failed", who=name, text=f"in {method}: {text}"))
        elif line.kind in WORDS:
            self._events.append(Event(when=when, what=line.kind, who=name, text=str(values.get("text", ""))))

    def _take_node(self, line: Line) -> None:
        if line.kind == "node" and line.process.node is not None:
            self.latest = max(self.latest, self._when(line))
            data = line.values
            devices = [
                (None if load is None else finite(load), _whole(used), _whole(of))
                for load, used, of in data.get("devices", ())
            ]
            loads = [load for load, _, _ in devices if load is not None]
            points = self._loads.setdefault(line.process.node, deque(maxlen=_MOST_LOADS))
            cpu = finite(line.name)
            points.append((self._when(line), cpu, sum(loads) / len(loads) if loads else None))
            self._nodes[line.process.node] = NodeView(
                rank=line.process.node,
                cpu=cpu,
                memory=int(data["memory"]),
                memory_total=int(data["of"]),
                devices=tuple(devices),
                loads=tuple(points),
            )

    def _take_worker(self, line: Line) -> None:
        address = line.process.who
        if ":" not in address:
            raise ValueError(address)
        worker = self._workers.get(address)
        if line.kind == "process":
            self._note_clock(line.process)
            if worker is not None and worker.process != line.process:
                # The calls of the process before ended with its last line: it died in them.
                for span in self.under_way(address, worker.heard):
                    worker.spans.append(span)
                    if not span.is_aside:
                        worker.busy.add(span)
                worker.process, worker.running, worker.waiting, worker.stopped = line.process, [], [], False
        if worker is None:
            most = None if self._keeps_all else _MOST_SPANS
            worker = self._workers[address] = _Worker(process=line.process, spans=deque(maxlen=most))
        when = self._when(line)
        worker.heard = max(worker.heard, when)
        if line.kind in ("process", "began", "waiting"):
            worker.progress = max(worker.progress, when)
        self._take_common(worker, line, when)
        if line.kind == "call":
            span = worker.last = self._take_span(worker, line, when)
            worker.calls += span.calls
            worker.failed += span.failed
            # Where the exception has a line of its own, that says more.
            if span.failed and (address, span.name) not in self._raised:
                self._events.append(Event(when=span.end, what="failed", who=address, text=f"in {span.name}"))
        elif line.kind == "began":
            worker.running.append(_UnderWay(str(line.name), when))
        elif line.kind == "usage":
            worker.cpu, worker.memory = finite(line.name), _whole(line.values.get("memory"))
        elif line.kind == "stopped":
            worker.stopped = True

    def _take_span(self, lane: _Lane, line: Line, when: float) -> Span:
        """Take a call or a wait that has ended."""
        seconds, is_wait = finite(line.values["d"]), line.kind == "wait"
        span = Span(
            name=str(line.name),
            start=when,
            end=when + seconds,
            calls=int(line.values.get("n", 1)),
            busy=finite(line.values.get("busy", seconds)),
            failed=int(line.values.get("failed", 0)),
            is_wait=is_wait,
            is_aside=is_wait and "aside" in line.values,
        )
        lane.spans.append(span)
        if not span.is_aside:
            lane.busy.add(span)
        lane.heard, lane.progress = max(lane.heard, span.end), max(lane.progress, span.end)
        self.latest = max(self.latest, span.end)
        key = ("" if is_wait else _component(line.process.who), span.name)
        self._longest[key] = max(self._longest.get(key, 0.0), span.busy / max(span.calls, 1))
        if span.calls <= 1:
            # What was announced ends with a line of its own that has the same start.
            items = lane.waiting if is_wait else lane.running
            items[:] = [item for item in items if item.name != span.name or abs(item.since - span.start) > 1e-4]
        return span

    def _take_metric(self, lane: _Lane, line: Line, when: float) -> None:
        found, name = metric_values(line), str(line.name)[:100]
        late = when - line.when
        key = (line.process.who, name)
        if key not in self._curves and len(self._curves) >= _MOST_CURVES:
            self._hidden += len(found)
            return
        points = self._curves.setdefault(key, _Points())
        lane.progress = max(lane.progress, found[-1][2] + late if found else when)
        for step, value, at in found:
            if step is not None and math.isfinite(step) and not line.is_sample:
                self._steps[step] = min(at + late, self._steps.get(step, at + late))
                if len(self._steps) > _MOST_STEPS:
                    del self._steps[next(iter(self._steps))]
            points.add((step, value, at + late))

    def _note_clock(self, process: Process) -> None:
        """Work out how far the clock of a host is from the driver's, if its workers begin at an impossible time."""
        if self._driver is None or process.host == self._driver.host or process.host in self._skews:
            return
        launched = self._launched.get(process.who.rpartition(":")[0])
        if process.wall < self._driver.wall - SKEW_SECONDS:
            self._skews[process.host] = process.wall - self._driver.wall
        elif launched is not None and process.wall > launched + SKEW_SECONDS and process.who not in self._restarts:
            self._skews[process.host] = process.wall - launched

    def _when(self, line: Line) -> float:
        return line.when - self._skews.get(line.process.host, 0.0)

    def spans(self, address: str) -> tuple[Span, ...]:
        """Return the calls and waits of a worker, or the waits of the driver, in the order of their ends."""
        return tuple(self._lane(address).spans)

    def under_way(self, address: str, now: float) -> tuple[Span, ...]:
        """Return the calls and waits that have not ended; in a run that is over they end with the last line."""
        lane = self._lane(address)
        end = min(now, lane.heard) if self._is_over else now
        return tuple(
            Span(
                name=item.name,
                start=item.since,
                end=max(item.since, end),
                busy=max(0.0, end - item.since),
                is_wait=is_wait,
                is_aside=item.is_aside,
            )
            for is_wait, items in ((False, lane.running), (True, lane.waiting))
            for item in items
        )

    def busy_share(self, component: str, start: float, end: float) -> float:
        """Return the share of an interval that the workers of a component spent in calls, waits apart, on average."""
        workers = [address for address in self.addresses if _component(address) == component]
        busy = 0.0
        for address in workers:
            for span in (*self.spans(address), *self.under_way(address, end)):
                inside = max(0.0, min(span.end, end) - max(span.start, start))
                share = min(1.0, span.busy / max(span.end - span.start, 1e-9))
                busy += 0.0 if span.is_aside else -share * inside if span.is_wait else share * inside
        return min(1.0, max(0.0, busy / max((end - start) * len(workers), 1e-9)))

    def _lane(self, address: str) -> _Lane:
        return self._driver_lane if address == DRIVER else self._workers[address]

    @property
    def addresses(self) -> list[str]:
        """The workers, by component in the order of their first appearance, and by rank."""
        order = {name: place for place, name in enumerate(dict.fromkeys(map(_component, self._workers)))}
        return sorted(self._workers, key=lambda address: (order[_component(address)], rank_of(address)))

    @property
    def processes(self) -> Mapping[str, Process]:
        """The process of each worker, the last if it was restarted."""
        return {address: self._workers[address].process for address in self.addresses}

    @property
    def events(self) -> tuple[Event, ...]:
        """The events in words, oldest first."""
        return tuple(sorted(self._events, key=lambda event: event.when))

    def view(self, now: float | None = None, notices: Iterable[str] = (), *, has_ended: bool = False) -> RunView:
        """Return what is known at a moment; without one, at the time of the last line, as for a run that is over.

        `has_ended` says that the driver is gone, though it did not get to write so.
        """
        steps = tuple(
            (step, when - before)
            for (_, before), (step, when) in pairwise(sorted(self._steps.items()))
            if when > before
        )
        self._is_over = self._has_stopped or has_ended
        at = self.latest if now is None or self._is_over else now
        step = None
        if steps and not self._is_over:
            usual = median([took for _, took in steps[-20:]])
            step = StepView(number=steps[-1][0], since=self._steps[steps[-1][0]], usual=usual)
        skewed = [
            f"the clock of {host} differs by about {skew:+.1f} s; its times are corrected"
            for host, skew in self._skews.items()
        ]
        workers = self._stuck_together([self._view_worker(address, at) for address in self.addresses], at)
        lost = [_lost_words(why, table) for why, table in self._dropped.items()]
        if self._hidden:
            lost.append(f"{self._hidden} values of metrics are not shown: there is room for {_MOST_CURVES} curves")
        return RunView(
            now=at,
            began=self._driver.wall if self._driver is not None else self.latest,
            is_over=self._is_over,
            workers=tuple(workers),
            nodes=tuple(self._nodes[rank] for rank in sorted(self._nodes)),
            events=tuple(reversed(self.events)),
            curves=tuple(
                Curve(worker=worker, name=name, points=points.all()) for (worker, name), points in self._curves.items()
            ),
            steps=steps,
            step=step,
            channels=self._traffic.channels(at),
            links=tuple(self._traffic.links.values()),
            engines=self._traffic.engines(at),
            dropped=sum(sum(table.values()) for table in self._dropped.values()),
            lost=tuple(lost),
            notices=(*self._stuck_words(workers, at), *lost, *notices, *skewed),
        )

    def _view_worker(self, address: str, now: float) -> WorkerView:
        worker = self._workers[address]
        process, last = worker.process, worker.last
        state, doing, since, waits_for = self._state(address, worker, now)
        return WorkerView(
            address=address,
            component=_component(address),
            rank=rank_of(address),
            node=process.node,
            devices=process.devices,
            host=process.host,
            pid=process.pid,
            state=state,
            doing=doing,
            waits_for=waits_for,
            since=since,
            progress=worker.progress,
            patience=self._patience(*(("", waits_for) if waits_for else (_component(address), doing))),
            calls=worker.calls,
            failed=worker.failed,
            restarts=self._restarts.get(address, 0),
            idle_share=_idle_share(worker, now, process.wall - self._skews.get(process.host, 0.0)),
            last_seconds=last.busy / last.calls if last is not None else None,
            cpu=worker.cpu,
            memory=worker.memory,
        )

    def _patience(self, component: str, name: str) -> float:
        """Return how long a call or a wait may bring nothing before it counts as stuck."""
        longest = self._longest.get((component, name))
        return FIRST_HANG_SECONDS if longest is None else max(HANG_SECONDS, _HANG_FACTOR * longest)

    def _stuck_together(self, workers: list[WorkerView], now: float) -> list[WorkerView]:
        """Where all wait and nobody works, not even the driver, those that wait are stuck too."""
        waiting = [worker for worker in workers if worker.state is State.WAITING]
        works = any(worker.state in (State.BUSY, State.STUCK, State.SILENT) for worker in workers)
        if not waiting or works or not self._driver_lane.waiting:
            return workers
        quiet = {worker.address: self._workers[worker.address].progress for worker in waiting}
        if any(now - quiet[worker.address] < self._patience("", worker.waits_for) for worker in waiting):
            return workers
        return [
            replace(worker, state=State.STUCK, since=quiet[worker.address]) if worker in waiting else worker
            for worker in workers
        ]

    def _stuck_words(self, workers: Sequence[WorkerView], now: float) -> list[str]:
        stuck = [worker for worker in workers if worker.state is State.STUCK]
        lines = []
        for worker in stuck[:2]:
            longest = self._longest.get(
                ("", worker.waits_for) if worker.waits_for else (worker.component, worker.doing)
            )
            usual = "" if longest is None else f"; none before took more than {longest:.3g} s"
            what = f"waits for {worker.waits_for}" if worker.waits_for else f"is in {worker.doing}"
            lines.append(f"{worker.address} {what} without progress for {now - worker.since:.0f} s{usual}")
        more = [f"{len(stuck) - 2} more workers are stuck"] if len(stuck) > 2 else []
        return [*lines, *more]

    def _state(self, address: str, worker: _Worker, now: float) -> tuple[State, str, float, str]:
        """Return the state of a worker, its method, since when, and for whom it waits."""
        last = worker.last
        doing, ended = (last.name, last.end) if last is not None else ("", worker.process.wall)
        group = _component(address)
        if address in self._dead:
            return State.DEAD, doing, self._dead[address], ""
        if group in self._closed or worker.stopped:
            return State.ENDED, doing, self._closed.get(group, worker.heard), ""
        if self._is_over:
            return State.ENDED, doing, worker.heard, ""
        running = worker.running[-1] if worker.running else None
        # While a call runs, a thread that waits beside it changes nothing.
        waits = [item for item in worker.waiting if running is None or not item.is_aside]
        method = doing if running is None else running.name
        if now - worker.heard > SILENT_SECONDS:
            return State.SILENT, method, worker.heard, ""
        if waits:
            return State.WAITING, method, waits[-1].since, waits[-1].name
        if running is not None and now - worker.progress > self._patience(group, method):
            return State.STUCK, method, worker.progress, ""
        if running is not None:
            return State.BUSY, method, running.since, ""
        if self._traffic.is_asleep(address):
            return State.ASLEEP, doing, ended, ""
        # Between short calls: what it did for most of the last moment, as its lane shows.
        at = max(now, ended)
        recent = worker.busy.between(at - RECENT_SECONDS, at)
        if last is not None and now - last.end < RECENT_SECONDS and recent >= RECENT_SECONDS / 2:
            return State.BUSY, doing, last.start, ""
        return State.IDLE, doing, ended, ""


def _idle_share(worker: _Worker, now: float, began: float) -> float:
    start = max(now - WINDOW_SECONDS, began)
    if now <= start:
        return 0.0
    waits = [item for item in worker.waiting if not item.is_aside]
    busy = sum(max(0.0, now - max(item.since, start)) for item in worker.running[-1:])
    busy -= sum(max(0.0, now - max(item.since, start)) for item in waits[-1:])
    share = 1 - (busy + worker.busy.between(start, now)) / (now - start)
    return min(1.0, max(0.0, share)) if math.isfinite(share) else 0.0


def _lost_words(why: str, by_process: Mapping[str, int]) -> str:
    """Say what is missing, and why."""
    count, who = sum(by_process.values()), join_words(list(by_process), most=3)
    if not why.startswith(_RATE):
        return _WHY[why].format(count=count)
    rate = why.removeprefix(_RATE)
    reason = f"{who} logged more than {rate} a second"
    if rate != str(RATES[0][1]):
        reason += f", which is what a file of metrics takes after {RATES[0][0]:,} values"
    return f"{count} values of metrics were left out: {reason}"


def _whole(value: object) -> int | None:
    return None if value is None else int(finite(value))


def _component(address: str) -> str:
    return address.rpartition(":")[0]
