"""The communication of this process: made when it is first used, and ended with its Cluster."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from roost.comm.limits import DIRECTORY_RETRY_SECONDS, FIRST_LOOK_SECONDS, LOOK_SECONDS
from roost.comm.messages import Messages
from roost.comm.wire.connection import PeerInfo
from roost.comm.wire.endpoint import Directory, Endpoint, Listing, own_instance
from roost.comm.wire.loop import let_main_thread_read
from roost.errors import ClusterError, RoostError
from roost.runtime.process.identity import WorkerIdentity, current_identity

if TYPE_CHECKING:
    from roost.runtime.managers.context import JobContext

_DRIVER = "driver"
_LOOPBACK = "127.0.0.1"
_lock = threading.RLock()
_made: dict[tuple[int, str, str], Messages] = {}
"""By process, job and name: what was made. A process has one name, except in tests without Ray."""
_plain_secret = secrets.token_bytes(32)
"""The secret of the workers of a process without Ray, and of its forks."""


class JobDirectory:
    """The directory of a job, which its worker manager keeps."""

    def __init__(self, context: JobContext) -> None:
        self._manager = context.worker_manager

    def announce(self, listing: Listing) -> None:
        """Let others find this process."""
        self._manager.add_endpoint(listing.peer.address, listing.peer.instance, listing)

    def find(self, address: str, but_not: str, on_wait: Callable[[], None]) -> Future[Listing]:
        """Find a process by its name, waiting until it is there."""
        from ray.exceptions import ActorUnavailableError  # a plain process does not load Ray

        found: Future[Listing] = Future()
        waits = itertools.chain([0.0, FIRST_LOOK_SECONDS], itertools.repeat(LOOK_SECONDS))

        def fail(error: Exception) -> None:
            cause = getattr(error, "cause", None) or error
            if found.set_running_or_notify_cancel():
                found.set_exception(
                    cause if isinstance(cause, RoostError) else ClusterError(f"{address} cannot be found: {error}")
                )

        def ask() -> None:
            try:
                answer: Future[Any] = self._manager.handle.get_endpoint.remote(address, but_not, next(waits)).future()
            except Exception as error:
                fail(error)
            else:
                answer.add_done_callback(take)

        def take(answer: Future[Any]) -> None:
            if found.cancelled():
                return
            try:
                listing = answer.result()
            except ActorUnavailableError:
                # The manager is being restarted, and will have forgotten this call.
                again = threading.Timer(DIRECTORY_RETRY_SECONDS, ask)
                again.daemon = True
                again.start()
                return
            except Exception as error:
                fail(error)
                return
            if listing is None:
                # It is not launched yet, or has not communicated yet.
                on_wait()
                ask()
            elif found.set_running_or_notify_cancel():
                found.set_result(listing)

        ask()
        return found


class PlainDirectory:
    """The directory of the workers that a test makes by hand in one process."""

    def __init__(self) -> None:
        self._listings: dict[str, Listing] = {}
        self._waiting: list[tuple[str, str, Future[Listing]]] = []

    def announce(self, listing: Listing) -> None:
        """Let others find this worker."""
        with _lock:
            self._listings[listing.peer.address] = listing
            waiting, self._waiting = self._waiting, []
        for address, but_not, found in waiting:
            self._answer(address, but_not, found)

    def find(self, address: str, but_not: str, on_wait: Callable[[], None]) -> Future[Listing]:
        """Find a worker of this process by its name, waiting until it is there."""
        found: Future[Listing] = Future()
        self._answer(address, but_not, found)
        if not found.done():
            on_wait()
        return found

    def _answer(self, address: str, but_not: str, found: Future[Listing]) -> None:
        with _lock:
            if found.cancelled():
                return
            listing = self._listings.get(address)
            if listing is None or listing.peer.instance == but_not:
                self._waiting.append((address, but_not, found))
                return
        if found.set_running_or_notify_cancel():
            found.set_result(listing)


_plain_directory = PlainDirectory()


def process_messages(identity: WorkerIdentity | None = None) -> Messages:
    """Return the communication of this process, or of a worker that a test made by hand in it."""
    identity = identity or current_identity()
    context = job_context()
    job = context.job.id if context is not None else ""
    key = os.getpid(), job, identity.address if identity is not None else _DRIVER
    with _lock:
        made = _made.get(key)
        if made is None or made.endpoint.is_closed:
            made = _made[key] = Messages(_make_endpoint(identity, context))
            if context is not None:
                context.at_close.append(made.endpoint.close)
        return made


def _make_endpoint(identity: WorkerIdentity | None, context: JobContext | None) -> Endpoint:
    if identity is not None:
        address = identity.address
    else:
        kind = _DRIVER
        if context is not None and context.connection is None:
            # Only a driver makes a connection of its own.
            kind = "Ray actor" if sys.modules["ray"].get_runtime_context().get_actor_id() else "Ray task"
        # As messages show one that is no worker.
        address = f"{kind} {socket.gethostname()}:{os.getpid()} {time.time_ns():x}"
    if context is None:
        own = PeerInfo(address=address, instance=own_instance(), node="this process")
        return Endpoint(own, _plain_secret, _plain_directory, _LOOPBACK)
    if context.connection is None:
        # Ctrl-C goes to the driver.
        let_main_thread_read()
    if identity is not None:
        node_rank = identity.placement.cluster_node_rank
    else:
        here = sys.modules["ray"].get_runtime_context().get_node_id()
        node_rank = next((node.rank for node in context.nodes if node.ray_id == here), -1)
    own = PeerInfo(
        address=address,
        instance=own_instance(),
        node=identity.node if identity is not None else "",
        node_rank=node_rank,
    )
    secret = context.worker_manager.get_secret()
    directory: Directory = JobDirectory(context)
    if identity is None:
        # A driver asks channels and is asked nothing.
        return Endpoint(own, secret, directory, None)
    port = 0
    if context.port_range is not None:
        port = context.node_manager.lease_ports(node_rank, 1, address).port
    return Endpoint(own, secret, directory, context.nodes[node_rank].address, port)


def job_context() -> JobContext | None:
    """Return the job that this process belongs to; None in a plain process, which need not load Ray."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    from roost.runtime.managers.context import JobContext  # likewise

    return JobContext.attach()
