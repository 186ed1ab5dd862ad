"""The Ray actor around a worker: sets up its process, reports its place, constructs the user's object, serves it.

Ray can set an actor's environment with a `runtime_env`, but that takes nearly twice as long for every actor and shows
the values in Ray's state API. Here the process starts first; then it gets its environment, before any code of the
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import ray

from roost.errors import WorkerDied
from roost.machine.ports import taken_ports
from roost.machine.processes import die_with_parent
from roost.runtime.failures.carry import carry
from roost.runtime.process import output
from roost.runtime.process.identity import Master, WorkerIdentity, assume
from roost.runtime.process.output import LogPlace
from roost.runtime.process.packing import Packed, make_object, unpack, unpack_async
from roost.runtime.process.timers import measured_call
from roost.runtime.runs.folder import RunDir


class MethodKind(StrEnum):
    """What a method returns: one answer or a stream of items, perhaps asynchronously."""

    PLAIN = "plain"
    ASYNC = "async"
    GENERATOR = "generator"
    ASYNC_GENERATOR = "async generator"

    @property
    def is_generator(self) -> bool:
        """Whether it yields items."""
        return self in (MethodKind.GENERATOR, MethodKind.ASYNC_GENERATOR)


def method_kind(member: Any) -> MethodKind:
    """Classify a method."""
    if inspect.isasyncgenfunction(member):
        return MethodKind.ASYNC_GENERATOR
    if inspect.iscoroutinefunction(member):
        return MethodKind.ASYNC
    return MethodKind.GENERATOR if inspect.isgeneratorfunction(member) else MethodKind.PLAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a process gets before any code of the user's is loaded."""

    identity: WorkerIdentity
    variables: dict[str, str]
    run_dir: RunDir
    is_restart: bool
    watched_variable: str | None
    """The variable that says which devices the process sees."""
    ports_to_try: tuple[int, ...]
    """One of these becomes the group's port; empty unless this worker is the one that listens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Where a process really is, as seen from inside."""

    ray_id: str
    """Ray's id of its node."""
    host: str
    pid: int
    interpreter: str
    visible: str | None
    log: LogPlace
    free_port: int | None = None
    """The first of the ports to try that is free on its node."""


class _NotReady:
    """Takes the place of the user's object until that exists: a process that attached may call too early."""

    def __getattr__(self, method: str) -> Any:
        address = ray.get_runtime_context().get_actor_name()
        raise WorkerDied(f"{address} is not ready: it is being started", hint="call it again in a moment")


class WorkerActor:
    """The actor of one worker. `make_actor_class` adds the methods of the user's class."""

    def __init__(self) -> None:
        # The parent is the raylet; Ray alone would take up to a second to notice that it ended.
        die_with_parent()
        self._roost_object: Any = _NotReady()
        self._roost_setup: Setup
        self._roost_streams: dict[str, Any] = {}

    def _roost_begin(self, setup: Setup) -> Report:
        """Set up this process: environment, log, identity."""
        with _carried():
            self._roost_setup = setup
            os.environ.update(setup.variables)
            place = output.choose_place(setup.run_dir, setup.identity.address)
            output.redirect_output(place, append=setup.is_restart)
            # A crash in C code leaves its stack in the log.
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
            log=output.own_place(),
        )

    def _roost_construct(self, master: Master, packed: Packed, overdue_seconds: float) -> Report:
        """Load the user's class and construct the object; dump a stack into the log if that takes too long."""
        setup = self._roost_setup
        variables = {"MASTER_ADDR": master.address, "MASTER_PORT": str(master.port)}
        # Values that the caller set take precedence.
        os.environ.update(variables | {name: setup.variables[name] for name in variables if name in setup.variables})
        assume(setup.identity, master)
        # Written in C: it works even where no Python code gets to run.
        faulthandler.dump_traceback_later(overdue_seconds, file=2)
        try:
            with _carried():
                self._roost_object = make_object(packed)
        finally:
            faulthandler.cancel_dump_traceback_later()
        return self._roost_report()

    def _roost_stream(self, key: str, method: str | None, *sent: Packed) -> tuple[Any, ...]:
        """Return the next item of a stream in a tuple, or an empty tuple at its end; a method begins the stream."""
        with _carried():
            if method is not None:
                args, kwargs = unpack(sent)
                self._roost_streams[key] = getattr(self._roost_object, method)(*args, **kwargs)
            stream = self._roost_streams.get(key, iter(()))
            for item in stream:
                if key not in self._roost_streams:
                    # The caller gave up in the meantime.
                    stream.close()
                return (item,)
            self._roost_streams.pop(key, None)
            return ()

    def _roost_end_stream(self, key: str) -> None:
        """Drop the rest of a stream."""
        stream = self._roost_streams.pop(key, None)
        if inspect.isasyncgen(stream):
            self._roost_ending = asyncio.ensure_future(stream.aclose())
        elif stream is not None:
            # A generator that is running right now is closed when it yields its next item.
            with contextlib.suppress(ValueError):
                stream.close()


async def _stream_async(self: Any, key: str, method: str | None, *sent: Packed) -> tuple[Any, ...]:
    """Do what `_roost_stream` does, for an asynchronous generator."""
    with _carried():
        if method is not None:
            args, kwargs = await unpack_async(sent)
            self._roost_streams[key] = getattr(self._roost_object, method)(*args, **kwargs)
        stream = self._roost_streams.get(key)
        if stream is None:
            return ()
        async for item in stream:
            return (item,)
        self._roost_streams.pop(key, None)
        return ()


@contextlib.contextmanager
def _carried() -> Iterator[None]:
    """Send what is raised inside to the caller as a RemoteFailure."""
    try:
        yield
    except (SystemExit, GeneratorExit):
        # These end the process or the generator; they are not failures of the user's code.
        raise
    except BaseException as error:
        raise carry(error, output.read_tail(output.own_place().path)) from None


def make_actor_class(name: str, methods: Mapping[str, MethodKind]) -> type:
    """Make the actor class with these methods, each of which calls the one of the user's object."""
    body: dict[str, Any] = {method: _forward(method, kind) for method, kind in methods.items()}
    if MethodKind.ASYNC_GENERATOR in methods.values():
        # Only here, because one such method gives the whole actor an event loop.
        body["_roost_stream_async"] = _stream_async
    return type(name, (WorkerActor,), {"__module__": __name__, **body})


def _forward(name: str, kind: MethodKind) -> Callable[..., Any]:
    """Make a method that calls the object's and returns its value with what was timed.

    A generator called this way returns all its items; one by one they come through `_roost_stream`. The reply is a
    list because Ray packs a tuple more slowly.
    """
    forward: Callable[..., Any]
    if kind in (MethodKind.ASYNC, MethodKind.ASYNC_GENERATOR):

        async def forward(self: Any, *sent: Packed) -> Any:
            with measured_call(name) as durations, _carried():
                args, kwargs = await unpack_async(sent)
                value = getattr(self._roost_object, name)(*args, **kwargs)
                value = [item async for item in value] if kind.is_generator else await value
            return [value, durations]

    else:

        def forward(self: Any, *sent: Packed) -> Any:
            with measured_call(name) as durations, _carried():
                args, kwargs = unpack(sent)
                value = getattr(self._roost_object, name)(*args, **kwargs)
                value = list(value) if kind.is_generator else value
            return [value, durations]

    forward.__name__ = forward.__qualname__ = name
    return forward
