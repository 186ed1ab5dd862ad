"""`roost nodes`: the nodes of the live cluster, in the order that a job gives them."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

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


class Format(StrEnum):
    """The formats of a list of nodes."""

    TABLE = "table"
    MAP = "map"
    JSON = "json"
    INVENTORY = "inventory"


def nodes(
    form: Annotated[
        Format, typer.Option("--format", "-f", metavar="FORMAT", help="Output format: table, map, json or inventory.")
    ] = Format.TABLE,
    out: Out = None,
    address: Address = None,
) -> None:
    found = get_nodes(address)
    if form is Format.JSON:
        write_text(as_json([node.to_dict() for node in found]), out)
    elif form is Format.INVENTORY:
        write_text(inventory_text(make_topology(found)), out)
    elif form is Format.MAP:
        draw_map(make_grid(Plan(topology=make_topology(found), components=()), title="the live cluster"), out)
    else:
        print_text(nodes_table(found), out)
