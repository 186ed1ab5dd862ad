"""For whom a thread or a task of this process waits, as an event."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from roost.runtime.events.emitter import emitter

in_call: ContextVar[bool] = ContextVar("roost_in_call", default=False)
"""Whether this thread or task serves a call, whose own time a wait is not."""


class waiting:  # noqa: N801 - used like contextlib.suppress
    """Surrounds a wait: `with waiting(lambda: "channel 'samples'"): …`. The words are made only if it takes long."""

    __slots__ = ("_is_aside", "_since", "_started", "_whom")

    def __init__(self, whom: Callable[[], str], since: float = 0.0) -> None:
        """Take for whom it waits, and since when on the clock of `time.perf_counter`, if that was before now."""
        self._whom = whom
        self._since = since
        self._started = 0.0
        self._is_aside = False

    def __enter__(self) -> None:
        if emitter.is_on:
            self._started = self._since or time.perf_counter()
            # A thread of the user's own that waits, such as one that fetches ahead, does not hold up a call.
            self._is_aside = emitter.has_calls and not in_call.get()
            emitter.wait_began(id(self), self._whom, self._started, self._is_aside)

    def __exit__(self, *_: object) -> None:
        if self._started:
            emitter.wait_ended(id(self), self._whom, self._started, self._is_aside)


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
