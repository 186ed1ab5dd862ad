"""`roost logs`: what the workers of a run printed, whole or while they print it."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from roost.cli.completion import complete_run, offer
from roost.cli.limits import LOOK_SECONDS
from roost.cli.options import TextFormat
from roost.cli.out import as_json, write_text
from roost.errors import ConfigError
from roost.machine.folders import open_regular
from roost.runtime.runs.folder import log_file
from roost.runtime.runs.index import LATEST, find_run
from roost.text import join_words, printable

_CHUNK = 2**20
_FOLLOWED_LINES = 10


def _complete_log(context: typer.Context, incomplete: str) -> list[str]:
    """Offer the groups and workers that the run on the line, or the newest, has logs of."""

    def find() -> list[str]:
        names = list(_find_logs(_log_folder(context.params.get("other_run") or context.params.get("run"))))
        return [*dict.fromkeys(name.rpartition(":")[0] for name in names), *names]

    return offer(find, incomplete)


def logs(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="Its id, the first characters of that, its folder, or latest; default: the newest of this project.",
            autocompletion=lambda ctx, incomplete: [*_complete_log(ctx, incomplete), *complete_run(incomplete)],
        ),
    ] = None,
    worker: Annotated[
        str | None,
        typer.Argument(
            metavar="[WORKER]",
            help="actor:3, or actor for the whole group; with --follow, all of them by default.",
            autocompletion=_complete_log,
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines until Ctrl-C.")] = False,
    lines: Annotated[int | None, typer.Option("--lines", "-n", metavar="N", min=0, help="Only the last lines.")] = None,
    other_run: Annotated[
        str | None,
        typer.Option("--run", metavar="RUN", help="As RUN.", hidden=True, autocompletion=complete_run),
    ] = None,
    form: Annotated[
        TextFormat,
        typer.Option(
            "--format", metavar="FORMAT", help="Output format: text or json; lines of a log are an object each."
        ),
    ] = "text",
) -> None:
    if other_run is not None and worker is not None:
        raise ConfigError(f"two runs are given, {other_run} and {run}", hint="leave out --run")
    if worker is None and run is not None and (other_run is not None or _is_worker(run)):
        run, worker = other_run, run
    folder = _log_folder(other_run or run)
    if worker is not None or follow:
        _show_logs(folder, worker or "", _FOLLOWED_LINES if lines is None and follow else lines, follow, form)
        return
    found = {name: (path, path.stat().st_size) for name, path in _find_logs(folder).items()}
    if form == "json":
        listed = [{"worker": name, "bytes": size, "path": str(path)} for name, (path, size) in found.items()]
        write_text(as_json({"run": str(folder.parent), "logs": listed}))
    else:
        rows = [(printable(name), f"{size:,} bytes", printable(str(path))) for name, (path, size) in found.items()]
        first, second = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
        shown = [f"{name:{first}}  {size:>{second}}  {path}\n" for name, size, path in rows]
        write_text("".join([f"logs of the run {printable(str(folder.parent))}\n", *shown]))


def _is_worker(word: str) -> bool:
    """Tell whether the one word given names a worker or a group of the newest run, and not a run."""
    if ":" in word:
        return True
    # There may be no run yet, or one without logs; the word may still be the folder of a run.
    with contextlib.suppress(ConfigError):
        if "/" not in word and _find_logs(_log_folder(None), word):
            return True
    try:
        find_run(word)
    except ConfigError as error:
        if "/" in word:
            raise
        newest = _log_folder(None)
        hint = f"it has {_names(newest)}; {error.problems[0].hint}"
        raise ConfigError(f"there is no run {word!r}, and {newest.parent} has no log of {word!r}", hint=hint) from None
    return False


def _names(folder: Path) -> str:
    return join_words(sorted(_find_logs(folder)), most=12) or "none"


def _show_logs(folder: Path, worker: str, lines: int | None, follow: bool, form: TextFormat) -> None:
    """Print the logs of a worker (`actor:3`) or of a group (`actor`), and with `follow` what is added to them."""
    tails = {name: _Tail(path, lines) for name, path in _find_logs(folder, worker).items()}
    if not tails and worker:
        raise ConfigError(f"the run {folder.parent} has no log of {worker!r}", hint=f"it has {_names(folder)}")
    is_many = len(tails) > 1 or not worker
    while True:
        for name, tail in tails.items():
            for line in tail.lines(is_last=not follow):
                if form == "json":
                    write_text(json.dumps({"worker": name, "line": line}) + "\n")
                else:
                    write_text(f"{printable(name)} | {line}\n" if is_many else f"{line}\n")
        if not follow:
            return
        time.sleep(LOOK_SECONDS)
        for name, path in _find_logs(folder, worker).items():
            # The file may be renamed between listing and opening.
            with contextlib.suppress(FileNotFoundError):
                if name not in tails:
                    tails[name] = _Tail(path, None)


class _Tail:
    """One log, and how far it has been read."""

    def __init__(self, path: Path, lines: int | None) -> None:
        """Begin at the last lines, or at the beginning; they are found from the end of the file."""
        self._path = path
        self._inode = path.stat().st_ino
        self._offset = 0
        self._begun = b""
        if lines is None:
            return
        with open(path, "rb", opener=open_regular) as file:
            first = end = file.seek(0, 2)
            size = _CHUNK
            while first > 0:
                first = file.seek(max(0, end - size))
                # The line end of the last line does not count.
                before, *after = file.read(end - first).removesuffix(b"\n").rsplit(b"\n", lines)
                if len(after) == lines:
                    self._offset = min(end, first + len(before) + 1)
                    return
                size *= 2

    def lines(self, *, is_last: bool) -> Iterator[str]:
        """Yield the lines added since the last call; with `is_last` also one without a line end."""
        # The file is missing while it is put aside for another group of the same name.
        with contextlib.suppress(FileNotFoundError), open(self._path, "rb", opener=open_regular) as file:
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


def _log_folder(run: str | None) -> Path:
    folder = find_run(LATEST if run is None else run) / "logs"
    if not folder.is_dir():
        raise ConfigError(f"there are no logs in {folder.parent}", hint="a run has logs once it has launched a group")
    return folder


def _find_logs(folder: Path, worker: str = "") -> dict[str, Path]:
    """Find the log of a worker, those of a group's workers, or all; by name, in the order of ranks."""
    if worker and not all(part and part not in (".", "..") and "/" not in part for part in worker.split(":")):
        raise ConfigError(f"{worker!r} is not a worker", hint="write actor:3, or actor for the whole group")
    if worker and _is_log(one := log_file(folder, worker)):
        return {worker: one}
    found = filter(_is_log, folder.joinpath(*worker.split(":")).rglob("*.log"))
    parts = {path.relative_to(folder).with_suffix("").parts: path for path in found}
    # Ranks in the order of numbers.
    ordered = sorted(parts, key=lambda words: [(word.zfill(10) if word.isdigit() else word) for word in words])
    return {":".join(words): parts[words] for words in ordered}


def _is_log(path: Path) -> bool:
    """Tell a log from a link or a pipe, which a worker never makes."""
    return path.is_file() and not path.is_symlink()
