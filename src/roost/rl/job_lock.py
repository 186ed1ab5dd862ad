"""`JobLock`: the job's lock for one block, held by a thread, or by one task of an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from types import TracebackType
from typing import Any

from roost.errors import ConfigError
from roost.rl.manager_worker import GRACE_SECONDS, ManagerProxy, ManagerWorker

_Owner = tuple[str, int, asyncio.Task[Any] | None]
"""The name of a manager, and the thread and the task that hold its lock."""


class JobLock(AbstractContextManager[None], AbstractAsyncContextManager[None]):
    """Holds the job's lock for a `with` or an `async with` block. Its holder can take it again."""

    def __init__(self, manager: ManagerProxy, timeout: float) -> None:
        self._manager = manager
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
        manager, owner = self._manager, self._owner()
        if owner in _owners:
            yield
            return
        if any(other[:2] == owner[:2] for other in list(_owners)):
            raise ConfigError(
                "another task of this thread has the lock, and cannot release it while this one blocks the thread",
                hint="use `async with manager.lock():` in coroutines",
            )
        # Whatever interrupts this gives the ticket up, and the lock with it.
        with manager.ticket() as ticket:
            manager.wait(ManagerWorker.acquire, ticket, timeout=self._timeout)
            with _owning(owner):
                yield
            manager.call(ManagerWorker.release, ticket, timeout=self._release_seconds)

    @contextlib.asynccontextmanager
    async def _hold_async(self) -> AsyncIterator[None]:
        manager, owner = self._manager, self._owner()
        if owner in _owners:
            yield
            return
        with manager.ticket() as ticket:
            seconds = self._timeout
            await manager.call_async(ManagerWorker.acquire, ticket, seconds, timeout=seconds + GRACE_SECONDS)
            with _owning(owner):
                yield
            await manager.call_async(ManagerWorker.release, ticket, timeout=self._release_seconds)

    @property
    def _release_seconds(self) -> float:
        # A manager that hangs must not hold up its caller for longer than that wanted to wait for the lock.
        return max(self._timeout, GRACE_SECONDS)

    def _owner(self) -> _Owner:
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no event loop runs in this thread
            task = None
        return self._manager.group.name, threading.get_ident(), task


_owners: set[_Owner] = set()
"""What in this process holds a lock now."""


@contextlib.contextmanager
def _owning(owner: _Owner) -> Iterator[None]:
    try:
        _owners.add(owner)
        yield
    finally:
        _owners.discard(owner)
