"""A socket between two members of a job: proves that both know the job's secret, then carries frames.

A frame is a header, descriptions of its buffers, an envelope, data, and the buffers that do not travel through shared
memory. Before the other end has proved that it is a member, nothing but the bytes of its greeting is read: no frame,
and no descriptor. A connection may break; what it carried and lost is the business of its `Peer`, which outlives it.
"""

from __future__ import annotations

import array
import contextlib
import enum
import hmac
import json
import logging
import os
import secrets
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import TYPE_CHECKING, Any

from roost.comm.limits import READ_SECONDS
from roost.comm.move.memory import Memory
from roost.comm.wire.loop import SPACE, Handle, Loop

if TYPE_CHECKING:
    from roost.comm.wire.endpoint import Endpoint
    from roost.comm.wire.peer import Peer

log: logging.Logger = logging.getLogger(__name__)

HEADER = struct.Struct("<HHIIQQQ")
"""The kind, flags, the number of buffers, the sizes of the envelope and the data, a number, and how many frames of the
other end have arrived."""
BUFFER = struct.Struct("<QQ")
"""The size of a buffer, and the number of the shared memory that it lies in; 0 if it follows the data."""
IS_SCARCE = 1 << 63
"""Added to that number: the receiver copies the buffer and returns the memory at once."""
WANTS_ACK = 1
"""The flag of a frame whose sender waits until it has arrived."""
_NONCE = 32
_PROOF = 32
_MOST_HELLO = 4096
_MOST_PARTS = 256
_READABLE = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR
_WRITABLE = select.EPOLLOUT
_NOW = socket.MSG_DONTWAIT
_SILENT = struct.pack("@ll", 0, int(READ_SECONDS * 1e6))
_DIRECT_SPACE = 1 << 16
_FD_SPACE = socket.CMSG_SPACE(4 * 16)
_ACK_BYTES = 1 << 18
_ACK_FRAMES = 64
"""After so many bytes or frames the other end learns what has arrived, and forgets it."""
SHARED_FROM = 1 << 16
"""Buffers from this size on travel through shared memory, if both ends have the same kernel."""


class Kind(enum.IntEnum):
    """The kinds of frames."""

    MESSAGE = 1
    TENSOR = 2
    REQUEST = 3
    REPLY = 4
    FETCH = 5
    RETURN = 6
    FREE = 7
    """Shared memory is not used any more."""
    HOLD = 8
    """Messages should wait at their sender, or with the number 0 may go on. Everything else goes on in any case."""
    # The frames above are counted, kept until they have arrived, and sent again over the next connection. Those below
    # are about one connection, and end with it.
    MEMORY = 16
    """A descriptor of shared memory comes along."""
    FORGET = 17
    """Shared memory can be unmapped."""
    ACK = 18
    AGAIN = 19
    """All that has not arrived should be sent again, with no buffer in shared memory."""
    BEGIN = 20
    """The frames that follow were asked for with AGAIN."""


_FIRST_UNCOUNTED = int(Kind.MEMORY)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerInfo:
    """Who a process is: its name, which process it is of all that had the name, and where."""

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


class SharedBuffer:
    """A buffer in shared memory: `view` is its bytes, and it goes back to its owner when it is not used any more."""

    __slots__ = ("give_back", "is_scarce", "memory", "view")

    def __init__(
        self,
        memory: Memory,
        view: memoryview,
        give_back: Callable[[], None] = lambda: None,
        is_scarce: bool = False,
    ) -> None:
        self.memory = memory
        self.view = view
        self.give_back = give_back
        """Returns it now; `view` must not be used any more."""
        self.is_scarce = is_scarce
        """Whether its owner has little left, so that it should not keep it in use for long."""

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.view.nbytes


class Connection:
    """One end of a connection. Its peer's lock is held by all that write, and `reading` by the thread that reads."""

    def __init__(self, loop: Loop, sock: socket.socket, secret: bytes, endpoint: Endpoint, target: Peer | None) -> None:
        """Take to whom this process connects; None if the other end does."""
        self.target = target
        self.peer: Peer | None = None
        """The wire that it is a part of, once the other end has proved to be a member."""
        self.is_closed = False
        self.is_near: bool = sock.family == socket.AF_UNIX
        """Whether descriptors can be passed to the other end."""
        self.is_inline = not self.is_near
        """Whether no buffer travels through shared memory: the other end is far, or short of descriptors."""
        self.reason: BaseException | None = None
        """Why it broke."""
        self.fd = sock.fileno()
        self.is_lent = False
        """Whether it is left to threads that read it themselves."""
        self.sleepers = 0
        """How many threads sleep until something comes from it."""
        self.reading = threading.Lock()
        """Held by the thread that reads it."""
        self.passed: set[int] = set()
        """The numbers of the shared memory that the other end has been given here."""
        self.marks: deque[tuple[int, Handle[None]]] = deque()
        """Sends that are done when so many bytes have left this process."""
        self._loop = loop
        self._sock = sock
        self._secret = secret
        self._endpoint = endpoint
        self._out: deque[memoryview] = deque()
        self._out_fds: deque[tuple[int, Memory]] = deque()
        """Descriptors that travel with a part of `_out`, by the number of bytes after which that begins."""
        self._written = 0
        self._queued = 0
        self._is_broken = False
        """Whether a write failed: nothing is written any more."""
        self._rest = b""
        self._in_fds: deque[int] = deque()
        """Descriptors that came, -1 for one that this process had no room for."""
        self._maps: dict[int, Memory | None] = {}
        """Shared memory of the other end, by number; None where its descriptor did not arrive."""
        self._is_deaf = False
        """Whether frames are dropped until what was asked for with AGAIN begins."""
        self._greeting: Generator[int, bytes, None] | None = self._greet()
        """Reads what proves that the other end is a member; None afterwards."""
        self._wanted = next(self._greeting)
        self._filling: deque[memoryview] = deque()
        """The large buffers of a frame that is not complete: they are filled where they stay."""
        self._unfinished: tuple[Frame, int] | None = None
        self._large: bytearray | None = None
        """A frame with much data, of which a part is missing."""
        self._unacknowledged = 0
        """Bytes that arrived since the other end was told."""
        self._listening = threading.Lock()
        self._lock = threading.RLock()
        """Held by the thread that writes; it is that of the peer from the first frame on."""
        self._space: memoryview | None = None
        """Where threads put what they read themselves."""
        sock.setblocking(False)
        if not self.is_near:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop.watch(self.fd, self._handle)
        if target is None:
            self._nonce = secrets.token_bytes(_NONCE)
            self.write([self._nonce])

    def mark(self, handle: Handle[None]) -> None:
        """Complete a send when all that was written before has left this process."""
        if self._written == self._queued and not self._is_broken:
            handle.complete(None)
        else:
            self.marks.append((self._queued, handle))

    def write(self, parts: Sequence[Any], memory: Memory | None = None) -> int:
        """Write bytes, in order, together with the descriptor of shared memory if there is one; returns the backlog."""
        if self.is_closed or self._is_broken:
            return 0
        was_idle = not self._out
        # Frames that are sent in answer to several others leave together.
        is_deferred = was_idle and get_ident() == self._loop.ident
        if is_deferred:
            self._loop.at_end.append(self._flush_all)
        if was_idle and not is_deferred and memory is None and len(parts) == 1:
            # Nothing is in the way of most frames, which are small.
            part = parts[0]
            try:
                sent = self._sock.send(part, _NOW)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                self.cut(error)
                return 0
            self._queued += sent
            self._written += sent
            if sent == len(part):
                return 0
            parts = [memoryview(part).cast("B")[sent:]]
        if memory is not None:
            self._out_fds.append((self._queued, memory))
        for part in parts:
            view = memoryview(part).cast("B")
            if view.nbytes:
                self._out.append(view)
                self._queued += view.nbytes
        if was_idle and not is_deferred:
            self._flush()
        return self._queued - self._written

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
        except OSError as error:
            self.cut(error)
        while self.marks and not self._is_broken and self.marks[0][0] <= self._written:
            self.marks.popleft()[1].complete(None)

    def cut(self, error: BaseException) -> None:
        """Write no more. The thread that reads finds the end, and closes it: only that thread knows what arrived."""
        self.reason = self.reason or error
        self._is_broken = True
        self._out.clear()
        self._out_fds.clear()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def listen(self) -> None:
        """Have the communication thread do what there is to do, but not read while other threads do."""
        with self._listening:
            if not self.is_closed:
                self._loop.watch_for(self.fd, reads=not self.is_lent, writes=bool(self._out))

    def close(self, reason: BaseException | None = None) -> None:
        """Close it; the other end learns it at once."""
        with self._listening:
            if self.is_closed:
                return
            self.is_closed = True
        self.reason = self.reason or reason
        self._loop.forget(self.fd)
        with contextlib.suppress(OSError):
            # Another thread may read it.
            self._sock.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._sock.close()
            self._out.clear()
            self._out_fds.clear()
        self._endpoint.broken(self)

    def let_go(self) -> None:
        """Let go of shared memory, once it is closed and no thread reads it any more."""
        with self.reading:
            for fd in self._in_fds:
                if fd >= 0:
                    os.close(fd)
            self._in_fds.clear()
            self._maps.clear()

    def abandon(self) -> None:
        """Let go of the socket in a process made by fork: it is its parent's, which goes on using it."""
        self.is_closed = True
        self._sock.close()

    def _handle(self, event: int) -> None:
        try:
            if event & _WRITABLE:
                self._flush_all()
                if not self._out:
                    self.listen()
            if event & _READABLE and self.reading.acquire(blocking=False):
                try:
                    self._receive(self._loop.space, _NOW)
                finally:
                    self.reading.release()
        except BlockingIOError:
            return
        except Exception as error:
            self._end_by(error)

    def _end_by(self, error: BaseException) -> None:
        if isinstance(error, Exception) and not isinstance(error, OSError | EOFError | ValueError):
            log.error("a connection could not be handled", exc_info=error)
        self.close(error)

    def read_for(self, handle: Handle[Any]) -> None:
        """Read until a handle is done, or nothing has come for a while; not while another thread does."""
        if self._space is None or not self.reading.acquire(blocking=False):
            return
        try:
            self._loop.lend(self)
            while not handle.is_done and not self.is_closed:
                self._receive(self._space, 0)
        except BlockingIOError:
            return
        except BaseException as error:
            # In the thread that decides what becomes of the peer, and after this one has let go of the connection. What
            # a handler of a signal raises may come in the middle of a frame: the rest is sent again.
            self._loop.call(lambda error=error: self._end_by(error))  # type: ignore[misc]
            if not isinstance(error, Exception):
                raise
        finally:
            self.reading.release()
            self._loop.take_back(self, soon=handle.is_done)

    def _receive(self, space: memoryview, flags: int) -> None:
        if self._filling:
            target = self._filling[0]
            count = self._sock.recv_into(target, 0, flags)
            if not count:
                raise EOFError
            self._fill(target, count)
        elif self._greeting is not None:
            # Of a stranger no more than its greeting is read, and no descriptor is taken.
            data = self._rest + self._sock.recv(self._wanted - len(self._rest), flags)
            if len(data) == len(self._rest):
                raise EOFError
            self._rest = data
            if len(data) == self._wanted:
                self._rest = b""
                try:
                    self._wanted = self._greeting.send(data)
                except StopIteration:
                    self._greeting = None
            return
        else:
            # Into memory that is there: to allocate as much as may come costs far more than to read what came.
            if self.is_near:
                count, ancillary, said, _ = self._sock.recvmsg_into((space,), _FD_SPACE, flags)
                for _, _, content in ancillary:
                    fds = array.array("i")
                    fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
                    self._in_fds.extend(fds)
                if said & socket.MSG_CTRUNC:
                    self._in_fds.append(-1)
            else:
                count = self._sock.recv_into(space, 0, flags)
            if not count:
                raise EOFError
            data = space[:count].tobytes()
            rest = self._rest
            self._rest = self._take_in(rest + data if rest else data)
        peer = self.peer
        if peer is not None:
            self._unacknowledged += count
            if self._unacknowledged >= _ACK_BYTES or peer.received - peer.told >= _ACK_FRAMES:
                self._unacknowledged = 0
                peer.acknowledge()

    def _take_in(self, data: bytes) -> bytes:
        """Take what has arrived; returns the rest, which is not complete."""
        peer = self.peer
        size, at = len(data), 0
        while peer is not None and size - at >= HEADER.size and not self.is_closed:
            kind, flags, count, envelope_size, data_size, number, arrived = HEADER.unpack_from(data, at)
            begin = at + HEADER.size + count * BUFFER.size
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
            described, at = at + HEADER.size, end
            if arrived > peer.acknowledged:
                peer.settle(arrived)
            if kind >= _FIRST_UNCOUNTED:
                self._control(peer, kind, number)
                continue
            frame = Frame(kind, number, data[begin:middle], data[middle:end], [])
            if count:
                sizes = [BUFFER.unpack_from(data, described + place * BUFFER.size) for place in range(count)]
                if not self._is_deaf and any(memory and self._maps[memory & ~IS_SCARCE] is None for _, memory in sizes):
                    # Its memory cannot be mapped here: it and all that follows has to come again, without descriptors.
                    self._is_deaf = True
                    log.warning("this process has no descriptor left: buffers from %s come through the socket", peer)
                    peer.tell(self, Kind.AGAIN)
                for length, memory in sizes:
                    if memory:
                        frame.buffers.append(self._borrow(peer, length, memory))
                        continue
                    target = peer.allocate(length)
                    frame.buffers.append(target)
                    here = min(length, size - at)
                    if here:
                        target[:here] = data[at : at + here]
                        at += here
                    if here < length:
                        self._filling.append(target[here:])
                if self._filling:
                    self._unfinished = frame, flags
                    return b""
            if not self._is_deaf:
                peer.take(frame)
                if flags & WANTS_ACK:
                    peer.acknowledge()
        return data[at:]

    def _fill(self, target: memoryview, count: int) -> None:
        if count < target.nbytes:
            self._filling[0] = target[count:]
            return
        self._filling.popleft()
        if self._filling:
            return
        if self._unfinished is not None and self.peer is not None:
            (frame, flags), self._unfinished = self._unfinished, None
            if not self._is_deaf:
                self.peer.take(frame)
                if flags & WANTS_ACK:
                    self.peer.acknowledge()
        elif self._large is not None:
            large, self._large = self._large, None
            self._rest = self._take_in(bytes(large))

    def _control(self, peer: Peer, kind: int, number: int) -> None:
        if kind == Kind.MEMORY:
            if not self._in_fds:
                raise ValueError("a descriptor did not arrive")
            fd = self._in_fds.popleft()
            self._maps[number] = Memory(os.fstat(fd).st_size, fd) if fd >= 0 else None
        elif kind == Kind.FORGET:
            self._maps.pop(number, None)
        elif kind == Kind.AGAIN:
            peer.send_again(self)
        elif kind == Kind.BEGIN:
            self._is_deaf = False

    def _borrow(self, peer: Peer, size: int, number: int) -> SharedBuffer | None:
        is_scarce, number = bool(number & IS_SCARCE), number & ~IS_SCARCE
        memory = self._maps[number]
        if memory is None or self._is_deaf:
            return None
        view, finalizer = memory.borrow(size, lambda: self._loop.call(lambda: peer.send(Kind.FREE, number)))

        def give_back() -> None:
            if finalizer.detach() is not None:
                peer.send(Kind.FREE, number)

        return SharedBuffer(memory, view, give_back, is_scarce)

    def _greet(self) -> Generator[int, bytes, None]:
        """Prove to know the secret, and have the other end prove it. What is read here is not trusted."""
        if self.target is None:
            proof, theirs = (yield _PROOF), (yield _NONCE)
            hello = yield from self._hello()
            if not hmac.compare_digest(proof, self._prove(b"client", self._nonce, theirs, hello)):
                raise ValueError("not a member")
            answer, peer = self._endpoint.admit(self, json.loads(hello))
            said = json.dumps(answer).encode()
            self.write([self._prove(b"server", theirs, self._nonce, said), struct.pack("<I", len(said)), said])
            greeted = json.loads(hello)
        else:
            theirs = yield _NONCE
            nonce = secrets.token_bytes(_NONCE)
            own = json.dumps(self._endpoint.hello(self.target)).encode()
            proof = self._prove(b"client", theirs, nonce, own)
            self.write([proof, nonce, struct.pack("<I", len(own)), own])
            proof = yield _PROOF
            answered = yield from self._hello()
            if not hmac.compare_digest(proof, self._prove(b"server", nonce, theirs, answered)):
                raise ValueError("not a member")
            greeted = json.loads(answered)
            peer = self._endpoint.admitted(self, self.target, greeted)
        if peer is None:
            self._flush_all()
            raise ValueError("refused")
        # From now on, threads may wait in it: the others say each time that they do not.
        self._sock.setblocking(True)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SILENT)
        self._space = memoryview(bytearray(_DIRECT_SPACE))
        self.peer, self._lock = peer, peer.lock
        peer.attach(self, greeted["received"])

    def _hello(self) -> Generator[int, bytes, bytes]:
        (size,) = struct.unpack("<I", (yield 4))
        if not 0 < size <= _MOST_HELLO:
            raise ValueError("not a greeting")
        return (yield size)

    def _prove(self, role: bytes, *parts: bytes) -> bytes:
        return hmac.digest(self._secret, b"\0".join((role, *parts)), "sha256")


def view(buffer: Any) -> memoryview:
    """Return the bytes of a buffer as it arrived."""
    return buffer.view if isinstance(buffer, SharedBuffer) else memoryview(buffer).cast("B")
