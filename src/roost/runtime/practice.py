"""Where a practice cluster of this user, if one is up, tells how to join it.

`roost up` writes the record and `roost down` removes it; whoever looks for a Ray cluster reads it.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from roost.errors import ClusterError


@dataclass(frozen=True, slots=True, kw_only=True)
class PracticeCluster:
    """A local cluster that outlives the command that started it."""

    address: str
    spec: str
    environment: dict[str, str]
    """What a process needs in its environment to join: the address, and the token where Ray wants one."""
    keeper_pid: int
    keeper_started: float
    """When the keeper process began: process ids are used again."""

    @property
    def is_up(self) -> bool:
        """Whether the process that keeps the cluster is still there."""
        try:
            return abs(psutil.Process(self.keeper_pid).create_time() - self.keeper_started) < 1
        except psutil.Error:
            return False


def roost_folder() -> Path:
    """This user's own folder for local clusters: short, since Ray puts sockets below it, and closed to others."""
    base = tempfile.gettempdir()
    if len(base) > 30 or " " in base:
        base = "/tmp"  # noqa: S108 - a socket's path may have 107 characters
    folder = Path(base) / f"roost-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ClusterError(
            f"{folder} is not a folder of yours alone",
            hint="Roost keeps the token and the sockets of local clusters there: remove it, or set TMPDIR",
        )
    return folder


def read_practice() -> PracticeCluster | None:
    """The practice cluster that is up, or None; a record whose cluster is gone counts as none."""
    try:
        found = PracticeCluster(**json.loads(_record().read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return found if found.is_up else None


def keep_practice(spec: str, address: str, environment: dict[str, str], keeper_pid: int) -> PracticeCluster:
    """Let other processes find the cluster that this process keeps."""
    practice = PracticeCluster(
        address=address,
        spec=spec,
        environment=environment,
        keeper_pid=keeper_pid,
        keeper_started=psutil.Process(keeper_pid).create_time(),
    )
    path = _record()
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(asdict(practice), indent=2), encoding="utf-8")
    draft.replace(path)
    return practice


def end_practice(timeout: float) -> PracticeCluster | None:
    """Stop the practice cluster and wait until it is gone; gives it, or None where there was none."""
    practice = read_practice()
    if practice is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            keeper = psutil.Process(practice.keeper_pid)
            keeper.terminate()
            try:
                keeper.wait(timeout)
            except psutil.TimeoutExpired:
                hint = f"kill -9 {practice.keeper_pid} ends it"
                raise ClusterError(f"the practice cluster did not end in {timeout:g} s", hint=hint) from None
    _record().unlink(missing_ok=True)
    return practice


def _record() -> Path:
    return roost_folder() / "practice.json"
