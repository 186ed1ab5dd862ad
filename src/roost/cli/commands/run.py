"""`roost run`: place a job, launch its workers and call its entry point."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from roost.cli.commands.plan import plan
from roost.cli.options import Address, Overrides
from roost.cli.plans import Flags, with_flags
from roost.config.run import read_job_text
from roost.config.yaml_file import JOB_FILE_LIMIT, load_text
from roost.errors import ConfigError
from roost.placement.plan import Plan
from roost.runtime.options import RESERVE_SECONDS, RunOptions, read_seconds
from roost.runtime.runs.folder import check_run_name, new_folder_of
from roost.runtime.runs.record import RunJob, text_hash


@with_flags
def run(
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job's config, with 'workers' and 'entry'.")],
    flags: Flags,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the plan, as `roost plan` does.")] = False,
    local: Annotated[
        str | None,
        typer.Option("--local", metavar="2x4", help="Start a local cluster for this run, with fake accelerators."),
    ] = None,
    address: Address = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="The run's name: its folder is runs/NAME.")
    ] = None,
    note: Annotated[
        str | None, typer.Option("--note", metavar="TEXT", help="What to remember about it: `roost runs` shows it.")
    ] = None,
    wait: Annotated[
        str | None,
        typer.Option("--wait", metavar="TIME", help="How long to wait for taken accelerators: 90, 30m or 2h."),
    ] = None,
    run_dir: Annotated[
        str | None, typer.Option("--run-dir", metavar="DIR", help="The run's folder; default: a new one in runs/.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not show what workers print.")] = False,
    no_reserve: Annotated[bool, typer.Option("--no-reserve", help="Do not reserve the accelerators in Ray.")] = False,
) -> None:
    if dry_run:
        plan(job=job, overrides=overrides, **asdict(flags if local is None else replace(flags, cluster=local)))
        return
    if flags.hardware:
        raise ConfigError(
            "a job runs on the live Ray cluster",
            hint="--cluster and the like are for --dry-run; --local 2x4 starts one for the run",
        )
    for first, second in ((("--local", local), ("--address", address)), (("--name", name), ("--run-dir", run_dir))):
        if first[1] is not None and second[1] is not None:
            raise ConfigError(f"{first[0]} and {second[0]} contradict each other", hint="give one of them")
    options = RunOptions(
        placement=flags.placement,
        isolate_accelerator=not flags.no_isolate,
        reserve=not no_reserve,
        quiet=quiet,
        address=address,
        run_dir=run_dir,
        local=local,
        name=None if name is None else check_run_name(name),
        note=note,
        wait=RESERVE_SECONDS if wait is None else read_seconds(wait),
        overrides=tuple(overrides or ()),
    )
    text = load_text(job, limit=JOB_FILE_LIMIT)
    start_job(text, str(job), RunJob(file=str(job), hash=text_hash(text), flags=options.to_flags()), options)


def start_job(
    text: str, name: str, job: RunJob, options: RunOptions, check_plan: Callable[[Plan], None] | None = None
) -> None:
    """Run a job from its text; `name` is the file in messages, and `job` goes into the run's record."""
    from roost.runtime.job import run_job  # loads Ray, which a dry run does without
    from roost.runtime.runs.recorder import JobSource
    from roost.testing.local import local_cluster

    import_from_here()
    draft = read_job_text(text, name=name, overrides=options.overrides)
    if options.run_dir is None:
        options = replace(options, run_dir=new_folder_of(Path(job.file).absolute().parent, options.name))
    with local_cluster(options.local) if options.local is not None else contextlib.nullcontext():
        run_job(draft, options, source=JobSource(text=text, job=job), check_plan=check_plan)


def import_from_here() -> None:
    """Let modules in this folder be imported, as with `python -m`, here and in the workers."""
    sys.path.insert(0, str(Path.cwd()))
