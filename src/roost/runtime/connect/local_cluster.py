"""Where a practice cluster of this user, if one is up, tells how to join it.

`roost up` writes the record and `roost down` removes it; whoever looks for a Ray cluster reads it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import psutil

from roost.errors import ClusterError
from roost.machine.folders import socket_folder

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


def read_practice() -> PracticeCluster | None:
    """The practice cluster that is up, or None; a record whose cluster is gone counts as none."""
    try:
        found = PracticeCluster(**json.loads((socket_folder() / _RECORD).read_text(encoding="utf-8")))
    except (ClusterError, OSError, ValueError, TypeError):
        return None
    return found if found.is_up else None


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Whoever starts or stops the practice cluster does so alone."""
    with (socket_folder() / "lock").open("w") as lock:
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
    path = socket_folder() / _RECORD
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
    (socket_folder() / _RECORD).unlink(missing_ok=True)
    return practice
