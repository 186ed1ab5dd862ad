"""Runs as the command line names them, and the files of their plans."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from roost.cli.plans import parse_plan
from roost.cli.shell import offer
from roost.config.yaml_file import PLAN_FILE_LIMIT, load_text
from roost.errors import ConfigError
from roost.placement.plan import Plan
from roost.runtime.runs.index import find_run, list_runs
from roost.runtime.runs.record import PLAN_FILE, RECORD_FILE, read_record


def complete_run(incomplete: str) -> list[str]:
    """Offer the ids of this user's runs, newest first."""
    return offer(lambda: [run.id for run in list_runs()], incomplete)


Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Its id, the first characters of that, its folder, or latest: the newest of this project.",
        autocompletion=complete_run,
    ),
]


def find_folder(path: Path) -> Path:
    """Return the folder of a run by its id or its path."""
    try:
        folder = find_run(str(path))
    except ConfigError as error:
        hint = error.problems[0].hint
        raise ConfigError(f"there is no file {str(path)!r}, and no run with that name", hint=hint) from None
    if folder == path.absolute() and not any((folder / name).exists() for name in (RECORD_FILE, PLAN_FILE)):
        jobs = sorted(str(file) for suffix in ("yaml", "yml") for file in path.glob(f"*.{suffix}"))
        hint = f"give the file of the job, such as {jobs[0]}" if jobs else "give the file of a job, or a run"
        raise ConfigError(f"{path} is a folder, and not that of a run", hint=hint)
    return folder


def saved_plan(folder: Path) -> Plan:
    """Return the plan of a run."""
    path = plan_file(folder)
    return parse_plan(path, load_text(path, limit=PLAN_FILE_LIMIT))


def plan_file(folder: Path) -> Path:
    """Return the file with the plan of a run."""
    path = folder / PLAN_FILE
    if not os.path.isfile(path):
        record = read_record(folder)
        raise ConfigError(f"run {record.id} has no plan: it launched nothing, or its {PLAN_FILE} was removed")
    return path
