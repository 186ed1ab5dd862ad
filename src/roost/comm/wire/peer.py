"""`Peer`: the one wire between this process and another one of its job.

Frames that are sent to a peer arrive exactly once and in order, or both ends get an error. Each end counts the frames
that it sends and those that have arrived. It keeps a frame until it hears, in the header of any frame that comes back,
that it has arrived. If the connection breaks while both processes live, one of them connects again, each says how many
frames have arrived, and the other sends the rest over the new connection. A peer ends when its process has ended, or
after it could not be reached for `LOST_SECONDS`: then all that waits for it fails, at both ends.

`send` holds the peer's lock; frames arrive in one thread at a time, the one that holds `Connection.reading`.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roost.comm.limits import LOST_SECONDS
from roost.comm.move.memory import Memory, copy
from roost.comm.wire.connection import (
    BUFFER,
    HEADER,
    IS_SCARCE,
    SHARED_FROM,
    WANTS_ACK,
    Connection,
    Frame,
    Kind,
    PeerInfo,
    SharedBuffer,
)
from roost.comm.wire.loop import Handle, uninterrupted
from roost.errors import WorkerDied

if TYPE_CHECKING:
    from roost.comm.wire.endpoint import Endpoint, Listing

log: logging.Logger = logging.getLogger(__name__)

_LAST_MESSAGE = int(Kind.TENSOR)
_REPLY, _FREE, _HOLD = int(Kind.REPLY), int(Kind.FREE), int(Kind.HOLD)
_MOST_WAITING = 1 << 26
"""How many bytes wait here for a process that is not up yet before those that send wait, too."""


@dataclass(slots=True, eq=False)
class _Kept:
    """A frame with buffers that is kept until it has arrived. The others are kept as the bytes that were written."""

    kind: int
    number: int
    envelope: bytes
    data: Any
    buffers: list[Any]
    handle: Handle[None] | None = None
    """The send that waits until the caller's own memory has been read."""
    is_inline: bool = False
    """Whether what lies in shared memory was last written as bytes, so that the other end returns none of it."""


class Peer:
    """This process's side of the wire to another one: frames sent and received, and who waits for them."""

    def __init__(self, endpoint: Endpoint, address: str, info: PeerInfo | None = None) -> None:
        self.address = address
        self.info = info
        """Who it is, once they have talked."""
        self.endpoint = endpoint
        self.loop = endpoint.loop
        self.lock = threading.RLock()
        """Held while frames are put in order and written."""
        self.connection: Connection | None = None
        self.error: Exception | None = None
        """Why it is over."""
        self.requests: dict[int, Any] = {}
        """By number: what takes the reply."""
        # How it is reached: see `Endpoint`, whose thread alone changes these.
        self.listing: Listing | None = None
        self.lookup: Future[Listing] | None = None
        self.dialing: Connection | None = None
        self.session = ""
        """The name of this wire, which both ends know; empty before the first connection."""
        self.proposed = ""
        """That name, as this process proposes it when it connects for the first time."""
        self.epoch = self.epoch_tried = 0
        """The number of the last connection, and of the last try; each new one has a higher one."""
        self.heard = 0
        """A number that grows, from the last greeting of the other end."""
        self.refused = 0
        """How often in a row the other process has refused to be connected to."""
        self.is_near_refused = False
        self.is_near = False
        """Whether the other process is on the same node, and descriptors can be passed to it."""
        self.tries = 0
        self.is_late = False
        """Whether the log says that it is not there yet."""
        self.received = 0
        """How many frames have arrived."""
        self.told = 0
        """How many of these the other end knows of."""
        self.acknowledged = 0
        """How many of the frames that were sent have arrived."""
        self._kept: deque[bytes | _Kept] = deque()
        """The frames that may not have arrived."""
        self._pending: list[Handle[None]] = []
        """Sends that wait for a connection."""
        self._is_absent = False
        """Whether the process is not there yet: what is packed waits here, and its sender goes on."""
        self._waiting_bytes = 0
        self._openings: list[Callable[[], None]] = []
        self._failing: set[Handle[None]] = set()
        """Sends under way in many frames."""
        self._is_held = False
        self._held: deque[tuple[tuple[int, int, bytes, Any, Sequence[Any], Any, None], Handle[None] | None]] = deque()
        """Messages that the other process does not take now, because too many wait there."""
        self._numbers: dict[weakref.ref[Memory], int] = {}
        """By what the other end may borrow: the number that it knows that by, until the memory is no more."""
        self._new_number = itertools.count(1)
        self._lent: dict[int, deque[tuple[SharedBuffer, Callable[[], None] | None]]] = {}
        """By the number of the memory at the other end: what it borrowed, each as often as it did."""

    def __str__(self) -> str:
        return str(self.info or self.address)

    @property
    def is_open(self) -> bool:
        """Whether a connection is open."""
        return self.connection is not None

    @property
    def is_over(self) -> bool:
        """Whether it has ended, for good."""
        return self.error is not None

    # Sending.

    def send(
        self,
        kind: int,
        number: int = 0,
        envelope: bytes = b"",
        data: Any = b"",
        buffers: Sequence[Any] = (),
        on_free: Callable[[], None] | None = None,
        late: Callable[[], str] | None = None,
    ) -> Handle[None] | None:
        """Send a frame; any thread may. `on_free` is called when the other end returns shared memory of it.

        With `late`, which says what is missing, a handle is returned unless the caller's memory is free to be changed
        and little waits to be written.
        """
        try:
            with self.lock:
                if self.error is None and not (self._is_held and kind <= _LAST_MESSAGE):
                    return self._put(kind, number, envelope, data, buffers, on_free, late)
                handle: Handle[None] | None = Handle(self.loop, late=late) if late is not None else None
                if self.error is None:
                    self._held.append(((kind, number, envelope, data, buffers, on_free, None), handle))
                    return handle
                for buffer in buffers:
                    if isinstance(buffer, SharedBuffer):
                        # Lent to no process, and used by none.
                        self.endpoint.shared.drop(buffer.memory)
                if handle is not None:
                    handle.fail(self.error)
                return handle
        except BaseException as error:
            # As that of a handler of a signal, which may come between a write and the note of how much was written.
            # What is kept is sent again over the next connection.
            with self.lock:
                if self.connection is not None:
                    self.connection.cut(error)
            raise

    def _put(
        self,
        kind: int,
        number: int,
        envelope: bytes,
        data: Any,
        buffers: Sequence[Any],
        on_free: Callable[[], None] | None,
        late: Callable[[], str] | None,
        handle: Handle[None] | None = None,
    ) -> Handle[None] | None:
        connection = self.connection
        if buffers:
            handle = handle or (Handle(self.loop, late=late) if late is not None else None)
            kept = _Kept(kind, number, envelope, data, list(buffers), handle)
            for buffer in buffers:
                if isinstance(buffer, SharedBuffer):
                    self._lend(buffer, on_free)
            done = self._share(kept) if connection is not None else None
            self._kept.append(kept)
            if connection is not None:
                self._write(kept, connection, done)
            return handle
        frame = HEADER.pack(kind, 0, 0, len(envelope), len(data), number, self.received) + envelope + data
        self.told = self.received
        self._kept.append(frame)
        if connection is not None and connection.write((frame,)) < SHARED_FROM:
            if handle is not None:
                handle.complete(None)
            return handle
        if handle is None and late is not None:
            handle = Handle(self.loop, late=late)
        if handle is not None:
            if connection is not None:
                connection.mark(handle)
                return handle
            self._waiting_bytes += len(frame)
            if self._is_absent and self._waiting_bytes <= _MOST_WAITING:
                handle.complete(None)
            else:
                self._pending.append(handle)
        return handle

    def share(self, data: Any, size: int) -> SharedBuffer | None:
        """Copy a large buffer into shared memory for the other end; None if it must go through the socket."""
        connection = self.connection
        if connection is None or connection.is_inline or size < SHARED_FROM:
            return None
        pool = self.endpoint.shared
        memory = pool.take(size)
        if memory is None:
            return None
        try:
            copy(data, memory.map, size)
        except BaseException:
            pool.give(memory)
            raise
        return SharedBuffer(memory, memoryview(memory.map)[:size], is_scarce=pool.is_scarce)

    def _lend(self, buffer: SharedBuffer, on_free: Callable[[], None] | None = None) -> None:
        self._lent.setdefault(self._number_of(buffer.memory), deque()).append((buffer, on_free))

    def _number_of(self, memory: Memory) -> int:
        number = self._numbers.get(weakref.ref(memory))
        if number is None:
            number = self._numbers[weakref.ref(memory, self._forget)] = next(self._new_number)
        return number

    def _forget(self, reference: weakref.ref[Memory]) -> None:
        """Let the other end unmap memory that is no more here; in a finalizer, which may run anywhere."""
        number = self._numbers.pop(reference, None)
        connection = self.connection
        if number is not None and connection is not None and number in connection.passed:
            self.loop.call(lambda: self.tell(connection, Kind.FORGET, number))

    def _share(self, kept: _Kept) -> Handle[None] | None:
        """Move the large buffers of a frame into shared memory, where that is possible.

        Returns the send that waits for its caller's memory if nothing of that is needed any more.
        """
        is_caller_free = True
        for place, buffer in enumerate(kept.buffers):
            if not isinstance(buffer, SharedBuffer):
                shared = self.share(buffer, memoryview(buffer).nbytes)
                if shared is None:
                    is_caller_free = False
                else:
                    kept.buffers[place] = shared
                    self._lend(shared)
        done = None
        if is_caller_free:
            done, kept.handle = kept.handle, None
        return done

    def _write(self, kept: _Kept, connection: Connection, done: Handle[None] | None) -> None:
        """Write a frame with buffers; `done` is then done."""
        descriptions, inline = [], []
        # It may be written once more, over another kind of connection than the one before.
        kept.is_inline = False
        for buffer in kept.buffers:
            if isinstance(buffer, SharedBuffer):
                if not connection.is_inline:
                    number = self._number_of(buffer.memory)
                    if number not in connection.passed:
                        connection.passed.add(number)
                        self.tell(connection, Kind.MEMORY, number, buffer.memory)
                    descriptions.append(BUFFER.pack(buffer.nbytes, number | (IS_SCARCE if buffer.is_scarce else 0)))
                    continue
                kept.is_inline = True
                part = buffer.view
            else:
                part = memoryview(buffer).cast("B")
            descriptions.append(BUFFER.pack(part.nbytes, 0))
            inline.append(part)
        flags = WANTS_ACK if kept.handle is not None or kept.is_inline else 0
        sizes = len(descriptions), len(kept.envelope), len(kept.data)
        header = HEADER.pack(kept.kind, flags, *sizes, kept.number, self.received)
        self.told = self.received
        backlog = connection.write([b"".join((header, *descriptions, kept.envelope, kept.data)), *inline])
        if done is not None:
            if backlog < SHARED_FROM:
                done.complete(None)
            else:
                connection.mark(done)

    def tell(self, connection: Connection, kind: Kind, number: int = 0, memory: Memory | None = None) -> None:
        """Write a frame that is about the connection, and not kept."""
        with self.lock:
            self.told = self.received
            connection.write((HEADER.pack(kind, 0, 0, 0, 0, number, self.received),), memory)

    def acknowledge(self) -> None:
        """Tell the other end what has arrived."""
        connection = self.connection
        if connection is not None and self.told < self.received:
            self.tell(connection, Kind.ACK)

    def when_open(self, function: Callable[[], None], handle: Handle[None]) -> None:
        """Call a function once there is a connection, and it is known how buffers travel.

        The handle, of what it begins, fails if the peer ends before it is done.
        """
        with self.lock:
            self._failing.add(handle)
            error, is_open = self.error, self.connection is not None
            if error is None and not is_open:
                self._openings.append(function)
        handle.on_done(lambda: self._failing.discard(handle))
        if error is not None:
            handle.fail(error)
        elif is_open:
            function()

    def request(
        self, number: int, envelope: bytes, data: Any, buffers: Sequence[Any], sink: Any, kind: int = Kind.REQUEST
    ) -> None:
        """Ask the other process something; `sink` takes the reply, a `Frame`, or fails."""
        self.requests[number] = sink
        self.send(kind, number, envelope, data, buffers)
        if self.error is not None and self.requests.pop(number, None) is not None:
            sink.fail(self.error)

    # Receiving: in the thread that reads.

    def take(self, frame: Frame) -> None:
        """Take the next frame in. What goes wrong with it is its own error, and the next one comes all the same."""
        if frame.buffers and any(isinstance(one, SharedBuffer) and one.is_scarce for one in frame.buffers):
            # Otherwise memory might come back of a frame that was interrupted here, and has to be sent again.
            with uninterrupted():
                frame.buffers = [self._own(one) if isinstance(one, SharedBuffer) else one for one in frame.buffers]
                self._hand_on(frame)
        else:
            self._hand_on(frame)

    def _own(self, buffer: SharedBuffer) -> memoryview:
        """Copy a buffer, and return its memory."""
        target = self.allocate(buffer.nbytes)
        copy(buffer.view, target, buffer.nbytes)
        buffer.give_back()
        return target

    def _hand_on(self, frame: Frame) -> None:
        self.received += 1
        try:
            kind = frame.kind
            if kind <= _LAST_MESSAGE:
                self.endpoint.on_message(self, frame)
            elif kind == _REPLY:
                sink = self.requests.pop(frame.number, None)
                if sink is not None:
                    sink.complete(frame)
            elif kind == _FREE:
                self._take_back(frame.number)
            elif kind == _HOLD:
                with self.lock:
                    self._is_held = bool(frame.number)
                    while self._held and not self._is_held:
                        arguments, handle = self._held.popleft()
                        self._put(*arguments, handle)
            else:
                self.endpoint.take(self, frame)
        except Exception:
            log.exception("something that %s sent could not be handled", self)

    def settle(self, arrived: int) -> None:
        """Forget the frames that have arrived."""
        kept = self._kept
        for _ in range(arrived - self.acknowledged):
            one = kept.popleft()
            if not isinstance(one, bytes):
                if one.handle is not None:
                    one.handle.complete(None)
                for buffer in one.buffers if one.is_inline else ():
                    if isinstance(buffer, SharedBuffer):
                        self._take_back(self._number_of(buffer.memory))
        self.acknowledged = arrived

    def allocate(self, size: int) -> memoryview:
        """Return memory for a buffer that arrives through the socket."""
        if size >= SHARED_FROM:
            pool = self.endpoint.private
            memory = pool.take(size)
            if memory is not None:
                return memory.borrow(size, lambda: self.loop.call(lambda: pool.give(memory)))[0]
        return memoryview(bytearray(size))

    def _take_back(self, number: int) -> None:
        with self.lock:
            lent = self._lent.get(number)
            buffer, on_free = lent.popleft() if lent else (None, None)
            is_back = not lent
            if is_back:
                self._lent.pop(number, None)
        if buffer is not None and is_back:
            # Only memory of this process's own goes back to its pool; other memory goes back to its owner.
            self.endpoint.shared.give(buffer.memory)
        if on_free is not None:
            on_free()

    # Connections, one after the other: in the communication thread.

    def attach(self, connection: Connection, arrived: int) -> None:
        """Go on over a new connection, at whose other end so many frames have arrived."""
        with self.lock:
            self.settle(arrived)
            self.connection, self.dialing = connection, None
            self.tries, self._is_absent, self._waiting_bytes = 0, False, 0
            self.is_near = connection.is_near
            self._write_kept(connection)
            for handle in self._pending:
                connection.mark(handle)
            self._pending = []
            openings, self._openings = self._openings, []
        for function in openings:
            function()

    def _write_kept(self, connection: Connection) -> None:
        for one in self._kept:
            if isinstance(one, bytes):
                connection.write((one,))
                continue
            self._write(one, connection, self._share(one))
        connection.write((HEADER.pack(Kind.ACK, 0, 0, 0, 0, 0, self.received),))

    def detach(self, connection: Connection) -> None:
        """Let go of a connection that is over, once no thread reads it any more."""
        # A thread may still hand on what it has read: what comes next has to come after that.
        connection.let_go()
        with self.lock:
            if self.connection is not connection:
                return
            self.connection = None
            # What these sent is kept here. They are done when it is on its way again.
            self._pending += [handle for _, handle in connection.marks]
            connection.marks.clear()

    def send_again(self, connection: Connection) -> None:
        """Send everything that did not arrive again, inline, to an end that drops what is on its way until then."""
        with self.lock:
            connection.is_inline = True
            self.tell(connection, Kind.BEGIN)
            self._write_kept(connection)

    def wait_for_start(self) -> None:
        """Note that the other process is not there yet."""
        with self.lock:
            if self.connection is not None or self.session:
                return
            is_late = self._is_absent and not self.is_late
            self.is_late = self.is_late or is_late
            self._is_absent = True
            pending, self._pending = self._pending, []
            keeps = self._waiting_bytes <= _MOST_WAITING
            if not keeps:
                self._pending = pending
        if is_late:
            log.warning(
                "%s waits for %s, which is not launched or has not communicated yet",
                self.endpoint.own.address,
                self.address,
            )
        for handle in pending if keeps else ():
            handle.complete(None)

    def end(self, error: Exception) -> None:
        """End it: everything that waits for the other process fails."""
        with self.lock:
            if self.error is not None:
                return
            self.error = error
            connection, self.connection = self.connection, None
            handles = [*self._pending, *self._failing, *(handle for _, handle in self._held if handle is not None)]
            handles += [one.handle for one in self._kept if isinstance(one, _Kept) and one.handle is not None]
            if connection is not None:
                handles += [handle for _, handle in connection.marks]
            sinks = list(self.requests.values())
            self._openings.clear()
            self.requests.clear()
            self._kept.clear()
            self._held.clear()
            self._pending.clear()
            # The other process may still use what it borrowed: that memory is not used again here.
            for reference in list(self._numbers):
                memory = reference()
                if memory is not None:
                    self.endpoint.shared.drop(memory)
            self._numbers.clear()
            self._lent.clear()
        for each in (connection, self.dialing):
            if each is not None:
                each.close()
        for handle in handles:
            handle.fail(error)
        for sink in sinks:
            sink.fail(error)


class OwnPeer(Peer):
    """This process as a peer of itself: what it sends is copied, and arrives in its communication thread."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint, endpoint.own.address, endpoint.own)
        self.is_near = True
        endpoint.loop.start()

    @property
    def is_open(self) -> bool:
        return True

    def send(
        self,
        kind: int,
        number: int = 0,
        envelope: bytes = b"",
        data: Any = b"",
        buffers: Sequence[Any] = (),
        on_free: Callable[[], None] | None = None,  # noqa: ARG002 - nothing is lent
        late: Callable[[], str] | None = None,  # noqa: ARG002 - it is done at once
    ) -> Handle[None] | None:
        # Buffers in shared memory do not change. The caller may change its own.
        copies = [one if isinstance(one, SharedBuffer) else memoryview(bytearray(one)) for one in buffers]
        frame = Frame(kind, number, envelope, bytes(data), copies)
        if kind != Kind.HOLD:
            self.loop.call(lambda: self.take(frame))
        return None

    def when_open(self, function: Callable[[], None], handle: Handle[None]) -> None:  # noqa: ARG002 - likewise
        function()


def gone_error(info: PeerInfo | None) -> WorkerDied:
    """Make the error for what waits for a process that has ended."""
    return WorkerDied(f"{info} is gone: its process ended or was closed", hint="its log says why")


def lost_error(info: PeerInfo | None) -> WorkerDied:
    """Make the error for what waits for a process that may live, and cannot be reached."""
    return WorkerDied(
        f"{info} is lost: the connection to it broke, and it could not be reached for {LOST_SECONDS:g} s",
        hint="its process may live: look at the network between the nodes",
    )
