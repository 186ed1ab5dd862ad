"""The collective manager: the communication groups of the job, each with a leased port."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import ray
from ray.actor import ActorHandle

from roost.errors import ConfigError
from roost.runtime.managers.base import Manager, served
from roost.runtime.managers.ledgers.collectives import CollectiveGroup, CollectiveLedger
from roost.runtime.managers.ledgers.ports import PortLease
from roost.runtime.managers.node_manager import NodeManager
from roost.runtime.nodes.ray_state import find_instance


class CollectiveManager(Manager):
    """Holds the communication groups: members, address, and a port that is leased and not guessed.

    A group lives as long as its first member, which listens.
    """

    NAME: ClassVar[str] = "CollectiveManager"
    STATE: ClassVar[tuple[str, ...]] = ("_ledger", "_leases")
    KEEPER: ClassVar[str] = NodeManager.NAME

    def _begin(self, namespace: str) -> None:
        self._namespace = namespace
        self._ledger = CollectiveLedger()
        self._leases: dict[str, PortLease] = {}
        self._lock = asyncio.Lock()
        # By group: when its first member was looked for last.
        self._checked: dict[str, float] = {}

    @served
    async def create_group(self, name: str, members: Sequence[str], node_rank: int) -> CollectiveGroup:
        """Return the group of that name, making it if needed: its first member listens on a port of `node_rank`."""
        if not members:
            raise ConfigError(f"communication group {name!r} has no members")
        asked = time.monotonic()
        # Every member asks for the group: the first one makes it, the others find it.
        async with self._lock:
            await self._end_if_over(name, asked)
            found = self._ledger.find(name, members, node_rank)
            if found is not None:
                return found
            # Its port comes back when the member that listens there dies, even if no process asks for the group again.
            lease = await self._node_manager().lease_ports.remote(node_rank, holder=members[0])
            self._leases[name] = lease
            group = CollectiveGroup(
                name=name, members=tuple(members), node_rank=node_rank, address=lease.address, port=lease.port
            )
            self._ledger.groups[name] = group
            await self._end_if_over(name, time.monotonic())
            return group

    @served
    async def get_group(self, name: str) -> CollectiveGroup:
        """Return a group by its name."""
        asked = time.monotonic()
        async with self._lock:
            await self._end_if_over(name, asked)
        return self._ledger.get(name)

    @served
    async def get_groups(self) -> list[CollectiveGroup]:
        """Return all groups."""
        asked = time.monotonic()
        async with self._lock:
            for name in list(self._ledger.groups):
                await self._end_if_over(name, asked)
        return list(self._ledger.groups.values())

    @served
    async def remove_group(self, name: str) -> None:
        """Remove a group and release its port."""
        async with self._lock:
            await self._end(name)

    async def _end_if_over(self, name: str, asked: float) -> None:
        """End a group whose first member has died since, or was started again."""
        group = self._ledger.groups.get(name)
        # Of hundreds of members that ask together, few have to look.
        if group is None or self._checked.get(name, 0.0) >= asked:
            return
        # If Ray does not say who is alive, the group goes on.
        with contextlib.suppress(Exception):
            self._checked[name] = time.monotonic()
            listener = await asyncio.to_thread(find_instance, group.members[0])
            if self._ledger.is_over(name, listener):
                await self._end(name)

    async def _end(self, name: str) -> None:
        self._ledger.remove(name)
        self._checked.pop(name, None)
        self._save_soon()
        lease = self._leases.pop(name, None)
        if lease is not None:
            await self._node_manager().release_ports.remote([lease])

    def _node_manager(self) -> ActorHandle[Any]:
        return ray.get_actor(NodeManager.NAME, namespace=self._namespace)
