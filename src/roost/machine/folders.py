"""The two folders that Roost keeps for a user: one for what must outlive a reboot, one for sockets."""

from __future__ import annotations

import contextlib
import os
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
