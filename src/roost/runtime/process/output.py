"""A worker's output: in its own file, readable by the driver, with its end shown when the worker fails."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from roost.runtime.runs.folder import RunDir, log_file
from roost.text import printable

WORKER_LOG = "roost.worker"
"""The parent of all loggers of workers."""

LOG_DIR_VARIABLE = "ROOST_LOG_DIR"
"""If set when a node is started, its workers write their logs below this folder, and the driver fetches them."""

STARTED_AGAIN = "--- started again"
"""The first words that a restarted worker writes into its log."""

_TAIL_BYTES = 64 * 1024
_STACK_START = re.compile(r"^Timeout \(\d+:\d\d:\d\d", re.MULTILINE)
_THREAD_START = re.compile(r"(?:Current t|T)hread 0x")
_FRAME = re.compile(r'  File "(?P<file>.*)", line \d+ in .*|  \.\.\.|  <no Python frame>')
_NOT_USERS = re.compile(r"/ray/_private/|/ray/util/tracing/|/roost/runtime/|/threading\.py$")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPlace:
    """Where a worker writes its log, and whether that is the run's folder."""

    path: str
    is_shared: bool


_own = LogPlace(path="", is_shared=False)


def choose_place(run_dir: RunDir, address: str) -> LogPlace:
    """Choose the run's folder if this process sees it, else a folder on this node that the driver fetches from."""
    own_folder = os.environ.get(LOG_DIR_VARIABLE)
    # Path.exists raises where this user lacks permission, as in the folder of another user's driver.
    if not own_folder and os.path.exists(run_dir.marker):
        return LogPlace(path=str(log_file(run_dir.logs, address)), is_shared=True)
    from roost.machine.folders import socket_folder

    folder = Path(own_folder) if own_folder else socket_folder() / "logs"
    run = hashlib.sha256(run_dir.token.encode()).hexdigest()[:16]
    return LogPlace(path=str(log_file(folder / run, address)), is_shared=False)


def redirect_output(place: LogPlace, *, append: bool) -> None:
    """Send everything that this process and its children print to the file."""
    global _own
    path = Path(place.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if append else os.O_TRUNC)
    opened = os.open(path, flags, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(opened, 1)
    os.dup2(opened, 2)
    os.close(opened)
    # Ray may have replaced these with streams into its own files.
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    _own = place
    if append:
        print(f"{STARTED_AGAIN} at {time.strftime('%Y-%m-%d %H:%M:%S')}, pid {os.getpid()} ---")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger(WORKER_LOG)
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def own_place() -> LogPlace:
    """Return where this process writes its log."""
    return _own


def _read_end(path: str | os.PathLike[str]) -> str:
    """Return the end of a file as text, or nothing if it cannot be read."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read(_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""


def read_tail(path: str | os.PathLike[str], lines: int = 30) -> str:
    """Return the last lines of a log, safe to print."""
    return "\n".join(printable(line) for line in _read_end(path).splitlines()[-lines:])


def read_stack(path: str | os.PathLike[str]) -> str:
    """Return the last stack that faulthandler dumped into a log: oldest thread first, without Ray's frames and ours."""
    threads: list[list[str]] = []
    dumped = _STACK_START.split(_read_end(path))[1:]
    for line in dumped[-1].splitlines()[1:] if dumped else ():
        if _THREAD_START.match(line):
            threads.append([])
        elif threads and (frame := _FRAME.match(line)):
            if not (frame["file"] and _NOT_USERS.search(frame["file"])):
                threads[-1].append(printable(line.removeprefix("  ")))
        elif line:
            break
    shown = [frames for frames in reversed(threads) if frames]
    return "\n".join("\n".join(["most recent call first:", *frames]) for frames in shown)
