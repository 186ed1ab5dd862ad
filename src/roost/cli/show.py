"""Answers of the command line as text: tables, facts, differences, findings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from roost.config.hardware import ACCELERATOR, BARE_NODE
from roost.config.ranks import format_ranks
from roost.errors import ConfigError
from roost.placement.environment import worker_interpreter
from roost.placement.plan import Piece, Plan, WorkerId, seat
from roost.text import join_words, plural

if TYPE_CHECKING:
    from roost.placement.diff import PlanDiff
    from roost.placement.lint import Finding

_MOST_LINES = 40


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
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> Text:
    """Rows of cells in columns, with no line longer than it must be."""
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(set_cell_size(cell, size) for cell, size in zip(row, widths, strict=True)) for row in rows]
    return Text("\n".join(line.rstrip() for line in lines))


def where(plan: Plan, component: str, rank: int) -> dict[str, Any]:
    """All that is known of one worker, as JSON has it."""
    placement = plan.placement(component, rank)
    return {
        "worker": f"{component}:{rank}",
        "world_size": plan.component(component).world_size,
        "node_rank": placement.cluster_node_rank,
        "hardware_type": placement.hardware_type,
        "local_hardware_ranks": list(placement.local_hardware_ranks),
        "node_group": placement.node_group_label,
        "python_interpreter_path": worker_interpreter(plan.topology, plan.placement(component, rank)),
        "environment": plan.environment(component, rank),
    }


def where_text(plan: Plan, answer: Mapping[str, Any]) -> Text:
    """What `where` found, for people."""
    node = plan.topology.nodes[answer["node_rank"]]
    named = ", ".join(part for part in (node.name, node.address) if part)
    ranks = ",".join(map(str, answer["local_hardware_ranks"]))
    lines = [
        ("worker", f"{answer['worker']} of {answer['world_size']}"),
        ("node", f"{answer['node_rank']} ({named})" if named else str(answer["node_rank"])),
        ("hardware", f"{answer['hardware_type']} {ranks}" if ranks else "the node itself"),
        ("node group", answer["node_group"]),
        ("interpreter", answer["python_interpreter_path"] or ""),
    ]
    variables = [f"{name}={value}" for name, value in answer["environment"].items()]
    lines += [("environment" if number == 0 else "", text) for number, text in enumerate(variables)]
    return facts([(name, text) for name, text in lines if text])


def who(plan: Plan, text: str) -> dict[Piece, list[WorkerId]]:
    """The workers on a piece of hardware (`1:4`, `1:Franka:0`), or on every piece of a node (`1`)."""
    parts = text.split(":")
    numbers = (parts[0], *parts[1:][-1:])
    if len(parts) > 3 or not all(part.isascii() and part.isdigit() and len(part) < 10 for part in numbers):
        raise ConfigError(
            f"{text!r} is no piece of hardware", hint="write node:accelerator as in 1:4, 1:Franka:0, or 1 for a node"
        )
    node_rank = int(parts[0])
    if node_rank >= plan.topology.num_nodes:
        last = plan.topology.num_nodes - 1
        raise ConfigError(
            f"there is no node {node_rank}", hint=f"node ranks are 0-{last}" if last else "there is only 0"
        )
    found = plan.occupants()
    if len(parts) == 1:
        # All that the node has, in the order of the map, used or not; the node itself only where it is.
        kinds = {ACCELERATOR: _count(plan, node_rank, ACCELERATOR), **plan.topology.declared_on(node_rank)}
        pieces = [Piece(node_rank, kind, local) for kind, count in kinds.items() for local in range(count)]
        pieces += [piece for piece in found if piece == Piece(node_rank, BARE_NODE, -1)]
        return {piece: found.get(piece, []) for piece in pieces}
    kind = parts[1] if len(parts) == 3 else ACCELERATOR
    local_rank = int(parts[-1])
    count = _count(plan, node_rank, kind)
    if local_rank >= count:
        raise ConfigError(
            f"node {node_rank} has no {kind} {local_rank}",
            hint=f"it has {plural(count, kind)}" + (f", 0-{count - 1}" if count > 1 else ""),
        )
    piece = Piece(node_rank, kind, local_rank)
    return {piece: found.get(piece, [])}


def who_json(answer: Mapping[Piece, Sequence[WorkerId]], node_rank: int) -> dict[str, Any]:
    """What `who` found, as JSON has it."""
    hardware = [
        {
            "hardware_type": piece.kind,
            "local_rank": None if piece.kind == BARE_NODE else piece.local_rank,
            "workers": [str(worker) for worker in workers],
        }
        for piece, workers in answer.items()
    ]
    return {"node_rank": node_rank, "hardware": hardware}


def who_text(answer: Mapping[Piece, Sequence[WorkerId]], node_rank: int) -> Text:
    """What `who` found, for people."""
    lines = [("node", str(node_rank))]
    for piece, workers in answer.items():
        name = "the node itself" if piece.kind == BARE_NODE else f"{piece.kind} {piece.local_rank}"
        lines.append((name, ", ".join(_names(workers)) or "nobody"))
    if not answer:
        lines.append(("workers", "nobody"))
    return facts(lines)


def diff(difference: PlanDiff) -> Text:
    """What changes, one line each."""
    text = Text()
    for what, before, after in difference.facts[:_MOST_LINES]:
        text.append(f"~ {what}: {before} -> {after}\n", style="yellow")
    if len(difference.facts) > _MOST_LINES:
        text.append(f"and {len(difference.facts) - _MOST_LINES} more; --format json has them all\n", style="dim")
    parts: list[tuple[str, str, list[str]]] = [
        ("moved", "yellow", [f"{m.worker}: {seat(m.before)} -> {seat(m.after)}" for m in difference.moved]),
        ("appeared", "green", _names(difference.appeared)),
        ("went", "red", _names(difference.went)),
        (
            "changed variables",
            "yellow",
            [
                f"{item.worker}: " + ", ".join(f"{name} {_shown(a)} -> {_shown(b)}" for name, a, b in item.variables)
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
    counts = {"appeared": len(difference.appeared), "went": len(difference.went)}
    for title, style, lines in parts:
        if not lines:
            continue
        text.append(f"{title} ({counts.get(title, len(lines))})\n", style="bold")
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


def as_json(answer: object) -> str:
    """An answer as JSON text."""
    return json.dumps(answer, indent=2) + "\n"


def facts(lines: Sequence[tuple[str, str]]) -> Text:
    """Names and what is to say of each, in two columns."""
    text = Text()
    size = max(cell_len(name) for name, _ in lines)
    for name, value in lines:
        text.append(set_cell_size(name, size + 2), style="bold")
        text.append(f"{value}\n")
    text.rstrip()
    return text


def _shown(value: str | None) -> str:
    return "unset" if value is None else value or "''"


def _piece_text(piece: Piece) -> str:
    return str(piece) if piece.kind == BARE_NODE else f"node {piece.node_rank} {piece.kind} {piece.local_rank}"


def _names(workers: Sequence[WorkerId]) -> list[str]:
    """Workers as `actor:3`, many of one component as `env:0-63`."""
    ranks: dict[str, list[int]] = {}
    for worker in workers:
        ranks.setdefault(worker.component, []).append(worker.rank)
    return [f"{name}:{format_ranks(sorted(found))}" for name, found in ranks.items()]


def _count(plan: Plan, node_rank: int, kind: str) -> int:
    if kind == ACCELERATOR:
        return len(plan.topology.nodes[node_rank].accelerators)
    declared = plan.topology.declared_on(node_rank)
    if kind not in declared:
        known = [ACCELERATOR, *declared]
        raise ConfigError(f"node {node_rank} has no hardware of kind {kind!r}", hint=f"it has {join_words(known)}")
    return declared[kind]
