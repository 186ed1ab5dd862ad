"""This process as a member of its job's communication: where it listens, and its links to other members.

A link is a connection that this process opened. What it sends to a worker goes through its link to that worker, so the
order is kept; what it receives arrives on the links of others. A peer that dies closes all its connections: when the
last one has been read to its end, every operation that waits for that process fails.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import random
import resource
import secrets
import socket
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from roost.comm.mailbox import Mailbox
from roost.comm.move.memory import Pool
from roost.comm.wire.connection import Connection, Frame, Kind, Peer, gone_error
from roost.comm.wire.loop import Handle, Loop
from roost.errors import ClusterError, RoostError

log: logging.Logger = logging.getLogger(__name__)

_REPLY, _REQUEST = int(Kind.REPLY), int(Kind.REQUEST)
_LOAN = (int(Kind.FETCH), int(Kind.RETURN))
_BACKLOG = 1024
MOST_WAITING = 1 << 26
"""How many bytes may wait for a process: here until it is up, and there until it receives them."""
ENDED = "the communication of this process has ended"
_GREET_SECONDS = 10.0
_MOST_STRANGERS = 1024
"""How many connections may be open that have not proved to be members; fewer if descriptors are few."""
_AT_ONCE = 16
"""How many connections are accepted before those are read that have been."""
_MOST_EARLY = 256
"""How many requests may wait for what answers them; then those that ask are not read."""
_RETRY_SECONDS = 0.1
_MOST_DOUBLINGS = 7
"""How often the time until the next try is doubled."""
_FEWEST_FILES = 512
"""With fewer descriptors, shared memory is not used: each piece takes one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Where one process can be reached: enough to connect to it, with the job's secret."""

    peer: Peer
    local_name: str
    """The name of its socket on its own machine; empty if it has none."""
    host: str
    port: int


class Directory(Protocol):
    """Where members find each other."""

    def announce(self, listing: Listing) -> None:
        """Let others find this process."""

    def find(self, address: str, but_not: str, on_wait: Callable[[], None]) -> Future[Listing]:
        """Find a process by its name, waiting until it is there; not the one with instance `but_not`, which is gone.

        `on_wait` is called if it is not there yet, and again if it is still not there after some seconds. Fails with
        WorkerDied if it is dead and will not be restarted.
        """


@dataclass(frozen=True, slots=True)
class Job:
    """Something to send when a link is open."""

    run: Callable[[Connection], None]
    fail: Callable[[Exception], None]
    keep: Callable[[], None] | None
    """What to call if it waits here and the caller need not; None if the caller must."""


class Link:
    """The way from this process to another one: what is sent waits here until the connection is open."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.connection: Connection | None = None
        self.listing: Listing | None = None
        self.error: Exception | None = None
        self.is_ready = False
        self.is_near = False
        self.tries = 0
        self.lookup: Future[Listing] | None = None
        """Where a process of this name is being looked for; it is cancelled when none is needed any more."""
        self.jobs: deque[Job] = deque()
        self.is_waiting = False
        """Whether the other process is not there yet: what can wait here has been done, for the caller."""
        self.is_late = False
        """Whether the log says that it is not there yet."""
        self.waiting_bytes = 0
        self.requests: dict[int, Handle[Any]] = {}


class Endpoint:
    """The communication of this process."""

    def __init__(self, own: Peer, secret: bytes, directory: Directory, host: str | None, port: int = 0) -> None:
        """Take who this process is, and the address to listen at; with no host, other processes cannot reach it."""
        self.own = own
        self.lock = threading.RLock()
        self.loop = Loop(f"roost-comm-{own.address}")
        self.mailbox: Mailbox[Any] = Mailbox()
        self.on_message: Callable[[Connection, Frame], None] | None = None
        """What takes messages and tensors."""
        self.on_loan: Callable[[Connection, Frame], None] | None = None
        """What answers those who fetch a tensor from a device."""
        self._on_request: Callable[[Connection, Frame], None] | None = None
        self._early: list[tuple[Connection, Frame]] = []
        """Requests that arrived before there was something to answer them."""
        self.on_gone: list[Callable[[Peer], None]] = []
        """Called when the last connection of a process has ended."""
        self.on_close: list[Callable[[], None]] = []
        """Called when this process stops communicating."""
        self._secret = secret
        self._directory = directory
        self._pools = Pool(is_shared=True), Pool(is_shared=False)
        self._links: dict[str, Link] = {}
        self._connections: dict[str, set[Connection]] = {}
        """By instance: the open connections of the processes at the other ends."""
        self.incoming: dict[str, Connection] = {}
        """By address: the connection that the process there opened, and sends its messages through."""
        self._known: Counter[str] = Counter()
        """By address: how many open connections there are."""
        self._strangers: dict[Connection, None] = {}
        """Those that have not proved to be members, the oldest first."""
        self._numbers = itertools.count(1)
        self._listeners: list[socket.socket] = []
        self.is_closed = False
        self.host = host
        self._port = port
        self._most_strangers = min(_MOST_STRANGERS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        _endpoints.add(self)

    def open(self) -> None:
        """Let others find this process: what takes messages must be there before."""
        host = self.host
        if host is None:
            return
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, self._port), family=family, backlog=_BACKLOG)
        except OSError as error:
            # As while the network of the node is down.
            raise ClusterError(f"{self.own.address} cannot listen at {host}: {error.strerror}") from None
        local_name = ""
        self._listeners.append(listener)
        if sys.platform == "linux" and resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= _FEWEST_FILES:
            # In the kernel's own space of names, so that no file is left; it needs no permission, but the secret.
            local_name = f"\0roost-{secrets.token_hex(16)}"
            local = socket.socket(socket.AF_UNIX)
            local.bind(local_name)
            local.listen(_BACKLOG)
            self._listeners.append(local)
        for one in self._listeners:
            one.setblocking(False)
            self.loop.watch(one.fileno(), lambda _event, one=one: self._accept(one))  # type: ignore[misc]
        self._directory.announce(
            Listing(peer=self.own, local_name=local_name, host=host, port=listener.getsockname()[1])
        )

    def serve(self, answer: Callable[[Connection, Frame], None]) -> None:
        """Let a function answer requests, those that are here already too; it is called in the thread that reads."""

        def begin() -> None:
            with self.lock:
                self._on_request = answer
                early, self._early = self._early, []
            for connection, frame in early:
                answer(connection, frame)
                connection.pause(is_paused=False)

        self.loop.call(begin)

    @property
    def is_open(self) -> bool:
        """Whether other processes can reach this one."""
        return bool(self._listeners) and not self.is_closed

    def number(self) -> int:
        """Return a number that this process has not used yet."""
        return next(self._numbers)

    def submit(
        self,
        address: str,
        job: Callable[[Connection], None],
        fail: Callable[[Exception], None] = lambda _error: None,
        keep: Callable[[], None] | None = None,
        size: int = 0,
    ) -> None:
        """Let a job send something to a worker: now, or when the link is open. `fail` is called if it never is.

        If the worker is alive and does not communicate yet, `keep` is called: the job waits here, and not its caller.
        """
        with self.lock:
            link = self.link(address)
            if not link.is_ready:
                link.waiting_bytes += size
                may_wait = link.waiting_bytes <= MOST_WAITING
                link.jobs.append(Job(job, fail, keep if may_wait else None))
                if link.is_waiting and may_wait and keep is not None:
                    keep()
                return
            connection = link.connection
        job(connection)  # type: ignore[arg-type]

    def connection_to(self, address: str) -> Connection | None:
        """Return the connection to a worker if it is open, and nothing waits to be sent first."""
        link = self._links.get(address)
        return link.connection if link is not None and link.is_ready else None

    def request(
        self, address: str, envelope: bytes, data: Any, buffers: Any, handle: Handle[Any], kind: Kind = Kind.REQUEST
    ) -> int:
        """Ask a worker something; its reply, a `Frame`, completes the handle. Returns the number of the request."""
        number = self.number()

        def ask(connection: Connection) -> None:
            link.requests[number] = handle
            connection.send(kind, number, envelope, data, buffers)

        with self.lock:
            link = self.link(address)
            self.submit(address, ask, handle.fail)
        return number

    def link(self, address: str) -> Link:
        """Return the link to a worker, and begin to open it if there is none."""
        with self.lock:
            if self.is_closed:
                raise ClusterError(ENDED)
            link = self._links.get(address)
            if link is None:
                link = self._links[address] = Link(address)
                self._find(link, "")
            return link

    def expect(self, address: str) -> None:
        """Make sure that the death of a worker is noticed."""
        with self.lock:
            if not self._known.get(address):
                self.link(address)

    def close(self) -> None:
        """End all of it; what waits fails."""
        with self.lock:
            if self.is_closed:
                return
            self.is_closed = True
            links = list(self._links.values())
        for listener in self._listeners:
            self.loop.forget(listener.fileno())
            listener.close()
        error = ClusterError(ENDED)
        self._close_connections(error)
        for call in self.on_close:
            call()
        for link in links:
            self._fail(link, error)
        with self.lock:
            self._links.clear()
            waiting = list(self.mailbox.receives())
        for receive in waiting:
            receive.receiver.fail(error)
        self.loop.stop()
        # Those that were accepted meanwhile.
        self._close_connections(error)

    def abandon(self) -> None:
        """Let go of the sockets in a process made by fork, without a lock, which another thread may have held then."""
        self.is_closed = True
        for listener in self._listeners:
            listener.close()
        for connection in self._all_connections():
            connection.abandon()

    def _all_connections(self) -> set[Connection]:
        open_ones = {connection for some in self._connections.values() for connection in some}
        return open_ones | {*self._strangers, *(link.connection for link in self._links.values() if link.connection)}

    def _close_connections(self, error: Exception) -> None:
        with self.lock:
            open_ones = self._all_connections()
        for connection in open_ones:
            connection.close(error)

    def _find(self, link: Link, but_not: str) -> None:
        found = self._directory.find(link.address, but_not, lambda: self.loop.call(lambda: self._wait(link)))
        link.lookup = found
        found.add_done_callback(lambda ended: self.loop.call(lambda: self._dial(link, ended)))
        self.loop.start()
        self.loop.nudge()

    def _wait(self, link: Link) -> None:
        """Note that a process is not there yet."""
        with self.lock:
            is_late = link.is_waiting and not link.is_late
            link.is_waiting = not link.is_ready
            jobs = list(link.jobs) if link.is_waiting else []
        if is_late and link.is_waiting:
            link.is_late = True
            log.warning(
                "%s waits for %s, which is not launched or has not communicated yet", self.own.address, link.address
            )
        for job in jobs:
            if job.keep is not None:
                job.keep()

    def _dial(self, link: Link, found: Future[Listing]) -> None:
        """Connect to what was found; in the thread that reads."""
        if self.is_closed or found.cancelled() or link.is_ready:
            return
        link.lookup = None
        # A process that could not be reached may still be tried.
        tried, link.connection = link.connection, None
        if tried is not None:
            tried.close()
        try:
            listing = found.result(0)
        except Exception as error:
            self._fail(link, error if isinstance(error, RoostError) else ClusterError(f"{link.address}: {error}"))
            return
        link.listing = listing
        self._begin(link, listing)

    def _begin(self, link: Link, listing: Listing) -> None:
        link.is_near = bool(listing.local_name) and listing.peer.node_rank == self.own.node_rank
        self._reach(link, listing)

    def _reach(self, link: Link, listing: Listing) -> None:
        sock = None
        try:
            if link.is_near:
                sock = socket.socket(socket.AF_UNIX)
                target: Any = listing.local_name
            else:
                sock = socket.socket(socket.AF_INET6 if ":" in listing.host else socket.AF_INET)
                target = (listing.host, listing.port)
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect(target)
        except OSError:
            if sock is not None:
                sock.close()
            self._try_again(link)
            return
        link.connection = self._connect(sock, is_server=False, on_open=lambda made: self._opened(link, made))

    def _connect(self, sock: socket.socket, *, is_server: bool, on_open: Callable[[Connection], None]) -> Connection:
        def opened(connection: Connection) -> None:
            with self.lock:
                self._strangers.pop(connection, None)
                if connection.peer is not None:
                    self._connections.setdefault(connection.peer.instance, set()).add(connection)
                    self._known[connection.peer.address] += 1
                    if is_server:
                        self.incoming[connection.peer.address] = connection
            on_open(connection)

        return Connection(
            self.loop,
            sock,
            self._secret,
            self.own,
            is_server=is_server,
            pools=self._pools,
            on_open=opened,
            on_frame=self._take,
            on_close=self._closed,
        )

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError:
                # No descriptor is left: those that wait stay in the queue of the kernel, and strangers go.
                self._drop_strangers(0)
                self.loop.watch_for(listener.fileno(), reads=False, writes=False)
                self.loop.call_later(_RETRY_SECONDS, lambda: self._listen(listener))
                return
            self._drop_strangers(self._most_strangers - 1)
            connection = self._connect(sock, is_server=True, on_open=lambda _: None)
            self._strangers[connection] = None
            self.loop.call_later(_GREET_SECONDS, functools.partial(self._drop_stranger, connection))

    def _listen(self, listener: socket.socket) -> None:
        if not self.is_closed:
            self.loop.watch_for(listener.fileno(), reads=True, writes=False)

    def _drop_strangers(self, most: int) -> None:
        """Close the oldest connections of those that have not proved to be members, if there are too many."""
        for connection in list(self._strangers)[: max(0, len(self._strangers) - most)]:
            self._drop_stranger(connection)

    def _drop_stranger(self, connection: Connection) -> None:
        if connection in self._strangers:
            connection.close()

    def _opened(self, link: Link, connection: Connection) -> None:
        if link.connection is not connection:
            return
        if link.listing is not None and connection.peer != link.listing.peer:
            # The port is used again: another member of the job listens there now.
            link.connection = None
            self._seek(link, link.listing)
            return
        if link.lookup is not None:
            link.lookup.cancel()
        # In order: what is submitted meanwhile waits for the lock.
        with self.lock:
            while link.jobs:
                link.jobs.popleft().run(connection)
            link.is_ready = True

    def _try_again(self, link: Link) -> None:
        """Try the network if the near way failed, as between containers; else try again after a while.

        The process may also have died, and have been restarted: meanwhile, another one of its name is looked for.
        """
        listing = link.listing
        if listing is None:
            return
        if link.is_near:
            link.is_near = False
            self._reach(link, listing)
            return
        link.connection = None
        self._seek(link, listing)
        seconds = _RETRY_SECONDS * 2 ** min(link.tries, _MOST_DOUBLINGS)
        link.tries += 1
        # Not all at the same moment that were refused together.
        self.loop.call_later(seconds * random.uniform(0.5, 1.5), lambda: self._retry(link, listing))  # noqa: S311

    def _seek(self, link: Link, gone: Listing) -> None:
        if link.lookup is None:
            self._find(link, gone.peer.instance)

    def _retry(self, link: Link, listing: Listing) -> None:
        if link.listing is listing and self._links.get(link.address) is link:
            self._begin(link, listing)

    def _take(self, connection: Connection, frame: Frame) -> None:
        peer = connection.peer
        if peer is None:
            return
        kind = frame.kind
        if kind == _REPLY:
            link = self._links.get(peer.address)
            handle = link.requests.pop(frame.number, None) if link is not None else None
            if handle is not None:
                handle.complete(frame)
        elif kind == _REQUEST:
            if self._on_request is not None:
                self._on_request(connection, frame)
            else:
                self._keep_early(connection, frame)
        elif kind in _LOAN:
            if self.on_loan is not None:
                self.on_loan(connection, frame)
        elif self.on_message is not None:
            self.on_message(connection, frame)

    def _keep_early(self, connection: Connection, frame: Frame) -> None:
        with self.lock:
            answer = self._on_request
            if answer is None:
                self._early.append((connection, frame))
                connection.pause(is_paused=len(self._early) >= _MOST_EARLY)
        if answer is not None:
            answer(connection, frame)

    def _closed(self, connection: Connection) -> None:
        peer = connection.peer
        with self.lock:
            self._strangers.pop(connection, None)
            lost = [link for link in self._links.values() if link.connection is connection]
            if peer is not None:
                open_ones = self._connections.get(peer.instance, set())
                open_ones.discard(connection)
                if not open_ones:
                    self._connections.pop(peer.instance, None)
                self._known -= Counter([peer.address])
                if self.incoming.get(peer.address) is connection:
                    del self.incoming[peer.address]
        if self.is_closed:
            return
        for link in lost:
            if peer is None:
                # It refused, or was dead before the connection was open.
                self._try_again(link)
            else:
                self._fail(link, gone_error(peer))
        if peer is not None and peer.instance not in self._connections:
            self._gone(peer)

    def _gone(self, peer: Peer) -> None:
        """Fail what waits for a process that has ended."""
        with self.lock:
            receives = self.mailbox.withdraw_from(peer.address)
        for receive in receives:
            receive.receiver.fail(gone_error(peer))
        for call in list(self.on_gone):
            call(peer)

    def _fail(self, link: Link, error: Exception) -> None:
        with self.lock:
            link.error, link.is_ready = error, False
            if link.lookup is not None:
                link.lookup.cancel()
            if self._links.get(link.address) is link:
                del self._links[link.address]
            jobs, requests = list(link.jobs), list(link.requests.values())
            link.jobs.clear()
            link.requests.clear()
            # A receive may wait for a worker that cannot be found.
            receives = [] if self._known.get(link.address) else self.mailbox.withdraw_from(link.address)
        for job in jobs:
            job.fail(error)
        for handle in requests:
            handle.fail(error)
        for receive in receives:
            receive.receiver.fail(error)


def own_instance() -> str:
    """Return a name for this process that no other one has."""
    return f"{os.getpid()}-{secrets.token_hex(8)}"


_endpoints: weakref.WeakSet[Endpoint] = weakref.WeakSet()


def _abandon_all() -> None:
    # Otherwise peers would not notice the end of this process while its child lives.
    for endpoint in _endpoints:
        endpoint.abandon()


os.register_at_fork(after_in_child=_abandon_all)
