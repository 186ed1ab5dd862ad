"""Tracebacks of the user's code that begin where that code begins."""

from __future__ import annotations

import traceback
from types import TracebackType

from roost.text import printable_lines

_CALLERS = ("roost.runtime.job",)  # imports the user's modules, calls their entry point
_BETWEEN = ("importlib", "contextlib")  # their frames may come between the caller and the user's code


def user_frames(error: BaseException) -> TracebackType | None:
    """Return the traceback from the first frame of the user's code; None if it has no such frame."""
    trace, is_called = error.__traceback__, False
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        package = module.partition(".")[0]
        if package not in _BETWEEN:
            if is_called and package != "roost":
                return trace
            is_called = module in _CALLERS
        trace = trace.tb_next
    return None


def user_report(error: BaseException) -> str | None:
    """Format an exception as Python does, without the frames of the command line; None if it is not the user's."""
    trace = user_frames(error)
    # An exception from a worker's constructor has no frame of the user here; its notes have them all.
    if trace is None and not isinstance(error, SyntaxError) and not hasattr(error, "worker_failures"):
        return None
    return printable_lines("".join(traceback.TracebackException(type(error), error, trace).format()))
