"""`roost who`: the workers on a piece of hardware, or on all hardware of a node."""

from __future__ import annotations

from typing import Annotated

import typer

from roost.cli.options import Job, TextForm
from roost.cli.plans import Flags, load_plan, with_flags
from roost.cli.terminal import print_answer
from roost.cli.text.layout import facts
from roost.cli.text.plans import worker_names
from roost.config.hardware import ACCELERATOR, BARE_NODE
from roost.errors import ConfigError
from roost.placement.plan import Piece, Plan
from roost.text import join_words, plural


@with_flags
def who(
    job: Job,
    hardware: Annotated[
        str, typer.Argument(metavar="HARDWARE", help="An accelerator (1:4), other hardware (1:Franka:0) or a node (1).")
    ],
    flags: Flags,
    form: TextForm = "text",
) -> None:
    plan = load_plan(job, flags)
    node_rank, pieces = _find_pieces(plan, hardware)
    occupants = plan.occupants()
    found = {piece: occupants.get(piece, []) for piece in pieces if piece.kind != BARE_NODE or piece in occupants}
    hardware_json = [
        {
            "hardware_type": piece.kind,
            "local_rank": None if piece.kind == BARE_NODE else piece.local_rank,
            "workers": [str(worker) for worker in workers],
        }
        for piece, workers in found.items()
    ]
    lines = [
        (
            "the node itself" if piece.kind == BARE_NODE else f"{piece.kind} {piece.local_rank}",
            ", ".join(worker_names(workers)) or "none",
        )
        for piece, workers in found.items()
    ]
    answer = {"node_rank": node_rank, "hardware": hardware_json}
    print_answer(form, answer, lambda: facts([("node", str(node_rank)), *(lines or [("workers", "none")])]))


def _find_pieces(plan: Plan, text: str) -> tuple[int, list[Piece]]:
    """Return the node and the pieces that `1:4`, `1:Franka:0` or `1` names, a node's pieces in the order of the map."""
    parts = text.split(":")
    numbers = (parts[0], *parts[1:][-1:])
    if len(parts) > 3 or not all(part.isascii() and part.isdigit() and len(part) < 10 for part in numbers):
        hint = "write node:accelerator as in 1:4, 1:Franka:0, or 1 for a node"
        raise ConfigError(f"{text!r} is not a piece of hardware", hint=hint)
    node_rank = int(parts[0])
    if node_rank >= plan.topology.num_nodes:
        last = plan.topology.num_nodes - 1
        hint = f"node ranks are 0-{last}" if last else "there is only 0"
        raise ConfigError(f"there is no node {node_rank}", hint=hint)
    counts = {ACCELERATOR: len(plan.topology.nodes[node_rank].accelerators), **plan.topology.declared_on(node_rank)}
    if len(parts) == 1:
        pieces = [Piece(node_rank, kind, local) for kind, count in counts.items() for local in range(count)]
        return node_rank, [*pieces, Piece(node_rank, BARE_NODE, -1)]
    kind = parts[1] if len(parts) == 3 else ACCELERATOR
    local_rank = int(parts[-1])
    if kind not in counts:
        hint = f"it has {join_words(list(counts))}"
        raise ConfigError(f"node {node_rank} has no hardware of kind {kind!r}", hint=hint)
    if local_rank >= counts[kind]:
        hint = f"it has {plural(counts[kind], kind)}" + (f", 0-{counts[kind] - 1}" if counts[kind] > 1 else "")
        raise ConfigError(f"node {node_rank} has no {kind} {local_rank}", hint=hint)
    return node_rank, [Piece(node_rank, kind, local_rank)]
