"""`roost plan`: the plan of a job as a picture, a table, JSON or a page."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from roost.cli.completion import complete_component
from roost.cli.options import Cluster, Inventory, Job, Live, Out, Rules, Shared
from roost.cli.out import tell, write_text
from roost.cli.plans import Flags, load_plan
from roost.cli.terminal import draw_map, print_text
from roost.cli.text.plans import plan_table, start_text
from roost.placement.lint import lint
from roost.placement.plan import Plan
from roost.render.grid import make_grid
from roost.render.html import draw_html
from roost.render.svg import draw_svg
from roost.text import plural

_MOST_WARNINGS = 3


def plan(
    job: Job,
    cluster: Cluster = None,
    inventory: Inventory = None,
    live: Live = False,
    form: Annotated[
        Literal["map", "table", "json", "svg", "html"],
        typer.Option("--format", "-f", metavar="FORMAT", help="Output format: map, table, json, svg or html."),
    ] = "map",
    out: Out = None,
    component: Annotated[
        list[str] | None,
        typer.Option(
            "--component", metavar="NAME", help="Show only this; repeatable.", autocompletion=complete_component
        ),
    ] = None,
    all_nodes: Annotated[bool, typer.Option("--all-nodes", help="Do not fold nodes that are alike.")] = False,
    placement: Rules = "auto",
    no_isolate: Shared = False,
) -> None:
    flags = Flags(cluster=cluster, inventory=inventory, live=live, placement=placement, no_isolate=no_isolate)
    found, hardware = load_plan(job, flags)
    names = component or found.names
    if form == "json":
        write_text(found.to_json(only=component) + "\n", out)
    elif form == "table":
        print_text(plan_table(found.only(names)), out)
    else:
        taken = hardware.taken if hardware else ()
        grid = make_grid(found, title=job.name, fold=not all_nodes, only=names, taken=taken)
        if form == "svg":
            write_text(draw_svg(found, grid), out)
        elif form == "html":
            write_text(draw_html(found, grid), out)
        else:
            draw_map(grid, out)
            if hardware is not None and out is None:
                print_text(start_text(found, hardware))
            _print_warnings(found)


def _print_warnings(found: Plan) -> None:
    warnings = [item for item in lint(found) if item.level == "warning"]
    for item in warnings[:_MOST_WARNINGS]:
        tell(str(item))
    if len(warnings) > _MOST_WARNINGS:
        tell(f"and {plural(len(warnings) - _MOST_WARNINGS, 'more warning')}: see roost lint")
