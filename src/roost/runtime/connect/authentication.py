"""Ray's token authentication, for a process that loaded Ray before it knew the cluster."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from roost.errors import ClusterError
from roost.machine.folders import socket_folder
from roost.runtime.connect.find_head import takes_token

_MODE = "RAY_AUTH_MODE"
_PATH = "RAY_AUTH_TOKEN_PATH"
_SET = "set RAY_AUTH_TOKEN_PATH to a file with the token of that cluster, or RAY_AUTH_TOKEN to the token itself"

for_connection: contextlib.ExitStack = contextlib.ExitStack()
"""Undoes what was set for this process's last connection."""


def refresh_authentication() -> None:
    """Let Ray read `RAY_AUTH_MODE` and `RAY_AUTH_TOKEN_PATH` again, unless this process is connected.

    Ray reads them once, when it is loaded, and has no public way to read them again; a test or a script usually
    loads Ray before it starts or finds the cluster. Without a connection nothing else depends on it.
    """
    ray, raylet = sys.modules.get("ray"), sys.modules.get("ray._raylet")
    if raylet is not None and not (ray is not None and ray.is_initialized()):
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


def set_variables(values: Mapping[str, str]) -> Callable[[], None]:
    """Set variables of the environment; return what restores them, unless other code has changed them since."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)

    def restore() -> None:
        for name, value in before.items():
            if os.environ.get(name) == values[name]:
                os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)

    return restore


def use_token_of(address: str, timeout: float) -> None:
    """Let Ray use the token that is here if the head at `address` wants one; ClusterError if there is none, or another.

    Ray itself does this only for a cluster that it finds on its own. With an address it uses a token only where
    `RAY_AUTH_MODE` says so, and otherwise fails after 20 s without a reason.
    """
    refresh_authentication()
    takes = takes_token(address, "", timeout)
    mode, token = os.environ.get(_MODE), find_token()
    if takes is None:
        return
    if takes and mode == "token":
        # Workers there would not answer a driver that wants a token from them.
        raise ClusterError(f"the Ray at {address} takes no token, and {_MODE} is 'token'", hint=f"unset {_MODE}")
    if not takes and mode and mode != "token":
        raise ClusterError(
            f"the Ray at {address} wants a token, and {_MODE} is {mode!r}", hint=f"set {_MODE}=token, or unset it"
        )
    if takes:
        return
    if not token and not mode:
        raise ClusterError(
            f"the Ray at {address} wants a token, and there is none here",
            hint=f"copy ~/.ray/auth_token from the machine of its head, or {_SET}",
        )
    # Without a token, Ray has more places to look, and says what is missing.
    if token and not takes_token(address, token, timeout):
        raise ClusterError(f"the Ray at {address} wants a token that is not ours", hint=_SET)
    for_connection.callback(set_variables({_MODE: "token"}))
    refresh_authentication()


def token_for_local_clusters() -> dict[str, str]:
    """Return the variables for token authentication, with one token for all local clusters of this user.

    Ray listens on all interfaces: without a token, anyone who reaches this machine could run code on it. A process
    reads the token once, so one that uses two clusters in turn must find the same token for both.
    """
    path = socket_folder() / "token"
    _make_token(path)
    return {_MODE: "token", _PATH: str(path)}


def use_own_token() -> None:
    """Let a Ray that this process starts want a token: the one that this user has, or a new one in Ray's place for it.

    Ray makes one too, from 2.60 on, which all users of the machine can read.
    """
    if os.environ.get(_MODE):
        return
    variables = {_MODE: "token"}
    if not find_token():
        try:
            _make_token(Path.home() / ".ray" / "auth_token")
        except (OSError, RuntimeError):
            variables = token_for_local_clusters()
    for_connection.callback(set_variables(variables))
    refresh_authentication()


def find_token() -> str:
    """Return the token that Ray would use: from the environment, or from a file."""
    if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return token
    with contextlib.suppress(OSError, RuntimeError, UnicodeError):
        # Path.home raises RuntimeError for a user without a home folder.
        path = Path(os.environ.get(_PATH) or Path.home() / ".ray" / "auth_token")
        return path.read_text(encoding="utf-8").strip()
    return ""


def _make_token(path: Path) -> None:
    """Write a new token that only this user can read, unless the file exists."""
    if path.exists():
        return
    path.parent.mkdir(mode=0o700, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.touch(mode=0o600)
    draft.write_text(secrets.token_hex(32), encoding="utf-8")
    with contextlib.suppress(FileExistsError):
        os.link(draft, path)
    draft.unlink()
