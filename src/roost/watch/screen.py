"""A run on a terminal of a given size: the map by node, the workers and their processes, metrics, events. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from roost.text import at_most, plural, printable
from roost.watch.facts import joined
from roost.watch.views import Curve, Limit, RunView, State, WorkerView

_STYLES = {
    State.BUSY: "green",
    State.WAITING: "dark_orange",
    State.IDLE: "yellow",
    State.SILENT: "magenta",
    State.STUCK: "bold red",
    State.ASLEEP: "blue",
    State.DEAD: "bold red",
    State.ENDED: "dim",
}
_MARKS = {
    State.BUSY: "■",
    State.WAITING: "~",
    State.IDLE: "·",
    State.SILENT: "?",
    State.STUCK: "!",
    State.ASLEEP: "z",
    State.DEAD: "x",
    State.ENDED: "-",
}
"""Nothing depends on colour alone."""
_ALARMS = (Limit.DEATH, Limit.HANG)
_ODD = (State.DEAD, State.STUCK, State.SILENT)
_EVENT_STYLES = {"died": "bold red", "lost": "bold red", "failed": "red", "restarted": "yellow"}
_BARS = "▁▂▃▄▅▆▇█"
_LEAST_WIDTH = 40
_MOST_NOTICES = 3


def draw_screen(view: RunView, *, title: str, status: str, width: int = 80, height: int = 24) -> Text:
    """Return the run as styled text: at most `height` lines, none wider than `width`."""
    width = max(_LEAST_WIDTH, width)
    head = _head(view, title, status)
    body_lines = max(4, height - len(head) - len(view.notices[:_MOST_NOTICES]))
    rows = _map(view, width)
    # The map has half of the screen at most; what remains is shared by the other parts.
    rows = _cut_lines(rows, max(2, body_lines // 2), "more nodes")
    left = body_lines - len(rows)
    workers = _workers(view, max(0, min(10, left // 2)), width)
    queues = _cut_lines(_traffic(view), max(0, min(4, (left - len(workers)) // 3)), "more queues and engines")
    left -= len(workers) + len(queues)
    metrics = _metrics(view.curves, max(0, min(6, left // 2)), width)
    events = []
    for event in view.events[: max(0, left - len(metrics))]:
        when, what = time.strftime("%H:%M:%S", time.localtime(event.when)), f"{printable(event.who)} {event.what}"
        styled = (what, _EVENT_STYLES.get(event.what, ""))
        events.append(Text.assemble((f"{when} ", "dim"), styled, f"  {printable(event.text)}"))
    notices = [Text(f"! {notice}", style="yellow") for notice in view.notices[:_MOST_NOTICES]]
    lines = [*head, *rows, *workers, *queues, *metrics, *events, *notices][:height]
    for line in lines:
        line.rstrip()
        line.truncate(width, overflow="ellipsis" if cell_len(line.plain) > width else "fold")
    return Text("\n").join(lines)


def _head(view: RunView, title: str, status: str) -> list[Text]:
    parts: list[str | tuple[str, str]] = [plural(len(view.workers), "worker")]
    for state, count in view.counts.items():
        if count:
            parts += ["  ", (f"{_MARKS[state]} {count} {state}", _STYLES[state])]
    first = Text.assemble((printable(title), "bold"), f"  {printable(status)}  {_span(view.now - view.began)}")
    if view.step is not None:
        now = view.now - view.step.since
        parts.append(f"  step {view.step.number + 1:g} for {_span(now)}, usually {_span(view.step.usual)}")
    lines = [first, Text.assemble(*parts)]
    if view.verdict is not None and view.verdict.evidence:
        style = "bold red" if view.verdict.limit in _ALARMS else "bold" if view.verdict.is_sure else ""
        lines.append(Text(f"» {printable(str(view.verdict))}", style=style))
        lines.append(Text(f"  {printable('; '.join(view.verdict.evidence))}", style="dim"))
    return lines


def _map(view: RunView, width: int) -> list[Text]:
    """Draw a line for each node, with a mark for each of its workers."""
    samples = {node.rank: node for node in view.nodes}
    by_node: dict[int, list[WorkerView]] = {}
    for worker in view.workers:
        by_node.setdefault(worker.node or 0, []).append(worker)
    lines = []
    for node in sorted(by_node.keys() | samples.keys()):
        line = Text.assemble((f"node {node:<4}", "bold"))
        if (sample := samples.get(node)) is not None:
            line.append(f"cpu {sample.cpu:4.0%} {_gib(sample.memory)}/{_gib(sample.memory_total)}G ", style="dim")
            loads = [load for load, _, _ in sample.devices if load is not None]
            if loads:
                line.append(f"gpu {sum(loads) / len(loads):4.0%} ", style="dim")
        by_component: dict[str, list[WorkerView]] = {}
        for worker in by_node.get(node, ()):
            by_component.setdefault(worker.component, []).append(worker)
        for component, workers in by_component.items():
            line.append(f" {_cell(component, 12).rstrip()} ")
            shown = workers[: max(1, width // 2)]
            for worker in shown:
                line.append(_MARKS[worker.state], style=_STYLES[worker.state])
            if len(workers) > len(shown):
                line.append(f" +{len(workers) - len(shown)}", style="dim")
        lines.append(line)
    return lines


def _workers(view: RunView, rows: int, width: int) -> list[Text]:
    """List workers with their processes: dead, stuck and silent ones first, then from the busiest to the idlest."""
    odd = [worker for worker in view.workers if worker.state in _ODD]
    alive = [worker for worker in view.workers if worker.state not in (*_ODD, State.ENDED)]
    if rows < 2 or not odd + alive:
        return []
    # Of equally idle workers, the waiting ones are more interesting.
    ordered = [*odd, *sorted(alive, key=lambda worker: (worker.idle_share, worker.state is State.WAITING))]
    name = min(24, max(8, width - 46), max(cell_len(printable(worker.address)) for worker in ordered))
    lines = [Text(f"  {'worker':<{name}} node     pid  memory   cpu  busy", style="dim")]
    if (left := len(ordered) - (rows - 1)) > 0:
        # The middle is the least interesting part.
        last = (rows - 2) // 2
        first = rows - 2 - last
        lines += [_worker_line(worker, view.now, name) for worker in ordered[:first]]
        lines.append(Text(f"  … {left + 1} more in between", style="dim"))
        ordered = ordered[len(ordered) - last :]
    return lines + [_worker_line(worker, view.now, name) for worker in ordered]


def _worker_line(worker: WorkerView, now: float, width: int) -> Text:
    doing = printable(worker.doing) if worker.state is State.BUSY else str(worker.state)
    if worker.state is State.WAITING:
        doing = f"waits for {printable(worker.waits_for)}"
    elif worker.state is State.STUCK:
        doing = f"stuck in {printable(worker.doing)}"
    restarts = f" r{worker.restarts}" if worker.restarts else ""
    node = "-" if worker.node is None else worker.node
    memory = "-" if worker.memory is None else f"{_gib(worker.memory)}G"
    cpu = "-" if worker.cpu is None else f"{worker.cpu:.0%}"
    text = (
        f"{_cell(worker.address, width)} {node:>4} {worker.pid:>7} {memory:>7} {cpu:>5} {1 - worker.idle_share:>5.0%}"
    )
    text += f"  {doing} {_span(now - worker.since)}{restarts}"
    return Text.assemble((f"{_MARKS[worker.state]} ", _STYLES[worker.state]), text)


def _traffic(view: RunView) -> list[Text]:
    """Show what goes between the workers: a line for each channel, link of weights and engine."""
    lines = []
    for channel in view.channels:
        of = "" if channel.most is None else f"/{channel.most}"
        rates = f"+{channel.puts_per_second:.3g}/s -{channel.gets_per_second:.3g}/s"
        gets = f" {channel.getters} gets wait" if channel.getters else ""
        puts = f" {channel.putters} puts wait" if channel.putters else ""
        lines.append(
            Text.assemble((_cell(channel.name, 18), "bold"), f" {channel.depth}{of} items  {rates}{gets}{puts}")
        )
    for engine in view.engines:
        version = "no weights" if engine.version is None else f"weights {engine.version}"
        late = f", {engine.behind} behind" if engine.behind else ""
        rate = "" if engine.per_second is None else f"  {engine.per_second:.3g} requests/s"
        latency = "" if engine.latency is None else f" in {engine.latency:.2g} s"
        lines.append(Text.assemble((_cell(engine.worker, 18), "bold"), f" {version}{late}{rate}{latency}"))
    return lines


def _metrics(curves: Sequence[Curve], rows: int, width: int) -> list[Text]:
    """Show the last values of each metric, averaged over workers that report the same step, as small bars."""
    if rows < 1 or not curves:
        return []
    by_name: dict[str, list[Curve]] = {}
    for curve in curves:
        by_name.setdefault(curve.name, []).append(curve)
    lines = []
    for name, some in by_name.items():
        values = [value for _, value in joined(some)]
        if values:
            shown = values[-max(8, width - 45) :]
            low, high = min(shown), max(shown)
            # Halves, since what is between two numbers may be none.
            span = high / 2 - low / 2 or 1.0
            drawn = "".join(_BARS[round((value / 2 - low / 2) / span * (len(_BARS) - 1))] for value in shown)
            lines.append(Text.assemble((_cell(name, 18), "bold"), f" {values[-1]:>11.5g} ", (drawn, "cyan")))
    return _cut_lines(lines, rows, "more metrics")


def _cut_lines(lines: list[Text], most: int, what: str) -> list[Text]:
    if len(lines) <= most:
        return lines
    if most < 1:
        return []
    *_, more = at_most(["" for _ in lines], most - 1, f"and {len(lines) - most + 1} {what}")
    return [*lines[: most - 1], Text(more, style="dim")]


def _cell(text: str, width: int) -> str:
    text = printable(text)
    return set_cell_size(text, width) if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


def _gib(mebibytes: int) -> str:
    return f"{mebibytes / 1024:.0f}" if mebibytes >= 10240 else f"{mebibytes / 1024:.1f}"


def _span(seconds: float) -> str:
    """Return a duration for people.

    >>> _span(3.14159), _span(75), _span(3700)
    ('3.1s', '1m15s', '1h01m')
    """
    seconds = max(0.0, seconds)
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m{rest:02}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02}m"
