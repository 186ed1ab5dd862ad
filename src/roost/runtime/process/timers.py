"""Durations that a worker measures while it serves a call, and sends back with the answer."""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

from roost.runtime.events.emitter import emitter
from roost.runtime.events.waits import in_call

Function = TypeVar("Function", bound=Callable[..., Any])

_durations: ContextVar[dict[str, float] | None] = ContextVar("roost_durations", default=None)


class measured_call:  # noqa: N801 - used like contextlib.suppress
    """Collects the durations of all that is timed inside, and of the whole unless something has its name."""

    __slots__ = ("_durations", "_name", "_outer", "_started", "_token")

    def __init__(self, name: str) -> None:
        self._name = name
        self._durations: dict[str, float] = {}

    def __enter__(self) -> dict[str, float]:
        self._token, self._outer = _durations.set(self._durations), in_call.set(True)
        self._started = time.perf_counter()
        if emitter.is_on:
            emitter.call_began(id(self._durations), self._name, self._started)
        return self._durations

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._durations.setdefault(self._name, time.perf_counter() - self._started)
        _durations.reset(self._token)
        in_call.reset(self._outer)
        if emitter.is_on:
            emitter.call_ended(id(self._durations), self._name, self._started, kind is None)


@contextlib.contextmanager
def timed(tag: str) -> Iterator[None]:
    """Add the time spent inside to the durations of the current call, under this tag."""
    durations = _durations.get()
    started = time.perf_counter()
    try:
        yield
    finally:
        if durations is not None:
            durations[tag] = durations.get(tag, 0.0) + time.perf_counter() - started


def take_durations(tag: str | None = None) -> dict[str, float]:
    """Return what the current call has timed so far, or that of one tag, which it then does not send back."""
    durations = _durations.get() or {}
    return {name: durations.pop(name) for name in list(durations) if tag in (None, name)}


def timer(tag: str | Callable[..., Any] | None = None) -> Any:
    """Decorate a method so that it is timed, under its own name or a tag."""
    if callable(tag):
        return timer(None)(tag)

    def decorate(function: Function) -> Function:
        name = tag or function.__name__
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            # A generator runs while its items are consumed; its end is not visible here.
            raise TypeError(f"{function.__qualname__} is a generator: time what is inside it, with worker_timer")
        # Not `timed(name)(function)`, which cannot be pickled: the class may have to travel as it is.
        timed_function: Callable[..., Any]
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def timed_function(*args: Any, **kwargs: Any) -> Any:
                with timed(name):
                    return await function(*args, **kwargs)

        else:

            @functools.wraps(function)
            def timed_function(*args: Any, **kwargs: Any) -> Any:
                with timed(name):
                    return function(*args, **kwargs)

        return timed_function  # type: ignore[return-value]

    return decorate
