"""The one place in a process that notices deaths: of nodes, managers and workers."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError

from roost.machine.ports import answers
from roost.runtime.connect.connection import Connection, is_alive
from roost.runtime.managers.base import Manager
from roost.runtime.nodes.discover import live_nodes
from roost.runtime.nodes.info import NodeInfo
from roost.runtime.nodes.ray_state import living

log: logging.Logger = logging.getLogger(__name__)

_EVERY_SECONDS = 0.5


class Watch:
    """A thread that watches the nodes and managers of a job, and the workers that it is asked to watch."""

    def __init__(self, nodes: Sequence[NodeInfo], connection: Connection | None) -> None:
        """Take the connection of a driver; a worker's process has none of its own."""
        self._connection = connection
        self._nodes = {node.ray_id: node for node in nodes}
        self._dead: dict[int, NodeInfo] = {}
        self._managers: dict[Any, Manager] = {}
        self._workers: dict[object, tuple[frozenset[str], Callable[[set[str]], None]]] = {}
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def dead_nodes(self) -> tuple[int, ...]:
        """The ranks of the nodes that are gone."""
        return tuple(sorted(self._dead))

    def add_managers(self, managers: Sequence[Manager]) -> None:
        """Log an error when one of these dies."""
        # These calls end only when their actor does.
        self._managers |= {manager.handle.until_death.remote(): manager for manager in managers}
        self._start()

    def add_workers(self, key: object, addresses: Collection[str], on_death: Callable[[set[str]], None]) -> None:
        """Call `on_death` with those of these workers that are dead, every time one is, until `remove_workers`."""
        self._workers[key] = frozenset(addresses), on_death
        self._start()

    def remove_workers(self, key: object) -> None:
        """Stop watching the workers that were added under this key."""
        self._workers.pop(key, None)

    def stop(self) -> None:
        """End the thread, and wait until it has ended."""
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=10)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="roost-watch", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(_EVERY_SECONDS):
            # Without a connection Ray's calls would start a new Ray, and without a head they would block.
            if self._connection is not None and not is_alive(self._connection):
                if not self._stopped.is_set() and not answers(self._connection.address):
                    log.error("Ray's head at %s does not answer any more", self._connection.address)
                return
            for check in (self._check_managers, self._check_nodes, self._check_workers):
                try:
                    check()
                except Exception as error:
                    log.debug("the watch could not check: %s", error)

    def _check_managers(self) -> None:
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

    def _check_nodes(self) -> None:
        alive = {node.ray_id for node in live_nodes()}
        for ray_id, node in self._nodes.items():
            if ray_id not in alive and node.rank not in self._dead:
                self._dead[node.rank] = node
                log.error("%s is gone: what ran there has ended", node)

    def _check_workers(self) -> None:
        watched = list(self._workers.items())
        alive = living({address for _, (addresses, _) in watched for address in addresses})
        for key, (addresses, on_death) in watched:
            # Not one that was removed during the check.
            if addresses - alive and key in self._workers:
                with contextlib.suppress(Exception):
                    on_death(set(addresses - alive))
