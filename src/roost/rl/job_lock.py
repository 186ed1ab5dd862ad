"""`JobLock`: the job's lock for one block, held by a thread, or by one task of an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from types import TracebackType
from typing import Any

from roost.comm.channels.channel import Channel
from roost.errors import CallTimedOut, ClusterError, ConfigError
from roost.rl.limits import STATE_SECONDS
from roost.rl.manager_worker import LOCK

_Owner = tuple[str, int, asyncio.Task[Any] | None]
"""The name of a manager, and the thread and the task that hold its lock."""


class JobLock(AbstractContextManager[None], AbstractAsyncContextManager[None]):
    """Holds the job's lock for a `with` or an `async with` block. Its holder can take it again.

    The lock is the one item under a key of the manager's channel: a lease of it, which always gives it back.
    """

    def __init__(self, channel: Channel, timeout: float) -> None:
        self._channel = channel
        self._timeout = timeout
        self._block: AbstractContextManager[None]
        self._async_block: AbstractAsyncContextManager[None]

    def __enter__(self) -> None:
        self._block = self._hold()
        self._block.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._block.__exit__(kind, error, trace)

    async def __aenter__(self) -> None:
        self._async_block = self._hold_async()
        await self._async_block.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._async_block.__aexit__(kind, error, trace)

    @contextlib.contextmanager
    def _hold(self) -> Iterator[None]:
        owner = self._owner()
        if owner in _owners:
            yield
            return
        if any(other[:2] == owner[:2] for other in list(_owners)):
            raise ConfigError(
                "another task of this thread has the lock, and cannot release it while this one blocks the thread",
                hint="use `async with manager.lock():` in coroutines",
            )
        lease = self._channel.lease(LOCK, timeout=self._timeout)
        try:
            lease.__enter__()
        except CallTimedOut as late:
            raise self._explain(late, _state(self._channel)) from None
        try:
            _owners.add(owner)
            yield
        finally:
            _owners.discard(owner)
            lease.give_back()

    @contextlib.asynccontextmanager
    async def _hold_async(self) -> AsyncIterator[None]:
        owner = self._owner()
        if owner in _owners:
            yield
            return
        lease = self._channel.lease(LOCK, timeout=self._timeout)
        try:
            await lease.__aenter__()
        except CallTimedOut as late:
            raise self._explain(late, await asyncio.to_thread(_state, self._channel)) from None
        try:
            _owners.add(owner)
            yield
        finally:
            _owners.discard(owner)
            lease.give_back()

    def _explain(self, late: CallTimedOut, state: str) -> CallTimedOut:
        return CallTimedOut(f"the lock was not free for {self._timeout:g} s: it is {state}") if state else late

    def _owner(self) -> _Owner:
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no event loop runs in this thread
            task = None
        return self._channel.name, threading.get_ident(), task


_owners: set[_Owner] = set()
"""What in this process holds a lock now."""


def _state(channel: Channel) -> str:
    """Say `held by actor:3 for 4 s, 2 waiting`, with the caller among those that wait; empty if it is not known."""
    try:
        line = channel.stats(timeout=STATE_SECONDS)["keys"][LOCK]
    except (ClusterError, KeyError):
        return ""
    waiting = sum(line["getters"].values()) + 1
    for holder, seconds in line["holders"].items():
        return f"held by {holder} for {seconds:.0f} s" + (f", {waiting} waiting" if waiting > 1 else "")
    return "free now"
