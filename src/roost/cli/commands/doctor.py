"""`roost doctor`: problems of this machine and of the cluster, and how to fix them."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.text import Text

from roost.cli.limits import TIMEOUT_SECONDS
from roost.cli.options import Address, TextForm, Timeout
from roost.cli.out import tell
from roost.cli.terminal import print_answer
from roost.doctor.examine import examine
from roost.doctor.findings import Level, Report
from roost.text import join_words, plural, printable

_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "bold red"}
_LEVEL_WIDTH = 9


def doctor(
    form: TextForm = "text",
    address: Address = None,
    run_dir: Annotated[
        str | None, typer.Option("--run-dir", metavar="DIR", help="The folder that all nodes should share.")
    ] = None,
    timeout: Timeout = TIMEOUT_SECONDS,
) -> None:
    # Only a person at a terminal needs to know what the doctor waits for before the findings.
    waiting = tell if sys.stderr.isatty() else lambda _: None
    report = examine(address=address, run_dir=run_dir, seconds=timeout, waiting=waiting)
    print_answer(form, report.to_dict(), lambda: report_text(report))
    if report.count(Level.PROBLEM):
        raise typer.Exit(1)


def report_text(report: Report) -> Text:
    """List the findings: one line for each, and below it what to do."""
    width = max(len(item.check) for item in report.findings) + 2
    cluster = f"the cluster, Ray at {report.address}" if report.address else "the cluster"
    text = Text()
    for title, findings in ((f"this machine, {report.host}", report.machine), (cluster, report.cluster)):
        text.append(f"{title}\n", style="bold")
        for item in findings:
            text.append(f"  {item.level:<{_LEVEL_WIDTH}}", style=_STYLES[item.level])
            where = f" [{join_words(item.nodes, most=4)}]" if item.nodes else ""
            text.append(f"{item.check:<{width}}{_one_line(item.seen + where)}\n")
            if item.do:
                text.append(f"{'':<{_LEVEL_WIDTH + width + 2}}do: {_one_line(item.do)}\n", style="dim")
    levels = [level for level in reversed(Level) if level != Level.OK and report.count(level)]
    counts = [plural(report.count(level), level.value) for level in levels]
    text.append(", ".join(counts) or "all is well", style="bold")
    return text


def _one_line(text: str) -> str:
    """Join the lines of a message and escape what would upset a terminal."""
    return printable(" ".join(text.split()))
