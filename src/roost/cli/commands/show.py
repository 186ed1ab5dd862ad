"""`roost show`: all that is known about a run, and the map of its plan; or what its workers did, as a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from roost.cli.options import Out, TextForm
from roost.cli.out import as_json, write_text
from roost.cli.runs import Run, saved_plan
from roost.cli.terminal import draw_map, print_text
from roost.cli.text.runs import run_text
from roost.errors import ConfigError
from roost.render.grid import make_grid
from roost.render.svg import draw_svg
from roost.runtime.runs.index import find_run, list_runs, read_run
from roost.text import printable
from roost.watch.live import LiveRun, read_whole
from roost.watch.trace import to_trace


def show(
    run: Run = "latest",
    form: TextForm = "text",
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Write the map of its plan to this file instead.")
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Write what its workers did, as a trace that Perfetto opens.")
    ] = False,
    out: Out = None,
) -> None:
    if trace and svg is not None:
        raise ConfigError("--trace and --svg write different files", hint="give one of them; --out names the trace's")
    folder = find_run(run)
    if trace:
        write_text(to_trace(read_whole(folder)) + "\n", out)
        return
    record = read_run(folder)
    title = printable(record.what)
    if svg is not None:
        plan = saved_plan(folder)
        write_text(draw_svg(plan, make_grid(plan, title=title)), svg)
        return
    if form == "json":
        write_text(as_json({"folder": str(folder), **record.to_dict()}), out)
        return
    id_here = next((item.id for item in list_runs() if item.folder == folder), None)
    told = run_text(record, folder, id_here, _remarks(folder))
    if record.plan is None:
        print_text(told, out)
        return
    grid = make_grid(saved_plan(folder), title=title)
    draw_map(grid, out=out, above=told)


def _remarks(folder: Path) -> tuple[str, ...]:
    """Say what is missing in the events of a run, and why."""
    try:
        return LiveRun(folder).refresh().lost
    except ConfigError:
        return ()
