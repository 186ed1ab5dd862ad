"""Messages between two workers: objects, and tensors into buffers that exist."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from roost.comm.buffers import Buffer, as_buffer
from roost.comm.connection import SHARED_FROM, Connection, Frame, Kind, Peer, SharedBuffer
from roost.comm.endpoint import Endpoint
from roost.comm.loop import Handle
from roost.comm.mailbox import ANY, Message, Receive
from roost.comm.memory import copy
from roost.comm.packing import pack, unpack
from roost.errors import ConfigError, RoostError, WorkerFailed

_MOST_WAITING = 1 << 26
"""How many bytes of one peer may wait to be received, if no receive waits for that peer: its sends wait then."""
_CHUNK = 1 << 21
_AHEAD = 4
"""How many chunks of a tensor may be on their way: one is filled while another is emptied."""


@dataclass(slots=True, eq=False)
class _Arrival:
    """The content of a message: an object as it was packed, or a tensor that may arrive in chunks."""

    kind: Kind
    data: bytes
    buffers: list[Any]
    described: tuple[Any, ...] = ()
    """Of a tensor: its bytes, type and shape."""
    payload: bool = False
    missing: int = 0
    receive: Receive[Handle[Any]] | None = None
    target: Buffer | None = None
    chunks: list[tuple[int, Any]] = field(default_factory=list)


class Messages:
    """Sends and receives messages of one process."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._targets: dict[Handle[Any], Buffer] = {}
        """By receive of a tensor: where it goes."""
        self._arriving: dict[tuple[str, int], _Arrival] = {}
        """By sender and number: tensors of which chunks are missing."""
        self._paused: dict[str, Connection] = {}
        endpoint.on_message = self._take
        endpoint.on_gone.append(self._forget)

    def send(self, thing: Any, to: str, tag: Hashable = None, payload: Any = None) -> Handle[None]:
        """Send an object. The handle is done when what was sent may be changed."""
        has_payload = payload is not None
        data, buffers = pack((thing, payload) if has_payload else thing)
        envelope = b"" if tag is None and not has_payload else pickle.dumps((tag, has_payload))
        handle: Handle[None] = Handle(self.endpoint.loop, late=lambda: f"{to} has not taken a message")
        if to == self.endpoint.own.address:
            # Not the caller's own buffers: it may change them.
            frame = Frame(Kind.MESSAGE, 0, envelope, data, [bytearray(buffer) for buffer in buffers])
            self._take(self.endpoint.own, frame)
            handle.complete(None)
            return handle

        def job(connection: Connection) -> None:
            shared = [connection.share(buffer, memoryview(buffer).nbytes) or buffer for buffer in buffers]
            connection.send(Kind.MESSAGE, 0, envelope, data, shared)
            if all(isinstance(buffer, SharedBuffer) for buffer in shared) and connection.backlog < SHARED_FROM:
                handle.complete(None)
            else:
                connection.when_written(lambda: handle.complete(None))

        self.endpoint.submit(to, job, handle.fail)
        return handle

    def send_tensor(self, tensor: Any, to: str, tag: Hashable = None) -> Handle[None]:
        """Send the content of a tensor or array. The handle is done when it may be changed."""
        source = as_buffer(tensor, "send_tensor")
        size = source.nbytes
        number = self.endpoint.number()
        described = size, source.dtype, source.shape
        envelope = pickle.dumps((tag, described))
        handle: Handle[None] = Handle(self.endpoint.loop, late=lambda: f"{to} has not taken a tensor")
        if to == self.endpoint.own.address:
            self._take(self.endpoint.own, Frame(Kind.TENSOR, number, envelope, b"", [bytearray(source.view)]))
            handle.complete(None)
            return handle

        def job(connection: Connection) -> None:
            if not connection.is_local or size < SHARED_FROM:
                connection.send(Kind.TENSOR, number, envelope, b"", [source.view])
                connection.when_written(lambda: handle.complete(None))
                return
            state = {"at": 0, "out": 0}

            def advance() -> None:
                while state["at"] < size and state["out"] < _AHEAD:
                    part = source.view[state["at"] : state["at"] + _CHUNK]
                    shared = connection.share(part, max(part.nbytes, SHARED_FROM) if part.nbytes < SHARED_FROM else part.nbytes)
                    buffer = part if shared is None else shared
                    first = state["at"] == 0
                    state["at"] += part.nbytes
                    state["out"] += shared is not None
                    connection.send(Kind.TENSOR, number, envelope if first else b"", b"", [buffer], freed)
                if state["at"] >= size:
                    connection.when_written(lambda: handle.complete(None))

            def freed() -> None:
                state["out"] -= 1
                advance()

            advance()

        self.endpoint.submit(to, job, handle.fail)
        return handle

    def receive(self, source: str, tag: Hashable = None, into: Any = None) -> tuple[Handle[Any], Callable[[], bool]]:
        """Receive the next message of a source; returns the handle, and what withdraws the receive."""
        endpoint = self.endpoint
        target = None if into is None else as_buffer(into, "recv_tensor", is_target=True)
        own = endpoint.own.address
        open_value = _opener(source, target)
        handle: Handle[Any] = Handle(endpoint.loop, open_value, lambda: f"{own} has got no message from {_words(source)}")
        receive = Receive(source, tag, handle)
        with endpoint.lock:
            message = endpoint.mailbox.post(receive)
            if message is None:
                if target is not None:
                    self._targets[handle] = target
                self._resume(source)
                if not source.endswith(ANY) and source != own:
                    endpoint.expect(source)
        if message is not None:
            self._resume(message.source)
            self._give(message, receive, target)
        return handle, lambda: self._withdraw(receive)

    def _withdraw(self, receive: Receive[Handle[Any]]) -> bool:
        with self.endpoint.lock:
            self._targets.pop(receive.receiver, None)
            return self.endpoint.mailbox.withdraw(receive)

    def put_back(self, handle: Handle[Any]) -> None:
        """Let the next receive have a message whose receiver was interrupted before it got it."""
        message = handle.raw
        if isinstance(message, Message):
            with self.endpoint.lock:
                self.endpoint.mailbox.put_back(message)

    def _take(self, peer: Peer, frame: Frame) -> None:
        """Take a frame in; in the thread that reads."""
        endpoint = self.endpoint
        if frame.kind is Kind.TENSOR:
            arriving = self._arriving.get((peer.instance, frame.number))
            if arriving is not None:
                self._add(peer, frame, arriving)
                return
            tag, described = pickle.loads(frame.envelope)  # noqa: S301 - from a member of this job
            arrival = _Arrival(Kind.TENSOR, b"", [], described, missing=described[0])
            if described[0] > sum(view.nbytes for view in map(_view, frame.buffers)):
                self._arriving[peer.instance, frame.number] = arrival
        else:
            tag, has_payload = pickle.loads(frame.envelope) if frame.envelope else (None, False)  # noqa: S301
            arrival = _Arrival(Kind.MESSAGE, frame.data, [_view(one) for one in frame.buffers], payload=has_payload)
        size = frame.size if frame.kind is Kind.MESSAGE else arrival.described[0]
        message = Message(peer.address, peer.instance, tag, arrival, size)
        with endpoint.lock:
            receive = endpoint.mailbox.deliver(message)
            target = None if receive is None else self._targets.pop(receive.receiver, None)
        if frame.kind is Kind.TENSOR:
            if receive is not None:
                self._attach(message, receive, target)
            self._add(peer, frame, arrival)
        elif receive is not None:
            receive.receiver.complete(message)

    def _attach(self, message: Message, receive: Receive[Handle[Any]], target: Buffer | None) -> None:
        """Let a tensor go straight into its target, if it fits; if not, the receive fails when all of it is here."""
        arrival: _Arrival = message.content
        arrival.receive = receive
        arrival.buffers = [message]
        if target is not None and target.nbytes == arrival.described[0]:
            arrival.target = target
            for at, view in arrival.chunks:
                copy(view, target.view[at:], view.nbytes)
            arrival.chunks.clear()

    def _add(self, peer: Peer, frame: Frame, arrival: _Arrival) -> None:
        """Add a chunk of a tensor."""
        with self.endpoint.lock:
            for buffer in frame.buffers:
                view = _view(buffer)
                at = arrival.described[0] - arrival.missing
                arrival.missing -= view.nbytes
                if arrival.target is not None:
                    copy(view, arrival.target.view[at:], view.nbytes)
                else:
                    arrival.chunks.append((at, view))
            frame.buffers.clear()
            if arrival.missing > 0:
                return
            self._arriving.pop((peer.instance, frame.number), None)
            receive = arrival.receive
        if receive is not None:
            receive.receiver.complete(arrival.buffers[0])

    def _give(self, message: Message, receive: Receive[Handle[Any]], target: Buffer | None) -> None:
        """Complete a receive with a message that was here before it."""
        arrival: _Arrival = message.content
        with self.endpoint.lock:
            if arrival.kind is Kind.TENSOR:
                self._attach(message, receive, target)
            is_whole = arrival.missing <= 0
        if is_whole:
            receive.receiver.complete(message)

    def _resume(self, source: str) -> None:
        """Go on reading what a source sends."""

    def _forget(self, peer: Peer) -> None:
        """Fail the tensors of which chunks are missing."""
        from roost.comm.endpoint import gone_error

        with self.endpoint.lock:
            lost = [key for key in self._arriving if key[0] == peer.instance]
            arrivals = [self._arriving.pop(key) for key in lost]
        for arrival in arrivals:
            if arrival.receive is not None:
                arrival.receive.receiver.fail(gone_error(peer))


def _view(buffer: Any) -> memoryview:
    return buffer.view if isinstance(buffer, SharedBuffer) else memoryview(buffer).cast("B")


def _words(source: str) -> str:
    if source == ANY:
        return "any worker"
    return f"any worker of {source.removesuffix(':' + ANY)!r}" if source.endswith(ANY) else source


def _opener(source: str, target: Buffer | None) -> Callable[[Message], Any]:
    """Make the function that turns a message into what the caller of a receive gets, in the caller's thread."""

    def open_message(message: Message) -> Any:
        arrival: _Arrival = message.content
        if (arrival.kind is Kind.TENSOR) != (target is not None):
            sent, got = ("send_tensor", "recv") if target is None else ("send", "recv_tensor")
            raise ConfigError(
                f"{message.source} sent with {sent}, and this is {got}",
                hint="send goes with recv, and send_tensor with recv_tensor, in the same order on both sides",
            )
        if target is not None:
            size, dtype, shape = arrival.described
            if size != target.nbytes:
                raise ConfigError(
                    f"{message.source} sent a tensor of {shape} {dtype}, {size} bytes, "
                    f"and this one is {target.shape} {target.dtype}, {target.nbytes} bytes"
                )
            for at, view in arrival.chunks:
                copy(view, target.view[at:], view.nbytes)
            value: Any = None
        else:
            try:
                value = unpack(arrival.data, arrival.buffers)
            except RoostError:
                raise
            except Exception as error:
                raise WorkerFailed(
                    f"a message from {message.source} cannot be unpickled: {type(error).__name__}: {error}",
                    hint="both workers need the modules and classes of what is sent",
                ) from error
        return (value, message.source) if source.endswith(ANY) else value

    return open_message
