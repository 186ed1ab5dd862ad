"""A fair lock with named holders, as plain state: who has it, who waits, and what happens if one of them dies.

It has no clock and no threads. Whoever keeps it says what time it is and asks for the holders; a holder learns that
its turn has come by asking again.
"""

from __future__ import annotations

from collections.abc import Set

from roost.errors import ConfigError


class LockState:
    """The holder of a lock, and the line behind it: first come, first served."""

    def __init__(self) -> None:
        self._holder: str | None = None
        self._since: float | None = None
        self._waiting: list[str] = []

    @property
    def holder(self) -> str | None:
        """Who has the lock, or None."""
        return self._holder

    @property
    def waiting(self) -> tuple[str, ...]:
        """Who waits for it, the next one first."""
        return tuple(self._waiting)

    @property
    def since(self) -> float | None:
        """When the holder got it; None while nobody holds it, or until a holder at an unknown time asks again."""
        return self._since

    def ask(self, holder: str, now: float) -> bool:
        """Whether this one has the lock from now on; if not it waits in line, where asking again changes nothing."""
        if self._holder is None:
            self._holder = holder
        if self._holder == holder:
            if self._since is None:
                self._since = now
            return True
        if holder not in self._waiting:
            self._waiting.append(holder)
        return False

    def give_up(self, holder: str, now: float | None = None) -> None:
        """Leave the line, or the lock itself if the turn has just come: who gives up does not ask again."""
        if self._holder == holder:
            self._hand_on(now)
        elif holder in self._waiting:
            self._waiting.remove(holder)

    def release(self, holder: str, now: float | None = None) -> None:
        """Hand the lock to the next in line; without `now`, that one's time begins when it asks again."""
        if self._holder != holder:
            raise ConfigError(
                f"{holder} cannot release the lock: {self._holder or 'nobody'} holds it",
                hint="only who holds a lock releases it",
            )
        self._hand_on(now)

    def bury(self, dead: Set[str], now: float | None = None) -> None:
        """Take the lock from holders that have died, and their places in the line."""
        self._waiting = [name for name in self._waiting if name not in dead]
        if self._holder in dead:
            self._hand_on(now)

    def describe(self, now: float) -> str:
        """`held by actor:3 for 4 s, 2 waiting`, or `free`."""
        return self._described("" if self._since is None else f" for {max(0.0, now - self._since):.0f} s")

    def __str__(self) -> str:
        return self._described("")

    def _described(self, duration: str) -> str:
        if self._holder is None:
            return "free"
        waiting = f", {len(self._waiting)} waiting" if self._waiting else ""
        return f"held by {self._holder}{duration}{waiting}"

    def _hand_on(self, now: float | None) -> None:
        self._holder = self._waiting.pop(0) if self._waiting else None
        self._since = None if self._holder is None else now
