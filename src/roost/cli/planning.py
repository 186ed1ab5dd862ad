"""Commands that plan: what goes where, who sits where, what changed. No Ray is loaded unless --live asks for it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from roost.cli.completion import complete_component, complete_worker
from roost.cli.options import (
    Cluster,
    Format,
    Inventory,
    Job,
    Kind,
    Live,
    Out,
    Rules,
    Shared,
    TextForm,
    TextFormat,
    make_flags,
)
from roost.cli.out import draw_map, print_text, print_warnings, write_text
from roost.errors import ConfigError


def plan(
    job: Job,
    cluster: Cluster = None,
    inventory: Inventory = None,
    live: Live = False,
    form: Annotated[
        Format,
        typer.Option("--format", "-f", metavar="FORMAT", help="How to show it: map, table, json, svg or html."),
    ] = Format.MAP,
    out: Out = None,
    component: Annotated[
        list[str] | None,
        typer.Option(
            "--component", metavar="NAME", help="Show this one only; repeatable.", autocompletion=complete_component
        ),
    ] = None,
    all_nodes: Annotated[bool, typer.Option("--all-nodes", help="Do not fold nodes that are alike.")] = False,
    placement: Rules = Kind.AUTO,
    no_isolate: Shared = False,
) -> None:
    """Show which worker sits on which hardware."""
    from roost.cli.load import load_live_plan
    from roost.render.grid import make_grid

    plan, hardware = load_live_plan(job, make_flags(cluster, inventory, live, placement, no_isolate))
    names = component or plan.names
    if form is Format.JSON:
        write_text(plan.to_json(only=component) + "\n", out)
    elif form is Format.TABLE:
        from roost.cli import show

        print_text(show.table(plan.only(names)), out)
    else:
        taken = hardware.taken if hardware else ()
        grid = make_grid(plan, title=job.name, fold=not all_nodes, only=names, taken=taken)
        if form is Format.SVG:
            from roost.render.svg import draw_svg

            write_text(draw_svg(plan, grid), out)
        elif form is Format.HTML:
            from roost.render.html import draw_html

            write_text(draw_html(plan, grid), out)
        else:
            draw_map(grid, out)
            if hardware is not None and out is None:
                from roost.cli.live import start_check

                print_text(start_check(plan, hardware))
            print_warnings(plan)


def diff(
    before: Annotated[Path, typer.Argument(metavar="A", help="A job, a plan saved as JSON, or a run.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
    cluster: Cluster = None,
    inventory: Inventory = None,
    live: Live = False,
    form: TextForm = TextFormat.TEXT,
    placement: Rules = Kind.AUTO,
    no_isolate: Shared = False,
) -> None:
    """Compare two plans, or two runs: exit 0 if the plans are alike, 1 if they differ."""
    from roost.cli import show
    from roost.cli.load import diff_runs, load_plans

    one, other = load_plans(before, after, make_flags(cluster, inventory, live, placement, no_isolate))
    difference = one.diff(other)
    facts = diff_runs(before, after)
    if form is TextFormat.JSON:
        runs = {} if facts is None else {"runs": {what: [a, b] for what, a, b in facts}}
        write_text(show.as_json({**difference.to_dict(), **runs}), None)
    else:
        print_text(show.diff(difference))
        if facts:
            from roost.cli import run_text

            print_text(run_text.differences(facts))
    raise typer.Exit(1 if difference else 0)


def where(
    job: Job,
    worker: Annotated[
        str,
        typer.Argument(
            metavar="WORKER", help="A worker: component and rank, as in actor:3.", autocompletion=complete_worker
        ),
    ],
    cluster: Cluster = None,
    inventory: Inventory = None,
    live: Live = False,
    form: TextForm = TextFormat.TEXT,
    placement: Rules = Kind.AUTO,
    no_isolate: Shared = False,
) -> None:
    """Tell where a worker sits and which environment it gets."""
    from roost.cli import show
    from roost.cli.load import load_plan

    plan = load_plan(job, make_flags(cluster, inventory, live, placement, no_isolate))
    name, colon, rank = worker.rpartition(":")
    if not colon or not (rank.isascii() and rank.isdigit() and len(rank) < 10):
        raise ConfigError(f"{worker!r} is no worker", hint="write component:rank, as in actor:3")
    answer = show.where(plan, name, int(rank))
    write_text(show.as_json(answer), None) if form is TextFormat.JSON else print_text(show.where_text(plan, answer))


def who(
    job: Job,
    hardware: Annotated[
        str,
        typer.Argument(
            metavar="HARDWARE",
            help="Node and accelerator, as in 1:4; 1:Franka:0 for other hardware, 1 for a node.",
        ),
    ],
    cluster: Cluster = None,
    inventory: Inventory = None,
    live: Live = False,
    form: TextForm = TextFormat.TEXT,
    placement: Rules = Kind.AUTO,
    no_isolate: Shared = False,
) -> None:
    """Tell which workers sit on a piece of hardware."""
    from roost.cli import show
    from roost.cli.load import load_plan

    plan = load_plan(job, make_flags(cluster, inventory, live, placement, no_isolate))
    answer = show.who(plan, hardware)
    node_rank = int(hardware.partition(":")[0])
    if form is TextFormat.JSON:
        write_text(show.as_json(show.who_json(answer, node_rank)), None)
    else:
        print_text(show.who_text(answer, node_rank))


def lint(
    job: Job,
    cluster: Cluster = None,
    inventory: Inventory = None,
    live: Live = False,
    form: TextForm = TextFormat.TEXT,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if there is a warning.")] = False,
    placement: Rules = Kind.AUTO,
    no_isolate: Shared = False,
) -> None:
    """Tell what a person would want to know of a plan that is legal."""
    from roost.cli import show
    from roost.cli.load import load_plan
    from roost.placement.lint import lint

    found = lint(load_plan(job, make_flags(cluster, inventory, live, placement, no_isolate)))
    if form is TextFormat.JSON:
        write_text(show.as_json([{"code": i.code, "level": i.level, "message": i.message} for i in found]), None)
    else:
        print_text(show.findings(found))
    if strict and any(item.level == "warning" for item in found):
        raise typer.Exit(1)
