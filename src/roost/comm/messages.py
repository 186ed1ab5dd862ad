"""Messages between two workers: objects, and tensors into buffers that exist."""

from __future__ import annotations

import functools
import pickle
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from roost.comm.addresses import WorkerAddress
from roost.comm.mailbox import ANY, Message, Receive
from roost.comm.move.arrays import is_on_device
from roost.comm.move.buffers import Buffer, as_buffer
from roost.comm.move.loans import Lending, Loan, Loans, fetch_into, fetched, lending, settle
from roost.comm.move.memory import copy
from roost.comm.packing import pack, unpack
from roost.comm.wire.connection import SHARED_FROM, Connection, Frame, Kind, Peer, SharedBuffer, gone_error, view
from roost.comm.wire.endpoint import ENDED, MOST_WAITING, Endpoint
from roost.comm.wire.loop import Handle, Loop, check_timeout
from roost.errors import CallTimedOut, ClusterError, ConfigError, RoostError, WorkerFailed

_MESSAGE = Kind.MESSAGE
_TENSOR = int(Kind.TENSOR)
_CHUNK = 1 << 21
_SETTLE_SECONDS = 60.0
_AHEAD = 2
"""How many chunks of a tensor may be on their way: one is filled while another is emptied, and both stay in caches."""


@dataclass(slots=True, eq=False)
class _Tensor:
    """The content of a tensor that arrives in chunks."""

    size: int
    dtype: str
    shape: tuple[int, ...]
    missing: int
    message: Message | None = None
    receiver: _Receiver | None = None
    target: Buffer | None = None
    """Where it goes; until that is known, or if it does not fit there, the chunks are kept."""
    chunks: list[tuple[int, memoryview]] = field(default_factory=list)
    loan: Loan | None = None
    """Where it is, if it is on a device."""


class _Receiver(Handle[Any]):
    """A receive that waits: the connection of its source completes it."""

    __slots__ = ("_endpoint", "_from", "target")

    def __init__(
        self,
        endpoint: Endpoint,
        source: str,
        target: Buffer | None,
        open_value: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(endpoint.loop, open_value)
        self.target = target
        """Where a tensor goes."""
        self._endpoint = endpoint
        self._from = source

    def source(self) -> Connection | None:
        return self._endpoint.incoming.get(self._from)

    def message(self) -> Message:
        """Return what arrived, as it arrived; it is done."""
        if self._error is not None:
            raise self._error
        arrived: Message = self._value
        return arrived

    def waits_for(self) -> str:
        return _words(self._from)

    def timed_out(self, timeout: float | None) -> CallTimedOut:
        own = self._endpoint.own.address
        return CallTimedOut(f"{own} has got no message from {_words(self._from)} after {timeout or 0:g} s")


class _Sender(Handle[None]):
    """A tensor on its way: what goes on with it is that the other end returns chunks."""

    __slots__ = ("connection",)

    def __init__(self, loop: Loop, late: Callable[[], str]) -> None:
        super().__init__(loop, late=late)
        self.connection: Connection | None = None

    def source(self) -> Connection | None:
        return self.connection


class Messages:
    """Sends and receives messages of one process."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._arriving: dict[tuple[str, int], _Tensor] = {}
        """By sender and number: tensors of which chunks are missing."""
        self._paused: dict[str, Connection] = {}
        """By sender: connections that are not read, because too much waits to be received."""
        endpoint.on_message = self._take
        endpoint.on_gone.append(self._forget)
        endpoint.on_close.append(self._close)
        Loans(endpoint)
        endpoint.open()

    def send(self, thing: Any, to: str, tag: Hashable = None, payload: Any = None) -> Handle[None]:
        """Send an object. The handle is done when what was sent may be changed."""
        handle = self.begin_send(thing, to, tag, payload)
        if handle is None:
            handle = Handle(self.endpoint.loop)
            handle.complete(None)
        return handle

    def begin_send(self, thing: Any, to: str, tag: Hashable = None, payload: Any = None) -> Handle[None] | None:
        """Do the same, with None for a handle that would be done."""
        has_payload = payload is not None
        lent = lending(self.endpoint, to)
        data, buffers = pack((thing, payload) if has_payload else thing, lent)
        envelope = b"" if tag is None and not has_payload else pickle.dumps((tag, has_payload))
        if lent is not None and lent.number:
            return self._send_lent(Kind.MESSAGE, to, envelope, data, buffers, lent)
        open_one = self.endpoint.connection_to(to)
        if open_one is not None and not buffers and open_one.backlog + len(data) < SHARED_FROM:
            open_one.send(_MESSAGE, 0, envelope, data)
            return None
        handle: Handle[None] = Handle(self.endpoint.loop, late=lambda: f"{to} has not taken a message")
        if to == self.endpoint.own.address:
            # Not the caller's own buffers: it may change them.
            frame = Frame(Kind.MESSAGE, 0, envelope, data, [bytearray(buffer) for buffer in buffers])
            self._deliver(self.endpoint.own, frame)
            handle.complete(None)
            return handle

        def job(connection: Connection) -> None:
            if not buffers:
                connection.send(Kind.MESSAGE, 0, envelope, data)
                if connection.backlog < SHARED_FROM:
                    handle.complete(None)
                else:
                    connection.complete_when_written(handle)
                return
            shared = [connection.share(buffer, memoryview(buffer).nbytes) or buffer for buffer in buffers]
            connection.send(Kind.MESSAGE, 0, envelope, data, shared)
            if all(isinstance(buffer, SharedBuffer) for buffer in shared) and connection.backlog < SHARED_FROM:
                handle.complete(None)
            else:
                connection.complete_when_written(handle)

        # What is packed may wait here until the other end is up; what is not may be changed by the caller.
        self.endpoint.submit(to, job, handle.fail, None if buffers else lambda: handle.complete(None), len(data))
        return handle

    def _send_lent(
        self, kind: Kind, to: str, envelope: bytes, data: bytes, buffers: Sequence[Any], lent: Lending
    ) -> Handle[None]:
        """Send what has tensors on a device in it. The handle is done when the receiver has fetched them."""
        handle: Handle[None] = Handle(self.endpoint.loop, late=lambda: f"{to} has not fetched a tensor")
        lent.on_back = lambda error: handle.complete(None) if error is None else handle.fail(error)
        number = lent.number
        if to == self.endpoint.own.address:
            self._deliver(self.endpoint.own, Frame(kind, number, envelope, data, [bytearray(one) for one in buffers]))
            return handle

        def fail(error: Exception) -> None:
            lent.cancel()
            handle.fail(error)

        self.endpoint.submit(to, lambda connection: connection.send(kind, number, envelope, data, buffers), fail)
        return handle

    def send_tensor(self, tensor: Any, to: str, tag: Hashable = None) -> Handle[None]:
        """Send the content of a tensor or array. The handle is done when it may be changed."""
        lent = lending(self.endpoint, to) if is_on_device(tensor) else None
        if lent is not None:
            loan = lent.lend(tensor)
            envelope = pickle.dumps((tag, (loan.memory.nbytes, loan.dtype, loan.shape)))
            return self._send_lent(Kind.TENSOR, to, envelope, pickle.dumps(loan), (), lent)
        source = as_buffer(tensor, "send_tensor")
        size = source.nbytes
        number = self.endpoint.number()
        described = size, source.dtype, source.shape
        envelope = pickle.dumps((tag, described))
        handle = _Sender(self.endpoint.loop, late=lambda: f"{to} has not taken a tensor")
        if to == self.endpoint.own.address:
            self._deliver(self.endpoint.own, Frame(Kind.TENSOR, number, envelope, b"", [bytearray(source.view)]))
            handle.complete(None)
            return handle

        def job(connection: Connection) -> None:
            if not connection.is_local or size < SHARED_FROM:
                connection.send(Kind.TENSOR, number, envelope, b"", [source.view])
                connection.complete_when_written(handle)
                return
            handle.connection = connection
            connection.fail_at_end(handle)
            state = {"at": 0, "out": 0}
            # Chunks are sent in order, by the caller and by the thread that reads what comes back.
            turn = threading.RLock()

            def advance() -> None:
                with turn:
                    fill()

            def fill() -> None:
                while state["at"] < size and state["out"] < _AHEAD:
                    part = source.view[state["at"] : state["at"] + _CHUNK]
                    shared = connection.share(part, part.nbytes)
                    is_first = state["at"] == 0
                    state["at"] += part.nbytes
                    state["out"] += shared is not None
                    connection.send(Kind.TENSOR, number, envelope if is_first else b"", b"", [shared or part], freed)
                if state["at"] >= size:
                    connection.complete_when_written(handle)

            def freed() -> None:
                with turn:
                    state["out"] -= 1
                    fill()

            advance()

        self.endpoint.submit(to, job, handle.fail)
        return handle

    def receive(self, source: str, tag: Hashable = None, into: Any = None) -> Handle[Any]:
        """Receive the next message of a source, as a handle."""
        target = None if into is None else as_buffer(into, "recv_tensor", is_target=True)
        handle = _Receiver(self.endpoint, source, target, functools.partial(_open, source, target))
        message = self._post(Receive(source, tag, handle))
        if message is not None:
            handle.complete(message)
        return handle

    def wait_for_next(self, source: str, tag: Hashable, into: Any, timeout: float | None) -> Any:
        """Receive the next message of a source, and wait for it."""
        target = None if into is None else as_buffer(into, "recv_tensor", is_target=True)
        handle = _Receiver(self.endpoint, source, target)
        receive = Receive(source, tag, handle)
        message = self._post(receive)
        try:
            if message is None:
                # What arrived just now is for this receive, what arrives later for the next.
                if not self.endpoint.loop.wait_for(handle, check_timeout(timeout)):
                    if self._withdraw(receive):
                        raise handle.timed_out(timeout)
                    # The thread that has read the message is about to say so.
                    if not self.endpoint.loop.wait_for(handle, _SETTLE_SECONDS):
                        raise handle.timed_out(timeout)
                message = handle.message()
            return _open(source, target, message)
        except KeyboardInterrupt:
            if message is not None:
                self._put_back(message)
            elif not self._withdraw(receive):
                handle.on_done(lambda: self._put_back(handle.raw))
            raise

    def _post(self, receive: Receive[_Receiver]) -> Message | None:
        """Let a receive wait for its message; returns the message instead if all of it is here."""
        endpoint, source, handle = self.endpoint, receive.source, receive.receiver
        with endpoint.lock:
            message = endpoint.mailbox.post(receive)
            if message is None:
                if source not in endpoint.incoming and not source.endswith(ANY) and source != endpoint.own.address:
                    endpoint.expect(source)
            elif isinstance(message.content, _Tensor):
                self._direct(message.content, handle)
                if message.content.missing > 0:
                    message = None
            if self._paused:
                self._resume()
        return message

    def _withdraw(self, receive: Receive[_Receiver]) -> bool:
        """Take a receive back; False if all of its message is here."""
        with self.endpoint.lock:
            if self.endpoint.mailbox.withdraw(receive):
                return True
            for tensor in self._arriving.values():
                if tensor.receiver is receive.receiver:
                    self._put_back(tensor.message)
                    return True
        return False

    def _put_back(self, message: Message | None) -> None:
        """Let the next receive have a message whose receiver gave up before it got it."""
        if message is None:
            return
        with self.endpoint.lock:
            tensor = message.content
            if isinstance(tensor, _Tensor):
                tensor.receiver = None
                if tensor.target is not None:
                    # The caller has its memory back.
                    arrived = bytearray(tensor.target.view[: tensor.size - tensor.missing])
                    tensor.target, tensor.chunks = None, [(0, memoryview(arrived))]
            receive = self.endpoint.mailbox.put_back(message)
            if receive is None:
                return
            if isinstance(tensor, _Tensor):
                self._direct(tensor, receive.receiver)
                if tensor.missing > 0:
                    return
        receive.receiver.complete(message)

    def _take(self, connection: Connection, frame: Frame) -> None:
        """Take a frame in; in the thread that reads."""
        peer = connection.peer
        if peer is None:
            return
        waits = self._deliver(peer, frame)
        if waits and self.endpoint.mailbox.size_from(peer.address, peer.instance) > MOST_WAITING:
            with self.endpoint.lock:
                if not self._is_waiting_for(peer.address):
                    self._paused[peer.address] = connection
                    connection.pause(is_paused=True)

    def _deliver(self, peer: Peer, frame: Frame) -> bool:
        """Give a message to the receive that waits for it; returns whether it waits for one instead."""
        endpoint = self.endpoint
        if frame.kind == _TENSOR:
            return self._deliver_chunk(peer, frame)
        tag, _ = pickle.loads(frame.envelope) if frame.envelope else (None, False)  # noqa: S301 - from a member
        size = frame.size if frame.buffers else len(frame.data)
        message = Message(peer.address, peer.instance, tag, frame, size)
        if frame.number:
            message.loan = peer, frame.number
        with endpoint.lock:
            receive = endpoint.mailbox.deliver(message)
        if receive is None:
            return True
        receive.receiver.complete(message)
        return False

    def _deliver_chunk(self, peer: Peer, frame: Frame) -> bool:
        """Take a part of a tensor, or all of it."""
        with self.endpoint.lock:
            tensor = self._arriving.get((peer.instance, frame.number))
            if tensor is None:
                tag, (size, dtype, shape) = pickle.loads(frame.envelope)  # noqa: S301 - from a member of this job
                tensor = _Tensor(size, dtype, shape, size)
                tensor.message = Message(peer.address, peer.instance, tag, tensor, size)
                if frame.data:
                    tensor.message.loan = peer, frame.number
                receive = self.endpoint.mailbox.deliver(tensor.message)
                if receive is not None:
                    self._direct(tensor, receive.receiver)
                self._arriving[peer.instance, frame.number] = tensor
            if frame.data:
                tensor.loan, tensor.missing = pickle.loads(frame.data), 0  # noqa: S301 - from a member of this job
            for buffer in frame.buffers:
                part = view(buffer)
                at = tensor.size - tensor.missing
                tensor.missing -= part.nbytes
                if tensor.target is None:
                    tensor.chunks.append((at, part))
                elif part.nbytes:
                    copy(part, tensor.target.view[at:], part.nbytes)
                    if isinstance(buffer, SharedBuffer):
                        buffer.give_back()
            frame.buffers.clear()
            if tensor.missing > 0:
                return tensor.receiver is None
            del self._arriving[peer.instance, frame.number]
        if tensor.receiver is not None:
            tensor.receiver.complete(tensor.message)
        return tensor.receiver is None

    def _direct(self, tensor: _Tensor, receiver: _Receiver) -> None:
        """Let a tensor go to its receiver, and straight into its target if it fits."""
        tensor.receiver, target = receiver, receiver.target
        if target is not None and target.nbytes == tensor.size:
            tensor.target = target
            for at, part in tensor.chunks:
                if part.nbytes:
                    copy(part, target.view[at:], part.nbytes)
            tensor.chunks.clear()

    def _is_waiting_for(self, address: str) -> bool:
        """Whether a receive waits for this process, or for the rest of a tensor of it."""
        return self.endpoint.mailbox.is_waiting_for(address) or any(
            tensor.receiver is not None and tensor.message is not None and tensor.message.source == address
            for tensor in self._arriving.values()
        )

    def _resume(self) -> None:
        """Go on reading what is waited for, or has been received; with the endpoint's lock held."""
        mailbox = self.endpoint.mailbox
        for address, connection in list(self._paused.items()):
            instance = connection.peer.instance if connection.peer is not None else ""
            if self._is_waiting_for(address) or mailbox.size_from(address, instance) <= MOST_WAITING // 2:
                del self._paused[address]
                connection.pause(is_paused=False)

    def _forget(self, peer: Peer) -> None:
        """Fail the tensors of which chunks are missing."""
        with self.endpoint.lock:
            lost = [self._arriving.pop(key) for key in list(self._arriving) if key[0] == peer.instance]
            self._paused.pop(peer.address, None)
        for tensor in lost:
            if tensor.receiver is not None:
                tensor.receiver.fail(gone_error(peer))
            elif tensor.message is not None:
                with self.endpoint.lock:
                    self.endpoint.mailbox.remove(tensor.message)

    def _close(self) -> None:
        with self.endpoint.lock:
            arriving = list(self._arriving.values())
        for tensor in arriving:
            if tensor.receiver is not None:
                tensor.receiver.fail(ClusterError(ENDED))


def _words(source: str) -> str:
    if source == ANY:
        return "any worker"
    return f"any worker of {source.removesuffix(':' + ANY)!r}" if source.endswith(ANY) else source


def _open(source: str, target: Buffer | None, message: Message) -> Any:
    """Turn a message into what the caller of a receive gets, in the caller's thread."""
    try:
        value = _make_value(source, target, message)
    except Exception:
        # Whatever could not be unpickled is not fetched again; after Ctrl-C it is.
        _settle(message)
        raise
    _settle(message)
    return value


def _settle(message: Message) -> None:
    if message.loan is not None:
        settle({message.loan: [], **fetched()})


def _make_value(source: str, target: Buffer | None, message: Message) -> Any:
    content = message.content
    if isinstance(content, _Tensor):
        if target is None:
            raise _mismatch(message.source, "send_tensor", "recv")
        if content.size != target.nbytes:
            raise ConfigError(
                f"{message.source} sent a tensor of {content.shape} {content.dtype}, {content.size} bytes, "
                f"and this one is {target.shape} {target.dtype}, {target.nbytes} bytes"
            )
        if content.loan is not None:
            fetch_into(content.loan, target.as_tensor())
        elif target.on_device is not None:
            target.move_to_device()
        value: Any = None
    elif target is not None:
        raise _mismatch(message.source, "send", "recv_tensor")
    else:
        try:
            buffers = content.buffers
            value = unpack(content.data, [view(buffer) for buffer in buffers] if buffers else ())
        except RoostError:
            raise
        except Exception as error:
            raise WorkerFailed(
                f"a message from {message.source} cannot be unpickled: {type(error).__name__}: {error}",
                hint="both workers need the modules and classes of what is sent",
            ) from error
    return (value, WorkerAddress(message.source)) if source.endswith(ANY) else value


def _mismatch(source: str, sent: str, called: str) -> ConfigError:
    return ConfigError(
        f"{source} sent with {sent}, and this is {called}",
        hint="send goes with recv, and send_tensor with recv_tensor, in the same order on both sides",
    )
