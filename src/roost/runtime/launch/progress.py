"""How far a launch is: the phase of each worker, as a bar on a terminal or as lines in a pipe."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
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
    """The phase of each worker of a launch, and since when; shown while the launch goes on.

    >>> board = LaunchBoard(Console(), "actor", ["actor:0", "actor:1"], now=0.0)
    >>> board.advance("actor:1", Phase.READY, now=2.0)
    >>> board.summary, board.late
    ('1 requested, 1 ready', ['actor:0'])
    """

    def __init__(self, console: Console, name: str, addresses: Sequence[str], now: float) -> None:
        self._console = console
        self._name = name
        self.entered = dict.fromkeys(addresses, (Phase.REQUESTED, now))
        """The phase of each worker, and since when."""
        self.reached: dict[Phase, float] = {}
        """When the last worker so far entered each phase."""
        self._began = self._said = now
        self._bar: Any = None
        self._task: Any = None

    def advance(self, address: str, phase: Phase, now: float) -> None:
        """Put a worker into another phase."""
        self.entered[address] = (phase, now)
        self.reached[phase] = now

    @property
    def late(self) -> list[str]:
        """The workers that are not ready."""
        return [address for address, (phase, _) in self.entered.items() if phase is not Phase.READY]

    @property
    def summary(self) -> str:
        """`3 constructing, 1 ready`."""
        counts = Counter(phase for phase, _ in self.entered.values())
        return ", ".join(f"{counts[phase]} {phase}" for phase in Phase if counts[phase])

    @contextlib.contextmanager
    def shown(self, nodes: int) -> Iterator[None]:
        """Show the launch from beginning to end, and how long it took if it succeeds."""
        with self._console.progress() as self._bar:
            if self._bar is not None:
                self._task = self._bar.add_task(self._name, total=len(self.entered), summary=self.summary)
            try:
                yield
            finally:
                if self._bar is not None:
                    self._bar.remove_task(self._task)
        if not self.late:
            workers, seconds = plural(len(self.entered), "worker"), time.monotonic() - self._began
            self.say(f"{workers} ready on {plural(nodes, 'node')} in {seconds:.1f} s")

    def update(self) -> None:
        """Show how far the launch is."""
        if self._bar is not None:
            ready = len(self.entered) - len(self.late)
            self._bar.update(self._task, completed=ready, summary=self.summary)
        elif time.monotonic() - self._said >= LAUNCH_LINE_SECONDS:
            self._said = time.monotonic()
            self.say(f"{self.summary} after {self._said - self._began:.0f} s")

    def say(self, text: str) -> None:
        """Print a line about this launch."""
        self._console.line(f"{self._name}: {text}")
