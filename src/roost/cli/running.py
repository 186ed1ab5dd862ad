"""Commands that run a job, and that look at what ran."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from roost.cli import planning
from roost.cli.options import Address, Cluster, Inventory, Kind, Live, Rules, Shared
from roost.cli.out import write_text
from roost.errors import ConfigError


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
    from roost.placement.config import read_job_draft
    from roost.runtime.job_run import run_job

    # As with `python -m`: what is in this folder can be imported, here and in the workers.
    sys.path.insert(0, str(Path.cwd()))
    run_job(
        read_job_draft(job),
        placement=placement.value,
        isolate_accelerator=not no_isolate,
        address=address,
        run_dir=run_dir,
        quiet=quiet or None,
        reserve=not no_reserve,
    )


def logs(
    worker: Annotated[
        str | None, typer.Argument(metavar="WORKER", help="actor:3, or actor for the whole group.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
    lines: Annotated[int | None, typer.Option("--lines", "-n", min=0, help="Only the last lines.")] = None,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="DIR", help="The folder of a run; else your newest one.")
    ] = None,
) -> None:
    """Show what the workers of a run printed; without WORKER, which logs there are."""
    from roost.cli import logs

    if worker is None:
        write_text(logs.list_logs(run) + "\n", None)
        return
    logs.show_logs(worker, run, lines, follow, lambda line: write_text(line + "\n", None))
