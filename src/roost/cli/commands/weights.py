"""`roost weights`: which bytes of the weights go from which worker to which."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.text import Text

from roost.cli.options import Out
from roost.cli.out import write_text
from roost.cli.plans import Flags, load_plan, with_flags
from roost.cli.terminal import draw_map, print_text
from roost.config.weight_sync import read_weight_sync
from roost.config.yaml_file import read_file
from roost.render.grid import make_grid
from roost.render.html import draw_html
from roost.render.svg import draw_svg
from roost.text import size_text
from roost.weights.job_plan import bytes_by_piece, plan_weights
from roost.weights.plan import describe


@with_flags
def weights(
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job's config.")],
    flags: Flags,
    form: Annotated[
        Literal["map", "text", "json", "svg", "html"],
        typer.Option("--format", metavar="FORMAT", help="Output format: map, text, json, svg or html."),
    ] = "map",
    out: Out = None,
) -> None:
    plan = load_plan(job, flags)
    found = plan_weights(read_weight_sync(read_file(job)), plan, job.parent)
    if form == "json":
        write_text(found.to_json() + "\n", out)
        return
    if form == "text":
        print_text(Text(describe(found)), out)
        return
    notes = [
        {piece: f"{arrow}{size_text(size, short=True)}" for piece, size in sizes.items() if size}
        for arrow, sizes in zip("↑↓", bytes_by_piece(found, plan), strict=True)
    ]
    grid = make_grid(plan, title=job.name, notes=notes)
    if form == "svg":
        write_text(draw_svg(plan, grid), out)
    elif form == "html":
        write_text(draw_html(plan, grid), out)
    else:
        draw_map(grid, out=out)
        if out is None:
            print_text(Text(f"\n{describe(found, most=0)}"))
