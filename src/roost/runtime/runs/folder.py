"""The folder of a run: created for each job, locked while the job runs, kept for a while."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from roost.errors import ClusterError, ConfigError
from roost.machine.folders import make_folder, open_regular, state_folder
from roost.runtime.runs.index import LATEST, LOCK_FILE, add_run, index_folders, is_free
from roost.text import shorten

log: logging.Logger = logging.getLogger(__name__)

_KEPT_RUNS = 20
_OWN_NAME = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")
_MARKER = re.compile(r"\.roost-([0-9a-f]{16})")
PROJECT_RUNS = "runs"
"""The folder next to a job's file that has its runs."""
RUNS_VARIABLE = "ROOST_RUNS_DIR"
"""Where run folders are created, in place of the user's state folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDir:
    """A run's folder, as the driver and its workers know it."""

    path: str
    token: str
    """Names the marker: two processes that see the same marker see the same folder."""
    id: str

    @property
    def marker(self) -> Path:
        """The file that shows a process that it sees this very folder, as on a shared file system."""
        return Path(self.path) / f".roost-{self.token}"

    @property
    def logs(self) -> Path:
        """The folder of the workers' logs."""
        return Path(self.path) / "logs"


def log_file(logs: Path, address: str) -> Path:
    """Return the path of a worker's log: `logs/actor/3.log` for `actor:3`."""
    *folders, name = address.split(":")
    return logs.joinpath(*folders, f"{name}.log")


@contextlib.contextmanager
def own_run_dir(wanted: str | os.PathLike[str] | None) -> Iterator[RunDir]:
    """Create the run folder, the caller's or a new one, and lock it."""
    made = make_run_dir(wanted)
    try:
        lock = _lock(made)
    except BaseException:
        made.marker.unlink(missing_ok=True)
        raise
    with lock:
        # Earlier runs left files with the name and the content of a marker.
        for item in Path(made.path).iterdir():
            if (token := _MARKER.fullmatch(item.name)) and item != made.marker:
                with contextlib.suppress(OSError):
                    with open(item, "rb", opener=open_regular) as file:
                        is_ours = file.read(len(token[1]) + 1) == token[1].encode()
                    if is_ours:
                        item.unlink()
        yield made


def _lock(made: RunDir) -> BinaryIO:
    """Lock a run folder; raise ConfigError if another job has it, or if a file that is not Roost's is in the way."""
    path = Path(made.path) / LOCK_FILE
    in_the_way = ""
    with contextlib.ExitStack() as undo:
        try:
            if os.path.lexists(made.logs):
                # Workers would fail on anything else, later.
                make_folder(made.logs)
            lock = undo.enter_context(open(path, "ab", opener=open_regular))
            found = os.fstat(lock.fileno())
            # Compared with the marker, which was just made: a file server may show another owner than this user.
            if found.st_uid != made.marker.lstat().st_uid:
                in_the_way = f"{path}: another user's file is in the way"
            elif found.st_size:
                in_the_way = f"{path}: a file that Roost did not write is in the way"
        except OSError as error:
            in_the_way = f"{error.filename or path}: {error.strerror or error}"
        if in_the_way:
            hint = "move it away, or choose another run_dir"
            raise ConfigError(f"the run folder {made.path} cannot be used: {in_the_way}", hint=hint)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another job is using {made.path}", hint="give each its own run_dir") from None
        except OSError as error:
            # Some shared file systems have no locks. A job can do without.
            log.debug("%s cannot be locked: %s", made.path, error)
        # The list of runs shows when a run without a record began.
        os.utime(lock.fileno())
        undo.pop_all()
        return lock


def make_run_dir(wanted: str | os.PathLike[str] | None) -> RunDir:
    """Create a run folder with its marker, and enter it in the index of runs."""
    homes = index_folders()
    token = secrets.token_hex(8)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{token[:6]}"
    if wanted:
        paths = [Path(wanted).absolute()]
    elif os.environ.get(RUNS_VARIABLE) or not homes:
        paths = [runs_folder() / name]
    else:
        # If the first cannot be written, as on a full disk, the next one is tried.
        paths = [home / name for home in homes]
    problems = []
    for path in paths:
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            made = RunDir(path=str(path), token=token, id=add_run(path))
            with open(made.marker, "x", encoding="utf-8", opener=open_regular) as marker:
                marker.write(token)
        except OSError as error:
            problems.append(f"the run folder {path} cannot be created: {error.strerror or error}")
            continue
        if path.parent in homes and not wanted:
            _prune(path.parent)
        return made
    raise ClusterError(problems[0], hint=f"give Cluster another run_dir, or set {RUNS_VARIABLE}")


def runs_folder() -> Path:
    """Return where run folders are created: the variable's folder, or one in the user's state folder."""
    return Path(os.environ.get(RUNS_VARIABLE) or state_folder() / "runs").absolute()


def check_run_name(name: str) -> str:
    """Return a run's name; raise ConfigError if it cannot be the name of a folder, or if it names something else."""
    if not re.fullmatch(r"\w[\w.+=@-]{0,99}", name) or name == LATEST:
        raise ConfigError(f"{shorten(repr(name))} cannot name a run", hint="use letters, digits, '_', '-' and '.'")
    return name


def new_folder_of(project: Path, name: str | None) -> str | None:
    """Create a folder for a run in `runs` of a project; None if none can be created there, or the variable says where.

    Its name is the given one, with a number if an earlier run has it, or the time.
    """
    if os.environ.get(RUNS_VARIABLE) and name is None:
        return None
    runs = runs_folder() if os.environ.get(RUNS_VARIABLE) else project / PROJECT_RUNS
    base = name or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    try:
        if not runs.is_dir():
            runs.mkdir(mode=0o700, parents=True)
            # Git leaves out a folder that says so itself.
            (runs / ".gitignore").write_text("*\n", encoding="utf-8")
        for number in itertools.count(1):
            folder = runs / (base if number == 1 else f"{base}-{number}")
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
                return str(folder)
    except OSError as error:
        log.warning("no run folder in %s: %s", runs, error.strerror or error)
    return None


def check_group_name(name: object) -> str:
    """Return a group's name; raise ConfigError if it cannot be part of an address and of a path."""
    if not isinstance(name, str) or not name.strip() or len(name) > 100:
        raise ConfigError(f"a group's name is {shorten(repr(name))}: it must be a short text")
    if name.isdigit() or name.startswith(".") or not name.isprintable() or set(name) & set(":/\\"):
        raise ConfigError(
            f"{name!r} cannot name a group", hint="no colon, no slash, no dot at its start, and not digits alone"
        )
    return name


def put_aside(folder: Path) -> None:
    """Move the logs of an earlier group of the same name to `actor.1`, or `actor.2` if there is one."""
    # Not the folders below: they belong to groups that the group's workers launched.
    found = [] if folder.is_symlink() else list(folder.glob("*.log"))
    if not found:
        return
    names = (folder.with_name(f"{folder.name}.{number}") for number in itertools.count(1))
    aside = next(path for path in names if not os.path.lexists(path))
    try:
        make_folder(aside)
        for path in found:
            path.rename(aside / path.name)
    except OSError as error:
        # As on a full disk. The logs continue in the old files.
        log.warning("the logs in %s could not be moved to %s: %s", folder, aside, error.strerror or error)


def _prune(runs: Path) -> None:
    """Remove old runs beyond the newest, but none whose job may still be running, and no folder that the user named."""
    with contextlib.suppress(OSError):
        ours = (item for item in runs.iterdir() if _OWN_NAME.fullmatch(item.name))
        found = sorted((item for item in ours if not item.is_symlink() and item.is_dir()), reverse=True)
        day_ago = time.time() - 24 * 3600
        # Only some of them, the oldest: a job that starts does not wait for all.
        for old in found[_KEPT_RUNS:][-_KEPT_RUNS:]:
            with contextlib.suppress(OSError):
                # A job may be quiet for days, but it keeps its folder locked.
                if max(path.lstat().st_mtime for path in [old, *old.rglob("*")]) < day_ago and is_free(old):
                    shutil.rmtree(old, ignore_errors=True)
