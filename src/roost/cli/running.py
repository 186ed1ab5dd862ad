"""Commands that run a job, and that look at what ran."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from roost.cli import planning
from roost.cli.completion import complete_log, complete_run
from roost.cli.options import Address, Cluster, Inventory, Kind, Live, Rules, Shared
from roost.cli.out import write_text
from roost.errors import ConfigError

if TYPE_CHECKING:
    from roost.placement.plan import Plan
    from roost.runtime.runs.record import RunJob


def run(
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job's config, with 'workers' and 'entry'.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan instead, as `roost plan` does.")] = False,
    cluster: Cluster = None,
    inventory: Inventory = None,
    live: Live = False,
    address: Address = None,
    run_dir: Annotated[
        str | None, typer.Option("--run-dir", metavar="DIR", help="The run's folder, for the workers' logs.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not show what workers print.")] = False,
    no_reserve: Annotated[
        bool, typer.Option("--no-reserve", help="Do not tell Ray that the accelerators are taken.")
    ] = False,
    placement: Rules = Kind.AUTO,
    no_isolate: Shared = False,
) -> None:
    """Place a job, launch its workers and call its entry point."""
    if dry_run:
        planning.plan(job, cluster, inventory, live, placement=placement, no_isolate=no_isolate)
        return
    if cluster or inventory or live:
        raise ConfigError("a job runs on the Ray cluster that is there", hint="--cluster and the like plan a --dry-run")
    from roost.config.yaml_file import JOB_FILE_LIMIT, load_text
    from roost.runtime.runs.record import RunJob, text_hash

    flags: dict[str, str | bool] = {
        "--placement": placement.value if placement is not Kind.AUTO else "",
        "--no-isolate": no_isolate,
        "--no-reserve": no_reserve,
        "--quiet": quiet,
        "--address": address or "",
        "--run-dir": run_dir or "",
    }
    given = tuple((name, value) for name, value in flags.items() if value)
    text = load_text(job, limit=JOB_FILE_LIMIT)
    run_text(text, str(job), RunJob(file=str(job), hash=text_hash(text), flags=given))


def run_text(text: str, name: str, job: RunJob, check_plan: Callable[[Plan], None] | None = None) -> None:
    """Run a job from its text, with the flags that its record has; `name` stands for the file in messages."""
    from roost.config.run import read_job_text
    from roost.runtime.job import run_job
    from roost.runtime.runs.recorder import JobSource

    flags = dict(job.flags)
    # As with `python -m`: what is in this folder can be imported, here and in the workers.
    sys.path.insert(0, str(Path.cwd()))
    run_job(
        read_job_text(text, name=name),
        placement=job.placement,
        isolate_accelerator="--no-isolate" not in flags,
        address=job.text_of("--address"),
        run_dir=job.text_of("--run-dir"),
        quiet="--quiet" in flags or None,
        reserve="--no-reserve" not in flags,
        source=JobSource(text=text, job=job),
        check_plan=check_plan,
    )


def logs(
    worker: Annotated[
        str | None,
        typer.Argument(metavar="WORKER", help="actor:3, or actor for the whole group.", autocompletion=complete_log),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
    lines: Annotated[int | None, typer.Option("--lines", "-n", metavar="N", min=0, help="Only the last lines.")] = None,
    run: Annotated[
        str | None,
        typer.Option(
            "--run",
            metavar="RUN",
            help="The id of a run or its folder; else your newest one.",
            autocompletion=complete_run,
        ),
    ] = None,
) -> None:
    """Show what the workers of a run printed, or which logs there are."""
    from roost.cli import logs

    if worker is None:
        write_text(logs.list_logs(run) + "\n", None)
        return
    logs.show_logs(worker, run, lines, follow, lambda line: write_text(line + "\n", None))
