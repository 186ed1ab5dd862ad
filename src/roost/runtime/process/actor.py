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
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import OwnerDiedError, RayError

from roost.errors import ClusterError, WorkerDied
from roost.machine.numa import bind_to, own_cores
from roost.machine.ports import first_free_port, taken_ports
from roost.machine.processes import die_with_parent, end_sibling
from roost.runtime.events.emitter import emitter
from roost.runtime.events.format import worker_file
from roost.runtime.events.sampler import Sampler
from roost.runtime.events.stacks import answer_request
from roost.runtime.events.waits import record_waits_of_torch
from roost.runtime.failures.failure import Raised, RemoteFailure, carry
from roost.runtime.limits import CONSUMERS_EVERY_SECONDS, FLUSH_SECONDS, PREDECESSOR_SECONDS
from roost.runtime.process import output
from roost.runtime.process.failed import report
from roost.runtime.process.identity import Master, assume, current_identity
from roost.runtime.process.packing import Packed, make_object, unpack, unpack_async
from roost.runtime.process.spec import Report, WorkerSpec
from roost.runtime.process.timers import measured_call


class MethodKind(StrEnum):
    """How a method answers: with one value or a stream of items, perhaps asynchronously."""

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


class WorkerActor:
    """The actor of one worker. `make_actor_class` adds the methods of the user's class.

    The process that launches or restarts it constructs the object with a call, in the thread that serves calls; until
    then no other process is told that the worker is there.
    """

    def __init__(self) -> None:
        # The parent is the raylet; Ray alone would take up to a second to notice that it ended.
        die_with_parent()
        self._roost_object: Any = _NotReady()
        self._roost_lock = threading.RLock()
        self._roost_streams: dict[str, Any] = {}
        self._roost_tokens: dict[str, ray.ObjectRef[Any]] = {}
        """By stream: an object that its consumer owns, and that is lost with it."""
        self._roost_is_watching = False

    def _roost_begin(self, spec: WorkerSpec, predecessor: int | None, ports: Sequence[int]) -> Report:
        """Set up this process: environment, log, events; report where it is, and which of some ports is free there.

        `predecessor` is the process that it replaces.
        """
        with _carried():
            os.environ.update(spec.variables)
            if spec.cores:
                bind_to(spec.cores, spec.numa)
            place = output.choose_place(spec.run_dir, spec.identity.address)
            output.redirect_output(place, is_restart=predecessor is not None)
            # A crash in C code leaves its stack in the log.
            faulthandler.enable(file=2)
            # Ray takes seconds to kill a process that is stopped, which holds its accelerators until then.
            if predecessor is not None and not end_sibling(predecessor, PREDECESSOR_SECONDS):
                raise ClusterError(f"the process that it replaces, {predecessor}, does not end")
            if spec.keeps_events:
                # Its events lie next to its log. It also samples its node, unless another worker does.
                address, run = spec.identity.address, spec.run_dir.token
                base = Path(spec.run_dir.path) if place.is_shared else output.folder_of_run(spec.run_dir, place.path)
                sampler = Sampler(base, run, spec.node_rank)

                def look() -> None:
                    record_waits_of_torch()
                    sampler.look()
                    answer_request(base, address)

                file, devices = worker_file(address), spec.accelerators
                emitter.start(base, file, address, run=run, node=spec.node_rank, devices=devices, on_tick=look)
            taken = taken_ports([(port, 1) for port in ports])
            free = next((port for port in ports if port not in taken), None)
            return replace(_report(spec), free_port=free, cores=own_cores() if spec.cores else ())

    def _roost_construct(self, spec: WorkerSpec, master: Master, packed: Packed, overdue_seconds: float) -> Report:
        """Load the user's class and construct the object; dump a stack into the log if that takes too long.

        Report what the process sees then.
        """
        with _carried(called="its constructor"):
            variables = {"MASTER_ADDR": master.address, "MASTER_PORT": str(master.port)}
            # Values that the caller set take precedence.
            os.environ.update(variables | {name: spec.variables[name] for name in variables if name in spec.variables})
            assume(spec.identity, master)
            # Written in C: it works even where no Python code gets to run.
            faulthandler.dump_traceback_later(overdue_seconds, file=2)
            try:
                self._roost_object = make_object(packed)
            finally:
                faulthandler.cancel_dump_traceback_later()
            return _report(spec)

    def _get_current_node_ip_and_free_port(self, start_port: int = 10000, consecutive: int = 1) -> tuple[str, int]:
        """Return this node's address and the first of some consecutive ports that are free now, as the documents do.

        Nothing keeps them free: `Cluster.lease_ports` leases ports.
        """
        with _carried("_get_current_node_ip_and_free_port"):
            address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            return address.strip("[]"), first_free_port(start_port, consecutive)

    def _roost_flush(self) -> None:
        """Write the events that wait."""
        emitter.flush(FLUSH_SECONDS)

    def _roost_stream(
        self, key: str, method: str | None = None, token: Sequence[Any] = (), *sent: Any
    ) -> tuple[Any, ...]:
        """Return the next item of a stream in a tuple, or an empty tuple at its end; a method begins the stream."""
        with _carried(called=method or _name_of(self._roost_streams.get(key))):
            if method is not None:
                args, kwargs = unpack(sent)
                self._roost_keep_stream(key, token, getattr(self._roost_object, method)(*args, **kwargs))
            stream = self._roost_streams.get(key, iter(()))
            found: tuple[Any, ...] = ()
            try:
                for item in stream:
                    found = (item,)
                    if key not in self._roost_streams:
                        # The caller gave up in the meantime.
                        stream.close()
                    break
            finally:
                if not found:
                    self._roost_streams.pop(key, None)
            return found

    def _roost_keep_stream(self, key: str, token: Sequence[Any], items: Any) -> None:
        """Keep the generator of a stream, until its end or that of its consumer."""
        with self._roost_lock:
            self._roost_streams[key] = items
            self._roost_tokens[key] = token[0]
            if not self._roost_is_watching:
                self._roost_is_watching = True
                threading.Thread(target=self._roost_watch_consumers, name="roost-streams", daemon=True).start()

    def _roost_watch_consumers(self) -> None:
        """Drop the streams whose consumers have died, as long as there are streams."""
        this = ray.get_runtime_context().current_actor
        dropped: set[str] = set()
        while True:
            time.sleep(CONSUMERS_EVERY_SECONDS)
            with self._roost_lock:
                tokens = {key: token for key, token in self._roost_tokens.items() if key in self._roost_streams}
                self._roost_tokens = dict(tokens)
                self._roost_is_watching = bool(tokens)
            if not tokens:
                return
            for key in tokens.keys() - dropped:
                try:
                    ray.get(tokens[key], timeout=CONSUMERS_EVERY_SECONDS)
                except OwnerDiedError:
                    dropped.add(key)
                    # By a call: code of the user's does not run next to another method.
                    this._roost_end_stream.remote(key)
                except RayError:
                    continue

    def _roost_end_stream(self, key: str) -> None:
        """Drop the rest of a stream."""
        stream = self._roost_streams.pop(key, None)
        if inspect.isasyncgen(stream):
            self._roost_ending = asyncio.ensure_future(stream.aclose())
        elif stream is not None:
            # A generator that is running right now is closed when it yields its next item.
            with contextlib.suppress(ValueError):
                stream.close()


class _NotReady:
    """Stands for the object until it is constructed."""

    def __getattr__(self, _method: str) -> Any:
        address = ray.get_runtime_context().get_actor_name()
        raise WorkerDied(f"{address} is not ready: it is being started", hint="call it again in a moment")


def _report(spec: WorkerSpec) -> Report:
    watched, this = spec.watched_variable, ray.get_runtime_context()
    return Report(
        ray_id=this.get_node_id(),
        host=socket.gethostname(),
        pid=os.getpid(),
        instance=str(this.get_actor_id()),
        interpreter=sys.executable,
        visible=os.environ.get(watched) if watched else None,
        log=output.own_place(),
    )


async def _stream_async(
    self: Any, key: str, method: str | None = None, token: Sequence[Any] = (), *sent: Any
) -> tuple[Any, ...]:
    """Do what `_roost_stream` does, for an asynchronous generator."""
    with _carried(called=method or _name_of(self._roost_streams.get(key))):
        if method is not None:
            args, kwargs = await unpack_async(sent)
            self._roost_keep_stream(key, token, getattr(self._roost_object, method)(*args, **kwargs))
        stream = self._roost_streams.get(key)
        if stream is None:
            return ()
        found: tuple[Any, ...] = ()
        try:
            async for item in stream:
                found = (item,)
                break
        finally:
            if not found:
                self._roost_streams.pop(key, None)
        return found


def _name_of(stream: Any) -> str:
    """Return the method that made a generator."""
    return getattr(stream, "__name__", "") or "a stream"


class _carried:  # noqa: N801 - used like contextlib.suppress
    """Sends what is raised inside to the caller: as a RemoteFailure, or as Raised if a method is given.

    `called` is what the log, the events and the other processes of the job are told has failed, by default the method.
    """

    __slots__ = ("_called", "_method")

    def __init__(self, method: str = "", called: str = "") -> None:
        self._method = method
        self._called = called or method

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        # The others end the process or the generator; they are not failures of the user's code.
        if error is None or isinstance(error, SystemExit | GeneratorExit):
            return
        identity, origin = current_identity(), dict[str, Any]()
        if identity is not None and self._method:
            origin = {"address": identity.address, "rank": identity.rank, "node": identity.node, "method": self._method}
        log = output.own_place().path
        carried = carry(error, output.read_tail(log), **origin)
        # The caller may never look at the result.
        if self._called:
            causes = [(item.address, item.pid or 0, item.when) for item in getattr(error, "worker_failures", ())]
            report(carried.failure, self._called, causes)
        raise Raised(replace(carried.failure, log_path=str(log))) if self._method else carried from None


def make_actor_class(name: str, methods: Mapping[str, MethodKind]) -> type:
    """Make the actor class with these methods, each of which calls the one of the user's object.

    Under its own name a method takes and returns what it does on any Ray actor; groups call it by `group_call`.
    """
    body: dict[str, Any] = {method: _forward(method, kind) for method, kind in methods.items()}
    body |= {group_call(method): _answering(method, kind) for method, kind in methods.items()}
    if MethodKind.ASYNC_GENERATOR in methods.values():
        # Only here, because one such method gives the whole actor an event loop.
        body["_roost_stream_async"] = _stream_async
    return type(name, (WorkerActor,), {"__module__": __name__, **body})


def group_call(method: str) -> str:
    """Return the name under which a group calls a method; no attribute of the user's has it. Ray shows its last part.

    The call takes packed arguments, and returns two objects: a CallReport and the value.
    """
    return f"group.{method}"


CallReport = dict[str, float] | RemoteFailure
"""The news of a call besides its value: its durations by tag, or its failure.

Every call sends one. Ray packs a plain dict of numbers itself; a tuple or a class it pickles, which takes a worker and
its caller longer than all else that Roost adds to a call.
"""


def _forward(name: str, kind: MethodKind) -> Callable[..., Any]:
    """Make a method that calls the object's and is of the same kind."""
    forward: Callable[..., Any]
    if kind is MethodKind.ASYNC_GENERATOR:

        async def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            with _carried(name):
                async for item in getattr(self._roost_object, name)(*args, **kwargs):
                    yield item

    elif kind is MethodKind.ASYNC:

        async def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            with measured_call(name), _carried(name):
                return await getattr(self._roost_object, name)(*args, **kwargs)

    elif kind is MethodKind.GENERATOR:

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            with _carried(name):
                # Ray sends values into a generator, which `yield from` would pass on to the user's.
                for item in getattr(self._roost_object, name)(*args, **kwargs):  # noqa: UP028
                    yield item

    else:

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            with measured_call(name), _carried(name):
                return getattr(self._roost_object, name)(*args, **kwargs)

    forward.__name__ = forward.__qualname__ = name
    return forward


def _answering(name: str, kind: MethodKind) -> Callable[..., Any]:
    """Make the method that a group calls. A generator returns all its items; `_roost_stream` has them one by one."""
    answering: Callable[..., Any]
    if kind in (MethodKind.ASYNC, MethodKind.ASYNC_GENERATOR):

        async def answering(self: Any, *sent: Any) -> Any:
            try:
                with measured_call(name) as durations, _carried(name):
                    args, kwargs = await unpack_async(sent)
                    value = getattr(self._roost_object, name)(*args, **kwargs)
                    value = [item async for item in value] if kind.is_generator else await value
            except Raised as raised:
                return _failing(raised)
            return durations, value

    else:

        def answering(self: Any, *sent: Any) -> Any:
            try:
                with measured_call(name) as durations, _carried(name):
                    args, kwargs = unpack(sent)
                    value = getattr(self._roost_object, name)(*args, **kwargs)
                    value = list(value) if kind.is_generator else value
            except Raised as raised:
                return _failing(raised)
            return durations, value

    answering.__name__ = answering.__qualname__ = name
    method: Callable[..., Any] = ray.method(num_returns=2)(answering)
    return method


def _failing(raised: Raised) -> Iterator[Any]:
    """Yield the report, and raise in place of the value: Ray keeps what a generator has yielded before."""
    yield RemoteFailure(raised.failure)
    raise raised.with_traceback(None) from None
