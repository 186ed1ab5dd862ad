"""`roost plan`: the plan of a job as a picture, a table, JSON or a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.text import Text

from roost.cli.completion import complete_component
from roost.cli.options import Job, Out, Overrides
from roost.cli.out import tell, write_text
from roost.cli.plans import Flags, Loaded, plan_job, read_job, split_jobs, with_flags
from roost.cli.terminal import aligned, draw_map, print_text
from roost.config.hardware import ACCELERATOR
from roost.config.ranks import format_ranks
from roost.errors import ConfigError
from roost.placement.strategies import collector_paused
from roost.render.grid import Grid, Line, make_grid
from roost.text import at_most, join_words, plural

if TYPE_CHECKING:
    from roost.placement.plan import Plan
    from roost.runtime.status import LiveHardware

_MOST_WARNINGS = 3
_MOST_HELD = 16


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
        print_text(_table(found.only(names)), out)
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

            parts = [*(flow_html(flow) if flow else ())]
            if loaded.ledger is not None:
                from roost.render.fit import memory_html

                parts += memory_html(loaded.ledger)
            write_text(draw_html(found, grids[0], parts), out)
        else:
            below = ""
            if flow is not None and len(plans) == 1:
                from roost.render.flow import flow_lines

                below = "\n" + "\n".join(flow_lines(flow))
            if loaded.ledger is not None and len(plans) == 1:
                below += "\n" + "\n".join(loaded.ledger.lines())
            draw_map(*grids, out=out, below=below)
            if hardware is not None and out is None:
                print_text(_start_text(found, hardware))
    for item in plans:
        if item.foreign and not flags.hardware:
            nodes, gpus = item.foreign.size
            tell(f"note: no --cluster given: planned on {nodes}x{gpus}, which {item.foreign.name} asks for")
        # What is wrong stands below a map; what its framework refuses, below every answer.
        for finding in (finding for finding in item.findings if finding.level == "error"):
            tell(str(finding))
        warnings = [str(finding) for finding in item.findings if finding.level == "warning"] if form == "map" else []
        more = plural(len(warnings) - _MOST_WARNINGS, "more warning")
        for line in at_most(warnings, _MOST_WARNINGS, f"and {more}: see roost check"):
            tell(line)
    if any(finding.level == "error" for item in plans for finding in item.findings):
        raise typer.Exit(2)


@collector_paused()
def _grid(loaded: Loaded, job: Path, component: list[str] | None, fold: bool) -> Grid:
    foreign, taken = loaded.foreign, loaded.live.taken if loaded.live else ()
    title = f"{job.name} · {foreign.framework.name} ({foreign.framework.version})" if foreign else job.name
    assumed = f"! assumed: {join_words(foreign.settings.assumed)}" if foreign and foreign.settings.assumed else ""
    remarks = [assumed] if assumed else []
    names = component or loaded.plan.names
    lines: dict[int, list[Line]] = {}
    if loaded.ledger is not None or loaded.rules is not None:
        from roost.render.fit import domain_lines, memory_lines  # few jobs need it

        levels = [rule.level for rule in loaded.rules.rules] if loaded.rules else []
        lines = domain_lines(loaded.plan.topology, levels)
        for rank, bars in (memory_lines(loaded.ledger) if loaded.ledger else {}).items():
            lines.setdefault(rank, []).extend(bars)
    for node in loaded.live.nodes if loaded.live else ():
        if node.numa:
            from roost.render.fit import brackets  # few machines tell

            cores: dict[int | None, str] = {number: f"cores {format_ranks(own)}" for number, own in node.numa}
            near = brackets([cores.get(one.numa, "any core") for one in node.accelerators])
            lines.setdefault(node.rank, []).append(("numa", near))
    return make_grid(
        loaded.plan,
        title=title,
        fold=fold,
        only=names,
        taken=taken,
        lines=lines,
        assumed=loaded.assumed,
        remarks=remarks,
    )


def _table(plan: Plan) -> Text:
    """Make one line for each worker, easy to cut with awk."""
    rows: list[tuple[str, ...]] = [("WORKER", "NODE", "HARDWARE", "VISIBLE", "LOCAL", "GROUP")]
    rows += [
        (
            f"{component.name}:{item.rank}",
            str(item.cluster_node_rank),
            f"{item.hardware_type}:{format_ranks(item.local_hardware_ranks)}" if item.local_hardware_ranks else "-",
            ",".join(item.visible_accelerators) or "-",
            f"{item.local_rank}/{item.local_world_size}",
            item.node_group_label,
        )
        for component in plan.components
        for item in component.placements
    ]
    return aligned(rows)


def _start_text(plan: Plan, live: LiveHardware) -> Text:
    """Say whether a plan could start now, and if not, who holds its accelerators."""
    from roost.placement.fit import nearest_fit  # only a live cluster needs it

    wanted = sorted(piece for piece in plan.occupants() if piece.kind == ACCELERATOR)
    held = [piece for piece in wanted if live.holdings.of(piece)]
    unsure = sorted({piece.node_rank for piece in wanted} & set(live.holdings.somewhere))
    if not held and not unsure:
        return Text("this plan would start now: its accelerators are free", style="green")
    count = plural(len(held), "accelerator")
    first = f"this plan would not start now: {count} of it taken" if held else "this plan may not start now"
    lines = at_most([f"{piece}  {join_words(live.holdings.of(piece))}" for piece in held], _MOST_HELD)
    for rank in unsure:
        holders = join_words([f"{item.amount:g} {item.holder}" for item in live.holdings.somewhere[rank]])
        lines.append(f"node {rank}: {holders}; which is not known")
    components = {component.name: component.placements for component in plan.components}
    fit = nearest_fit(plan.topology, components, live.holdings.free_pieces(live.nodes))
    lines += ["this would fit now: " + ", ".join(f"{name}: {ranks}" for name, ranks in fit.items())] if fit else []
    return Text.assemble((first, "red" if held else "yellow"), *(f"\n  {line}" for line in lines))
