"""The rule that versions only go up, and the one place that keeps it in a worker."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from roost.errors import ConfigError
from roost.runtime.events.waits import waiting
from roost.weights.limits import LOOK_SECONDS

NO_VERSION = -1
"""The version of weights that are no whole version."""


def check_newer(version: object, present: int, who: str) -> None:
    """Raise ConfigError unless a version is a whole number above the present one."""
    if isinstance(version, bool) or not isinstance(version, int) or version <= present:
        what = f"version is {version!r}: it is a whole number above {present}, which {who} has"
        raise ConfigError(what, hint="versions only go up")


class Versions:
    """The version of one worker's weights, changed by a link or by a call that brings them.

    A change is checked, made and noted in one turn. Of two links that change the same weights, the one with the newer
    version waits for the other one, and the older version is refused, so that no two wait for each other. A call has
    one turn at a time, and so cannot be part of such a circle: it may repeat a version, and waits for any change.
    """

    def __init__(self, who: str) -> None:
        self.last = NO_VERSION
        """The version that came last; none after a change that failed."""
        self._who = who
        self._asked = NO_VERSION
        """The newest version that was asked for."""
        self._coming: int | None = None
        """The version that the present turn brings."""
        self._is_changing = False
        self._changed = threading.Condition()

    @property
    def whole(self) -> int:
        """The version that all weights have; none while they change."""
        return NO_VERSION if self._is_changing else self.last

    def check(self, version: int, *, may_repeat: bool = False) -> None:
        """Raise ConfigError unless a version is above the present one and the one that is coming.

        One that may repeat only must not be older than any that was asked for.
        """
        if not may_repeat:
            check_newer(version, max(self.whole, NO_VERSION if self._coming is None else self._coming), self._who)
        elif type(version) is not int or version < 0:
            raise ConfigError(f"a version is a whole number from 0 on, not {version!r}")
        elif version < self._asked:
            raise ConfigError(
                f"{self._who} takes no weights of version {version}: version {self._asked} was asked for",
                hint="versions only go up, unless an engine is restarted",
            )

    @contextlib.contextmanager
    def turn(
        self, version: int, check: Callable[[], None] = lambda: None, *, may_repeat: bool = False
    ) -> Iterator[None]:
        """Have the only turn for a block, after waiting for another one; `check` may break the wait off."""
        with self._changed:
            self.check(version, may_repeat=may_repeat)
            # A call whose caller gave up goes on here: it must not come after the next one.
            self._asked = max(self._asked, version)
            while self._coming is not None:
                with waiting(lambda: f"version {self._coming} of the weights of {self._who}"):
                    self._changed.wait(LOOK_SECONDS)
                check()
                self.check(version, may_repeat=may_repeat)
            check()
            self._coming = version
        try:
            yield
        finally:
            with self._changed:
                self._coming = None
                self._changed.notify_all()

    @contextlib.contextmanager
    def changing(
        self,
        version: int,
        check: Callable[[], None] = lambda: None,
        pause: Callable[[int], AbstractContextManager[Any]] = contextlib.nullcontext,
        *,
        may_repeat: bool = False,
    ) -> Iterator[None]:
        """Surround a change of the weights, which have no version meanwhile, nor after a change that fails.

        `pause` surrounds it too, within the turn: a pause that began before would keep the other change from ending.
        """
        with self.turn(version, check, may_repeat=may_repeat), pause(version):
            # To pause may take long.
            check()
            self._is_changing = True
            try:
                yield
                self.last = version
            except BaseException:
                self.last = NO_VERSION
                raise
            finally:
                self._is_changing = False
