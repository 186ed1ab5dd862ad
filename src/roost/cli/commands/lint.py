"""`roost lint`: what is valid in a plan but may be a mistake."""

from __future__ import annotations

from typing import Annotated

import typer

from roost.cli.options import Job, TextForm
from roost.cli.plans import Flags, load_plan, with_flags
from roost.cli.terminal import print_answer
from roost.cli.text.plans import findings_text
from roost.placement.lint import lint as find_all


@with_flags
def lint(
    job: Job,
    flags: Flags,
    form: TextForm = "text",
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if there is a warning.")] = False,
) -> None:
    plan = load_plan(job, flags)
    found = find_all(plan)
    answer = [{"code": item.code, "level": item.level, "message": item.message} for item in found]
    print_answer(form, answer, lambda: findings_text(found))
    if strict and any(item.level == "warning" for item in found):
        raise typer.Exit(1)
