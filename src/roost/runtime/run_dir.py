"""The folder of a run: one for each job, with the logs of its workers."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from roost.errors import ClusterError, ConfigError, clipped
from roost.runtime.practice import roost_folder

_KEPT_RUNS = 20
_LATEST = "latest"
RUN_DIR_VARIABLE = "ROOST_RUN_DIR"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDir:
    """A run's folder, and a token by which a process tells that it sees the same one."""

    path: str
    token: str

    @property
    def marker(self) -> Path:
        """The file that shows whether somebody sees this very folder, as over a shared file system."""
        return Path(self.path) / f".roost-{self.token}"

    @property
    def logs(self) -> Path:
        """Where the workers' logs are."""
        return Path(self.path) / "logs"


def make_run_dir(wanted: str | os.PathLike[str] | None) -> RunDir:
    """Make the folder of a new run: where the caller or ROOST_RUN_DIR says, else in this user's own folder."""
    wanted = wanted or os.environ.get(RUN_DIR_VARIABLE) or None
    runs = roost_folder() / "runs"
    token = secrets.token_hex(8)
    path = Path(wanted).absolute() if wanted else runs / f"{time.strftime('%Y%m%d-%H%M%S')}-{token[:6]}"
    made = RunDir(path=str(path), token=token)
    try:
        runs.mkdir(exist_ok=True)
        path.mkdir(parents=True, exist_ok=True)
        for old in path.glob(".roost-*"):
            old.unlink(missing_ok=True)
        made.marker.write_text("", encoding="utf-8")
        if not wanted:
            _prune(runs)
        _point_latest(runs, path)
    except OSError as error:
        hint = "give Cluster another run_dir" if wanted else "make room there, or give Cluster a run_dir"
        raise ClusterError(f"the run's folder {path} cannot be made: {error.strerror or error}", hint=hint) from None
    return made


def latest_run() -> Path:
    """The folder of this user's newest run on this machine."""
    link = roost_folder() / "runs" / _LATEST
    if not link.is_dir():
        raise ConfigError("there is no run to look at", hint="run a job first, or give --run the folder of one")
    return link.resolve()


def log_file(logs: Path, address: str) -> Path:
    """The log of a worker: `logs/actor/3.log` for `actor:3`."""
    *folders, name = address.split(":")
    return logs.joinpath(*folders, f"{name}.log")


def check_group_name(name: object) -> str:
    """A group's name that can be part of an address and of a path; ConfigError where it cannot."""
    if not isinstance(name, str) or not name.strip() or len(name) > 100:
        raise ConfigError(f"a group's name is {clipped(repr(name))}: it is a short text")
    if name.isdigit() or name.startswith(".") or not name.isprintable() or set(name) & set(":/\\"):
        raise ConfigError(
            f"{name!r} cannot name a group", hint="no colon, no slash, no dot at its start, and not digits alone"
        )
    return name


def put_aside(folder: Path) -> None:
    """Move the logs of an earlier group of the same name out of the way: to `actor.1`, then `actor.2`."""
    for number in range(1, 10_000):
        if not folder.exists():
            return
        aside = folder.with_name(f"{folder.name}.{number}")
        if not aside.exists():
            # Somebody else may have moved it.
            with contextlib.suppress(FileNotFoundError):
                folder.rename(aside)
            return


def _point_latest(runs: Path, path: Path) -> None:
    draft = runs / f".{_LATEST}-{os.getpid()}-{secrets.token_hex(4)}"
    draft.symlink_to(path)
    draft.replace(runs / _LATEST)


def _prune(runs: Path) -> None:
    """Keep the newest runs only, and never one whose job may be running."""
    found = sorted((item for item in runs.iterdir() if item.is_dir() and not item.is_symlink()), reverse=True)
    day_ago = time.time() - 24 * 3600
    for old in found[_KEPT_RUNS:]:
        with contextlib.suppress(OSError):
            if max(path.stat().st_mtime for path in [old, *old.rglob("*")]) < day_ago:
                shutil.rmtree(old, ignore_errors=True)
