"""Runs as text: one line each, all that is known about one, and what differs between two."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from rich.text import Text

from roost.cli.terminal import aligned, facts, titled
from roost.errors import ConfigError
from roost.runtime.runs.diff import Fact
from roost.runtime.runs.record import RunFailure, RunGroup, RunNode, RunRecord, RunRestart, Status, started_at
from roost.text import plural, printable, shorten

_MOST_LINES = 16
_MOST_GROUPS = 40


def runs_table(found: Sequence[tuple[str, RunRecord | ConfigError]], most: int, elsewhere: int = 0) -> Text:
    """Make one line for each run, given its id and its record or why that cannot be read.

    `elsewhere` is how many runs of other projects are not listed.
    """
    if not found and elsewhere:
        other = f"{plural(elsewhere, 'run')} of other projects: see roost runs --all"
        return Text(f"this project has no runs yet; there {'is' if elsewhere == 1 else 'are'} {other}")
    if not found:
        return Text("there are no runs yet")
    rows: list[tuple[str, ...]] = [("ID", "WHEN", "WHAT", "PLAN", "WORKERS", "SECONDS", "OUTCOME", "NOTE")]
    rows += [_row(printable(name), record) for name, record in found[:most]]
    if not any(row[-1] for row in rows[1:]):
        rows = [row[:-1] for row in rows]
    text = aligned(rows)
    if len(found) > most:
        text.append(f"\nand {len(found) - most} more: see roost runs -n {len(found)}", style="dim")
    return text


def run_text(record: RunRecord, folder: Path, run_id: str | None, remarks: Sequence[str] = ()) -> Text:
    """Describe a run, apart from its map; `run_id` is None if only the folder leads to it.

    `remarks` say what its events lack.
    """
    job = record.job
    lines = [
        ("run", record.id),
        ("note", record.note),
        ("outcome", record.state),
        *(("", line) for line in _outcome_lines(record)),
    ]
    if job is not None:
        lines.append(("job", f"{job.file}, kept as {folder / job.stored}"))
        lines += [("again", f"run {job.rerun_of} once more")] if job.rerun_of else []
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
        *titled("nodes", [_node_text(node) for node in record.nodes], _MOST_LINES),
        *titled("groups", [_group_text(group) for group in record.groups], _MOST_GROUPS),
        ("waiting for", record.waiting),
        *titled("restarts", [_restart_text(item) for item in record.restarts], _MOST_LINES),
        *titled("failed calls", [_failure_text(item) for item in reversed(record.failures)], _MOST_LINES),
        *titled("environment", variables),
        *titled("events", remarks),
        ("run folder", str(folder)),
        ("logs", f"roost logs {shlex.quote(run_id or str(folder))}"),
    ]
    return facts([(title, printable(text)) for title, text in lines if text])


def run_diff_text(found: Sequence[Fact]) -> Text:
    """List what differs between two runs apart from their plans."""
    text = Text(f"the runs ({len(found)})", style="bold")
    for what, before, after in found:
        line = printable(f"  ~ {what}: {shorten(before, 300)} -> {shorten(after, 300)}")
        text.append(f"\n{line}", style="not bold yellow")
    return text


def _row(name: str, record: RunRecord | ConfigError) -> tuple[str, ...]:
    if isinstance(record, ConfigError):
        return name, "-", "-", "-", "-", "-", f"unreadable: see roost show {name}", ""
    return (
        name,
        started_at(record.began).astimezone().strftime("%Y-%m-%d %H:%M:%S"),
        printable(shorten(record.what, 40)),
        (record.plan or "-")[:8],
        str(record.num_workers),
        _seconds(record),
        printable(shorten(record.state, 60)),
        printable(shorten(record.note, 60)),
    )


def _outcome_lines(record: RunRecord) -> list[str]:
    outcome = record.outcome
    lines = outcome.message.splitlines()
    if outcome.worker:
        lines.append(f"in {outcome.worker}, log {outcome.log}")
    if outcome.status is Status.DIED:
        lines.append(f"its driver, pid {record.pid} on {record.host}, ended without a word: it was killed,")
        lines.append("its machine went down, or the end could not be written, as on a full disk")
    elif outcome.status is Status.ENDED:
        lines.append("its script did not close its Cluster: whether it succeeded is not known")
    return lines


def _node_text(node: RunNode) -> str:
    has = " + ".join(f"{count} x {model}" for model, count in node.accelerators) or "no accelerators"
    return f"{node.rank}  {node.name}, {node.address}: {has}"


def _group_text(group: RunGroup) -> str:
    workers = f"{group.name}: {plural(group.world_size, 'worker')} of {group.class_name}"
    if group.seconds is None:
        return f"{workers}, being launched"
    if group.error:
        return f"{workers}, not launched after {group.seconds:.1f} s: {group.error}"
    # The phases that take long; JSON has them all.
    steps = ", ".join(f"{name} {seconds:.1f}" for name, seconds in group.phases if name in ("reserved", "process up"))
    return f"{workers}, ready after {group.seconds:.1f} s" + (f" ({steps})" if steps else "")


def _restart_text(restart: RunRestart) -> str:
    after = f"not up again: {restart.error}" if restart.error else f"up again after {restart.seconds:.1f} s"
    return f"{restart.worker} at {_time(restart.when)}: {restart.reason}; {after}"


def _failure_text(failure: RunFailure) -> str:
    more = f", and {failure.more} more like it" if failure.more else ""
    return f"{failure.worker} in {failure.method} at {_time(failure.when)}: {failure.what}{more}"


def _time(text: str) -> str:
    return started_at(text).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")


def _seconds(record: RunRecord) -> str:
    if record.seconds is not None:
        return f"{record.seconds:.1f}"
    if record.outcome.status is not Status.RUNNING:
        return "-"
    return f"{(datetime.now().astimezone() - started_at(record.began)).total_seconds():.0f}"
