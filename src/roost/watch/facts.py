"""A run as plain data for the page, and its curves for the terminal too, with bounds on how much it can be. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from roost.runtime.events.format import DRIVER
from roost.watch.model import RunModel
from roost.watch.views import Curve, Layout, RunView, Span, Verdict

MOST_DETAIL = 512
"""With more workers than this the page gets one entry for each node, and detail of the nodes that it asks for."""
_MOST_EVENTS = 100
_MOST_LANES = 65
_MOST_ROWS = 64
_MOST_CHARACTERS = 300
_MOST_CHARTS = 24
_MOST_SERIES = 8
_MOST_POINTS = 300
_WORKER = (
    "address component rank node devices host pid state doing waits_for since calls failed restarts idle_share "
    "last_seconds cpu memory"
)
_CHANNEL = "name depth most puts_per_second gets_per_second getters putters"
_LINK = "name version updated seconds pause size"
_ENGINE = "worker version behind is_asleep busy served failed per_second latency"
_EVENT = "when what who text"
_STEP = "number since usual"

Points = Sequence[tuple[float, float]]
_NO_LAYOUT = Layout()


def page_facts(
    view: RunView, *, title: str, status: str, node: int | None = None, layout: Layout = _NO_LAYOUT
) -> dict[str, Any]:
    """Return what the page draws; of a large run the workers of one node only."""
    names = dict.fromkeys([*layout.components, *[worker.component for worker in view.workers]])
    is_large = len(view.workers) > MOST_DETAIL
    shown = [worker for worker in view.workers if not is_large or worker.node == node][:MOST_DETAIL]
    return {
        "title": title,
        "status": status,
        "now": _number(view.now),
        "began": _number(view.began),
        "over": view.is_over,
        "counts": {str(state): count for state, count in view.counts.items()},
        "workers": [_fields(worker, _WORKER) for worker in shown],
        "nodes": _nodes(view, layout),
        "colours": {name: place for place, name in enumerate(names)},
        "large": is_large,
        "step": _fields(view.step, _STEP) if view.step else None,
        "channels": [_fields(item, _CHANNEL) for item in view.channels[:_MOST_ROWS]],
        "links": [_fields(item, _LINK) for item in view.links[:_MOST_ROWS]],
        "engines": [_fields(item, _ENGINE) for item in view.engines[:_MOST_ROWS]],
        "events": [_fields(event, _EVENT) for event in view.events[:_MOST_EVENTS]],
        "notices": list(view.notices),
        "verdict": _verdict(view.verdict),
    }


def run_facts(view: RunView) -> dict[str, Any]:
    """Return a run as `roost top --json` has it: all of its workers, and the last value of each metric."""
    metrics: dict[str, dict[str, float | None]] = {}
    for curve in view.curves:
        metrics.setdefault(curve.name, {})[curve.worker] = _number(curve.points[-1][1]) if curve.points else None
    verdict = view.verdict if view.verdict is not None and view.verdict.evidence else None
    return {
        "now": _number(view.now),
        "began": _number(view.began),
        "is_over": view.is_over,
        "limits": _fields(verdict, "limit sentence evidence is_sure who") if verdict else None,
        "step": _fields(view.step, _STEP) if view.step else None,
        "workers": [_fields(worker, _WORKER) for worker in view.workers],
        "nodes": [_fields(node, "rank cpu memory memory_total devices") for node in view.nodes],
        "channels": [_fields(item, _CHANNEL) for item in view.channels],
        "links": [_fields(item, _LINK) for item in view.links],
        "engines": [_fields(item, _ENGINE) for item in view.engines],
        "metrics": metrics,
        "events": [_fields(event, _EVENT) for event in view.events],
        "notices": list(view.notices),
    }


def _verdict(verdict: Verdict | None) -> dict[str, Any] | None:
    """Return what limits the run; None while nobody knows."""
    if verdict is None or not verdict.evidence:
        return None
    lines = [line[:_MOST_CHARACTERS] for line in verdict.evidence]
    who = [worker for worker in verdict.who if ":" in worker][:_MOST_SERIES]
    return {"limit": verdict.limit, "text": str(verdict)[:_MOST_CHARACTERS], "evidence": lines, "workers": who}


def _fields(item: object, names: str) -> dict[str, Any]:
    """Return the named attributes as JSON has them: short texts, finite and rounded numbers."""
    found: dict[str, Any] = {}
    for name in names.split():
        value = getattr(item, name)
        if isinstance(value, str):
            found[name] = str(value)[:_MOST_CHARACTERS]
        else:
            found[name] = _number(value) if isinstance(value, float) else value
    return found


def _nodes(view: RunView, layout: Layout) -> list[dict[str, Any]]:
    samples = {node.rank: node for node in view.nodes}
    by_node: dict[int, dict[str, int]] = {rank: {} for rank in [*samples, *layout.columns]}
    columns = Counter({node.rank: len(node.devices) for node in view.nodes}) | Counter(layout.columns)
    for worker in view.workers:
        columns[worker.node or 0] = max([columns[worker.node or 0], *[device + 1 for device in worker.devices]])
        counts = by_node.setdefault(worker.node or 0, {})
        counts[str(worker.state)] = counts.get(str(worker.state), 0) + 1
    out = []
    for rank, counts in sorted(by_node.items()):
        shown: dict[str, Any] = {"cpu": None, "memory": None, "of": None, "devices": []}
        if (sample := samples.get(rank)) is not None:
            devices = [[_number(load), used, of] for load, used, of in sample.devices]
            shown = {"cpu": _number(sample.cpu), "memory": sample.memory, "of": sample.memory_total, "devices": devices}
        out.append({"rank": rank, "columns": columns[rank], "counts": counts, **shown})
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


def chart_facts(view: RunView, bound: float | None = None) -> list[dict[str, Any]]:
    """Return the charts of the page: each has a title, a unit, what its x axis is, and named series of points.

    `bound` is the least time that a step can take, from `roost search`.
    """
    out = []
    nodes = [(f"node {node.rank}", node.loads) for node in view.nodes]
    loads = [(name, [(at, 100 * x) for at, _, x in some if x is not None]) for name, some in nodes]
    if view.steps:
        steps = [*view.steps]
        # One that takes longer than usual grows before it ends.
        if view.step is not None and view.now - view.step.since > view.step.usual:
            steps.append((view.step.number + 1, view.now - view.step.since))
        out.append(_chart("Step time", "s", "step", [("step", steps)], bound=bound))
    out += metric_facts(view.curves)
    out += [
        _chart(title, unit, "time", series)
        for title, unit, series in (
            ("Items in channels", "", [(item.name, item.depths) for item in view.channels]),
            ("Requests per second", "", [(item.worker, item.rates) for item in view.engines]),
            ("Latency of requests", "s", [(item.worker, item.latencies) for item in view.engines]),
            ("Updates of weights", "s", [(item.name, item.updates) for item in view.links]),
            ("Load of devices", "%", loads),
            ("CPU", "%", [(name, [(at, 100 * cpu) for at, cpu, _ in some]) for name, some in nodes]),
        )
        if any(len(points) > 1 for _, points in series)
    ]
    return out


def metric_facts(curves: Iterable[Curve]) -> list[dict[str, Any]]:
    """Return a chart for each metric: the mean over the workers that report the same step."""
    by_name: dict[str, list[Curve]] = {}
    for curve in curves:
        by_name.setdefault(curve.name, []).append(curve)
    out = []
    for name, some in list(by_name.items())[:_MOST_CHARTS]:
        has_steps = any(step is not None for curve in some for step, _, _ in curve.points)
        roles = {curve.worker.rpartition(":")[0] for curve in some}
        label = f"mean of {len(some)} workers" if len(some) > 1 else some[0].worker
        made = _chart(name, "", "step" if has_steps else "time", [(label, joined(some))])
        for line in made["series"] if len(roles) == 1 else ():
            line["role"] = min(roles)
        out.append(made)
    return out


def joined(curves: Sequence[Curve]) -> list[tuple[float, float]]:
    """Return steps, or times where there are none, with the mean value of the workers; only finite numbers."""
    found: dict[float, list[float]] = {}
    for curve in curves:
        for step, value, when in curve.points:
            if math.isfinite(value) and math.isfinite(step or 0.0):
                found.setdefault(when if step is None else step, []).append(value)
    return [(key, sum(value / len(some) for value in some)) for key, some in sorted(found.items())]


def _chart(
    title: str, unit: str, axis: str, series: Iterable[tuple[str, Points]], bound: float | None = None
) -> dict[str, Any]:
    lines = []
    for name, points in list(series)[:_MOST_SERIES]:
        found = [[x, y] for x, y in points if math.isfinite(x) and math.isfinite(y)]
        every = max(1, math.ceil(len(found) / _MOST_POINTS))
        if found:
            # The newest point is always one of them.
            lines.append({"name": name, "role": name.rpartition(":")[0], "points": found[::-1][::every][::-1]})
    return {"title": title, "unit": unit, "axis": axis, "series": lines, "bound": bound}


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 4)
