"""A failure in a worker, and its way to the caller: as the worker's own exception, with all that is known of it.

`carry` packs an exception in the worker: pickled if possible, and described in any case. `failure_of` turns what Ray
raises for a call into a `Failure`, and `make_error` turns failures into the exception for the caller, with notes that
say which worker raised it, where, with what traceback and log.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import FrameType
from typing import Any, TypeVar

from ray import cloudpickle
from ray.exceptions import (
    ActorUnavailableError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RaySystemError,
    RayTaskError,
    WorkerCrashedError,
)

from roost.config.ranks import format_ranks
from roost.errors import WorkerDied, WorkerFailed
from roost.text import at_most, error_text, message_of, plural, printable, printable_lines, shorten, without_colours

Made = TypeVar("Made")

# Ray delivers a small failure immediately, and a large one only when the whole call is over.
_MAX_PICKLED = 32 * 1024
_MAX_TEXT = 12_000

_CRASH = re.compile(r"Fatal Python error: (.+)")
_EXIT_CODE = re.compile(r"exit code (\d+)")
_IDS = ("class_name:", "actor_id:", "namespace:", "name:", "ip:", "pid:", "The actor died because", "ray::")
"""How the lines of Ray's account of a death begin that mean nothing to the reader."""
DEATHS = (RayActorError, WorkerCrashedError, NodeDiedError, OutOfMemoryError)


class FailureKind(StrEnum):
    """How a worker failed."""

    EXCEPTION = "exception"
    DEATH = "death"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One worker's failure: who, where, what, and the end of its log."""

    kind: FailureKind
    address: str
    rank: int
    node: str
    what: str
    """`ValueError: bad reward`, or what is known about the death."""
    traceback: str = ""
    log_tail: str = ""
    log_path: str = ""
    pid: int | None = None
    when: float = 0.0
    pickled: bytes | None = None
    method: str = ""
    """The method that failed, where it is known."""
    passed_to: str = ""
    """The call that failed because its argument is the result of this one: `'train' of 'actor'`."""

    def __str__(self) -> str:
        return f"{self.address} on {self.node}: {self.what}"

    @property
    def details(self) -> str:
        """Traceback and log of the worker, indented."""
        parts = []
        if self.traceback:
            parts.append(f"  traceback of {self.address}:\n{textwrap.indent(self.traceback.rstrip(), ' ' * 4)}")
        if self.log_tail:
            where = f" ({self.log_path})" if self.log_path else ""
            parts.append(f"  the end of its log{where}:\n{textwrap.indent(self.log_tail.rstrip(), ' ' * 4)}")
        return "\n".join(parts)


class RemoteFailure(Exception):  # noqa: N818 - what happened
    """An exception on its way from a worker to its caller. The failure survives whatever the exception is like."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure

    def __str__(self) -> str:
        return self.failure.traceback


class Raised(RemoteFailure):
    """An exception of a method, as Ray keeps it: it unpickles as that exception, which `ray.get` raises as the user's.

    The traceback is in Ray's text, so that the note has only the worker and its log.
    """

    def __str__(self) -> str:
        trace = self.failure.traceback.removeprefix("Traceback (most recent call last):\n")
        return f"{_place_of(self.failure)}, in {self.failure.method!r}\n{trace}"

    def __reduce__(self) -> Any:
        return _arrived, (self.failure,)


def _arrived(failure: Failure) -> Exception:
    """Return the exception of a method in the process that unpickles it."""
    log = "" if failure.log_tail or not failure.log_path else f", log {failure.log_path}"
    error = make_error([replace(failure, traceback="")], f"in {failure.method!r}{log}")
    vars(error)["worker_failures"] = (failure,)
    return error


def _place_of(failure: Failure) -> str:
    return f"in {failure.address} on {failure.node}, pid {failure.pid}"


def failures_in(error: BaseException | None) -> tuple[Failure, ...]:
    """Return the failures of workers that an exception tells of, whether Roost or Ray raises it."""
    told = getattr(error, "cause", None) if isinstance(error, RayTaskError) else error
    found = vars(told).get("worker_failures", ()) if isinstance(told, BaseException) else ()
    return found if isinstance(found, tuple) else ()


def carry(
    error: BaseException, log_tail: str, *, address: str = "", rank: int = 0, node: str = "", method: str = ""
) -> RemoteFailure:
    """Prepare an exception to travel: called in the worker that caught it.

    It says who raised it if that is not known at the other end: the argument of a call may be the result of another
    one, with which it fails.
    """
    # Leave out our own frames, which called the user's code.
    trace = error.__traceback__
    while trace and trace.tb_next and trace.tb_frame.f_globals.get("__name__", "").startswith("roost.runtime."):
        trace = trace.tb_next
    outer = error
    if isinstance(error, RayTaskError) and not isinstance(error.cause, RayError):
        # What ray.get raised for a failure of another worker: each process makes a class of its own for it.
        error = error.cause
    kind = type(error)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    message = _tried(lambda: message_of(error), "(its str() raises KeyboardInterrupt)")
    what = f"{name}: {shorten(message, _MAX_TEXT)}" if message else name
    shown = _tried(
        lambda: "".join(traceback.TracebackException(type(outer), outer, trace).format()),
        "".join(["Traceback (most recent call last):\n", *traceback.format_tb(trace), what]),
    )
    return RemoteFailure(
        Failure(
            kind=FailureKind.EXCEPTION,
            address=address,
            rank=rank,
            node=node,
            what=what,
            traceback=_cut_middle(shown),
            log_tail=_cut_middle(log_tail),
            pid=os.getpid(),
            when=time.time(),
            pickled=_tried(lambda: _pickled(error), None),
            method=method,
        )
    )


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
    return data if len(data) <= _MAX_PICKLED and type(_revive(data, "")) is type(error) else None


def _cut_middle(text: str) -> str:
    if len(text) <= _MAX_TEXT:
        return text
    half = _MAX_TEXT // 2
    return f"{text[:half]}\n  … {len(text) - _MAX_TEXT} characters left out …\n{text[-half:]}"


def _revive(pickled: bytes, note: str) -> Exception | None:
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


def describe_death(error: BaseException, log_tail: str = "") -> str:
    """Say what is known about a death, from Ray's long account and the end of the log."""
    lines = [line for line in (printable(line.strip()) for line in str(error).splitlines()) if line]
    text = " ".join([line for line in lines if not line.startswith(_IDS)] or lines)
    if isinstance(error, OutOfMemoryError) or "running low on memory" in text:
        return "Ray ended it because its node was running out of memory"
    if "placement group was removed" in text or "placement group is removed" in text:
        return "Ray ended it because its reservation was removed"
    if found := _EXIT_CODE.search(text):
        return f"its process ended with exit code {found[1]}"
    if crash := _CRASH.findall(log_tail):
        return f"it crashed: {crash[-1]}"
    if "connection error code 2" in text or "Socket closed" in text:
        # Ray lists common causes at length here, none of which it knows to be the one.
        return "its process ended without a message: it crashed or was killed, perhaps for lack of memory"
    if isinstance(error, ActorUnavailableError):
        return f"it cannot be reached: {shorten(text, 400)}"
    return shorten(text, 400) or type(error).__name__


def failure_of(error: BaseException, *, address: str, rank: int, node: str, log_path: str) -> Failure:
    """Turn what Ray raised for a call to a worker, or the failure that the call reports, into that of the worker."""
    cause = error if isinstance(error, RemoteFailure) else getattr(error, "cause", None)
    called: dict[str, Any] = {"address": address, "rank": rank, "node": node}
    # Or of another call, whose result is an argument of this one.
    told = failures_in(error) if isinstance(error, RayTaskError) else ()
    if found := cause.failure if isinstance(cause, RemoteFailure) else next(iter(told), None):
        # An exception may quote what its worker got from elsewhere.
        shown: dict[str, Any] = {
            name: printable_lines(getattr(found, name)) for name in ("what", "traceback", "log_tail")
        }
        return replace(found, log_path=log_path, **shown | ({} if found.address else called))
    base = {**called, "log_path": log_path, "when": time.time(), "kind": FailureKind.EXCEPTION}
    if isinstance(error, DEATHS) and not isinstance(error, RayTaskError):
        return Failure(**base | {"kind": FailureKind.DEATH, "what": describe_death(error)})
    if isinstance(error, RayTaskError):
        # Raised outside the user's method, most likely after it.
        last = _last_line(message_of(cause or error))
        what = f"its result cannot be sent: {last}" if "pickle" in str(error) else f"{type(cause).__name__}: {last}"
        return Failure(what=what, traceback=printable_lines(without_colours(str(error))), **base)
    if isinstance(error, RaySystemError):
        what = f"its answer cannot be read here: {_last_line(str(error))}"
        return Failure(what=what, traceback=printable_lines(str(error)), **base)
    return Failure(what=printable_lines(error_text(error)), **base)


def _last_line(text: str) -> str:
    lines = [printable(line.strip()) for line in text.splitlines() if line.strip()]
    return shorten(lines[-1], 500) if lines else ""


def make_error(failures: Sequence[Failure], doing: str, unfinished: Sequence[int] = (), asked: str = "") -> Exception:
    """Make the exception for the caller: the first cause as it was raised, or a description of it, with all details.

    `asked` says which line asked for it.
    """
    # When a worker dies, the others often fail too, and the death is noticed last: deaths come first.
    ordered = sorted(failures, key=lambda item: (item.kind is not FailureKind.DEATH, item.when, item.rank))
    # A failure that was passed on to several ranks is one failure.
    unique: dict[tuple[str, str], Failure] = {}
    for item in ordered:
        unique.setdefault((item.address, item.method), item)
    first, *others = unique.values()
    if first.passed_to:
        failed = f"{first.method!r}" if first.method else "a call"
        doing = f"in {failed}, whose result was passed to {first.passed_to}"
    rest = [f"  {asked}"] if asked else []
    if others:
        rest.append(f"  also failed ({len(others)}):")
        rest += [f"    {line}" for line in at_most([shorten(str(other), 300) for other in others], 16)]
    if unfinished:
        rest.append(f"  not finished yet: {plural(len(unfinished), 'rank')}, {format_ranks(unfinished)}")
    note = f"{_place_of(first)}, {doing}"
    notes = "\n".join(filter(None, [note, first.details, *rest]))
    error = _revive(first.pickled, notes) if first.pickled else None
    if error is None:
        kind, verb = (WorkerDied, "died") if first.kind is FailureKind.DEATH else (WorkerFailed, "failed")
        text = f"{first.address} on {first.node} {verb} {doing}: {first.what}"
        error = kind("\n".join(filter(None, [text, first.details, *rest])))
    # For the caller's code what the notes are for people. The class may refuse it.
    vars(error)["worker_failures"] = (first, *others)
    return error


def asked_at() -> str:
    """Return the line of the user's code that is under way: `asked for at train.py:42`.

    Return nothing if there is none, as in `roost demo`, where a command of Roost asks.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("roost.", "concurrent.", "threading")):
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__", "").startswith(("typer.", "click.")):
        return ""
    file = frame.f_code.co_filename
    # As in a traceback, and shorter where that is as clear. The folder that this process works in may be gone.
    with contextlib.suppress(OSError):
        if os.path.isabs(file) and file.startswith(os.path.join(os.getcwd(), "")):
            file = os.path.relpath(file)
    return f"asked for at {file}:{frame.f_lineno}"
