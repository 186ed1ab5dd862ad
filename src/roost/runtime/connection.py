"""This process's connection to Ray: found or started, in a namespace, and given back."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import ray

from roost.errors import ClusterError, ConfigError
from roost.runtime.authentication import refresh_authentication
from roost.runtime.practice import read_practice
from roost.runtime.versions import check_ray_version

_CONNECT_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """How this process is connected."""

    address: str
    namespace: str
    started_ray: bool
    """Whether Ray runs because of this connection, and ends with it."""


def is_worker() -> bool:
    """Whether this process runs a task or an actor of Ray."""
    if not ray.is_initialized():
        return False
    context = ray.get_runtime_context()
    return context.get_actor_id() is not None or context.get_task_id() is not None


def check_can_connect() -> None:
    """Raise where Ray is too old, or where somebody connected before us."""
    check_ray_version(ray.__version__)
    if ray.is_initialized():
        raise ClusterError(
            "Ray is initialised already in this process, by somebody else's ray.init",
            hint="make the Cluster first and leave out ray.init: the namespace and the logging are its own. "
            "To give a connection back, call ray.shutdown() before",
        )


def connect(address: str | None, namespace: str, *, may_start: bool) -> Connection:
    """Join the cluster at `address` or RAY_ADDRESS, the practice cluster, the one of this machine; else start one."""
    wanted = address or os.environ.get("RAY_ADDRESS") or _practice_address() or "auto"
    if wanted.startswith("ray://"):
        raise ConfigError(
            f"{wanted} is an address of the Ray client, which cannot place workers on nodes",
            hint="run on a node of the cluster, and give the address that `ray start --head` printed",
        )
    started = False
    if wanted not in ("auto", "local"):
        _check_reachable(wanted)
    try:
        if wanted != "local":
            _init(wanted, namespace)
    except ConnectionError as error:
        if wanted != "auto":
            raise _cannot_join(wanted, error) from None
        wanted = "local"
    except (RuntimeError, ValueError) as error:
        # Another version of Ray or Python on the other side, a wrong token, no raylet on this machine.
        raise _cannot_join(wanted, error) from error
    if wanted == "local":
        if not may_start:
            raise ClusterError(
                "there is no Ray cluster to attach to",
                hint="start one with `ray start --head`, or `roost up 2x4` for practice",
            )
        _init("local", namespace)
        started = True
    return Connection(address=ray.get_runtime_context().gcs_address, namespace=namespace, started_ray=started)


def prepare_disconnect() -> None:
    """Load now what Ray loads when it shuts down.

    Python ends a program that was interrupted with the signal, so that a shell sees Ctrl-C. It forgets about that when
    a class of that code is made at exit, and the exit code would be 1.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module("ray.dag.compiled_dag_node")


def disconnect() -> None:
    """Give the connection back; Ray itself ends where it was started by it."""
    if ray.is_initialized():
        with _own_signal_handlers():
            ray.shutdown()


def _init(address: str, namespace: str) -> None:
    with _own_signal_handlers():
        ray.init(address=address, namespace=namespace, logging_level=logging.WARNING)


def _cannot_join(address: str, error: Exception) -> ClusterError:
    practice = read_practice()
    hint = ""
    if practice is not None and practice.address == address:
        hint = "it is the practice cluster: `roost down`, then `roost up` again"
    return ClusterError(f"Ray at {address} could not be joined: {error}", hint=hint)


def _practice_address() -> str | None:
    practice = read_practice()
    if practice is None:
        return None
    os.environ.update({key: value for key, value in practice.environment.items() if key != "RAY_ADDRESS"})
    refresh_authentication()
    return practice.address


def _check_reachable(address: str) -> None:
    """Fail in seconds and in words, where Ray would try for a minute."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise ConfigError(
            f"{address!r} is not an address of a Ray cluster", hint="write host:port, as in 10.0.0.2:6379"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise ClusterError(
            f"nothing answers at {address}: {error}",
            hint="is the cluster up? RAY_ADDRESS or `address` says where it is",
        ) from None


@contextlib.contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Keep the process's signal handlers: Ray puts its own in place of them, which changes the exit code."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)
