"""A socket between two members of a job: proves that both know the job's secret, then carries frames.

A frame is a header, descriptions of its buffers, an envelope, data, and the buffers that do not travel through shared
memory. No byte of a frame is looked at before the other end has proved that it is a member.
"""

from __future__ import annotations

import array
import contextlib
import enum
import hmac
import itertools
import json
import logging
import os
import secrets
import select
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from threading import get_ident
from typing import Any

from roost.comm.move.memory import Memory, Pool, copy
from roost.comm.wire.loop import SILENT_SECONDS, SPACE, Handle, Loop, is_interruptible, uninterrupted
from roost.errors import WorkerDied

log: logging.Logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<IIIQQ")
"""The kind, the number of buffers, the sizes of the envelope and the data, and a number."""
_BUFFER = struct.Struct("<QQ")
_NONCE = 32
_PROOF = 32
_MOST_HELLO = 4096
_MOST_PARTS = 256
_READABLE = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR
_WRITABLE = select.EPOLLOUT
_NOW = socket.MSG_DONTWAIT
_SILENT = struct.pack("@ll", 0, int(SILENT_SECONDS * 1e6))
_DIRECT_SPACE = 1 << 16
_FD_SPACE = socket.CMSG_SPACE(4 * 16)
SHARED_FROM = 1 << 16
"""Buffers from this size on travel through shared memory, if both ends have the same kernel."""


class Kind(enum.IntEnum):
    """What a frame is."""

    MESSAGE = 1
    TENSOR = 2
    REQUEST = 3
    REPLY = 4
    MEMORY = 5
    FREE = 6
    FETCH = 7
    RETURN = 8
    FORGET = 9


_ABOUT_MEMORY = frozenset({int(Kind.MEMORY), int(Kind.FREE), int(Kind.FORGET)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Who is at the other end: the name, which process it is of all that had the name, and where."""

    address: str
    instance: str
    node: str
    node_rank: int = 0

    def __str__(self) -> str:
        return f"{self.address} on {self.node}" if self.node else self.address


@dataclass(slots=True)
class Frame:
    """One frame as it arrived."""

    kind: int
    number: int
    envelope: bytes
    data: bytes
    buffers: list[Any]
    """Writable buffers; those in shared memory are `SharedBuffer`."""

    @property
    def size(self) -> int:
        """Its size in bytes."""
        size = len(self.data)
        return size + sum([int(buffer.nbytes) for buffer in self.buffers]) if self.buffers else size


class SharedBuffer:
    """A buffer in the memory of another process: `view` is its bytes, and it goes back when it is not used any more."""

    __slots__ = ("_give_back", "memory", "view")

    def __init__(self, memory: Memory, view: memoryview, give_back: Callable[[], None] = lambda: None) -> None:
        self.memory = memory
        self.view = view
        self._give_back = give_back

    def give_back(self) -> None:
        """Return it now; `view` must not be used any more."""
        self._give_back()

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.view.nbytes


class Connection:
    """One end of a connection. Frames arrive in order; any thread may send."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        secret: bytes,
        own: Peer,
        *,
        is_server: bool,
        pools: tuple[Pool, Pool],
        on_open: Callable[[Connection], None],
        on_frame: Callable[[Connection, Frame], None],
        on_close: Callable[[Connection], None],
    ) -> None:
        self.peer: Peer | None = None
        """The other end, once it has proved to be a member."""
        self.is_closed = False
        self.is_local: bool = sock.family == socket.AF_UNIX
        """Whether shared memory can be passed to the other end."""
        self._loop = loop
        self._sock = sock
        self.fd = sock.fileno()
        self.is_lent = False
        self.sleepers = 0
        self._secret = secret
        self._own = own
        self._is_server = is_server
        self._shared, self._private = pools
        self._on_open, self._on_frame, self._on_close = on_open, on_frame, on_close
        self._out: deque[memoryview] = deque()
        self._out_fds: deque[tuple[int, Memory]] = deque()
        """Descriptors that travel with a part of `_out`, by the number of bytes after which that begins."""
        self._written = 0
        self._queued = 0
        self._marks: deque[tuple[int, Handle[None]]] = deque()
        """Sends that are done when so many bytes have left this process."""
        self._sends: set[Handle[None]] = set()
        """Sends that fail if it ends before they are done."""
        self._error: Exception | None = None
        """Why it was closed, if not because the other end is gone."""
        self._is_broken = False
        """Whether bytes that were to be sent are lost."""
        self._rest = b""
        self._in_fds: deque[int] = deque()
        self._greeting: Generator[int, bytes, None] | None = self._greet()
        """Reads what proves that the other end is a member; None afterwards."""
        self._wanted = next(self._greeting)
        self._filling: deque[memoryview] = deque()
        """The large buffers of a frame that is not complete: they are filled where they stay."""
        self._unfinished: Frame | None = None
        self._large: bytearray | None = None
        """A frame with much data, of which a part is missing."""
        self._is_reading = True
        self._numbers: dict[weakref.ref[Memory], int] = {}
        """By what the other end may borrow: the number that it knows that by, until the memory is no more."""
        self._new_number = itertools.count(1)
        self._lent: dict[int, deque[tuple[SharedBuffer, Callable[[], None] | None]]] = {}
        """What the other end borrowed, each as often as it did, by the number that it knows the memory by."""
        self._lock = threading.RLock()
        self._reading = threading.Lock()
        """Held by the thread that reads."""
        self._listening = threading.Lock()
        self._space: memoryview | None = None
        """Where threads put what they read themselves."""
        self._maps: dict[int, Memory] = {}
        sock.setblocking(False)
        if not self.is_local:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop.watch(self.fd, self._handle)
        if is_server:
            self._nonce = secrets.token_bytes(_NONCE)
            self._write([self._nonce])

    @property
    def backlog(self) -> int:
        """How many bytes wait for the other end to take them."""
        return self._queued - self._written

    def send(
        self,
        kind: Kind,
        number: int,
        envelope: bytes = b"",
        data: Any = b"",
        buffers: Sequence[Any] = (),
        on_free: Callable[[], None] | None = None,
    ) -> None:
        """Send a frame. Any thread may; `on_free` is called when the other end returns shared memory of it."""
        if not buffers and not self._out and self._send_now(kind, number, envelope, data):
            return
        if is_interruptible():
            # Between a write and the note of how much was written, no exception may come.
            with uninterrupted():
                self._send(kind, number, envelope, data, buffers, on_free)
        else:
            self._send(kind, number, envelope, data, buffers, on_free)

    def _send_now(self, kind: Kind, number: int, envelope: bytes, data: Any) -> bool:
        """Write a small frame if nothing is in its way; returns whether that is done."""
        if get_ident() == self._loop.ident or is_interruptible():
            return False
        with self._lock:
            if self._out or self.is_closed:
                return False
            part = _HEADER.pack(kind, 0, len(envelope), len(data), number) + envelope + data
            try:
                sent = self._sock.send(part, _NOW)
            except BlockingIOError:
                return False
            except OSError:
                self._break()
                return True
            if sent < len(part):
                self._write([memoryview(part)[sent:]])
        return True

    def _send(
        self,
        kind: Kind,
        number: int,
        envelope: bytes,
        data: Any,
        buffers: Sequence[Any],
        on_free: Callable[[], None] | None,
    ) -> None:
        with self._lock:
            if self.is_closed:
                # Lent to no process, and used by none.
                for buffer in buffers:
                    if isinstance(buffer, SharedBuffer):
                        self._shared.drop(buffer.memory)
                return
            if not buffers:
                self._write([_HEADER.pack(kind, 0, len(envelope), len(data), number) + envelope + data])
                return
            descriptions, inline = [], []
            for buffer in buffers:
                if isinstance(buffer, SharedBuffer) and self.is_local:
                    number_there = self._lend(buffer.memory, buffer, on_free)
                    descriptions.append(_BUFFER.pack(buffer.view.nbytes, number_there))
                    continue
                view = memoryview(buffer.view if isinstance(buffer, SharedBuffer) else buffer).cast("B")
                descriptions.append(_BUFFER.pack(view.nbytes, 0))
                inline.append(view)
            header = _HEADER.pack(kind, len(descriptions), len(envelope), len(data), number)
            self._write([b"".join((header, *descriptions, envelope, data)), *inline])

    def complete_when_written(self, handle: Handle[None]) -> None:
        """Complete a send when all that was sent before has left this process; at once if it has."""
        with self._lock:
            is_written = self._written == self._queued and not self._is_broken
            if not is_written:
                self._marks.append((self._queued, handle))
        if is_written:
            handle.complete(None)
        else:
            self.fail_at_end(handle)

    def fail_at_end(self, handle: Handle[None]) -> None:
        """Fail a send with WorkerDied if the connection ends before it is done."""
        self._sends.add(handle)
        handle.on_done(lambda: self._sends.discard(handle))
        if self.is_closed:
            self._fail_sends()

    def share(self, data: Any, size: int) -> SharedBuffer | None:
        """Copy a large buffer into shared memory for the other end; None if it must go through the socket."""
        if not self.is_local or self.is_closed or size < SHARED_FROM:
            return None
        memory = self._shared.take(size)
        if memory is None:
            return None
        try:
            copy(data, memory.map, size)
        except BaseException:
            self._shared.give(memory)
            raise
        return SharedBuffer(memory, memoryview(memory.map)[:size])

    def _lend(self, memory: Memory, kept: SharedBuffer, on_free: Callable[[], None] | None) -> int:
        number = self._numbers.get(weakref.ref(memory))
        if number is None:
            number = next(self._new_number)
            self._numbers[weakref.ref(memory, self._forget)] = number
            self._write([_HEADER.pack(Kind.MEMORY, 0, 0, 0, number)], memory)
        self._lent.setdefault(number, deque()).append((kept, on_free))
        return number

    def _forget(self, reference: weakref.ref[Memory]) -> None:
        """Let the other end unmap memory that is no more here; in a finalizer, which may run anywhere."""
        number = self._numbers.pop(reference, None)
        if number is not None:
            self._loop.call(lambda: self.send(Kind.FORGET, number))

    def _write(self, parts: Sequence[Any], memory: Memory | None = None) -> None:
        if self.is_closed:
            return
        was_idle = not self._out
        # Frames that are sent in answer to several others leave together.
        is_deferred = was_idle and self._loop.at_end_of_turn(self._flush_all)
        if memory is not None:
            self._out_fds.append((self._queued, memory))
        for part in parts:
            view = memoryview(part)
            if view.nbytes:
                self._out.append(view)
                self._queued += view.nbytes
        if was_idle and not is_deferred:
            self._flush()

    def _flush_all(self) -> None:
        with self._lock:
            if not self.is_closed:
                self._flush()

    def _flush(self) -> None:
        """Write what the socket takes."""
        try:
            while self._out:
                fds: list[int] = []
                limit = len(self._out)
                if self._out_fds:
                    at, memory = self._out_fds[0]
                    if at == self._written:
                        fds, limit = [memory.fd], 1
                    else:
                        # Up to the part that the next descriptor belongs to.
                        limit, ahead = 0, at - self._written
                        while ahead > 0:
                            ahead -= self._out[limit].nbytes
                            limit += 1
                parts = [self._out[place] for place in range(min(limit, _MOST_PARTS))]
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
                sent = self._sock.sendmsg(parts, ancillary, _NOW)
                if fds:
                    self._out_fds.popleft()
                self._written += sent
                while sent:
                    first = self._out[0]
                    if sent >= first.nbytes:
                        sent -= first.nbytes
                        self._out.popleft()
                    else:
                        self._out[0] = first[sent:]
                        sent = 0
        except BlockingIOError:
            self.listen()
        except OSError:
            self._break()
        while self._marks and not self._is_broken and self._marks[0][0] <= self._written:
            self._marks.popleft()[1].complete(None)

    def _break(self) -> None:
        """Drop what cannot be sent. The reader finds out that this is the end, and closes it."""
        self._is_broken = True
        self._out.clear()
        self._out_fds.clear()
        self._written = self._queued
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def pause(self, *, is_paused: bool) -> None:
        """Leave what the other end sends in the socket for a while, or go on reading."""
        if self._is_reading is is_paused and not self.is_closed:
            self._is_reading = not is_paused
            self.listen()

    def listen(self) -> None:
        """Have the communication thread do what there is to do, but not read while other threads do."""
        with self._listening:
            if not self.is_closed:
                self._loop.watch_for(self.fd, reads=self._is_reading and not self.is_lent, writes=bool(self._out))

    def close(self, error: Exception | None = None) -> None:
        """Close it; the other end learns it at once. Sends that are not done fail, with WorkerDied unless told."""
        with self._lock:
            if self.is_closed:
                return
            self._error = error
            self.is_closed = self._is_broken = True
        self._loop.forget(self.fd)
        with contextlib.suppress(OSError):
            # Another thread may read it.
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        for fd in self._in_fds:
            os.close(fd)
        self._in_fds.clear()
        self._out.clear()
        self._out_fds.clear()
        self._written = self._queued
        # The other process may still use what it borrowed: that memory is not used again here.
        for reference in list(self._numbers):
            memory = reference()
            if memory is not None:
                self._shared.drop(memory)
        self._lent.clear()
        self._numbers.clear()
        self._maps.clear()
        self._marks.clear()
        self._on_close(self)
        self._fail_sends()

    def _fail_sends(self) -> None:
        for handle in list(self._sends):
            handle.fail(self._error or gone_error(self.peer))

    def abandon(self) -> None:
        """Let go of the socket in a process made by fork: it is its parent's, which goes on using it."""
        self.is_closed = self._is_broken = True
        self._sock.close()

    def _handle(self, event: int) -> None:
        try:
            if event & _WRITABLE:
                with self._lock:
                    self._flush()
                    if not self._out:
                        self.listen()
            if event & _READABLE and self._reading.acquire(blocking=False):
                try:
                    self._receive(self._loop.space, _NOW)
                finally:
                    self._reading.release()
        except BlockingIOError:
            return
        except Exception as error:
            self._end_by(error)

    def _end_by(self, error: Exception) -> None:
        if not isinstance(error, OSError | EOFError | ValueError):
            log.error("a connection could not be handled", exc_info=error)
        self.close()

    def read_for(self, handle: Handle[Any]) -> None:
        """Read until a handle is done, or nothing has come for a while; not while another thread does."""
        if self._space is None or not self._reading.acquire(blocking=False):
            return
        try:
            self._loop.lend(self)
            while not handle.is_done and not self.is_closed:
                self._receive(self._space, 0)
        except BlockingIOError:
            return
        except Exception as error:
            self._end_by(error)
        finally:
            self._reading.release()
            self._loop.take_back(self, soon=handle.is_done)

    def _receive(self, space: memoryview, flags: int) -> None:
        if self._filling:
            target = self._filling[0]
            count = self._sock.recv_into(target, 0, flags)
            if not count:
                raise EOFError
            self._fill(target, count)
            return
        # Into memory that is there: to allocate as much as may come costs far more than to read what came.
        if self.is_local:
            count, ancillary, _, _ = self._sock.recvmsg_into((space,), _FD_SPACE, flags)
            for _, _, content in ancillary:
                fds = array.array("i")
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
                self._in_fds.extend(fds)
        else:
            count = self._sock.recv_into(space, 0, flags)
        if not count:
            raise EOFError
        data = space[:count].tobytes()
        rest = self._rest
        self._rest = self._take_in(rest + data if rest else data)

    def _take_in(self, data: bytes) -> bytes:
        """Take what has arrived; returns the rest, which is not complete."""
        at = 0
        while self._greeting is not None:
            if len(data) - at < self._wanted:
                return data[at:]
            part, at = data[at : at + self._wanted], at + self._wanted
            try:
                self._wanted = self._greeting.send(part)
            except StopIteration:
                self._greeting = None
        size = len(data)
        while size - at >= _HEADER.size and not self.is_closed:
            kind, count, envelope_size, data_size, number = _HEADER.unpack_from(data, at)
            begin = at + _HEADER.size + count * _BUFFER.size
            middle = begin + envelope_size
            end = middle + data_size
            if size < end:
                if end - at > SPACE:
                    # Collected in one piece: adding a little at a time would copy all of it each time.
                    self._large = bytearray(end - at)
                    self._large[: size - at] = data[at:]
                    self._filling.append(memoryview(self._large)[size - at :])
                    return b""
                break
            described, at = at + _HEADER.size, end
            if kind in _ABOUT_MEMORY:
                self._note_memory(kind, number)
                continue
            frame = Frame(kind, number, data[begin:middle], data[middle:end], [])
            for place in range(count):
                length, memory = _BUFFER.unpack_from(data, described + place * _BUFFER.size)
                if memory:
                    frame.buffers.append(self._borrow(length, memory))
                    continue
                target = self._allocate(length)
                frame.buffers.append(target)
                here = min(length, size - at)
                if here:
                    target[:here] = data[at : at + here]
                    at += here
                if here < length:
                    self._filling.append(target[here:])
            if self._filling:
                self._unfinished = frame
                return b""
            self._on_frame(self, frame)
        return data[at:]

    def _fill(self, target: memoryview, count: int) -> None:
        if count < target.nbytes:
            self._filling[0] = target[count:]
            return
        self._filling.popleft()
        if self._filling:
            return
        if self._unfinished is not None:
            frame, self._unfinished = self._unfinished, None
            self._on_frame(self, frame)
        elif self._large is not None:
            large, self._large = self._large, None
            self._rest = self._take_in(bytes(large))

    def _greet(self) -> Generator[int, bytes, None]:
        """Prove to know the secret, and have the other end prove it. What is read here is not trusted."""
        own = json.dumps(asdict(self._own)).encode()
        if self._is_server:
            proof, theirs = (yield _PROOF), (yield _NONCE)
            (size,) = struct.unpack("<I", (yield 4))
            if size > _MOST_HELLO:
                raise ValueError
            hello = yield size
            if not hmac.compare_digest(proof, self._prove(b"client", self._nonce, theirs, hello)):
                raise ValueError
            self._write([self._prove(b"server", theirs, self._nonce, own), struct.pack("<I", len(own)), own])
        else:
            theirs = yield _NONCE
            nonce = secrets.token_bytes(_NONCE)
            proof = self._prove(b"client", theirs, nonce, own)
            self._write([proof, nonce, struct.pack("<I", len(own)), own])
            proof = yield _PROOF
            (size,) = struct.unpack("<I", (yield 4))
            if size > _MOST_HELLO:
                raise ValueError
            hello = yield size
            if not hmac.compare_digest(proof, self._prove(b"server", nonce, theirs, hello)):
                raise ValueError
        self.peer = Peer(**json.loads(hello))
        # From now on, threads may wait in it: those that must not say so each time.
        self._sock.setblocking(True)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SILENT)
        self._space = memoryview(bytearray(_DIRECT_SPACE))
        self._on_open(self)

    def _prove(self, role: bytes, *parts: bytes) -> bytes:
        return hmac.digest(self._secret, b"\0".join((role, *parts)), "sha256")

    def _allocate(self, size: int) -> memoryview:
        if size >= SHARED_FROM:
            memory = self._private.take(size)
            if memory is not None:
                return memory.borrow(size, lambda: self._loop.call(lambda: self._private.give(memory)))[0]
        return memoryview(bytearray(size))

    def _note_memory(self, kind: int, number: int) -> None:
        if kind == Kind.FREE:
            self._take_back(number)
            return
        if kind == Kind.FORGET:
            self._maps.pop(number, None)
            return
        if not self._in_fds:
            raise ValueError("a descriptor did not arrive")
        fd = self._in_fds.popleft()
        self._maps[number] = Memory(os.fstat(fd).st_size, fd)

    def _borrow(self, size: int, number: int) -> SharedBuffer:
        memory = self._maps[number]
        view, finalizer = memory.borrow(size, lambda: self._loop.call(lambda: self._return(number)))

        def give_back() -> None:
            if finalizer.detach() is not None:
                self._return(number)

        return SharedBuffer(memory, view, give_back)

    def _return(self, number: int) -> None:
        with self._lock:
            self._write([_HEADER.pack(Kind.FREE, 0, 0, 0, number)])

    def _take_back(self, number: int) -> None:
        with self._lock:
            lent = self._lent.get(number)
            kept, on_free = lent.popleft() if lent else (None, None)
            is_back = not lent
            if is_back:
                self._lent.pop(number, None)
        if kept is not None and is_back:
            # Only memory of this process's own goes back to its pool; other memory goes back to its owner.
            self._shared.give(kept.memory)
        if on_free is not None:
            on_free()


def gone_error(peer: Peer | None) -> WorkerDied:
    """Make the error for what waits for a process that has ended."""
    return WorkerDied(f"{peer} is gone: its process ended or was closed", hint="its log says why")


def view(buffer: Any) -> memoryview:
    """Return the bytes of a buffer as it arrived."""
    return buffer.view if isinstance(buffer, SharedBuffer) else memoryview(buffer).cast("B")
