"""`roost show`: all that is known about a run, and the map of its plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from roost.cli.options import TextForm
from roost.cli.out import write_text
from roost.cli.plans import read_saved_plan
from roost.cli.runs import Run, plan_file
from roost.cli.terminal import draw_map, print_answer
from roost.cli.text.runs import run_text
from roost.render.grid import make_grid
from roost.render.svg import draw_svg
from roost.runtime.runs.index import find_run, list_runs, read_run
from roost.text import printable


def show(
    run: Run = "latest",
    form: TextForm = "text",
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Write the map of its plan to this file instead.")
    ] = None,
) -> None:
    folder = find_run(run)
    record = read_run(folder)
    title = printable(record.what)
    if svg is not None:
        plan = read_saved_plan(plan_file(folder))
        write_text(draw_svg(plan, make_grid(plan, title=title)), svg)
        return
    id_here = next((item.id for item in list_runs() if item.folder == folder), None)
    answer = {"folder": str(folder), **record.to_dict()}
    print_answer(form, answer, lambda: run_text(record, folder, id_here))
    if form == "text" and record.plan is not None:
        grid = make_grid(read_saved_plan(plan_file(folder)), title=title)
        write_text("\n")
        draw_map(grid)
