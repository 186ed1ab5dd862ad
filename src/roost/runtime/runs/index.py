"""The index: every run of this user by its id.

The index is the folder `runs` in the user's state folder. A run whose folder Roost chose is in it, any other has a link
there; both appear in one step, so that drivers need no lock. Where the state folder cannot be written, a second index
is in the temporary folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import psutil

from roost.errors import ClusterError, ConfigError
from roost.machine.folders import open_regular, socket_folder, state_folder, state_path
from roost.machine.processes import is_same
from roost.runtime.limits import RUN_LOCK_SECONDS
from roost.runtime.runs.record import RECORD_FILE, RunOutcome, RunRecord, Status, read_record, started_at
from roost.text import did_you_mean, join_words, plural

log: logging.Logger = logging.getLogger(__name__)

LOCK_FILE = ".roost-lock"
"""A driver holds this file in its run folder locked."""
LATEST = "latest"
"""Names the newest run of this project."""
_KEPT_LINKS = 200
_UNRECORDED = ConfigError("the run has no record")
_SILENT = ConfigError("the run's folder does not answer", hint="is its file server up?")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run in the index, with its record or the reason why that cannot be read."""

    id: str
    folder: Path
    record: RunRecord | ConfigError
    began: float = 0.0
    """In seconds since the epoch, where it is known."""

    def is_of(self, project: Path) -> bool:
        """Whether it belongs to a project: what it ran is in that folder, or without a record it is itself."""
        own = self.record.project if isinstance(self.record, RunRecord) else self.folder
        return Path(os.path.realpath(own)).is_relative_to(project)


def index_folders() -> list[Path]:
    """Return the folders of the index, the one for new runs first."""
    found = []
    for base in (state_folder, socket_folder, state_path):
        with contextlib.suppress(ClusterError, OSError):
            found.append(base() / "runs")
    return list(dict.fromkeys(found))


def project_of(folder: Path) -> Path:
    """Return the project that a folder belongs to: the git checkout around it, or the folder itself."""
    folder = folder.resolve()
    return next((found for found in (folder, *folder.parents) if (found / ".git").exists()), folder)


def add_run(folder: Path) -> str:
    """Enter a run in the index and return its id: the name of its folder, with a number if another run has it."""
    homes = index_folders()
    if folder.parent in homes:
        return folder.name
    problem: OSError | str = "there is no folder for the list"
    for home in homes:
        try:
            home.mkdir(parents=True, exist_ok=True)
            _drop_links(home)
            entries = _entries(homes)
            for entry in entries.values():
                if _target(entry) == folder and entry.parent == home:
                    # The links with the oldest times are dropped first.
                    os.utime(entry, follow_symlinks=False)
                    return entry.name
            base = folder.name if _is_id(folder.name) else time.strftime("%Y%m%d-%H%M%S")
            for name in itertools.chain([base], (f"{base}-{number}" for number in itertools.count(2))):
                if name not in entries or _target(entries[name]) == folder:
                    with contextlib.suppress(FileExistsError):
                        (home / name).symlink_to(folder)
                        return name
        except OSError as error:
            problem = error
    log.warning("this run is not in the list of your runs: %s", problem)
    return folder.name


def list_runs() -> list[Run]:
    """Return the runs that have a record, the newest first; runs that cannot be read come last."""
    return [run for run in _read_index() if run.record is not _UNRECORDED]


def find_run(name: str) -> Path:
    """Return the folder of a run, by its id, by a beginning that only its id has, by its path, or as `latest`.

    `latest` is the newest run of the project that the current folder belongs to.
    """
    path = Path(name)
    is_folder = bool(name) and os.path.isdir(path)
    if is_folder and ("/" in name or os.path.isfile(path / RECORD_FILE)):
        return path.absolute()
    if "/" in name:
        raise ConfigError(f"there is no folder {name}", hint="`roost runs` lists your runs")
    found = _read_index()
    if name == LATEST:
        project = project_of(Path.cwd())
        for run in found:
            if run.is_of(project):
                return run.folder
        if not found:
            raise ConfigError("there are no runs yet", hint="run a job first, or give the folder of a run")
        others = f"{'is' if len(found) == 1 else 'are'} {plural(len(found), 'run')}"
        hint = f"there {others} of other projects: `roost runs --all` lists them"
        raise ConfigError(f"this project, {project}, has no runs yet", hint=hint)
    known = {run.id: run.folder for run in found}
    fitting = [name] if name in known else sorted(item for item in known if name and item.startswith(name))
    if len(fitting) == 1:
        return known[fitting[0]]
    if fitting:
        hint = f"write more of {join_words(fitting, last='or')}"
        raise ConfigError(f"{len(fitting)} runs begin with {name!r}", hint=hint)
    if is_folder:
        # A run without a record still has logs.
        return path.absolute()
    close = did_you_mean(name, known)
    newest = f"the newest are {join_words(list(known)[:5])}; `roost runs` lists them all"
    hint = f"did you mean {close}?" if close else newest if known else "there are none: run a job first"
    raise ConfigError(f"there is no run {name!r}", hint=hint)


def find_running() -> Path:
    """Return the folder of the only run of this project that is running; ConfigError if there is another number."""
    project = project_of(Path.cwd())
    running = [
        run
        for run in list_runs()
        if isinstance(run.record, RunRecord) and run.record.outcome.status is Status.RUNNING and run.is_of(project)
    ]
    if len(running) == 1:
        return running[0].folder
    if not running:
        raise ConfigError(f"no run of this project, {project}, is running", hint="`roost runs --all` shows all runs")
    names = join_words([run.id for run in running], last="or")
    raise ConfigError(f"{len(running)} runs of this project are running", hint=f"say which: {names}")


def read_run(folder: Path) -> RunRecord:
    """Read the record of a run. If it says `running` and the driver is gone, the outcome is `died`."""
    record = read_record(folder)
    if record.outcome.status is Status.RUNNING and is_gone(record, folder):
        return replace(record, outcome=RunOutcome(status=Status.DIED))
    return record


def is_gone(record: RunRecord, folder: Path) -> bool:
    """Whether the driver of a run is gone: its process has ended, or it no longer locks the run folder."""
    if record.host == socket.gethostname():
        with contextlib.suppress(psutil.Error):
            if not is_same(record.pid, record.pid_began):
                return True
    return is_free(folder)


def is_free(folder: Path) -> bool:
    """Whether no driver locks a run folder."""
    try:
        with open(folder / LOCK_FILE, "rb", opener=open_regular) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        # Any other error: it is locked, or its file system has no locks.
        return error.errno in (errno.ENOENT, errno.EEXIST)
    return True


def _read_index() -> list[Run]:
    """Read every run, the newest first."""
    entries = _entries(index_folders()).values()
    found = _ask(_read_entry, entries)
    runs = [found.get(entry, Run(id=entry.name, folder=_target(entry), record=_SILENT)) for entry in entries]
    return sorted((run for run in runs if run is not None), key=lambda run: (run.began, run.id), reverse=True)


def _read_entry(entry: Path) -> Run | None:
    folder = _target(entry)
    try:
        # Not Path.is_file: it raises where this user may not read.
        if not os.path.isfile(folder / RECORD_FILE):
            began = (folder / LOCK_FILE).lstat().st_mtime
            return Run(id=entry.name, folder=folder, record=_UNRECORDED, began=began)
        record = read_run(folder)
    except OSError:
        return None
    except ConfigError as error:
        return Run(id=entry.name, folder=folder, record=error)
    return Run(id=entry.name, folder=folder, record=record, began=started_at(record.began).timestamp())


def _ask(question: Callable[[Path], Answer], paths: Iterable[Path]) -> dict[Path, Answer]:
    """Ask about each path in its own thread, until no further answer comes: a path may be on a dead file server."""
    answers: queue.SimpleQueue[tuple[Path, Answer]] = queue.SimpleQueue()
    asked = 0
    # RuntimeError: the system allows no more threads.
    with contextlib.suppress(RuntimeError):
        for path in paths:
            threading.Thread(target=lambda path=path: answers.put((path, question(path))), daemon=True).start()
            asked += 1
    found: dict[Path, Answer] = {}
    with contextlib.suppress(queue.Empty):
        while len(found) < asked:
            found |= [answers.get(timeout=RUN_LOCK_SECONDS)]
    return found


def _entries(homes: list[Path]) -> dict[str, Path]:
    """Return the entries of the index by id; the first folder counts if two have the same id."""
    found: dict[str, Path] = {}
    for home in reversed(homes):
        with contextlib.suppress(OSError):
            found |= {item.name: item for item in home.iterdir() if _is_id(item.name)}
    return found


def _target(entry: Path) -> Path:
    """Return the folder of an entry, without touching it."""
    try:
        return entry.readlink()
    except OSError:
        return entry


def _is_id(name: str) -> bool:
    return bool(name) and name.isprintable() and not name.startswith((".", "-")) and name != LATEST


def _drop_links(home: Path) -> None:
    """Remove the links whose folders are gone, and the oldest of the others if there are too many."""
    links = {}
    for item in home.iterdir():
        with contextlib.suppress(OSError):
            if item.is_symlink():
                links[item] = item.lstat().st_mtime
    gone = {link for link, leads_nowhere in _ask(_leads_nowhere, links).items() if leads_nowhere}
    kept = sorted(links.keys() - gone, key=links.__getitem__, reverse=True)
    for link in [*gone, *kept[_KEPT_LINKS:]]:
        link.unlink(missing_ok=True)


def _leads_nowhere(link: Path) -> bool:
    try:
        link.stat()
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.ENOTDIR)
    return False
