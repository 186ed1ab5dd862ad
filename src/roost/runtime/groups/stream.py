"""The items of a generator method as they come from many workers, each at most one step ahead of the caller."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from roost.runtime.failures.failure import make_error
from roost.runtime.process.actor import MethodKind

if TYPE_CHECKING:
    from roost.runtime.groups.members import Members

_numbers = itertools.count()


class ItemStream:
    """An iterator of `(rank, item)`. Each worker prepares the item after the one that was taken; `close()` ends it.

    Leaving the loop early frees the workers: they drop what they were preparing.
    """

    def __init__(self, members: Members, method: str, ranks: Sequence[int], sent: tuple[Any, ...]) -> None:
        self._members = members
        self._method = method
        self._key = f"{os.getpid()}-{next(_numbers)}"
        is_async = members.methods[method] is MethodKind.ASYNC_GENERATOR
        self._step = "_roost_stream_async" if is_async else "_roost_stream"
        self._handles = dict(zip(ranks, members.handles(ranks), strict=True))
        self._running = {self._ask(rank, method, *sent): rank for rank in ranks}

    def __iter__(self) -> ItemStream:
        return self

    def __next__(self) -> tuple[int, Any]:
        while self._running:
            self._members.context.check_open()
            ready, _ = ray.wait(list(self._running), num_returns=1)
            # Asked again last, so that a fast worker does not crowd out the others.
            rank = self._running.pop(ready[0])
            try:
                found = ray.get(ready[0])
            except RayError as error:
                rest = list(self._running.values())
                failure = self._members.describe(error, rank)
                self.close()
                raise make_error([failure], f"in {self._method!r}", rest) from None
            if found:
                self._running[self._ask(rank, None)] = rank
                return rank, found[0]
        raise StopIteration

    def close(self) -> None:
        """Drop the rest of the stream."""
        running, self._running = self._running, {}
        if running and self._members.is_reachable:
            for rank in running.values():
                with contextlib.suppress(Exception):
                    self._handles[rank]._roost_end_stream.remote(self._key)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def _ask(self, rank: int, method: str | None, *sent: Any) -> Any:
        return getattr(self._handles[rank], self._step).remote(self._key, method, *sent)
