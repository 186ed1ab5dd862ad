"""The ports of this machine: which are in use, and which to lease from."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from roost.errors import ConfigError

# Ray's own defaults lie below: 6379, 8265, 10001, and 10002 to 19999 for its workers.
_FIRST_PORT = 20000
_FEWEST_PORTS = 1000
_LAST_PORT = 65535
_LOWEST_PORT = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The kernel's ephemeral range, first and last, and all ports in use."""

    ephemeral: tuple[int, int]
    used: frozenset[int]


def find_ports(root: Path = Path("/proc")) -> Ports:
    """Return the ports in use as the kernel lists them: binding them all would get in the way of other processes."""
    tables = [root / "net/tcp", *root.glob("net/tcp6")]
    lines = [line for table in tables for line in table.read_text(encoding="ascii").splitlines()[1:]]
    used = frozenset(int(line.split()[1].rpartition(":")[2], 16) for line in lines)
    return Ports(ephemeral=ephemeral_ports(root), used=used)


def ephemeral_ports(root: Path = Path("/proc")) -> tuple[int, int]:
    """Return the first and the last port that the kernel gives to outgoing connections."""
    try:
        first, last = (root / "sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
        return int(first), int(last)
    except (OSError, ValueError):
        return 32768, 60999


def taken_ports(blocks: Sequence[tuple[int, int]]) -> list[int]:
    """Return the ports of these blocks (start, count) that are in use on any address, by binding each of them."""
    found = []
    for port in (port for start, count in blocks for port in range(start, start + count)):
        for family, any_address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):  # noqa: S104 - closed again
            try:
                with socket.socket(family) as tried:
                    if family == socket.AF_INET6:
                        tried.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                    tried.bind((any_address, port))
            except OSError as error:
                no_ipv6 = error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT)
                if family == socket.AF_INET or not no_ipv6:
                    found.append(port)
                    break
    return found


def first_free_port(start: int, count: int) -> int:
    """Return the first port, from `start` on, that is free together with those after it; ConfigError if there is none.

    >>> 20000 <= first_free_port(20000, 2) < 65535
    True
    """
    if type(start) is not int or type(count) is not int or start < 1 or count < 1:
        raise ConfigError(f"{count!r} ports from {start!r} on: both are whole numbers, at least 1")
    while start + count - 1 <= _LAST_PORT:
        taken = taken_ports([(start, count)])
        if not taken:
            return start
        start = taken[-1] + 1
    raise ConfigError(f"no {count} consecutive ports are free there", hint="begin with a lower port")


def answers(address: str, timeout: float = 1) -> bool | None:
    """Return whether a process listens at `host:port`: False if its machine says that none does, None if it is silent.

    Ray's calls would block for a minute, then end this process.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout).close()
    except ConnectionRefusedError:
        return False
    except ValueError:
        return None
    except OSError as error:
        # With no descriptor left, this process cannot knock: that says nothing about the other end.
        return True if error.errno in (errno.EMFILE, errno.ENFILE) else None
    return True


def lease_range(ephemeral: tuple[int, int], wanted: tuple[int, int] | None = None) -> range:
    """Return the ports to lease from on a node: those asked for, else a stretch outside the kernel's ephemeral range.

    >>> lease_range((32768, 60999))
    range(20000, 32768)
    >>> lease_range((15000, 60999))
    range(10904, 15000)
    >>> lease_range((1024, 60999))
    range(61000, 65536)
    """
    if wanted is not None:
        return range(wanted[0], wanted[1] + 1)
    low, high = ephemeral
    if low - _FIRST_PORT >= _FEWEST_PORTS:
        return range(_FIRST_PORT, low)
    if low - _FEWEST_PORTS >= _LOWEST_PORT:
        return range(max(_LOWEST_PORT, low - 4096), low)
    if _LAST_PORT - high >= _FEWEST_PORTS:
        return range(max(_LOWEST_PORT, high + 1), _LAST_PORT + 1)
    # The ephemeral range is nearly everything: there is no better place, and every port is tried before it is leased.
    return range(_FIRST_PORT, _LAST_PORT + 1)


def check_port_range(wanted: object) -> tuple[int, int] | None:
    """Return a user's `port_range`, the first and the last port, or raise ConfigError."""
    if wanted is None:
        return None
    if (
        isinstance(wanted, Sequence)
        and len(wanted) == 2
        and all(type(port) is int for port in wanted)
        and 1 <= wanted[0] <= wanted[1] <= _LAST_PORT
    ):
        return (wanted[0], wanted[1])
    raise ConfigError(f"port_range is {wanted!r}", hint="it is the first and the last port, as in (20000, 29999)")
