"""A listening socket that strangers cannot fill: the oldest connection that has said nothing makes way for a new one.

Who a client is shows only in its first request. Until then its connection is silent, whatever bytes came: whoever holds
connections open, or sends garbage slowly, closes only the connections of others like him. It never runs out of
descriptors for new ones, and a server that accepts from it, such as asyncio's, has nothing to report.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
from typing import Any

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listener(socket.socket):
    """A socket that listens at an address, for a server with one thread; OSError if it cannot.

    It has at most `most` connections, and at most a third of the files that this process may open.
    """

    def __init__(self, host: str, port: int, *, most: int, backlog: int) -> None:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        super().__init__(family, kind)
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = most if files == resource.RLIM_INFINITY else max(1, min(most, files // 3))
        self._silent: dict[Any, socket.socket] = {}
        """By the address of the client, the oldest first."""
        self._heard: dict[Any, socket.socket] = {}
        self._in_a_row = 0
        # Given up for a moment when there is no other descriptor left.
        self._spare = os.open(os.devnull, os.O_RDONLY)
        try:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.bind(address)
            # From now on, so that a client that is quicker than the server waits for it.
            self.listen(backlog)
            self.setblocking(False)
        except OSError:
            self.close()
            raise

    def heard(self, client: Any) -> None:
        """Note that the client at this address has shown that it may ask: its connection stays."""
        if client in self._silent:
            self._heard[client] = self._silent.pop(client)

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection; BlockingIOError if there is none, or now and then to let the server close and serve."""
        self._in_a_row += 1
        if self._in_a_row > max(1, self._most // 4):
            self._in_a_row = 0
            raise BlockingIOError(errno.EAGAIN, "others first")
        try:
            connection, client = super().accept()
        except OSError as error:
            if error.errno not in _NO_ROOM:
                self._in_a_row = 0
                raise
            self._refuse_one()
            raise BlockingIOError(error.errno, "a connection was refused") from None
        if len(self._silent) + len(self._heard) >= self._most:
            for table in (self._silent, self._heard):
                for address in [address for address, item in table.items() if item.fileno() < 0]:
                    del table[address]
        self._silent[client] = connection
        if len(self._silent) + len(self._heard) > self._most:
            # Where every other has been heard, this is the new one.
            self._end_oldest()
        return connection, client

    def close(self) -> None:
        """Stop listening; the connections stay."""
        super().close()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    def _end_oldest(self) -> None:
        """End the oldest silent connection: the server that has it then closes it."""
        if self._silent:
            with contextlib.suppress(OSError):
                self._silent.pop(next(iter(self._silent))).shutdown(socket.SHUT_RDWR)

    def _refuse_one(self) -> None:
        """Take a connection from the queue and close it, so that the server does not spin; end a silent one."""
        self._end_oldest()
        spare, self._spare = self._spare, -1
        if spare >= 0:
            os.close(spare)
        with contextlib.suppress(OSError):
            super().accept()[0].close()
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY)
