"""The items of a generator method as they come from many workers, each at most one step ahead of the caller."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from roost.runtime.failures.failure import make_error
from roost.runtime.groups.result import check_seconds, sources_of, timed_out
from roost.runtime.process.actor import MethodKind
from roost.runtime.process.packing import Sent

if TYPE_CHECKING:
    from roost.runtime.groups.members import Members


class ItemStream:
    """An iterator of `(rank, item)`. Each worker prepares the item after the one that was taken; `close()` ends it.

    Leaving the loop early frees the workers: they drop what they were preparing.
    """

    def __init__(self, members: Members, method: str, ranks: Sequence[int], sent: Sent) -> None:
        self._members = members
        self._method = method
        (self._sources,) = sources_of([sent])
        # An object of this process: its id is unique in the world, and workers can tell whether its owner is alive.
        self._token = ray.put(None)
        self._key = self._token.hex()
        is_async = members.methods[method] is MethodKind.ASYNC_GENERATOR
        self._step = "_roost_stream_async" if is_async else "_roost_stream"
        self._handles = dict(zip(ranks, members.handles(ranks), strict=True))
        # In a list, where Ray leaves a reference as it is.
        self._running = {self._ask(rank, method, [self._token], *sent.arguments): rank for rank in ranks}

    def __iter__(self) -> ItemStream:
        return self

    def __next__(self) -> tuple[int, Any]:
        found = self._take(None)
        if found is None:
            raise StopIteration
        return found

    def within(self, seconds: float | None) -> Iterator[tuple[int, Any]]:
        """Iterate over the items, and raise CallTimedOut if none comes for so many seconds; the stream stays open."""
        return iter(functools.partial(self._take, check_seconds(seconds)), None)

    def close(self) -> None:
        """Drop the rest of the stream."""
        running, self._running = self._running, {}
        if running and not self._members.is_closed and self._members.context.is_connected:
            for rank in running.values():
                with contextlib.suppress(Exception):
                    self._handles[rank]._roost_end_stream.remote(self._key)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def _take(self, seconds: float | None) -> tuple[int, Any] | None:
        """Wait for the next item and return it with its rank, or None at the end of the stream."""
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        while self._running:
            self._members.context.check_open()
            left = None if seconds is None else max(0.0, deadline - time.monotonic())
            with self._members.context.stop:
                ready, _ = ray.wait(list(self._running), num_returns=1, timeout=left)
            if not ready:
                hint = "the workers go on: ask for the next item again, or close() the stream"
                late = sorted(self._running.values())
                raise timed_out(self._members, self._method, seconds, late, len(self._handles), hint)
            # Asked again last, so that a fast worker does not crowd out the others.
            rank = self._running.pop(ready[0])
            try:
                found = ray.get(ready[0])
            except RayError as error:
                rest = list(self._running.values())
                failure = self._members.describe(error, rank, self._method, self._sources)
                self.close()
                raise make_error([failure], f"in {self._method!r}", rest) from None
            if found:
                self._running[self._ask(rank)] = rank
                return rank, found[0]
        return None

    def _ask(self, rank: int, *begin: Any) -> Any:
        return getattr(self._handles[rank], self._step).remote(self._key, *begin)
