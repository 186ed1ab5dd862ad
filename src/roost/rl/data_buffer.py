"""The buffer between rollout and training: samples in the order of arrival, each with its version of the weights."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from roost.errors import CallTimedOut, ConfigError
from roost.text import plural


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStats:
    """How full a buffer is, and what has gone through it."""

    size: int
    capacity: int
    put: int
    """How many samples were ever put in."""
    taken: int
    """How many of them were taken out."""
    dropped: int
    """How many were dropped because they were too old."""
    oldest_version: int | None
    """Of the samples in the buffer; None if it is empty."""
    newest_version: int | None


class DataBuffer:
    """Holds at most `capacity` samples, for the tasks of one event loop.

    A put waits for room and a get waits for samples; puts take turns among themselves, and so do gets, first come,
    first served. A put goes in as a whole. A get of `g` and a put of `p` samples can wait for each other if `g + p` is
    more than `capacity + 1`: the samples in the buffer are too few for one and leave too little room for the other.
    """

    def __init__(self, capacity: int) -> None:
        if type(capacity) is not int or capacity < 1:
            raise ConfigError(f"the capacity of a buffer is {capacity!r}", hint="it is a number of samples, 1 or more")
        self._capacity = capacity
        self._samples: deque[tuple[Any, int]] = deque()
        # asyncio's lock is fair: many small gets cannot keep a large one waiting for ever.
        self._put_turn = asyncio.Lock()
        self._get_turn = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._put = 0
        self._taken = 0
        self._dropped = 0

    async def put(self, samples: Sequence[Any], version: int, timeout: float | None = None) -> None:
        """Add samples that this version of the weights made, all of them or none.

        Raises CallTimedOut if there is no room for them within `timeout` seconds.
        """
        count = len(samples)
        if count > self._capacity:
            hint = "put fewer in one call, or make the capacity larger"
            raise ConfigError(f"{plural(count, 'sample')} can never fit in a buffer for {self._capacity}", hint=hint)

        def has_room() -> bool:
            return len(self._samples) + count <= self._capacity

        async with self._turn(self._put_turn, has_room, timeout, f"no room for {plural(count, 'sample')}"):
            self._samples.extend((sample, version) for sample in samples)
            self._put += count

    async def get(self, count: int, timeout: float | None = None, min_version: int | None = None) -> list[Any]:
        """Take the oldest `count` samples, as soon as there are that many.

        Samples with a version below `min_version` are dropped and counted, even if the call then times out. Raises
        CallTimedOut if there are too few others within `timeout` seconds.
        """
        if type(count) is not int or not 1 <= count <= self._capacity:
            hint = f"it takes a number from 1 to {self._capacity}"
            raise ConfigError(f"a get can never take {count!r} samples", hint=hint)

        def has_enough() -> bool:
            if min_version is not None and any(version < min_version for _, version in self._samples):
                before = len(self._samples)
                self._samples = deque(entry for entry in self._samples if entry[1] >= min_version)
                self._dropped += before - len(self._samples)
                self._changed.notify_all()
            return len(self._samples) >= count

        async with self._turn(self._get_turn, has_enough, timeout, f"not {plural(count, 'sample')}"):
            self._taken += count
            return [self._samples.popleft()[0] for _ in range(count)]

    def stats(self) -> BufferStats:
        """Return the counts of this moment."""
        versions = [version for _, version in self._samples]
        return BufferStats(
            size=len(self._samples),
            capacity=self._capacity,
            put=self._put,
            taken=self._taken,
            dropped=self._dropped,
            oldest_version=min(versions, default=None),
            newest_version=max(versions, default=None),
        )

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
            fullness = f"{len(self._samples)} of {self._capacity} places are taken"
            raise CallTimedOut(f"{shortage} within {timeout} s: {fullness}") from None
