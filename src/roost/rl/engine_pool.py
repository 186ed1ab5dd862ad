"""Which engine serves the next request: decisions without I/O, which the router carries out."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Literal

from roost.errors import ConfigError

_NOT_CHECKED = "not checked yet"

Outcome = Literal["served", "failed", "cancelled"]
"""How a request at an engine ended: the name of the count in `EngineState` that goes up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """An engine, as the router knows it."""

    url: str
    healthy: bool = False
    busy: int = 0
    """How many requests it is serving."""
    served: int = 0
    """How many requests it has answered."""
    failed: int = 0
    """How many it has not: it was unreachable, broke the connection, took too long or answered 503."""
    cancelled: int = 0
    """How many were given up because their client went away."""
    is_leaving: bool = False
    """Whether it only finishes the requests that it has."""
    is_dead: bool = False
    """Whether its process has ended: nothing at its address is believed or asked any more."""
    why: str = _NOT_CHECKED
    """Why it is not healthy; empty if it is."""


class EnginePool:
    """Decides which engine serves next. It asks no engine anything, and belongs to one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._engines: dict[str, EngineState] = {}
        self._clock = clock
        self._ill_since: dict[str, float] = {}
        self._last_picks: dict[str, int] = {}
        self._picks = itertools.count(1)
        self._seats: dict[str, int] = {}
        """A number for each engine. One that joins takes the lowest that is free: a restarted one its own again."""
        self.changed: asyncio.Event = asyncio.Event()
        """Set, and replaced by a new event, when an engine joins, leaves, or turns healthy or unhealthy."""

    def join(self, url: str) -> None:
        """Add an engine; it gets requests once it is marked healthy. A known engine keeps its state."""
        engine = self._engines.setdefault(url, EngineState(url=url))
        if url not in self._seats:
            self._seats[url] = min({*range(len(self._seats) + 1)} - {*self._seats.values()})
        if engine.is_leaving or engine.is_dead:
            # It may be another process at the same address: what is known about the old one says nothing.
            self._engines[url] = replace(engine, is_leaving=False, is_dead=False, healthy=False, why=_NOT_CHECKED)
            self._ill_since.pop(url, None)
        self.wake()

    def leave(self, url: str) -> bool:
        """Send an engine no more requests, and forget it after its last one; False if it is unknown."""
        if url not in self._engines:
            return False
        self._seats.pop(url, None)
        self._update(replace(self._engines[url], is_leaving=True))
        self.wake()
        return True

    def bury(self, url: str, why: str) -> None:
        """Send an engine that has died no more requests, unless it joins again."""
        if (engine := self._engines.get(url)) is not None:
            self._engines[url] = replace(engine, healthy=False, is_dead=True, why=why)
            self._ill_since.setdefault(url, self._clock())
            self.wake()

    def pick(self, excluding: Collection[str] = (), session: str = "") -> str | None:
        """Return the healthy engine with the fewest requests, or None; ties go to the least recently used.

        A session has the same engine each time, and another one only while that cannot serve; other sessions stay
        where they are. The engine counts as serving one more request until `done`.
        """
        if not (able := self._able(excluding)):
            return None
        if session:
            engine = max(able, key=lambda one: _weigh(session, self._seats[one.url]))
        else:
            engine = min(able, key=lambda one: (one.busy, self._last_picks.get(one.url, 0)))
        self._last_picks[engine.url] = next(self._picks)
        self._update(replace(engine, busy=engine.busy + 1))
        return engine.url

    def done(self, url: str, outcome: Outcome = "served") -> None:
        """Count a request that an engine was picked for as finished."""
        engine = self._engines.get(url)
        if engine is None or engine.busy == 0:
            raise ConfigError(f"{url} is serving no request that could be done")
        counts: dict[str, Any] = {outcome: getattr(engine, outcome) + 1}
        self._update(replace(engine, busy=engine.busy - 1, **counts))

    def mark(self, url: str, healthy: bool, why: str = "") -> None:
        """Record whether an engine can serve, and why not; one that has left or died is ignored."""
        if (engine := self._engines.get(url)) is None or engine.is_dead:
            return
        self._engines[url] = replace(engine, healthy=healthy, why="" if healthy else why)
        if healthy:
            self._ill_since.pop(url, None)
        else:
            self._ill_since.setdefault(url, self._clock())
        if engine.healthy != healthy:
            self.wake()

    def states(self) -> list[EngineState]:
        """Return all engines, in the order in which they joined."""
        return list(self._engines.values())

    def has_more(self, excluding: Collection[str]) -> bool:
        """Return whether other engines can serve, now or once they are healthy again."""
        every = self._engines.values()
        return any(not one.is_leaving and not one.is_dead and one.url not in excluding for one in every)

    def ill_seconds(self, url: str) -> float | None:
        """Return for how long an engine has not been healthy; None if it is, or was never checked."""
        return None if (since := self._ill_since.get(url)) is None else self._clock() - since

    def has_able(self, excluding: Collection[str]) -> bool:
        """Return whether another engine can serve now."""
        return bool(self._able(excluding))

    def wake(self) -> None:
        """Wake all tasks that wait for a change."""
        self.changed.set()
        self.changed = asyncio.Event()

    def _able(self, excluding: Collection[str]) -> list[EngineState]:
        engines = self._engines.values()
        return [one for one in engines if one.healthy and not one.is_leaving and one.url not in excluding]

    def _update(self, engine: EngineState) -> None:
        self._engines[engine.url] = engine
        if engine.is_leaving and engine.busy == 0:
            del self._engines[engine.url]
            self._last_picks.pop(engine.url, None)
            self._ill_since.pop(engine.url, None)


def _weigh(session: str, seat: int) -> bytes:
    """Return how much a session belongs to a seat: the same number in every process, and unlike any other session's."""
    return hashlib.blake2b(f"{seat}:{session}".encode(errors="surrogateescape"), digest_size=8).digest()
