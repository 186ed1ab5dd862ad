"""The home of a channel: answers requests about its queues, in the communication thread of its process.

A channel that is spread over nodes has a home on each, and each key has one of them, by its hash.
"""

from __future__ import annotations

import logging
import math
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from roost.comm.channels.frames import Op, Piece, key_text, read_request, write_answer, write_key
from roost.comm.channels.queues import Answer, Event, Item, Queues, SetAside, Status
from roost.comm.limits import RATE_SECONDS
from roost.comm.wire.connection import Frame, Kind, PeerInfo, view
from roost.comm.wire.endpoint import Endpoint
from roost.comm.wire.peer import Peer
from roost.runtime.events.emitter import Gauge
from roost.text import plural

log: logging.Logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSettings:
    """The arguments with which a channel was created."""

    maxsize: int
    max_bytes: int
    distributed: bool
    nodes: tuple[int, ...]
    """The ranks of the nodes that its homes are on."""


class Home:
    """The queues of one process, and who uses them."""

    def __init__(self, own: PeerInfo, settings: ChannelSettings, name: str) -> None:
        self._own = own
        self._settings = settings
        self._name = name
        self.queues: Queues = Queues(settings.maxsize, settings.max_bytes, time.monotonic)
        self._lock = threading.RLock()
        self._clients: dict[str, Peer] = {}
        """By instance: the processes that have asked something."""
        self._marks: deque[tuple[float, int, int]] = deque(maxlen=int(RATE_SECONDS) + 1)
        """The counts of puts and gets, about every second in which there were any."""

    def open(self, endpoint: Endpoint) -> None:
        """Answer requests from other processes, from now on."""
        endpoint.on_end.append(self._drop)
        endpoint.serve(self._take)

    def put_token(self, key: Hashable) -> None:
        """Put `None` that is never set aside, however many of its holders die: its lease is a lock."""
        with self._lock:
            token = Item(_pack(None), lives=math.inf)
            self.queues.put("", 0, write_key(key), [token])

    def stats(self) -> dict[str, Any]:
        """Return what `roost status --channels` shows of this home."""
        with self._lock:
            found = self.queues.stats()
            now = time.monotonic()
            since = next(
                (mark for mark in self._marks if now - mark[0] <= RATE_SECONDS), (now, found["puts"], found["gets"])
            )
            clients = {client: peer.info for client, peer in self._clients.items()}
            routes = {peer.address: "shared memory" if peer.is_near else "network" for peer in self._clients.values()}
        seconds = max(1.0, now - since[0])
        found["keys"] = {key_text(key): line for key, line in found["keys"].items()}
        for line in found["keys"].values():
            for who in ("getters", "putters", "holders"):
                line[who] = {_name(clients.get(client), client): value for client, value in line[who].items()}
        return {
            **found,
            "puts_per_second": (found["puts"] - since[1]) / seconds,
            "gets_per_second": (found["gets"] - since[2]) / seconds,
            "home": self._own.address,
            "node": self._own.node,
            "maxsize": self._settings.maxsize,
            "max_bytes": self._settings.max_bytes,
            "routes": routes,
        }

    def gauge(self) -> list[Gauge]:
        """Return how full the channel is, as an event has it."""
        with self._lock:
            return [("channel", self._name, {**self.queues.totals(), "most": self._settings.maxsize or None})]

    def carry_out(
        self, client: str, number: int, op: Op, arguments: Sequence[Any], pack: Callable[[Any], Any]
    ) -> Sequence[Event]:
        """Do what a request asks for; what it asks for that is no item is packed, and is the item of its answer."""
        if op == "put":
            return self.queues.put(client, number, *arguments)
        if op == "get":
            return self.queues.get(client, number, *arguments)
        if op == "acknowledge":
            return self.queues.acknowledge(client, number, *arguments)
        if op == "cancel":
            return self.queues.cancel(client, number)
        value: Any = None
        events: Sequence[Event] = ()
        if op == "depth":
            value = self.queues.depth(*arguments), self.queues.is_full(*arguments)
        elif op == "peek":
            value = _Front(self.queues.front(*arguments))
        elif op == "stats":
            value = self.stats()
        elif op == "describe":
            value = self._settings
        else:
            events = self.queues.close()
        return [Answer(client, number, Status.DONE, (Item(pack(value)),)), *events]

    def _take(self, peer: Peer, frame: Frame) -> None:
        """Answer a request; in the thread that reads."""
        info = peer.info
        if info is None:
            return
        client, number = info.instance, frame.number
        try:
            op, arguments = read_request(frame)
            with self._lock:
                if op not in ("acknowledge", "cancel"):
                    self._clients[client] = peer
                    now = time.monotonic()
                    if not self._marks or now - self._marks[-1][0] >= 1.0:
                        self._marks.append((now, self.queues.puts, self.queues.gets))
                self._act(self.carry_out(client, number, op, arguments, _pack))
        except Exception as error:
            failed = Answer(client, number, Status.FAILED, problem=f"{type(error).__name__}: {error}")
            peer.send(Kind.REPLY, number, *write_answer(failed, peer.is_near))

    def _act(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, SetAside):
                log.warning(
                    "channel %r, key %s: %s set aside, since three processes that had got them died",
                    self._name,
                    key_text(event.key),  # type: ignore[arg-type]
                    plural(event.how_many, "item is", "items are"),
                )
            elif (peer := self._clients.get(event.client)) is not None:
                # A second reply to a request says that what it got should come back.
                answer = write_answer(event, peer.is_near) if isinstance(event, Answer) else ()
                peer.send(Kind.REPLY, event.number, *answer)

    def _drop(self, peer: Peer, _error: Exception) -> None:
        """Take back what a process had that died."""
        with self._lock:
            if peer.info is not None and self._clients.pop(peer.info.instance, None) is not None:
                self._act(self.queues.drop_client(peer.info.instance))


class _Front(list[Any]):
    """The first items of a queue: copied where they leave this process."""

    def __reduce__(self) -> Any:
        return list, ([(bytes(data), [bytearray(view(buffer)) for buffer in buffers]) for data, buffers, *_ in self],)


def _pack(value: Any) -> Piece:
    return pickle.dumps(value), (), None, 0


def _name(info: PeerInfo | None, client: str) -> str:
    if info is None:
        return client
    # A process that is no worker, and so has no node, has a mark behind its name that no other process has.
    return info.address if info.node else info.address.rpartition(" ")[0]
