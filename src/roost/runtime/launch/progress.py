"""What a launch looks like while it goes on: a bar on a terminal, plain lines in a pipe, and what workers print."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, TextIO

from roost.text import plural

_LINE_EVERY_SECONDS = 5.0
_QUIET_VARIABLE = "ROOST_QUIET"
_COLOURS = (36, 35, 34, 33, 32, 96, 95, 94, 93, 92)


class Phase(StrEnum):
    """How far a worker is in its launch."""

    REQUESTED = "requested"
    UP = "process up"
    CHECKED = "environment checked"
    CONSTRUCTING = "constructing"
    READY = "ready"


class LaunchBoard:
    """The phase of each worker of a launch, and since when.

    >>> board = LaunchBoard(["actor:0", "actor:1"], now=0.0)
    >>> board.advance("actor:1", Phase.READY, now=2.0)
    >>> board.summary(), board.is_ready
    ('1 requested, 1 ready', False)
    """

    def __init__(self, addresses: list[str], now: float) -> None:
        self._phases = dict.fromkeys(addresses, (Phase.REQUESTED, now))
        self._reached: dict[Phase, float] = {}

    def advance(self, address: str, phase: Phase, now: float) -> None:
        """A worker is in another phase now."""
        self._phases[address] = (phase, now)
        self._reached[phase] = now

    def phase(self, address: str) -> Phase:
        """The phase of a worker."""
        return self._phases[address][0]

    def since(self, address: str) -> float:
        """When it came into its phase."""
        return self._phases[address][1]

    @property
    def reached(self) -> Mapping[Phase, float]:
        """When the last worker so far came into each phase."""
        return dict(self._reached)

    @property
    def is_ready(self) -> bool:
        """Whether every worker is ready."""
        return all(phase is Phase.READY for phase, _ in self._phases.values())

    @property
    def late(self) -> list[str]:
        """Those that are not ready."""
        return [address for address, (phase, _) in self._phases.items() if phase is not Phase.READY]

    @property
    def counts(self) -> Mapping[Phase, int]:
        """How many are in each phase."""
        phases = [phase for phase, _ in self._phases.values()]
        return {phase: phases.count(phase) for phase in Phase}

    def summary(self) -> str:
        """`3 constructing, 1 ready`."""
        return ", ".join(f"{count} {phase}" for phase, count in self.counts.items() if count)


class Screen:
    """Where the user reads. One for each process; told to be quiet it shows nothing."""

    def __init__(self, *, quiet: bool | None = None, stream: TextIO | None = None) -> None:
        self.quiet: bool = os.environ.get(_QUIET_VARIABLE, "") not in ("", "0") if quiet is None else quiet
        self._stream = stream
        self._lock = threading.Lock()
        self._bar: Any = None

    def line(self, text: str, of: str = "") -> None:
        """Show a line, of a worker perhaps, above a bar that may be there."""
        if self.quiet:
            return
        if of:
            text = f"{self._coloured(of)} | {text}"
        bar = self._bar
        if bar is not None:
            from rich.text import Text

            bar.console.print(Text.from_ansi(text), soft_wrap=True)
            return
        with self._lock, contextlib.suppress(OSError, ValueError):
            stream = self._stream or sys.stderr
            stream.write(text + "\n")
            stream.flush()

    def _coloured(self, address: str) -> str:
        stream = self._stream or sys.stderr
        if not stream.isatty() or os.environ.get("NO_COLOR"):
            return address
        # The workers of a group have one colour.
        group = address.rpartition(":")[0]
        return f"\x1b[{_COLOURS[zlib.crc32(group.encode()) % len(_COLOURS)]}m{address}\x1b[0m"

    @contextlib.contextmanager
    def launching(self, name: str, board: LaunchBoard, nodes: int) -> Iterator[LaunchView]:
        """Show a launch from its beginning to its end."""
        view = LaunchView(self, name, board, nodes)
        is_terminal = not self.quiet and (self._stream or sys.stderr).isatty() and self._bar is None
        if not is_terminal:
            yield view
        else:
            with self._progress() as bar:
                view.show_bar(bar)
                yield view
        view.finish()

    @contextlib.contextmanager
    def _progress(self) -> Iterator[Any]:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(file=self._stream or sys.stderr)
        columns = (TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.fields[said]}"))
        with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
            self._bar = bar
            try:
                yield bar
            finally:
                self._bar = None


class LaunchView:
    """One launch on the screen."""

    def __init__(self, screen: Screen, name: str, board: LaunchBoard, nodes: int) -> None:
        self._screen = screen
        self._name = name
        self._board = board
        self._nodes = nodes
        self._began = self._said = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def show_bar(self, bar: Any) -> None:
        """Show it as a bar from now on."""
        self._bar = bar
        total = sum(self._board.counts.values())
        self._task = bar.add_task(self._name, total=total, said=self._board.summary())

    def update(self) -> None:
        """Show how far it is."""
        if self._bar is not None:
            ready = self._board.counts[Phase.READY]
            self._bar.update(self._task, completed=ready, said=self._board.summary())
        elif time.monotonic() - self._said >= _LINE_EVERY_SECONDS:
            self._said = time.monotonic()
            self._screen.line(f"{self._name}: {self._board.summary()} after {self._said - self._began:.0f} s")

    def say(self, text: str) -> None:
        """Say something beside."""
        self._screen.line(f"{self._name}: {text}")

    def finish(self) -> None:
        """Say how it ended, if it ended well."""
        if self._board.is_ready:
            total = sum(self._board.counts.values())
            seconds = time.monotonic() - self._began
            self._screen.line(
                f"{self._name}: {plural(total, 'worker')} ready on {plural(self._nodes, 'node')} in {seconds:.1f} s"
            )
