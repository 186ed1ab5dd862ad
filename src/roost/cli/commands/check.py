"""`roost check`: the mistakes of a job that can be found without a cluster, and what is valid but may be a mistake."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from roost.cli.commands.run import import_from_here
from roost.cli.options import Job, Overrides, TextForm
from roost.cli.plans import Flags, plan_job, read_job, with_flags
from roost.cli.terminal import print_answer
from roost.cli.text.plans import findings_text
from roost.config.reading import Notes
from roost.config.run import RunConfig, read_run_config
from roost.placement.lint import lint
from roost.placement.plan import Plan
from roost.text import plural


@with_flags
def check(
    job: Job,
    flags: Flags,
    overrides: Overrides = None,
    form: TextForm = "text",
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if there is a warning.")] = False,
) -> None:
    given = read_job(job, overrides or ())
    notes = Notes()
    plan: Plan | None = None
    run: RunConfig | None = None
    # A job without both only says where its components sit, for a script that launches them.
    if not isinstance(given.found, Plan) and {"workers", "entry"} & {*given.found.job.document.keys()}:
        with notes.catching():
            run = read_run_config(given.found)
    with notes.catching():
        plan = plan_job(given, flags).plan
    if run is not None:
        from roost.runtime.job import load_code  # loads Ray, which checking a placement does without

        import_from_here()
        with notes.catching():
            load_code(run)
    notes.raise_if_any()
    if plan is None:
        raise typer.Abort
    found, entry = lint(plan), run and run.entry
    workers = sum(len(component.placements) for component in plan.components)
    findings = [{"code": item.code, "level": item.level, "message": item.message} for item in found]
    counts = {"components": len(plan.components), "workers": workers}
    verdict = f"{given.path} can {'run' if entry else 'be placed'}: {plural(counts['components'], 'component')}, "
    verdict += f"{plural(workers, 'worker')}, {f'entry {entry}, ' if entry else ''}plan {plan.hash[:8]}"
    text = Text("\n").join([Text(verdict), *findings_text(found)])
    print_answer(form, {**counts, "plan": plan.hash, "entry": entry, "findings": findings}, lambda: text)
    if strict and any(item.level == "warning" for item in found):
        raise typer.Exit(1)
