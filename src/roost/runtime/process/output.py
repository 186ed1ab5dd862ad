"""A worker's output: in its own file, readable by the driver, with its end shown when the worker fails."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from roost.errors import ConfigError
from roost.machine.folders import make_folders, open_regular, socket_folder
from roost.runtime.runs.folder import RunDir, log_file
from roost.text import printable, size_text

WORKER_LOG = "roost.worker"
"""The parent of all loggers of workers."""

LOG_DIR_VARIABLE = "ROOST_LOG_DIR"
"""If set when a node is started, its workers write their logs below this folder, and the driver fetches them."""

STARTED_AGAIN = "--- started again"
"""The first words that a restarted worker writes into its log."""

_TAIL_BYTES = 64 * 1024
_CRASH = "Fatal Python error"
_CRASH_LINES = 200
_STACK_START = re.compile(r"^Timeout \(\d+:\d\d:\d\d", re.MULTILINE)
_THREAD_START = re.compile(r"(?:Current t|T)hread 0x")
_FRAME = re.compile(r'  File "(?P<file>.*)", line \d+ in .*|  \.\.\.|  <no Python frame>')
_NOT_USERS = re.compile(r"/ray/_private/|/ray/util/tracing/|/roost/runtime/|/threading\.py$")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPlace:
    """Where a worker writes its log, and whether that is the run's folder."""

    path: str
    base: str
    """The folder in which Roost makes the folders of the logs."""
    is_shared: bool


_own = LogPlace(path="", base="", is_shared=False)
_errors: TextIO | None = None
"""The stream into the log, whatever the user's code makes of `sys.stderr`."""


def choose_place(run_dir: RunDir, address: str) -> LogPlace:
    """Choose the run's folder if this process sees it, else a folder on this node that the driver fetches from."""
    own_folder = os.environ.get(LOG_DIR_VARIABLE)
    # Another user sees the marker and cannot read it. Where the folder is closed to it, this is False as well.
    if not own_folder and os.access(run_dir.marker, os.R_OK):
        return LogPlace(path=str(log_file(run_dir.logs, address)), base=run_dir.path, is_shared=True)
    base = Path(own_folder) if own_folder else socket_folder()
    folder = base / run_folder_name(run_dir) if own_folder else base / "logs" / run_folder_name(run_dir)
    return LogPlace(path=str(log_file(folder, address)), base=str(base), is_shared=False)


def folder_of_run(run_dir: RunDir, log: str) -> Path:
    """Return the folder that a run has on a machine that does not see the run's own, from the path of a log in it."""
    # That path is the folder and one part for each part of the worker's address.
    return next(folder for folder in Path(log).parents if folder.name == run_folder_name(run_dir))


def run_folder_name(run_dir: RunDir) -> str:
    """Return the name of the folder that has a run's logs on a machine that does not see the run folder."""
    return hashlib.sha256(run_dir.token.encode()).hexdigest()[:16]


def redirect_output(place: LogPlace, *, is_restart: bool) -> None:
    """Send everything that this process and its children print to the file."""
    global _own, _errors
    path, base = Path(place.path), Path(place.base)
    try:
        base.mkdir(parents=True, exist_ok=True)
        make_folders(base, path.parent)
        # Never truncated: `put_aside` moves the logs of an earlier group of this name.
        opened = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except OSError as error:
        where = f"{error.filename or path}: {error.strerror or error}"
        raise ConfigError(f"the log {path} cannot be opened: {where}", hint="choose another run_dir") from None
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os.dup2(opened, 1)
    os.dup2(opened, 2)
    os.close(opened)
    # Ray may have replaced these with streams into its own files.
    sys.stdout, sys.stderr = _text_stream(1), _text_stream(2)
    _own, _errors = place, sys.stderr
    if is_restart:
        print(f"{STARTED_AGAIN} at {time.strftime('%Y-%m-%d %H:%M:%S')}, pid {os.getpid()} ---")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger(WORKER_LOG)
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


class _LogFile(io.FileIO):
    """A log that takes everything: what cannot be written, as on a full disk, is counted and dropped.

    A job must not fail because one of its workers prints. The log says what is missing once it can be written again.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._lost = 0
        self._why = ""

    def write(self, data: Any, /) -> int:
        try:
            if self._lost:
                super().write(f"\n--- {size_text(self._lost)} of output are missing here: {self._why} ---\n".encode())
                self._lost = 0
            return super().write(data) or 0
        except OSError as error:
            self._lost += len(data)
            self._why = error.strerror or str(error)
            return len(data)


def _text_stream(descriptor: int) -> io.TextIOWrapper:
    file = io.BufferedWriter(_LogFile(descriptor))
    return io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def write(text: str) -> None:
    """Write into this process's log."""
    if _errors is not None:
        _errors.write(text)
        _errors.flush()


def own_place() -> LogPlace:
    """Return where this process writes its log."""
    return _own


def _read_end(path: str | os.PathLike[str]) -> str:
    """Return the end of a file as text, or nothing if it cannot be read."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read(_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""


def read_tail(path: str | os.PathLike[str], lines: int = 30) -> str:
    """Return the last lines of a log, safe to print; after a crash in C code, all of what Python says of it."""
    found = _read_end(path).splitlines()[-_CRASH_LINES:]
    crashes = [place for place, line in enumerate(found) if line.startswith(_CRASH)]
    start = min([max(0, len(found) - lines), *crashes[-1:]])
    return "\n".join(printable(line) for line in found[start:])


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
