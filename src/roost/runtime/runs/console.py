"""Where the user reads what a run does: lines on standard error, above a progress bar if there is one."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import zlib
from collections.abc import Iterator
from typing import Any, TextIO

_COLOURS = (36, 35, 34, 33, 32, 96, 95, 94, 93, 92)


class Console:
    """The lines that one process shows to the user; a quiet console shows only its waits."""

    def __init__(self, *, quiet: bool | None = None, stream: TextIO | None = None) -> None:
        self.quiet: bool = os.environ.get("ROOST_QUIET", "") not in ("", "0") if quiet is None else quiet
        self.stream = stream
        """Where lines go; None is standard error, whichever that is when a line is printed."""
        self._lock = threading.Lock()
        self._bar: Any = None
        self._bar_users = 0

    def line(self, text: str, of: str = "") -> None:
        """Print a line, prefixed with a worker's address if that worker printed it."""
        if not self.quiet:
            self.notice(text, of)

    def notice(self, text: str, of: str = "") -> None:
        """Print a line that a user of a quiet console needs as well: why nothing happens."""
        out = self.stream or sys.stderr
        if of and out.isatty() and not os.environ.get("NO_COLOR"):
            # The workers of a group share a colour.
            colour = _COLOURS[zlib.crc32(of.rpartition(":")[0].encode()) % len(_COLOURS)]
            of = f"\x1b[{colour}m{of}\x1b[0m"
        if of:
            text = f"{of} | {text}"
        bar = self._bar
        if bar is not None:
            from rich.text import Text  # only a terminal needs it

            bar.console.print(Text.from_ansi(text), soft_wrap=True)
            return
        with self._lock, contextlib.suppress(OSError, ValueError):
            out.write(text + "\n")
            out.flush()

    @contextlib.contextmanager
    def progress(self) -> Iterator[Any]:
        """Show progress on a terminal, in one display for all that is under way together; yields None elsewhere."""
        out = self.stream or sys.stderr
        if self.quiet or not out.isatty():
            yield None
            return
        with self._lock:
            if self._bar is None:
                from rich.console import Console as Terminal  # only a terminal needs it
                from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

                columns = (TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.fields[summary]}"))
                started = Progress(*columns, TimeElapsedColumn(), console=Terminal(file=out), transient=True)
                started.start()
                self._bar = started
            self._bar_users += 1
            bar = self._bar
        try:
            yield bar
        finally:
            with self._lock:
                self._bar_users -= 1
                if not self._bar_users:
                    self._bar = None
                    bar.stop()
