"""The curves of a run, for the page and the terminal: plain data, with bounds on how much it can be. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from roost.watch.views import Curve, RunView

_MOST_CHARTS = 24
_MOST_SERIES = 8
_MOST_POINTS = 300

Points = Sequence[tuple[float, float]]


def chart_facts(view: RunView, bound: float | None = None) -> list[dict[str, Any]]:
    """Return the charts of the page: each has a title, a unit, what its x axis is, and named series of points.

    `bound` is the least time that a step can take, from `roost search`.
    """
    out = []
    nodes = [(f"node {node.rank}", node.loads) for node in view.nodes]
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
            (
                "Load of devices",
                "%",
                [(name, [(at, 100 * x) for at, _, x in some if x is not None]) for name, some in nodes],
            ),
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
        label = f"mean of {len(some)} workers" if len(some) > 1 else some[0].worker
        out.append(_chart(name, "", "step" if has_steps else "time", [(label, joined(some))]))
    return out


def joined(curves: Sequence[Curve]) -> list[tuple[float, float]]:
    """Return steps, or times where there are none, with the mean value of the workers; only finite numbers."""
    found: dict[float, list[float]] = {}
    for curve in curves:
        for step, value, when in curve.points:
            if math.isfinite(value) and math.isfinite(step or 0.0):
                found.setdefault(when if step is None else step, []).append(value)
    return [(key, sum(some) / len(some)) for key, some in sorted(found.items())]


def _chart(
    title: str, unit: str, axis: str, series: Iterable[tuple[str, Points]], bound: float | None = None
) -> dict[str, Any]:
    lines = [{"name": name, "points": _thinned(points)} for name, points in list(series)[:_MOST_SERIES]]
    return {
        "title": title,
        "unit": unit,
        "axis": axis,
        "series": [line for line in lines if line["points"]],
        "bound": bound,
    }


def _thinned(points: Points) -> list[list[float]]:
    found = [[x, y] for x, y in points if math.isfinite(x) and math.isfinite(y)]
    every = max(1, math.ceil(len(found) / _MOST_POINTS))
    # The newest point is always one of them.
    return found[::-1][::every][::-1]
