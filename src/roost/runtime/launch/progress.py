"""How far a launch is: the phase of each worker, as a bar on a terminal or as lines in a pipe."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

from roost.runtime.limits import LAUNCH_LINE_SECONDS
from roost.runtime.runs.console import Console
from roost.text import plural


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
    >>> board.summary(), board.late
    ('1 requested, 1 ready', ['actor:0'])
    """

    def __init__(self, addresses: list[str], now: float) -> None:
        self._phases = dict.fromkeys(addresses, (Phase.REQUESTED, now))
        self.reached: dict[Phase, float] = {}
        """When the last worker so far entered each phase."""

    def advance(self, address: str, phase: Phase, now: float) -> None:
        """Put a worker into another phase."""
        self._phases[address] = (phase, now)
        self.reached[phase] = now

    def phase(self, address: str) -> Phase:
        """The phase of a worker."""
        return self._phases[address][0]

    def since(self, address: str) -> float:
        """When the worker entered its phase."""
        return self._phases[address][1]

    @property
    def late(self) -> list[str]:
        """The workers that are not ready."""
        return [address for address, (phase, _) in self._phases.items() if phase is not Phase.READY]

    @property
    def counts(self) -> Mapping[Phase, int]:
        """How many workers are in each phase."""
        phases = [phase for phase, _ in self._phases.values()]
        return {phase: phases.count(phase) for phase in Phase}

    def summary(self) -> str:
        """`3 constructing, 1 ready`."""
        return ", ".join(f"{count} {phase}" for phase, count in self.counts.items() if count)


class LaunchView:
    """One launch on the console."""

    def __init__(self, console: Console, name: str, board: LaunchBoard, bar: Any) -> None:
        self._console = console
        self._name = name
        self._board = board
        self.began: float = time.monotonic()
        self._shown = self.began
        self._bar = bar
        self.task: Any = bar.add_task(name, total=sum(board.counts.values()), summary=board.summary()) if bar else None

    def update(self) -> None:
        """Show how far the launch is."""
        if self._bar is not None:
            ready = self._board.counts[Phase.READY]
            self._bar.update(self.task, completed=ready, summary=self._board.summary())
        elif time.monotonic() - self._shown >= LAUNCH_LINE_SECONDS:
            self._shown = time.monotonic()
            self.say(f"{self._board.summary()} after {self._shown - self.began:.0f} s")

    def say(self, text: str) -> None:
        """Print a line about this launch."""
        self._console.line(f"{self._name}: {text}")


@contextlib.contextmanager
def show_launch(console: Console, name: str, board: LaunchBoard, nodes: int) -> Iterator[LaunchView]:
    """Show a launch from beginning to end, and a summary if it succeeds."""
    with console.progress() as bar:
        view = LaunchView(console, name, board, bar)
        try:
            yield view
        finally:
            if bar is not None:
                bar.remove_task(view.task)
    if not board.late:
        workers = plural(sum(board.counts.values()), "worker")
        view.say(f"{workers} ready on {plural(nodes, 'node')} in {time.monotonic() - view.began:.1f} s")
