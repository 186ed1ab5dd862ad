"""The actor around a worker: it becomes who it is told to be, says where it is, makes the user's object, and serves it.

Ray could set an actor's environment with a `runtime_env`, which takes nearly twice as long for every actor and shows
the values in its state API. Here the process is up first; then it is told its environment, before anything of the
user's is loaded: the class and its arguments arrive pickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import inspect
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import ray

from roost.errors import WorkerDied
from roost.machine.ports import taken_ports
from roost.machine.processes import die_with_parent
from roost.runtime.failures.carry import carry
from roost.runtime.process import output as logs
from roost.runtime.process.identity import WorkerIdentity, assume
from roost.runtime.process.output import LogPlace
from roost.runtime.process.packing import Arguments, Packed, make_object
from roost.runtime.process.timers import measured_call
from roost.runtime.runs.folder import RunDir


class MethodKind(StrEnum):
    """What a method gives: an answer, or items one by one, either of them perhaps asynchronously."""

    PLAIN = "plain"
    ASYNC = "async"
    GENERATOR = "generator"
    ASYNC_GENERATOR = "async generator"

    @property
    def is_generator(self) -> bool:
        """Whether it yields items."""
        return self in (MethodKind.GENERATOR, MethodKind.ASYNC_GENERATOR)


def method_kind(member: Any) -> MethodKind:
    """What kind of method this is."""
    if inspect.isasyncgenfunction(member):
        return MethodKind.ASYNC_GENERATOR
    if inspect.iscoroutinefunction(member):
        return MethodKind.ASYNC
    return MethodKind.GENERATOR if inspect.isgeneratorfunction(member) else MethodKind.PLAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a process is told before anything of the user's is loaded."""

    identity: WorkerIdentity
    variables: dict[str, str]
    run_dir: RunDir
    is_restart: bool
    watched_variable: str | None
    """The variable that says which devices the process sees."""
    ports_to_try: tuple[int, ...] = ()
    """One of these becomes the group's port, if this worker is the one that listens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Master:
    """Where rank 0 listens."""

    address: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Where a process really is, said from inside."""

    ray_id: str
    """Its node, as Ray calls it."""
    host: str
    pid: int
    interpreter: str
    visible: str | None
    log: LogPlace
    free_port: int | None = None
    """The first of the ports to try that nobody uses on its node."""


class _NotReady:
    """Stands for the user's object until it is made: whoever attached to the group may call too early."""

    def __getattr__(self, method: str) -> Any:
        address = ray.get_runtime_context().get_actor_name()
        raise WorkerDied(f"{address} is not ready: it is being started", hint="call it again in a moment")


class WorkerShell:
    """The actor of one worker. Its subclasses have the methods of the user's class."""

    def __init__(self) -> None:
        # The worker's parent is its raylet: by itself it would notice the raylet's end within a second.
        die_with_parent()
        self._roost_object: Any = _NotReady()
        self._roost_setup: Setup
        self._roost_streams: dict[str, Any] = {}

    def _roost_begin(self, setup: Setup) -> Report:
        """Become this worker: its environment, its log, who it is."""
        with _carried():
            self._roost_setup = setup
            os.environ.update(setup.variables)
            place = logs.choose_place(setup.run_dir, setup.identity.address)
            logs.redirect_output(place, append=setup.is_restart)
            # A crash in C code shows where it was, in the log.
            faulthandler.enable(file=2)
            taken = taken_ports([(port, 1) for port in setup.ports_to_try])
            free = next((port for port in setup.ports_to_try if port not in taken), None)
            return replace(self._roost_report(), free_port=free)

    def _roost_report(self) -> Report:
        watched = self._roost_setup.watched_variable
        return Report(
            ray_id=ray.get_runtime_context().get_node_id(),
            host=socket.gethostname(),
            pid=os.getpid(),
            interpreter=sys.executable,
            visible=os.environ.get(watched) if watched else None,
            log=logs.own_place(),
        )

    def _roost_construct(self, master: Master, packed: Packed, overdue_seconds: float) -> Report:
        """Load the user's class and make the object; a stack goes into the log if that takes too long."""
        setup = self._roost_setup
        variables = {"MASTER_ADDR": master.address, "MASTER_PORT": str(master.port)}
        # The caller's own word for them stays.
        os.environ.update(variables | {name: setup.variables[name] for name in variables if name in setup.variables})
        assume(replace(setup.identity, master_address=master.address, master_port=master.port))
        # In C: it works where Python does not come to run any more.
        faulthandler.dump_traceback_later(overdue_seconds, file=2)
        try:
            with _carried():
                self._roost_object = make_object(packed)
        finally:
            faulthandler.cancel_dump_traceback_later()
        return self._roost_report()

    def _roost_stream(self, key: str, method: str | None, *args: Any) -> tuple[Any, ...]:
        """The next item of a stream, in a tuple, or an empty one at its end; with a method the stream begins."""
        with _carried():
            if method is not None:
                sent = Arguments.unpack(args).fetch()
                self._roost_streams[key] = getattr(self._roost_object, method)(*sent.args, **sent.kwargs)
            stream = self._roost_streams.get(key, iter(()))
            for item in stream:
                if key not in self._roost_streams:
                    # It was given up meanwhile.
                    stream.close()
                return (item,)
            self._roost_streams.pop(key, None)
            return ()

    def _roost_end_stream(self, key: str) -> None:
        """Nobody wants the rest of a stream."""
        stream = self._roost_streams.pop(key, None)
        if inspect.isasyncgen(stream):
            self._roost_ending = asyncio.ensure_future(stream.aclose())
        elif stream is not None:
            # One that is at work just now is closed when it has its next item.
            with contextlib.suppress(ValueError):
                stream.close()


async def _stream_async(self: Any, key: str, method: str | None, *args: Any) -> tuple[Any, ...]:
    """The same as `_roost_stream`, for a method that is asynchronous."""
    with _carried():
        if method is not None:
            sent = await Arguments.unpack(args).fetch_async()
            self._roost_streams[key] = getattr(self._roost_object, method)(*sent.args, **sent.kwargs)
        stream = self._roost_streams.get(key)
        if stream is None:
            return ()
        async for item in stream:
            return (item,)
        self._roost_streams.pop(key, None)
        return ()


# What ends a process or a generator, and is no failure of the user's code.
_ENDS = (SystemExit, GeneratorExit)


@contextlib.contextmanager
def _carried() -> Iterator[None]:
    """What goes wrong inside goes to the caller as a RemoteFailure."""
    try:
        yield
    except _ENDS:
        raise
    except BaseException as error:
        raise carry(error, os.getpid()) from None


def make_worker_shell(name: str, methods: Mapping[str, MethodKind]) -> type:
    """The shell with these methods, each of which calls that of the object."""
    body: dict[str, Any] = {method: _FORWARDS[kind](method) for method, kind in methods.items()}
    for method, function in body.items():
        function.__name__ = function.__qualname__ = method
    if MethodKind.ASYNC_GENERATOR in methods.values():
        # Only here: one such method gives the whole actor an event loop.
        body["_roost_stream_async"] = _stream_async
    return type(name, (WorkerShell,), {"__module__": __name__, **body})


# The forwards answer with a list: Ray packs a tuple by a slower way.


def _forward_plain(name: str) -> Callable[..., Any]:
    def forward(self: Any, *args: Any) -> Any:
        with measured_call() as durations, _carried():
            started = time.perf_counter()
            sent = Arguments.unpack(args).fetch()
            value = getattr(self._roost_object, name)(*sent.args, **sent.kwargs)
            durations.setdefault(name, time.perf_counter() - started)
        return [value, durations]

    return forward


def _forward_async(name: str) -> Callable[..., Any]:
    async def forward(self: Any, *args: Any) -> Any:
        with measured_call() as durations, _carried():
            started = time.perf_counter()
            sent = await Arguments.unpack(args).fetch_async()
            value = await getattr(self._roost_object, name)(*sent.args, **sent.kwargs)
            durations.setdefault(name, time.perf_counter() - started)
        return [value, durations]

    return forward


def _forward_generator(name: str) -> Callable[..., Any]:
    def forward(self: Any, *args: Any) -> Any:
        """All items at once; one by one they come through `_roost_stream`."""
        with measured_call() as durations, _carried():
            started = time.perf_counter()
            sent = Arguments.unpack(args).fetch()
            value = list(getattr(self._roost_object, name)(*sent.args, **sent.kwargs))
            durations.setdefault(name, time.perf_counter() - started)
        return [value, durations]

    return forward


def _forward_async_generator(name: str) -> Callable[..., Any]:
    async def forward(self: Any, *args: Any) -> Any:
        with measured_call() as durations, _carried():
            started = time.perf_counter()
            sent = await Arguments.unpack(args).fetch_async()
            value = [item async for item in getattr(self._roost_object, name)(*sent.args, **sent.kwargs)]
            durations.setdefault(name, time.perf_counter() - started)
        return [value, durations]

    return forward


_FORWARDS: dict[MethodKind, Callable[[str], Callable[..., Any]]] = {
    MethodKind.PLAIN: _forward_plain,
    MethodKind.ASYNC: _forward_async,
    MethodKind.GENERATOR: _forward_generator,
    MethodKind.ASYNC_GENERATOR: _forward_async_generator,
}
