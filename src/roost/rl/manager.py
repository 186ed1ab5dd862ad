"""`RolloutManager`: the engines, the router in front of them, a data buffer and a lock, for all processes of a job."""

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
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import ray
from ray.util import list_named_actors

from roost.errors import CallTimedOut, ClusterError, ConfigError
from roost.placement.strategies import NodePlacementStrategy
from roost.rl.data_buffer import BufferStats, DataBuffer
from roost.rl.engines import HEALTH_SECONDS, RolloutEngines, create_rollout_engines
from roost.rl.fair_lock import LockState
from roost.rl.flags import ROLLOUT
from roost.rl.placement_groups import BundleGroup
from roost.rl.router import EngineState, Router
from roost.runtime.cluster import Cluster
from roost.runtime.groups.group import LAUNCH_SECONDS, WorkerGroup
from roost.runtime.groups.worker import Worker
from roost.runtime.nodes.ray_state import living, name_of_job
from roost.runtime.process.identity import current_identity

MANAGER = "rollout_manager"
CALL_SECONDS = 60.0
_MAX_CALLS = 10_000
_MAX_TRIES = 5
_LOOK_SECONDS = 0.5
_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.02


class ManagerWorker(Worker):
    """The process behind a RolloutManager: router, data buffer and lock. It takes no CPU in Ray's accounts.

    Its methods are asynchronous: any number of callers can wait at once.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._buffer: DataBuffer[Any] = DataBuffer(capacity)
        self._lock = LockState()
        self._turns: dict[str | None, asyncio.Event] = {}
        # In a thread: Ray warns of calls that wait in an asynchronous actor.
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
                # A stranger was quicker: the next lease finds that port in use.
                if error.errno != errno.EADDRINUSE:
                    raise
                self.cluster.release_ports(lease)
        raise ClusterError(f"no port for the router could be had in {_MAX_TRIES} tries")

    async def router_url(self) -> str:
        """Where requests go."""
        return self._router.url

    async def join(self, urls: list[str]) -> None:
        """Engines to send requests to."""
        for url in urls:
            self._router.join(url)

    async def leave(self, urls: list[str]) -> None:
        """Engines to send no requests to any more."""
        for url in urls:
            self._router.leave(url)

    async def engine_states(self) -> list[EngineState]:
        """How the engines are, as the router sees them."""
        return list(self._router.pool.states())

    async def put(self, samples: list[Any], version: int, timeout: float) -> None:
        """Add samples."""
        await _tried_until(timeout, lambda: self._buffer.put(samples, version, timeout=0))

    async def get(self, count: int, timeout: float, min_version: int | None) -> list[Any]:
        """Take samples."""
        found: list[Any] = await _tried_until(timeout, lambda: self._buffer.get(count, 0, min_version))
        return found

    async def buffer_stats(self) -> BufferStats:
        """How full the buffer is."""
        return self._buffer.stats()

    async def acquire(self, holder: str, timeout: float) -> None:
        """Have the lock, in turn; CallTimedOut says who has it."""
        deadline = time.monotonic() + timeout
        turn = self._turns.setdefault(holder, asyncio.Event())
        try:
            while not self._lock.ask(holder, time.monotonic()):
                now = time.monotonic()
                if now >= deadline:
                    raise CallTimedOut(
                        f"{_shown(holder)} did not get the lock in {timeout:g} s: it is {self._lock.describe(now)}"
                    )
                if self._lock.waiting[0] == holder:
                    # The next in turn looks for all: whether the one before it is still there.
                    self._bury(await asyncio.to_thread(self._find_dead, {self._lock.holder, *self._lock.waiting}))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(turn.wait(), min(_LOOK_SECONDS, max(0.0, deadline - now)))
        except BaseException:
            self._give_up(holder)
            raise
        finally:
            del self._turns[holder]

    async def release(self, holder: str) -> None:
        """Give the lock back."""
        self._lock.release(holder, time.monotonic())
        self._wake_next()

    async def give_up(self, holder: str) -> None:
        """Whoever asked does not want the lock any more."""
        self._give_up(holder)

    def _give_up(self, holder: str) -> None:
        self._lock.give_up(holder, time.monotonic())
        self._wake_next()

    def _wake_next(self) -> None:
        if self._lock.holder in self._turns:
            self._turns[self._lock.holder].set()

    async def lock_holder(self) -> str | None:
        """Who has the lock: a worker's address, or a driver."""
        return self._lock.holder and _shown(self._lock.holder)

    def _find_dead(self, names_asked: set[str | None]) -> set[str]:
        """Those of them whose process is gone, also if it was started again since."""
        known = {name for name in names_asked if name}
        drivers = {name: name_of_job(name.split()[-3]) for name in known if name.startswith(_DRIVER)}
        alive = living(set(drivers.values()))
        dead = {name for name, job in drivers.items() if job not in alive}
        workers = {name: name.split()[0] for name in known if not name.startswith(_DRIVER)}
        names = set(list_named_actors())
        records = {record.address: record for record in self.cluster.worker_manager.get_workers()}
        for name, address in workers.items():
            record = records.get(address)
            was_restarted = record is not None and record.pid is not None and str(record.pid) != name.split()[2]
            if address not in names or was_restarted:
                dead.add(name)
        return dead

    def _bury(self, dead: set[str]) -> None:
        """Whoever died has the lock no longer, nor its place in the queue."""
        if dead:
            self.log_warning(f"{', '.join(sorted(map(_shown, dead)))} died, and has the lock no longer")
            self._lock.bury(dead, time.monotonic())
            self._wake_next()


async def _tried_until(timeout: float, act: Callable[[], Any]) -> Any:
    """What a call gives that can be tried again as long as it comes too early."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            return act()
        except CallTimedOut:
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(_POLL_SECONDS)


_DRIVER = "driver "


class RolloutManager:
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
        self._group: WorkerGroup = ManagerWorker.create_group(buffer_size).launch(
            cluster, NodePlacementStrategy([0]), name=name, max_concurrency=_MAX_CALLS, timeout=timeout
        )
        try:
            self.engines: RolloutEngines = create_rollout_engines(
                args,
                engine_cls,
                pg,
                num_gpus_per_engine=num_gpus_per_engine,
                cluster=cluster,
                # A second manager in a job has engines of another name.
                name=ROLLOUT if name == MANAGER else f"{name}_engines",
                engine_args=engine_args,
                engine_kwargs=engine_kwargs,
                env_vars=env_vars,
                timeout=timeout,
                health_timeout=health_timeout,
            )
            try:
                self.router_url: str = self._call("router_url")
                self._join(self.engines.urls)
            except BaseException:
                self.engines.close()
                raise
        except BaseException:
            self._group.close()
            raise

    def _call(self, method: str, *args: Any, timeout: float = CALL_SECONDS) -> Any:
        return self._group.call(method, *args).wait(timeout)[0]

    def generate(self, request: Mapping[str, Any], timeout: float = 600.0) -> Any:
        """Send a request through the router, to the engine that is least busy."""
        body = json.dumps(dict(request)).encode()
        sent = urllib.request.Request(  # noqa: S310 - our own router's address
            f"{self.router_url}/generate", data=body, headers={"Content-Type": "application/json"}
        )
        try:
            # Never through a proxy: the router is in the cluster.
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(sent, timeout=timeout) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:2000]
            raise ClusterError(f"the router at {self.router_url} answered {error.code}: {text}") from None
        except (OSError, http.client.HTTPException) as error:
            raise ClusterError(f"the router at {self.router_url} cannot be reached: {error}") from None
        except ValueError as error:
            raise ClusterError(f"the engine's answer is not JSON: {error}") from None

    def engine_states(self) -> list[EngineState]:
        """How the engines are, as the router sees them: healthy, busy, served, and why not."""
        found: list[EngineState] = self._call("engine_states")
        return found

    def _join(self, urls: Sequence[str]) -> None:
        """Let the router send to engines, and wait until it does."""
        self._call("join", list(urls))
        deadline = time.monotonic() + CALL_SECONDS
        while not all(state.healthy for state in self.engine_states() if state.url in urls):
            if time.monotonic() >= deadline:
                raise ClusterError(f"the router does not reach {', '.join(urls)}")
            time.sleep(_POLL_SECONDS)

    def restart_engine(
        self, engine_rank: int, weights: Any = None, version: int = 0, timeout: float = HEALTH_SECONDS
    ) -> None:
        """Start an engine that died anew in its place; with the weights that the others have, before it serves."""
        self.engines.workers_of(engine_rank)
        self.engines.check_own()
        self._call("leave", [self.engines.urls[engine_rank]])
        self.engines.restart(engine_rank, timeout)
        if weights is not None:
            self.engines.workers_of(engine_rank).update_weights(weights, version).wait(timeout)
        self._join([self.engines.urls[engine_rank]])

    def update_weights(self, weights: Any, version: int, timeout: float = 600.0) -> None:
        """Give new weights to every engine, under the lock."""
        with self.lock(timeout):
            self.engines.update_weights(weights, version).wait(timeout)

    def put(self, samples: Sequence[Any], version: int = 0, timeout: float = CALL_SECONDS) -> None:
        """Add samples to the data buffer, which were made by that version of the weights; waits while it is full."""
        if type(version) is not int:
            raise ConfigError(f"version is {version!r}: it is a whole number")
        self._call("put", list(samples), version, timeout, timeout=timeout + _GRACE_SECONDS)

    def get(self, count: int, timeout: float = CALL_SECONDS, min_version: int | None = None) -> list[Any]:
        """Take the oldest samples; those of an older version than `min_version` are dropped."""
        found: list[Any] = self._call("get", count, timeout, min_version, timeout=timeout + _GRACE_SECONDS)
        return found

    def buffer_stats(self) -> BufferStats:
        """How full the data buffer is."""
        found: BufferStats = self._call("buffer_stats")
        return found

    @contextlib.contextmanager
    def lock(self, timeout: float = CALL_SECONDS) -> Iterator[None]:
        """Have the job's lock for a `with` block; one whose holder died is free again.

        A thread that has it already goes on having it.
        """
        if self._group.name in _own_locks():
            yield
            return
        holder = _holder()
        try:
            self._call("acquire", holder, timeout, timeout=timeout + _GRACE_SECONDS)
        except BaseException:
            # Whoever is interrupted while it waits must not be given it later.
            with contextlib.suppress(Exception):
                self._call("give_up", holder)
            raise
        _own_locks().add(self._group.name)
        try:
            yield
        finally:
            _own_locks().discard(self._group.name)
            self._call("release", holder)

    def lock_holder(self) -> str | None:
        """Who has the lock."""
        found: str | None = self._call("lock_holder")
        return found

    def close(self) -> None:
        """Stop the engines, the router and the rest; in a process that it was sent to, only let go of them."""
        try:
            self.engines.close()
        finally:
            self._group.close()

    def __enter__(self) -> RolloutManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_here = threading.local()


def _own_locks() -> set[str]:
    """The managers whose lock this thread has."""
    if not hasattr(_here, "locks"):
        _here.locks = set()
    found: set[str] = _here.locks
    return found


def _holder() -> str:
    """Who this thread is to the lock: `actor:3 pid 4711 thread 140`, or a driver with its Ray job."""
    identity = current_identity()
    thread = f"thread {threading.get_ident()}"
    if identity is not None:
        return f"{identity.address} pid {os.getpid()} {thread}"
    job = ray.get_runtime_context().get_job_id()
    return f"{_DRIVER}{socket.gethostname()}:{os.getpid()} {job} {thread}"


def _shown(holder: str) -> str:
    """A holder as messages name it."""
    return " ".join(holder.split()[:2]) if holder.startswith(_DRIVER) else holder.split()[0]
