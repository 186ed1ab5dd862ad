"""An exception on its way from a worker to its caller: pickled if possible, and described in any case."""

from __future__ import annotations

import contextlib
import os
import pickle
import time
import traceback
from typing import TypedDict

from ray import cloudpickle

from roost.text import shorten

# Ray delivers a small failure immediately, and a large one only when the whole call is over.
_MAX_PICKLED = 32 * 1024
_MAX_TEXT = 12_000


class RemoteFailure(Exception):  # noqa: N818 - what happened
    """An exception on its way from a worker to its caller. `description` survives whatever the exception is like."""

    def __init__(self, description: Description) -> None:
        super().__init__(description)
        self.description = description

    def __str__(self) -> str:
        return self.description["traceback"]


class Description(TypedDict):
    """An exception as text, and pickled if it survives that; the fields are those of `Failure`."""

    what: str
    traceback: str
    log_tail: str
    when: float
    pid: int
    pickled: bytes | None


def carry(error: BaseException, log_tail: str) -> RemoteFailure:
    """Prepare an exception to travel: called in the worker that caught it."""
    # Leave out our own frames, which called the user's code.
    trace = error.__traceback__
    while trace and trace.tb_next and trace.tb_frame.f_globals.get("__name__", "").startswith("roost.runtime."):
        trace = trace.tb_next
    found = traceback.TracebackException(type(error), error, trace)
    try:
        message = str(error)
    except Exception:
        message = "(its str() raises)"
    kind = type(error)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return RemoteFailure(
        {
            "what": f"{name}: {shorten(message, _MAX_TEXT)}" if message else name,
            "traceback": _cut_middle("".join(found.format())),
            "log_tail": _cut_middle(log_tail),
            "when": time.time(),
            "pid": os.getpid(),
            "pickled": _pickled(error),
        }
    )


def _pickled(error: BaseException) -> bytes | None:
    """Pickle the exception, if it survives the round trip as what it was."""
    # These mean something to the code that they would pass through.
    if not isinstance(error, Exception) or isinstance(error, StopIteration | StopAsyncIteration):
        return None
    with contextlib.suppress(Exception):
        data: bytes = cloudpickle.dumps(error)  # type: ignore[no-untyped-call]
        if len(data) <= _MAX_PICKLED and type(pickle.loads(data)) is type(error):  # noqa: S301 - our own bytes
            return data
    return None


def _cut_middle(text: str) -> str:
    if len(text) <= _MAX_TEXT:
        return text
    half = _MAX_TEXT // 2
    return f"{text[:half]}\n  … {len(text) - _MAX_TEXT} characters left out …\n{text[-half:]}"
