"""Runs as text: one line each, and all that is known of one."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.text import Text

from roost.cli.show import aligned, facts
from roost.errors import ConfigError
from roost.runtime.runs.diff import Fact
from roost.runtime.runs.record import RunGroup, RunRecord, Status, started_at
from roost.text import plural, printable, shorten

_MOST_NODES = 16
_MOST_RESTARTS = 16
_MOST_GROUPS = 40
Found = tuple[str, Path, RunRecord | ConfigError]
"""A run by id, with its folder and its record, or why that cannot be read."""


def table(found: Sequence[Found], most: int) -> Text:
    """One line for each run."""
    if not found:
        return Text("there are no runs yet")
    rows: list[Sequence[str]] = [("ID", "WHEN", "WHAT", "PLAN", "WORKERS", "SECONDS", "OUTCOME")]
    for name, _, record in found[:most]:
        if isinstance(record, ConfigError):
            name = printable(name)
            rows.append((name, "-", "-", "-", "-", "-", f"unreadable: see roost show {name}"))
            continue
        rows.append(
            (
                printable(name),
                started_at(record.began).astimezone().strftime("%Y-%m-%d %H:%M:%S"),
                printable(shorten(record.what, 40)),
                (record.plan or "-")[:8],
                str(record.num_workers),
                _seconds(record),
                printable(str(record.outcome)),
            )
        )
    text = aligned(rows)
    if len(found) > most:
        text.append(f"\nand {len(found) - most} more: see roost runs -n {len(found)}", style="dim")
    return text


def summary(name: str, folder: Path, record: RunRecord | ConfigError) -> dict[str, Any]:
    """One run of many, as JSON has it."""
    if isinstance(record, ConfigError):
        return {"id": name, "folder": str(folder), "unreadable": str(record)}
    whole = record.to_dict()
    kept = ("began", "ended", "seconds", "command", "plan", "outcome")
    return {
        "id": name,
        "folder": str(folder),
        "what": record.what,
        "workers": record.num_workers,
        **{key: whole[key] for key in kept},
    }


def facts_of(record: RunRecord, folder: Path, id_here: str | None) -> Text:
    """All that is known of a run, apart from its map; it is found by `id_here`, or else by its folder only."""
    lines = [
        ("run", record.id),
        ("outcome", str(record.outcome)),
        *_more([printable(line) for line in _outcome_lines(record)]),
    ]
    if record.job is not None:
        lines.append(("job", f"{record.job.file}, kept as {folder / record.job.stored}"))
        lines += [("again", f"run {record.job.rerun_of} once more")] if record.job.rerun_of else []
    lines += [
        ("command", shlex.join(record.command)),
        ("folder", record.cwd),
        ("began", _when(record.began)),
        ("ended", f"{_when(record.ended)}, after {record.seconds or 0:.1f} s" if record.ended else ""),
        ("driver", f"{record.user} on {record.host}, pid {record.pid}"),
        ("git", str(record.git or "")),
        ("versions", ", ".join(f"{name} {version}" for name, version in record.versions.items())),
        ("Ray", f"{record.address}, namespace {record.namespace}"),
    ]
    lines += _titled("nodes", [_node_text(node) for node in record.nodes], _MOST_NODES)
    lines += _titled("groups", [_group_text(group) for group in record.groups], _MOST_GROUPS)
    lines += _titled("restarts", [_restart_text(item) for item in record.restarts], _MOST_RESTARTS)
    variables = [f"{name}={'(not kept)' if value is None else value}" for name, value in record.environment.items()]
    lines += _titled("environment", variables, len(variables))
    lines.append(("run folder", str(folder)))
    lines.append(("logs", f"roost logs --run {shlex.quote(id_here or str(folder))}"))
    return facts([(name, printable(text)) for name, text in lines if text])


def differences(found: Sequence[Fact]) -> Text:
    """What differs between two runs beside their plans."""
    text = Text()
    if found:
        text.append(f"the runs ({len(found)})\n", style="bold")
    for what, before, after in found:
        text.append(printable(f"  ~ {what}: {shorten(before, 300)} -> {shorten(after, 300)}") + "\n", style="yellow")
    text.rstrip()
    return text


def _outcome_lines(record: RunRecord) -> list[str]:
    outcome = record.outcome
    lines = outcome.message.splitlines()
    if outcome.worker:
        lines.append(f"in {outcome.worker}, log {outcome.log}")
    if outcome.status is Status.DIED:
        lines.append(f"its driver, pid {record.pid} on {record.host}, is gone without a word: it was killed,")
        lines.append("its machine went down, or its end could not be written, as on a full disk")
    elif outcome.status is Status.ENDED:
        lines.append("its script did not close its Cluster: whether it ended well is not known")
    return lines


def _node_text(node: Any) -> str:
    has = " + ".join(f"{count} x {model}" for model, count in node.accelerators) or "no accelerators"
    return f"{node.rank}  {node.name}, {node.address}: {has}"


def _group_text(group: RunGroup) -> str:
    workers = f"{group.name}: {plural(group.world_size, 'worker')} of {group.class_name}"
    if group.seconds is None:
        return f"{workers}, being launched"
    if group.error:
        return f"{workers}, not launched after {group.seconds:.1f} s: {group.error}"
    # Those that take their time; JSON has them all.
    steps = ", ".join(f"{name} {seconds:.1f}" for name, seconds in group.phases if name in ("reserved", "process up"))
    return f"{workers}, ready after {group.seconds:.1f} s" + (f" ({steps})" if steps else "")


def _restart_text(restart: Any) -> str:
    after = f"not up again: {restart.error}" if restart.error else f"up again after {restart.seconds:.1f} s"
    return f"{restart.worker} at {_when(restart.when)}: {restart.reason}; {after}"


def _titled(title: str, items: Sequence[str], most: int) -> list[tuple[str, str]]:
    shown = [*items[:most], *([f"and {len(items) - most} more"] if len(items) > most else [])]
    return [(title if number == 0 else "", text) for number, text in enumerate(shown)]


def _more(lines: Sequence[str]) -> list[tuple[str, str]]:
    return [("", line) for line in lines]


def _when(text: str | None) -> str:
    return started_at(text).astimezone().strftime("%Y-%m-%d %H:%M:%S %z") if text else ""


def _seconds(record: RunRecord) -> str:
    if record.seconds is not None:
        return f"{record.seconds:.1f}"
    if record.outcome.status is not Status.RUNNING:
        return "-"
    return f"{(datetime.now().astimezone() - started_at(record.began)).total_seconds():.0f}"
