"""The report of `roost doctor` as text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from roost.doctor.findings import Finding, Level, Report
from roost.text import join_words, plural, printable

_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "bold red"}
_LEVEL_WIDTH = 9


def report_text(report: Report) -> Text:
    """List the findings: one line for each, and below it what to do."""
    width = max(len(item.check) for item in report.findings) + 2
    text = Text.assemble((f"this machine, {report.host}\n", "bold"))
    _append(text, report.machine, width)
    text.append(f"the cluster, Ray at {report.address}\n" if report.address else "the cluster\n", style="bold")
    _append(text, report.cluster, width)
    levels = [level for level in reversed(Level) if level != Level.OK and report.count(level)]
    counts = [plural(report.count(level), level.value) for level in levels]
    text.append(", ".join(counts) or "all is well", style="bold")
    return text


def _append(text: Text, findings: Sequence[Finding], width: int) -> None:
    for item in findings:
        text.append(f"  {item.level:<{_LEVEL_WIDTH}}", style=_STYLES[item.level])
        where = f" [{join_words(item.nodes, most=4)}]" if item.nodes else ""
        text.append(f"{item.check:<{width}}{_one_line(item.seen + where)}\n")
        if item.do:
            text.append(f"{'':<{_LEVEL_WIDTH + width + 2}}do: {_one_line(item.do)}\n", style="dim")


def _one_line(text: str) -> str:
    """Join the lines of a message and escape what would upset a terminal."""
    return printable(" ".join(text.split()))
