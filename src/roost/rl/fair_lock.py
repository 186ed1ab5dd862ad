"""A fair lock with named holders: who has it, who waits, and what happens if one of them dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from roost.errors import CallTimedOut, ClusterError, ConfigError

Holder = TypeVar("Holder", bound=Hashable)


class FairLock(Generic[Holder]):
    """A lock for the tasks of one event loop: first come, first served.

    asyncio.Lock has no names, so it can neither tell who holds it nor take it from a holder that has died.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        # In order of arrival: the first has the lock, and the event of each is set when its turn comes.
        self._line: dict[Holder, asyncio.Event] = {}
        self._clock = clock
        self._since = 0.0

    @property
    def line(self) -> tuple[Holder, ...]:
        """The holder, then those that wait, in order."""
        return tuple(self._line)

    @property
    def holder(self) -> Holder | None:
        """Who has the lock; None if it is free."""
        return next(iter(self._line), None)

    async def acquire(self, holder: Holder, timeout: float) -> None:
        """Wait for the lock; CallTimedOut says who has it. A holder that asks again keeps it."""
        turn = self._line.setdefault(holder, asyncio.Event())
        self._hand_on()
        try:
            async with asyncio.timeout(timeout):
                await turn.wait()
        except BaseException as error:
            state = str(self)
            self.leave(holder)
            if isinstance(error, TimeoutError):
                raise CallTimedOut(f"{holder} did not get the lock in {timeout:g} s: it is {state}") from None
            raise
        if self._line.get(holder) is not turn:
            raise ClusterError(f"{holder} no longer waits for the lock")

    def release(self, holder: Holder) -> None:
        """Hand the lock to the next in line; ConfigError if another one holds it."""
        if self.holder != holder:
            hint = "only its holder can release a lock"
            raise ConfigError(f"{holder} cannot release the lock: it is {self}", hint=hint)
        self.leave(holder)

    def leave(self, holder: Holder) -> None:
        """Give up the lock or the place in line, if there is one; an `acquire` that still waits raises."""
        if (turn := self._line.pop(holder, None)) is not None:
            turn.set()
            self._hand_on()

    def __str__(self) -> str:
        """`held by actor:3 for 4 s, 2 waiting`, or `free`."""
        if not self._line:
            return "free"
        waiting = f", {len(self._line) - 1} waiting" if len(self._line) > 1 else ""
        return f"held by {self.holder} for {max(0.0, self._clock() - self._since):.0f} s{waiting}"

    def _hand_on(self) -> None:
        first = next(iter(self._line.values()), None)
        if first is not None and not first.is_set():
            first.set()
            self._since = self._clock()
