"""Messages between two workers: objects, and tensors into buffers that exist."""

from __future__ import annotations

import functools
import logging
import pickle
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from roost.comm.limits import SETTLE_SECONDS
from roost.comm.mailbox import ANY, Mailbox, Message, Receive
from roost.comm.move.arrays import Buffer, as_buffer, is_on_device
from roost.comm.move.loans import Lending, Loan, Loans, fetch_into, fetched, lending, settle
from roost.comm.move.memory import copy
from roost.comm.packing import pack, unpack
from roost.comm.wire.connection import SHARED_FROM, Connection, Frame, Kind, PeerInfo, SharedBuffer, view
from roost.comm.wire.endpoint import ENDED, Endpoint
from roost.comm.wire.loop import Handle, all_of, check_timeout
from roost.comm.wire.peer import Peer
from roost.errors import CallTimedOut, ClusterError, ConfigError, RoostError, WorkerFailed
from roost.runtime.process.addresses import WorkerAddress
from roost.text import shorten

log: logging.Logger = logging.getLogger(__name__)

_MESSAGE = int(Kind.MESSAGE)
_TENSOR = int(Kind.TENSOR)
_CHUNK = 1 << 21
_MOST_WAITING = 1 << 26
"""How many bytes of one process may wait to be received; then it keeps what it sends."""
_AHEAD = 2
"""How many chunks of a tensor may be on their way: one is filled while another is emptied, and both stay in caches."""
_PLAIN = frozenset({str, int, float, bool, bytes, type(None)})


@dataclass(slots=True, eq=False)
class _Tensor:
    """The content of a tensor that arrives in chunks."""

    size: int
    dtype: str
    shape: tuple[int, ...]
    missing: int
    message: Message | None = None
    receiver: _Receiver | _Kept | None = None
    target: Buffer | None = None
    """Where it goes; until that is known, or if it does not fit there, the chunks are kept."""
    chunks: list[tuple[int, memoryview]] = field(default_factory=list)
    loan: Loan | None = None
    """Where it is, if it is on a device."""


class _Receiver(Handle[Any]):
    """A receive that waits."""

    __slots__ = ("__weakref__", "_endpoint", "_from", "target")

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
        peer = self._endpoint.peers.get(self._from)
        return peer.connection if peer is not None else None

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


class _Later(_Receiver):
    """A receive whose caller has the handle: if the caller drops it, the next receive gets its message."""

    __slots__ = ("give_back",)
    give_back: Callable[[Message | None], None]
    """Takes its message, or None if that has not arrived."""

    def __del__(self) -> None:
        is_taken = self.is_done and (self._open is None or self._error is not None)
        give_back = getattr(self, "give_back", None)
        if not is_taken and give_back is not None:
            # This may run in the middle of anything, and so the communication thread does it.
            message = self._value if self.is_done else None
            self._endpoint.loop.call(lambda: give_back(message))


class _Kept:
    """A `_Later` as the mailbox has it, which does not keep it alive."""

    __slots__ = ("_handle", "_messages", "target")

    def __init__(self, handle: _Later, messages: Messages) -> None:
        self._handle = weakref.ref(handle)
        self._messages = messages
        self.target = handle.target

    def complete(self, message: Message) -> None:
        handle = self._handle()
        if handle is None:
            self._messages._put_back(message)
        else:
            handle.complete(message)

    def fail(self, error: BaseException) -> None:
        handle = self._handle()
        if handle is not None:
            handle.fail(error)


class _Sender(Handle[None]):
    """A tensor on its way: it goes on when the other end returns chunks."""

    __slots__ = ("peer",)
    peer: Peer

    def source(self) -> Connection | None:
        return self.peer.connection


class _Receipt(Handle[None]):
    """Takes the answer that a tag could be read, or why not."""

    __slots__ = ()

    def complete(self, value: Any) -> None:
        if value is not None and value.envelope:
            self.fail(WorkerFailed(value.envelope.decode(), hint="a tag is best a text, a number, or a tuple of these"))
        else:
            super().complete(None)


class Messages:
    """Sends and receives messages of one process."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.mailbox: Mailbox[Any] = Mailbox()
        self._lock = threading.RLock()
        """Held for moments by all that look into the mailbox; a peer may be asked for, or told something, inside."""
        self._arriving: dict[tuple[str, int], _Tensor] = {}
        """By sender and number: tensors of which chunks are missing."""
        self._holding: dict[str, Peer] = {}
        """By address: the processes that keep their messages, because too much of them waits to be received."""
        endpoint.on_message = self._take
        endpoint.on_end.append(self._fail)
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
        if tag is None and not has_payload:
            envelope, receipt = b"", None
        else:
            envelope, receipt = self._label(to, tag, has_payload)
        if lent is not None and lent.number:
            return self._confirmed(self._send_lent(_MESSAGE, to, envelope, data, buffers, lent), receipt)
        peer = self.endpoint.peers.get(to) or self.endpoint.peer(to)
        handle = peer.send(_MESSAGE, 0, envelope, data, buffers, None, lambda: f"{to} has not taken a message")
        return handle if receipt is None else self._confirmed(handle, receipt)

    def _label(self, to: str, tag: Hashable, extra: Any) -> tuple[bytes, _Receipt | None]:
        """Return the envelope of a message, and who waits for news of its tag if that may be hard to read there."""
        parts = tag if type(tag) is tuple else (tag,)
        if all(type(part) in _PLAIN for part in parts):
            if any(part != part for part in parts):
                raise ConfigError("tag is nan, which equals nothing, so that nobody could receive it")
            return b"t" + pickle.dumps((tag, extra)), None
        try:
            is_equal = hash(tag) == hash(tag) and tag == tag
        except Exception as error:
            raise ConfigError(
                f"tag is {shorten(repr(tag), 100)}: {error}", hint="a tag is a text, a number, or a tuple of these"
            ) from None
        if not is_equal:
            raise ConfigError(f"tag is {shorten(repr(tag), 100)}, which does not equal itself")
        data, buffers = pack((tag, extra))
        if buffers or not data:
            raise ConfigError(f"the tag, a {type(tag).__name__}, is too large")
        receipt = _Receipt(self.endpoint.loop, late=lambda: f"{to} has not read a tag")
        number = next(self.endpoint.numbers)
        self.endpoint.peer(to).requests[number] = receipt
        return b"x" + number.to_bytes(8, "little") + data, receipt

    def _confirmed(self, handle: Handle[None] | None, receipt: _Receipt | None) -> Handle[None] | None:
        """Return a handle that is done when a message is sent and its tag could be read."""
        if receipt is None or handle is None:
            return receipt or handle
        return all_of(self.endpoint.loop, [handle, receipt], None, "the message has not arrived")

    def _send_lent(
        self, kind: int, to: str, envelope: bytes, data: bytes, buffers: Sequence[Any], lent: Lending
    ) -> Handle[None]:
        """Send what has tensors on a device in it. The handle is done when the receiver has fetched them."""
        handle: Handle[None] = Handle(self.endpoint.loop, late=lambda: f"{to} has not fetched a tensor")
        lent.on_back = lambda error: handle.complete(None) if error is None else handle.fail(error)
        number = lent.number
        peer = self.endpoint.peer(to)
        peer.send(kind, number, envelope, data, buffers)
        if peer.error is not None:
            lent.cancel()
            handle.fail(peer.error)
        return handle

    def send_tensor(self, tensor: Any, to: str, tag: Hashable = None) -> Handle[None]:
        """Send the content of a tensor or array. The handle is done when it may be changed."""
        lent = lending(self.endpoint, to) if is_on_device(tensor) else None
        if lent is not None:
            loan = lent.lend(tensor)
            envelope, receipt = self._label(to, tag, (loan.memory.nbytes, loan.dtype, loan.shape))
            handle = self._send_lent(_TENSOR, to, envelope, pickle.dumps(loan), (), lent)
            return self._confirmed(handle, receipt) or handle
        source = as_buffer(tensor, "send_tensor")
        size, number = source.nbytes, next(self.endpoint.numbers)
        envelope, receipt = self._label(to, tag, (size, source.dtype, source.shape))
        sender = _Sender(self.endpoint.loop, late=lambda: f"{to} has not taken a tensor")
        peer = sender.peer = self.endpoint.peer(to)
        peer.fail_at_end(sender)
        peer.when_open(lambda: self._send_chunks(peer, source, number, envelope, sender), sender.fail)
        return self._confirmed(sender, receipt) or sender

    def _send_chunks(self, peer: Peer, source: Buffer, number: int, envelope: bytes, sender: _Sender) -> None:
        """Send a tensor in pieces of shared memory, a few at a time; to another node, in one piece."""
        size = source.nbytes
        step = _CHUNK if peer.is_near and size >= SHARED_FROM else max(1, size)
        at = out = 0
        is_begun = False
        parts: list[Handle[None]] = []
        # Chunks are sent in order, by the caller and by the thread that reads what comes back.
        turn = threading.RLock()

        def fill() -> None:
            nonlocal at, out, is_begun
            while (at < size or not is_begun) and out < _AHEAD:
                is_begun = True
                part = source.view[at : at + step]
                shared = peer.share(part, part.nbytes)
                label = b"" if at else envelope
                at += part.nbytes
                out += shared is not None
                sent = peer.send(_TENSOR, number, label, b"", [shared or part], freed if shared else None, str)
                if sent is not None and not (sent.is_done and parts):
                    parts.append(sent)
            if at >= size:
                whole = all_of(self.endpoint.loop, parts, None, "")
                whole.on_done(lambda: sender.complete(None) if whole.error is None else sender.fail(whole.error))

        def freed() -> None:
            nonlocal out
            with turn:
                out -= 1
                if at < size:
                    fill()

        with turn:
            fill()

    def receive(self, source: str, tag: Hashable = None, into: Any = None) -> Handle[Any]:
        """Receive the next message of a source, as a handle."""
        target = None if into is None else as_buffer(into, "recv_tensor", is_target=True)
        handle = _Later(self.endpoint, source, target, functools.partial(_open, source, target))
        receive: Receive[Any] = Receive(source, tag, _Kept(handle, self))
        handle.give_back = functools.partial(self._give_back, receive)
        message = self._post(receive)
        if message is not None:
            handle.complete(message)
        return handle

    def wait_for_next(self, source: str, tag: Hashable, into: Any, timeout: float | None) -> Any:
        """Receive the next message of a source, and wait for it."""
        seconds = check_timeout(timeout)
        target = None if into is None else as_buffer(into, "recv_tensor", is_target=True)
        handle = _Receiver(self.endpoint, source, target)
        receive: Receive[Any] = Receive(source, tag, handle)
        message: Message | None = None
        try:
            message = self._post(receive)
            if message is None:
                # What arrived just now is for this receive, what arrives later for the next.
                if not self.endpoint.loop.wait_for(handle, seconds):
                    if self._withdraw(receive):
                        raise handle.timed_out(timeout)
                    # The thread that has read the message is about to say so.
                    if not self.endpoint.loop.wait_for(handle, SETTLE_SECONDS):
                        raise handle.timed_out(timeout)
                message = handle.message()
            return _open(source, target, message)
        except BaseException as error:
            if not isinstance(error, RoostError):
                # As that of a handler of a signal: the next receive gets the message.
                if message is not None:
                    self._put_back(message)
                elif not self._withdraw(receive):
                    handle.on_done(lambda: self._put_back(handle.raw))
            raise

    def _give_back(self, receive: Receive[Any], message: Message | None) -> None:
        """Do so for a receive whose handle was dropped."""
        if message is not None:
            self._put_back(message)
        else:
            self._withdraw(receive)

    def _post(self, receive: Receive[Any]) -> Message | None:
        """Let a receive wait for its message; returns the message instead if all of it is here."""
        endpoint, source, handle = self.endpoint, receive.source, receive.receiver
        with self._lock:
            message = self.mailbox.post(receive)
            if message is None:
                if source not in endpoint.peers and not source.endswith(ANY):
                    # So that the end of that process is noticed.
                    endpoint.peer(source)
            elif isinstance(message.content, _Tensor):
                self._direct(message.content, handle)
                if message.content.missing > 0:
                    message = None
            if self._holding:
                self._let_come()
        return message

    def _withdraw(self, receive: Receive[Any]) -> bool:
        """Take a receive back; False if all of its message is here."""
        with self._lock:
            if self.mailbox.withdraw(receive):
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
        with self._lock:
            tensor = message.content
            if isinstance(tensor, _Tensor):
                tensor.receiver = None
                if tensor.target is not None:
                    # The caller has its memory back.
                    arrived = bytearray(tensor.target.view[: tensor.size - tensor.missing])
                    tensor.target, tensor.chunks = None, [(0, memoryview(arrived))]
            receive = self.mailbox.put_back(message)
            if receive is None:
                return
            if isinstance(tensor, _Tensor):
                self._direct(tensor, receive.receiver)
                if tensor.missing > 0:
                    return
        receive.receiver.complete(message)

    def _take(self, peer: Peer, frame: Frame) -> None:
        """Give a message to the receive that waits for it, or keep it; in the thread that reads."""
        info = peer.info
        if info is None:
            return
        try:
            waits = self._take_chunk(info, frame) if frame.kind == _TENSOR else self._take_message(info, frame)
        except _UnreadableTag as error:
            log.error("%s", error)
            return
        if waits and self.mailbox.size_from(info.address, info.instance) > _MOST_WAITING:
            with self._lock:
                if not self._is_waiting_for(info.address):
                    self._holding[info.address] = peer
                    peer.hold(is_holding=True)

    def _take_message(self, peer: PeerInfo, frame: Frame) -> bool:
        """Take an object; returns whether it waits for a receive."""
        tag = self._read_label(peer, frame.envelope)[0] if frame.envelope else None
        size = frame.size if frame.buffers else len(frame.data)
        message = Message(peer.address, peer.instance, tag, frame, size)
        if frame.number:
            message.loan = peer, frame.number
        with self._lock:
            receive = self.mailbox.deliver(message)
        if receive is None:
            return True
        receive.receiver.complete(message)
        return False

    def _read_label(self, peer: PeerInfo, envelope: bytes) -> tuple[Hashable, Any]:
        """Return the tag of a message and what comes with it; the sender waits for news of a tag of its own class."""
        if envelope[:1] == b"t":
            plain: tuple[Hashable, Any] = pickle.loads(envelope[1:])  # noqa: S301 - from a member of this job
            return plain
        found, problem = None, ""
        try:
            found = pickle.loads(envelope[9:])  # noqa: S301 - likewise
            hash(found[0])
        except Exception as error:
            problem = f"{self.endpoint.own.address} cannot read the tag of a message from {peer.address}: {error}"
        there = self.endpoint.peers.get(peer.address)
        if there is not None:
            there.send(Kind.REPLY, int.from_bytes(envelope[1:9], "little"), problem.encode())
        if found is None or problem:
            raise _UnreadableTag(problem)
        return found[0], found[1]

    def _take_chunk(self, peer: PeerInfo, frame: Frame) -> bool:
        """Take a part of a tensor, or all of it; returns whether it waits for a receive."""
        with self._lock:
            tensor = self._arriving.get((peer.instance, frame.number))
            if tensor is None:
                if not frame.envelope:
                    # Of a tensor whose tag could not be read.
                    return False
                tag, (size, dtype, shape) = self._read_label(peer, frame.envelope)
                tensor = _Tensor(size, dtype, shape, size)
                tensor.message = Message(peer.address, peer.instance, tag, tensor, size)
                if frame.data:
                    tensor.message.loan = peer, frame.number
                receive = self.mailbox.deliver(tensor.message)
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
        if tensor.receiver is not None and tensor.message is not None:
            tensor.receiver.complete(tensor.message)
        return tensor.receiver is None

    def _direct(self, tensor: _Tensor, receiver: Any) -> None:
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
        return self.mailbox.is_waiting_for(address) or any(
            tensor.receiver is not None and tensor.message is not None and tensor.message.source == address
            for tensor in self._arriving.values()
        )

    def _let_come(self) -> None:
        """Let messages come again that are waited for, or that there is room for."""
        for address, peer in list(self._holding.items()):
            instance = peer.info.instance if peer.info is not None else ""
            if self._is_waiting_for(address) or self.mailbox.size_from(address, instance) <= _MOST_WAITING // 2:
                del self._holding[address]
                peer.hold(is_holding=False)

    def _fail(self, peer: Peer, error: Exception) -> None:
        """Fail what waits for a process that has ended, or that cannot be found."""
        instance = peer.info.instance if peer.info is not None else None
        with self._lock:
            receives = self.mailbox.withdraw_from(peer.address)
            lost = [self._arriving.pop(key) for key in list(self._arriving) if key[0] == instance]
            self._holding.pop(peer.address, None)
            for tensor in lost:
                if tensor.receiver is None and tensor.message is not None:
                    self.mailbox.remove(tensor.message)
        for receiver in [receive.receiver for receive in receives] + [tensor.receiver for tensor in lost]:
            if receiver is not None:
                receiver.fail(error)

    def _close(self) -> None:
        with self._lock:
            receivers = [receive.receiver for receive in self.mailbox.receives()]
            receivers += [tensor.receiver for tensor in self._arriving.values()]
        for receiver in receivers:
            if receiver is not None:
                receiver.fail(ClusterError(ENDED))


class _UnreadableTag(Exception):  # noqa: N818 - what happened
    """The tag of a message cannot be unpickled here."""


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
