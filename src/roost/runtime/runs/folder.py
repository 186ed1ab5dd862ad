"""The folders of runs: made for each job, kept for a while, found again."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from roost.errors import ClusterError, ConfigError
from roost.runtime.connect.local_cluster import roost_folder
from roost.runtime.runs.run_dir import RunDir
from roost.text import shorten

log: logging.Logger = logging.getLogger(__name__)

_KEPT_RUNS = 20
_KEPT_LINKS = 200
_PRUNE_SECONDS = 2.0
_LOCK = ".lock"
LATEST = "latest"
"""The link to this user's newest run."""
RUNS_VARIABLE = "ROOST_RUNS_DIR"
"""Where the folders of runs are made, if not in this user's own folder."""


@contextlib.contextmanager
def own_run_dir(wanted: str | os.PathLike[str] | None) -> Iterator[RunDir]:
    """Have the folder of a new run to oneself: the one that the caller names, else a new one."""
    made = make_run_dir(wanted)
    with (Path(made.path) / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another job is using {made.path}", hint="give each its own run_dir") from None
        except OSError as error:
            # Some shared file systems have no locks: a job can do without.
            log.debug("%s cannot be locked: %s", made.path, error)
        for old in Path(made.path).glob(".roost-*"):
            if old != made.marker:
                old.unlink(missing_ok=True)
        yield made


def is_free(folder: Path) -> bool:
    """Whether no driver holds the folder of a run."""
    try:
        with (folder / _LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except OSError:
        # Held, or on a file system that does not tell.
        return False
    return True


def make_run_dir(wanted: str | os.PathLike[str] | None) -> RunDir:
    """Make a folder for a run, with its marker; the newest one is found by `latest_run`."""
    own, runs = roost_folder() / "runs", runs_folder()
    token = secrets.token_hex(8)
    path = Path(wanted).absolute() if wanted else runs / f"{time.strftime('%Y%m%d-%H%M%S')}-{token[:6]}"
    made = RunDir(path=str(path), token=token)
    try:
        path.mkdir(parents=True, exist_ok=True)
        made.marker.write_text("", encoding="utf-8")
    except OSError as error:
        hint = f"give Cluster another run_dir, or set {RUNS_VARIABLE}"
        raise ClusterError(f"the run's folder {path} cannot be made: {error.strerror or error}", hint=hint) from None
    try:
        own.mkdir(exist_ok=True)
        if runs == own and not wanted:
            _prune(own)
        # Not for ever: of many folders one may be on a server that does not answer.
        pruning = threading.Thread(target=_prune_links, args=(own,), daemon=True)
        pruning.start()
        pruning.join(_PRUNE_SECONDS)
        _point_latest(own, path)
    except OSError as error:
        # The job has its folder, and can do without being found by its id.
        log.warning("this run is not among your runs in %s: %s", own, error.strerror or error)
    return made


def runs_folder() -> Path:
    """Where the folders of runs are made: in that of the variable, else in this user's own."""
    return Path(os.environ.get(RUNS_VARIABLE) or roost_folder() / "runs").absolute()


def latest_run() -> Path:
    """The folder of this user's newest run on this machine."""
    link = roost_folder() / "runs" / LATEST
    if not link.is_dir():
        raise ConfigError("there is no run to look at", hint="run a job first, or give --run the folder of one")
    return link.resolve()


def check_group_name(name: object) -> str:
    """A group's name that can be part of an address and of a path; ConfigError where it cannot."""
    if not isinstance(name, str) or not name.strip() or len(name) > 100:
        raise ConfigError(f"a group's name is {shorten(repr(name))}: it is a short text")
    if name.isdigit() or name.startswith(".") or not name.isprintable() or set(name) & set(":/\\"):
        raise ConfigError(
            f"{name!r} cannot name a group", hint="no colon, no slash, no dot at its start, and not digits alone"
        )
    return name


def put_aside(folder: Path) -> None:
    """Move the logs of an earlier group of the same name out of the way: to `actor.1`, then `actor.2`."""
    # Only its own: groups that its workers launched are in folders below it.
    found = list(folder.glob("*.log"))
    if not found:
        return
    number = next(number for number in itertools.count(1) if not folder.with_name(f"{folder.name}.{number}").exists())
    aside = folder.with_name(f"{folder.name}.{number}")
    aside.mkdir()
    for path in found:
        path.rename(aside / path.name)


def _prune_links(own: Path) -> None:
    """Drop links to folders that are gone, and the oldest of the others where there are too many."""
    dated = []
    with contextlib.suppress(OSError):
        for item in own.iterdir():
            # Those with a dot are being made just now, by another driver.
            if item.is_symlink() and item.name != LATEST and not item.name.startswith("."):
                with contextlib.suppress(OSError):
                    dated.append((item.is_dir(), item.lstat().st_mtime, item))
    kept = sorted((entry for entry in dated if entry[0]), key=lambda entry: entry[1], reverse=True)
    for _, _, link in [*(entry for entry in dated if not entry[0]), *kept[_KEPT_LINKS:]]:
        with contextlib.suppress(OSError):
            link.unlink()


def _point_latest(runs: Path, path: Path) -> None:
    draft = runs / f".{LATEST}-{os.getpid()}-{secrets.token_hex(4)}"
    draft.symlink_to(path)
    draft.replace(runs / LATEST)


def _prune(runs: Path) -> None:
    """Keep the newest runs only, and never one whose job may be running."""
    found = sorted((item for item in runs.iterdir() if item.is_dir() and not item.is_symlink()), reverse=True)
    day_ago = time.time() - 24 * 3600
    # Some at a time, the oldest: whoever starts a job does not wait for all of them.
    for old in found[_KEPT_RUNS:][-_KEPT_RUNS:]:
        with contextlib.suppress(OSError):
            # A job may be quiet for days: as long as it runs, it holds its folder.
            if max(path.lstat().st_mtime for path in [old, *old.rglob("*")]) < day_ago and is_free(old):
                shutil.rmtree(old, ignore_errors=True)
