"""`roost show`: all that is known about a run, and the map of its plan; or what its workers did, as a trace."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from roost.cli.completion import Run
from roost.cli.options import Out, TextForm
from roost.cli.out import as_json, write_text
from roost.cli.plans import saved_plan
from roost.cli.terminal import draw_map, facts, print_text, titled
from roost.errors import ConfigError
from roost.render.grid import make_grid
from roost.render.svg import draw_svg
from roost.runtime.runs.index import find_run, list_runs, read_run
from roost.runtime.runs.record import RunRecord, Status, started_at
from roost.text import plural, printable
from roost.watch.live import LiveRun, read_whole
from roost.watch.metrics import last_values
from roost.watch.trace import to_trace
from roost.watch.views import Verdict

_MOST_LINES = 16
_MOST_GROUPS = 40


def show(
    run: Run = "latest",
    form: TextForm = "text",
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Write the map of its plan to this file instead.")
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Write what its workers did, as a trace that Perfetto opens.")
    ] = False,
    out: Out = None,
) -> None:
    if trace and svg is not None:
        raise ConfigError("--trace and --svg write different files", hint="give one of them; --out names the trace's")
    folder = find_run(run)
    if trace:
        write_text(to_trace(read_whole(folder)) + "\n", out)
        return
    record = read_run(folder)
    title = printable(record.title)
    if svg is not None:
        plan = saved_plan(folder)
        write_text(draw_svg(plan, make_grid(plan, title=title)), svg)
        return
    if form == "json":
        write_text(as_json({"folder": str(folder), **record.to_dict()}), out)
        return
    id_here = next((item.id for item in list_runs() if item.folder == folder), None)
    try:
        view = LiveRun(folder).refresh()
        missing, verdict = view.lost, view.verdict
    except ConfigError:
        missing, verdict = (), None
    told = _text(record, folder, id_here, missing, verdict)
    if record.plan is None:
        print_text(told, out)
    else:
        draw_map(make_grid(saved_plan(folder), title=title), out=out, above=told)


def _text(record: RunRecord, folder: Path, run_id: str | None, missing: Sequence[str], verdict: Verdict | None) -> Text:
    """Describe a run, apart from its map.

    `run_id` is None if only the folder leads to it; `missing` says what its events lack, `verdict` what limits it.
    """
    job, outcome = record.job, record.outcome
    limits = [("limits it", str(verdict)), *[("", line) for line in verdict.evidence]] if verdict else []
    lines = [
        *(limits if verdict and verdict.evidence else []),
        ("run", record.id),
        ("note", record.note),
        ("outcome", record.state),
    ]
    lines += [("", line) for line in outcome.message.splitlines()]
    if outcome.worker:
        lines.append(("", f"in {outcome.worker}, log {outcome.log}"))
    if outcome.status is Status.DIED:
        lines.append(("", f"its driver, pid {record.pid} on {record.host}, ended without a word: it was killed,"))
        lines.append(("", "its machine went down, or the end could not be written, as on a full disk"))
    elif outcome.status is Status.ENDED:
        lines.append(("", "its script did not close its Cluster: whether it succeeded is not known"))
    if job is not None:
        lines.append(("job", f"{job.file}, kept as {folder / job.stored}"))
        lines += [("again", f"run {job.rerun_of} once more")] if job.rerun_of else []
    nodes = []
    for node in record.nodes:
        has = " + ".join(f"{count} x {model}" for model, count in node.accelerators) or "no accelerators"
        nodes.append(f"{node.rank}  {node.name}, {node.address}: {has}")
    groups = []
    for group in record.groups:
        told = f"{group.name}: {plural(group.world_size, 'worker')} of {group.class_name}"
        if group.seconds is None:
            told += ", being launched"
        elif group.error:
            told += f", not launched after {group.seconds:.1f} s: {group.error}"
        else:
            # The phases that take long; JSON has them all.
            long = [f"{name} {took:.1f}" for name, took in group.phases if name in ("reserved", "process up")]
            told += f", ready after {group.seconds:.1f} s" + (f" ({', '.join(long)})" if long else "")
        groups.append(told)
    restarts = []
    for item in record.restarts:
        after = f"not up again: {item.error}" if item.error else f"up again after {item.seconds:.1f} s"
        restarts.append(f"{item.worker} at {_time(item.when)}: {item.reason}; {after}")
    failures = []
    for failed in reversed(record.failures):
        more = f", and {failed.more} more like it" if failed.more else ""
        failures.append(f"{failed.worker} in {failed.method} at {_time(failed.when)}: {failed.what}{more}")
    measured = [f"{name}: {value:.6g}" for name, value in last_values(folder).items()]
    variables = [f"{name}={'(not kept)' if value is None else value}" for name, value in record.environment.items()]
    lines += [
        ("command", shlex.join(record.command)),
        ("folder", record.cwd),
        ("began", _time(record.began)),
        ("ended", f"{_time(record.ended)}, after {record.seconds or 0:.1f} s" if record.ended else ""),
        ("driver", f"{record.user} on {record.host}, pid {record.pid}"),
        ("git", str(record.git or "")),
        ("versions", ", ".join(f"{name} {version}" for name, version in record.versions.items())),
        ("Ray", f"{record.address}, namespace {record.namespace}"),
        *titled("nodes", nodes, _MOST_LINES),
        *titled("groups", groups, _MOST_GROUPS),
        ("waiting for", record.waiting),
        *titled("restarts", restarts, _MOST_LINES),
        *titled("failed calls", failures, _MOST_LINES),
        *titled("metrics", measured, _MOST_LINES),
        *titled("environment", variables),
        *titled("events", missing),
        ("run folder", str(folder)),
        ("logs", f"roost logs {shlex.quote(run_id or str(folder))}"),
    ]
    return facts([(title, printable(text)) for title, text in lines if text])


def _time(text: str) -> str:
    return started_at(text).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
