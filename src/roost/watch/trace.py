"""A run as a trace that Perfetto and Chrome open, made from its events."""

from __future__ import annotations

import json

from roost.watch.model import RunModel


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
    for number, (address, process) in enumerate(processes.items()):
        place = {"pid": process.node or 0, "tid": number}
        events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": address}})
        events.append({"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": number}})
        for span in spans[address]:
            when = {"ts": round((span.start - start) * 1e6), "dur": round((span.end - span.start) * 1e6)}
            args = {"calls": span.calls, "busy seconds": round(span.busy, 6), "failed": span.failed}
            cat = "wait" if span.is_wait else address.rpartition(":")[0]
            name = f"waits for {span.name}" if span.is_wait else span.name
            events.append({"ph": "X", "name": name, "cat": cat, **when, **place, "args": args})
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
