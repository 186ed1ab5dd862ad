"""Completion of the workers and components of the job on the line."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from roost.cli.plans import Flags, load_plan
from roost.cli.shell import offer
from roost.config.job import read_job_draft
from roost.errors import RoostError

_LARGEST_FILE = 2**20


def complete_worker(context: typer.Context, incomplete: str) -> list[str]:
    """Offer the workers of the job on the line: `actor:3`."""

    def find() -> list[str]:
        return [
            f"{name}:{rank}"
            for name, count in _workers(context).items()
            if f"{name}:".startswith(incomplete) or incomplete.startswith(f"{name}:")
            for rank in range(count)
        ]

    return offer(find, incomplete)


def complete_component(context: typer.Context, incomplete: str) -> list[str]:
    """Offer the components of the job on the line."""
    return offer(lambda: list(_workers(context)), incomplete)


def _workers(context: typer.Context) -> dict[str, int]:
    """Count the workers of each component of the job on the line."""
    given = context.params
    # Where the line ends with an option that lacks its value, typer parses no arguments.
    words = (os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")).split()
    jobs = (word for word in words if word.endswith((".yaml", ".yml", ".json")) and Path(word).is_file())
    job = Path(given.get("job") or next(jobs))
    # Do not wait for a pipe, nor for a file that takes long to read.
    if job.exists() and (not job.is_file() or job.stat().st_size > _LARGEST_FILE):
        return {}
    names = ("cluster", "inventory", "placement", "no_isolate")
    flags = Flags(**{name: given[name] for name in names if given.get(name)})
    try:
        return {part.name: part.world_size for part in load_plan(job, flags).components}
    except RoostError:
        # The flag with the right hardware may still be to come.
        parts = read_job_draft(job).job.cluster.components
        return {part.name: last.last + 1 if (last := part.segments[-1].processes) else 1 for part in parts}
