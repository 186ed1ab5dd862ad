"""For whom a thread or a task of this process waits, as an event."""

from __future__ import annotations

import time
from collections.abc import Callable

from roost.runtime.events.emitter import emitter


class waiting:  # noqa: N801 - used like contextlib.suppress
    """Surrounds a wait: `with waiting(lambda: "channel 'samples'"): …`. The words are made only if it takes long."""

    __slots__ = ("_since", "_started", "_whom")

    def __init__(self, whom: Callable[[], str], since: float = 0.0) -> None:
        """Take for whom it waits, and since when on the clock of `time.perf_counter`, if that was before now."""
        self._whom = whom
        self._since = since
        self._started = 0.0

    def __enter__(self) -> None:
        if emitter.is_on:
            self._started = self._since or time.perf_counter()
            emitter.wait_began(id(self), self._whom, self._started)

    def __exit__(self, *_: object) -> None:
        if self._started:
            emitter.wait_ended(id(self), self._whom, self._started)
