"""For whom a thread or a task of this process waits, as an event."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar

from roost.runtime.events.emitter import emitter

in_call: ContextVar[bool] = ContextVar("roost_in_call", default=False)
"""Whether this thread or task serves a call, whose own time a wait is not."""


class waiting:  # noqa: N801 - used like contextlib.suppress
    """Surrounds a wait: `with waiting(lambda: "channel 'samples'"): …`. The words are made only if it takes long."""

    watched: ClassVar[dict[int, waiting] | None] = None
    """The waits under way, in a process that says which take long."""

    __slots__ = ("_details", "_is_aside", "_whom", "started")

    def __init__(
        self,
        whom: Callable[[], str],
        since: float = 0.0,
        details: Callable[[], tuple[str, Sequence[str]]] | None = None,
    ) -> None:
        """Take for whom it waits, and since when on the clock of `time.perf_counter`, if that was before now.

        `details` returns the same in more words, and the addresses of the workers that are late.
        """
        self._whom = whom
        self._details = details
        self.started = since
        """When it began; 0 if nobody wants to know."""
        self._is_aside = False

    def __enter__(self) -> None:
        watched = waiting.watched
        if not emitter.is_on and watched is None:
            self.started = 0.0
            return
        self.started = self.started or time.perf_counter()
        if watched is not None:
            watched[id(self)] = self
        if emitter.is_on:
            # A thread of the user's own that waits, such as one that fetches ahead, does not hold up a call.
            self._is_aside = emitter.has_calls and not in_call.get()
            emitter.wait_began(id(self), self._whom, self.started, self._is_aside)

    def __exit__(self, *_: object) -> None:
        if self.started:
            emitter.wait_ended(id(self), self._whom, self.started, self._is_aside)
            # Another thread may end the watch at any moment.
            watched = waiting.watched
            if watched is not None:
                watched.pop(id(self), None)

    def words(self) -> str:
        """Say briefly for whom it waits."""
        return self._whom()

    def details(self) -> tuple[str, Sequence[str]]:
        """Say the same in more words, and return the workers that are late, as far as is known."""
        return (self._whom(), ()) if self._details is None else self._details()


def record_waits_of_torch() -> None:
    """Let `torch.distributed` record its waits, if this process has loaded it.

    Its functions that block do so in `Work.wait`, for which torch has no hook.
    """
    work = getattr(sys.modules.get("torch._C._distributed_c10d"), "Work", None)
    if work is None or hasattr(work, "_roost_wait"):
        return
    work._roost_wait = wait = work.wait

    def recorded_wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        with waiting(lambda: "torch.distributed"):
            return wait(self, *args, **kwargs)

    work.wait = recorded_wait
