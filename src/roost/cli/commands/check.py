"""`roost check`: all mistakes of a job that can be found without a cluster."""

from __future__ import annotations

import typer
from rich.text import Text

from roost.cli.commands.run import import_from_here
from roost.cli.options import JobFile, Overrides, TextForm
from roost.cli.plans import Flags, plan_job, with_flags
from roost.cli.terminal import print_answer
from roost.config.reading import Notes
from roost.config.run import RunConfig, read_job_text, read_run_config
from roost.config.yaml_file import JOB_FILE_LIMIT, load_text
from roost.placement.plan import Plan
from roost.text import plural


@with_flags
def check(job: JobFile, flags: Flags, overrides: Overrides = None, form: TextForm = "text") -> None:
    from roost.runtime.job_code import load_code  # loads Ray, which completion does without

    import_from_here()
    text = load_text(job, limit=JOB_FILE_LIMIT)
    settings = tuple(overrides or ())
    draft = read_job_text(text, name=str(job), overrides=settings)
    notes = Notes()
    plan: Plan | None = None
    run: RunConfig | None = None
    with notes.catching():
        run = read_run_config(draft)
    with notes.catching():
        plan = plan_job(job, text, flags, overrides=settings).plan
    if run is not None:
        with notes.catching():
            load_code(run)
    notes.raise_if_any()
    if plan is None or run is None:
        raise typer.Abort
    workers = sum(len(component.placements) for component in plan.components)
    answer = {"components": len(plan.components), "workers": workers, "plan": plan.hash, "entry": run.entry}
    counted = f"{plural(len(plan.components), 'component')}, {plural(workers, 'worker')}"
    print_answer(form, answer, lambda: Text(f"{job} can run: {counted}, entry {run.entry}, plan {plan.hash[:8]}"))
