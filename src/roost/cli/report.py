"""An error as the command line tells it: text for people on standard error, JSON for programs on standard output."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from roost.cli.out import as_json, write_text
from roost.errors import Problem, RoostError
from roost.text import plural

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
    if sys.stderr.isatty() or os.environ.get("FORCE_COLOR"):
        _print_on_terminal(error.problems)
    else:
        print(error, file=sys.stderr)


def error_data(error: RoostError) -> dict[str, Any]:
    """Return an error as JSON has it."""
    return {"error": type(error).__name__, "problems": [_problem_data(problem) for problem in error.problems]}


def _problem_data(problem: Problem) -> dict[str, Any]:
    where = problem.where
    place = None
    if where is not None:
        in_file = {"file": where.file, "line": where.line, "column": where.offset + 1} if where.file else {}
        place = {"key": where.key, **in_file}
    return {"message": problem.message, "hint": problem.hint or None, "where": place}


def plain_words(message: str) -> str:
    """Say in plain words what is wrong with the value of an option.

    >>> plain_words("Invalid value for '--number': Input should be greater than or equal to 1")
    "Invalid value for '--number': it must be at least 1"
    """
    for pattern, words in _WORDS:
        message = re.sub(pattern, words, message, flags=re.DOTALL)
    return message


def _print_on_terminal(problems: Sequence[Problem]) -> None:
    from rich.console import Console  # the half of rich that knows terminals: a pipe does without it
    from rich.text import Text

    def styled(problem: Problem) -> Text:
        text = Text()
        first, *rest = str(problem).split("\n")
        place = f"{problem.where}: " if problem.where else ""
        text.append(first[: len(place)], style="bold").append(first[len(place) :], style="bold red")
        for line in rest:
            is_mark = re.fullmatch(r"\s*\^+", line) is not None
            style = "red" if is_mark else "cyan" if line.startswith("  hint: ") else ""
            text.append("\n").append(line, style=style)
        return text

    parts = [styled(problem) for problem in problems]
    if len(problems) > 1:
        parts.append(Text(plural(len(problems), "problem"), style="bold"))
    # A blank line sets each apart from the others.
    Console(stderr=True, highlight=False).print(Text("\n\n").join(parts), soft_wrap=True)
