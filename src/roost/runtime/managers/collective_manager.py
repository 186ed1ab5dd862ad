"""The collective manager: the communication groups of the job, each with a leased port."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

import ray
from ray.actor import ActorHandle

from roost.errors import ConfigError
from roost.runtime.managers.base import Manager, served
from roost.runtime.managers.ledgers.collectives import CollectiveGroup, CollectiveLedger
from roost.runtime.managers.ledgers.ports import PortLease
from roost.runtime.managers.node_manager import NodeManager


class CollectiveManager(Manager):
    """Holds the communication groups: members, address, and a port that is leased and not guessed."""

    NAME: ClassVar[str] = "CollectiveManager"

    def _begin(self, namespace: str) -> None:
        self._namespace = namespace
        self._ledger = CollectiveLedger()
        self._leases: dict[str, PortLease] = {}
        self._lock = asyncio.Lock()

    @served
    async def create_group(self, name: str, members: Sequence[str], node_rank: int) -> CollectiveGroup:
        """Return the group of that name, making it if needed: its first member listens on a port of `node_rank`."""
        if not members:
            raise ConfigError(f"communication group {name!r} has no members")
        # Every member asks for the group: the first one makes it, the others find it.
        async with self._lock:
            found = self._ledger.find(name, members)
            if found is not None:
                return found
            # In a variable: on older Ray a method does not keep its actor's handle alive.
            manager = self._node_manager()
            lease = (await manager.lease_ports.remote(node_rank))[0]
            self._leases[name] = lease
            return self._ledger.add(
                CollectiveGroup(name=name, members=tuple(members), address=lease.address, port=lease.port)
            )

    @served
    async def get_group(self, name: str) -> CollectiveGroup:
        """Return a group by its name."""
        return self._ledger.get(name)

    @served
    async def get_groups(self) -> list[CollectiveGroup]:
        """Return all groups."""
        return list(self._ledger.groups.values())

    @served
    async def remove_group(self, name: str) -> None:
        """Remove a group and release its port."""
        self._ledger.groups.pop(name, None)
        lease = self._leases.pop(name, None)
        if lease is not None:
            manager = self._node_manager()
            await manager.release_ports.remote([lease])

    def _node_manager(self) -> ActorHandle[Any]:
        return ray.get_actor(NodeManager.NAME, namespace=self._namespace)
