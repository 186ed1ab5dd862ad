"""The process behind a `RolloutManager`: the router, and the home of a channel with the data buffer and the lock."""

from __future__ import annotations

import errno
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

from roost.comm.channels.channel import DEFAULT_KEY, ChannelWorker
from roost.comm.wire.loop import Handle
from roost.errors import ClusterError, WorkerDied
from roost.rl.engine import EngineSpec
from roost.rl.router import Router, RouterOptions
from roost.runtime.events.emitter import Gauge

_DEATH = "roost engine's death"
LOCK = "lock"
"""The key of the lock: one item, and the process that leases it has the lock."""


class ManagerWorker(ChannelWorker):
    """Router, data buffer and lock. It takes no CPU in Ray's accounts.

    The data buffer is a key of the channel that it is the home of, and so is the lock: what a process held that dies
    goes to the next in line, and a caller that is interrupted takes nothing. Its own methods are about the router
    alone, and none of them waits.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, max_bytes=0)
        self._home.put_token(LOCK)
        self._capacity = capacity
        self._router: Router | None = None
        self._watches: dict[str, list[Handle[Any]]] = {}
        """By the engine's URL: what fails when one of its workers dies."""

    def _gauge(self) -> list[Gauge]:
        """Return how full the buffer is, as an event has it."""
        line = self._home.stats()["keys"].get(DEFAULT_KEY, {})
        values = {name: line.get(name, 0) for name in ("depth", "puts", "gets")}
        for who in ("getters", "putters"):
            values[who] = sum(line.get(who, {}).values())
        return [("channel", f"{self.group_name} buffer", {**values, "most": self._capacity})]

    def start_router(self, address: str, port: int, options: RouterOptions, secret: str) -> bool:
        """Start the router; False if another program has its port."""
        router = Router(address, port, options, secret=secret)
        try:
            router.start()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        self._router = router
        return True

    def on_router(self, name: str, *args: Any) -> Any:
        """Call a method of the router, or return a property."""
        if self._router is None:
            raise ClusterError("the router is being started", hint="call again in a moment")
        found = getattr(self._router, name)
        return found(*args) if callable(found) else found

    def join(self, group: str, specs: Mapping[int, EngineSpec]) -> None:
        """Let the router send requests to engines, given by the ranks of their workers, and none once a worker dies."""
        urls = {spec.engine_rank: spec.url for spec in specs.values() if spec.node_rank == 0}
        for spec in specs.values():
            if spec.node_rank == 0:
                self.on_router("join", spec.url, spec.secret)
        for rank, spec in specs.items():
            # Nothing is ever sent under this tag: it fails when the worker has died.
            watch: Handle[Any] = self.recv(group, rank, async_op=True, tag=_DEATH)
            self._watches.setdefault(urls[spec.engine_rank], []).append(watch)
            # A strong reference would keep a watch that is dropped.
            watch.on_done(partial(self._bury, urls[spec.engine_rank], weakref.ref(watch)))

    def _bury(self, url: str, watch: weakref.ref[Handle[Any]]) -> None:
        ended = watch()
        if ended is not None and isinstance(ended.error, WorkerDied):
            self.on_router("bury", url, str(ended.error).partition("\n")[0])

    def leave(self, url: str) -> None:
        """Let the router send an engine no more requests."""
        self._watches.pop(url, None)
        self.on_router("leave", url)
