"""What the shell offers after TAB beside commands, options and files: workers, components, logs and runs.

A person waits for it, in the middle of a line: no Ray, no word on standard error, and whatever fails offers nothing.
Where nothing is offered, the shells offer files.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable
from pathlib import Path

import typer

_MOST = 200
_LARGEST_FILE = 2**20
_VARIABLE = "_ROOST_COMPLETE"


def complete_worker(context: typer.Context, incomplete: str) -> list[str]:
    """The workers of the job on the line: `actor:3`."""

    def find() -> list[str]:
        return [
            f"{name}:{rank}"
            for name, count in _workers(context).items()
            if f"{name}:".startswith(incomplete) or incomplete.startswith(f"{name}:")
            for rank in range(count)
        ]

    return _offered(find, incomplete)


def complete_component(context: typer.Context, incomplete: str) -> list[str]:
    """The components of the job on the line."""
    return _offered(lambda: list(_workers(context)), incomplete)


def complete_log(context: typer.Context, incomplete: str) -> list[str]:
    """The groups and workers that the run on the line, or the newest, has logs of."""

    def find() -> list[str]:
        from roost.cli.logs import log_names

        names = log_names(context.params.get("run"))
        return [*dict.fromkeys(name.rpartition(":")[0] for name in names), *names]

    return _offered(find, incomplete)


def complete_run(incomplete: str) -> list[str]:
    """The runs of this user, the newest first."""

    def find() -> list[str]:
        from roost.runtime.runs.index import list_runs

        return [run.id for run in list_runs()]

    return _offered(find, incomplete)


def _offered(find: Callable[[], list[str]], incomplete: str) -> list[str]:
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            found = find()
    except Exception:
        return []
    return [item for item in found if item.startswith(incomplete)][:_MOST]


def _workers(context: typer.Context) -> dict[str, int]:
    """The components of the job on the line, and how many workers each has."""
    from roost.cli.load import load_plan
    from roost.cli.options import Kind, make_flags
    from roost.config.job import read_job_draft
    from roost.errors import RoostError

    given = context.params
    job = Path(given.get("job") or _job_on_the_line())
    # Nobody waits for a pipe here, nor for a file that takes long to read.
    if job.exists() and (not job.is_file() or job.stat().st_size > _LARGEST_FILE):
        return {}
    rules = Kind(given.get("placement") or Kind.AUTO)
    flags = make_flags(given.get("cluster"), given.get("inventory"), False, rules, bool(given.get("no_isolate")))
    try:
        return {part.name: part.world_size for part in load_plan(job, flags).components}
    except RoostError:
        # The flag that says the right hardware may still be to come.
        parts = read_job_draft(job).job.cluster.components
        return {part.name: last.last + 1 if (last := part.segments[-1].processes) else 1 for part in parts}


def _job_on_the_line() -> str:
    """The job, where the line stops at an option that lacks its value: typer then knows no argument."""
    words = (os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")).split()
    return next(word for word in words if word.endswith((".yaml", ".yml", ".json")) and Path(word).is_file())


def complete_in_bash(run: Callable[[], object]) -> None:
    """Answer bash, which takes `actor:3` and `--format=json` for three words, and wants what ends the last of them."""
    if os.environ.get(_VARIABLE) != "complete_bash" or not os.environ.get("COMP_CWORD", "").isdigit():
        return
    words, current, begun = join_words(os.environ.get("COMP_WORDS", "").split("\n"), int(os.environ["COMP_CWORD"]))
    os.environ.update({"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(current)})
    offered = io.StringIO()
    try:
        with contextlib.redirect_stdout(offered):
            run()
    finally:
        print("\n".join(line.removeprefix(begun) for line in offered.getvalue().splitlines()))


def join_words(words: list[str], current: int) -> tuple[list[str], int, str]:
    """The words with those that bash cut at `:` and `=` whole again, which is the current one, and what it has before.

    >>> join_words(["roost", "where", "job.yaml", "actor", ":", "1"], 5)
    (['roost', 'where', 'job.yaml', 'actor:1'], 3, 'actor:')
    """
    joined: list[str] = []
    place, begun = 0, ""
    is_open = False
    for index, word in enumerate(words):
        is_cut = re.fullmatch("[:=]+", word) is not None
        belongs = is_cut or (is_open and not word.startswith("-"))
        before = joined.pop() if joined and belongs else ""
        joined.append(before + word)
        if index == current:
            place, begun = len(joined) - 1, before + (word if is_cut else "")
        is_open = is_cut
    return joined, place if current < len(words) else len(joined), begun
