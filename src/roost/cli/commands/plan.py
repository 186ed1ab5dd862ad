"""`roost plan`: the plan of a job as a picture, a table, JSON or a page."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from roost.cli.completion import complete_component
from roost.cli.options import Job, Out, Overrides
from roost.cli.out import tell, write_text
from roost.cli.plans import Flags, plan_job, read_job, with_flags
from roost.cli.terminal import draw_map, print_text
from roost.cli.text.plans import plan_table, start_text
from roost.placement.lint import lint
from roost.render.grid import make_grid
from roost.text import at_most, plural

_MOST_WARNINGS = 3


@with_flags
def plan(
    job: Job,
    flags: Flags,
    overrides: Overrides = None,
    form: Annotated[
        Literal["map", "table", "json", "svg", "html"],
        typer.Option("--format", metavar="FORMAT", help="Output format: map, table, json, svg or html."),
    ] = "map",
    out: Out = None,
    component: Annotated[
        list[str] | None,
        typer.Option(
            "--component", metavar="NAME", help="Show only this; repeatable.", autocompletion=complete_component
        ),
    ] = None,
    all_nodes: Annotated[bool, typer.Option("--all-nodes", help="Do not fold nodes that are alike.")] = False,
) -> None:
    loaded = plan_job(read_job(job, overrides or ()), flags)
    found, hardware, flow = loaded.plan, loaded.live, loaded.flow
    names = component or found.names
    if form == "json":
        write_text(found.to_json(only=component) + "\n", out)
    elif form == "table":
        print_text(plan_table(found.only(names)), out)
    else:
        taken = hardware.taken if hardware else ()
        grid = make_grid(found, title=job.name, fold=not all_nodes, only=names, taken=taken, assumed=loaded.assumed)
        # The map on the terminal, which users wait for, does without the other renderers.
        if form == "svg":
            from roost.render.svg import draw_svg

            write_text(draw_svg(found, grid), out)
        elif form == "html":
            from roost.render.flow import flow_html
            from roost.render.html import draw_html

            write_text(draw_html(found, grid, flow_html(flow) if flow else ()), out)
        else:
            below = ""
            if flow is not None:
                from roost.render.flow import flow_lines

                below = "\n" + "\n".join(flow_lines(flow))
            draw_map(grid, out, below=below)
            if hardware is not None and out is None:
                print_text(start_text(found, hardware))
            warnings = [str(item) for item in lint(found) if item.level == "warning"]
            more = plural(len(warnings) - _MOST_WARNINGS, "more warning")
            for line in at_most(warnings, _MOST_WARNINGS, f"and {more}: see roost check"):
                tell(line)
