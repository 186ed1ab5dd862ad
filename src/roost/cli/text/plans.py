"""Plans as text: tables, findings, whether a plan could start, and what differs between two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from roost.cli.terminal import aligned
from roost.config.hardware import ACCELERATOR, BARE_NODE
from roost.config.ranks import format_ranks
from roost.placement.fit import nearest_fit
from roost.placement.lint import Finding
from roost.placement.plan import Piece, Plan, WorkerId, seat
from roost.text import at_most, join_words, plural

if TYPE_CHECKING:
    from roost.placement.diff import PlanDiff
    from roost.runtime.status import LiveHardware

_MOST_HELD = 16
_MOST_LINES = 40


def plan_table(plan: Plan) -> Text:
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


def worker_names(workers: Sequence[WorkerId]) -> list[str]:
    """Name workers as `actor:3`, several of one component as `env:0-63`."""
    ranks: dict[str, list[int]] = {}
    for worker in workers:
        ranks.setdefault(worker.component, []).append(worker.rank)
    return [f"{name}:{format_ranks(sorted(found))}" for name, found in ranks.items()]


def findings_text(found: Sequence[Finding]) -> list[Text]:
    """Make a line for each finding, and one for what to do where it says."""
    styles = {"error": "bold red", "warning": "bold yellow", "info": "bold cyan"}
    return [
        Text.assemble(
            f"{item.where}: " if item.where else "",
            (f"{item.level}: ", styles[item.level]),
            f"{item.message} [{item.code}]",
            (f"\n  hint: {item.hint}" if item.hint else "", "cyan"),
        )
        for item in found
    ]


def start_text(plan: Plan, live: LiveHardware) -> Text:
    """Say whether a plan could start now, and if not, who holds its accelerators."""
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


def diff_text(difference: PlanDiff) -> Text:
    """List what changes from one plan to another."""
    text = Text()
    _append_lines(text, [f"~ {what}: {before} -> {after}" for what, before, after in difference.facts], "yellow")
    variables = [
        f"{item.worker}: " + ", ".join(f"{name} {_value(a)} -> {_value(b)}" for name, a, b in item.shown)
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
            _append_lines(text, [f"{sign} {line}" for line in lines], style, "  ")
    text.append("" if difference else "the plans are alike")
    text.rstrip()
    return text


def _append_lines(text: Text, lines: Sequence[str], style: str, indent: str = "") -> None:
    for line in lines[:_MOST_LINES]:
        text.append(f"{indent}{line}\n", style=style)
    if len(lines) > _MOST_LINES:
        text.append(f"{indent}and {len(lines) - _MOST_LINES} more; --format json has them all\n", style="dim")


def _value(value: str | None) -> str:
    return "unset" if value is None else value or "''"


def _piece_name(piece: Piece) -> str:
    return str(piece) if piece.kind == BARE_NODE else f"node {piece.node_rank} {piece.kind} {piece.local_rank}"
