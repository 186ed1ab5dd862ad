"""This process's connection to Ray: joins a cluster or starts one, in a namespace, and disconnects."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray.util import list_named_actors

from roost.errors import ClusterError, ConfigError
from roost.machine.ports import answers
from roost.runtime.connect.authentication import refresh_authentication
from roost.runtime.connect.local_cluster import read_local_cluster
from roost.runtime.connect.versions import check_ray_version

_CONNECT_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A connection of this process to Ray."""

    address: str
    namespace: str
    started_ray: bool
    """Whether this connection started Ray, which then ends with it."""
    ray_job: str
    """Ray's id of this connection; a later one has another."""


def is_worker() -> bool:
    """Whether this process runs a Ray task or actor."""
    if not ray.is_initialized():
        return False
    context = ray.get_runtime_context()
    return context.get_actor_id() is not None or context.get_task_id() is not None


def check_can_connect() -> None:
    """Raise ClusterError if Ray is too old, or if this process is connected already."""
    check_ray_version(ray.__version__)
    if ray.is_initialized():
        raise ClusterError(
            "Ray is initialised already in this process, by another call of ray.init",
            hint="make the Cluster first and leave out ray.init: the Cluster sets namespace and logging. "
            "To end the other connection, call ray.shutdown() before",
        )


def connect(address: str | None, namespace: str, *, may_start: bool) -> Connection:
    """Join the cluster at `address` or RAY_ADDRESS, the local cluster, or the one of this machine; else start one."""
    wanted = address or os.environ.get("RAY_ADDRESS") or "auto"
    local = read_local_cluster()
    if local is not None and wanted in ("auto", local.address) and address != "auto":
        wanted = local.address
        os.environ.update({key: value for key, value in local.environment.items() if key != "RAY_ADDRESS"})
        refresh_authentication()
    if wanted.startswith("ray://"):
        raise ConfigError(
            f"{wanted} is an address of the Ray client, which cannot place workers on nodes",
            hint="run on a node of the cluster, and give the address that `ray start --head` printed",
        )
    if wanted not in ("auto", "local"):
        _check_reachable(wanted)
    try:
        if wanted != "local":
            _init(wanted, namespace)
    except (ConnectionError, RuntimeError, ValueError) as error:
        # Nothing answers, another version of Ray or Python at the other end, a wrong token, no raylet on this machine.
        if wanted != "auto" or not isinstance(error, ConnectionError):
            is_local = local is not None and local.address == wanted
            hint = "it is the local cluster: `roost down`, then `roost up` again" if is_local else ""
            raise ClusterError(f"Ray at {wanted} could not be joined: {error}", hint=hint) from error
        wanted = "local"
    if wanted == "local":
        if not may_start:
            raise ClusterError(
                "there is no Ray cluster to attach to",
                hint="start one with `ray start --head`, or a local one with `roost up 2x4`",
            )
        _init("local", namespace)
    context = ray.get_runtime_context()
    started, ray_job = wanted == "local", context.get_job_id()
    return Connection(address=context.gcs_address, namespace=namespace, started_ray=started, ray_job=ray_job)


def prepare_disconnect() -> None:
    """Import now what Ray imports when it shuts down.

    Python ends an interrupted program with the signal, so that a shell sees Ctrl-C. It does not if that code is first
    imported at exit: the exit code would be 1.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module("ray.dag.compiled_dag_node")


def disconnect(made: Connection) -> None:
    """Disconnect, which ends Ray if the connection started it; does nothing if another connection replaced it."""
    if _is_current(made):
        _shutdown()


def is_alive(made: Connection) -> bool:
    """Whether the connection is still this process's, and Ray answers at the other end."""
    return _is_current(made) and answers(made.address)


def wait_for_names_to_go(names: set[str], timeout: float) -> None:
    """Wait until no actor of this namespace has one of these names, at most `timeout` seconds."""
    deadline = time.monotonic() + timeout

    def wait() -> None:
        # If Ray is gone, there is nothing to wait for.
        with contextlib.suppress(Exception):
            while time.monotonic() < deadline and names & set(list_named_actors()):
                time.sleep(0.02)

    # In a thread, because Ray's call may not return.
    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(timeout)


@contextlib.contextmanager
def ended_before_sigterm(end: Callable[[], object]) -> Iterator[None]:
    """Inside, SIGTERM first calls `end`, and then ends this process as usual.

    Ray's processes notice the end of this one, but some of them only after a minute.
    """

    def handle(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        try:
            end()
        finally:
            os.kill(os.getpid(), number)

    _replace_handler(signal.SIG_DFL, handle)
    try:
        yield
    finally:
        _replace_handler(handle, signal.SIG_DFL)


def _replace_handler(old: object, new: Any) -> None:
    """Replace the handler of SIGTERM if it is the old one, and if this thread may."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is old:
        signal.signal(signal.SIGTERM, new)


def _is_current(made: Connection) -> bool:
    context = ray.get_runtime_context() if ray.is_initialized() else None
    return context is not None and (context.get_job_id(), context.gcs_address) == (made.ray_job, made.address)


def _shutdown() -> None:
    with _own_signal_handlers():
        ray.shutdown()


def _init(address: str, namespace: str) -> None:
    # With several nodes on one machine, older Ray picks any as this process's own, and ends the process with it. There
    # is no public way to choose; the head is the one that must not die anyway.
    host = address.rpartition(":")[0]
    own: dict[str, Any] = {"_node_ip_address": host} if host.startswith("127.") else {}
    try:
        with _own_signal_handlers():
            ray.init(address=address, namespace=namespace, logging_level=logging.WARNING, **own)
    except BaseException:
        # Processes that were started before the failure, or before Ctrl-C, would stay.
        _shutdown()
        raise


def _check_reachable(address: str) -> None:
    """Fail in seconds and with a clear message, where Ray would try for a minute."""
    host, colon, port = address.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or "/" in host:
        raise ConfigError(
            f"{address!r} is not an address of a Ray cluster", hint="write host:port, as in 10.0.0.2:6379"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, UnicodeError) as error:
        raise ClusterError(
            f"nothing answers at {address}: {error}",
            hint="is the cluster up? RAY_ADDRESS or `address` says where it is",
        ) from None


@contextlib.contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Keep the process's signal handlers: Ray replaces them, which changes the exit code."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT) if is_main}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)
