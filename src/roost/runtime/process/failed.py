"""How a worker reports its own exceptions, whether or not the caller ever looks at the result.

The log gets the traceback each time. The events and the worker manager get the first exceptions of a kind and method,
and then one a second, with the number of those in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from roost.runtime.events.emitter import emitter
from roost.runtime.failures.failure import Failure
from roost.runtime.failures.meanwhile import CallFailure, Key
from roost.runtime.limits import FAILURES_EVERY_SECONDS, HANG_SECONDS, TELL_SECONDS
from roost.runtime.process import output
from roost.runtime.process.identity import current_identity
from roost.runtime.process.plain_actor import WORKER_MANAGER
from roost.text import printable, shorten

_LONGEST_TRACEBACK = 4000
_MOST_AT_ONCE = 20
_MOST_TELLING = 4
_lock = threading.Lock()
_telling = threading.BoundedSemaphore(_MOST_TELLING)
"""Threads that tell the worker manager, which may hang."""
_kinds: dict[tuple[str, str], _Kind] = {}
"""By method and class."""


@dataclass(slots=True)
class _Kind:
    """The exceptions of one class in one method."""

    left: float
    """How many may be told now; more with time."""
    since: float
    untold: int = 0


def report(found: Failure, method: str, causes: Sequence[Key] = ()) -> None:
    """Write an exception of a method into the log and the events, and tell the worker manager. Never raises."""
    with contextlib.suppress(Exception):
        identity, what = current_identity(), shorten(printable(found.what), 300)
        if identity is None:
            return
        now, traceback = time.strftime("%Y-%m-%d %H:%M:%S"), found.traceback.rstrip()
        output.write(f"{now} ERROR {identity.address} failed in {method}, pid {found.pid}:\n{traceback}\n")
        more = _untold(method, found.what)
        if more is None:
            return
        failure = CallFailure(
            address=identity.address,
            node=identity.node,
            method=method,
            what=what,
            pid=found.pid or 0,
            when=found.when,
            more=more,
            causes=tuple(causes),
        )
        short = traceback if len(traceback) <= _LONGEST_TRACEBACK else f"…{traceback[-_LONGEST_TRACEBACK:]}"
        emitter.note("raised", identity.address, what, method=method, traceback=short, more=more or None)
        if not _telling.acquire(blocking=False):
            return
        telling = threading.Thread(target=_tell, args=(failure,), name="roost-failures", daemon=True)
        try:
            telling.start()
        except BaseException:
            _telling.release()
            raise
        # So that it is known before the caller goes on; but the manager may hang, and an event loop must not.
        if asyncio._get_running_loop() is None:
            telling.join(TELL_SECONDS)


def _untold(method: str, what: str) -> int | None:
    """Return how many like it were not told before it, or None if it is one of them."""
    now = time.monotonic()
    with _lock:
        kind = _kinds.setdefault((method, what.partition(":")[0]), _Kind(_MOST_AT_ONCE, now))
        kind.left = min(_MOST_AT_ONCE, kind.left + (now - kind.since) / FAILURES_EVERY_SECONDS)
        kind.since = now
        if kind.left < 1:
            kind.untold += 1
            return None
        kind.left -= 1
        untold, kind.untold = kind.untold, 0
        return untold


def _tell(failure: CallFailure) -> None:
    try:
        with contextlib.suppress(Exception):
            ray.get(_manager().note_failures.remote([failure]), timeout=HANG_SECONDS)
    finally:
        _telling.release()


@functools.cache
def _manager() -> Any:
    """Return the worker manager, which Ray restarts under the same handle."""
    return ray.get_actor(WORKER_MANAGER)
