"""Where a practice cluster of this user, if one is up, tells how to join it.

`roost up` writes the record and `roost down` removes it; whoever looks for a Ray cluster reads it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from roost.errors import ClusterError

_RECORD = "practice.json"


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
    folder = _folder_path()
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not _is_ours(folder):
        raise ClusterError(
            f"{folder} is not a folder of yours alone",
            hint="Roost keeps the token and the sockets of local clusters there: remove it, or set TMPDIR",
        )
    return folder


def read_practice() -> PracticeCluster | None:
    """The practice cluster that is up, or None; a record whose cluster is gone counts as none."""
    folder = _folder_path()
    if not _is_ours(folder):
        return None
    try:
        found = PracticeCluster(**json.loads((folder / _RECORD).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return found if found.is_up else None


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Whoever starts or stops the practice cluster does so alone."""
    with (roost_folder() / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ClusterError("a practice cluster is being started or stopped just now", hint="try again") from None
        yield


def keep_practice(spec: str, address: str, environment: dict[str, str], keeper_pid: int) -> PracticeCluster:
    """Let other processes find the cluster that this process keeps."""
    practice = PracticeCluster(
        address=address,
        spec=spec,
        environment=environment,
        keeper_pid=keeper_pid,
        keeper_started=psutil.Process(keeper_pid).create_time(),
    )
    path = roost_folder() / _RECORD
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
    (roost_folder() / _RECORD).unlink(missing_ok=True)
    return practice


def _folder_path() -> Path:
    base = tempfile.gettempdir()
    if len(base) > 30 or " " in base:
        base = "/tmp"  # noqa: S108 - a socket's path may have 107 characters
    return Path(base) / f"roost-{os.getuid()}"


def _is_ours(folder: Path) -> bool:
    """Whether this is a folder of ours that nobody else may look into."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
