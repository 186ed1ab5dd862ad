"""Completion: what the shell is offered after TAB.

The user waits in the middle of a line, so completion loads no Ray, prints nothing to standard error, and offers nothing
if anything fails. The shell then offers files.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable

_MOST = 200


def offer(find: Callable[[], list[str]], incomplete: str) -> list[str]:
    """Return the first of the names found that complete the word; none if `find` raises."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            found = find()
    except Exception:
        return []
    return [item for item in found if item.startswith(incomplete)][:_MOST]


def complete_in_bash(run: Callable[[], object]) -> None:
    """Answer bash, which splits `actor:3` and `--format=json` into three words and wants the rest of the last one."""
    if os.environ.get("_ROOST_COMPLETE") != "complete_bash" or not os.environ.get("COMP_CWORD", "").isdigit():
        return
    words, current, begun = join_split_words(
        os.environ.get("COMP_WORDS", "").split("\n"), int(os.environ["COMP_CWORD"])
    )
    os.environ.update({"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(current)})
    offered = io.StringIO()
    try:
        with contextlib.redirect_stdout(offered):
            run()
    finally:
        print("\n".join(line.removeprefix(begun) for line in offered.getvalue().splitlines()))


def join_split_words(words: list[str], current: int) -> tuple[list[str], int, str]:
    """Join the words that bash split at `:` and `=`; return them, the index of the current one, and how it begins.

    >>> join_split_words(["roost", "where", "job.yaml", "actor", ":", "1"], 5)
    (['roost', 'where', 'job.yaml', 'actor:1'], 3, 'actor:')
    """
    joined: list[str] = []
    place, begun = 0, ""
    is_open = False
    for index, word in enumerate(words):
        is_separator = re.fullmatch("[:=]+", word) is not None
        belongs = is_separator or (is_open and not word.startswith("-"))
        before = joined.pop() if joined and belongs else ""
        joined.append(before + word)
        if index == current:
            place, begun = len(joined) - 1, before + (word if is_separator else "")
        is_open = is_separator
    return joined, place if current < len(words) else len(joined), begun
