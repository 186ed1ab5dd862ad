"""Ray's head, asked without Ray: which heads run on this machine, and whether one answers and takes a token.

Ray's own client needs 40 s to give up on a process that accepts a connection and stays silent, and prints each attempt
to the terminal. This module asks one question instead, as gRPC spells it: HTTP/2 with uncompressed headers.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
from pathlib import Path

from roost.deadline import Deadline
from roost.errors import ClusterError, ConfigError
from roost.machine.folders import is_of_local_cluster
from roost.machine.processes import Process, list_processes

_LOOPBACK = "127.0.0.1"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _END_HEADERS = 1, 4
_NO_MESSAGE = bytes(5)
# The call that Ray itself makes to see whether its head is alive.
_CALL = "/ray.rpc.NodeInfoGcsService/CheckAlive"
_STATUS = re.compile(rb"grpc-status[\x01-\x03]([0-9]+)")
_UNAUTHENTICATED = b"16"
_MOST_BYTES = 2**16


def find_heads() -> list[str]:
    """Return the heads of the Rays that run on this machine, the one that `ray start` noted first.

    Local clusters do not count: no process joins another one's test by accident.
    """
    here = [item for item in list_raylets() if not is_of_local_cluster(item.flag("session_dir"))]
    found = {item.flag("gcs-address") for item in here} - {""}
    noted = ""
    with contextlib.suppress(OSError, ValueError):
        temporary = os.environ.get("RAY_TMPDIR") or "/tmp"  # noqa: S108 - where Ray keeps it
        noted = (Path(temporary) / "ray" / "ray_current_cluster").read_text(encoding="utf-8").strip()
    # Where no raylet is visible, as in another container, only the note is known.
    is_first = noted and (noted in found or not found)
    return ([noted] if is_first else []) + sorted(found - {noted})


def is_on_loopback(address: str) -> bool:
    """Return whether a Ray of this machine has its head at this address, and on the loopback interface only."""
    host, _, port = address.rpartition(":")
    own = f"{_LOOPBACK}:{port}"
    return host in (_LOOPBACK, "localhost") and any(item.flag("gcs-address") == own for item in list_raylets())


def takes_token(address: str, token: str, timeout: float) -> bool | None:
    """Return whether the head takes calls with this token, or without one if it is empty; None with TLS.

    Raises ClusterError if no head answers in time.
    """
    host, port = split_address(address)
    deadline = Deadline.after(timeout)
    try:
        connection = socket.create_connection((host, port), timeout=timeout)
    except (OSError, UnicodeError) as error:
        raise ClusterError(
            f"nothing answers at {address}: {error}",
            hint="is the cluster up? RAY_ADDRESS or `address` says where it is",
        ) from None
    if os.environ.get("RAY_USE_TLS", "").lower() in ("1", "true"):
        # Only Ray has the keys.
        connection.close()
        return None
    with connection:
        try:
            connection.sendall(_request(address, token))
            status = _read_status(connection, deadline)
        except TimeoutError:
            raise ClusterError(
                f"the process at {address} accepts connections and does not answer in {timeout:g} s",
                hint="if it is Ray's head, it hangs: check its machine, and gcs_server.out of its session",
            ) from None
        except OSError as error:
            raise ClusterError(f"what listens at {address} is not Ray's head: {error}") from None
    return status != _UNAUTHENTICATED


def split_address(address: str) -> tuple[str, int]:
    """Return host and port; ConfigError if that is not what the address consists of.

    >>> split_address("10.0.0.2:6379")
    ('10.0.0.2', 6379)
    """
    host, colon, port = address.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or "/" in host:
        raise ConfigError(
            f"{address!r} is not an address of a Ray cluster", hint="write host:port, as in 10.0.0.2:6379"
        )
    return host.strip("[]"), int(port)


def has_own_raylet(address: str) -> bool:
    """Return whether the node of a local cluster's head has a raylet, without which a driver cannot join it.

    Each node of a local cluster has a loopback address of its own. For every other head this is True: its node may be
    in another container.
    """
    host = address.rpartition(":")[0]
    is_local = host.startswith("127.") and host != _LOOPBACK
    return not is_local or any(
        item.flag("gcs-address") == address and item.flag("node_ip_address") == host for item in list_raylets()
    )


def list_raylets() -> list[Process]:
    """Return the raylets of this machine."""
    return [item for item in list_processes() if item.name == "raylet"]


def _request(address: str, token: str) -> bytes:
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": _CALL,
        ":authority": address,
        "te": "trailers",
        "content-type": "application/grpc",
        **({"authorization": f"Bearer {token}"} if token else {}),
    }
    # 0: a header whose name and value follow as they are, and that the other end does not remember.
    block = b"".join(b"\0" + _text(name) + _text(value) for name, value in headers.items())
    return b"".join(
        (
            _PREFACE,
            _frame(_SETTINGS, 0, 0, b""),
            _frame(_HEADERS, _END_HEADERS, 1, block),
            _frame(_DATA, _END_STREAM, 1, _NO_MESSAGE),
        )
    )


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _text(value: str) -> bytes:
    data = value.encode()
    if len(data) < 127:
        return bytes([len(data)]) + data
    # The rest of the length, seven bits a byte, the lowest first.
    size, rest = bytearray([127]), len(data) - 127
    while rest >= 128:
        size.append(rest % 128 + 128)
        rest //= 128
    return bytes([*size, rest]) + data


def _read_status(connection: socket.socket, deadline: Deadline) -> bytes:
    """Return the status of the call, which gRPC writes as plain text; TimeoutError at the deadline."""
    got = b""
    while len(got) < _MOST_BYTES:
        if deadline.is_over:
            raise TimeoutError
        connection.settimeout(max(0.001, deadline.left))
        data = connection.recv(_MOST_BYTES)
        got += data
        # The status may be cut off while more comes.
        found = _STATUS.search(got)
        if found and (found.end() < len(got) or got[found.start(1) - 1] == len(found[1])):
            return found[1][: got[found.start(1) - 1]]
        if not data:
            break
    raise ConnectionError("its answer is not one of gRPC")
