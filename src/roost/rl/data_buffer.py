"""The buffer between rollout and training: samples in the order of arrival, each with its version of the weights.

Both directions have two steps, so that nothing is lost or doubled if a caller gives up or dies: samples go in once
their sender confirms that it knows, and are gone once their receiver confirms that it has them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from roost.errors import CallTimedOut, ConfigError
from roost.text import plural

Ticket = TypeVar("Ticket", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStats:
    """How full a buffer is, and what has gone through it."""

    size: int
    capacity: int
    put: int
    """How many samples were ever put in."""
    taken: int
    """How many of them their receivers have confirmed."""
    leased: int
    """How many were handed out and are not confirmed yet."""
    dropped: int
    """How many were dropped because they were too old."""
    oldest_version: int | None
    """Of the samples in the buffer; None if it is empty."""
    newest_version: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    number: int
    sample: Any
    version: int


class DataBuffer(Generic[Ticket]):
    """Holds at most `capacity` samples, with those that are not confirmed yet, for the tasks of one event loop.

    A put waits for room and a get waits for samples; puts take turns among themselves, and so do gets, first come,
    first served. A put goes in as a whole. A get of `g` and a put of `p` samples can wait for each other if `g + p` is
    more than `capacity + 1`: the samples in the buffer are too few for one and leave too little room for the other.
    """

    def __init__(self, capacity: int) -> None:
        if type(capacity) is not int or capacity < 1:
            raise ConfigError(f"the capacity of a buffer is {capacity!r}", hint="it is a number of samples, 1 or more")
        self._capacity = capacity
        self._entries: deque[_Entry] = deque()
        self._drafts: dict[Ticket, list[tuple[Any, int]]] = {}
        self._leases: dict[Ticket, list[_Entry]] = {}
        self._numbers = itertools.count()
        # asyncio's lock is fair: many small gets cannot keep a large one waiting for ever.
        self._put_turn = asyncio.Lock()
        self._get_turn = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._put = 0
        self._taken = 0
        self._dropped = 0

    @property
    def unconfirmed(self) -> tuple[Ticket, ...]:
        """The tickets that have yet to confirm."""
        return (*self._drafts, *self._leases)

    async def draft(self, ticket: Ticket, samples: Sequence[Any], version: int, timeout: float | None = None) -> None:
        """Take the room for samples that this version of the weights made; they go in together with `confirm`.

        Raises CallTimedOut if there is no room for them within `timeout` seconds.
        """
        count = len(samples)
        if count > self._capacity:
            hint = "put fewer in one call, or make the capacity larger"
            raise ConfigError(f"{plural(count, 'sample')} can never fit in a buffer for {self._capacity}", hint=hint)

        def has_room() -> bool:
            return self._num_taken + count <= self._capacity

        async with self._turn(self._put_turn, has_room, timeout, f"no room for {plural(count, 'sample')}"):
            self._drafts[ticket] = [(sample, version) for sample in samples]

    async def lease(
        self, ticket: Ticket, count: int, timeout: float | None = None, min_version: int | None = None
    ) -> list[Any]:
        """Hand out the oldest `count` samples, as soon as there are that many, until `confirm` or `give_back`.

        Samples with a version below `min_version` are dropped and counted, even if the call then times out. Raises
        CallTimedOut if there are too few others within `timeout` seconds.
        """
        if type(count) is not int or not 1 <= count <= self._capacity:
            hint = f"it takes a number from 1 to {self._capacity}"
            raise ConfigError(f"a get can never take {count!r} samples", hint=hint)

        def has_enough() -> bool:
            if min_version is not None and any(entry.version < min_version for entry in self._entries):
                before = len(self._entries)
                self._entries = deque(entry for entry in self._entries if entry.version >= min_version)
                self._dropped += before - len(self._entries)
                self._changed.notify_all()
            return len(self._entries) >= count

        async with self._turn(self._get_turn, has_enough, timeout, f"not {plural(count, 'sample')}"):
            self._leases[ticket] = [self._entries.popleft() for _ in range(count)]
            return [entry.sample for entry in self._leases[ticket]]

    async def confirm(self, ticket: Ticket) -> None:
        """Let the samples of a draft in, or go of those of a lease."""
        async with self._changed:
            self._taken += len(self._leases.pop(ticket, ()))
            for sample, version in self._drafts.pop(ticket, ()):
                self._entries.append(_Entry(number=next(self._numbers), sample=sample, version=version))
                self._put += 1
            self._changed.notify_all()

    async def give_back(self, ticket: Ticket) -> None:
        """Forget a draft, or end a lease and put its samples back in their order."""
        async with self._changed:
            self._drafts.pop(ticket, None)
            if entries := self._leases.pop(ticket, []):
                self._entries = deque(sorted([*entries, *self._entries], key=lambda entry: entry.number))
            self._changed.notify_all()

    async def settle(self, seconds: float) -> None:
        """Wait until all that is not confirmed now is, or is given back, for some seconds at most."""
        before = set(self.unconfirmed)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: before.isdisjoint(self.unconfirmed))

    def stats(self) -> BufferStats:
        """Return the counts of this moment."""
        versions = [entry.version for entry in self._entries]
        return BufferStats(
            size=len(self._entries),
            capacity=self._capacity,
            put=self._put,
            taken=self._taken,
            leased=sum(map(len, self._leases.values())),
            dropped=self._dropped,
            oldest_version=min(versions, default=None),
            newest_version=max(versions, default=None),
        )

    @property
    def _num_taken(self) -> int:
        """How many places are taken."""
        return len(self._entries) + sum(map(len, self._drafts.values())) + sum(map(len, self._leases.values()))

    @contextlib.asynccontextmanager
    async def _turn(
        self, line: asyncio.Lock, is_ready: Callable[[], bool], timeout: float | None, shortage: str
    ) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(timeout), line, self._changed:
                await self._changed.wait_for(is_ready)
                yield
                self._changed.notify_all()
        except TimeoutError:
            fullness = f"{self._num_taken} of {self._capacity} places are taken"
            raise CallTimedOut(f"{shortage} within {timeout} s: {fullness}") from None
