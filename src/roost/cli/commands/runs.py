"""`roost runs`: your runs of this project, newest first."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from roost.cli.options import TextForm
from roost.cli.terminal import print_answer
from roost.cli.text.runs import runs_table
from roost.errors import ConfigError
from roost.runtime.runs.index import list_runs, project_of
from roost.runtime.runs.record import RunRecord


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
    answer = [_summary(run.id, run.folder, run.record) for run in found[:number]]
    print_answer(form, answer, lambda: runs_table([(run.id, run.record) for run in found], number, elsewhere))


def _summary(name: str, folder: Path, record: RunRecord | ConfigError) -> dict[str, Any]:
    summary = {"id": name, "folder": str(folder)}
    if isinstance(record, ConfigError):
        return {**summary, "unreadable": str(record)}
    whole = record.to_dict()
    kept = {key: whole[key] for key in ("began", "ended", "seconds", "command", "plan", "outcome", "waits")}
    return {
        **summary,
        "what": record.what,
        "note": record.note,
        "project": record.project,
        "workers": record.num_workers,
        **kept,
    }
