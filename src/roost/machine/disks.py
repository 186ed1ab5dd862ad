"""The file systems of this machine, and files on them that no process uses any more."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from roost.machine.limits import YOUNG_SECONDS

_MAX_FILES = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Memory or a file system, in bytes."""

    total: int
    free: int
    path: str = ""
    uses: tuple[str, ...] = ()
    """The use of the folder."""

    @property
    def used(self) -> float:
        """The part in use, from 0 to 1."""
        return 1 - self.free / self.total if self.total else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OldFiles:
    """Folders of one kind that no process uses any more: how many there are, and their size in bytes at least."""

    what: str
    folder: str
    pattern: str
    count: int
    size: int


def file_system(path: str, uses: tuple[str, ...] = ()) -> Space:
    """Return the space of the file system at `path`."""
    found = os.statvfs(path)
    return Space(total=found.f_blocks * found.f_frsize, free=found.f_bavail * found.f_frsize, path=path, uses=uses)


def file_systems(folders: Mapping[str, str]) -> tuple[Space, ...]:
    """Return the file systems of these folders (use -> path), each once; a folder need not exist yet."""
    found: dict[int, tuple[str, list[str]]] = {}
    for use, folder in folders.items():
        path = Path(folder)
        while not path.exists() and path != path.parent:
            path = path.parent
        found.setdefault(path.stat().st_dev, (str(path), []))[1].append(use)
    return tuple(file_system(path, tuple(uses)) for path, uses in found.values())


def find_old_files(what: str, folder: Path, pattern: str, used: set[str]) -> OldFiles:
    """Measure the folders that match `pattern`, except those of which a path is in `used`."""
    count = size = files = 0
    for path in old_folders(folder, pattern, used):
        count += 1
        for file in path.rglob("*"):
            files += 1
            if files > _MAX_FILES:
                break
            with contextlib.suppress(OSError):
                size += file.lstat().st_size
    return OldFiles(what=what, folder=str(folder), pattern=pattern, count=count, size=size)


def old_folders(folder: Path, pattern: str, used: set[str]) -> list[Path]:
    """Return the folders that match `pattern`, except new ones and those of which a path is in `used`."""
    found = []
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):
            # A process may be about to use it.
            is_young = time.time() - path.lstat().st_mtime < YOUNG_SECONDS
            is_used = is_young or any(item.startswith(str(path)) for item in used)
            if path.is_dir() and not path.is_symlink() and not is_used:
                found.append(path)
    return found
