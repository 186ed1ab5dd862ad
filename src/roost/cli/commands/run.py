"""`roost run`: place a job, launch its workers and call its entry point."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from roost.cli.commands.plan import plan
from roost.cli.options import Address
from roost.cli.plans import Flags, with_flags
from roost.config.run import read_job_text
from roost.config.yaml_file import JOB_FILE_LIMIT, load_text
from roost.errors import ConfigError
from roost.placement.plan import Plan
from roost.runtime.options import RunOptions
from roost.runtime.runs.record import RunJob, text_hash


@with_flags
def run(
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job's config, with 'workers' and 'entry'.")],
    flags: Flags,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the plan, as `roost plan` does.")] = False,
    address: Address = None,
    run_dir: Annotated[
        str | None, typer.Option("--run-dir", metavar="DIR", help="The run's folder, for the workers' logs.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not show what workers print.")] = False,
    no_reserve: Annotated[bool, typer.Option("--no-reserve", help="Do not reserve the accelerators in Ray.")] = False,
) -> None:
    if dry_run:
        plan(job=job, **asdict(flags))
        return
    if flags.hardware:
        raise ConfigError("a job runs on the live Ray cluster", hint="--cluster and the like are for --dry-run")
    options = RunOptions(
        placement=flags.placement,
        isolate_accelerator=not flags.no_isolate,
        reserve=not no_reserve,
        quiet=quiet,
        address=address,
        run_dir=run_dir,
    )
    text = load_text(job, limit=JOB_FILE_LIMIT)
    start_job(text, str(job), RunJob(file=str(job), hash=text_hash(text), flags=options.to_flags()), options)


def start_job(
    text: str, name: str, job: RunJob, options: RunOptions, check_plan: Callable[[Plan], None] | None = None
) -> None:
    """Run a job from its text; `name` is the file in messages, and `job` goes into the run's record."""
    from roost.runtime.job import run_job  # loads Ray, which a dry run does without
    from roost.runtime.runs.recorder import JobSource

    # As with `python -m`, modules in this folder can be imported, here and in the workers.
    sys.path.insert(0, str(Path.cwd()))
    draft = read_job_text(text, name=name)
    run_job(draft, options, source=JobSource(text=text, job=job), check_plan=check_plan)
