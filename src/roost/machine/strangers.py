"""Connections of strangers: a server keeps a number of them, and closes the oldest for a newer one.

Whoever shows a secret is no stranger any more. So members are served however many others connect and stay silent, or
send what means nothing: these use up neither the files of the process nor the places of members.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
from collections.abc import Callable, Hashable
from typing import Any

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Strangers:
    """The connections whose other ends have not shown who they are, the oldest first; for one thread.

    >>> strangers = Strangers(most=1)
    >>> strangers.arrive("first", lambda: print("the first is closed"))
    >>> strangers.arrive("second", lambda: print("the second is closed"))
    the first is closed
    >>> strangers.leave("second")
    >>> strangers.close_oldest()
    False
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._closes: dict[Hashable, Callable[[], object]] = {}

    def arrive(self, connection: Hashable, close: Callable[[], object]) -> None:
        """Add a connection, which `close` closes at once; where there are too many, the oldest is closed."""
        self._closes[connection] = close
        if len(self._closes) > self._most:
            self.close_oldest()

    def leave(self, connection: Hashable) -> None:
        """Forget a connection, which is closed or belongs to a member; it may be forgotten already."""
        self._closes.pop(connection, None)

    def close_oldest(self) -> bool:
        """Close the oldest connection; False if there is none."""
        for connection in self._closes:
            self._closes.pop(connection)()
            return True
        return False


def most_connections(most: int, files: int) -> int:
    """Return how many connections may be open, each of which takes so many of the files that this process may open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    # The same again is for everything else that the process does.
    return most if limit == resource.RLIM_INFINITY else max(1, min(most, limit // (files + 1)))


class Listener(socket.socket):
    """A socket that listens at an address, for a server with one thread; OSError if it cannot.

    Who a client is shows only in its first request: until then it is a stranger, whatever bytes came. The socket never
    runs out of descriptors for new ones, and a server that accepts from it, such as asyncio's, has nothing to report.
    """

    def __init__(self, host: str, port: int, *, most: int, backlog: int) -> None:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        super().__init__(family, kind)
        self._most = most_connections(most, files=2)
        self._strangers = Strangers(self._most)
        self._open: dict[Any, socket.socket] = {}
        """By the address of the client."""
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
        self._strangers.leave(client)

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
            self._strangers.close_oldest()
            # Take a connection from the queue and close it, so that the server does not spin.
            spare, self._spare = self._spare, -1
            if spare >= 0:
                os.close(spare)
            with contextlib.suppress(OSError):
                super().accept()[0].close()
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY)
            raise BlockingIOError(error.errno, "a connection was refused") from None
        if len(self._open) >= self._most:
            for address in [address for address, item in self._open.items() if item.fileno() < 0]:
                del self._open[address]
                self._strangers.leave(address)

        def end() -> None:
            # The server that has it then closes it.
            with contextlib.suppress(OSError):
                self._open.pop(client).shutdown(socket.SHUT_RDWR)

        self._open[client] = connection
        self._strangers.arrive(client, end)
        if len(self._open) > self._most:
            # Where every other has been heard, this is the new one.
            self._strangers.close_oldest()
        return connection, client

    def close(self) -> None:
        """Stop listening; the connections stay."""
        super().close()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
