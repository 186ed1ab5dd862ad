"""The way from a channel object to the queues: to a home in another process, or to queues in this one."""

from __future__ import annotations

import itertools
import os
import pickle
import sys
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Protocol

from roost.comm.channels.frames import (
    Op,
    content_size,
    read_contents,
    read_failure,
    read_status,
    write_get,
    write_key,
    write_put,
)
from roost.comm.channels.home import ChannelSettings, write_acknowledgement, write_call
from roost.comm.channels.queues import Answer, Item, Queues, Status, Want
from roost.comm.move.loans import Lending, lending
from roost.comm.packing import pack, pack_many, unpack
from roost.comm.wire.connection import Connection, Frame, Kind, view
from roost.comm.wire.endpoint import Endpoint
from roost.comm.wire.loop import Handle, Loop
from roost.errors import ClusterError

_ONE = write_acknowledgement(1)
_ALL = write_acknowledgement(0)
_CANCEL = bytes([Op.CANCEL])
_MOST_KEYS = 1024


class Sink(Protocol):
    """What takes the reply to a request."""

    def complete(self, value: Any) -> None:
        """Take it."""

    def fail(self, error: BaseException) -> None:
        """Take that there will be none."""


class LentItem(Item):
    """An item with tensors on a device of this process, which keeps them until they are fetched."""

    __slots__ = ("lending",)

    def __init__(self, content: Any, weight: float, size: int, lending: Lending) -> None:
        super().__init__(content, weight, size)
        self.lending = lending


def take_back(items: Iterable[Item]) -> None:
    """Let go of what was lent for items that are in no queue."""
    for item in items:
        if isinstance(item, LentItem):
            item.lending.cancel()


class Route(Protocol):
    """The way to some queues."""

    name: str
    loop: Loop

    @property
    def connection(self) -> Connection | None:
        """The connection that answers come through, if it is open."""

    def pack(self, thing: Any, weight: float) -> Item:
        """Make an item of an object."""

    def pack_many(self, things: Sequence[Any], weights: Sequence[float]) -> list[Item]:
        """Make items of objects."""

    def unpack(self, content: Any) -> Any:
        """Make the object again."""

    def unpack_many(self, contents: Sequence[Any]) -> list[Any]:
        """Make the objects again."""

    def number(self) -> int:
        """Return a number for a request."""

    def put(self, number: int, key: Hashable, items: Sequence[Item], waits: bool, sink: Sink) -> None:
        """Ask for items to be put."""

    def get(self, number: int, key: Hashable, want: Want, sink: Sink) -> None:
        """Ask for items."""

    def acknowledge(self, number: int, *, is_one: bool) -> None:
        """Say that the items of a request arrived, or the first that was not acknowledged yet."""

    def cancel(self, number: int) -> None:
        """End a request; what it got and did not acknowledge goes back."""

    def cancel_soon(self, number: int) -> None:
        """Do so later, in another thread: safe in a finalizer."""

    def expect_recall(self, number: int, sink: Sink | None) -> None:
        """Take a second reply to a request; None to stop that."""

    def call(self, op: Op, *arguments: Any) -> Handle[Any]:
        """Ask something that is not about items."""

    def read(self, reply: Any) -> tuple[Status, int, float]:
        """Return how a request ended, how many items were put, and the weight of one that is too heavy."""

    def contents(self, reply: Any) -> Sequence[Any]:
        """Return the items of a reply."""

    def read_failure(self, reply: Any) -> str:
        """Return why a request could not be handled."""


class RemoteRoute:
    """The way to a home in another process."""

    def __init__(self, endpoint: Endpoint, address: str) -> None:
        self.name = address
        self.loop: Loop = endpoint.loop
        self._endpoint = endpoint
        self._keys: dict[Hashable, bytes] = {}

    @property
    def connection(self) -> Connection | None:
        peer = self._endpoint.peers.get(self.name)
        return peer.connection if peer is not None else None

    def pack(self, thing: Any, weight: float) -> Item:
        lent = lending(self._endpoint)
        content = pack(thing, lent)
        size = content_size(content) if content[1] else len(content[0])
        return Item(content, weight, size) if lent is None or not lent.number else LentItem(content, weight, size, lent)

    def pack_many(self, things: Sequence[Any], weights: Sequence[float]) -> list[Item]:
        if "torch" not in sys.modules:
            return [
                Item(content, weight, content_size(content) if content[1] else len(content[0]))
                for content, weight in zip(pack_many(things), weights, strict=True)
            ]
        packed: list[Item] = []
        try:
            for thing, weight in zip(things, weights, strict=True):
                packed.append(self.pack(thing, weight))
        except BaseException:
            take_back(packed)
            raise
        return packed

    def unpack(self, content: Any) -> Any:
        data, buffers = content[:2]
        return unpack(data, [view(buffer) for buffer in buffers] if buffers else ())

    def unpack_many(self, contents: Sequence[Any]) -> list[Any]:
        if any(content[1] for content in contents):
            return [self.unpack(content) for content in contents]
        return [pickle.loads(content[0]) for content in contents]  # noqa: S301 - from a member of this job

    def number(self) -> int:
        return self._endpoint.number()

    def put(self, number: int, key: Hashable, items: Sequence[Item], waits: bool, sink: Sink) -> None:
        envelope, data, buffers = write_put(self._key(key), items, waits)
        self._request(number, envelope, data, buffers, sink)

    def get(self, number: int, key: Hashable, want: Want, sink: Sink) -> None:
        self._request(number, write_get(self._key(key), want), b"", (), sink)

    def acknowledge(self, number: int, *, is_one: bool) -> None:
        self._tell(number, _ONE if is_one else _ALL)

    def cancel(self, number: int) -> None:
        if not self._endpoint.is_closed:
            self._tell(number, _CANCEL)

    def cancel_soon(self, number: int) -> None:
        self.loop.call(lambda: self.cancel(number))

    def expect_recall(self, number: int, sink: Sink | None) -> None:
        endpoint = self._endpoint
        with endpoint.lock:
            if endpoint.is_closed:
                return
            requests: dict[int, Any] = endpoint.peer(self.name).requests
            if sink is None:
                requests.pop(number, None)
            else:
                requests[number] = sink

    def call(self, op: Op, *arguments: Any) -> Handle[Any]:
        handle: Handle[Any] = Handle(self.loop, _open_call, lambda: f"{self.name} has not answered")
        self._request(self.number(), write_call(op, *arguments), b"", (), handle)
        return handle

    def read(self, reply: Frame) -> tuple[Status, int, float]:
        return read_status(reply)

    def contents(self, reply: Frame) -> Sequence[Any]:
        return read_contents(reply)

    def read_failure(self, reply: Frame) -> str:
        return f"{self.name}: {read_failure(reply)}"

    def _key(self, key: Hashable) -> bytes:
        found = self._keys.get(key)
        if found is None:
            if len(self._keys) >= _MOST_KEYS:
                self._keys.clear()
            found = self._keys[key] = write_key(key)
        return found

    def _request(self, number: int, envelope: bytes, data: Any, buffers: Sequence[Any], sink: Any) -> None:
        peer = self._endpoint.peer(self.name)
        peer.requests[number] = sink
        peer.send(Kind.REQUEST, number, envelope, data, buffers)
        if peer.error is not None and peer.requests.pop(number, None) is not None:
            sink.fail(peer.error)

    def _tell(self, number: int, envelope: bytes) -> None:
        self._endpoint.peer(self.name).send(Kind.REQUEST, number, envelope)


def _open_call(frame: Frame) -> Any:
    found = pickle.loads(frame.envelope)  # noqa: S301 - from a member of this job
    if isinstance(found, BaseException):
        raise found
    return found


class LocalRoute:
    """Queues in this process. What is put is what is got: the same object, not a copy."""

    def __init__(self, name: str, settings: ChannelSettings) -> None:
        self.name = name
        self.settings = settings
        self.loop: Loop = _local_loop()
        self._queues = Queues(settings.maxsize, settings.max_bytes)
        self._numbers = itertools.count(1)
        self._sinks: dict[int, Sink] = {}
        self._steps: deque[Callable[[], Any]] = deque()
        self._busy = threading.Lock()

    @property
    def connection(self) -> Connection | None:
        return None

    def pack(self, thing: Any, weight: float) -> Item:
        return Item(thing, weight, getattr(thing, "nbytes", 0) if self.settings.max_bytes else 0)

    def pack_many(self, things: Sequence[Any], weights: Sequence[float]) -> list[Item]:
        return [self.pack(thing, weight) for thing, weight in zip(things, weights, strict=True)]

    def unpack(self, content: Any) -> Any:
        return content

    def unpack_many(self, contents: Sequence[Any]) -> list[Any]:
        return list(contents)

    def number(self) -> int:
        return next(self._numbers)

    def put(self, number: int, key: Hashable, items: Sequence[Item], waits: bool, sink: Sink) -> None:
        self._sinks[number] = sink
        self._do(lambda: self._queues.put(_HERE, number, key, items, waits))

    def get(self, number: int, key: Hashable, want: Want, sink: Sink) -> None:
        self._sinks[number] = sink
        self._do(lambda: self._queues.get(_HERE, number, key, want))

    def acknowledge(self, number: int, *, is_one: bool) -> None:
        self._do(lambda: self._queues.acknowledge(_HERE, number, 1 if is_one else 0))

    def cancel(self, number: int) -> None:
        self._do(lambda: self._queues.cancel(_HERE, number))

    def cancel_soon(self, number: int) -> None:
        self.cancel(number)

    def expect_recall(self, number: int, sink: Sink | None) -> None:
        if sink is None:
            self._sinks.pop(number, None)
        else:
            self._sinks[number] = sink

    def call(self, op: Op, *arguments: Any) -> Handle[Any]:
        handle: Handle[Any] = Handle(self.loop)

        def answer() -> Any:
            if op is Op.DEPTH:
                handle.complete((self._queues.depth(*arguments), self._queues.is_full(*arguments)))
            elif op is Op.STATS:
                handle.complete(self._stats())
            elif op is Op.CLOSE:
                events = self._queues.close()
                handle.complete(None)
                return events
            else:
                handle.fail(ClusterError(f"a local channel does not know {op.name}"))
            return ()

        self._do(answer)
        return handle

    def read(self, reply: Answer) -> tuple[Status, int, float]:
        return reply.status, reply.accepted, reply.weight

    def contents(self, reply: Answer) -> Sequence[Any]:
        return [item.content for item in reply.items]

    def read_failure(self, reply: Answer) -> str:
        return str(reply.status)

    def _stats(self) -> dict[str, Any]:
        return {
            **self._queues.stats(),
            "puts_per_second": 0.0,
            "gets_per_second": 0.0,
            "home": self.name,
            "node": "this process",
            "maxsize": self.settings.maxsize,
            "max_bytes": self.settings.max_bytes,
            "routes": {},
        }

    def _do(self, step: Callable[[], Any]) -> None:
        """Take a step, one at a time, in the order in which they were asked for.

        A step that a finalizer or a callback asks for in the middle of another one is taken after that.
        """
        self._steps.append(step)
        while self._steps and self._busy.acquire(blocking=False):
            try:
                while self._steps:
                    self._act(self._steps.popleft()())
                (_in_use.discard if self._queues.is_empty else _in_use.add)(self)
            finally:
                self._busy.release()

    def _act(self, events: Sequence[Any]) -> None:
        for event in events:
            sink = self._sinks.pop(event.number, None)
            if sink is not None:
                sink.complete(event)


_HERE = "this process"
_in_use: set[LocalRoute] = set()
"""Local queues that have items, even if no object refers to them now."""
_loops: dict[int, Loop] = {}


def _local_loop() -> Loop:
    """Return what threads of this process wait with; it reads nothing, and needs no thread."""
    found = _loops.get(os.getpid())
    if found is None:
        found = _loops[os.getpid()] = Loop("roost-local")
    return found
