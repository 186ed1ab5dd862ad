"""`roost nodes`: the nodes of the live cluster, in the order that a job gives them."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from roost.cli.options import Address, Out
from roost.cli.out import as_json, write_text
from roost.cli.terminal import draw_map, print_text
from roost.cli.text.status import nodes_table
from roost.config.inventory import inventory_text
from roost.placement.plan import Plan
from roost.render.grid import make_grid
from roost.runtime.nodes.discover import make_topology
from roost.runtime.status import get_nodes


def nodes(
    form: Annotated[
        Literal["table", "map", "json", "inventory"],
        typer.Option("--format", "-f", metavar="FORMAT", help="Output format: table, map, json or inventory."),
    ] = "table",
    out: Out = None,
    address: Address = None,
) -> None:
    found = get_nodes(address)
    if form == "json":
        write_text(as_json([node.to_dict() for node in found]), out)
    elif form == "inventory":
        write_text(inventory_text(make_topology(found)), out)
    elif form == "map":
        draw_map(make_grid(Plan(topology=make_topology(found), components=()), title="the live cluster"), out)
    else:
        print_text(nodes_table(found), out)
