"""Ports for servers that a test starts itself."""

from __future__ import annotations

import errno
import secrets
import socket


def free_port(address: str = "127.0.0.1") -> int:
    """A port below the kernel's range for outgoing connections, so that no connection takes it meanwhile."""
    while True:
        port = 20000 + secrets.randbelow(10000)
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as tried:
            try:
                tried.bind((address, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port
