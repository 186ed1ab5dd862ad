"""This process as a member of its job's communication: where it listens, and how it finds and reaches its peers.

There is one `Peer` for each other process, and at most one connection at a time, which either end opens. If both do at
once, both know which of the two connections counts: the one with the higher epoch, or else that of the process whose
instance comes first. A connection that breaks is opened again by whoever notices. A process that nobody listens for
any more has ended, and so has its peer.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import resource
import secrets
import socket
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from roost.comm.limits import BUSY_SECONDS, GREET_SECONDS, LOST_SECONDS, RETRY_SECONDS
from roost.comm.move.memory import Pool
from roost.comm.wire.connection import Connection, Frame, Kind, PeerInfo
from roost.comm.wire.loop import Loop
from roost.comm.wire.peer import OwnPeer, Peer, gone_error, lost_error
from roost.errors import ClusterError, WorkerDied

log: logging.Logger = logging.getLogger(__name__)

_BACKLOG = 1024
ENDED = "the communication of this process has ended"
_MOST_STRANGERS = 1024
"""How many connections may be open that have not proved to be members; fewer if descriptors are few."""
_AT_ONCE = 16
"""How many connections are accepted before those are read that have been."""
_MOST_DOUBLINGS = 7
"""How often the time until the next try is doubled."""
_FEWEST_FILES = 512
"""With fewer descriptors, shared memory is not used: each piece takes one."""
_MOST_REFUSED = 3
"""A process on another node that refuses so many connections in a row, some tenths of a second apart, has ended."""
_CREDENTIALS = struct.Struct("3i")
"""The process, user and group at the other end of a socket of this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Where one process can be reached: enough to connect to it, with the job's secret."""

    peer: PeerInfo
    local_name: str
    """The name of its socket on its own machine; empty if it has none."""
    host: str
    port: int
    """0 if it does not listen."""


class Directory(Protocol):
    """Where members find each other."""

    def announce(self, listing: Listing) -> None:
        """Let others find this process."""

    def find(self, address: str, but_not: str, on_wait: Callable[[], None]) -> Future[Listing]:
        """Find a process by its name, waiting until it is there; not the one with instance `but_not`, which is gone.

        `on_wait` is called if it is not there yet, and again if it is still not there after some seconds. Fails with
        WorkerDied if it is dead and will not be restarted, and with other errors of Roost.
        """


class Endpoint:
    """The communication of this process."""

    def __init__(self, own: PeerInfo, secret: bytes, directory: Directory, host: str | None, port: int = 0) -> None:
        """Take who this process is, and the address to listen at; with no host, other processes cannot reach it."""
        self.own = own
        self.host = host
        self.lock = threading.RLock()
        self.loop = Loop(f"roost-comm-{own.address}")
        self.shared, self.private = Pool(), Pool(self.loop.call_later)
        self.peers: dict[str, Peer] = {}
        """By address: the processes that this one talks to, or looks for."""
        self.on_message: Callable[[Peer, Frame], None] = lambda _peer, _frame: None
        """Takes messages and tensors."""
        self.on_loan: Callable[[Peer, Frame], None] | None = None
        """Answers peers that fetch a tensor from a device."""
        self.on_end: list[Callable[[Peer, Exception], None]] = []
        """Called when a peer has ended or is lost, or no process of its name can be found: then it has no `info`."""
        self.on_close: list[Callable[[], None]] = []
        """Called when this process stops communicating."""
        self.is_closed = False
        self._secret = secret
        self._directory = directory
        self._port = port
        self._listing = Listing(peer=own, local_name="", host="", port=0)
        self._on_request: Callable[[Peer, Frame], None] | None = None
        self._early: list[tuple[Peer, Frame]] = []
        """Requests that arrived before there was something to answer them."""
        self._ungreeted: dict[Connection, None] = {}
        """Connections whose other ends have not proved to be members, the oldest first."""
        self.numbers = itertools.count(1)
        """Numbers that this process has not used yet."""
        self._listeners: list[socket.socket] = []
        self._most_strangers = min(_MOST_STRANGERS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        _endpoints.add(self)

    def open(self) -> None:
        """Let others find this process: what takes messages must be there before."""
        host, port, local_name = self.host or "", 0, ""
        if host:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            try:
                listener = socket.create_server((host, self._port), family=family, backlog=_BACKLOG)
            except OSError as error:
                # As while the network of the node is down.
                raise ClusterError(f"{self.own.address} cannot listen at {host}: {error.strerror}") from None
            self._listeners.append(listener)
            port = listener.getsockname()[1]
        if sys.platform == "linux" and resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= _FEWEST_FILES:
            # In the kernel's own space of names, so that no file is left. A driver has this one alone, by which a
            # peer on its node sees whether it lives.
            local_name = f"\0roost-{secrets.token_hex(16)}"
            local = socket.socket(socket.AF_UNIX)
            local.bind(local_name)
            local.listen(_BACKLOG)
            self._listeners.append(local)
        self._listing = Listing(peer=self.own, local_name=local_name, host=host, port=port)
        for one in self._listeners:
            one.setblocking(False)
            self.loop.watch(one.fileno(), lambda _event, one=one: self._accept(one))  # type: ignore[misc]
        if host:
            self._directory.announce(self._listing)

    def peer(self, address: str) -> Peer:
        """Return the wire to a process, and begin to look for it if there is none; its death is noticed from now on."""
        peer = self.peers.get(address)
        if peer is None:
            # One whose process is gone may be over before this thread goes on.
            made: list[Peer] = []
            self.loop.do(lambda: made.append(self._make_peer(address)))
            peer = made[0]
        return peer

    def _make_peer(self, address: str) -> Peer:
        with self.lock:
            if self.is_closed:
                raise ClusterError(ENDED)
            peer = self.peers.get(address)
            if peer is None:
                peer = self.peers[address] = OwnPeer(self) if address == self.own.address else Peer(self, address)
                if address != self.own.address:
                    self._find(peer, "")
            return peer

    def request(
        self, address: str, envelope: bytes, data: Any, buffers: Sequence[Any], sink: Any, kind: int = Kind.REQUEST
    ) -> int:
        """Ask a process something; `sink` takes the reply, a `Frame`, or fails. Returns the number of the request."""
        number = next(self.numbers)
        self.peer(address).request(number, envelope, data, buffers, sink, kind)
        return number

    def serve(self, answer: Callable[[Peer, Frame], None]) -> None:
        """Let a function answer requests, those that are here already too; it is called in the thread that reads."""

        def begin() -> None:
            with self.lock:
                self._on_request = answer
                early, self._early = self._early, []
            for peer, frame in early:
                answer(peer, frame)

        self.loop.call(begin)

    def take(self, peer: Peer, frame: Frame) -> None:
        """Take a request or a word about loans in; in the thread that reads."""
        if frame.kind == Kind.REQUEST:
            answer = self._on_request
            if answer is None:
                with self.lock:
                    answer = self._on_request
                    if answer is None:
                        self._early.append((peer, frame))
                        return
            answer(peer, frame)
        elif self.on_loan is not None:
            self.on_loan(peer, frame)

    def close(self) -> None:
        """End all of it; what waits fails."""
        with self.lock:
            if self.is_closed:
                return
            self.is_closed = True
        for listener in self._listeners:
            self.loop.forget(listener.fileno())
            listener.close()
        error = ClusterError(ENDED)
        for call in self.on_close:
            call()
        while True:
            with self.lock:
                peers, connections = list(self.peers.values()), list(self._ungreeted)
                self.peers.clear()
            if not peers and not connections:
                break
            for peer in peers:
                self._stop_looking(peer)
                peer.end(error)
            for connection in connections:
                connection.close()
        self.loop.stop()

    def abandon(self) -> None:
        """Let go of the sockets in a process made by fork, without a lock, which another thread may have held then."""
        self.is_closed = True
        for listener in self._listeners:
            listener.close()
        for connection in [*self._ungreeted, *(peer.connection for peer in self.peers.values())]:
            if connection is not None:
                connection.abandon()

    # Finding and reaching a process: in the communication thread.

    def _find(self, peer: Peer, but_not: str) -> None:
        if peer.lookup is not None or self.is_closed:
            return
        found = self._directory.find(peer.address, but_not, lambda: self.loop.call(peer.wait_for_start))
        peer.lookup = found
        found.add_done_callback(lambda ended: self.loop.call(lambda: self._found(peer, ended)))
        self.loop.start()
        self.loop.nudge()

    def _found(self, peer: Peer, found: Future[Listing]) -> None:
        if peer.lookup is not found or self.is_closed or peer.is_over:
            return
        peer.lookup = None
        if found.cancelled() or peer.is_open:
            return
        try:
            listing = found.result(0)
        except Exception as error:
            self._end(peer, gone_error(peer.info) if peer.session and isinstance(error, WorkerDied) else error)
            return
        if peer.session and peer.info is not None and listing.peer.instance != peer.info.instance:
            # Another process has its name now.
            self._end(peer, gone_error(peer.info))
            return
        peer.listing = listing
        self._dial(peer, is_near=True)

    def _stop_looking(self, peer: Peer) -> None:
        lookup, peer.lookup = peer.lookup, None
        if lookup is not None:
            lookup.cancel()

    def _dial(self, peer: Peer, *, is_near: bool) -> None:
        """Open a connection to where a process listens: near if it is on this node, else or after that far."""
        listing = peer.listing
        if peer.is_over or peer.is_open or peer.dialing is not None or listing is None:
            return
        is_near = is_near and self._is_near(listing)
        if not is_near and not listing.port:
            return
        sock = None
        try:
            if is_near:
                sock = socket.socket(socket.AF_UNIX)
                target: Any = listing.local_name
            else:
                sock = socket.socket(socket.AF_INET6 if ":" in listing.host else socket.AF_INET)
                target = listing.host, listing.port
            sock.setblocking(False)
            try:
                sock.connect(target)
            except BlockingIOError:
                if is_near:
                    # Too many wait there, and nothing is under way.
                    raise OSError("busy") from None
        except OSError as error:
            if sock is not None:
                sock.close()
            self._not_reached(peer, is_near, error)
            return
        peer.proposed = peer.proposed or secrets.token_hex(8)
        peer.epoch_tried = max(peer.epoch_tried, peer.epoch) + 1
        peer.dialing = self._begin(sock, peer)

    def _is_near(self, listing: Listing) -> bool:
        return bool(listing.local_name) and listing.peer.node_rank == self.own.node_rank

    def _not_reached(self, peer: Peer, is_near: bool, error: BaseException | None) -> None:
        """Try the network if the near way failed, as between containers; else try again after a while.

        The process may also have died, and have been restarted: meanwhile, another one of its name is looked for.
        """
        if peer.is_over or peer.is_open or self.is_closed:
            return
        listing = peer.listing
        is_refused = isinstance(error, ConnectionRefusedError)
        if is_near:
            peer.is_near_refused = is_refused
            if listing is not None and listing.port:
                self._dial(peer, is_near=False)
                return
        peer.refused = peer.refused + 1 if is_refused else 0
        if peer.session and is_refused and (peer.is_near_refused or peer.refused >= _MOST_REFUSED):
            self._end(peer, gone_error(peer.info))
            return
        if listing is not None:
            self._find(peer, listing.peer.instance)
        self._retry_after(peer, RETRY_SECONDS * 2 ** min(peer.tries, _MOST_DOUBLINGS))
        peer.tries += 1

    def _retry_after(self, peer: Peer, seconds: float) -> None:
        # Spread the retries of peers that were refused together.
        listing = peer.listing

        def retry() -> None:
            if peer.listing is listing and self.peers.get(peer.address) is peer:
                self._dial(peer, is_near=True)

        self.loop.call_later(seconds * random.uniform(0.5, 1.5), retry)  # noqa: S311

    # Greetings, in the thread that reads the connection.

    def _about(self, **more: Any) -> dict[str, Any]:
        own = self._listing
        about = {"info": asdict(self.own), "local": own.local_name, "host": own.host, "port": own.port}
        return about | {"count": next(self.numbers)} | more

    def hello(self, peer: Peer) -> dict[str, Any]:
        """Return what this end of a connection that it opened says about itself."""
        # If both ends had proposed a name when they met, the wire has that of the other end.
        session, is_new = peer.session or peer.proposed, not peer.session
        return self._about(session=session, epoch=peer.epoch_tried, is_new=is_new, received=peer.received)

    def admit(self, connection: Connection, hello: dict[str, Any]) -> tuple[dict[str, Any], Peer | None]:
        """Return what to answer to a process that has connected, and its peer unless it is refused."""
        info, session, epoch, is_new = PeerInfo(**hello["info"]), hello["session"], hello["epoch"], hello["is_new"]
        peer = self.peers.get(info.address)
        if peer is not None and peer.info is not None and peer.info.instance != info.instance:
            self._end(peer, gone_error(peer.info))
            peer = None
        if peer is not None and hello["count"] < peer.heard:
            # It was said before the connection that counts was opened, and was read only now.
            return self._about(verdict="busy", session="", received=0), None
        if peer is not None and peer.session not in ("", session) and is_new:
            # The other end has given this wire up, and so must this one.
            self._end(peer, lost_error(peer.info))
            peer = None
        if not is_new and (peer is None or session not in (peer.session, peer.proposed)):
            return self._about(verdict="lost", session="", received=0), None
        with self.lock:
            if self.is_closed:
                return self._about(verdict="lost", session="", received=0), None
            # Another thread may have begun to look for that process meanwhile: there is one wire to it.
            peer = peer or self.peers.get(info.address)
            if peer is None:
                peer = self.peers[info.address] = Peer(self, info.address)
        mine = peer.epoch_tried if peer.dialing is not None else peer.epoch if peer.is_open else 0
        if (mine, info.instance) > (epoch, self.own.instance):
            return self._about(verdict="busy", session="", received=0), None
        self._adopt(peer, connection, info, hello, max(mine, epoch))
        return self._about(verdict="welcome", session=session, received=peer.received), peer

    def admitted(self, connection: Connection, peer: Peer, answer: dict[str, Any]) -> Peer | None:
        """Take that answer at the end that connected."""
        listing, info = peer.listing, PeerInfo(**answer["info"])
        if listing is None or peer.dialing is not connection or peer.is_over:
            return None
        if info != listing.peer:
            # The port is used again: another member of the job listens there now.
            if peer.session:
                self._end(peer, gone_error(peer.info))
            else:
                self._find(peer, listing.peer.instance)
            return None
        if answer["verdict"] == "lost" and peer.session:
            self._end(peer, lost_error(peer.info))
        if answer["verdict"] != "welcome":
            return None
        self._adopt(peer, connection, info, answer, peer.epoch_tried)
        return peer

    def _adopt(self, peer: Peer, connection: Connection, info: PeerInfo, said: dict[str, Any], epoch: int) -> None:
        """Make a connection that of a peer; whatever it had before ends, and is read to its end."""
        with self.lock:
            self._ungreeted.pop(connection, None)
        self._stop_looking(peer)
        dialing, peer.dialing = peer.dialing, None
        before = peer.connection
        peer.info, peer.session, peer.epoch, peer.epoch_tried = info, said["session"], epoch, epoch
        peer.heard, peer.refused, peer.is_near_refused = said["count"], 0, False
        peer.listing = Listing(peer=info, local_name=said["local"], host=said["host"], port=said["port"])
        if dialing is not None and dialing is not connection:
            dialing.close()
        if before is not None:
            before.peer = None
            before.close()
            peer.detach(before)

    def broken(self, connection: Connection) -> None:
        """Note the end of a connection, whether it was greeted or not."""
        with self.lock:
            is_greeted = connection not in self._ungreeted
            self._ungreeted.pop(connection, None)
        if not is_greeted:
            peer = connection.target
            if peer is not None and peer.dialing is connection:
                peer.dialing = None
                if isinstance(connection.reason, ValueError):
                    # It answered and refused, since it connects itself just now, or is another process.
                    self._retry_after(peer, BUSY_SECONDS)
                else:
                    self._not_reached(peer, connection.is_near, connection.reason)
            return
        peer_of = connection.peer
        if peer_of is None:
            return
        peer_of.detach(connection)
        if peer_of.is_open or self.is_closed or peer_of.is_over:
            return
        epoch = peer_of.epoch
        self.loop.call_later(LOST_SECONDS, lambda: self._give_up(peer_of, epoch))
        listing = peer_of.listing
        if listing is not None and (listing.port or self._is_near(listing)):
            self._dial(peer_of, is_near=True)
        elif isinstance(connection.reason, EOFError):
            # Nothing listens there that could be asked. A process that lives closes no connection, and connects again
            # if one is reset.
            self._end(peer_of, gone_error(peer_of.info))

    def _give_up(self, peer: Peer, epoch: int) -> None:
        if not peer.is_over and not peer.is_open and peer.epoch == epoch:
            self._end(peer, lost_error(peer.info))

    def _end(self, peer: Peer, error: Exception) -> None:
        """End a peer, and fail what waits for its process."""
        with self.lock:
            if self.peers.get(peer.address) is peer:
                del self.peers[peer.address]
        self._stop_looking(peer)
        peer.end(error)
        for end in self.on_end:
            end(peer, error)

    # Strangers.

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
                self.loop.call_later(RETRY_SECONDS, lambda: self._listen(listener))
                return
            if sock.family == socket.AF_UNIX:
                said = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                if _CREDENTIALS.unpack(said)[1] not in (0, os.geteuid()):
                    sock.close()
                    continue
            self._drop_strangers(self._most_strangers - 1)
            if self._begin(sock, None) is None:
                return

    def _listen(self, listener: socket.socket) -> None:
        if not self.is_closed:
            self.loop.watch_for(listener.fileno(), reads=True, writes=False)

    def _drop_strangers(self, most: int) -> None:
        """Close the oldest connections whose other ends have not proved to be members, if there are too many."""
        strangers = [connection for connection in list(self._ungreeted) if connection.target is None]
        for connection in strangers[: max(0, len(strangers) - most)]:
            connection.close()

    def _begin(self, sock: socket.socket, target: Peer | None) -> Connection | None:
        """Begin a connection, which ends soon unless its other end proves to be a member."""
        with self.lock:
            if self.is_closed:
                sock.close()
                return None
            connection = Connection(self.loop, sock, self._secret, self, target)
            self._ungreeted[connection] = None

        def end() -> None:
            if connection in self._ungreeted:
                connection.close()

        self.loop.call_later(GREET_SECONDS, end)
        return connection


def own_instance() -> str:
    """Return a name for this process that no other one has."""
    return f"{os.getpid()}-{secrets.token_hex(8)}"


_endpoints: weakref.WeakSet[Endpoint] = weakref.WeakSet()


def _abandon_all() -> None:
    # Otherwise peers would not notice the end of this process while its child lives.
    for endpoint in _endpoints:
        with contextlib.suppress(RuntimeError):
            endpoint.abandon()


os.register_at_fork(after_in_child=_abandon_all)
