"""`roost nodes`: the nodes of the live cluster, in the order that a job gives them."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from roost.cli.limits import TIMEOUT_SECONDS
from roost.cli.live_cluster import STATUS, ask
from roost.cli.options import Address, Out, Timeout
from roost.cli.out import as_json, tell, write_text
from roost.cli.terminal import draw_map, print_text
from roost.cli.text.status import nodes_table
from roost.config.inventory import inventory_text
from roost.errors import CheckFailed, Problem
from roost.placement.plan import Plan
from roost.render.grid import make_grid
from roost.text import printable


def nodes(
    form: Annotated[
        Literal["table", "map", "json", "inventory"],
        typer.Option("--format", metavar="FORMAT", help="Output format: table, map, json or inventory."),
    ] = "table",
    out: Out = None,
    address: Address = None,
    timeout: Timeout = TIMEOUT_SECONDS,
) -> None:
    found = ask(f"{STATUS}.get_nodes", timeout, address=address)
    if form == "json":
        write_text(as_json([*(node.to_dict() for node in found.nodes), *(node.to_dict() for node in found.sick)]), out)
        return
    if form == "table":
        print_text(nodes_table(found.nodes, found.sick), out)
        return
    if found.topology is None:
        raise CheckFailed(Problem(message=node.problem, hint=node.hint) for node in found.sick)
    for node in found.sick:
        tell(f"note: a node is left out: {printable(node.problem)}")
    if form == "inventory":
        write_text(inventory_text(found.topology), out)
    else:
        draw_map(make_grid(Plan(topology=found.topology, components=()), title="the live cluster"), out=out)
