"""The client of a home: asks it to put and to get, as handles that wait for its answer.

`Client` asks a home in another process, over the wire. `LocalClient` has queues in this process. A request has a
number, which its answer comes with, and with which the client acknowledges the items that it got, or gives them back.
"""

from __future__ import annotations

import asyncio
import copy
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

from roost.comm.channels.frames import ITEM_BYTES, Op, Packed, content_size, key_text, read_answer, write_request
from roost.comm.channels.home import ChannelSettings, Home
from roost.comm.channels.queues import Answer, Item, SetAside, Status, Want
from roost.comm.limits import GRACE_SECONDS
from roost.comm.move.loans import fetched, lending, settle
from roost.comm.packing import pack, pack_many, unpack
from roost.comm.wire.connection import Connection, Frame, Kind, PeerInfo, view
from roost.comm.wire.endpoint import Endpoint
from roost.comm.wire.loop import Handle, Loop, all_of, check_timeout, uninterrupted
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


class Operation(Handle[Any]):
    """A request to a home."""

    __slots__ = ("accepted", "client", "is_given_up", "key", "number")

    def __init__(self, client: Client, key: bytes, open_value: Callable[[Any], Any] | None = None) -> None:
        super().__init__(client.loop, open_value)
        self.client = client
        self.key = key
        self.number = 0
        self.is_given_up = False
        self.accepted = 0
        """How many items of a put are in the queue, if it ended before all were."""

    def complete(self, value: Frame | Answer) -> None:
        """Take the answer."""
        answer = read_answer(value) if isinstance(value, Frame) else value
        if answer.status is Status.DONE:
            self._succeed(answer)
        else:
            self.accepted = answer.accepted
            self.fail(self._make_error(answer))

    def source(self) -> Connection | None:
        return self.client.connection

    def waits_for(self) -> str:
        key = "" if self.key == DEFAULT_KEY else f", key {key_text(self.key)}"
        return f"channel {self.client.channel!r}{key}"

    def details(self) -> tuple[str, Sequence[str]]:
        """Say what is missing, and which process keeps the channel."""
        return f"{self.missing()}; it is kept by", [self.client.name]

    def unanswered(self, timeout: float | None, what: str) -> CallTimedOut:
        """Make the error for a home that does not even say what became of the operation."""
        return CallTimedOut(
            f"{self.client.name} does not answer after {timeout or 0:g} s: {what}",
            hint="its process may be stopped, or its node cut off",
        )

    def _succeed(self, answer: Answer) -> None:
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

    __slots__ = ("flow", "is_confirmed", "is_whole", "items", "size", "version", "waits")

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
        """The flow that sends it, unless it is sent at once."""
        self.is_confirmed = False
        """Whether the home was told to take in a put as a whole: then it cannot be withdrawn any more."""

    def fail(self, error: BaseException) -> None:
        if not self.is_done:
            take_back(self.items[self.accepted :])
        if self.flow is not None:
            self.flow.ended(self)
        super().fail(error)

    def withdraw(self) -> bool:
        """Take it back: here, if it was not sent yet, or at home; returns whether that is all."""
        if self.flow is not None and self.flow.take_out(self):
            take_back(self.items)
            return True
        with self.client.lock:
            if self.is_confirmed:
                return False
            self.is_given_up = True
        self.client.cancel(self.number)
        return False

    def outcome(self, timeout: float | None) -> CallTimedOut | None:
        """Withdraw it after a timeout; returns the error, or None if all items are in the queue after all."""
        if self.withdraw():
            return self.timed_out(timeout)
        try:
            self.wait(GRACE_SECONDS)
        except _Cancelled:
            put = f", and {plural(self.accepted, 'item')} of {len(self.items)} are in it" if self.accepted else ""
            return CallTimedOut(f"{self.waits_for()} was full for {timeout or 0:g} s{put or '; nothing was put'}")
        except CallTimedOut:
            unknown = f"whether the item is in {self.waits_for()} is not known"
            return self.unanswered(timeout, "nothing was put" if self.is_whole else unknown)
        return None

    def missing(self) -> str:
        return f"{self.waits_for()} has no room for {'an item' if len(self.items) == 1 else 'all items'}"

    def _succeed(self, answer: Answer) -> None:  # noqa: ARG002 - as in the class above
        if self.is_whole:
            with self.client.lock:
                self.is_confirmed = not self.is_given_up
            if not self.is_confirmed:
                self.fail(_Cancelled())
                return
            self.client.acknowledge(self.number)
        if self.flow is not None:
            self.flow.ended(self)
        self._end(None, None)


class GetOperation(Operation):
    """Items on their way out of a queue."""

    __slots__ = ("__weakref__", "want")

    def __init__(self, client: Client, key: bytes, want: Want, open_value: Callable[[Any], Any] | None = None) -> None:
        super().__init__(client, key, open_value)
        self.want = want

    def give_up(self) -> None:
        """Withdraw it, or return what it got."""
        self.is_given_up = True
        if self.is_done and self.want.ahead:
            self.client.sinks.pop(self.number, None)
        self.client.cancel(self.number)

    def missing(self) -> str:
        if self.want.target is not None:
            return f"{self.waits_for()} has no batch of weight {self.want.target:g}"
        return f"{self.waits_for()} has {'no item' if self.want.least == 1 else f'fewer than {self.want.least} items'}"

    def _succeed(self, answer: Answer) -> None:
        arrival = Arrival(self.client, self.number, answer.items)
        if not self.want.ahead or self.is_given_up:
            self._end(arrival, None)
            return
        ahead = Ahead(arrival)
        if len(answer.items) > 1:
            # At once: a recall may be the next thing to arrive.
            self.client.sinks[self.number] = ahead
        self._end(ahead, None)

    def _make_error(self, answer: Answer) -> BaseException:
        if answer.status is Status.TOO_HEAVY:
            weight, target = answer.weight, self.want.target
            return ConfigError(
                f"the next item of {self.waits_for()} has weight {weight:g}, more than the target {target:g}",
                hint="it stays in the queue: ask for a heavier batch, or take it with get",
            )
        return super()._make_error(answer)


class AsyncGetOperation(GetOperation):
    """A get whose caller has the handle: if it drops the handle, the item goes back, or the request is withdrawn.

    Only these have a finalizer, which swallows what a handler of a signal raises in it.
    """

    __slots__ = ()

    def __del__(self) -> None:
        is_taken = self.is_done and (self._open is None or self.error is not None)
        if not is_taken and not self.is_given_up and self.number:
            self.client.cancel_soon(self.number)


class _WeakSink:
    """Takes the reply for a handle, if that still exists."""

    __slots__ = ("_handle",)

    def __init__(self, handle: GetOperation) -> None:
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
    _return_loans()
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
    _return_loans()
    return found


def _return_loans() -> None:
    """Return the tensors on devices that this thread has copied while it unpacked."""
    if "torch" in sys.modules:
        settle(fetched())


class Ahead:
    """Items that an iterator has taken ahead, more than one, which go back if others wait for them."""

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
            self._client.acknowledge(self._number, 1)
        if is_last:
            self._client.sinks.pop(self._number, None)
        try:
            return (self._client.unpack(content),)
        except Exception as error:
            raise self._client.not_opened(error) from error
        finally:
            _return_loans()

    def complete(self, value: Any = None) -> None:  # noqa: ARG002 - the home says no more than that
        """Return what is left: others wait for it, or the loop is over."""
        with self._lock:
            if self._contents:
                self._contents.clear()
                self._client.sinks.pop(self._number, None)
                self._client.cancel(self._number)

    def complete_soon(self) -> None:
        """Do so in a finalizer."""
        if self._contents:
            self._contents.clear()
            self._client.sinks.pop(self._number, None)
            self._client.cancel_soon(self._number)

    def fail(self, error: BaseException) -> None:  # noqa: ARG002 - the next request of the iterator fails too
        """Drop what is left: the home is gone, or has taken it back."""
        with self._lock:
            self._contents.clear()


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

    def take_out(self, put: PutOperation) -> bool:
        """Take a put out that was not sent yet; returns whether it was here. None is sent in its place."""
        with self._client.lock:
            is_here = put in self.waiting
            if is_here:
                self.waiting.remove(put)
                self._end_if_empty()
            return is_here

    def ended(self, put: PutOperation) -> None:
        """Note that a put has ended, so that another one may be sent."""
        with self._client.lock:
            if put in self._sent:
                self._sent.remove(put)
                self._bytes -= put.size
            elif put in self.waiting:
                self.waiting.remove(put)
            self._end_if_empty()
        self.pump()

    def _end_if_empty(self) -> None:
        # The key may have another flow by now.
        if not self._sent and not self.waiting and self._client.flows.get(self._key) is self:
            del self._client.flows[self._key]

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
                        if put.is_given_up:
                            # Perhaps before it had a number, or before it was on its way.
                            self._client.cancel(put.number)
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
        self._start_empty(endpoint.loop, endpoint.numbers, channel, f"{channel}:{home}", settings)

    def _start_empty(
        self, loop: Loop, numbers: itertools.count[int], channel: str, name: str, settings: ChannelSettings
    ) -> None:
        self.loop = loop
        self.channel = channel
        self.name = name
        """The address of the home."""
        self.flows: dict[bytes, _Flow] = {}
        self.lock = threading.Lock()
        """Held for moments, while a put joins or leaves a flow."""
        self.window = min(_MOST_BYTES, settings.max_bytes or _MOST_BYTES)
        self._numbers = numbers

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
                if put.within(deadline.timeout):
                    put.wait()
                # It may be in the queue by now.
                elif (late := put.outcome(timeout)) is not None:
                    raise with_meanwhile(late)
        except BaseException:
            # The last first: the end of one that was sent lets the next one be sent.
            for put in reversed(puts):
                if not put.is_done:
                    put.withdraw()
            raise
        return None

    def get(self, key: bytes, want: Want, take: Callable[[Any], Any], timeout: float | None) -> Any:
        """Get something; returns what `take` makes of what arrives, or raises and takes nothing."""
        get = GetOperation(self, key, want)
        try:
            self.send_get(get, get)
            if not get.within(check_timeout(timeout)):
                raise get.timed_out(timeout)
            return take(get.wait())
        except BaseException as error:
            if get.is_done:
                if get.error is None:
                    # Interrupted: what is not acknowledged yet goes back.
                    get.give_up()
                raise
            get.give_up()
            if not isinstance(error, CallTimedOut):
                raise
            is_answered = self.loop.wait_for(get, GRACE_SECONDS)
            late = get.timed_out(timeout) if is_answered else get.unanswered(timeout, get.missing())
            raise with_meanwhile(late) from None

    def get_async(self, key: bytes, want: Want, take: Callable[[Any], Any]) -> Handle[Any]:
        """Get something with a handle; if that is dropped, it takes nothing."""
        get = AsyncGetOperation(self, key, want, take)
        self.send_get(get, _WeakSink(get))
        return get

    def not_opened(self, error: Exception) -> Exception:
        """Make the error for an item that cannot be unpickled."""
        return WorkerFailed(
            f"an item of channel {self.channel!r} cannot be unpickled: {type(error).__name__}: {error}",
            hint="the process that gets it needs the modules and classes of the one that put it",
        )

    def send_put(self, put: PutOperation) -> None:
        """Ask for items to be put; the reply completes the put."""
        put.number = next(self._numbers)
        self.send(put.number, "put", (put.key, put.items, put.waits, put.is_whole, put.version), put)

    def send_get(self, get: GetOperation, sink: Any) -> None:
        """Ask for items; the reply completes the sink."""
        # Before the reply, and before anything can interrupt what follows.
        get.number = next(self._numbers)
        self.send(get.number, "get", (get.key, get.want), sink)

    def acknowledge(self, number: int, count: int = 0) -> None:
        """Say that the first items of a request arrived; with no count, all of them."""
        self.send(number, "acknowledge", (count,))

    def cancel(self, number: int) -> None:
        """End a request; what it got and did not acknowledge goes back."""
        self.send(number, "cancel")

    def ask(self, op: Op, *arguments: Any) -> Handle[Any]:
        """Ask something that is not about items."""
        handle: Handle[Any] = Handle(self.loop, self._open_answer, lambda: f"{self.name} has not answered")
        self.send(next(self._numbers), op, arguments, handle)
        return handle

    def peek(self, key: bytes, count: int, timeout: float | None) -> list[Any]:
        """Return copies of the first items."""
        found = self.ask("peek", key, count).wait(timeout)
        try:
            return self.copy_many(found)
        except Exception as error:
            raise self.not_opened(error) from error
        finally:
            if "torch" in sys.modules:
                # Tensors on devices stay lent, for who gets the items.
                fetched()

    def _open_answer(self, value: Frame | Answer) -> Any:
        answer = read_answer(value) if isinstance(value, Frame) else value
        if answer.status is Status.FAILED:
            raise ClusterError(f"the home of a channel could not answer: {answer.problem}")
        return self.unpack(answer.items[0])

    # What a client of queues in its own process does in another way.

    @property
    def connection(self) -> Connection | None:
        """The connection that answers come through, if it is open."""
        peer = self._endpoint.peers.get(self.name)
        return peer.connection if peer is not None else None

    @property
    def sinks(self) -> dict[int, Any]:
        """By number of the request: what takes the next answer to it."""
        peer = self._endpoint.peers.get(self.name)
        return peer.requests if peer is not None else {}

    def pack(self, thing: Any, weight: float) -> Packed:
        """Make an item of an object."""
        lent = lending(self._endpoint) if "torch" in sys.modules else None
        content = pack(thing, lent)
        return content, weight, content_size(*content), lent if lent is not None and lent.number else None

    def pack_many(self, things: Sequence[Any], weights: Sequence[float]) -> Iterable[Packed]:
        """Make items of objects: the same as one by one, and quicker if none of them can be on a device."""
        if "torch" in sys.modules:
            return map(self.pack, things, weights)
        packed = zip(pack_many(things), weights, strict=True)
        return [(content, weight, content_size(*content), None) for content, weight in packed]

    def unpack(self, content: Any) -> Any:
        """Make the object again."""
        data, buffers = content[0], content[1]
        if buffers:
            return unpack(data, [view(buffer) for buffer in buffers])
        return pickle.loads(data)  # noqa: S301 - from a member of this job

    def unpack_many(self, contents: Sequence[Any]) -> list[Any]:
        """Make the objects again: the same as one by one, and quicker without buffers."""
        if any(content[1] for content in contents):
            return [self.unpack(content) for content in contents]
        return [pickle.loads(content[0]) for content in contents]  # noqa: S301 - likewise

    def copy_many(self, contents: Sequence[Any]) -> list[Any]:
        """Make copies of objects that stay in the queue."""
        return self.unpack_many(contents)

    def send(self, number: int, op: Op, arguments: Sequence[Any] = (), sink: Any = None) -> None:
        """Send a request; the sink takes the answer, if there is one."""
        endpoint = self._endpoint
        if op == "cancel" and endpoint.is_closed:
            return
        envelope, data, buffers = write_request(op, arguments)
        peer = endpoint.peers.get(self.name) or endpoint.peer(self.name)
        if sink is None:
            peer.send(_REQUEST, number, envelope)
        else:
            peer.request(number, envelope, data, buffers, sink)

    def cancel_soon(self, number: int) -> None:
        """Do so later, in another thread: safe in a finalizer."""
        self.loop.call(lambda: self.cancel(number))


class LocalClient(Client):
    """The same with queues in this process. What is put is what is got: the object itself, not a copy."""

    def __init__(self, name: str, settings: ChannelSettings) -> None:
        self._start_empty(_loop_of(os.getpid()), itertools.count(1), name, name, settings)
        self.settings = settings
        self._home = Home(PeerInfo(address=name, instance=_HERE, node=_HERE), settings, name)
        self._sinks: dict[int, Any] = {}
        self._requests: deque[tuple[int, Op, Sequence[Any]]] = deque()
        self._busy = threading.Lock()

    @property
    def connection(self) -> Connection | None:
        return None

    @property
    def sinks(self) -> dict[int, Any]:
        return self._sinks

    def pack(self, thing: Any, weight: float) -> Packed:
        return thing, weight, ITEM_BYTES + max(getattr(thing, "nbytes", 0), sys.getsizeof(thing, 0)), None

    def pack_many(self, things: Sequence[Any], weights: Sequence[float]) -> Iterable[Packed]:
        return map(self.pack, things, weights)

    def unpack(self, content: Any) -> Any:
        return content

    def unpack_many(self, contents: Sequence[Any]) -> list[Any]:
        return list(contents)

    def copy_many(self, contents: Sequence[Any]) -> list[Any]:
        return copy.deepcopy(list(contents))

    def send(self, number: int, op: Op, arguments: Sequence[Any] = (), sink: Any = None) -> None:
        """Have requests carried out, one at a time, in order.

        One that a finalizer or a callback makes in the middle of another one is carried out after that.
        """
        if op == "put":
            key, items, waits, is_whole, version = arguments
            arguments = key, [Item(thing, weight, size, version) for thing, weight, size, _ in items], waits, is_whole
        if sink is not None:
            self._sinks[number] = sink
        self._requests.append((number, op, arguments))
        while self._requests and self._busy.acquire(blocking=False):
            try:
                while self._requests:
                    for event in self._home.carry_out(_HERE, *self._requests.popleft(), lambda value: value):
                        if isinstance(event, Answer):
                            event = event._replace(items=[item.content for item in event.items])
                        if isinstance(event, SetAside):
                            continue
                        if (sink := self._sinks.pop(event.number, None)) is not None:
                            sink.complete(event)
                (_in_use.discard if self._home.queues.is_empty else _in_use.add)(self)
            finally:
                self._busy.release()

    def cancel_soon(self, number: int) -> None:
        self.cancel(number)


_HERE = "this process"
_in_use: set[LocalClient] = set()
"""Local queues that have items, even if no object refers to them now."""


@functools.cache
def _loop_of(pid: int) -> Loop:  # noqa: ARG001 - a fork has one of its own
    """Return what threads of a process wait with; it reads nothing, and needs no thread."""
    return Loop("roost-local")
