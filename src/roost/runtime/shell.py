"""The actor around a worker: it becomes who it is told to be, says where it is, makes the user's object, and serves it.

Ray could set an actor's environment with a `runtime_env`, which takes nearly twice as long for every actor and shows
the values in its state API. Here the process is up first; then it is told its environment, before anything of the
user's is loaded: the class and its arguments arrive pickled.
"""

from __future__ import annotations

import faulthandler
import inspect
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import ray

from roost.runtime import logs
from roost.runtime.failures import carry
from roost.runtime.identity import WorkerIdentity, assume
from roost.runtime.logs import LogPlace
from roost.runtime.packing import Arguments, Packed, make_object
from roost.runtime.processes import die_with_parent
from roost.runtime.run_dir import RunDir
from roost.runtime.timers import measured_call

LISTED = "_roost_list_"
"""Before the name of a generator method: the same, with all its items at once."""


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


class WorkerShell:
    """The actor of one worker. Its subclasses have the methods of the user's class."""

    def __init__(self) -> None:
        # The worker's parent is its raylet: by itself it would notice the raylet's end within a second.
        die_with_parent()
        self._roost_object: Any = None
        self._roost_watched: str | None = None

    def _roost_begin(self, setup: Setup) -> Report:
        """Become this worker: its environment, its log, who it is."""
        os.environ.update(setup.variables)
        place = logs.choose_place(setup.run_dir, setup.identity.address)
        logs.redirect_output(place, append=setup.is_restart)
        # A crash in C code shows where it was, in the log.
        faulthandler.enable(file=2)
        assume(setup.identity)
        self._roost_watched = setup.watched_variable
        return self._roost_report()

    def _roost_report(self) -> Report:
        watched = self._roost_watched
        return Report(
            ray_id=ray.get_runtime_context().get_node_id(),
            host=socket.gethostname(),
            pid=os.getpid(),
            interpreter=sys.executable,
            visible=os.environ.get(watched) if watched else None,
            log=logs.own_place(),
        )

    def _roost_construct(self, packed: Packed, overdue_seconds: float) -> Report:
        """Load the user's class and make the object; a stack goes into the log if that takes too long."""
        # In C: it works where Python does not come to run any more.
        faulthandler.dump_traceback_later(overdue_seconds, file=2)
        try:
            self._roost_object = make_object(packed)
        except Exception as error:
            raise carry(error, os.getpid()) from None
        finally:
            faulthandler.cancel_dump_traceback_later()
        return self._roost_report()


def make_worker_shell(name: str, methods: Mapping[str, MethodKind]) -> type:
    """The shell with these methods, each of which calls that of the object."""
    body: dict[str, Any] = {"__module__": __name__}
    for method, kind in methods.items():
        body[method] = _FORWARDS[kind](method)
        if kind.is_generator:
            body[LISTED + method] = (_listed_async if kind is MethodKind.ASYNC_GENERATOR else _listed)(method)
    for method, function in body.items():
        if callable(function):
            function.__name__ = function.__qualname__ = method
    return type(name, (WorkerShell,), body)


def _forward_plain(name: str) -> Callable[..., Any]:
    def forward(self: Any, *args: Any) -> Any:
        with measured_call() as durations:
            started = time.perf_counter()
            try:
                sent = Arguments.unpack(args).fetch()
                value = getattr(self._roost_object, name)(*sent.args, **sent.kwargs)
            except Exception as error:
                raise carry(error, os.getpid()) from None
            durations.setdefault(name, time.perf_counter() - started)
        return value, durations

    return forward


def _forward_async(name: str) -> Callable[..., Any]:
    async def forward(self: Any, *args: Any) -> Any:
        with measured_call() as durations:
            started = time.perf_counter()
            try:
                sent = await Arguments.unpack(args).fetch_async()
                value = await getattr(self._roost_object, name)(*sent.args, **sent.kwargs)
            except Exception as error:
                raise carry(error, os.getpid()) from None
            durations.setdefault(name, time.perf_counter() - started)
        return value, durations

    return forward


def _forward_generator(name: str) -> Callable[..., Any]:
    def forward(self: Any, *args: Any) -> Any:
        try:
            sent = Arguments.unpack(args).fetch()
            # Ray sends things into a generator, which the user's own `yield from` might not take.
            for item in getattr(self._roost_object, name)(*sent.args, **sent.kwargs):  # noqa: UP028
                yield item
        except Exception as error:
            raise carry(error, os.getpid()) from None

    return forward


def _forward_async_generator(name: str) -> Callable[..., Any]:
    async def forward(self: Any, *args: Any) -> Any:
        try:
            sent = await Arguments.unpack(args).fetch_async()
            async for item in getattr(self._roost_object, name)(*sent.args, **sent.kwargs):
                yield item
        except Exception as error:
            raise carry(error, os.getpid()) from None

    return forward


def _listed(name: str) -> Callable[..., Any]:
    def forward(self: Any, *args: Any) -> Any:
        with measured_call() as durations:
            return list(_forward_generator(name)(self, *args)), durations

    return forward


def _listed_async(name: str) -> Callable[..., Any]:
    async def forward(self: Any, *args: Any) -> Any:
        with measured_call() as durations:
            return [item async for item in _forward_async_generator(name)(self, *args)], durations

    return forward


_FORWARDS: dict[MethodKind, Callable[[str], Callable[..., Any]]] = {
    MethodKind.PLAIN: _forward_plain,
    MethodKind.ASYNC: _forward_async,
    MethodKind.GENERATOR: _forward_generator,
    MethodKind.ASYNC_GENERATOR: _forward_async_generator,
}
