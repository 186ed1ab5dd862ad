"""The client of a home: asks it to put and to get, as handles that wait for its answer.

`Client` asks a home in another process, over the wire. `LocalClient` has queues in this process. A request has a
number, which its answer comes with, and with which the client acknowledges the items that it got, or gives them back.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import pickle
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from roost.comm.channels.frames import (
    CANCEL,
    ITEM_BYTES,
    Op,
    Packed,
    content_size,
    key_text,
    read_answer,
    write_acknowledgement,
    write_get,
    write_put,
)
from roost.comm.channels.home import ChannelSettings, Home
from roost.comm.channels.queues import Answer, Item, Status, Want
from roost.comm.limits import GRACE_SECONDS
from roost.comm.move.loans import fetched, lending, settle
from roost.comm.packing import pack, pack_many, unpack
from roost.comm.wire.connection import Connection, Frame, Kind, PeerInfo, view
from roost.comm.wire.endpoint import Endpoint
from roost.comm.wire.loop import Handle, Loop, all_of, uninterrupted
from roost.deadline import NEVER, Deadline
from roost.errors import CallTimedOut, ChannelClosed, ClusterError, ConfigError, WorkerFailed
from roost.runtime.failures.meanwhile import with_meanwhile
from roost.text import plural

DEFAULT_KEY = b"tdefault_queue"
_MOST_PUTS = 256
_MOST_BYTES = 1 << 23
"""How many puts of one process that it does not wait for, and how many of their bytes, may be on their way to one key;
the others wait here. Fewer bytes if a home may have fewer."""
_REQUEST = int(Kind.REQUEST)
_ONE = write_acknowledgement(1)
_ALL = write_acknowledgement(0)


class Operation(Handle[Any]):
    """A request to a home."""

    __slots__ = ("client", "is_given_up", "key", "number")

    def __init__(self, client: Client, key: bytes, open_value: Callable[[Any], Any] | None = None) -> None:
        super().__init__(client.loop, open_value)
        self.client = client
        self.key = key
        self.number = 0
        self.is_given_up = False

    def complete(self, value: Frame | Answer) -> None:
        """Take the answer."""
        answer = read_answer(value) if isinstance(value, Frame) else value
        if answer.status is Status.DONE:
            self._succeed(answer)
        else:
            self.fail(self._make_error(answer))

    def source(self) -> Connection | None:
        return self.client.connection

    def waits_for(self) -> str:
        key = "" if self.key == DEFAULT_KEY else f", key {key_text(self.key)}"
        return f"channel {self.client.channel!r}{key}"

    def details(self) -> tuple[str, Sequence[str]]:
        """Say what is missing, and which process keeps the channel."""
        return f"{self._doing()}; it is kept by", [self.client.name]

    def give_up(self) -> None:
        """Withdraw it, or return what it got."""
        self.is_given_up = True
        self.client.cancel(self.number)

    def timed_out(self, timeout: float | None) -> CallTimedOut:
        """Make the error of a wait that was too short; the operation goes on."""
        return CallTimedOut(f"{self._doing()} after {timeout or 0:g} s")

    def unanswered(self, timeout: float, what: str) -> CallTimedOut:
        """Make the error for a home that does not even say what became of the operation."""
        return CallTimedOut(
            f"{self.client.name} does not answer after {timeout:g} s: {what}",
            hint="its process may be stopped, or its node cut off",
        )

    def _succeed(self, answer: Answer) -> None:
        raise NotImplementedError

    def _doing(self) -> str:
        raise NotImplementedError

    def _make_error(self, answer: Answer) -> BaseException:
        channel = self.client.channel
        match answer.status:
            case Status.CLOSED:
                return ChannelClosed(f"the channel {channel!r} is closed")
            case Status.CANCELLED:
                return _Cancelled()
            case Status.EMPTY:
                return asyncio.QueueEmpty()
            case Status.FULL:
                return asyncio.QueueFull()
        return ClusterError(f"the channel {channel!r} could not do this: {self.client.name}: {answer.problem}")


class _Cancelled(Exception):  # noqa: N818 - what happened
    """A request was withdrawn."""


class PutOperation(Operation):
    """Items on their way into a queue."""

    __slots__ = ("accepted", "flow", "is_confirmed", "is_whole", "items", "size", "version", "waits")

    def __init__(
        self,
        client: Client,
        key: bytes,
        items: Sequence[Packed],
        version: int = 0,
        waits: bool = True,
        is_whole: bool = False,
    ) -> None:
        super().__init__(client, key)
        self.items = items
        self.version = version
        self.waits = waits
        self.is_whole = is_whole
        self.size = items[0][2] if len(items) == 1 else sum([item[2] for item in items])
        self.flow: _Flow | None = None
        """What it is sent with, unless it is sent at once."""
        self.is_confirmed = False
        """Whether the home was told to take in a put as a whole: then it cannot be withdrawn any more."""
        self.accepted = 0
        """How many of the items are in the queue, if it ended before all were."""

    def give_up(self) -> None:
        """Withdraw it."""
        with self.client.lock:
            if self.is_confirmed:
                return
            self.is_given_up = True
        self.client.cancel(self.number)

    def fail(self, error: BaseException) -> None:
        if not self.is_done:
            take_back(self.items[self.accepted :])
        if self.flow is not None:
            self.flow.release(self)
        super().fail(error)

    def withdraw(self) -> bool:
        """Take it back: here, if it was not sent yet, or at home; returns whether that is all."""
        if self.flow is not None and self.flow.take_out(self):
            take_back(self.items)
            return True
        self.give_up()
        return False

    def outcome(self, timeout: float) -> CallTimedOut | None:
        """Withdraw it after a timeout; returns the error, or None if all items are in the queue after all."""
        if self.withdraw():
            return self.timed_out(timeout)
        try:
            self.wait(GRACE_SECONDS)
        except _Cancelled:
            put = f", and {plural(self.accepted, 'item')} of {len(self.items)} are in it" if self.accepted else ""
            return CallTimedOut(f"{self.waits_for()} was full for {timeout:g} s{put or '; nothing was put'}")
        except CallTimedOut:
            unknown = f"whether the item is in {self.waits_for()} is not known"
            return self.unanswered(timeout, "nothing was put" if self.is_whole else unknown)
        return None

    def _make_error(self, answer: Answer) -> BaseException:
        self.accepted = answer.accepted
        return super()._make_error(answer)

    def _succeed(self, answer: Answer) -> None:  # noqa: ARG002 - as in the class above
        if self.is_whole:
            with self.client.lock:
                self.is_confirmed = not self.is_given_up
            if not self.is_confirmed:
                self.fail(_Cancelled())
                return
            self.client.acknowledge(self.number)
        if self.flow is not None:
            self.flow.release(self)
        self._end(None, None)

    def _doing(self) -> str:
        return f"{self.waits_for()} has no room for {'an item' if len(self.items) == 1 else 'all items'}"


class GetOperation(Operation):
    """Items on their way out of a queue."""

    __slots__ = ("__weakref__", "want")

    def __init__(self, client: Client, key: bytes, want: Want, open_value: Callable[[Any], Any] | None = None) -> None:
        super().__init__(client, key, open_value)
        self.want = want

    def outcome(self, timeout: float) -> CallTimedOut:
        """Withdraw it after a timeout; returns the error, which says more if the home does not answer."""
        self.give_up()
        is_answered = self._loop.wait_for(self, GRACE_SECONDS)
        return self.timed_out(timeout) if is_answered else self.unanswered(timeout, self._doing())

    def _succeed(self, answer: Answer) -> None:
        self._end(Arrival(self.client, self.number, answer.items), None)

    def _doing(self) -> str:
        if self.want.target is not None:
            return f"{self.waits_for()} has no batch of weight {self.want.target:g}"
        return f"{self.waits_for()} has {'no item' if self.want.least == 1 else f'fewer than {self.want.least} items'}"

    def _make_error(self, answer: Answer) -> BaseException:
        if answer.status is Status.TOO_HEAVY:
            weight, target = answer.weight, self.want.target
            return ConfigError(
                f"the next item of {self.waits_for()} has weight {weight:g}, more than the target {target:g}",
                hint="it stays in the queue: ask for a heavier batch, or take it with get",
            )
        return super()._make_error(answer)


class AsyncGetOperation(GetOperation):
    """A get whose caller has the handle: if it drops the handle, the item goes back, or the request is withdrawn."""

    __slots__ = ()

    def __del__(self) -> None:
        is_taken = self.is_done and (self._open is None or self._error is not None)
        if not is_taken and not self.is_given_up and self.number:
            self.client.cancel_soon(self.number)


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


class Arrival(NamedTuple):
    """Items that arrived, which the client acknowledges or gives back by the number of their request."""

    client: Client
    number: int
    contents: Sequence[Any]


def open_one(arrival: Arrival) -> Any:
    """Return the only item, which the caller acknowledges or gives back."""
    client, number, (content,) = arrival
    try:
        value = client.unpack(content)
    except Exception as error:
        # An item that cannot be unpickled would be in the way of all others for ever.
        client.acknowledge(number)
        raise client.not_opened(error) from error
    client.return_loans()
    return value


def take_one(arrival: Arrival) -> Any:
    """Return the only item, and acknowledge it."""
    value = open_one(arrival)
    arrival.client.acknowledge(arrival.number)
    return value


def take_all(arrival: Arrival) -> list[Any]:
    """Return all items, and acknowledge them; if one cannot be unpickled, all of them go back."""
    client, number, contents = arrival
    if not contents:
        return []
    try:
        found = client.unpack_many(contents)
    except BaseException as error:
        client.cancel(number)
        if isinstance(error, Exception):
            raise client.not_opened(error) from error
        raise
    client.acknowledge(number)
    client.return_loans()
    return found


class Ahead:
    """What an iterator has and has not handed out yet: more than one item, which go back if others wait for them."""

    def __init__(self, arrival: Arrival) -> None:
        self._client, self._number, contents = arrival
        self._lock = threading.Lock()
        self._contents = deque(contents)

    def take(self) -> tuple[Any, ...]:
        """Return the next item in a tuple, acknowledged; nothing if there is none."""
        with self._lock:
            if not self._contents:
                return ()
            content = self._contents.popleft()
            is_last = not self._contents
            self._client.acknowledge(self._number, is_one=True)
        if is_last:
            self._client.expect_recall(self._number, None)
        try:
            return (self._client.unpack(content),)
        except Exception as error:
            raise self._client.not_opened(error) from error
        finally:
            self._client.return_loans()

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
            self._client.expect_recall(self._number, None)
            self._client.cancel(self._number)

    def give_back_soon(self) -> None:
        """Do so in a finalizer."""
        if self._contents:
            self._contents = deque()
            self._client.cancel_soon(self._number)


class AheadOperation(GetOperation):
    """Items for an iterator."""

    __slots__ = ()

    def _succeed(self, answer: Answer) -> None:
        ahead = None if self.is_given_up else Ahead(Arrival(self.client, self.number, answer.items))
        if ahead is not None and len(answer.items) > 1:
            # At once: a recall may be the next thing to arrive.
            self.client.expect_recall(self.number, ahead)
        self._end(ahead, None)


def take_back(items: Iterable[Packed]) -> None:
    """Let go of what was lent for items that are in no queue."""
    for item in items:
        if item[3] is not None:
            item[3].cancel()


class _Flow:
    """The puts under one key that their callers do not wait for, in order: some are on their way, the others here.

    It exists while there are any, and then a put that its caller waits for is sent with them, so that none overtakes.
    """

    __slots__ = ("_bytes", "_client", "_key", "_sending", "_sent", "waiting")

    def __init__(self, client: Client, key: bytes) -> None:
        self._client = client
        self._key = key
        self.waiting: deque[PutOperation] = deque()
        self._sent: set[PutOperation] = set()
        self._bytes = 0
        """Of those that are on their way."""
        self._sending = threading.Lock()
        """Held by the thread that sends; what others add meanwhile, it sends too."""

    def release(self, put: PutOperation) -> None:
        """Note that a put has ended, so that another one may be sent."""
        with self._client.lock:
            if put in self._sent:
                self._sent.remove(put)
                self._bytes -= put.size
            if not self._sent and not self.waiting:
                self._client.flows.pop(self._key, None)
        if self.waiting:
            self.pump()

    def take_out(self, put: PutOperation) -> bool:
        """Take back a put; False if it was sent already."""
        with self._client.lock:
            if put not in self.waiting:
                return False
            self.waiting.remove(put)
            if not self._sent and not self.waiting:
                self._client.flows.pop(self._key, None)
        return True

    def pump(self) -> None:
        """Send the puts that may be sent; one thread at a time does, so that they stay in order."""
        while self._may_send() and self._sending.acquire(blocking=False):
            try:
                while True:
                    with self._client.lock:
                        if not self._may_send():
                            break
                        put = self.waiting.popleft()
                        self._sent.add(put)
                        self._bytes += put.size
                    try:
                        self._client.send_put(put)
                    except Exception as error:
                        put.fail(error)
            finally:
                self._sending.release()

    def _may_send(self) -> bool:
        if not self.waiting or not self._sent:
            return bool(self.waiting)
        return len(self._sent) < _MOST_PUTS and self._bytes + self.waiting[0].size <= self._client.window


class Client:
    """Asks one home for a channel of this process. All of it that touches the wire is here."""

    def __init__(self, endpoint: Endpoint, channel: str, home: int, settings: ChannelSettings) -> None:
        self._endpoint = endpoint
        self._start_empty(endpoint.loop, channel, f"{channel}:{home}", settings)

    def _start_empty(self, loop: Loop, channel: str, name: str, settings: ChannelSettings) -> None:
        self.loop = loop
        self.channel = channel
        self.name = name
        """The address of the home."""
        self.flows: dict[bytes, _Flow] = {}
        self.lock = threading.Lock()
        """Held for moments, while a put joins or leaves a flow."""
        self.window = min(_MOST_BYTES, settings.max_bytes or _MOST_BYTES)

    def put(self, puts: Sequence[PutOperation], async_op: bool, timeout: float | None) -> Handle[None] | None:
        """Put something, in order; returns when all is in the queue, or at once with a handle.

        If one of the puts fails, the later ones are withdrawn.
        """
        is_one = len(puts) == 1
        deadline = NEVER if timeout is None else Deadline.after(timeout)
        try:
            if is_one and not async_op and puts[0].key not in self.flows:
                self.send_put(puts[0])
            else:
                with uninterrupted():
                    for put in puts:
                        with self.lock:
                            flow = self.flows.get(put.key)
                            if flow is None:
                                flow = self.flows[put.key] = _Flow(self, put.key)
                            flow.waiting.append(put)
                            put.flow = flow
                        flow.pump()
            if async_op:
                return puts[0] if is_one else all_of(self.loop, puts, None, "not all items are in the channel")
            for put in puts:
                try:
                    put.wait(deadline.timeout)
                except CallTimedOut as error:
                    if put.error is error:
                        raise
                    # It may be in the queue by now.
                    late = put.outcome(timeout or 0)
                    if late is not None:
                        raise with_meanwhile(late) from None
        except BaseException:
            for put in puts:
                if not put.is_done:
                    put.withdraw()
            raise
        return None

    def get(self, get: GetOperation, take: Callable[[Any], Any], timeout: float | None) -> Any:
        """Get something; returns what `take` makes of what arrives, or raises and takes nothing."""
        try:
            self.send_get(get, get)
            return take(get.wait(timeout))
        except BaseException as error:
            if get.is_done:
                if get.error is None:
                    # Interrupted: what is not acknowledged yet goes back.
                    get.give_up()
                raise
            if isinstance(error, CallTimedOut):
                raise with_meanwhile(get.outcome(timeout or 0)) from None
            get.give_up()
            raise

    def get_async(self, key: bytes, want: Want, take: Callable[[Any], Any]) -> Handle[Any]:
        """Get something with a handle; if that is dropped, it takes nothing."""
        get = AsyncGetOperation(self, key, want, take)
        self.send_get(get, _WeakSink(get))
        return get

    async def await_get(self, get: GetOperation, take: Callable[[Any], Any], timeout: float | None) -> Any:
        """Do the same in a coroutine."""
        try:
            self.send_get(get, get)
            return take(await get.async_wait(timeout))
        except BaseException:
            if get.error is None:
                get.give_up()
            raise

    def not_opened(self, error: Exception) -> Exception:
        """Make the error for an item that cannot be unpickled."""
        return WorkerFailed(
            f"an item of channel {self.channel!r} cannot be unpickled: {type(error).__name__}: {error}",
            hint="the process that gets it needs the modules and classes of the one that put it",
        )

    @property
    def connection(self) -> Connection | None:
        """The connection that answers come through, if it is open."""
        peer = self._endpoint.peers.get(self.name)
        return peer.connection if peer is not None else None

    def pack(self, thing: Any, weight: float) -> Packed:
        """Make an item of an object."""
        lent = lending(self._endpoint) if "torch" in sys.modules else None
        content = pack(thing, lent)
        return content, weight, content_size(*content), lent if lent is not None and lent.number else None

    def pack_many(self, things: Sequence[Any], weights: Sequence[float]) -> list[Packed]:
        """Make items of objects."""
        if "torch" not in sys.modules:
            return [
                (content, weight, content_size(*content), None)
                for content, weight in zip(pack_many(things), weights, strict=True)
            ]
        packed: list[Packed] = []
        try:
            for thing, weight in zip(things, weights, strict=True):
                packed.append(self.pack(thing, weight))
        except BaseException:
            take_back(packed)
            raise
        return packed

    def unpack(self, content: Any) -> Any:
        """Make the object again."""
        data, buffers = content[0], content[1]
        if buffers:
            return unpack(data, [view(buffer) for buffer in buffers])
        return pickle.loads(data)  # noqa: S301 - from a member of this job

    def unpack_many(self, contents: Sequence[Any]) -> list[Any]:
        """Make the objects again."""
        if any(content[1] for content in contents):
            return [self.unpack(content) for content in contents]
        return [pickle.loads(content[0]) for content in contents]  # noqa: S301 - likewise

    def return_loans(self) -> None:
        """Return the tensors on devices that this thread has copied while it unpacked."""
        if "torch" in sys.modules:
            settle(fetched())

    def send_put(self, put: PutOperation) -> None:
        """Ask for items to be put; the reply completes the put."""
        envelope, data, buffers = write_put(put.key, put.items, put.waits, put.is_whole, put.version)
        self._request(envelope, data, buffers, put, put)

    def send_get(self, get: GetOperation, sink: Any) -> None:
        """Ask for items; the reply completes the sink."""
        self._request(write_get(get.key, get.want), b"", (), sink, get)

    def acknowledge(self, number: int, *, is_one: bool = False) -> None:
        """Say that the items of a request arrived, or the first that was not acknowledged yet."""
        self._tell(number, _ONE if is_one else _ALL)

    def cancel(self, number: int) -> None:
        """End a request; what it got and did not acknowledge goes back."""
        if not self._endpoint.is_closed:
            self._tell(number, CANCEL)

    def cancel_soon(self, number: int) -> None:
        """Do so later, in another thread: safe in a finalizer."""
        self.loop.call(lambda: self.cancel(number))

    def expect_recall(self, number: int, sink: Any) -> None:
        """Take a second reply to a request; None to stop that."""
        peer = self._endpoint.peers.get(self.name)
        if peer is not None and sink is None:
            peer.requests.pop(number, None)
        elif peer is not None:
            peer.requests[number] = sink

    def ask(self, op: Op, *arguments: Any) -> Handle[Any]:
        """Ask something that is not about items."""
        handle: Handle[Any] = Handle(self.loop, _open_answer, lambda: f"{self.name} has not answered")
        self._request(bytes([op]) + pickle.dumps(arguments), b"", (), handle)
        return handle

    def _request(
        self, envelope: bytes, data: Any, buffers: Sequence[Any], sink: Any, operation: Operation | None = None
    ) -> None:
        endpoint = self._endpoint
        number = next(endpoint.numbers)
        if operation is not None:
            # Before the reply, and before anything can interrupt what follows.
            operation.number = number
        (endpoint.peers.get(self.name) or endpoint.peer(self.name)).request(number, envelope, data, buffers, sink)

    def _tell(self, number: int, envelope: bytes) -> None:
        endpoint = self._endpoint
        (endpoint.peers.get(self.name) or endpoint.peer(self.name)).send(_REQUEST, number, envelope)


def _open_answer(frame: Frame) -> Any:
    answer = read_answer(frame)
    if answer.status is Status.FAILED:
        raise ClusterError(f"the home of a channel could not answer: {answer.problem}")
    return pickle.loads(frame.data)  # noqa: S301 - from a member of this job


class LocalClient(Client):
    """The same with queues in this process. What is put is what is got: the object itself, not a copy."""

    def __init__(self, name: str, settings: ChannelSettings) -> None:
        self._start_empty(_loop_of(os.getpid()), name, name, settings)
        self.settings = settings
        self._home = Home(PeerInfo(address=name, instance=_HERE, node=_HERE), settings, name)
        self._queues = self._home.queues
        self._numbers = itertools.count(1)
        self._sinks: dict[int, Any] = {}
        self._steps: deque[Callable[[], Sequence[Any]]] = deque()
        self._busy = threading.Lock()

    @property
    def connection(self) -> Connection | None:
        return None

    def pack(self, thing: Any, weight: float) -> Packed:
        return thing, weight, ITEM_BYTES + max(getattr(thing, "nbytes", 0), sys.getsizeof(thing, 0)), None

    def pack_many(self, things: Sequence[Any], weights: Sequence[float]) -> list[Packed]:
        return [self.pack(thing, weight) for thing, weight in zip(things, weights, strict=True)]

    def unpack(self, content: Any) -> Any:
        return content

    def unpack_many(self, contents: Sequence[Any]) -> list[Any]:
        return list(contents)

    def send_put(self, put: PutOperation) -> None:
        put.number = number = next(self._numbers)
        self._sinks[number] = put
        items = [Item(thing, weight, size, put.version) for thing, weight, size, _ in put.items]
        self._do(lambda: self._queues.put(_HERE, number, put.key, items, put.waits, put.is_whole))

    def send_get(self, get: GetOperation, sink: Any) -> None:
        get.number = number = next(self._numbers)
        self._sinks[number] = sink
        key, want = get.key, get.want
        self._do(lambda: self._queues.get(_HERE, number, key, want))

    def acknowledge(self, number: int, *, is_one: bool = False) -> None:
        self._do(lambda: self._queues.acknowledge(_HERE, number, 1 if is_one else 0))

    def cancel(self, number: int) -> None:
        self._do(lambda: self._queues.cancel(_HERE, number))

    def cancel_soon(self, number: int) -> None:
        self.cancel(number)

    def expect_recall(self, number: int, sink: Any) -> None:
        if sink is None:
            self._sinks.pop(number, None)
        else:
            self._sinks[number] = sink

    def ask(self, op: Op, *arguments: Any) -> Handle[Any]:
        handle: Handle[Any] = Handle(self.loop)

        def answer() -> Sequence[Any]:
            value, events = self._home.ask(op, arguments)
            handle.complete(value)
            return events

        self._do(answer)
        return handle

    def _do(self, step: Callable[[], Sequence[Any]]) -> None:
        """Take a step, one at a time, in the order in which they were asked for.

        A step that a finalizer or a callback asks for in the middle of another one is taken after that.
        """
        self._steps.append(step)
        while self._steps and self._busy.acquire(blocking=False):
            try:
                while self._steps:
                    for event in self._steps.popleft()():
                        sink = self._sinks.pop(event.number, None)
                        if isinstance(event, Answer):
                            event = event._replace(items=[item.content for item in event.items])
                        if sink is not None:
                            sink.complete(event)
                (_in_use.discard if self._queues.is_empty else _in_use.add)(self)
            finally:
                self._busy.release()


_HERE = "this process"
_in_use: set[LocalClient] = set()
"""Local queues that have items, even if no object refers to them now."""


@functools.cache
def _loop_of(pid: int) -> Loop:  # noqa: ARG001 - a fork has one of its own
    """Return what threads of a process wait with; it reads nothing, and needs no thread."""
    return Loop("roost-local")
