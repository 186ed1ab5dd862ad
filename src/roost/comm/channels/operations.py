"""Puts and gets that are under way, as handles."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

from roost.comm.channels.queues import Item, Status, Want
from roost.comm.channels.routes import Route, take_back
from roost.comm.move.loans import Fetched, fetched, settle
from roost.comm.wire.loop import Handle, Loop, Source
from roost.errors import CallTimedOut, ChannelClosed, ClusterError, ConfigError, WorkerFailed
from roost.text import plural

Place = tuple[int, int]
"""The home where a key lives, and which assignment that is."""
GRACE_SECONDS = 1.0
"""How long a call that timed out waits to learn what became of it."""


class Owner(Protocol):
    """The channel of an operation."""

    @property
    def name(self) -> str:
        """Its name."""

    def move(self, operation: Operation) -> None:
        """Find out where a key lives now, and start an operation there."""

    def place_of(self, key: Hashable) -> Place | None:
        """Return where a key lives, as far as is known."""

    def known_route(self, key: Hashable) -> Route:
        """Return the way to the home where a key was last."""

    def release(self, put: PutOperation) -> None:
        """Let another put have its place."""


class Operation(Handle[Any]):
    """A request to a channel."""

    __slots__ = ("_owner", "is_given_up", "key", "number", "place", "route")

    def __init__(self, owner: Owner, loop: Loop, key: Hashable, open_value: Callable[[Any], Any] | None = None) -> None:
        super().__init__(loop, open_value)
        self._owner = owner
        self.key = key
        self.number = 0
        self.route: Route | None = None
        self.place: Place | None = None
        self.is_given_up = False

    def start(self, route: Route) -> None:
        """Send the request."""
        self.route = route
        self.place = self._owner.place_of(self.key)
        self.number = route.number()
        self._send(route)

    def _send(self, route: Route) -> None:
        raise NotImplementedError

    def complete(self, value: Any) -> None:
        """Take the reply."""
        route = self.route
        if route is None:
            return
        status, count, weight = route.read(value)
        if status is Status.DONE:
            self._succeed(route, value)
        elif status is Status.MOVED and not self.is_given_up:
            self._owner.move(self)
        else:
            self.fail(self._make_error(route, value, status, count, weight))

    def source(self) -> Source | None:
        return self.route.connection if self.route is not None else None

    def waits_for(self) -> str:
        return self._where

    def give_up(self) -> None:
        """Withdraw it, or return what it got."""
        self.is_given_up = True
        if self.route is not None:
            self.route.cancel(self.number)

    def timed_out(self, timeout: float | None) -> CallTimedOut:
        """Make the error of a wait that was too short; the operation goes on."""
        return CallTimedOut(f"{self._doing()} after {timeout or 0:g} s")

    def _succeed(self, route: Route, reply: Any) -> None:
        raise NotImplementedError

    def _doing(self) -> str:
        raise NotImplementedError

    def _make_error(self, route: Route, reply: Any, status: Status, count: int, weight: float) -> BaseException:
        del weight  # of an item that is too heavy for a get
        if status is Status.CLOSED:
            return ChannelClosed(f"the channel {self._owner.name!r} is closed")
        if status is Status.CANCELLED or status is Status.MOVED:
            return _Cancelled(count)
        if status is Status.FAILED:
            return ClusterError(f"the channel {self._owner.name!r} could not do this: {route.read_failure(reply)}")
        return asyncio.QueueEmpty() if status is Status.EMPTY else asyncio.QueueFull()

    @property
    def _where(self) -> str:
        key = f", key {self.key!r}" if self.key != DEFAULT_KEY else ""
        return f"channel {self._owner.name!r}{key}"


DEFAULT_KEY = "default_queue"


class _Cancelled(Exception):  # noqa: N818 - what happened
    """A request was withdrawn."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count


class PutOperation(Operation):
    """Items on their way into a queue."""

    __slots__ = ("accepted", "has_place", "items", "size", "waits")

    def __init__(self, owner: Owner, loop: Loop, key: Hashable, items: Sequence[Item], waits: bool) -> None:
        super().__init__(owner, loop, key)
        self.items = items
        self.waits = waits
        self.size = sum(item.size for item in items)
        self.has_place = False
        self.accepted = 0
        """How many of the items are in the queue, if it ended before all were."""

    def send(self) -> None:
        """Start it where its key was last."""
        self.start(self._owner.known_route(self.key))

    def _send(self, route: Route) -> None:
        route.put(self.number, self.key, self.items, self.waits, self)

    def fail(self, error: BaseException) -> None:
        if not self.is_done:
            take_back(self.items[self.accepted :])
        self._owner.release(self)
        super().fail(error)

    def outcome(self, timeout: float) -> CallTimedOut | None:
        """Withdraw it after a timeout; returns the error, or None if all items are in the queue after all."""
        self.give_up()
        try:
            self.wait(GRACE_SECONDS)
        except _Cancelled as cancelled:
            accepted = (
                f", and {plural(cancelled.count, 'item')} of {len(self.items)} are in it" if cancelled.count else ""
            )
            return CallTimedOut(f"{self._where} was full for {timeout:g} s{accepted or '; nothing was put'}")
        except CallTimedOut:
            home = self.route.name if self.route is not None else self._owner.name
            return CallTimedOut(
                f"{home} does not answer after {timeout:g} s: whether the item is in {self._where} is not known",
                hint="its process may be stopped, or its node cut off",
            )
        return None

    def _make_error(self, route: Route, reply: Any, status: Status, count: int, weight: float) -> BaseException:
        self.accepted = count
        return super()._make_error(route, reply, status, count, weight)

    def _succeed(self, route: Route, reply: Any) -> None:  # noqa: ARG002 - as in the class above
        self._owner.release(self)
        self._end(None, None)

    def _doing(self) -> str:
        return f"{self._where} has no room for {'an item' if len(self.items) == 1 else 'all items'}"


class GetOperation(Operation):
    """Items on their way out of a queue."""

    __slots__ = ("__weakref__", "want")

    def __init__(self, owner: Owner, loop: Loop, key: Hashable, want: Want, open_value: Callable[[Any], Any]) -> None:
        super().__init__(owner, loop, key, open_value)
        self.want = want

    def _send(self, route: Route) -> None:
        route.get(self.number, self.key, self.want, self)

    def outcome(self, timeout: float) -> CallTimedOut:
        """Withdraw it after a timeout; returns the error, which says more if the home answers."""
        error = self.timed_out(timeout)
        self.give_up()
        try:
            self._loop.wait_for(self, GRACE_SECONDS)
        finally:
            if not self.is_done and self.route is not None:
                error = CallTimedOut(
                    f"{self.route.name} does not answer after {timeout:g} s: {self._doing()}",
                    hint="its process may be stopped, or its node cut off",
                )
        return error

    def _succeed(self, route: Route, reply: Any) -> None:
        self._end(Arrival(route, self.number, reply, self._owner.name), None)

    def _doing(self) -> str:
        if self.want.target is not None:
            return f"{self._where} has no batch of weight {self.want.target:g}"
        return f"{self._where} has {'no item' if self.want.least == 1 else f'fewer than {self.want.least} items'}"

    def _make_error(self, route: Route, reply: Any, status: Status, count: int, weight: float) -> BaseException:
        if status is Status.TOO_HEAVY:
            return ConfigError(
                f"the next item of {self._where} has weight {weight:g}, more than the target {self.want.target:g}",
                hint="it stays in the queue: ask for a heavier batch, or take it with get",
            )
        return super()._make_error(route, reply, status, count, weight)


class AsyncGetOperation(GetOperation):
    """A get whose caller has the handle: if it drops the handle, the item goes back, or the request is withdrawn."""

    __slots__ = ()

    def _send(self, route: Route) -> None:
        route.get(self.number, self.key, self.want, _WeakSink(self))

    def __del__(self) -> None:
        is_taken = self.is_done and (self._open is None or self._error is not None)
        if not is_taken and not self.is_given_up and self.route is not None:
            self.route.cancel_soon(self.number)


class _WeakSink:
    """Takes the reply for a handle, if that still exists."""

    __slots__ = ("_handle",)

    def __init__(self, handle: AsyncGetOperation) -> None:
        self._handle = weakref.ref(handle)

    def complete(self, value: Any) -> None:
        handle = self._handle()
        if handle is not None:
            handle.complete(value)

    def fail(self, error: BaseException) -> None:
        handle = self._handle()
        if handle is not None:
            handle.fail(error)


class Arrival:
    """Items that arrived and are not acknowledged yet."""

    __slots__ = ("_loans", "_number", "_reply", "channel", "route")

    def __init__(self, route: Route, number: int, reply: Any, channel: str) -> None:
        self.route = route
        self.channel = channel
        self._loans: Fetched = {}
        self._number = number
        self._reply = reply

    def contents(self) -> Sequence[Any]:
        """Return the items as they arrived."""
        return self.route.contents(self._reply)

    def open(self) -> list[Any]:
        """Make the objects of the items."""
        try:
            return self.route.unpack_many(self.contents())
        finally:
            self._loans |= fetched()

    def acknowledge(self) -> None:
        """Say that they arrived: they are gone from the queue, and nobody else fetches their tensors."""
        self.route.acknowledge(self._number, is_one=False)
        settle(self._loans)

    def give_back(self) -> None:
        """Let them go back to the front of the queue."""
        self.route.cancel(self._number)


def _not_opened(channel: str, error: Exception) -> Exception:
    return WorkerFailed(
        f"an item of channel {channel!r} cannot be unpickled: {type(error).__name__}: {error}",
        hint="the process that gets it needs the modules and classes of the one that put it",
    )


def take_one(arrival: Arrival) -> Any:
    """Return the only item, and acknowledge it."""
    value, _ = take_leased(arrival)
    arrival.acknowledge()
    return value


def take_all(arrival: Arrival) -> list[Any]:
    """Return all items, and acknowledge them; if one cannot be unpickled, all of them go back."""
    if not arrival.contents():
        return []
    try:
        found = arrival.open()
    except BaseException as error:
        arrival.give_back()
        if isinstance(error, Exception):
            raise _not_opened(arrival.channel, error) from error
        raise
    arrival.acknowledge()
    return found


def take_leased(arrival: Arrival) -> tuple[Any, Arrival]:
    """Return the only item, to be acknowledged by the caller."""
    try:
        (value,) = arrival.open()
    except Exception as error:
        # One that cannot be unpickled would be in the way of all others for ever.
        arrival.acknowledge()
        raise _not_opened(arrival.channel, error) from error
    return value, arrival


class AheadOperation(GetOperation):
    """Items for an iterator: more than one, which it returns if others wait for them."""

    __slots__ = ()

    def _succeed(self, route: Route, reply: Any) -> None:
        # The sink of a recall is there at once: that may be the next thing to arrive.
        self._end(None if self.is_given_up else Ahead(route, self.number, reply, self._owner.name), None)


class Ahead:
    """What an iterator has and has not handed out yet."""

    def __init__(self, route: Route, number: int, reply: Any, channel: str) -> None:
        self._route = route
        self._number = number
        self._channel = channel
        self._lock = threading.Lock()
        self._contents = deque(route.contents(reply))
        if len(self._contents) > 1:
            route.expect_recall(number, self)

    def take(self) -> tuple[Any, ...]:
        """Return the next item in a tuple, acknowledged; nothing if there is none."""
        with self._lock:
            if not self._contents:
                return ()
            content = self._contents.popleft()
            is_last = not self._contents
            self._route.acknowledge(self._number, is_one=True)
        if is_last:
            self._route.expect_recall(self._number, None)
        try:
            return (self._route.unpack(content),)
        except Exception as error:
            raise _not_opened(self._channel, error) from error
        finally:
            settle(fetched())

    def complete(self, value: Any) -> None:  # noqa: ARG002 - the home says no more than that
        """Return what is left: others wait for it."""
        self.give_back()

    def fail(self, error: BaseException) -> None:  # noqa: ARG002 - the next request of the iterator fails too
        """Drop what is left: the home is gone, or has taken it back."""
        with self._lock:
            self._contents.clear()

    def give_back(self) -> None:
        """Return what is left."""
        with self._lock:
            if not self._contents:
                return
            self._contents.clear()
            self._route.cancel(self._number)

    def give_back_soon(self) -> None:
        """Do so in a finalizer."""
        if self._contents:
            self._contents = deque()
            self._route.cancel_soon(self._number)


def take_ahead(ahead: Ahead) -> Ahead:
    """Return it as it is."""
    return ahead
