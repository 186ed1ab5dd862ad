"""`roost diff`: what changes from one plan to another, or from one run to another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from roost.cli.options import TextForm
from roost.cli.plans import Flags, is_run, load_plans, with_flags
from roost.cli.runs import find_folder
from roost.cli.terminal import print_answer, print_text
from roost.cli.text.plans import diff_text
from roost.cli.text.runs import run_diff_text
from roost.runtime.runs.diff import diff_records
from roost.runtime.runs.index import read_run


@with_flags
def diff(
    before: Annotated[Path, typer.Argument(metavar="A", help="A job, a plan saved as JSON, or a run.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    flags: Flags,
    form: TextForm = "text",
) -> None:
    one, other = load_plans(before, after, flags)
    difference = one.diff(other)
    runs = None
    if is_run(before) and is_run(after):
        runs = diff_records(*(read_run(find_folder(path)) for path in (before, after)))
    facts = {} if runs is None else {"runs": {what: [a, b] for what, a, b in runs}}
    print_answer(form, {**difference.to_dict(), **facts}, lambda: diff_text(difference))
    if runs and form == "text":
        print_text(run_diff_text(runs))
    raise typer.Exit(1 if difference else 0)
