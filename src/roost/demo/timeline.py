"""What each worker did, and when: spans that workers record, merged, and written as a trace that Perfetto opens."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

_MERGE_SECONDS = 0.02
"""Calls with the same name that are closer together than this become one span."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One call, or several in close succession; times are in seconds since the epoch."""

    name: str
    start: float
    end: float
    calls: int = 1
    busy: float = 1.0
    """The fraction of the time spent inside the calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """An event at one moment."""

    name: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """The spans of one worker."""

    worker: str
    component: str
    node: int
    spans: tuple[Span, ...]

    def at_work(self, start: float, end: float) -> float:
        """Return the fraction of an interval that the spans fill."""
        if end <= start:
            return 0.0
        return sum(max(0.0, min(span.end, end) - max(span.start, start)) for span in self.spans) / (end - start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The tracks of a run, in the order of the workers, and its events."""

    tracks: tuple[Track, ...]
    marks: tuple[Mark, ...] = ()

    @classmethod
    def of(cls, spans: Mapping[str, Sequence[Span]], nodes: Mapping[str, int], marks: Sequence[Mark] = ()) -> Timeline:
        """Make a timeline from the spans and the node of each worker, in the order of `nodes`."""
        tracks = (
            Track(worker=worker, component=worker.rpartition(":")[0], node=node, spans=tuple(spans.get(worker, ())))
            for worker, node in nodes.items()
        )
        return cls(tracks=tuple(tracks), marks=tuple(marks))

    @property
    def start(self) -> float:
        """The start of the first span."""
        return min((span.start for track in self.tracks for span in track.spans), default=0.0)

    @property
    def end(self) -> float:
        """The end of the last span."""
        return max((span.end for track in self.tracks for span in track.spans), default=self.start)

    def at_work(self, component: str, start: float, end: float) -> float:
        """Return the fraction of an interval in which the workers of a component were at work, on average.

        >>> track = Track(worker="actor:0", component="actor", node=0, spans=(Span(name="learn", start=1, end=2),))
        >>> Timeline(tracks=(track,)).at_work("actor", 0, 4)
        0.25
        """
        tracks = [track for track in self.tracks if track.component == component]
        return sum(track.at_work(start, end) for track in tracks) / len(tracks) if tracks else 0.0

    def to_trace(self) -> str:
        """Return the run as a Chrome trace: a process for each node, a thread for each worker."""
        start = self.start
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "process_name", "pid": node, "tid": 0, "args": {"name": f"node {node}"}}
            for node in sorted({track.node for track in self.tracks})
        ]
        for number, track in enumerate(self.tracks):
            place = {"pid": track.node, "tid": number}
            events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": track.worker}})
            events.append({"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": number}})
            for span in track.spans:
                when = {"ts": round((span.start - start) * 1e6), "dur": round((span.end - span.start) * 1e6)}
                args = {"calls": span.calls, "busy": round(span.busy, 3)}
                events.append({"ph": "X", "name": span.name, "cat": track.component, **when, **place, "args": args})
        events += [
            {"ph": "i", "s": "g", "name": mark.name, "ts": round((mark.at - start) * 1e6), "pid": 0, "tid": 0}
            for mark in self.marks
        ]
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


class SpanRecorder:
    """Records what one process does; calls in close succession become one span."""

    def __init__(self) -> None:
        self._spans: list[Span] = []

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record the body of the `with` statement."""
        start = time.time()
        try:
            yield
        finally:
            self.note(Span(name=name, start=start, end=time.time()))

    def note(self, span: Span) -> None:
        """Add a span, or extend the last one."""
        last = self._spans[-1] if self._spans else None
        if last is not None and last.name == span.name and 0 <= span.start - last.end < _MERGE_SECONDS:
            inside = last.busy * (last.end - last.start) + span.busy * (span.end - span.start)
            whole = max(span.end - last.start, 1e-9)
            self._spans[-1] = replace(last, end=span.end, calls=last.calls + span.calls, busy=inside / whole)
        else:
            self._spans.append(span)

    @property
    def spans(self) -> list[Span]:
        """Those since `take` was called last."""
        return [*self._spans]

    def take(self) -> list[Span]:
        """Return the spans since the last call."""
        taken, self._spans = self._spans, []
        return taken
