"""Answers of the command line as text: tables, facts, differences, findings."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from roost.errors import ConfigError, counted, said
from roost.placement.environ import worker_interpreter
from roost.placement.plan import Piece, Plan, Worker, seat
from roost.placement.ranks import format_ranks
from roost.placement.topology import ACCELERATOR, BARE_NODE
from roost.render.grid import make_grid
from roost.render.terminal import draw_terminal

if TYPE_CHECKING:
    from roost.placement.diff import PlanDiff
    from roost.placement.lint import Finding

_MOST_LINES = 40


def plan_map(plan: Plan, title: str, width: int, ascii_only: bool, *, fold: bool) -> Text:
    """The map."""
    return draw_terminal(make_grid(plan, title=title, fold=fold), width=width, ascii_only=ascii_only)


def table(plan: Plan) -> Text:
    """One line for each worker, made to be read and to be cut with awk."""
    head = ("WORKER", "NODE", "HARDWARE", "VISIBLE", "LOCAL", "GROUP")
    rows: list[tuple[str, ...]] = [head]
    for component in plan.components:
        for item in component.placements:
            own = f"{item.hardware_type}:{format_ranks(item.local_hardware_ranks)}"
            rows.append(
                (
                    f"{component.name}:{item.rank}",
                    str(item.cluster_node_rank),
                    own if item.local_hardware_ranks else "-",
                    ",".join(item.visible_accelerators) or "-",
                    f"{item.local_rank}/{item.local_world_size}",
                    item.node_group_label,
                )
            )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)).rstrip() for row in rows]
    return Text("\n".join(lines))


def where(plan: Plan, component: str, rank: int) -> dict[str, Any]:
    """All that is known of one worker."""
    placement = plan.placement(component, rank)
    node = plan.topology.nodes[placement.cluster_node_rank]
    answer: dict[str, Any] = {
        "worker": f"{component}:{rank} of {plan.component(component).world_size}",
        "node": placement.cluster_node_rank,
        "hardware": seat(placement).partition(", ")[2] or "the node itself",
        "node_group": placement.node_group_label,
    }
    for key, value in (("name", node.name), ("address", node.address)):
        if value:
            answer[f"node_{key}"] = value
    if interpreter := worker_interpreter(plan, component, rank):
        answer["interpreter"] = interpreter
    answer["environment"] = plan.environment(component, rank)
    return answer


def who(plan: Plan, text: str) -> dict[str, Any]:
    """The workers on a piece of hardware: `1:4`, `1:Franka:0`, or all on a node, `1`."""
    parts = text.split(":")
    numbers = [part for part in (parts[0], *parts[1:][-1:]) if not (part.isascii() and part.isdigit())]
    if len(parts) > 3 or numbers or any(len(part) > 64 for part in parts):
        raise ConfigError(
            f"{text!r} is no piece of hardware", hint="write node:accelerator as in 1:4, 1:Franka:0, or 1 for a node"
        )
    node_rank = int(parts[0])
    if node_rank >= plan.topology.num_nodes:
        raise ConfigError(f"there is no node {node_rank}", hint=f"node ranks are 0-{plan.topology.num_nodes - 1}")
    found = plan.occupants()
    if len(parts) == 1:
        on_node = {str(_piece_text(piece)): found[piece] for piece in sorted(found) if piece.node_rank == node_rank}
        return {"node": node_rank, "workers": {name: _names(workers) for name, workers in on_node.items()}}
    kind = parts[1] if len(parts) == 3 else ACCELERATOR
    local_rank = int(parts[-1])
    count = _count(plan, node_rank, kind)
    if local_rank >= count:
        raise ConfigError(
            f"node {node_rank} has no {kind} {local_rank}",
            hint=f"it has {counted(count, kind)}" + (f", 0-{count - 1}" if count > 1 else ""),
        )
    workers = found.get(Piece(node_rank, kind, local_rank), [])
    return {"node": node_rank, "hardware": f"{kind} {local_rank}", "workers": _names(workers)}


def facts(answer: Mapping[str, Any]) -> Text:
    """An answer as lines of name and value."""
    text = Text()
    size = max(len(name) for name in answer)
    for name, value in answer.items():
        text.append(name.replace("_", " ").ljust(size + 2), style="bold")
        if isinstance(value, Mapping):
            lines = [
                f"{key}={item}" if isinstance(item, str) else f"{key}: {', '.join(item)}" for key, item in value.items()
            ]
            text.append(("\n" + " " * (size + 2)).join(lines) or "none")
        elif isinstance(value, list):
            text.append(", ".join(value) or "none")
        else:
            text.append(str(value))
        text.append("\n")
    text.rstrip()
    return text


def diff(difference: PlanDiff) -> Text:
    """What changes, one line each."""
    text = Text()
    for what, before, after in difference.facts:
        text.append(f"~ {what}: {before} -> {after}\n", style="yellow")
    parts: list[tuple[str, str, list[str]]] = [
        ("moved", "yellow", [f"{m.worker}: {seat(m.before)} -> {seat(m.after)}" for m in difference.moved]),
        ("appeared", "green", _names(difference.appeared)),
        ("went", "red", _names(difference.went)),
        (
            "changed variables",
            "yellow",
            [
                f"{item.worker}: " + ", ".join(f"{n} {a or 'unset'} -> {b or 'unset'}" for n, a, b in item.variables)
                for item in difference.changed_variables
            ],
        ),
        (
            "changed hands",
            "yellow",
            [
                f"{_piece_text(item.piece)}: {', '.join(item.before) or 'idle'} -> {', '.join(item.after) or 'idle'}"
                for item in difference.changed_hands
            ],
        ),
    ]
    signs = {"green": "+", "red": "-", "yellow": "~"}
    for title, style, lines in parts:
        if not lines:
            continue
        text.append(f"{title} ({len(lines)})\n", style="bold")
        for line in lines[:_MOST_LINES]:
            text.append(f"  {signs[style]} {line}\n", style=style)
        if len(lines) > _MOST_LINES:
            text.append(f"  and {len(lines) - _MOST_LINES} more; --format json has them all\n", style="dim")
    if not difference:
        text.append("the plans are alike")
    text.rstrip()
    return text


def findings(found: Sequence[Finding]) -> Text:
    """Findings, one line each."""
    text = Text()
    for item in found:
        text.append(f"{item.level}: ", style="bold yellow" if item.level == "warning" else "bold cyan")
        text.append(f"{item.message} [{item.code}]\n")
    text.append("" if found else "nothing to say")
    text.rstrip()
    return text


def json_out(answer: object) -> None:
    """Print an answer as JSON."""
    sys.stdout.write(json.dumps(answer, indent=2, ensure_ascii=False) + "\n")


def _piece_text(piece: Piece) -> str:
    return str(piece) if piece.kind == BARE_NODE else f"node {piece.node_rank} {piece.kind} {piece.local_rank}"


def _names(workers: Sequence[Worker]) -> list[str]:
    """Workers as `actor:3`, many of one component as `env:0-63`."""
    ranks: dict[str, list[int]] = {}
    for worker in workers:
        ranks.setdefault(worker.component, []).append(worker.rank)
    return [f"{name}:{format_ranks(sorted(found))}" for name, found in ranks.items()]


def _count(plan: Plan, node_rank: int, kind: str) -> int:
    if kind == ACCELERATOR:
        return len(plan.topology.nodes[node_rank].accelerators)
    declared = [item.type for group in plan.topology.groups for item in group.hardware if item.node_rank == node_rank]
    if kind not in declared:
        known = [ACCELERATOR, *dict.fromkeys(declared)]
        raise ConfigError(f"node {node_rank} has no hardware of kind {kind!r}", hint=f"it has {said(known)}")
    return declared.count(kind)
