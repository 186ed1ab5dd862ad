"""The process behind a `RolloutManager`: router, data buffer and lock, and how other processes call it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from roost.comm.worker import Worker
from roost.errors import CallTimedOut, ClusterError
from roost.rl.data_buffer import BufferStats, DataBuffer
from roost.rl.engine_pool import EngineState
from roost.rl.fair_lock import FairLock
from roost.rl.router import Router, RouterOptions
from roost.rl.tickets import Ticket
from roost.runtime.events.emitter import Gauge, emitter
from roost.runtime.groups.group import WorkerGroup
from roost.runtime.nodes.ray_state import dead_processes
from roost.text import error_text

CALL_SECONDS = 60.0
GRACE_SECONDS = 1.0
"""How much longer than the manager's own deadline a caller waits for its answer."""

_SETTLE_SECONDS = 1.0
_LIVENESS_SECONDS = 0.5
_MOST_GIVEN_UP = 10_000
Value = TypeVar("Value")


class ManagerWorker(Worker):
    """Router, data buffer and lock. It takes no CPU in Ray's accounts.

    Its methods are asynchronous, so that any number of callers can wait at the same time. A call that waits has a
    ticket: its caller can give it up, and it ends with the caller's process. Nothing is handed out to either later.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._buffer: DataBuffer[Ticket] = DataBuffer(capacity)
        self._lock: FairLock[Ticket] = FairLock()
        self._router: Router | None = None
        self._waiting: dict[Ticket, asyncio.Future[Any]] = {}
        # A call with large arguments may arrive after the news that its caller gave up.
        self._given_up: dict[Ticket, None] = {}
        self._reaper: asyncio.Task[None] | None = None
        emitter.add_gauge(self._gauge)

    def _gauge(self) -> list[Gauge]:
        """Return how full the buffer is, as an event has it."""
        stats = self._buffer.stats()
        values = {"depth": stats.size, "puts": stats.put, "gets": stats.taken, "most": stats.capacity}
        return [("channel", f"{self.group_name} buffer", values)]

    async def start_router(self, address: str, port: int, options: RouterOptions, secret: str) -> bool:
        """Start the router; False if another program has its port."""
        router = Router(address, port, options, secret=secret)
        try:
            await asyncio.to_thread(router.start)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        self._router = router
        return True

    def _running_router(self) -> Router:
        if self._router is None:
            raise ClusterError("the router is being started", hint="call again in a moment")
        return self._router

    async def join(self, urls: list[str]) -> None:
        """Let the router send requests to engines."""
        for url in urls:
            self._running_router().join(url)

    async def leave(self, urls: list[str]) -> None:
        """Let the router send engines no more requests."""
        for url in urls:
            self._running_router().leave(url)

    async def doubt(self, urls: list[str]) -> None:
        """Let the router send these engines no requests, whatever their servers say, and others again."""
        self._running_router().doubt(urls)

    async def doubted(self) -> list[str]:
        """Return the engines that the router sends no requests because of that."""
        return self._running_router().doubted

    async def engine_states(self) -> list[EngineState]:
        """Return what the router knows about the engines."""
        return self._running_router().states()

    async def put(self, ticket: Ticket, samples: list[Any], version: int, timeout: float) -> None:
        """Take room in the buffer for samples, which go in when the caller confirms that it knows."""
        await self._wait(ticket, self._buffer.draft(ticket, samples, version, timeout))

    async def get(self, ticket: Ticket, count: int, min_version: int | None, timeout: float) -> list[Any]:
        """Lease samples from the buffer, until the caller confirms that it has them."""
        return await self._wait(ticket, self._buffer.lease(ticket, count, timeout, min_version)) or []

    async def confirm(self, ticket: Ticket) -> None:
        """End a put or a get whose caller has its result."""
        await self._buffer.confirm(ticket)

    async def buffer_stats(self) -> BufferStats:
        """Return how full the buffer is."""
        # Callers do not wait until their confirmation is here, and this may overtake it.
        await self._buffer.settle(_SETTLE_SECONDS)
        return self._buffer.stats()

    async def acquire(self, ticket: Ticket, timeout: float) -> None:
        """Wait for the lock; CallTimedOut says who has it."""
        await self._wait(ticket, self._lock.acquire(ticket, timeout))

    async def release(self, ticket: Ticket) -> None:
        """Give the lock back."""
        self._lock.release(ticket)

    async def lock_holder(self) -> str | None:
        """Return the name of the holder: a worker's address, or another process."""
        return None if self._lock.holder is None else str(self._lock.holder)

    async def give_up(self, ticket: Ticket) -> None:
        """End a call that waits, and take back what it was given."""
        self._given_up[ticket] = None
        if len(self._given_up) > _MOST_GIVEN_UP:
            del self._given_up[next(iter(self._given_up))]
        if (waiting := self._waiting.get(ticket)) is not None:
            waiting.cancel()
        self._lock.leave(ticket)
        await self._buffer.give_back(ticket)

    async def _wait(self, ticket: Ticket, call: Coroutine[Any, Any, Value]) -> Value | None:
        """Wait for a call; None if its caller gives up first, and does not see the answer."""
        waiting: asyncio.Future[Value] = asyncio.ensure_future(call)
        self._waiting[ticket] = waiting
        if ticket in self._given_up:
            waiting.cancel()
        if self._reaper is None or self._reaper.done():
            self._reaper = asyncio.create_task(self._keep_reaping())
        try:
            return await waiting
        except asyncio.CancelledError:
            if ticket not in self._given_up:
                raise
            # Ray would print an exception that no process asks for.
            return None
        finally:
            del self._waiting[ticket]

    async def _keep_reaping(self) -> None:
        """Give up for processes that have died, for as long as any process waits or has yet to confirm."""
        while True:
            await asyncio.sleep(_LIVENESS_SECONDS)
            tickets = {*self._waiting, *self._buffer.unconfirmed}
            if not tickets:
                return
            tickets.update(self._lock.line)
            try:
                dead = await asyncio.to_thread(dead_processes, {ticket.process: ticket.node for ticket in tickets})
            except Exception as error:
                # Those that wait have a deadline: Ray may answer before it.
                self.log_warning(f"Ray did not say who is alive: {error_text(error)}")
                continue
            for ticket in tickets:
                if ticket.process in dead:
                    self.log_warning(f"{ticket} has died: what it waited for or held goes to others")
                    await self.give_up(ticket)


class ManagerProxy:
    """Calls the process behind a `RolloutManager`."""

    def __init__(self, group: WorkerGroup[Any]) -> None:
        self.group = group

    def call(self, method: Callable[..., Awaitable[Value]], *args: Any, timeout: float = CALL_SECONDS) -> Value:
        """Call a method and wait for it."""
        value: Value = self.group.call(method.__name__, *args).wait(timeout)[0]
        return value

    async def call_async(
        self, method: Callable[..., Awaitable[Value]], *args: Any, timeout: float = CALL_SECONDS
    ) -> Value:
        """Do the same without blocking the event loop."""
        try:
            async with asyncio.timeout(timeout):
                value: Value = (await self.group.call(method.__name__, *args))[0]
        except TimeoutError as error:
            if isinstance(error, CallTimedOut):
                raise
            raise CallTimedOut(f"{self.group.name!r} has not answered in {timeout:g} s") from None
        return value

    def tell(self, method: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Call a method without waiting for it; a manager that is gone does not matter."""
        with contextlib.suppress(ClusterError):
            self.group.call(method.__name__, *args)

    @contextlib.contextmanager
    def ticket(self) -> Iterator[Ticket]:
        """Draw a ticket for calls that wait; if the block is interrupted or fails, it gives them up."""
        ticket = Ticket.draw()
        try:
            yield ticket
        except BaseException:
            self.tell(ManagerWorker.give_up, ticket)
            raise

    def wait(self, method: Callable[..., Awaitable[Value]], ticket: Ticket, *args: Any, timeout: float) -> Value:
        """Call a method that itself waits at most `timeout` seconds."""
        return self.call(method, ticket, *args, timeout, timeout=timeout + GRACE_SECONDS)
