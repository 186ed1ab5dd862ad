"""`roost logs`: what the workers of a run printed, whole or as it comes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from roost.errors import ConfigError
from roost.runtime.runs.folder import log_file
from roost.runtime.runs.index import LATEST, find_run
from roost.text import join_words, printable

_EVERY_SECONDS = 0.2
_CHUNK = 2**20
_FOLLOWED_LINES = 10


def list_logs(run: str | None) -> str:
    """Which workers a run has logs of."""
    folder = _logs(run)
    found = [(_address(folder, path), f"{path.stat().st_size:,} bytes", str(path)) for path in _files(folder, "")]
    first, second = (max((len(row[column]) for row in found), default=0) for column in (0, 1))
    rows = [f"{address:{first}}  {size:>{second}}  {path}" for address, size, path in found]
    return "\n".join([f"logs of the run {folder.parent}", *rows])


def log_names(run: str | None) -> list[str]:
    """The workers that a run has logs of."""
    folder = _logs(run)
    return [_address(folder, path) for path in _files(folder, "")]


def show_logs(worker: str, run: str | None, lines: int | None, follow: bool, write: Callable[[str], None]) -> None:
    """Print the log of a worker (`actor:3`) or of all workers of a group (`actor`), and go on if that is wanted."""
    folder = _logs(run)
    files = _files(folder, worker)
    if not files:
        there = join_words(sorted(set(log_names(run))), most=12)
        raise ConfigError(f"the run {folder.parent} has no log of {worker!r}", hint=f"it has {there or 'none'}")
    if lines is None and follow:
        lines = _FOLLOWED_LINES
    tails = {path: _Tail(path, lines) for path in files}
    is_many = len(files) > 1
    while True:
        for path, tail in tails.items():
            start = f"{_address(folder, path)} | " if is_many else ""
            for line in tail.lines(is_last=not follow):
                write(start + line)
        if not follow:
            return
        time.sleep(_EVERY_SECONDS)
        for path in _files(folder, worker):
            # One that is put aside just now is gone by the time that it is looked at.
            with contextlib.suppress(FileNotFoundError):
                if path not in tails:
                    tails[path] = _Tail(path, None)


class _Tail:
    """One log, read on from where it was read to."""

    def __init__(self, path: Path, lines: int | None) -> None:
        self._path = path
        self._inode = path.stat().st_ino
        self._offset = 0 if lines is None else _start_of_last(path, lines)
        self._begun = b""

    def lines(self, *, is_last: bool) -> Iterator[str]:
        """The whole lines that came since; at the end also what has no end of line."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            # Put aside just now, for another group of that name.
            return
        with file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._inode or self._offset > found.st_size:
                self._inode, self._offset, self._begun = found.st_ino, 0, b""
            file.seek(self._offset)
            while data := file.read(_CHUNK):
                self._offset += len(data)
                *lines, self._begun = (self._begun + data).split(b"\n")
                yield from map(_text, lines)
        if is_last and self._begun:
            yield _text(self._begun)


def _text(line: bytes) -> str:
    return printable(line.decode(errors="replace").rstrip("\r"))


def _start_of_last(path: Path, lines: int) -> int:
    """Where the last lines of a file begin, found from its end."""
    with path.open("rb") as file:
        position = file.seek(0, 2)
        end = position
        seen = 0
        while position > 0:
            step = min(_CHUNK, position)
            position -= step
            file.seek(position)
            data = file.read(step)
            for index in range(len(data) - 1, -1, -1):
                if data[index] == 0x0A and position + index != end - 1:
                    seen += 1
                    if seen == lines:
                        return position + index + 1
    return 0 if lines else end


def _logs(run: str | None) -> Path:
    folder = find_run(LATEST if run is None else run) / "logs"
    if not folder.is_dir():
        raise ConfigError(f"there are no logs in {folder.parent}", hint="a run has logs once a group was launched")
    return folder


def _files(folder: Path, worker: str) -> list[Path]:
    """The log of a worker, or those of a group's workers, by rank."""
    if worker and not all(part and part not in (".", "..") and "/" not in part for part in worker.split(":")):
        raise ConfigError(f"{worker!r} names no worker", hint="write actor:3, or actor for the whole group")
    one = log_file(folder, worker) if worker else folder
    if worker and one.is_file():
        return [one]
    below = folder.joinpath(*worker.split(":")) if worker else folder
    return sorted(below.rglob("*.log"), key=lambda path: [_rank_key(part) for part in path.relative_to(folder).parts])


def _rank_key(part: str) -> tuple[int, int, str]:
    stem = part.removesuffix(".log")
    return (0, int(stem), "") if stem.isdigit() else (1, 0, stem)


def _address(folder: Path, path: Path) -> str:
    return ":".join(path.relative_to(folder).with_suffix("").parts)
