"""The items of a generator method as they come from many workers, each at most one step ahead of the caller."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError

from roost.deadline import Deadline
from roost.runtime.connect.calls import get
from roost.runtime.events.waits import waiting
from roost.runtime.failures.failure import asked_at, make_error
from roost.runtime.failures.meanwhile import with_meanwhile
from roost.runtime.groups.result import check_seconds, timed_out, wait_for
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
        self._sources = sent.sources
        # An object of this process: its id is unique in the world, and workers can tell whether its owner is alive.
        self._token = ray.put(None)
        self._key = self._token.hex()
        is_async = members.methods[method] is MethodKind.ASYNC_GENERATOR
        self._step = "_roost_stream_async" if is_async else "_roost_stream"
        self._asked = asked_at()
        self._ranks = tuple(ranks)
        self._handles: dict[int, ActorHandle[Any]] = {}
        self._running: dict[Any, int] = {}
        self._to_send: Sent | None = sent
        # Otherwise it begins when they are back and the first item is asked for.
        if not members.restarting(ranks):
            self._begin(sent)

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
        running, self._running, self._to_send = self._running, {}, None
        if running and not self._members.is_closed and self._members.context.is_connected:
            for rank in running.values():
                with contextlib.suppress(Exception):
                    self._handles[rank]._roost_end_stream.remote(self._key)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def _take(self, seconds: float | None) -> tuple[int, Any] | None:
        """Wait for the next item and return it with its rank, or None at the end of the stream."""
        context, deadline, rank = self._members.context, Deadline.after(seconds), -1
        late: set[int] = set()
        try:
            if self._to_send is not None:
                if late := self._members.restarting(self._ranks, deadline):
                    raise GetTimeoutError
                self._begin(self._to_send)
            while self._running:
                with waiting(lambda: f"{self._members.name}, {self._method}", details=self._details), context.stop:
                    (ready,) = wait_for(context, list(self._running), 1, deadline)
                    rank = self._running[ready]
                    found = get(ready, deadline.timeout)
                # Asked again last, so that a fast worker does not crowd out the others.
                del self._running[ready]
                if found:
                    self._running[self._ask(rank)] = rank
                    return rank, found[0]
        except GetTimeoutError:
            hint = "the workers go on: ask for the next item again, or close() the stream"
            ranks = sorted(late or self._running.values())
            error = timed_out(self._members, self._method, seconds, ranks, len(self._ranks), hint, self._asked)
            raise error from None
        except RayError as error:
            rest = [other for other in self._running.values() if other != rank]
            failure = self._members.describe(error, rank, self._method, self._sources)
            self.close()
            context.failures.saw([failure])
            raise with_meanwhile(make_error([failure], f"in {self._method!r}", rest, self._asked)) from None
        return None

    def _details(self) -> tuple[str, list[str]]:
        what = f"an item of {self._method!r} of {self._members.name!r}{self._asked and f', {self._asked}'}"
        return f"{what}, from", [self._members.identity(rank).address for rank in sorted(self._running.values())]

    def _begin(self, sent: Sent) -> None:
        self._to_send = None
        self._handles = dict(zip(self._ranks, self._members.handles(self._ranks), strict=True))
        # In a list, where Ray leaves a reference as it is.
        self._running = {self._ask(rank, self._method, [self._token], *sent.arguments): rank for rank in self._ranks}

    def _ask(self, rank: int, *begin: Any) -> Any:
        return getattr(self._handles[rank], self._step).remote(self._key, *begin)
