"""The home of a channel: answers requests about its queues, in the communication thread of its process.

A channel that is spread over nodes has a home on each. A key lives in one of them, that of the client that used it
first. Home 0 keeps the directory: it assigns a key, tells the home that owns it from then on, and only then tells the
client. A home that does not own a key says so, and the client asks the directory again.
"""

from __future__ import annotations

import pickle
import struct
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from roost.comm.channels.frames import Op, Put, read_ask, write_answer, write_failure
from roost.comm.channels.queues import Answer, Event, Queues, Status
from roost.comm.wire.connection import Frame, Kind, PeerInfo
from roost.comm.wire.endpoint import Endpoint
from roost.comm.wire.loop import Handle
from roost.comm.wire.peer import Peer
from roost.runtime.events.emitter import Gauge

_MOST_IDLE_KEYS = 256
"""How many unused keys a home of several keeps, so that those that are used again and again stay where they are."""
_RATE_SECONDS = 10.0
_COUNT = struct.Struct("<BI")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSettings:
    """What a channel was created with."""

    maxsize: int
    max_bytes: int
    distributed: bool
    nodes: tuple[int, ...]
    """The ranks of the nodes that its homes are on."""


def write_acknowledgement(count: int) -> bytes:
    """Encode that the first items of a request arrived; 0 is all."""
    return _COUNT.pack(Op.ACKNOWLEDGE, count)


def write_call(op: Op, *arguments: Any) -> bytes:
    """Encode a request that is not about items."""
    return bytes([op]) + pickle.dumps(arguments)


class Home:
    """The queues of one process, and those that use them."""

    def __init__(self, endpoint: Endpoint, settings: ChannelSettings, group: str, rank: int, size: int) -> None:
        self._endpoint = endpoint
        self._settings = settings
        self._group = group
        self._rank = rank
        self._is_spread = size > 1
        self._queues = Queues(settings.maxsize, settings.max_bytes)
        self._lock = threading.RLock()
        self._clients: dict[str, Peer] = {}
        """By instance: the connection that its requests come from."""
        self._marks: deque[tuple[float, int, int]] = deque(maxlen=int(_RATE_SECONDS) + 1)
        """The counts of puts and gets, about every second in which there were any."""
        self._owned: OrderedDict[Hashable, int] = OrderedDict()
        """The keys that live here, each with the number of its assignment; the least recently used first."""
        self._places: dict[Hashable, _Place] = {}
        self._assignments = 0
        endpoint.on_gone.append(self._drop)
        endpoint.serve(self._take)

    def stats(self) -> dict[str, Any]:
        """Return what `roost channels` shows of this home."""
        with self._lock:
            found = self._queues.stats()
            now = time.monotonic()
            since = next(
                (mark for mark in self._marks if now - mark[0] <= _RATE_SECONDS), (now, found["puts"], found["gets"])
            )
            clients = {client: connection.info for client, connection in self._clients.items()}
            routes = {
                connection.info.address: "shared memory" if connection.is_near else "network"
                for connection in self._clients.values()
                if connection.info is not None
            }
        seconds = max(1.0, now - since[0])
        for line in found["keys"].values():
            for who in ("getters", "putters"):
                line[who] = {_name(clients.get(client), client): count for client, count in line[who].items()}
        return {
            **found,
            "puts_per_second": (found["puts"] - since[1]) / seconds,
            "gets_per_second": (found["gets"] - since[2]) / seconds,
            "home": self._endpoint.own.address,
            "node": self._endpoint.own.node,
            "maxsize": self._settings.maxsize,
            "max_bytes": self._settings.max_bytes,
            "routes": routes,
        }

    def gauge(self) -> list[Gauge]:
        """Return how full the channel is, as an event has it."""
        with self._lock:
            return [("channel", self._group, {**self._queues.totals(), "most": self._settings.maxsize or None})]

    def _take(self, connection: Peer, frame: Frame) -> None:
        """Answer a request; in the thread that reads."""
        peer = connection.info
        if peer is None:
            return
        client, number, op = peer.instance, frame.number, frame.envelope[0]
        try:
            with self._lock:
                if op == Op.ACKNOWLEDGE:
                    events = self._queues.acknowledge(client, number, _COUNT.unpack(frame.envelope)[1])
                elif op == Op.PUT or op == Op.GET:
                    self._clients[client] = connection
                    events = self._exchange(client, number, frame)
                elif op == Op.CANCEL:
                    events = self._queues.cancel(client, number)
                else:
                    self._clients[client] = connection
                    events = []
                    self._call(connection, frame, Op(op))
                if events:
                    self._act(events)
        except Exception as error:
            connection.send(Kind.REPLY, number, write_failure(error))

    def _exchange(self, client: str, number: int, frame: Frame) -> list[Event]:
        asked = read_ask(frame)
        key = asked.key
        if self._is_spread:
            if key not in self._owned:
                return [Answer(client, number, Status.MOVED)]
            self._owned.move_to_end(key)
        now = time.monotonic()
        if not self._marks or now - self._marks[-1][0] >= 1.0:
            self._marks.append((now, self._queues.puts, self._queues.gets))
        if isinstance(asked, Put):
            return self._queues.put(client, number, key, asked.items, asked.waits)
        return self._queues.get(client, number, key, asked.want)

    def _act(self, events: Sequence[Event]) -> None:
        for event in events:
            connection = self._clients.get(event.client)
            if connection is None:
                continue
            if isinstance(event, Answer):
                connection.send(Kind.REPLY, event.number, *write_answer(event, connection.is_near))
            else:
                # The second reply to a request: return what it got.
                connection.send(Kind.REPLY, event.number)

    def _drop(self, peer: PeerInfo) -> None:
        """Take back what a process had that died."""
        with self._lock:
            if self._clients.pop(peer.instance, None) is not None:
                self._act(self._queues.drop_client(peer.instance))

    def _call(self, connection: Peer, frame: Frame, op: Op) -> None:
        """Handle what is not about items."""
        arguments: Any = pickle.loads(frame.envelope[1:])  # noqa: S301 - from a member of this job

        def reply(value: Any) -> None:
            connection.send(Kind.REPLY, frame.number, pickle.dumps(value))

        if op is Op.DEPTH:
            (key,) = arguments
            reply((self._queues.depth(key), self._queues.is_full(key)))
        elif op is Op.STATS:
            reply(self.stats())
        elif op is Op.CLOSE:
            events = self._queues.close()
            reply(None)
            self._act(events)
        elif op is Op.DESCRIBE:
            reply(self._settings)
        elif op is Op.LOCATE:
            self._locate(reply, *arguments)
        elif op is Op.ASSIGN:
            self._own(*arguments)
            reply(None)
        elif op is Op.RELEASE:
            self._free(*arguments)

    def _locate(self, reply: Callable[[Any], None], key: Hashable, near: int, but_not: int, assigns: bool) -> None:
        """Say which home owns a key, and which assignment that is; a key that no home owns is assigned."""
        place = self._places.get(key)
        if place is not None and place.number != but_not:
            place.tell(reply)
            return
        if not assigns:
            reply(None)
            return
        self._assignments += 1
        place = self._places[key] = _Place(near, self._assignments)
        place.tell(reply)
        if near == self._rank:
            self._own(key, place.number)
            place.confirm()
            return
        assigned: Handle[Any] = Handle(self._endpoint.loop)

        def confirm() -> None:
            with self._lock:
                if assigned.error is not None and self._places.get(key) is place:
                    del self._places[key]
                place.confirm(assigned.error)

        assigned.on_done(confirm)
        envelope = write_call(Op.ASSIGN, key, place.number)
        self._endpoint.request(f"{self._group}:{near}", envelope, b"", (), assigned)

    def _own(self, key: Hashable, number: int) -> None:
        self._owned[key] = number
        if len(self._owned) <= _MOST_IDLE_KEYS:
            return
        for unused in [key for key in self._owned if key not in self._queues][: len(self._owned) - _MOST_IDLE_KEYS]:
            if unused == key:
                continue
            number = self._owned.pop(unused)
            if self._rank == 0:
                self._free(unused, number)
            else:
                envelope = write_call(Op.RELEASE, unused, number)
                self._endpoint.peer(f"{self._group}:0").send(Kind.REQUEST, 0, envelope)

    def _free(self, key: Hashable, number: int) -> None:
        place = self._places.get(key)
        if place is not None and place.number == number:
            del self._places[key]


class _Place:
    """Where a key lives; a client gets the answer once the home that owns the key knows."""

    def __init__(self, rank: int, number: int) -> None:
        self._rank = rank
        self.number = number
        self._waiting: list[Callable[[Any], None]] | None = []

    def tell(self, reply: Callable[[Any], None]) -> None:
        if self._waiting is None:
            reply((self._rank, self.number))
        else:
            self._waiting.append(reply)

    def confirm(self, error: BaseException | None = None) -> None:
        waiting, self._waiting = self._waiting or [], None
        for reply in waiting:
            reply((self._rank, self.number) if error is None else error)


def _name(peer: PeerInfo | None, client: str) -> str:
    return peer.address if peer is not None else client
