"""Tickets: which process asks the rollout manager for something, in a value that no other request has."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass

import ray

from roost.runtime.cluster import Cluster
from roost.runtime.connect.head import check_not_lost
from roost.runtime.process.identity import current_identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """One request of a process to the rollout manager. The manager keeps nothing for a ticket whose process is dead."""

    id: str
    """Unique in the world."""
    name: str
    """The process, as messages show it: a worker's address, or a driver, actor or task with its machine and pid."""
    process: str
    """Ray's id of the process, which no other process ever has."""
    node: str
    """Ray's id of its node."""

    @classmethod
    def draw(cls) -> Ticket:
        """Make a ticket for this process."""
        check_not_lost()
        context = ray.get_runtime_context()
        if (identity := current_identity()) is not None:
            name = identity.address
        else:
            kind = "Ray actor" if context.get_actor_id() else "Ray task"
            # Only a driver makes a connection of its own.
            kind = kind if Cluster().context.connection is None else "driver"
            name = f"{kind} {socket.gethostname()}:{os.getpid()}"
        return cls(id=secrets.token_hex(8), name=name, process=context.get_worker_id(), node=context.get_node_id())

    def __str__(self) -> str:
        return self.name
