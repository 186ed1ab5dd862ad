"""`roost runs`: your runs of this project, newest first."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from roost.cli.options import TextForm
from roost.cli.terminal import aligned, print_answer
from roost.errors import ConfigError
from roost.runtime.runs.index import list_runs, project_of
from roost.runtime.runs.record import RunRecord, Status, started_at
from roost.text import plural, printable, shorten


def runs(
    form: TextForm = "text",
    everywhere: Annotated[bool, typer.Option("--all", "-a", help="Also the runs of other projects.")] = False,
    number: Annotated[int, typer.Option("--number", "-n", metavar="N", min=1, help="List at most this many.")] = 20,
) -> None:
    listed = list_runs()
    project = project_of(Path.cwd())
    # Of an unreadable record nobody knows which project it is of.
    found = [run for run in listed if everywhere or run.is_of(project) or isinstance(run.record, ConfigError)]
    elsewhere = len(listed) - len(found)

    def text() -> Text:
        if not found and elsewhere:
            other = f"{plural(elsewhere, 'run')} of other projects: see roost runs --all"
            return Text(f"this project has no runs yet; there {'is' if elsewhere == 1 else 'are'} {other}")
        if not found:
            return Text("there are no runs yet")
        rows = [("ID", "WHEN", "WHAT", "PLAN", "WORKERS", "SECONDS", "OUTCOME", "NOTE")]
        rows += [_row(printable(run.id), run.record) for run in found[:number]]
        table = aligned(rows if any(row[-1] for row in rows[1:]) else [row[:-1] for row in rows])
        if len(found) > number:
            table.append(f"\nand {len(found) - number} more: see roost runs -n {len(found)}", style="dim")
        return table

    print_answer(form, [_summary(run.id, run.folder, run.record) for run in found[:number]], text)


def _row(name: str, record: RunRecord | ConfigError) -> tuple[str, str, str, str, str, str, str, str]:
    if isinstance(record, ConfigError):
        return name, "-", "-", "-", "-", "-", f"unreadable: see roost show {name}", ""
    began, seconds = started_at(record.began), "-"
    if record.seconds is not None:
        seconds = f"{record.seconds:.1f}"
    elif record.outcome.status is Status.RUNNING:
        seconds = f"{(datetime.now().astimezone() - began).total_seconds():.0f}"
    return (
        name,
        began.astimezone().strftime("%Y-%m-%d %H:%M:%S"),
        printable(shorten(record.what, 40)),
        (record.plan or "-")[:8],
        str(record.num_workers),
        seconds,
        printable(shorten(record.state, 60)),
        printable(shorten(record.note, 60)),
    )


def _summary(name: str, folder: Path, record: RunRecord | ConfigError) -> dict[str, Any]:
    summary = {"id": name, "folder": str(folder)}
    if isinstance(record, ConfigError):
        return {**summary, "unreadable": str(record)}
    whole = record.to_dict()
    kept = {key: whole[key] for key in ("began", "ended", "seconds", "command", "plan", "outcome", "waits")}
    known = {"what": record.what, "note": record.note, "project": record.project, "workers": record.num_workers}
    return {**summary, **known, **kept}
