"""The rule that versions only go up, and the one place that keeps it in a worker."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from roost.errors import ConfigError
from roost.weights.limits import LOOK_SECONDS

NO_VERSION = -1
"""The version of weights that are no whole version."""


def check_newer(version: object, present: int, who: str) -> None:
    """Raise ConfigError unless a version is a whole number above the present one."""
    if isinstance(version, bool) or not isinstance(version, int) or version <= present:
        what = f"version is {version!r}: it is a whole number above {present}, which {who} has"
        raise ConfigError(what, hint="versions only go up")


class Versions:
    """The version of one worker's weights, whichever link changes them.

    A change is checked, made and noted under one lock: of two links that change the same weights, the one with the
    newer version waits for the other one, and the older version is refused, so that no two wait for each other.
    """

    def __init__(self, who: str) -> None:
        self.whole = NO_VERSION
        """The version that all weights have."""
        self._who = who
        self._coming: int | None = None
        """The version that a change brings which is under way."""
        self._changed = threading.Condition()

    def check(self, version: int) -> None:
        """Raise ConfigError unless a version is above the present one and the one that is coming."""
        check_newer(version, max(self.whole, NO_VERSION if self._coming is None else self._coming), self._who)

    @contextlib.contextmanager
    def changing(self, version: int, check: Callable[[], None]) -> Iterator[None]:
        """Surround a change of the weights, which have no version meanwhile, nor after a change that fails.

        It waits for another change; `check` is called now and then, and may break the wait off.
        """
        with self._changed:
            self.check(version)
            while self._coming is not None:
                self._changed.wait(LOOK_SECONDS)
                check()
                self.check(version)
            check()
            self._coming, self.whole = version, NO_VERSION
        try:
            yield
            self.whole = version
        finally:
            with self._changed:
                self._coming = None
                self._changed.notify_all()
