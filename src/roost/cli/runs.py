"""Commands that look at runs of before, and that run them again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from roost.cli.completion import complete_run
from roost.cli.options import Address, TextForm, TextFormat
from roost.cli.out import draw_map, print_text, write_text

_WHICH = "Its id, the first characters of that, or its folder"


def runs(
    form: TextForm = TextFormat.TEXT,
    number: Annotated[int, typer.Option("--number", "-n", metavar="N", min=1, help="So many at most.")] = 20,
) -> None:
    """List your runs on this machine, the newest first."""
    from roost.cli import run_text, show
    from roost.runtime.runs.index import list_runs

    found = [(run.id, run.folder, run.record) for run in list_runs()]
    if form is TextFormat.JSON:
        write_text(show.as_json([run_text.summary(*item) for item in found[:number]]), None)
    else:
        print_text(run_text.table(found, number))


def show(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help=f"{_WHICH}; else your newest run.", autocompletion=complete_run)
    ] = "latest",
    form: TextForm = TextFormat.TEXT,
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Write the map of its plan to this file instead.")
    ] = None,
) -> None:
    """Tell all that is known of a run: what ran where, for how long, and how it ended."""
    from roost.cli import run_text, show
    from roost.cli.load import plan_of_run
    from roost.render.grid import make_grid
    from roost.runtime.runs.index import find_run, list_runs, read_run
    from roost.text import printable

    folder = find_run(run)
    record = read_run(folder)
    if svg is not None:
        from roost.render.svg import draw_svg

        plan = plan_of_run(folder)
        write_text(draw_svg(plan, make_grid(plan, title=printable(record.what))), svg)
    elif form is TextFormat.JSON:
        write_text(show.as_json({"folder": str(folder), **record.to_dict()}), None)
    else:
        id_here = next((item.id for item in list_runs() if item.folder == folder), None)
        print_text(run_text.facts_of(record, folder, id_here))
        if record.plan is not None:
            grid = make_grid(plan_of_run(folder), title=printable(record.what))
            write_text("\n", None)
            draw_map(grid, None)


def rerun(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help=f"{_WHICH}; latest is your newest run.", autocompletion=complete_run)
    ],
    same: Annotated[
        bool, typer.Option("--same", help="Refuse, and exit with 1, unless every worker would sit and see as it did.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    address: Address = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", metavar="DIR", help="The folder of the new run; else one of its own.")
    ] = None,
) -> None:
    """Run again what a run ran: its job, with the file as it was then, or its script."""
    from roost.cli import rerun
    from roost.cli.load import tell
    from roost.runtime.runs.index import find_run, read_run

    folder = find_run(run)
    try:
        rerun.run_again(folder, read_run(folder), same=same, dry_run=dry_run, address=address, run_dir=run_dir)
    except rerun.PlanDiffers as error:
        tell(str(error))
        raise typer.Exit(1) from None
