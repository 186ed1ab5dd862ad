"""The buffer between rollout and training: samples in the order in which they came, with the weights' version."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from roost.errors import CallTimedOut, ClusterError, ConfigError
from roost.text import plural

Sample = TypeVar("Sample")


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStats:
    """How a buffer is, and what went through it."""

    size: int
    capacity: int
    put: int
    """How many samples were ever put in."""
    taken: int
    """How many of them were taken out."""
    dropped: int
    """How many were thrown away because they were too old."""
    oldest_version: int | None
    """Of the samples that are in it now; None if it is empty."""
    newest_version: int | None


class _Kept(NamedTuple):
    sample: object
    version: int


class DataBuffer(Generic[Sample]):
    """Holds at most `capacity` samples; who puts waits for room, who gets waits for samples, each in turn.

    A put goes in as a whole. A get of `g` and a put of `p` samples can wait for each other where `g + p` is more than
    `capacity + 1`: the samples that are there are too few for the one and leave too little room for the other.
    """

    def __init__(self, capacity: int) -> None:
        if type(capacity) is not int or capacity < 1:
            raise ConfigError(f"the capacity of a buffer is {capacity!r}", hint="it is a number of samples, 1 or more")
        self._capacity = capacity
        self._changed = threading.Condition()
        self._kept: deque[_Kept] = deque()
        self._putters: deque[object] = deque()
        self._getters: deque[object] = deque()
        self._put = 0
        self._taken = 0
        self._dropped = 0
        self._is_closed = False

    @property
    def size(self) -> int:
        """How many samples are in it."""
        with self._changed:
            return len(self._kept)

    def put(self, samples: Sequence[Sample], version: int, timeout: float | None = None) -> None:
        """Add samples that were made with this version of the weights, all of them or none.

        Waits for room; CallTimedOut where there is none within `timeout` seconds, None waits for ever.
        """
        count = len(samples)
        if count > self._capacity:
            raise ConfigError(
                f"{plural(count, 'sample')} can never be in a buffer for {self._capacity}",
                hint="put fewer at once, or make the capacity larger",
            )

        def has_room() -> bool:
            return len(self._kept) + count <= self._capacity

        def late() -> str:
            return f"no room for {plural(count, 'sample')} within {timeout} s: {self._fullness()}"

        with self._changed, self._turn(self._putters, has_room, timeout, late):
            self._kept.extend(_Kept(sample, version) for sample in samples)
            self._put += count

    def get(self, count: int, timeout: float | None = None, min_version: int | None = None) -> list[Sample]:
        """Take the first `count` samples, once there are so many.

        Samples with a version below `min_version` are dropped and counted, also when the time is up before there are
        enough others: CallTimedOut, after `timeout` seconds; None waits for ever.
        """
        if type(count) is not int or not 1 <= count <= self._capacity:
            raise ConfigError(
                f"{count!r} samples can never be taken at once", hint=f"it is a number from 1 to {self._capacity}"
            )

        def has_enough() -> bool:
            self._drop_below(min_version)
            return len(self._kept) >= count

        def late() -> str:
            return f"not {plural(count, 'sample')} within {timeout} s: {self._fullness()}"

        with self._changed, self._turn(self._getters, has_enough, timeout, late):
            taken = [self._kept.popleft().sample for _ in range(count)]
            self._taken += count
        return taken  # type: ignore[return-value]  # what was put in comes out

    def stats(self) -> BufferStats:
        """How it is at this moment."""
        with self._changed:
            versions = [kept.version for kept in self._kept]
            return BufferStats(
                size=len(self._kept),
                capacity=self._capacity,
                put=self._put,
                taken=self._taken,
                dropped=self._dropped,
                oldest_version=min(versions, default=None),
                newest_version=max(versions, default=None),
            )

    def close(self) -> None:
        """End it: everybody who waits, or comes later, gets a ClusterError. Safe to call again."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @contextlib.contextmanager
    def _turn(
        self, line: deque[object], ready: Callable[[], bool], timeout: float | None, late: Callable[[], str]
    ) -> Iterator[None]:
        """Stand in line until it is our turn and all is ready; the lock is held, inside too."""
        ticket = object()
        line.append(ticket)
        try:
            # In line, so that many small ones cannot keep a large one waiting for ever.
            if not self._changed.wait_for(lambda: self._is_closed or (line[0] is ticket and ready()), timeout):
                raise CallTimedOut(late())
            if self._is_closed:
                raise ClusterError("the buffer is closed")
            yield
        finally:
            line.remove(ticket)
            self._changed.notify_all()

    def _drop_below(self, min_version: int | None) -> None:
        if min_version is None:
            return
        fresh = [kept for kept in self._kept if kept.version >= min_version]
        stale = len(self._kept) - len(fresh)
        if stale:
            self._kept = deque(fresh)
            self._dropped += stale
            self._changed.notify_all()

    def _fullness(self) -> str:
        return f"{len(self._kept)} of {self._capacity} places are taken"
