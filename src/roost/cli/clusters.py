"""Commands that look at the live cluster, or start one to practise on."""

from __future__ import annotations

from typing import Annotated

import typer

from roost.cli.options import Address, NodesFormat, Out, TextForm, TextFormat
from roost.cli.out import draw_map, print_text, write_text


def nodes(
    form: Annotated[
        NodesFormat,
        typer.Option("--format", "-f", metavar="FORMAT", help="How to show them: table, map, json or inventory."),
    ] = NodesFormat.TABLE,
    out: Out = None,
    address: Address = None,
) -> None:
    """Show the nodes of the live cluster, with their ranks."""
    from roost.cli import live, show
    from roost.runtime.nodes.discover import make_topology
    from roost.runtime.status import look_at_nodes

    nodes = look_at_nodes(address)
    if form is NodesFormat.JSON:
        write_text(show.as_json([node.to_dict() for node in nodes]), out)
    elif form is NodesFormat.INVENTORY:
        from roost.config.inventory import inventory_text

        write_text(inventory_text(make_topology(nodes)), out)
    elif form is NodesFormat.MAP:
        from roost.placement.plan import Plan
        from roost.render.grid import make_grid

        grid = make_grid(Plan(topology=make_topology(nodes), components=()), title="the live cluster")
        draw_map(grid, out)
    else:
        print_text(live.nodes_table(nodes), out)


def status(
    form: TextForm = TextFormat.TEXT,
    address: Address = None,
) -> None:
    """Tell which jobs are on the live cluster, and who has what."""
    from roost.cli import live, show
    from roost.runtime.status import look_at_jobs

    status = look_at_jobs(address)
    if form is TextFormat.JSON:
        write_text(show.as_json(status.to_dict()), None)
    else:
        print_text(live.status_text(status))


def up(
    spec: Annotated[
        str, typer.Argument(metavar="CLUSTER", help="Nodes x accelerators [: model]: 2x4, or 2x8:H100,1x0.")
    ],
    cpus: Annotated[
        int, typer.Option("--cpus", metavar="N", help="How many CPUs each node claims to have.", min=1)
    ] = 8,
) -> None:
    """Start a practice cluster here: real Ray nodes, fake accelerators."""
    from roost.cli import live

    print_text(live.start_practice(spec, cpus))


def down() -> None:
    """Stop the practice cluster."""
    from roost.cli import live

    print_text(live.stop_practice())
