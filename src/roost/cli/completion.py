"""Completion: what the shell is offered after TAB, and the argument RUN.

The user waits in the middle of a line, so completion loads no Ray, prints nothing to standard error, and offers nothing
if anything fails. The shell then offers files.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from roost.errors import RoostError

_MOST = 200
_LARGEST_FILE = 2**20


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


def complete_worker(context: typer.Context, incomplete: str) -> list[str]:
    """Offer the workers of the job on the line: `actor:3`."""

    def find() -> list[str]:
        return [
            f"{name}:{rank}"
            for name, count in _workers(context).items()
            if f"{name}:".startswith(incomplete) or incomplete.startswith(f"{name}:")
            for rank in range(count)
        ]

    return offer(find, incomplete)


def complete_component(context: typer.Context, incomplete: str) -> list[str]:
    """Offer the components of the job on the line."""
    return offer(lambda: list(_workers(context)), incomplete)


def complete_run(incomplete: str) -> list[str]:
    """Offer the ids of this user's runs, newest first."""
    from roost.runtime.runs.index import list_runs

    return offer(lambda: [run.id for run in list_runs()], incomplete)


Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Its id, the first characters of that, its folder, or latest: the newest of this project.",
        autocompletion=complete_run,
    ),
]


def _workers(context: typer.Context) -> dict[str, int]:
    """Count the workers of each component of the job on the line."""
    from roost.cli.plans import Flags, load_plan
    from roost.config.job import read_job_draft

    given = context.params
    # Where the line ends with an option that lacks its value, typer parses no arguments.
    words = (os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")).split()
    jobs = (word for word in words if word.endswith((".yaml", ".yml", ".json")) and Path(word).is_file())
    job = Path(given.get("job") or next(jobs))
    # Do not wait for a pipe, nor for a file that takes long to read.
    if job.exists() and (not job.is_file() or job.stat().st_size > _LARGEST_FILE):
        return {}
    names = ("cluster", "inventory", "placement", "no_isolate")
    flags = Flags(**{name: given[name] for name in names if given.get(name)})
    try:
        return {part.name: part.world_size for part in load_plan(job, flags).components}
    except RoostError:
        # The flag with the right hardware may still be to come.
        parts = read_job_draft(job).job.cluster.components
        return {
            part.name: part.count or (last.last + 1 if (last := part.segments[-1].processes) else 1) for part in parts
        }
