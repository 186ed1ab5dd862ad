"""`roost diff`: what changes from one plan to another, or from one run to another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from roost.cli.options import TextForm
from roost.cli.plans import Flags, find_folder, is_run, plan_job, read_job, with_flags
from roost.cli.terminal import aligned, print_answer, print_text, worker_names
from roost.config.hardware import BARE_NODE
from roost.placement.plan import Plan, seat
from roost.runtime.runs.diff import diff_records
from roost.runtime.runs.index import read_run
from roost.text import printable, shorten
from roost.watch.metrics import last_values

if TYPE_CHECKING:
    from roost.placement.diff import PlanDiff

_MOST_LINES = 40


@with_flags
def diff(
    before: Annotated[Path, typer.Argument(metavar="A", help="A job, a plan saved as JSON, or a run.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    flags: Flags,
    form: TextForm = "text",
) -> None:
    given = [read_job(path, (), flags) for path in (before, after)]
    saved = [item.found for item in given if isinstance(item.found, Plan)]
    if len(saved) == 2:
        flags.refuse("both are saved plans, which include their hardware")
    # Unless flags say otherwise, a job is planned on the hardware of the saved plan.
    hardware = saved[0].topology if saved else None
    one, other = (
        item.found if isinstance(item.found, Plan) else plan_job(item, flags, hardware).plan for item in given
    )
    difference = one.diff(other)
    runs, measured, facts = None, [], {}
    if is_run(before) and is_run(after):
        folders = [find_folder(path) for path in (before, after)]
        runs = diff_records(*map(read_run, folders))
        measured = _metrics(*map(last_values, folders))
        facts = {
            "runs": {what: [a, b] for what, a, b in runs},
            "metrics": {name: [a, b] for name, a, b in measured},
        }
    print_answer(form, {**difference.to_dict(), **facts}, lambda: diff_text(difference))
    if runs and form == "text":
        text = Text(f"the runs ({len(runs)})", style="bold")
        for what, a, b in runs:
            line = printable(f"  ~ {what}: {shorten(a, 300)} -> {shorten(b, 300)}")
            text.append(f"\n{line}", style="not bold yellow")
        print_text(text)
    if measured and form == "text":
        rows = [(f"  {printable(name)}", *("-" if x is None else f"{x:.6g}" for x in both)) for name, *both in measured]
        head = ("the metrics, at their ends", printable(before.name), printable(after.name))
        print_text(aligned([head, *rows[:_MOST_LINES]]))
    raise typer.Exit(1 if difference else 0)


def _metrics(before: dict[str, float], after: dict[str, float]) -> list[tuple[str, float | None, float | None]]:
    return [(name, before.get(name), after.get(name)) for name in dict.fromkeys([*before, *after])]


def diff_text(difference: PlanDiff) -> Text:
    """List what changes from one plan to another."""

    def value(found: str | None) -> str:
        return "unset" if found is None else found or "''"

    variables = [
        f"{item.worker}: " + ", ".join(f"{name} {value(a)} -> {value(b)}" for name, a, b in item.shown)
        for item in difference.changed_variables
    ]
    hands = []
    for item in difference.changed_hands:
        piece = item.piece
        name = str(piece) if piece.kind == BARE_NODE else f"node {piece.node_rank} {piece.kind} {piece.local_rank}"
        hands.append(f"{name}: {', '.join(item.before) or 'idle'} -> {', '.join(item.after) or 'idle'}")
    parts: list[tuple[str, int | None, str, str, Sequence[str]]] = [
        ("", None, "~", "yellow", [f"{what}: {before} -> {after}" for what, before, after in difference.facts]),
        ("moved", None, "~", "yellow", [f"{m.worker}: {seat(m.before)} -> {seat(m.after)}" for m in difference.moved]),
        ("appeared", len(difference.appeared), "+", "green", worker_names(difference.appeared)),
        ("went", len(difference.went), "-", "red", worker_names(difference.went)),
        ("changed variables", None, "~", "yellow", variables),
        ("changed hands", None, "~", "yellow", hands),
    ]
    text = Text()
    for title, count, sign, style, lines in parts:
        indent = "  " if title else ""
        if lines and title:
            text.append(f"{title} ({count or len(lines)})\n", style="bold")
        for line in lines[:_MOST_LINES]:
            text.append(f"{indent}{sign} {line}\n", style=style)
        if len(lines) > _MOST_LINES:
            text.append(f"{indent}and {len(lines) - _MOST_LINES} more; --format json has them all\n", style="dim")
    text.append("" if difference else "the plans are alike")
    text.rstrip()
    return text
