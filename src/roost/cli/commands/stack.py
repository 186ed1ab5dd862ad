"""`roost stack`: what a worker is doing right now, line by line."""

from __future__ import annotations

from typing import Annotated

import typer

from roost.cli.completion import Run
from roost.cli.out import write_text
from roost.runtime.runs.index import find_run
from roost.watch.limits import ANSWER_SECONDS
from roost.watch.live import LiveRun
from roost.watch.stack import stack_of


def stack(
    run: Run,
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Such as actor:3.")],
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0.1, help="How long the worker has to answer.")
    ] = ANSWER_SECONDS,
) -> None:
    live = LiveRun(find_run(run))
    write_text(stack_of(live.folder, live.refresh(), worker, timeout).rstrip("\n") + "\n")
