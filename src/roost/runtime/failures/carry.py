"""An exception on its way from a worker to its caller: pickled if possible, and described in any case."""

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections.abc import Callable
from typing import NotRequired, TypedDict, TypeVar

from ray import cloudpickle

from roost.text import message_of, shorten

Made = TypeVar("Made")

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
    origin: NotRequired[Origin]


class Origin(TypedDict):
    """The call that raised an exception: another one's argument may be its result, and then fails with it."""

    address: str
    rank: int
    node: str
    method: str


def carry(error: BaseException, log_tail: str, origin: Origin | None = None) -> RemoteFailure:
    """Prepare an exception to travel: called in the worker that caught it."""
    # Leave out our own frames, which called the user's code.
    trace = error.__traceback__
    while trace and trace.tb_next and trace.tb_frame.f_globals.get("__name__", "").startswith("roost.runtime."):
        trace = trace.tb_next
    kind = type(error)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    message = _tried(lambda: message_of(error), "(its str() raises KeyboardInterrupt)")
    what = f"{name}: {shorten(message, _MAX_TEXT)}" if message else name
    shown = _tried(
        lambda: "".join(traceback.TracebackException(kind, error, trace).format()),
        "".join(["Traceback (most recent call last):\n", *traceback.format_tb(trace), what]),
    )
    description: Description = {
        "what": what,
        "traceback": _cut_middle(shown),
        "log_tail": _cut_middle(log_tail),
        "when": time.time(),
        "pid": os.getpid(),
        "pickled": _tried(lambda: _pickled(error), None),
    }
    if origin is not None:
        description["origin"] = origin
    return RemoteFailure(description)


def revive(pickled: bytes, note: str) -> Exception | None:
    """Return a pickled exception with a note; None if it does not come back as one that can be shown."""
    try:
        error = pickle.loads(pickled)  # noqa: S301 - pickled by a worker of this job
        error.add_note(note)
        # The class is the user's: what these raise would otherwise come up where the caller shows the exception.
        str(error), repr(error)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return None
    return error if isinstance(error, Exception) else None


def _tried(make: Callable[[], Made], otherwise: Made) -> Made:
    """Call what runs code of the exception's class, which may raise anything, also what would end this process."""
    try:
        return make()
    except BaseException:
        return otherwise


def _pickled(error: BaseException) -> bytes | None:
    """Pickle the exception, if it survives the round trip as what it was."""
    # These mean something to the code that they would pass through.
    if not isinstance(error, Exception) or isinstance(error, StopIteration | StopAsyncIteration):
        return None
    data: bytes = cloudpickle.dumps(error)  # type: ignore[no-untyped-call]
    return data if len(data) <= _MAX_PICKLED and type(revive(data, "")) is type(error) else None


def _cut_middle(text: str) -> str:
    if len(text) <= _MAX_TEXT:
        return text
    half = _MAX_TEXT // 2
    return f"{text[:half]}\n  … {len(text) - _MAX_TEXT} characters left out …\n{text[-half:]}"
