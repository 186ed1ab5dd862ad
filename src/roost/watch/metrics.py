"""The metrics of a run, every value: as CSV, for TensorBoard, for Weights & Biases."""

from __future__ import annotations

import contextlib
import csv
import io
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

from roost.errors import ConfigError
from roost.runtime.events.format import DRIVER
from roost.watch.facts import joined
from roost.watch.live import read_whole
from roost.watch.reading import EventReader, metric_values
from roost.watch.views import Curve

Write = Callable[["Value"], object]
"""Takes each value, in the order of the files."""


class Value(NamedTuple):
    """One value that a process logged."""

    worker: str
    name: str
    step: float | None
    value: float
    when: float


def new_values(reader: EventReader) -> Iterator[Value]:
    """Yield the values that were added since the last call; those of an earlier run in the folder are left out."""
    run = None
    for line in reader.read():
        if line.process.who == DRIVER:
            run = line.process.run
        if line.kind in ("metric", "metrics") and run in (None, line.process.run):
            # A line that says what cannot be.
            with contextlib.suppress(TypeError, ValueError, KeyError, AttributeError, OverflowError):
                for step, value, when in metric_values(line):
                    yield Value(line.process.who, str(line.name), step, value, when)


def last_values(folder: Path) -> dict[str, float]:
    """Return the last value of each metric of a run: the mean of the workers that report the same step."""
    by_name: dict[str, list[Curve]] = {}
    try:
        curves = read_whole(folder).view().curves
    except ConfigError:
        return {}
    for curve in curves:
        by_name.setdefault(curve.name, []).append(curve)
    found = {name: joined(some) for name, some in by_name.items()}
    return {name: points[-1][1] for name, points in sorted(found.items()) if points}


def csv_text(values: Iterator[Value]) -> str:
    """Return the values as CSV with a head."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["worker", "name", "step", "value", "time"])
    for worker, name, step, value, when in values:
        at = datetime.fromtimestamp(when, UTC).isoformat(timespec="milliseconds")
        writer.writerow([worker, name, "" if step is None else f"{step:.15g}", repr(value), at])
    return out.getvalue()


@contextlib.contextmanager
def to_tensorboard(folder: Path) -> Iterator[Write]:
    """Yield what writes values as TensorBoard reads them: one run below the folder for each worker."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise ConfigError("--tensorboard needs TensorBoard", hint="pip install 'roost[tensorboard]'") from error
    writers: dict[str, EventFileWriter] = {}
    counts: dict[tuple[str, str], int] = {}

    def write(item: Value) -> None:
        if item.worker not in writers:
            writers[item.worker] = EventFileWriter(str(folder / item.worker.replace(":", "-")))
        count = counts[item.worker, item.name] = counts.get((item.worker, item.name), -1) + 1
        summary = Summary(value=[Summary.Value(tag=item.name, simple_value=item.value)])
        step = count if item.step is None else int(item.step)
        writers[item.worker].add_event(Event(wall_time=item.when, step=step, summary=summary))

    try:
        yield write
    finally:
        for writer in writers.values():
            writer.close()


@contextlib.contextmanager
def to_wandb(project: str, name: str, *, offline: bool) -> Iterator[Write]:
    """Yield what logs values to a run of Weights & Biases; offline it is a folder `wandb` for `wandb sync`.

    A metric of a worker is `name/worker`, over a step axis of its own, since workers log at different times.
    """
    try:
        import wandb
    except ImportError as error:
        raise ConfigError("--wandb needs wandb", hint="pip install 'roost[wandb]'") from error
    mode: Literal["offline", "online"] = "offline" if offline else "online"
    try:
        run = wandb.init(project=project, name=name, mode=mode, settings=wandb.Settings(console="off"))
    except wandb.Error as error:
        raise ConfigError(f"wandb refuses: {error}", hint="wandb login, or --offline") from None
    known: set[str] = set()

    def write(item: Value) -> None:
        key = f"{item.name}/{item.worker}"
        if key not in known:
            known.add(key)
            run.define_metric(key, step_metric=f"{key}/step")
        step = {} if item.step is None else {f"{key}/step": item.step}
        run.log({key: item.value, f"{key}/time": item.when, **step})

    try:
        yield write
    finally:
        run.finish()


def export(folder: Path, write: Write, *, is_over: Callable[[], bool], follow: bool, every: float) -> int:
    """Hand over all values of a run, with `follow` until it is over; return how many there were."""
    reader, count = EventReader(folder, whole=True), 0
    while True:
        # Looked at first, so that what is written before the end is not missed.
        is_last = not follow or is_over()
        for value in new_values(reader):
            write(value)
            count += 1
        if is_last:
            return count
        time.sleep(every)
