"""The command that looks for what is not as a job needs it, and says what to do."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from roost.cli.options import Address, TextForm, TextFormat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.text import Text

    from roost.doctor.facts import Finding, Report

_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "bold red"}
_LEVEL_WIDTH = 9


def doctor(
    form: TextForm = TextFormat.TEXT,
    address: Address = None,
    run_dir: Annotated[
        str | None, typer.Option("--run-dir", metavar="DIR", help="The folder that all nodes should share.")
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=1, max=3600, help="How long nodes may take to answer.")
    ] = 30,
) -> None:
    """Look at this machine and at the cluster for what would hinder a job, and say what to do."""
    from roost.cli.out import print_text, write_text
    from roost.doctor.examine import examine

    report = examine(address=address, run_dir=run_dir, seconds=timeout, waiting=_tell)
    if form is TextFormat.JSON:
        from roost.cli.show import as_json

        write_text(as_json(report.to_dict()), None)
    else:
        print_text(report_text(report))
    if report.has_problem:
        raise typer.Exit(1)


def report_text(report: Report) -> Text:
    """The findings, for people: a line for each, and below it what to do."""
    from rich.text import Text

    from roost.doctor.facts import Level
    from roost.text import plural

    width = max(len(item.check) for item in report.findings) + 2
    text = Text()
    text.append(f"this machine, {report.host}\n", style="bold")
    _append(text, report.machine, width)
    text.append(f"the cluster, Ray at {report.address}\n" if report.address else "the cluster\n", style="bold")
    _append(text, report.cluster, width)
    counts = [
        plural(report.count(level), level.value)
        for level in reversed(Level)
        if level != Level.OK and report.count(level)
    ]
    text.append(", ".join(counts) if counts else "all is well", style="bold")
    return text


def _append(text: Text, findings: Sequence[Finding], width: int) -> None:
    from roost.text import join_words

    for item in findings:
        text.append(f"  {item.level:<{_LEVEL_WIDTH}}", style=_STYLES[item.level])
        where = f" [{join_words(item.nodes, most=4)}]" if item.nodes else ""
        text.append(f"{item.check:<{width}}{_one_line(item.seen + where)}\n")
        if item.do:
            text.append(f"{'':<{_LEVEL_WIDTH + width + 2}}do: {_one_line(item.do)}\n", style="dim")


def _one_line(text: str) -> str:
    """Exceptions of others may have many lines, and their names what upsets a terminal."""
    from roost.text import printable

    return printable(" ".join(text.split()))


def _tell(text: str) -> None:
    """Say what is waited for to who sits before it; whoever reads later finds it among the findings."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr)
