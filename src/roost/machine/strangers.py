"""Connections of strangers: a server keeps a number of them, and closes the oldest for a newer one.

Whoever shows a secret is no stranger any more. So members are served however many others connect and stay silent, or
send what means nothing: these use up neither the files of the process nor the places of members.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Hashable


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

    def __contains__(self, connection: Hashable) -> bool:
        return connection in self._closes

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
