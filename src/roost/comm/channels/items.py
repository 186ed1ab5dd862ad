"""What a `Channel` hands out over time: an item for a block, and all items in a loop."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Hashable, Iterator
from types import TracebackType
from typing import Any, Protocol

from roost.comm.channels.operations import (
    Ahead,
    AheadOperation,
    Arrival,
    AsyncGetOperation,
    GetOperation,
    Owner,
    take_ahead,
    take_leased,
)
from roost.comm.channels.queues import Want
from roost.comm.channels.routes import Route
from roost.errors import CallTimedOut, ChannelClosed

ONE = Want()
_AHEAD = Want(most=64, ahead=True)


class Source(Owner, Protocol):
    """The channel of a lease or an iterator."""

    def route_of(self, key: Hashable) -> Route:
        """Return the way to the home of a key."""


def wait_get(get: GetOperation, route: Route, seconds: float | None) -> Any:
    """Start a get and return what it takes; CallTimedOut after so many seconds."""
    try:
        get.start(route)
        return get.wait(seconds)
    except CallTimedOut as late:
        if get.error is late:
            raise
        raise get.outcome(seconds or 0) from None
    except KeyboardInterrupt:
        get.give_up()
        raise


async def _await_get(get: GetOperation, route: Route, seconds: float | None) -> Any:
    try:
        get.start(route)
        return await get.async_wait(seconds)
    except BaseException:
        get.give_up()
        raise


class ItemLease:
    """An item that goes back to the queue unless the block around it ends well."""

    def __init__(self, channel: Source, key: Hashable, seconds: float | None) -> None:
        self._channel = channel
        self._key = key
        self._seconds = seconds
        self._arrival: Arrival | None = None

    def __enter__(self) -> Any:
        route = self._channel.route_of(self._key)
        get = GetOperation(self._channel, route.loop, self._key, ONE, take_leased)
        item, self._arrival = wait_get(get, route, self._seconds)
        return item

    async def __aenter__(self) -> Any:
        route = self._channel.route_of(self._key)
        get = AsyncGetOperation(self._channel, route.loop, self._key, ONE, take_leased)
        item, self._arrival = await _await_get(get, route, self._seconds)
        return item

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        arrival, self._arrival = self._arrival, None
        if arrival is None:
            return
        if kind is None:
            arrival.acknowledge()
        else:
            arrival.give_back()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)


class ChannelIterator(Iterator[Any], AsyncIterator[Any]):
    """The items of a channel, until it is closed and all of them are taken."""

    def __init__(self, channel: Source, key: Hashable, seconds: float | None) -> None:
        self._channel = channel
        self._key = key
        self._seconds = seconds
        self._ahead: Ahead | None = None

    def __iter__(self) -> ChannelIterator:
        return self

    def __aiter__(self) -> ChannelIterator:
        return self

    def __next__(self) -> Any:
        while True:
            found = self._ahead.take() if self._ahead is not None else ()
            if found:
                return found[0]
            route = self._channel.route_of(self._key)
            get = AheadOperation(self._channel, route.loop, self._key, _AHEAD, take_ahead)
            try:
                self._ahead = wait_get(get, route, self._seconds)
            except ChannelClosed:
                raise StopIteration from None

    async def __anext__(self) -> Any:
        while True:
            found = self._ahead.take() if self._ahead is not None else ()
            if found:
                return found[0]
            route = self._channel.route_of(self._key)
            get = AheadOperation(self._channel, route.loop, self._key, _AHEAD, take_ahead)
            try:
                self._ahead = await _await_get(get, route, self._seconds)
            except ChannelClosed:
                raise StopAsyncIteration from None

    def close(self) -> None:
        """Return the items that the loop did not get; the end of the loop does that, too."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.give_back()

    def __del__(self) -> None:
        ahead = getattr(self, "_ahead", None)
        if ahead is not None:
            with contextlib.suppress(Exception):
                ahead.give_back_soon()
