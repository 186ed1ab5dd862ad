"""`roost plan`: the plan of a job as a picture, a table, JSON or a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from roost.cli.completion import complete_component
from roost.cli.options import Job, Out, Overrides
from roost.cli.out import tell, write_text
from roost.cli.plans import Flags, Loaded, plan_job, read_job, split_jobs, with_flags
from roost.cli.terminal import draw_map, print_text
from roost.cli.text.plans import plan_table, start_text
from roost.errors import ConfigError
from roost.placement.strategies import collector_paused
from roost.render.grid import Grid, make_grid
from roost.text import at_most, join_words, plural

_MOST_WARNINGS = 3


@with_flags
def plan(
    job: Job,
    flags: Flags,
    overrides: Overrides = None,
    form: Annotated[
        Literal["map", "table", "json", "svg", "html", "job"],
        typer.Option("--format", metavar="FORMAT", help="Output format: map, table, json, svg, html, or job."),
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
    jobs, settings = split_jobs(job, overrides or ())
    if len(jobs) > 1 and form != "map":
        raise ConfigError(
            f"--format {form} is for one job, and there are {len(jobs)}", hint="leave it out, or give one"
        )
    plans = [plan_job(read_job(path, settings, flags), flags) for path in jobs]
    loaded = plans[0]
    found, hardware, flow = loaded.plan, loaded.live, loaded.flow
    names = component or found.names
    if form == "json":
        write_text(found.to_json(only=component) + "\n", out)
    elif form == "table":
        print_text(plan_table(found.only(names)), out)
    elif form == "job":
        from roost.cli.job_text import job_text  # only this needs it

        write_text(job_text(loaded, job.name), out)
    else:
        grids = [_grid(item, path, component, not all_nodes) for item, path in zip(plans, jobs, strict=True)]
        # The map on the terminal, which users wait for, does without the other renderers.
        if form == "svg":
            from roost.render.svg import draw_svg

            write_text(draw_svg(found, grids[0]), out)
        elif form == "html":
            from roost.render.flow import flow_html
            from roost.render.html import draw_html

            write_text(draw_html(found, grids[0], flow_html(flow) if flow else ()), out)
        else:
            below = ""
            if flow is not None and len(plans) == 1:
                from roost.render.flow import flow_lines

                below = "\n" + "\n".join(flow_lines(flow))
            draw_map(*grids, out=out, below=below)
            if hardware is not None and out is None:
                print_text(start_text(found, hardware))
    for item in plans:
        if item.foreign and not flags.hardware:
            nodes, gpus = item.foreign.size
            tell(f"note: no --cluster given: planned on {nodes}x{gpus}, which {item.foreign.name} asks for")
        _tell_findings(item, form)
    if any(finding.level == "error" for item in plans for finding in item.findings):
        raise typer.Exit(2)


@collector_paused()
def _grid(loaded: Loaded, job: Path, component: list[str] | None, fold: bool) -> Grid:
    foreign, taken = loaded.foreign, loaded.live.taken if loaded.live else ()
    title = f"{job.name} · {foreign.framework.name} ({foreign.framework.version})" if foreign else job.name
    assumed = f"! assumed: {join_words(foreign.settings.assumed)}" if foreign and foreign.settings.assumed else ""
    remarks = [assumed] if assumed else []
    names = component or loaded.plan.names
    return make_grid(
        loaded.plan, title=title, fold=fold, only=names, taken=taken, assumed=loaded.assumed, remarks=remarks
    )


def _tell_findings(loaded: Loaded, form: str) -> None:
    """Print what is wrong with a plan below its map; what its framework refuses, below every answer."""
    findings = loaded.findings
    for item in (item for item in findings if item.level == "error"):
        tell(str(item))
    warnings = [str(item) for item in findings if item.level == "warning"] if form == "map" else []
    more = plural(len(warnings) - _MOST_WARNINGS, "more warning")
    for line in at_most(warnings, _MOST_WARNINGS, f"and {more}: see roost check"):
        tell(line)
