"""How much memory, and how many files, processes and threads this machine or its container allows."""

from __future__ import annotations

import os
import re
import resource
from dataclasses import dataclass
from pathlib import Path

import psutil

from roost.machine.disks import Space

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a process; None means unlimited."""

    open_files: int | None
    max_open_files: int | None
    """The limit up to which the user may raise it."""
    tasks: int | None
    """Processes and threads together, as the kernel counts them."""
    tasks_now: int
    cpus: int


def find_limits() -> Limits:
    """Return the limits of this process, or of its container where they are tighter."""
    files, max_files, tasks = (
        None if value == resource.RLIM_INFINITY else value
        for value in (*resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_NPROC)[0])
    )
    tasks = None if os.getuid() == 0 else tasks
    infos = [process.info for process in psutil.process_iter(["uids", "num_threads"])] if tasks is not None else []
    now = sum(info["num_threads"] or 0 for info in infos if info["uids"] and info["uids"].real == os.getuid())
    for folder in (_CGROUP, _CGROUP / "pids"):
        limit, used = _number(folder / "pids.max"), _number(folder / "pids.current")
        if limit is not None and used is not None and (tasks is None or limit - used < tasks - now):
            tasks, now = limit, used
    return Limits(open_files=files, max_open_files=max_files, tasks=tasks, tasks_now=now, cpus=psutil.cpu_count() or 1)


def find_memory(root: Path = _CGROUP) -> Space:
    """Return the memory of the machine, or of the container where that is less."""
    machine = psutil.virtual_memory()
    total, free = machine.total, machine.available
    for limit_file, used_file, stat in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        limit, used = _number(root / limit_file), _number(root / used_file)
        if limit is not None and used is not None and limit < total:
            # The kernel gives back what only caches files.
            cached = _number(root / stat, r"^(?:total_)?inactive_file (\d+)") or 0
            total, free = limit, min(free, limit - used + cached)
    return Space(total=total, free=max(0, free))


def _number(path: Path, pattern: str = r"^(\d+)$") -> int | None:
    """Return the number in a file of the kernel; None where there is no such file, or no limit."""
    try:
        found = re.search(pattern, path.read_text(encoding="ascii"), re.M)
    except (OSError, ValueError):
        return None
    return int(found[1]) if found else None
