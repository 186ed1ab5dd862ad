"""Folders and files of this user alone: where Roost keeps what must outlive a reboot, and where its sockets.

Roost also writes into folders that the user or others can write. There it never follows a link and never waits at a
pipe: the process that put one there would choose what is overwritten.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import tempfile
from pathlib import Path

from platformdirs import user_state_path

from roost.errors import ClusterError


def state_folder() -> Path:
    """Return the folder for what must outlive a reboot, or `socket_folder()` where it cannot be written."""
    with contextlib.suppress(OSError):
        folder = state_path()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    return socket_folder()


def state_path() -> Path:
    """Return where this user's state belongs, writable or not; raise OSError for a user without a home folder."""
    try:
        folder = user_state_path("roost")
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from None
    if not folder.is_absolute():
        raise FileNotFoundError(f"{folder} is not absolute")
    return folder


def socket_folder() -> Path:
    """Return the folder for sockets, tokens and the local cluster: short for Ray's sake, and closed to other users."""
    base = tempfile.gettempdir()
    if len(base) > 30 or " " in base:
        base = "/tmp"  # noqa: S108 - a socket's path may have 107 characters
    folder = Path(base) / f"roost-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ClusterError(
            f"{folder} is not a folder of yours alone",
            hint="Roost keeps the token and the sockets of local clusters there: remove it, or set TMPDIR",
        )
    return folder


def is_of_local_cluster(path: str) -> bool:
    """Return whether a path is in the folder of a local cluster, of any user.

    >>> is_of_local_cluster("/tmp/roost-1000/ray-0f3a/session_1"), is_of_local_cluster("/tmp/ray/session_1")
    (True, False)
    """
    return re.search(r"/roost-[0-9]+/ray-", path) is not None


def make_folder(path: Path) -> None:
    """Create a folder for this user alone, unless it is there; raise FileExistsError for anything else, also a link."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if not stat.S_ISDIR(path.lstat().st_mode):
            raise _in_the_way(path) from None


def make_folders(base: Path, folder: Path) -> None:
    """Create the folders from `base`, which exists, down to `folder`, each like `make_folder`."""
    for index in range(len(folder.relative_to(base).parts)):
        make_folder(base.joinpath(*folder.relative_to(base).parts[: index + 1]))


def open_regular(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file, new ones for this user alone: an `opener` for `open`.

    Raises FileExistsError that says what is in the way if the path is anything else: a link, a pipe, a folder.
    """
    try:
        opened = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise _in_the_way(path) from None
        raise
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise _in_the_way(path)
    os.set_blocking(opened, True)
    return opened


_KINDS = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFREG: "a file"}


def _in_the_way(path: str | os.PathLike[str]) -> FileExistsError:
    kind = _KINDS.get(stat.S_IFMT(os.lstat(path).st_mode), "a socket or a device")
    return FileExistsError(errno.EEXIST, f"{kind} is in the way", os.fspath(path))
