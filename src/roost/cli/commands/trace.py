"""`roost trace`: what the workers of a run did, as a trace that Perfetto opens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from roost.cli.out import write_text
from roost.cli.runs import Run
from roost.errors import ConfigError
from roost.runtime.runs.index import find_run
from roost.watch.reading import EventReader
from roost.watch.trace import trace_of


def trace(
    run: Run = "latest",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The file; default: standard output.")
    ] = None,
) -> None:
    folder = find_run(run)
    if not EventReader(folder).exists:
        raise ConfigError(f"there are no events in {folder}", hint="the run used Cluster(record=False), or is older")
    write_text(trace_of(folder) + "\n", out)
