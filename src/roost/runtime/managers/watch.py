"""The one place in a process that notices deaths: of nodes, managers and workers."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError

from roost.deadline import Deadline
from roost.runtime.connect.connection import Connection
from roost.runtime.limits import DEATHS_EVERY_SECONDS, WATCH_KNOCK_SECONDS, WATCH_STOP_SECONDS
from roost.runtime.managers.base import Manager
from roost.runtime.nodes import discover
from roost.runtime.nodes.info import NodeInfo
from roost.runtime.nodes.ray_state import is_restarting, living

log: logging.Logger = logging.getLogger(__name__)


class Watch:
    """A thread that watches the nodes and managers of a job, and the workers that it is asked to watch."""

    def __init__(self, nodes: Sequence[NodeInfo], connection: Connection | None) -> None:
        """Take the connection of a driver; a worker's process has none of its own."""
        self._connection = connection
        self._nodes = {node.ray_id: node for node in nodes}
        self._dead: dict[int, NodeInfo] = {}
        self._silent: dict[int, NodeInfo] = {}
        """The dead ones that may not have ended."""
        self._managers: dict[Any, Manager] = {}
        self._restarting: dict[Manager, Any] = {}
        """Each manager that died, and the call that returns when it is back; None before it can be called."""
        self._workers: dict[object, tuple[frozenset[str], Callable[[set[str]], None]]] = {}
        self._looks: list[Callable[[], object]] = []
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
        """Call `on_death` with the dead ones of these workers, every time there are any, until `remove_workers`."""
        self._workers[key] = frozenset(addresses), on_death
        self._start()

    def add_look(self, look: Callable[[], object], seconds: float) -> None:
        """Call a function every so many seconds."""
        due = Deadline.after(seconds)

        def check() -> None:
            nonlocal due
            if due.is_over:
                due = Deadline.after(seconds)
                look()

        self._looks.append(check)

    def remove_workers(self, key: object) -> None:
        """Stop watching the workers that were added under this key."""
        self._workers.pop(key, None)

    def stop(self) -> None:
        """End the thread, and wait until it has ended."""
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=WATCH_STOP_SECONDS)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="roost-watch", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(DEATHS_EVERY_SECONDS):
            made = self._connection
            if made is not None:
                # Without a connection Ray's calls would start a new Ray, and without a head they would block.
                if not made.is_current:
                    return
                if not made.head.answers():
                    continue
            for check in (self._check_managers, self._check_nodes, self._check_workers, *self._looks):
                try:
                    check()
                except Exception as error:
                    log.debug("the watch could not check: %s", error)

    def _check_managers(self) -> None:
        if not self._managers:
            return
        ended, running = ray.wait(list(self._managers), num_returns=len(self._managers), timeout=0)
        for call in running:
            # Ray lets a call fail a second or two later.
            if is_restarting(self._managers[call].handle):
                self._note_death(self._managers[call])
        for call in ended:
            manager = self._managers.pop(call)
            try:
                ray.get(call, timeout=0)
            except ActorUnavailableError:
                self._note_death(manager)
                self.add_managers([manager])
                self._restarting[manager] = manager.handle.until_restored.remote()
            except RayActorError as error:
                if not self._stopped.is_set():
                    log.error("%s", manager.died(error))
        for manager, call in [*self._restarting.items()]:
            if call is not None and ray.wait([call], timeout=0)[0]:
                # If it died again, so has the other call.
                self._restarting[manager] = None
                with contextlib.suppress(RayActorError):
                    ray.get(call, timeout=0)
                    del self._restarting[manager]
                    log.warning("the %s is back", manager.NAME)

    def _note_death(self, manager: Manager) -> None:
        if manager not in self._restarting:
            self._restarting[manager] = None
            log.warning("the %s died: Ray restarts it", manager.NAME)

    def _check_nodes(self) -> None:
        alive = {node.ray_id for node in discover.live_nodes()}
        lost = [node for ray_id, node in self._nodes.items() if ray_id not in alive]
        new = {node.rank: node for node in lost if node.rank not in self._dead}
        began = time.monotonic()
        for rank, node in (self._silent | new).items():
            # A machine that is off does not even refuse, and must not hold up the watch.
            has_ended = time.monotonic() - began < WATCH_KNOCK_SECONDS and discover.has_ended(node.ray_id)
            self._dead[rank] = node
            # The others have their turn first.
            self._silent.pop(rank, None)
            if has_ended:
                log.error("%s is gone: what ran there has ended", node)
                continue
            self._silent[rank] = node
            if rank in new:
                log.error("%s does not answer, and Ray has given it up: what ran there may still run", node)

    def _check_workers(self) -> None:
        watched = list(self._workers.items())
        alive = living({address for _, (addresses, _) in watched for address in addresses})
        for key, (addresses, on_death) in watched:
            # Skip workers that were removed during the check.
            if addresses - alive and key in self._workers:
                with contextlib.suppress(Exception):
                    on_death(set(addresses - alive))
