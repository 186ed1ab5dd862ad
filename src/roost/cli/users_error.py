"""An exception of the user's own code, shown from where that code begins."""

from __future__ import annotations

import traceback
from types import FrameType, TracebackType

_NOT_THEIRS = ("roost.", "typer.", "click.", "importlib.")


def users_part(error: BaseException) -> TracebackType | None:
    """The traceback from the first frame that is not of the command line; None where there is no such frame."""
    trace = error.__traceback__
    while trace is not None and _is_ours(trace.tb_frame):
        trace = trace.tb_next
    return trace


def users_report(error: BaseException) -> str | None:
    """What Python would print, without the way through the command line; None where their code has no part in it."""
    trace = users_part(error)
    if trace is None and not isinstance(error, SyntaxError):
        return None
    return "".join(traceback.TracebackException(type(error), error, trace).format())


def _is_ours(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    # The command line itself is run as `__main__`, whichever way.
    return name == "__main__" or f"{name}.".startswith(_NOT_THEIRS)
