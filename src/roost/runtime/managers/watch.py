"""A thread of the driver that notices when a node or a manager is gone, and says so."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError

from roost.runtime.connect.connection import Connection, answers, is_alive
from roost.runtime.managers.proxies import Manager
from roost.runtime.nodes.discover import live_nodes
from roost.runtime.nodes.info import NodeInfo

log: logging.Logger = logging.getLogger(__name__)

_EVERY_SECONDS = 0.5


class Watch:
    """Watches the nodes and managers of one job until it is stopped."""

    def __init__(self, nodes: Sequence[NodeInfo], managers: Sequence[Manager], connection: Connection) -> None:
        self._connection = connection
        self._nodes = {node.ray_id: node for node in nodes}
        self._dead: dict[int, NodeInfo] = {}
        # Calls that end only when their actor does.
        self._managers: dict[Any, Manager] = {manager.handle.until_death.remote(): manager for manager in managers}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="roost-watch", daemon=True)
        self._thread.start()

    @property
    def dead_nodes(self) -> tuple[int, ...]:
        """The ranks of the nodes that are gone."""
        return tuple(sorted(self._dead))

    def stop(self) -> None:
        """End the thread, and wait until it has ended."""
        self._stopped.set()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        while not self._stopped.wait(_EVERY_SECONDS):
            # Ray's calls connect anew where there is no connection, and block where there is no Ray.
            if not is_alive(self._connection):
                if not self._stopped.is_set() and not answers(self._connection.address):
                    log.error("Ray's head at %s does not answer any more", self._connection.address)
                return
            try:
                self._look_at_managers()
                self._look_at_nodes()
            except Exception as error:
                log.debug("the watch ended: %s", error)
                return

    def _look_at_managers(self) -> None:
        if not self._managers:
            return
        ended, _ = ray.wait(list(self._managers), num_returns=len(self._managers), timeout=0)
        for call in ended:
            manager = self._managers.pop(call)
            try:
                ray.get(call, timeout=0)
            except RayActorError as error:
                if not self._stopped.is_set():
                    log.error("%s", manager.died(error))

    def _look_at_nodes(self) -> None:
        alive = {node.ray_id for node in live_nodes()}
        for ray_id, node in self._nodes.items():
            if ray_id not in alive and node.rank not in self._dead:
                self._dead[node.rank] = node
                log.error("%s is gone: what ran there has ended", node)
