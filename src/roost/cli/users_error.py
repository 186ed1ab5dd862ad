"""An exception of the user's own code, shown from where that code begins."""

from __future__ import annotations

import traceback
from types import FrameType, TracebackType

_DOOR = "roost.runtime.job"
"""The module that calls the user's code: it imports their modules and calls their entry point."""
_ON_THE_WAY = ("importlib", "contextlib")
"""What may stand between the two."""


def users_part(error: BaseException) -> TracebackType | None:
    """The traceback from the first frame of their code; None where an error of ours never was in it."""
    trace, is_at_the_door = error.__traceback__, False
    while trace is not None:
        module = _module_of(trace.tb_frame)
        if module not in _ON_THE_WAY:
            if is_at_the_door and module != "roost":
                return trace
            is_at_the_door = _name_of(trace.tb_frame) == _DOOR
        trace = trace.tb_next
    return None


def users_report(error: BaseException) -> str | None:
    """What Python would print, without the way through the command line; None where their code has no part in it."""
    trace = users_part(error)
    # What a worker raised in its constructor has no frame of theirs here, and notes that have them all.
    if trace is None and not isinstance(error, SyntaxError) and not hasattr(error, "worker_failures"):
        return None
    return "".join(traceback.TracebackException(type(error), error, trace).format())


def _name_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _module_of(frame: FrameType) -> str:
    return _name_of(frame).partition(".")[0]
