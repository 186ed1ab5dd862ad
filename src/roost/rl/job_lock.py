"""`JobLock`: the job's lock for one block, held by a thread, or by one task of an event loop."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any

from roost.comm.channels.channel import Channel, ItemLease
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
        self._held: list[tuple[_Owner, ItemLease | None]] = []
        """The blocks that have begun, the innermost last; no lease if the holder has taken the lock again."""

    def __enter__(self) -> None:
        owner, lease = self._begin()
        if lease is None:
            return
        if any(other[:2] == owner[:2] for other in list(_owners)):
            raise ConfigError(
                "another task of this thread has the lock, and cannot release it while this one blocks the thread",
                hint="use `async with manager.lock():` in coroutines",
            )
        try:
            lease.__enter__()
        except CallTimedOut as late:
            raise self._explain(late, _state(self._channel)) from None
        self._hold(owner, lease)

    def __exit__(self, *_: object) -> None:
        owner, lease = self._held.pop()
        if lease is not None:
            _owners.discard(owner)
            lease.give_back()

    async def __aenter__(self) -> None:
        owner, lease = self._begin()
        if lease is None:
            return
        try:
            await lease.__aenter__()
        except CallTimedOut as late:
            raise self._explain(late, await asyncio.to_thread(_state, self._channel)) from None
        self._hold(owner, lease)

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()

    def _begin(self) -> tuple[_Owner, ItemLease | None]:
        """Return who asks, and the lease to wait for; no lease if the caller has the lock already."""
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no event loop runs in this thread
            task = None
        owner = self._channel.name, threading.get_ident(), task
        if owner in _owners:
            self._held.append((owner, None))
            return owner, None
        return owner, self._channel.lease(LOCK, timeout=self._timeout)

    def _hold(self, owner: _Owner, lease: ItemLease) -> None:
        # In this order: an interrupt in between drops the lease, which gives it back.
        self._held.append((owner, lease))
        _owners.add(owner)

    def _explain(self, late: CallTimedOut, state: str) -> CallTimedOut:
        return CallTimedOut(f"the lock was not free for {self._timeout:g} s: it is {state}") if state else late


_owners: set[_Owner] = set()
"""The owners of locks in this process."""


def _state(channel: Channel) -> str:
    """Say `held by actor:3 for 4 s, 2 waiting`, where the caller counts as waiting; empty if it is not known."""
    try:
        line = channel.stats(timeout=STATE_SECONDS)["keys"][LOCK]
    except (ClusterError, KeyError):
        return ""
    waiting = sum(line["getters"].values()) + 1
    for holder, seconds in line["holders"].items():
        return f"held by {holder} for {seconds:.0f} s" + (f", {waiting} waiting" if waiting > 1 else "")
    return "free now"
