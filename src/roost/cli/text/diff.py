"""The difference between two plans as text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from roost.cli.text.plans import worker_names
from roost.config.hardware import BARE_NODE
from roost.placement.diff import PlanDiff
from roost.placement.plan import Piece, seat

_MOST_LINES = 40


def diff_text(difference: PlanDiff) -> Text:
    """List what changes from one plan to another."""
    text = Text()
    _append_lines(text, [f"~ {what}: {before} -> {after}" for what, before, after in difference.facts], "yellow")
    variables = [
        f"{item.worker}: " + ", ".join(f"{name} {_value(a)} -> {_value(b)}" for name, a, b in item.variables)
        for item in difference.changed_variables
    ]
    hands = [
        f"{_piece_name(item.piece)}: {', '.join(item.before) or 'idle'} -> {', '.join(item.after) or 'idle'}"
        for item in difference.changed_hands
    ]
    for title, count, sign, style, lines in (
        ("moved", None, "~", "yellow", [f"{m.worker}: {seat(m.before)} -> {seat(m.after)}" for m in difference.moved]),
        ("appeared", len(difference.appeared), "+", "green", worker_names(difference.appeared)),
        ("went", len(difference.went), "-", "red", worker_names(difference.went)),
        ("changed variables", None, "~", "yellow", variables),
        ("changed hands", None, "~", "yellow", hands),
    ):
        if lines:
            text.append(f"{title} ({count or len(lines)})\n", style="bold")
            _append_lines(text, [f"  {sign} {line}" for line in lines], style)
    text.append("" if difference else "the plans are alike")
    text.rstrip()
    return text


def _append_lines(text: Text, lines: Sequence[str], style: str) -> None:
    for line in lines[:_MOST_LINES]:
        text.append(f"{line}\n", style=style)
    if len(lines) > _MOST_LINES:
        indent = "  " if lines[0].startswith(" ") else ""
        text.append(f"{indent}and {len(lines) - _MOST_LINES} more; --format json has them all\n", style="dim")


def _value(value: str | None) -> str:
    return "unset" if value is None else value or "''"


def _piece_name(piece: Piece) -> str:
    return str(piece) if piece.kind == BARE_NODE else f"node {piece.node_rank} {piece.kind} {piece.local_rank}"
