"""`RolloutManager`: the engines, the router in front of them, a data buffer and a lock, for every process of a job."""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from roost.comm.channels.channel import DEFAULT_KEY, Channel
from roost.deadline import Deadline
from roost.errors import CallTimedOut, ClusterError, ConfigError, RoostError
from roost.placement.strategies import NodePlacementStrategy
from roost.rl.engine import url_of
from roost.rl.engine_pool import EngineState
from roost.rl.engines.samples import Dialect, Prompt, Sample
from roost.rl.flags import ROLLOUT
from roost.rl.job_lock import JobLock
from roost.rl.json_request import ask
from roost.rl.limits import (
    CALL_SECONDS,
    GENERATE_SECONDS,
    GRACE_SECONDS,
    HEALTH_SECONDS,
    JOIN_POLL_SECONDS,
    STATE_SECONDS,
    VERSIONS_SECONDS,
    WEIGHTS_SECONDS,
)
from roost.rl.manager_worker import LOCK, ManagerWorker
from roost.rl.placement_groups import BundleGroup
from roost.rl.rollout_engines import RolloutEngines, create_rollout_engines
from roost.rl.router import TIMEOUT_HEADER, Router, RouterOptions
from roost.rl.sampling import draw_samples
from roost.runtime.cluster import Cluster
from roost.runtime.events.emitter import emitter
from roost.runtime.events.waits import waiting
from roost.runtime.groups.group import LAUNCH_SECONDS, WorkerGroup
from roost.runtime.managers.ledgers.ports import PortLease
from roost.runtime.process.identity import current_identity
from roost.text import plural
from roost.weights.link import WeightLink

MANAGER = "rollout_manager"
_MAX_TRIES = 5
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStats:
    """How full a data buffer is, and what has gone through it."""

    size: int
    capacity: int
    put: int
    """How many samples were ever put in."""
    taken: int
    """How many of them their receivers have."""
    leased: int
    """How many are on their way to receivers."""
    dropped: int
    """How many were dropped because they were too old."""
    oldest_version: int | None
    """Of the samples in the buffer; None if it is empty."""
    newest_version: int | None


class RolloutManager(contextlib.AbstractContextManager["RolloutManager"]):
    """The rollout side of a job. It can be sent to workers: there it reaches the same engines, buffer and lock.

    - `args`, `engine_cls`, `pg` and the rest: as in `create_rollout_engines`.
    - `buffer_size`: how many samples the data buffer holds.
    - `router_options`: what the router forwards, its times and limits, and whether anyone may generate.
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
        router_options: RouterOptions | None = None,
        num_gpus_per_engine: float | None = None,
        engine_args: Sequence[Any] = (),
        engine_kwargs: Mapping[str, Any] | None = None,
        env_vars: Mapping[str, str] | None = None,
        timeout: float = LAUNCH_SECONDS,
        health_timeout: float = HEALTH_SECONDS,
    ) -> None:
        if type(buffer_size) is not int or buffer_size < 1:
            hint = "it is a number of samples, 1 or more"
            raise ConfigError(f"the capacity of a buffer is {buffer_size!r}", hint=hint)
        cluster = cluster or Cluster()
        self._buffer_size = buffer_size
        self._cluster: Cluster | None = cluster
        self.secret: str = secrets.token_urlsafe(32)
        """The secret that requests to the router show, as `Authorization: Bearer ...`."""
        self._router_options = router_options or RouterOptions()
        self._dialect: Dialect | None = engine_cls if isinstance(engine_cls, Dialect) else None
        with contextlib.ExitStack() as undo:
            self._group: WorkerGroup[Any] = ManagerWorker.create_group(buffer_size).launch(
                cluster, NodePlacementStrategy([0]), name=name, timeout=timeout
            )
            undo.callback(self._group.close)
            self._channel: Channel = Channel.connect(name)
            self._router_port = self._lease_router_port(cluster)
            undo.callback(self._release_router_port)
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
            self._join(range(self.engines.num_engines), Deadline.after(CALL_SECONDS))
            undo.pop_all()

    @property
    def router_url(self) -> str:
        """Where the router listens: `http://10.0.0.7:20300`."""
        return url_of(self._router_port.address, self._router_port.port)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the Cluster out: it belongs to this process."""
        return vars(self) | {"_cluster": None}

    def _lease_router_port(self, cluster: Cluster) -> PortLease:
        """Lease a port for this process, not for the manager's, which may be restarted, and start the router on it."""
        for _ in range(_MAX_TRIES):
            lease = cluster.lease_ports(self._group.placements[0].cluster_node_rank)
            with contextlib.ExitStack() as undo:
                undo.callback(cluster.release_ports, lease)
                if self._start_router(lease, CALL_SECONDS):
                    undo.pop_all()
                    return lease
            # Another program was quicker: the next lease skips that port.
        raise ClusterError(f"other programs took the router's port {_MAX_TRIES} times before it could listen")

    def _start_router(self, lease: PortLease, timeout: float) -> bool:
        options, secret = self._router_options, self.secret
        return self._call(ManagerWorker.start_router, lease.address, lease.port, options, secret, timeout=timeout)

    def _release_router_port(self) -> None:
        if self._cluster is not None:
            with contextlib.suppress(ClusterError):
                self._cluster.release_ports(self._router_port)

    @overload
    def generate(self, request: Mapping[str, Any], timeout: float = ...) -> Any: ...

    @overload
    def generate(
        self, request: Sequence[Prompt], timeout: float = ..., most_at_once: int = ...
    ) -> Iterator[tuple[int, Sample]]: ...

    def generate(
        self, request: Mapping[str, Any] | Sequence[Prompt], timeout: float = GENERATE_SECONDS, most_at_once: int = 256
    ) -> Any:
        """Send a request through the router, to the least busy engine, and return its answer.

        A list of prompts gives an iterator over samples instead, each with the place of its prompt, in the order in
        which they are finished; at most `most_at_once` prompts are at the engines at a time.

        If no engine is healthy, it waits for one. CallTimedOut or ClusterError if not all is answered in `timeout`
        seconds.
        """
        if not 0 < timeout < math.inf:
            raise ConfigError(f"timeout is {timeout!r}: it is a number of seconds above 0")

        def send(path: str, body: dict[str, Any], seconds: float) -> Any:
            return ask(
                self.router_url,
                path,
                body,
                secret=self.secret,
                # The router knows the deadline, and says what happened when it is over.
                timeout=seconds + GRACE_SECONDS,
                who=f"the router at {self.router_url}",
                headers={TIMEOUT_HEADER: str(seconds)},
                hint="if its process is gone, manager.restart() starts it again",
            )

        if isinstance(request, Mapping):
            with waiting(lambda: "the router", details=lambda: self._waits_for("a request")):
                return send("/generate", dict(request), timeout)
        if self._dialect is None:
            raise ConfigError("the engines take no prompts", hint="an engine of roost.rl.engines does")
        return draw_samples(self._dialect, send, request, timeout, most_at_once, self._waits_for)

    def _waits_for(self, what: str) -> tuple[str, list[str]]:
        """Say what is waited for at the router, and which workers' engines have requests now."""
        states = self._call_router(Router.states, timeout=STATE_SECONDS)
        busy, name = {state.url for state in states if state.busy}, self.engines.group.name
        specs = [self.engines.specs_of(engine) for engine, url in enumerate(self.engines.urls) if url in busy]
        return f"{what} at the router {self.router_url}, busy:", [f"{name}:{rank}" for ranks in specs for rank in ranks]

    def engine_states(self) -> list[EngineState]:
        """Return what the router knows about each engine: whether it is healthy, how busy it is, what it has served."""
        return self._call_router(Router.states)

    def engine_versions(self, timeout: float = VERSIONS_SECONDS) -> list[int | None]:
        """Return the version of the weights that each engine serves; None if that is not known.

        An engine's version is not known before its first update, after one that failed, while its processes have
        different ones, and if it does not answer in `timeout` seconds.
        """
        return self.engines.versions(timeout)

    def _join(self, engine_ranks: Sequence[int], deadline: Deadline) -> None:
        """Add engines to the router, and wait until it sends to them."""
        self._add_to_router(engine_ranks, _left(deadline))
        urls = [self.engines.urls[engine] for engine in engine_ranks]
        while True:
            states = self._call_router(Router.states, timeout=_left(deadline))
            ill = [one for one in states if one.url in urls and not one.healthy]
            if not ill:
                return
            if deadline.is_over or any(one.is_dead for one in ill):
                reasons = "; ".join(f"{one.url}: {one.why}" for one in ill)
                raise ClusterError(f"the router does not reach {plural(len(ill), 'engine')}: {reasons}")
            time.sleep(JOIN_POLL_SECONDS)

    def _add_to_router(self, engine_ranks: Sequence[int], timeout: float = CALL_SECONDS) -> None:
        if not engine_ranks:
            return
        specs = {rank: spec for engine in engine_ranks for rank, spec in self.engines.specs_of(engine).items()}
        self._call(ManagerWorker.join, self.engines.group.name, specs, timeout=timeout)

    def restart(self, timeout: float = CALL_SECONDS) -> None:
        """Restart the process of router, data buffer and lock, dead or not, in front of the same engines.

        The router has the same address. The data buffer is empty, and the lock is free.
        """
        deadline = Deadline.after(timeout)
        self._group.restart(0, force=True, timeout=timeout)
        if not self._start_router(self._router_port, _left(deadline)):
            hint = "close the manager, and make another one"
            raise ClusterError(f"another program has taken the router's port {self._router_port.port}", hint=hint)
        self._add_to_router(range(self.engines.num_engines), _left(deadline))

    def restart_engine(
        self, engine_rank: int, weights: Any = None, version: int = 0, timeout: float = HEALTH_SECONDS
    ) -> None:
        """Restart an engine in its place, even one that hangs; `weights` are those of the others, or a link.

        It gets them before it serves, and they may be older than those that it had.
        """
        deadline = Deadline.after(timeout)
        self.engines.workers_of(engine_rank)
        self.engines.check_own()
        self._call(ManagerWorker.leave, self.engines.urls[engine_rank], timeout=timeout)
        self.engines.restart(engine_rank, _left(deadline))
        if isinstance(weights, WeightLink):
            bring = self.engines.rejoin if weights.version < 0 else self.engines.refill
            try:
                bring(weights, engine_rank, _left(deadline))
            except RoostError:
                # The next update may bring them: it serves then.
                url = self.engines.urls[engine_rank]
                self._add_to_router([engine_rank])
                self._call_router(Router.doubt, [*self._call(ManagerWorker.on_router, "doubted"), url])
                raise
        elif weights is not None:
            self.engines.update_weights(weights, version, engine_rank).wait(_left(deadline))
        self._join([engine_rank], deadline)

    def update_weights(self, weights: Any, version: int, timeout: float = WEIGHTS_SECONDS) -> None:
        """Send new weights to every engine, or update a link to the engines, under the lock. Versions only go up.

        If that fails, the router sends nothing to engines that are not healthy then, until an update succeeds.
        """
        deadline = Deadline.after(timeout)
        with self.lock(timeout):
            try:
                if isinstance(weights, WeightLink):
                    weights.update(version, _left(deadline))
                elif self.engines.num_engines:
                    began, own = time.monotonic(), current_identity()
                    self.engines.update_weights(weights, version).wait(_left(deadline))
                    ways = f"{own.address if own is not None else 'driver'} -> {self.engines.group.name}"
                    emitter.note("weights", ways, version=version, d=round(time.monotonic() - began, 4))
            except Exception:
                with contextlib.suppress(RoostError):
                    self._call_router(Router.doubt, self.engines.ill_urls())
                raise
            if doubted := self._call(ManagerWorker.on_router, "doubted"):
                # A link may have left some of them out.
                still = [url for url in self.engines.ill_urls() if url in doubted]
                self._call_router(Router.doubt, still)

    def put(self, samples: Sequence[Any], version: int = 0, timeout: float = CALL_SECONDS) -> None:
        """Add samples that this version of the weights made to the data buffer; waits while it is full.

        If this is interrupted, or raises, none of them go in.
        """
        things = list(samples)
        if len(things) > self._buffer_size:
            hint = "put fewer in one call, or make the buffer larger"
            count = plural(len(things), "sample")
            raise ConfigError(f"{count} can never fit in a buffer for {self._buffer_size}", hint=hint)
        try:
            self._channel.put_many(things, version=version, whole=True, timeout=timeout)
        except CallTimedOut as late:
            raise CallTimedOut(f"no room for {plural(len(things), 'sample')} within {timeout:g} s: {late}") from None

    def get(self, count: int, timeout: float = CALL_SECONDS, min_version: int | None = None) -> list[Any]:
        """Take the oldest samples, in turn with other gets; samples of a version before `min_version` are dropped.

        If this is interrupted, or its process dies, the samples stay in the buffer.
        """
        if type(count) is not int or not 1 <= count <= self._buffer_size:
            hint = f"it takes a number from 1 to {self._buffer_size}"
            raise ConfigError(f"a get can never take {count!r} samples", hint=hint)
        try:
            found: list[Any] = self._channel.get_many(count, min_version=min_version, timeout=timeout)
        except CallTimedOut as late:
            raise CallTimedOut(f"not {plural(count, 'sample')} within {timeout:g} s: {late}") from None
        return found

    def buffer_stats(self) -> BufferStats:
        """Return how full the data buffer is."""
        line = self._channel.stats(timeout=CALL_SECONDS)["keys"].get(DEFAULT_KEY, {})
        oldest, newest = line.get("versions", (None, None))
        return BufferStats(
            size=line.get("depth", 0),
            capacity=self._buffer_size,
            put=line.get("puts", 0),
            taken=line.get("gets", 0),
            leased=line.get("leased", 0),
            dropped=line.get("dropped", 0),
            oldest_version=oldest,
            newest_version=newest,
        )

    def lock(self, timeout: float = CALL_SECONDS) -> JobLock:
        """Hold the job's lock for a `with` block, or an `async with` block in a coroutine.

        If its holder dies, the next in line gets it. A thread, or a task of an event loop, that holds the lock can take
        it again.
        """
        return JobLock(self._channel, timeout)

    def lock_holder(self) -> str | None:
        """Return who holds the lock: a worker's address, or another process with its machine and pid."""
        line = self._channel.stats(timeout=CALL_SECONDS)["keys"].get(LOCK, {})
        return next(iter(line.get("holders", {})), None)

    def _call(self, method: Callable[..., Value], *args: Any, timeout: float = CALL_SECONDS) -> Value:
        """Call a method of the manager's process, and wait for it."""
        value: Value = self._group.call(method.__name__, *args).wait(timeout)[0]
        return value

    def _call_router(self, method: Callable[..., Value], *args: Any, timeout: float = CALL_SECONDS) -> Value:
        value: Value = self._call(ManagerWorker.on_router, method.__name__, *args, timeout=timeout)
        return value

    def close(self) -> None:
        """Stop the engines, the router and the rest; a process that the manager was sent to only lets go of them."""
        with contextlib.closing(self._group):
            self.engines.close()
        self._release_router_port()

    def __exit__(self, *_: object) -> None:
        self.close()


def _left(deadline: Deadline) -> float:
    # Even a call that is late gets an answer, and says what it was about.
    return max(0.1, deadline.left)
