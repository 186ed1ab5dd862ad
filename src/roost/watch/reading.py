"""Reads the files of events in a run folder, also while they grow; it never writes, and never trusts what it reads."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from roost.machine.folders import open_regular
from roost.runtime.events.format import DRIVER_FILE, EVENTS_FOLDER, EVENTS_VERSION, METRICS_SUFFIX, metrics_file

_CHUNK = 2**20
_LONGEST_LINE = 2**20
_FIRST_BYTES = 4 * 2**20
"""How much of all files together is read at first, and of those of metrics: enough for a view in a second or two."""
_METRIC_PIECES = 32
"""Of a larger file of metrics so many pieces are read, spread over all of it."""
_HEADER_WITHIN = 2**21
"""Before any place in a file of metrics there is a line that names the process within so many bytes."""
WORDS = ("launched", "died", "raised", "restarted", "lost", "closed", "waits", "reserved")
"""Kinds of lines about a run as a whole, which matter however long ago they were written."""
_LASTING = re.compile(rb'^\{"(?:process|dropped|%s)":.*$' % "|".join(WORDS).encode(), re.M)
_decode = json.JSONDecoder().decode
"""Without what `json.loads` does first for each line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """The process that wrote the lines of a part of a file."""

    who: str
    run: str
    pid: int
    host: str
    wall: float
    """The time of day on its node when it began to write."""
    node: int | None
    devices: tuple[int, ...]


class Line(NamedTuple):
    """One line of a file, with the process that wrote it; a tuple, because there are hundreds of thousands."""

    process: Process
    kind: str
    name: Any
    t: float
    """Seconds since the process began to write."""
    values: dict[str, Any]
    is_sample: bool = False
    """Whether lines around it were left out."""

    @property
    def when(self) -> float:
        """The time of day on the node of the process."""
        return self.process.wall + self.t


@dataclass(slots=True)
class Trouble:
    """Lines and files that could not be read."""

    broken: int = 0
    """Lines that are not of the format."""
    newer: int = 0
    """Lines of processes that write a newer version of the format."""
    skipped: int = 0
    """Bytes of the beginnings of files that were left out to have a first view soon."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Files that could not be read, and why."""

    def words(self) -> list[str]:
        """Say what could not be read, a sentence each."""
        out = []
        if self.broken:
            out.append(f"{self.broken} broken lines of events were left out")
        if self.newer:
            out.append(f"{self.newer} lines of a newer Roost were left out")
        out += [f"{name} cannot be read: {why}" for name, why in list(self.unreadable.items())[:5]]
        return out


class _Parser:
    """Turns lines of text into lines of a process: that of the last `process` line."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._is_newer = False

    def line(self, text: bytes, trouble: Trouble) -> Line | None:
        if not text:
            return None
        try:
            data = _decode(text.decode())
            kind, name = next(iter(data.items()))
            if kind == "process":
                self._is_newer = data["v"] != EVENTS_VERSION
                if not self._is_newer:
                    node = data.get("node")
                    self._process = Process(
                        who=_text(name),
                        run=_text(data["run"]),
                        pid=int(data["pid"]),
                        host=_text(data["host"]),
                        wall=finite(data["wall"]),
                        node=None if node is None else int(node),
                        devices=tuple(int(item) for item in data.get("devices", ())),
                    )
            if self._is_newer:
                trouble.newer += 1
                return None
            if self._process is None:
                raise ValueError("no process wrote it")
            t = 0.0 if kind == "process" else finite(data["t"])
            return Line(process=self._process, kind=str(kind), name=name, t=t, values=data)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, StopIteration, RecursionError):
            trouble.broken += 1
            return None


def parse_lines(texts: Iterable[bytes]) -> list[Line]:
    """Return the lines of files of events that were put one after the other; broken ones are left out."""
    parser, trouble = _Parser(), Trouble()
    return [made for text in texts if (made := parser.line(text.strip(), trouble)) is not None]


class _Tail:
    """One file, and how far it has been read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._has_metrics = path.name.endswith(METRICS_SUFFIX)
        self._inode = 0
        self._offset = 0
        self._rest = b""
        self._parser = _Parser()

    def lines(self, trouble: Trouble, most: int | None) -> Iterator[Line]:
        """Yield the lines that were added, read in pieces; the first time only those in the last `most` bytes."""
        with open(self._path, "rb", opener=open_regular) as file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._inode or found.st_size < self._offset:
                self._inode, self._offset, self._rest, self._parser = found.st_ino, 0, b"", _Parser()
                if most is not None and found.st_size > 2 * most:
                    skip = self._sample if self._has_metrics else self._skip
                    yield from skip(file, found.st_size - most, trouble)
            if found.st_size == self._offset:
                return
            file.seek(self._offset)
            while data := file.read(_CHUNK):
                self._offset += len(data)
                *lines, self._rest = (self._rest + data).split(b"\n")
                if len(self._rest) > _LONGEST_LINE:
                    self._rest = b""
                    trouble.broken += 1
                for line in lines:
                    yield from self._parsed(line, trouble)

    def _parsed(self, text: bytes, trouble: Trouble) -> Iterator[Line]:
        made = self._parser.line(text, trouble)
        # The file of metrics is not that of the process: what began there has begun before.
        if made is not None and not (self._has_metrics and made.kind == "process"):
            yield made

    def _skip(self, file: IO[bytes], start: int, trouble: Trouble) -> Iterator[Line]:
        """Go to the first line after `start`; yield only those before it that matter however old they are."""
        rest, end = b"", 0
        while end < start and (data := file.read(min(_CHUNK, start - end))):
            end += len(data)
            whole, _, rest = (rest + data).rpartition(b"\n")
            rest = b"" if len(rest) > _LONGEST_LINE else rest
            for found in _LASTING.finditer(whole):
                yield from self._parsed(found.group(), trouble)
        # The line that `start` is in is read from its beginning.
        self._offset = end - len(rest)
        trouble.skipped += self._offset

    def _sample(self, file: IO[bytes], start: int, trouble: Trouble) -> Iterator[Line]:
        """Go to a line about `start`; yield the lines in pieces of what comes before it, evenly spread."""
        size = os.fstat(file.fileno()).st_size
        length = max(1024, (size - start) // _METRIC_PIECES)
        for place in [start * piece // _METRIC_PIECES for piece in range(_METRIC_PIECES)]:
            self._name_process(file, place, trouble)
            # Neither the first line nor the last is whole, unless the piece begins where the file does.
            for line in file.read(length).split(b"\n")[min(place, 1) : -1]:
                yield from (made._replace(is_sample=True) for made in self._parsed(line, trouble))
        self._name_process(file, start, trouble)
        self._offset = start + file.read(_LONGEST_LINE).find(b"\n") + 1

    def _name_process(self, file: IO[bytes], place: int, trouble: Trouble) -> None:
        """Find out which process wrote what is at a place, and go there."""
        file.seek(max(0, place - _HEADER_WITHIN))
        before = file.read(place - file.tell())
        last = before.rfind(b'\n{"process":') + 1
        if before.startswith(b'{"process":', last):
            self._parser.line(before[last:].partition(b"\n")[0], trouble)


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > 500:
        raise ValueError("not a short text")
    return value


def finite(value: object) -> float:
    """Return a number that may be shown and counted with; ValueError if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e12:
        raise ValueError("not a number")
    return float(value)


def metric_values(line: Line) -> list[tuple[float | None, float, float]]:
    """Return step, value and time of day of each value in a line of a metric; ValueError and the like if it is odd."""
    values = line.values
    if line.kind == "metric":
        found = [(values.get("step"), values["value"], line.when)]
    else:
        count = len(values["value"])
        times = [line.when + finite(after) for after in values["after"]]
        found = [*zip(values.get("step", [None] * count), values["value"], times, strict=True)]
    return [(None if step is None else float(step), float(value), when) for step, value, when in found]


class EventReader:
    """The events of one run folder: call `read` again to get what was added."""

    def __init__(self, folder: Path, *, whole: bool = False) -> None:
        """Take the run folder; with `whole` everything is read, however long it takes."""
        self._folder = folder / EVENTS_FOLDER
        self._whole = whole
        self._tails: dict[Path, _Tail] = {}
        self.trouble = Trouble()

    @property
    def exists(self) -> bool:
        """Whether the run has events."""
        return self._folder.is_dir() and not self._folder.is_symlink()

    def read(self) -> Iterator[Line]:
        """Yield the lines added since the last call, file by file: the driver's first."""
        paths: list[Path] = []
        # Links are not followed: a run folder may have been made by anyone.
        for folder, folders, names in os.walk(self._folder, followlinks=False) if self.exists else ():
            folders.sort()
            paths += [Path(folder, name) for name in names if name.endswith(".jsonl")]
        # Before its metrics come the events of a process, which say that it began.
        first = (DRIVER_FILE, metrics_file(Path(DRIVER_FILE)).name)
        paths.sort(key=lambda path: (len(path.parts), path.name not in first, path))
        for path in paths:
            self._tails.setdefault(path, _Tail(path))
        metrics = [path for path in paths if path.name.endswith(METRICS_SUFFIX)]
        self.trouble.unreadable.clear()
        for path in paths:
            try:
                alike = metrics if path in metrics else paths
                most = None if self._whole else max(1024, _FIRST_BYTES // len(alike))
                yield from self._tails[path].lines(self.trouble, most)
            except FileNotFoundError:
                continue
            except OSError as error:
                self.trouble.unreadable[str(path.relative_to(self._folder))] = error.strerror or str(error)
