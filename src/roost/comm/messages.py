"""Messages between two workers: objects, and tensors into buffers that exist."""

from __future__ import annotations

import functools
import logging
import pickle
import threading
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from roost.comm.mailbox import ANY, Mailbox, Message, Receive
from roost.comm.move.arrays import Buffer, as_buffer, is_on_device, wrap
from roost.comm.move.loans import Lending, Loan, Loans, fetch_into, fetched, lending, settle
from roost.comm.move.memory import copy
from roost.comm.packing import pack, unpack
from roost.comm.wire.connection import SHARED_FROM, Connection, Frame, Kind, PeerInfo, SharedBuffer, view
from roost.comm.wire.endpoint import ENDED, Endpoint
from roost.comm.wire.loop import Handle, all_of, check_timeout, is_from_handler
from roost.comm.wire.peer import Peer
from roost.errors import CallTimedOut, ClusterError, ConfigError, RoostError, WorkerFailed
from roost.runtime.failures.meanwhile import with_meanwhile
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
    message: Message
    receive: Receive | None = None
    target: Buffer | None = None
    """Where it goes; until that is known, or if it does not fit there, the chunks are kept."""
    chunks: list[tuple[int, memoryview]] = field(default_factory=list)
    loan: Loan | None = None
    """Where it is, if it is on a device."""


class _Received(Handle[Any]):
    """A receive. If its caller gives it up, the next receive gets its message."""

    __slots__ = ("__weakref__", "_messages", "receive")

    def __init__(self, messages: Messages, source: str, tag: Hashable, into: Any) -> None:
        target = None if into is None else as_buffer(into, "recv_tensor", is_target=True)
        if tag is not None:
            _is_plain(tag)
        super().__init__(messages.endpoint.loop, functools.partial(_open, source, target))
        self._messages = messages
        self.receive = Receive(source, tag, weakref.ref(self), target)

    def source(self) -> Connection | None:
        peer = self._messages.endpoint.peers.get(self.receive.source)
        return peer.connection if peer is not None else None

    def waits_for(self) -> str:
        source = self.receive.source
        if source == ANY:
            return "any worker"
        return f"any worker of {source.removesuffix(':' + ANY)!r}" if source.endswith(ANY) else source

    def missing(self) -> str:
        return f"{self._messages.endpoint.own.address} has got no message from {self.waits_for()}"

    def give_up(self) -> None:
        """Let the next receive have the message, unless the caller has got it, or an error."""

        def withdraw() -> None:
            # Once: it is not done again when the handle is dropped.
            self._open = None
            if not self._messages.withdraw(self.receive):
                # The thread that has read the message may be about to hand it over.
                self.on_done(lambda: self._messages.put_back(self._value))

        if not self._is_taken():
            self._loop.do(withdraw)

    def open(self) -> Any:
        """Return what arrived to the caller of this receive, or raise its error; interrupted, it can be given up."""
        if self.error is not None:
            raise self.error
        receive = self.receive
        try:
            value = _open(receive.source, receive.target, self._value)
        except RoostError as error:
            self.error = error
            raise
        # From here to the end of `recv` nothing is called, and so nothing is interrupted.
        self._open = None
        return value

    def _is_taken(self) -> bool:
        return self.is_done and (self._open is None or self.error is not None)


class _Later(_Received):
    """A receive whose caller has the handle: dropping it gives it up.

    Only these have a finalizer, which swallows what a handler of a signal raises in it.
    """

    __slots__ = ()

    def __del__(self) -> None:
        # The caller may have been interrupted before it was made.
        if getattr(self, "receive", None) is not None and not self._is_taken():
            # This may run in the middle of anything, and so the communication thread does it.
            messages, receive, message = self._messages, self.receive, self._value
            self._loop.call(lambda: messages.put_back(message) if message is not None else messages.withdraw(receive))


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
        self.mailbox = Mailbox()
        self._lock = threading.RLock()
        """Held for moments by all that look into the mailbox; a peer may be asked for, or told something, inside."""
        self._arriving: dict[tuple[str, int], _Tensor] = {}
        """By sender and number: tensors of which chunks are missing."""
        self.rows: dict[Hashable, tuple[bytes, int]] = {}
        """Number and rows of calls of `send_to`: by label of one that waits for other ranks, by rank and label of the
        last."""
        self._holding: dict[str, Peer] = {}
        """By address: the processes that keep their messages, because too much of them waits to be received."""
        self._sent: Handle[None] = Handle(endpoint.loop)
        """Of all that was sent at once."""
        self._sent.complete(None)
        endpoint.on_message = self._take
        endpoint.on_end.append(self._fail)
        endpoint.on_close.append(lambda: self._fail(None, ClusterError(ENDED)))
        Loans(endpoint)
        endpoint.open()

    def send(self, thing: Any, to: str, tag: Hashable = None, payload: Any = None) -> Handle[None]:
        """Send an object. The handle is done when what was sent may be changed."""
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
        return self._confirmed(handle or self._sent, receipt)

    def _label(self, to: str, tag: Hashable, extra: Any) -> tuple[bytes, _Receipt | None]:
        """Return the envelope of a message, and who waits for news of its tag if that may be hard to read there."""
        if _is_plain(tag):
            return b"t" + pickle.dumps((tag, extra)), None
        data, buffers = pack((tag, extra))
        if buffers or not data:
            raise ConfigError(f"the tag, a {type(tag).__name__}, is too large")
        receipt = _Receipt(self.endpoint.loop, late=lambda: f"{to} has not read a tag")
        number = next(self.endpoint.numbers)
        self.endpoint.peer(to).requests[number] = receipt
        return b"x" + number.to_bytes(8, "little") + data, receipt

    def _confirmed(self, handle: Handle[None], receipt: _Receipt | None) -> Handle[None]:
        """Return a handle that is done when a message is sent and its tag could be read."""
        if receipt is None:
            return handle
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
            return self._confirmed(handle, receipt)
        source = as_buffer(tensor, "send_tensor")
        size, number = source.nbytes, next(self.endpoint.numbers)
        envelope, receipt = self._label(to, tag, (size, source.dtype, source.shape))
        peer = self.endpoint.peer(to)
        # It goes on when the other end returns chunks.
        sender: Handle[None] = Handle(self.endpoint.loop, late=lambda: f"{to} has not taken a tensor", peer=peer)
        self.endpoint.loop.do(
            lambda: peer.when_open(lambda: self._send_chunks(peer, source, number, envelope, sender), sender)
        )
        return self._confirmed(sender, receipt)

    def _send_chunks(self, peer: Peer, source: Buffer, number: int, envelope: bytes, sender: Handle[None]) -> None:
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
        handle = _Later(self, source, tag, into)
        self.endpoint.loop.do(lambda: self._post(handle))
        return handle

    def wait_for_next(self, source: str, tag: Hashable, into: Any, timeout: float | None) -> Any:
        """Receive the next message of a source, and wait for it: what has not arrived by then is for the next."""
        seconds = check_timeout(timeout)
        handle, loop = _Received(self, source, tag, into), self.endpoint.loop
        try:
            may_read = loop.do(lambda: self._post(handle))
            if not handle.is_done and not loop.wait_for(handle, seconds, may_read):
                raise handle.timed_out(timeout)
            return handle.open()
        except BaseException:
            handle.give_up()
            raise

    def _post(self, handle: _Received) -> None:
        """Let a receive wait for its message, or have it if all of it is here."""
        endpoint, receive = self.endpoint, handle.receive
        with self._lock:
            message = self.mailbox.post(receive)
            if message is None:
                if receive.source not in endpoint.peers and not receive.source.endswith(ANY):
                    # So that the end of that process is noticed.
                    endpoint.peer(receive.source)
            elif isinstance(message.content, _Tensor):
                self._direct(message.content, receive)
                if message.content.missing > 0:
                    message = None
            for address, peer in list(self._holding.items()):
                instance = peer.info.instance if peer.info is not None else ""
                has_room = self.mailbox.size_from(address, instance) <= _MOST_WAITING // 2
                if has_room or self._is_waiting_for(address):
                    del self._holding[address]
                    peer.send(Kind.HOLD, 0)
        if message is not None:
            handle.complete(message)

    def recv(self, source: str, tag: Hashable, into: Any, async_op: bool, timeout: float | None) -> Any:
        """Do the one or the other."""
        if async_op:
            return self.receive(source, tag, into)
        try:
            return self.wait_for_next(source, tag, into, timeout)
        except CallTimedOut as late:
            raise with_meanwhile(late) from None

    def ended(self, handles: Sequence[Handle[None]], async_op: bool, timeout: float | None) -> Handle[None] | None:
        """Wait for sends, unless their handle is wanted."""
        if async_op:
            return all_of(self.endpoint.loop, handles, None, "not every rank has taken a message")
        for handle in handles:
            handle.wait(timeout)
        return None

    def withdraw(self, receive: Receive) -> bool:
        """Take a receive back; False if all of its message is here."""
        with self._lock:
            if self.mailbox.withdraw(receive):
                return True
            for tensor in self._arriving.values():
                if tensor.receive is receive:
                    self.put_back(tensor.message)
                    return True
        return False

    def put_back(self, message: Message | None) -> None:
        """Let the next receive have a message whose receiver gave up before it got it."""
        if message is None:
            return
        with self._lock:
            tensor = message.content
            if isinstance(tensor, _Tensor):
                tensor.receive = None
                if tensor.target is not None:
                    # The caller has its memory back.
                    arrived = bytearray(tensor.target.view[: tensor.size - tensor.missing])
                    tensor.target, tensor.chunks = None, [(0, memoryview(arrived))]
            receive = self.mailbox.deliver(message)
            if receive is None:
                return
            if isinstance(tensor, _Tensor):
                self._direct(tensor, receive)
                if tensor.missing > 0:
                    return
        self._hand_over(receive, message)

    def _hand_over(self, receive: Receive, message: Message) -> None:
        """Complete a receive, or have the next one if its handle was dropped."""
        handle = receive.handle()
        if handle is None:
            self.put_back(message)
        else:
            handle.complete(message)

    def _take(self, peer: Peer, frame: Frame) -> None:
        """Give a message to the receive that waits for it, or keep it; in the thread that reads."""
        info = peer.info
        if info is None:
            return
        if frame.kind == _TENSOR:
            waits = self._take_chunk(info, frame)
        else:
            label = self._read_label(info, frame.envelope) if frame.envelope else (None, False)
            if label is None:
                return
            size = len(frame.data)
            if frame.buffers:
                size += sum([view(buffer).nbytes for buffer in frame.buffers])
            message = Message(info.address, info.instance, label[0], frame, size)
            if frame.number:
                message.loan = info, frame.number
            with self._lock:
                receive = self.mailbox.deliver(message)
            waits = receive is None
            if receive is not None:
                self._hand_over(receive, message)
        if waits and self.mailbox.size_from(info.address, info.instance) > _MOST_WAITING:
            with self._lock:
                if info.address not in self._holding and not self._is_waiting_for(info.address):
                    self._holding[info.address] = peer
                    peer.send(Kind.HOLD, 1)

    def _read_label(self, peer: PeerInfo, envelope: bytes) -> tuple[Hashable, Any] | None:
        """Return the tag of a message and what comes with it; None if the tag cannot be unpickled here.

        The sender waits for news of a tag of its own class.
        """
        if envelope[:1] == b"t":
            plain: tuple[Hashable, Any] = pickle.loads(envelope[1:])  # noqa: S301 - from a member of this job
            return plain
        found: tuple[Hashable, Any] | None = None
        problem = ""
        try:
            found = pickle.loads(envelope[9:])  # noqa: S301 - likewise
            hash(found[0])
        except BaseException as error:
            if is_from_handler(error):
                raise
            what = str(error) if isinstance(error, Exception) else f"{type(error).__name__}: {error}"
            problem = f"{self.endpoint.own.address} cannot read the tag of a message from {peer.address}: {what}"
        there = self.endpoint.peers.get(peer.address)
        if there is not None:
            there.send(Kind.REPLY, int.from_bytes(envelope[1:9], "little"), problem.encode())
        if problem:
            log.error("%s", problem)
            return None
        return found

    def _take_chunk(self, peer: PeerInfo, frame: Frame) -> bool:
        """Take a part of a tensor, or all of it; returns whether it waits for a receive."""
        with self._lock:
            tensor = self._arriving.get((peer.instance, frame.number))
            if tensor is None:
                if not frame.envelope:
                    # Of a tensor whose tag could not be read.
                    return False
                label = self._read_label(peer, frame.envelope)
                if label is None:
                    return False
                tag, (size, dtype, shape) = label
                message = Message(peer.address, peer.instance, tag, None, size)
                tensor = message.content = _Tensor(size, dtype, shape, size, message)
                if frame.data:
                    tensor.message.loan = peer, frame.number
                receive = self.mailbox.deliver(tensor.message)
                if receive is not None:
                    self._direct(tensor, receive)
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
                return tensor.receive is None
            del self._arriving[peer.instance, frame.number]
        if tensor.receive is not None:
            self._hand_over(tensor.receive, tensor.message)
        return tensor.receive is None

    def _direct(self, tensor: _Tensor, receive: Receive) -> None:
        """Let a tensor go to its receiver, and straight into its target if it fits."""
        tensor.receive, target = receive, receive.target
        if target is not None and target.nbytes == tensor.size:
            tensor.target = target
            for at, part in tensor.chunks:
                if part.nbytes:
                    copy(part, target.view[at:], part.nbytes)
            tensor.chunks.clear()

    def _is_waiting_for(self, address: str) -> bool:
        """Whether a receive waits for this process, or for the rest of a tensor of it."""
        return self.mailbox.is_waiting_for(address) or any(
            tensor.receive is not None and tensor.message.source == address for tensor in self._arriving.values()
        )

    def _fail(self, peer: Peer | None, error: Exception) -> None:
        """Fail what waits for a process that has ended or cannot be found; without one, all that waits for any."""
        with self._lock:
            if peer is None:
                receives = list(self.mailbox.receives())
                lost = list(self._arriving.values())
            else:
                instance = peer.info.instance if peer.info is not None else None
                receives = self.mailbox.withdraw_from(peer.address)
                lost = [self._arriving.pop(key) for key in list(self._arriving) if key[0] == instance]
                self._holding.pop(peer.address, None)
            for tensor in lost:
                if tensor.receive is not None:
                    receives.append(tensor.receive)
                else:
                    self.mailbox.remove(tensor.message)
        for receive in receives:
            handle = receive.handle()
            if handle is not None:
                handle.fail(error)


def _is_plain(tag: Hashable) -> bool:
    """Whether any process can read a tag; ConfigError if nobody could name it."""
    parts = tag if type(tag) is tuple else (tag,)
    is_plain = all(type(part) in _PLAIN for part in parts)
    try:
        is_equal = not any(part != part for part in parts) if is_plain else hash(tag) == hash(tag) and tag == tag
    except Exception as error:
        raise ConfigError(
            f"tag is {shorten(repr(tag), 100)}: {error}", hint="a tag is a text, a number, or a tuple of these"
        ) from None
    if not is_equal:
        raise ConfigError(f"tag is {shorten(repr(tag), 100)}, which does not equal itself")
    return is_plain


def _open(source: str, target: Buffer | None, message: Message) -> Any:
    """Turn a message into what the caller of a receive gets, in the caller's thread."""
    try:
        value = _make_value(source, target, message)
    except Exception as error:
        # Whatever could not be unpickled is not fetched again; after an interrupt it is.
        if not is_from_handler(error):
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
            # What arrived is in the memory of the host.
            target.as_tensor().copy_(wrap(target.view, "uint8", (target.nbytes,)))
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
            if is_from_handler(error):
                raise
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
