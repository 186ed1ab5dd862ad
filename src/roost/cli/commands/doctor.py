"""`roost doctor`: problems of this machine and of the cluster, and how to fix them."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from roost.cli.limits import TIMEOUT_SECONDS
from roost.cli.options import Address, TextForm, Timeout
from roost.cli.out import tell
from roost.cli.terminal import print_answer
from roost.cli.text.doctor import report_text
from roost.doctor.examine import examine


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
    if report.has_problem:
        raise typer.Exit(1)
