"""A run as a trace that Perfetto and Chrome open, made from its events."""

from __future__ import annotations

import json
from collections.abc import Iterable

from roost.watch.model import RunModel
from roost.watch.views import Span

_Slice = tuple[int, int, Span]
"""Its beginning and end in microseconds."""


def to_trace(model: RunModel) -> str:
    """Return what a model knows as a Chrome trace."""
    processes = model.processes
    spans = {address: model.spans(address) for address in processes}
    starts = [span.start for some in spans.values() for span in some] + [event.when for event in model.events]
    start = min(starts, default=0.0)
    nodes = sorted({process.node or 0 for process in processes.values()})
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": node, "tid": 0, "args": {"name": f"node {node}"}} for node in nodes
    ]
    thread = 0
    for address, process in processes.items():
        for track, slices in enumerate(_nested(spans[address], start)):
            place = {"pid": process.node or 0, "tid": thread}
            name = f"{address} ({track + 1})" if track else address
            events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": name}})
            events.append({"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": thread}})
            thread += 1
            for begin, end, span in slices:
                args = {"calls": span.calls, "busy seconds": round(span.busy, 6), "failed": span.failed}
                cat = "wait" if span.is_wait else address.rpartition(":")[0]
                name = f"waits for {span.name}" if span.is_wait else span.name
                slice_ = {"ph": "X", "name": name, "cat": cat, "ts": begin, "dur": end - begin, **place, "args": args}
                events.append(slice_)
    events += [
        {
            "ph": "i",
            "s": "g",
            "name": f"{event.who} {event.what}",
            "ts": round((event.when - start) * 1e6),
            "pid": nodes[0] if nodes else 0,
            "tid": 0,
            "args": {"text": event.text},
        }
        for event in model.events
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _nested(spans: Iterable[Span], start: float) -> list[list[_Slice]]:
    """Return spans in as many tracks as they need to be one inside the other or apart: Perfetto drops any other slice.

    Calls of an asynchronous worker overlap, and so does a line of several waits.
    """
    ends = [(round((span.start - start) * 1e6), round((span.end - start) * 1e6), span) for span in spans]
    tracks: list[list[_Slice]] = [[]]
    open_: list[list[int]] = [[]]
    for begin, end, span in sorted(ends, key=lambda item: (item[0], -item[1])):
        for around in open_:
            while around and around[-1] <= begin:
                around.pop()
        place = next((place for place, around in enumerate(open_) if not around or end <= around[-1]), len(tracks))
        if place == len(tracks):
            tracks.append([])
            open_.append([])
        tracks[place].append((begin, end, span))
        open_[place].append(end)
    return tracks
