"""Which ports are in use on this machine: tried, not guessed."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence


def taken_ports(blocks: Sequence[tuple[int, int]]) -> list[int]:
    """Which ports of these blocks (start, count) are in use on this machine, on any address."""
    return [port for start, count in blocks for port in range(start, start + count) if not _is_free(port)]


def _is_free(port: int) -> bool:
    for family, everywhere in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):  # noqa: S104 - closed at once
        try:
            with socket.socket(family) as tried:
                if family == socket.AF_INET6:
                    tried.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                tried.bind((everywhere, port))
        except OSError as error:
            if family == socket.AF_INET6 and _family_is_missing(error):
                continue
            return False
    return True


def _family_is_missing(error: OSError) -> bool:
    """Whether the machine has no IPv6 at all."""
    return error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT)
