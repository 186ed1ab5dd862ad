"""`roost metrics`: the metrics that a run logged, as a table, as CSV, or where people keep theirs."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from roost.cli.completion import Run
from roost.cli.limits import LOOK_SECONDS
from roost.cli.options import Out, TextForm
from roost.cli.out import as_json, tell, write_text
from roost.cli.terminal import aligned, print_text
from roost.errors import ConfigError
from roost.runtime.runs.index import find_run, read_run
from roost.runtime.runs.record import Status
from roost.text import plural, printable
from roost.watch.live import no_events, read_whole
from roost.watch.metrics import Write, csv_text, export, last_values, new_values, to_tensorboard, to_wandb
from roost.watch.reading import EventReader


def metrics(
    run: Run = "latest",
    form: TextForm = "text",
    csv: Annotated[bool, typer.Option("--csv", help="Write every value as a line of CSV.")] = False,
    tensorboard: Annotated[
        Path | None, typer.Option("--tensorboard", metavar="DIR", help="Write every value for TensorBoard.")
    ] = None,
    wandb: Annotated[
        str | None, typer.Option("--wandb", metavar="PROJECT", help="Log every value to Weights & Biases.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="With --wandb: into a folder, for `wandb sync`.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run is over.")] = False,
    out: Out = None,
) -> None:
    if csv + (tensorboard is not None) + (wandb is not None) > 1:
        raise ConfigError("--csv, --tensorboard and --wandb go to different places", hint="run it once for each")
    if follow and tensorboard is None and wandb is None:
        raise ConfigError("--follow needs --tensorboard or --wandb")
    if offline and wandb is None:
        raise ConfigError("--offline needs --wandb")
    folder = find_run(run)
    reader = EventReader(folder, whole=True)
    if not reader.exists:
        raise no_events(folder)
    if csv:
        write_text(csv_text(new_values(reader)), out)
    elif tensorboard is not None or wandb is not None:
        place = f"{tensorboard}" if wandb is None else f"the project {wandb}"
        target: contextlib.AbstractContextManager[Write]
        if wandb is None:
            target = to_tensorboard(Path(place) / folder.name)
        else:
            target = to_wandb(wandb, folder.name, offline=offline)
        with target as write:
            count = export(folder, write, is_over=lambda: _is_over(folder), follow=follow, every=LOOK_SECONDS)
        tell(f"wrote {plural(count, 'value')} to {place}")
    elif form == "json":
        write_text(as_json(last_values(folder)), out)
    else:
        print_text(_table(folder), out)


def _is_over(folder: Path) -> bool:
    return read_run(folder).outcome.status is not Status.RUNNING


def _table(folder: Path) -> Text:
    last, curves = last_values(folder), read_whole(folder).view().curves
    rows = [("METRIC", "WORKERS", "LAST", "LEAST", "MOST")]
    for name, value in last.items():
        found = [point for curve in curves if curve.name == name for _, point, _ in curve.points]
        workers = sum(curve.name == name for curve in curves)
        last_text, least, most = (f"{number:.6g}" for number in (value, min(found), max(found)))
        rows.append((printable(name), str(workers), last_text, least, most))
    return aligned(rows) if last else Text("the run logged no metrics")
