"""All runs of this user on this machine by their ids, wherever their folders are.

A run that Roost chose the folder of is there under its own name. For any other there is a link in the same place.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
import time
from dataclasses import replace
from pathlib import Path

import psutil

from roost.errors import ConfigError
from roost.runtime.connect.local_cluster import roost_folder
from roost.runtime.runs.folder import LATEST, is_free
from roost.runtime.runs.record import RECORD_FILE, RunOutcome, RunRecord, Status, read_record, started_at
from roost.text import join_words

_MOST_NAMED = 5


def claim_id(folder: Path) -> str:
    """A name for the run in a folder that no other run has: the folder's own, if it can be had."""
    own = roost_folder() / "runs"
    if folder.parent == own:
        return folder.name
    known = next((item.name for item in own.iterdir() if _is_good(item.name) and _leads_to(item, folder)), None)
    if known is not None:
        # Its place among the others is that of the newest run in the folder.
        draft = own / f".{known}-{os.getpid()}-{secrets.token_hex(4)}"
        draft.symlink_to(folder)
        draft.replace(own / known)
        return known
    base = folder.name if _is_good(folder.name) else time.strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        name = base if number == 1 else f"{base}-{number}"
        with contextlib.suppress(FileExistsError):
            (own / name).symlink_to(folder)
            return name
    raise AssertionError("there are more numbers than runs")


def all_runs() -> dict[str, Path]:
    """The folders of all runs that have a record, by id."""
    own = roost_folder() / "runs"
    found = _links(own)
    with contextlib.suppress(FileNotFoundError):
        found |= {item.name: item for item in own.iterdir() if item.is_dir() and not item.is_symlink()}
    return {name: path for name, path in found.items() if _has_record(path)}


def find_run(name: str) -> Path:
    """The folder of a run: by its id, by what only its id begins with, or by its path."""
    path = Path(name)
    if name and _has_record(path):
        return path.absolute()
    if "/" in name:
        if not os.path.isdir(path):
            raise ConfigError(f"there is no folder {name}", hint="`roost runs` lists the runs that there are")
        return path.absolute()
    known = all_runs()
    if name == LATEST:
        return latest_record(known)
    if name in known:
        return known[name]
    fitting = sorted(item for item in known if name and item.startswith(name))
    if len(fitting) == 1:
        return known[fitting[0]]
    if fitting:
        raise ConfigError(
            f"{len(fitting)} runs begin with {name!r}", hint=f"write more of {join_words(fitting, last='or')}"
        )
    if name and os.path.isdir(path):
        # A run without a record has logs all the same.
        return path.absolute()
    raise ConfigError(f"there is no run {name!r}", hint=_hint(name, known))


def find_id(folder: Path) -> str | None:
    """The id by which a run in a folder is found here; None for one that came from elsewhere, or was dropped."""
    return next((name for name, path in all_runs().items() if path == folder), None)


def latest_record(known: dict[str, Path]) -> Path:
    """The folder of the run that was started last, of some."""
    if not known:
        raise ConfigError("there is no run to look at", hint="run a job first, or give the folder of one")
    return known[runs_by_age(known)[0][0]]


def runs_by_age(known: dict[str, Path]) -> list[tuple[str, RunRecord | ConfigError]]:
    """The records of some runs, the one that was started last first; those that cannot be read come last."""
    readable: list[tuple[str, RunRecord]] = []
    broken: list[tuple[str, ConfigError]] = []
    for name, folder in known.items():
        try:
            readable.append((name, read_run(folder)))
        except ConfigError as error:
            broken.append((name, error))
    readable.sort(key=lambda item: (started_at(item[1].began), item[0]), reverse=True)
    return [*readable, *sorted(broken, key=lambda item: item[0], reverse=True)]


def read_run(folder: Path) -> RunRecord:
    """The record of a run as it is now: one whose driver is gone without a word has died."""
    record = read_record(folder)
    if record.outcome.status is Status.RUNNING and is_gone(record, folder):
        return replace(record, outcome=RunOutcome(status=Status.DIED))
    return record


def is_gone(record: RunRecord, folder: Path) -> bool:
    """Whether the driver of a run is not there any more: its process, or its hold on the run's folder."""
    if record.host == socket.gethostname():
        try:
            if abs(psutil.Process(record.pid).create_time() - record.pid_began) > 1:
                return True
        except psutil.NoSuchProcess:
            return True
        except psutil.Error:
            pass
    return is_free(folder)


def _leads_to(link: Path, folder: Path) -> bool:
    """Whether a link is one to a folder. That is not looked at: it may be on a server that does not answer."""
    try:
        return link.readlink() == folder
    except OSError:
        # No link, or another driver has just dropped it.
        return False


def _has_record(folder: Path) -> bool:
    # Not Path's own: that raises where somebody may not look.
    return os.path.isfile(folder / RECORD_FILE)


def _links(own: Path) -> dict[str, Path]:
    """The links of runs that lead somewhere."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for item in own.iterdir():
            with contextlib.suppress(OSError):
                if item.is_symlink() and _is_good(item.name) and item.is_dir():
                    found[item.name] = item.readlink()
    return found


def _is_good(name: str) -> bool:
    return bool(name) and name.isprintable() and not name.startswith((".", "-")) and name != LATEST


def _hint(name: str, known: dict[str, Path]) -> str:
    if not known:
        return "there are none: run a job first"
    import difflib  # only a mistake needs it

    close = difflib.get_close_matches(name, known, n=_MOST_NAMED, cutoff=0.5)
    if close:
        return f"did you mean {join_words(close, last='or')}?"
    newest = [name for name, _ in runs_by_age(known)[:_MOST_NAMED]]
    return f"the newest are {join_words(newest)}; `roost runs` lists them all"
