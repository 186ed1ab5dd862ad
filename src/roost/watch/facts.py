"""A run as plain data for the page, with bounds on its size. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from roost.runtime.events.format import DRIVER
from roost.watch.model import RunModel
from roost.watch.views import RunView, Span, State

MOST_DETAIL = 512
"""With more workers than this the page gets one entry for each node, and detail of the nodes that it asks for."""
_MOST_EVENTS = 100
_MOST_LANES = 65
_MOST_ROWS = 64
_MOST_CHARACTERS = 300
_WORKER = (
    "address component rank node devices host pid state doing waits_for since calls failed restarts idle_share "
    "last_seconds cpu memory"
)
_CHANNEL = "name depth most puts_per_second gets_per_second getters putters"
_LINK = "name version updated seconds pause size"
_ENGINE = "worker version behind is_asleep busy served failed per_second latency"
_EVENT = "when what who text"


def page_facts(view: RunView, *, title: str, status: str, node: int | None = None) -> dict[str, Any]:
    """Return what the page draws; of a large run the workers of one node only."""
    is_large = len(view.workers) > MOST_DETAIL
    shown = [worker for worker in view.workers if not is_large or worker.node == node][:MOST_DETAIL]
    return {
        "title": title,
        "status": status,
        "now": _number(view.now),
        "began": _number(view.began),
        "over": view.is_over,
        "counts": {str(state): sum(worker.state is state for worker in view.workers) for state in State},
        "workers": [_fields(worker, _WORKER) for worker in shown],
        "nodes": _nodes(view),
        "large": is_large,
        "step": _fields(view.step, "number since usual") if view.step else None,
        "channels": [_fields(item, _CHANNEL) for item in view.channels[:_MOST_ROWS]],
        "links": [_fields(item, _LINK) for item in view.links[:_MOST_ROWS]],
        "engines": [_fields(item, _ENGINE) for item in view.engines[:_MOST_ROWS]],
        "events": [_fields(event, _EVENT) for event in view.events[:_MOST_EVENTS]],
        "notices": list(view.notices),
    }


def _fields(item: object, names: str) -> dict[str, Any]:
    """Return the named attributes as JSON has them: short texts, finite and rounded numbers."""
    return {name: _plain(getattr(item, name)) for name in names.split()}


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return str(value)[:_MOST_CHARACTERS]
    return _number(value) if isinstance(value, float) else value


def _nodes(view: RunView) -> list[dict[str, Any]]:
    samples = {node.rank: node for node in view.nodes}
    by_node: dict[int, dict[str, int]] = {rank: {} for rank in samples}
    for worker in view.workers:
        counts = by_node.setdefault(worker.node or 0, {})
        counts[str(worker.state)] = counts.get(str(worker.state), 0) + 1
    out = []
    for rank, counts in sorted(by_node.items()):
        sample = samples.get(rank)
        out.append(
            {
                "rank": rank,
                "counts": counts,
                "cpu": _number(sample.cpu) if sample else None,
                "memory": sample.memory if sample else None,
                "of": sample.memory_total if sample else None,
                "devices": [[_number(load), used, of] for load, used, of in sample.devices] if sample else [],
            }
        )
    return out


def lane_facts(
    model: RunModel, view: RunView, start: float, end: float, addresses: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the calls and waits of some workers between two times; those too short to see are merged."""
    least = max((end - start) / 800, 1e-6)
    views = {worker.address: worker for worker in view.workers}
    out = []
    for address in [address for address in addresses if address in views or address == DRIVER][:_MOST_LANES]:
        known = [*model.spans(address), *model.under_way(address, view.now)]
        seen = [span for span in known if span.end >= start and span.start <= end]
        calls = _merged((span for span in seen if not span.is_wait), least)
        waits = _merged((span for span in seen if span.is_wait), least)
        worker = views.get(address)
        out.append(
            {
                "address": address,
                "idle": None if worker is None else _number(worker.idle_share),
                "spans": [
                    [round(a - start, 4), round(b - start, 4), name[:200], count, round(share, 3), failed, is_wait]
                    for is_wait, spans in ((0, calls), (1, waits))
                    for a, b, name, count, share, failed in spans
                ],
            }
        )
    return out


def _merged(spans: Iterable[Span], least: float) -> list[tuple[float, float, str, int, float, int]]:
    """Join neighbours of one name that are closer together than `least`: start, end, name, calls, share, failed."""
    out: list[tuple[float, float, str, int, float, int]] = []
    for span in sorted(spans, key=lambda item: item.start):
        whole = max(span.end - span.start, 1e-9)
        if out and out[-1][2] == span.name and span.start - out[-1][1] < least:
            a, b, name, calls, share, failed = out[-1]
            end = max(b, span.end)
            busy = share * (b - a) + span.busy
            out[-1] = (a, end, name, calls + span.calls, min(1.0, busy / max(end - a, 1e-9)), failed + span.failed)
        else:
            out.append((span.start, span.end, span.name, span.calls, min(1.0, span.busy / whole), span.failed))
    return out


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 4)
