"""An error as the command line tells it: text for people on standard error, JSON for programs on standard output.

A traceback of the user's code begins where that code begins.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from roost.cli.out import as_json, write_text
from roost.errors import RoostError
from roost.text import plural, printable_lines

_WORDS = (
    (r"Value error, ", ""),
    (r"Input should be greater than or equal to ", "it must be at least "),
    (r"Input should be less than or equal to ", "it must be at most "),
    (r"Input should be greater than ", "it must be more than "),
    (r"Input should be less than ", "it must be less than "),
    (r"Input should be a valid integer.*", "it must be a whole number"),
    (r"Input should be a valid number.*", "it must be a number"),
    (r"Input should be ", "it must be "),
)
"""Messages of the library that checks the values of options, and plain words for them."""
_CALLER = "roost.runtime.job"  # imports the user's modules, calls their entry point
_BETWEEN = ("importlib", "contextlib")  # their frames may come between the caller and the user's code


def wants_json(arguments: Sequence[str]) -> bool:
    """Tell whether a command line asks for JSON.

    >>> wants_json(["plan", "--format", "json"]), wants_json(["plan", "--format=json"]), wants_json(["plan", "json"])
    (True, True, False)
    """
    return "--format=json" in arguments or ("--format", "json") in pairwise(arguments)


def tell_error(error: RoostError, *, as_data: bool) -> None:
    """Print an error for people, and with `as_data` also as a JSON document on standard output."""
    if as_data:
        write_text(as_json(error_data(error)))
    # Such as the folder of the run that it ended.
    notes = [printable_lines(note) for note in getattr(error, "__notes__", ())]
    if not (sys.stderr.isatty() or os.environ.get("FORCE_COLOR")):
        print("\n".join([str(error), *notes]), file=sys.stderr)
        return
    from rich.console import Console  # the half of rich that knows terminals: a pipe does without it
    from rich.text import Text

    parts = []
    for problem in error.problems:
        first, *rest = str(problem).split("\n")
        place = f"{problem.where}: " if problem.where else ""
        text = Text.assemble((first[: len(place)], "bold"), (first[len(place) :], "bold red"))
        for line in rest:
            is_mark = re.fullmatch(r"\s*\^+", line) is not None
            text.append(f"\n{line}", style="red" if is_mark else "cyan" if line.startswith("  hint: ") else "")
        parts.append(text)
    if len(error.problems) > 1:
        parts.append(Text(plural(len(parts), "problem"), style="bold"))
    parts += [Text(note) for note in notes]
    # A blank line sets each apart from the others.
    Console(stderr=True, highlight=False).print(Text("\n\n").join(parts), soft_wrap=True)


def error_data(error: RoostError) -> dict[str, Any]:
    """Return an error as JSON has it."""
    problems = []
    for problem in error.problems:
        where = problem.where
        in_file = {"file": where.file, "line": where.line, "column": where.offset + 1} if where and where.file else {}
        place = where and {"key": where.key, **in_file}
        problems.append({"message": problem.message, "hint": problem.hint or None, "where": place})
    return {"error": type(error).__name__, "problems": problems}


def plain_words(message: str) -> str:
    """Say in plain words what is wrong with the value of an option.

    >>> plain_words("Invalid value for '--number': Input should be greater than or equal to 1")
    "Invalid value for '--number': it must be at least 1"
    """
    for pattern, words in _WORDS:
        message = re.sub(pattern, words, message, flags=re.DOTALL)
    return message


def user_report(error: BaseException) -> str | None:
    """Format an exception as Python does, from the first frame of the user's code on; None if it is not the user's."""
    trace, is_called = error.__traceback__, False
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        package = module.partition(".")[0]
        if is_called and package not in ("roost", *_BETWEEN):
            break
        if package not in _BETWEEN:
            is_called = module == _CALLER
        trace = trace.tb_next
    # An exception from a worker's constructor has no frame of the user here; its notes have them all.
    if trace is None and not isinstance(error, SyntaxError) and not hasattr(error, "worker_failures"):
        return None
    return printable_lines("".join(traceback.TracebackException(type(error), error, trace).format()))
