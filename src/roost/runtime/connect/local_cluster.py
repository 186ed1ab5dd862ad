"""The record of this user's local cluster, which says how to join it.

`roost up` writes the record, `roost down` removes it, and every process that looks for a Ray cluster reads it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from roost.config.topology import Topology
from roost.errors import ClusterError
from roost.machine.folders import socket_folder
from roost.machine.processes import began_after_boot, is_same, list_processes

_RECORD = "local-cluster.json"
_KEEPER = "roost.testing.keeper"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalClusterRecord:
    """A local cluster that outlives the command that started it."""

    address: str
    spec: str
    environment: dict[str, str]
    """The variables with which a process joins: the address, and the token where Ray wants one."""
    keeper_pid: int
    keeper_started: float
    """When the keeper process began, in seconds after the boot: process ids are used again."""

    @property
    def num_nodes(self) -> int:
        """How many nodes it has."""
        return Topology.from_shorthand(self.spec).num_nodes


def read_local_cluster() -> LocalClusterRecord | None:
    """Return the local cluster that is up, or None; a record whose cluster is gone counts as none."""
    try:
        found = LocalClusterRecord(**json.loads((socket_folder() / _RECORD).read_text(encoding="utf-8")))
        return found if is_same(found.keeper_pid, found.keeper_started) else None
    except (ClusterError, OSError, ValueError, TypeError, psutil.Error):
        return None


def find_stale_files() -> list[Path]:
    """Return the record of a cluster that is gone, and drafts of processes that ended before they were complete."""
    folder = socket_folder()
    drafts = [path for path in folder.glob("*.*") if path.suffix[1:].isdigit() and not path.is_dir()]
    stale = [path for path in drafts if not psutil.pid_exists(int(path.suffix[1:]))]
    record = folder / _RECORD
    return [*stale, record] if record.exists() and read_local_cluster() is None else stale


def folders_in_use() -> set[str]:
    """Return the folders that processes of Ray on this machine use, and those that keep local clusters."""
    used: set[str] = set()
    for item in list_processes():
        used |= {item.flag("session_dir"), item.flag("temp_dir")} - {""}
        if _KEEPER in item.words:
            # Its output goes into the folder.
            with contextlib.suppress(OSError):
                used.add(os.readlink(f"/proc/{item.pid}/fd/1"))
    return used


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Let only one process at a time start or stop the local cluster."""
    with (socket_folder() / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ClusterError("a local cluster is being started or stopped just now", hint="try again") from None
        yield


def keep_local_cluster(spec: str, address: str, environment: dict[str, str], keeper_pid: int) -> LocalClusterRecord:
    """Let other processes find the cluster that this process keeps."""
    record = LocalClusterRecord(
        address=address,
        spec=spec,
        environment=environment,
        keeper_pid=keeper_pid,
        keeper_started=began_after_boot(keeper_pid),
    )
    path = socket_folder() / _RECORD
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(asdict(record), indent=2), encoding="utf-8")
    draft.replace(path)
    return record


def end_local_cluster(timeout: float) -> LocalClusterRecord | None:
    """Stop the local cluster and wait until it is gone; return its record, or None if there was none."""
    record = read_local_cluster()
    if record is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            keeper = psutil.Process(record.keeper_pid)
            keeper.terminate()
            try:
                keeper.wait(timeout)
            except psutil.TimeoutExpired:
                hint = f"kill -9 {record.keeper_pid} ends it"
                raise ClusterError(f"the local cluster did not end in {timeout:g} s", hint=hint) from None
    (socket_folder() / _RECORD).unlink(missing_ok=True)
    return record
