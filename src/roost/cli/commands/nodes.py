"""`roost nodes`: the nodes of the live cluster, in the order that a job gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import typer
from rich.text import Text

from roost.cli.limits import TIMEOUT_SECONDS
from roost.cli.live_cluster import STATUS, ask
from roost.cli.options import Address, Out, Timeout
from roost.cli.out import as_json, tell, write_text
from roost.cli.terminal import aligned, draw_map, print_text
from roost.config.inventory import inventory_text
from roost.errors import CheckFailed, Problem
from roost.placement.plan import Plan
from roost.render.grid import make_grid
from roost.runtime.nodes.info import NodeInfo, SickNode
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


def nodes_table(nodes: Sequence[NodeInfo], sick: Sequence[SickNode] = ()) -> Text:
    """Make one line for each node, and name the problem of each node that does not answer."""
    rows = [("NODE", "ADDRESS", "NAME", "ACCELERATORS", "CPUS", "MEMORY", "PYTHON", "RAY", "RAY ID")]
    for node in nodes:
        has, memory = "-", f"{node.memory / 2**30:.0f} GiB"
        if node.accelerators:
            models = "/".join(dict.fromkeys(item.model or str(item.type) for item in node.accelerators))
            size = node.accelerators[0].memory
            devices = [item.device for item in node.accelerators]
            has = f"{len(devices)} x {models}" + (f" {size / 2**30:.0f} GiB" if size else "")
            if devices != [str(index) for index in range(len(devices))]:
                has += f" (devices {','.join(devices)})"
        rank = f"{node.rank}{' (head)' if node.is_head else ''}"
        versions = node.python, node.ray, node.ray_id[:12]
        rows.append((rank, node.address, node.name, has, str(node.cpus), memory, *versions))
    text = aligned(rows).append("\n").append_text(sick_text(sick))
    text.rstrip()
    return text


def sick_text(nodes: Sequence[SickNode]) -> Text:
    """Name the problem of each node that does not answer."""
    text = Text()
    for node in nodes:
        which = "a node" if node.rank is None else f"node {node.rank}"
        text.append(f"{which} is sick: {printable(node.problem)}\n", style="red")
        if node.hint:
            text.append(f"  hint: {node.hint}\n", style="dim")
    return text
