"""The worker manager: every worker of the job, and every group that other processes can attach to."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from roost.deadline import Deadline
from roost.errors import WorkerDied
from roost.runtime.failures.meanwhile import CallFailure
from roost.runtime.managers.base import Manager, served
from roost.runtime.managers.ledgers.failures import FailureLedger
from roost.runtime.managers.ledgers.workers import GroupRecord, WorkerLedger, WorkerRecord, WorkerState
from roost.runtime.process.plain_actor import WORKER_MANAGER

if TYPE_CHECKING:
    from roost.runtime.process.spec import Report


class WorkerManager(Manager):
    """Tracks every worker's metadata: address, rank, node, hardware, state and since when."""

    NAME: ClassVar[str] = WORKER_MANAGER
    STATE: ClassVar[tuple[str, ...]] = ("_ledger", "_failures", "_secret", "_endpoints")
    KEEPER: ClassVar[str] = "NodeManager"
    WARDS: ClassVar[tuple[str, ...]] = ("NodeManager",)

    def _begin(self) -> None:
        self._ledger = WorkerLedger()
        self._failures = FailureLedger()
        self._secret = secrets.token_bytes(32)
        self._endpoints: dict[str, tuple[str, Any]] = {}
        """By address: the newest process of that name, and where it listens."""
        self._changed = asyncio.Event()

    @served
    async def register(self, workers: Iterable[WorkerRecord], *, are_actors: bool = False) -> None:
        """Add workers, all or none, in one call."""
        workers = list(workers)
        self._ledger.register(workers, time.time(), are_actors=are_actors)
        if are_actors:
            # Ray knew the name before the manager did: if it is not there any more, the actor has died.
            self._roll.expect(worker.address for worker in workers)
        self._watch_soon()

    @served
    async def get_workers(self, addresses: Sequence[str] | None = None) -> list[WorkerRecord]:
        """Return the records of these workers in this order, or of all, in one call."""
        return self._ledger.get(addresses)

    @served
    async def set_ready(self, pids: Mapping[str, int | None]) -> None:
        """Mark workers as ready, with their processes."""
        self._ledger.update(WorkerState.READY, pids, time.time())

    @served
    async def add_group(self, group: GroupRecord, started: Mapping[str, Report]) -> None:
        """Add a group that is ready, or whose workers were restarted, so that other processes can call it."""
        self._ledger.add_group(group, started, time.time())

    @served
    async def note_failures(self, failures: Sequence[CallFailure]) -> None:
        """Keep exceptions of calls, from any caller."""
        self._failures.add(failures)

    @served
    async def get_failures(self, after: int) -> list[CallFailure]:
        """Return the exceptions after the one with this number."""
        return self._failures.after(after)

    @served
    async def remove_group(self, name: str) -> None:
        """Remove a group that was closed."""
        self._ledger.remove_group(name)
        self._note_change()

    @served
    async def get_group(self, name: str) -> GroupRecord:
        """Return a group by its name."""
        return self._ledger.get_group(name)

    @served
    async def get_groups(self) -> list[GroupRecord]:
        """Return all groups."""
        return self._ledger.get_groups()

    @served
    async def get_secret(self) -> bytes:
        """Return what the processes of the job prove to each other that they know."""
        return self._secret

    @served
    async def add_endpoint(self, address: str, instance: str, listing: Any) -> None:
        """Let the others find a process; it replaces an earlier one of its name."""
        self._endpoints[address] = instance, listing
        self._note_change()

    @served
    async def get_endpoint(self, address: str, but_not: str, seconds: float) -> Any | None:
        """Return where a process listens; waits until it does, and returns None if it does not in so many seconds.

        `but_not` is an instance that is gone. WorkerDied if the worker is dead and will not be restarted.
        """
        deadline = Deadline.after(seconds)
        while True:
            instance, listing = self._endpoints.get(address, ("", None))
            if listing is not None and instance != but_not:
                return listing
            if self._ledger.will_not_come(address):
                raise WorkerDied(f"{address} is dead", hint="`roost logs` shows the end of its log")
            if deadline.is_over:
                return None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), deadline.left)

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _known(self) -> set[str]:
        return self._ledger.living

    def _bury(self, missing: set[str]) -> None:
        self._ledger.update(WorkerState.DEAD, dict.fromkeys(missing), time.time())
        self._note_change()
