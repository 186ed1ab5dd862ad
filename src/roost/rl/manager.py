"""`RolloutManager`: the engines, the router in front of them, a data buffer and a lock, for every process of a job."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import ray

from roost.errors import ClusterError, ConfigError
from roost.placement.strategies import NodePlacementStrategy
from roost.rl.data_buffer import BufferStats, DataBuffer
from roost.rl.engines import HEALTH_SECONDS, RolloutEngines, create_rollout_engines
from roost.rl.fair_lock import FairLock
from roost.rl.flags import ROLLOUT
from roost.rl.placement_groups import BundleGroup
from roost.rl.router import EngineState, Router
from roost.runtime.cluster import Cluster
from roost.runtime.groups.group import LAUNCH_SECONDS, WorkerGroup
from roost.runtime.groups.worker import Worker
from roost.runtime.nodes.ray_state import living, name_of_job
from roost.runtime.process.identity import current_identity
from roost.text import error_text

MANAGER = "rollout_manager"
CALL_SECONDS = 60.0
_MAX_CALLS = 10_000
_MAX_TRIES = 5
_LIVENESS_SECONDS = 0.5
_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.02
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class LockHolder:
    """A thread that asks for the job's lock."""

    name: str
    """As messages show it: a worker's address, or a driver with its machine and process."""
    pid: int
    thread: int
    ray_job: str
    """Of a driver; empty for a worker."""

    @classmethod
    def here(cls) -> LockHolder:
        """Describe the current thread."""
        pid, job = os.getpid(), ""
        if (identity := current_identity()) is None:
            job = ray.get_runtime_context().get_job_id()
        name = f"driver {socket.gethostname()}:{pid}" if identity is None else identity.address
        return cls(name=name, pid=pid, thread=threading.get_ident(), ray_job=job)

    def __str__(self) -> str:
        return self.name


class ManagerWorker(Worker):
    """The process behind a RolloutManager: router, data buffer and lock. It takes no CPU in Ray's accounts.

    Its methods are asynchronous, so that any number of callers can wait at the same time.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._buffer = DataBuffer(capacity)
        self._lock: FairLock[LockHolder] = FairLock()
        self._reaper: asyncio.Task[None] | None = None
        # In a thread, because Ray warns about blocking calls in an asynchronous actor.
        with ThreadPoolExecutor(1) as thread:
            self._router = thread.submit(self._start_router).result(CALL_SECONDS)

    def _start_router(self) -> Router:
        for _ in range(_MAX_TRIES):
            lease = self.cluster.lease_ports(self.node_rank)
            router = Router(lease.address, lease.port)
            try:
                router.start()
                return router
            except OSError as error:
                # Another program was quicker: the next lease skips that port.
                if error.errno != errno.EADDRINUSE:
                    raise
                self.cluster.release_ports(lease)
        raise ClusterError(f"other programs took the router's port {_MAX_TRIES} times before it could listen")

    async def router_url(self) -> str:
        """Return where requests go."""
        return self._router.url

    async def join(self, urls: list[str]) -> None:
        """Let the router send requests to engines."""
        for url in urls:
            self._router.join(url)

    async def leave(self, urls: list[str]) -> None:
        """Let the router send engines no more requests."""
        for url in urls:
            self._router.leave(url)

    async def engine_states(self) -> list[EngineState]:
        """Return what the router knows about the engines."""
        return self._router.states()

    async def put(self, samples: list[Any], version: int, timeout: float) -> None:
        """Add samples to the buffer."""
        await self._buffer.put(samples, version, timeout)

    async def get(self, count: int, timeout: float, min_version: int | None) -> list[Any]:
        """Take samples from the buffer."""
        return await self._buffer.get(count, timeout, min_version)

    async def buffer_stats(self) -> BufferStats:
        """Return how full the buffer is."""
        return self._buffer.stats()

    async def acquire(self, holder: LockHolder, timeout: float) -> None:
        """Wait for the lock; CallTimedOut says who has it."""
        if self._lock.holder is not None and (self._reaper is None or self._reaper.done()):
            self._reaper = asyncio.create_task(self._keep_reaping())
        await self._lock.acquire(holder, timeout)

    async def release(self, holder: LockHolder) -> None:
        """Give the lock back."""
        self._lock.release(holder)

    async def give_up(self, holder: LockHolder) -> None:
        """Give up the lock, or the place in line."""
        self._lock.leave(holder)

    async def lock_holder(self) -> str | None:
        """Return the name of the holder: a worker's address, or a driver."""
        return None if self._lock.holder is None else str(self._lock.holder)

    async def _keep_reaping(self) -> None:
        """Take the lock, and the places in line, from processes that have died, for as long as any process waits."""
        await asyncio.sleep(0)
        while len(self._lock.line) > 1:
            try:
                dead = await asyncio.to_thread(self._find_dead, self._lock.line)
            except Exception as error:
                # Those that wait have a deadline: Ray may answer before it.
                self.log_warning(f"Ray did not say who is alive: {error_text(error)}")
                dead = []
            for holder in dead:
                self.log_warning(f"{holder} died and no longer has the lock, or its place in line")
                self._lock.leave(holder)
            await asyncio.sleep(_LIVENESS_SECONDS)

    def _find_dead(self, holders: Sequence[LockHolder]) -> list[LockHolder]:
        """Return those whose process has ended, even if Ray has restarted the worker since."""
        names = {holder: name_of_job(holder.ray_job) if holder.ray_job else holder.name for holder in holders}
        alive = living(set(names.values()))
        pids = {record.address: record.pid for record in self.cluster.worker_manager.get_workers()}
        return [one for one in holders if names[one] not in alive or pids.get(one.name) not in (None, one.pid)]


class RolloutManager(contextlib.AbstractContextManager["RolloutManager"]):
    """The rollout side of a job. It can be sent to workers: there it reaches the same engines, buffer and lock.

    - `args`, `engine_cls`, `pg` and the rest: as in `create_rollout_engines`.
    - `buffer_size`: how many samples the data buffer holds.
    """

    def __init__(
        self,
        args: object,
        engine_cls: type,
        pg: BundleGroup,
        *,
        cluster: Cluster | None = None,
        name: str = MANAGER,
        buffer_size: int = 4096,
        num_gpus_per_engine: float | None = None,
        engine_args: Sequence[Any] = (),
        engine_kwargs: Mapping[str, Any] | None = None,
        env_vars: Mapping[str, str] | None = None,
        timeout: float = LAUNCH_SECONDS,
        health_timeout: float = HEALTH_SECONDS,
    ) -> None:
        cluster = cluster or Cluster()
        with contextlib.ExitStack() as undo:
            self._group: WorkerGroup = ManagerWorker.create_group(buffer_size).launch(
                cluster, NodePlacementStrategy([0]), name=name, max_concurrency=_MAX_CALLS, timeout=timeout
            )
            undo.callback(self._group.close)
            self.engines: RolloutEngines = create_rollout_engines(
                args,
                engine_cls,
                pg,
                num_gpus_per_engine=num_gpus_per_engine,
                cluster=cluster,
                # The engines of a second manager in a job need another name.
                name=ROLLOUT if name == MANAGER else f"{name}_engines",
                engine_args=engine_args,
                engine_kwargs=engine_kwargs,
                env_vars=env_vars,
                timeout=timeout,
                health_timeout=health_timeout,
            )
            undo.callback(self.engines.close)
            self.router_url: str = self._call(ManagerWorker.router_url)
            self._join(self.engines.urls)
            undo.pop_all()

    def _call(self, method: Callable[..., Awaitable[Value]], *args: Any, timeout: float = CALL_SECONDS) -> Value:
        """Call a method of the ManagerWorker."""
        value: Value = self._group.call(method.__name__, *args).wait(timeout)[0]
        return value

    def generate(self, request: Mapping[str, Any], timeout: float = 600.0) -> Any:
        """Send a request through the router, to the least busy engine."""
        connection = http.client.HTTPConnection(self.router_url.removeprefix("http://"), timeout=timeout)
        sent = json.dumps(dict(request))
        try:
            with contextlib.closing(connection):
                connection.request("POST", "/generate", sent, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                body = answer.read()
            if 200 <= answer.status < 300:
                return json.loads(body)
        except (OSError, http.client.HTTPException) as error:
            raise ClusterError(f"the router at {self.router_url} cannot be reached: {error}") from None
        except ValueError as error:
            raise ClusterError(f"the engine's answer is not JSON: {error}") from None
        text = body.decode(errors="replace")[:2000]
        raise ClusterError(f"the router at {self.router_url} answered {answer.status}: {text}")

    def engine_states(self) -> list[EngineState]:
        """Return what the router knows about each engine: whether it is healthy, how busy it is, what it has served."""
        return self._call(ManagerWorker.engine_states)

    def _join(self, urls: Sequence[str]) -> None:
        """Add engines to the router, and wait until it sends to them."""
        self._call(ManagerWorker.join, list(urls))
        deadline = time.monotonic() + CALL_SECONDS
        while not all(state.healthy for state in self.engine_states() if state.url in urls):
            if time.monotonic() >= deadline:
                raise ClusterError(f"the router does not reach {', '.join(urls)}")
            time.sleep(_POLL_SECONDS)

    def restart_engine(
        self, engine_rank: int, weights: Any = None, version: int = 0, timeout: float = HEALTH_SECONDS
    ) -> None:
        """Restart an engine in its place; `weights` are those of the others, which it gets before it serves."""
        self.engines.workers_of(engine_rank)
        self.engines.check_own()
        self._call(ManagerWorker.leave, [self.engines.urls[engine_rank]])
        self.engines.restart(engine_rank, timeout)
        if weights is not None:
            self.engines.workers_of(engine_rank).update_weights(weights, version).wait(timeout)
        self._join([self.engines.urls[engine_rank]])

    def update_weights(self, weights: Any, version: int, timeout: float = 600.0) -> None:
        """Send new weights to every engine, under the lock."""
        with self.lock(timeout):
            self.engines.update_weights(weights, version).wait(timeout)

    def put(self, samples: Sequence[Any], version: int = 0, timeout: float = CALL_SECONDS) -> None:
        """Add samples that this version of the weights made to the data buffer; waits while it is full."""
        if type(version) is not int:
            raise ConfigError(f"version is {version!r}: it is a whole number")
        self._call(ManagerWorker.put, list(samples), version, timeout, timeout=timeout + _GRACE_SECONDS)

    def get(self, count: int, timeout: float = CALL_SECONDS, min_version: int | None = None) -> list[Any]:
        """Take the oldest samples, in turn with other gets; samples of a version before `min_version` are dropped."""
        return self._call(ManagerWorker.get, count, timeout, min_version, timeout=timeout + _GRACE_SECONDS)

    def buffer_stats(self) -> BufferStats:
        """Return how full the data buffer is."""
        return self._call(ManagerWorker.buffer_stats)

    @contextlib.contextmanager
    def lock(self, timeout: float = CALL_SECONDS) -> Iterator[None]:
        """Hold the job's lock for a `with` block. If its holder dies, the next in line gets it.

        A thread that holds the lock can take it again.
        """
        holder = LockHolder.here()
        held = (self._group.name, holder.thread)
        if held in _held_locks:
            yield
            return
        try:
            self._call(ManagerWorker.acquire, holder, timeout, timeout=timeout + _GRACE_SECONDS)
        except BaseException:
            # A caller that is interrupted while it waits must not get the lock later.
            with contextlib.suppress(Exception):
                self._call(ManagerWorker.give_up, holder)
            raise
        _held_locks.add(held)
        try:
            yield
        finally:
            _held_locks.discard(held)
            self._call(ManagerWorker.release, holder)

    def lock_holder(self) -> str | None:
        """Return who holds the lock: a worker's address, or a driver with its machine and process."""
        return self._call(ManagerWorker.lock_holder)

    def close(self) -> None:
        """Stop the engines, the router and the rest; a process that the manager was sent to only lets go of them."""
        with contextlib.closing(self._group):
            self.engines.close()

    def __exit__(self, *_: object) -> None:
        self.close()


_held_locks: set[tuple[str, int]] = set()
"""The locks that this process holds: the manager's name, and the thread."""
