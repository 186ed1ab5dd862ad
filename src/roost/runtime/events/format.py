"""The format of events: files of one JSON object per line in the run folder, one file for each process.

The worker `actor:3` writes `events/actor/3.jsonl`, the driver `events/driver.jsonl`, and one of the workers on node 0
writes `events/node-0.jsonl`. The first key of a line says what kind of line it is. A file begins with a `process`
line, and has another one wherever a new process continues it; `t` in the lines after it is in seconds since that line,
on a clock that does not jump. `docs/reference/events.md` describes every key.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

EVENTS_VERSION = 1
EVENTS_FOLDER = "events"
DRIVER_FILE = "driver.jsonl"
DRIVER = "driver"
METRICS_SUFFIX = ".metrics.jsonl"


def worker_file(address: str) -> Path:
    """Return the path of a worker's events in the run folder: `events/actor/3.jsonl` for `actor:3`."""
    *folders, name = address.split(":")
    return Path(EVENTS_FOLDER, *folders, f"{name}.jsonl")


def metrics_file(path: Path) -> Path:
    """Return the path of the metrics of a process, next to its events: `events/actor/3.metrics.jsonl`."""
    return path.with_suffix(METRICS_SUFFIX)


def node_file(rank: int) -> Path:
    """Return the path of a node's samples in the run folder."""
    return Path(EVENTS_FOLDER, f"node-{rank}.jsonl")


def line_of(kind: str, name: object, **values: object) -> str:
    """Return one line, without its line end; values that are None are left out.

    >>> line_of("call", "train", t=1.5, d=0.25, n=None)
    '{"call":"train","t":1.5,"d":0.25}'
    """
    data = {kind: name, **{key: value for key, value in values.items() if value is not None}}
    return json.dumps(data, separators=(",", ":"))


def header(
    who: str,
    *,
    run: str,
    pid: int,
    host: str,
    wall: float,
    node: int | None = None,
    devices: Sequence[int] = (),
) -> str:
    """Return the line that begins the part of a file that one process writes."""
    return line_of(
        "process",
        who,
        v=EVENTS_VERSION,
        run=run,
        pid=pid,
        host=host,
        wall=round(wall, 4),
        node=node,
        devices=list(devices) or None,
    )


def mebibytes(count: int | None) -> int | None:
    """Return a number of bytes in MiB, as the lines have it: shorter, and enough for a picture."""
    return None if count is None else count >> 20


def number(value: float) -> float | str:
    """Return a number as JSON can have it: one that is not finite becomes text.

    >>> number(0.5), number(float("nan"))
    (0.5, 'nan')
    """
    return value if math.isfinite(value) else str(value)
