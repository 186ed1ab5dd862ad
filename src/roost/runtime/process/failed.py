"""What a worker does about an exception of its own, whether or not the caller ever looks at the result.

The log gets the traceback each time. The events and the worker manager get one exception of a kind and method a second,
with the number of those in between.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence

import ray

from roost.runtime.events.emitter import emitter
from roost.runtime.failures.carry import Description
from roost.runtime.failures.meanwhile import CallFailure, Key
from roost.runtime.limits import FAILURES_EVERY_SECONDS
from roost.runtime.process import output
from roost.runtime.process.identity import current_identity
from roost.runtime.process.plain_actor import WORKER_MANAGER
from roost.text import shorten

_LONGEST_TRACEBACK = 4000
_lock = threading.Lock()
_told: dict[tuple[str, str], list[float]] = {}
"""By method and kind of exception: when the last one was told, and how many were not told since."""


def report(found: Description, method: str, causes: Sequence[Key] = ()) -> None:
    """Write an exception of a method into the log and the events, and tell the worker manager. Never raises."""
    with contextlib.suppress(Exception):
        identity = current_identity()
        if identity is None:
            return
        now, traceback = time.strftime("%Y-%m-%d %H:%M:%S"), found["traceback"].rstrip()
        output.write(f"{now} ERROR {identity.address} failed in {method}, pid {found['pid']}:\n{traceback}\n")
        more = _untold(method, found["what"])
        if more is None:
            return
        failure = CallFailure(
            address=identity.address,
            node=identity.node,
            method=method,
            what=found["what"],
            pid=found["pid"],
            when=found["when"],
            more=more,
            causes=tuple(causes),
        )
        short = traceback if len(traceback) <= _LONGEST_TRACEBACK else f"…{traceback[-_LONGEST_TRACEBACK:]}"
        emitter.note(
            "raised", identity.address, shorten(found["what"], 300), method=method, traceback=short, more=more or None
        )
        # The caller need not wait for it, and Ray's head may be silent.
        threading.Thread(target=_tell, args=(failure,), name="roost-failures", daemon=True).start()


def _untold(method: str, what: str) -> int | None:
    """Return how many like it were not told before it, or None if it is one of them."""
    key, now = (method, what.partition(":")[0]), time.monotonic()
    with _lock:
        last = _told.get(key)
        if last is not None and now - last[0] < FAILURES_EVERY_SECONDS:
            last[1] += 1
            return None
        _told[key] = [now, 0]
        return 0 if last is None else int(last[1])


def _tell(failure: CallFailure) -> None:
    with contextlib.suppress(Exception):
        manager = ray.get_actor(WORKER_MANAGER)
        ray.get(manager.note_failures.remote([failure]))
