"""Rollout engines: one worker for each node of each engine, started with its ports and devices, and healthy."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import count
from typing import Any

from roost.deadline import Deadline
from roost.errors import ClusterError, ConfigError, EngineFailed, LaunchTimedOut, RoostError, WorkerDied
from roost.machine.ports import taken_ports
from roost.rl.engine import EngineSpec, check_engine_class, url_of
from roost.rl.flags import ROLLOUT, Mode, engine_parts, read_flags
from roost.rl.limits import GRACE_SECONDS, HEALTH_POLL_SECONDS, HEALTH_SECONDS, STOP_SECONDS, VERSIONS_SECONDS
from roost.rl.placement_groups import BundleGroup, slots_of, strategy_of
from roost.runtime.cluster import Cluster
from roost.runtime.events.emitter import Gauge, emitter
from roost.runtime.groups.group import LAUNCH_SECONDS, WorkerGroup
from roost.runtime.groups.result import CallResult, Outcome
from roost.runtime.managers.ledgers.ports import PortLease
from roost.runtime.process import output as logs
from roost.runtime.runs.folder import log_file
from roost.text import error_text, join_words, plural
from roost.weights.adapters import Committing
from roost.weights.link import WeightLink
from roost.weights.versions import NO_VERSION, Versions
from roost.weights.worker import WeightWorker

_MAX_CALLS = 64
_MAX_TRIES = 5
_STOP_SHARE = 0.2
_SERVER, _NCCL, _DIST_INIT, _DP_ATTENTION = range(4)


class EngineWorker(WeightWorker):
    """One process of an engine: it holds the user's engine object. A `WeightLink` can have its group as the target."""

    def __init__(self, engine_cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self._engine = engine_cls(*args, **kwargs)
        self._roost_versions = Versions(str(self.address))
        """Of its weights, also for the links that it takes part in."""
        self._url = ""
        self._is_asleep = False
        emitter.add_gauge(self._gauge)

    def start_engine(self, spec: EngineSpec) -> list[int]:
        """Start the engine; if that fails, return the leased ports that another program has taken meanwhile."""
        # From now on the router's process can notice that this one has ended.
        _ = self._roost_messages
        try:
            self._engine.start(spec)
        except Exception as error:
            with contextlib.suppress(Exception):
                self._engine.stop()
            ports = [spec.port, spec.nccl_port, *spec.dp_attention_ports]
            if spec.node_rank == 0:
                ports.append(int(spec.dist_init_addr.rpartition(":")[2]))
            taken = taken_ports([(port, 1) for port in ports])
            if not taken:
                raise
            what = f"another program took port {join_words(taken)} before the engine could listen"
            self.log_warning(f"{what}: {error_text(error)}")
            return taken
        self._url = spec.url
        return []

    def _gauge(self) -> list[Gauge]:
        """Return its state, as an event has it."""
        values = {"url": self._url or None, "version": self.served_version(), "asleep": self._is_asleep or None}
        return [("engine", str(self.address), values)]

    def health(self) -> bool:
        """Return whether the engine can serve."""
        return bool(self._engine.health())

    def generate(self, request: Any) -> Any:
        """Answer a request."""
        return self._engine.generate(request)

    def stage_weights(self, weights: Any, version: int) -> bool:
        """Take in weights that `update_weights` then uses; False if the engine can only do both at once."""
        if not hasattr(self._engine, "stage_weights"):
            return False
        with self._roost_versions.turn(version, may_repeat=True):
            self._engine.stage_weights(weights)
        return True

    def update_weights(self, weights: Any, version: int, staged: Sequence[bool] = ()) -> None:
        """Replace the weights; ConfigError if newer ones were asked for, even by a call that is still going on.

        `staged` is whether the processes of the engines have taken them in.
        """
        with self._roost_versions.changing(version, may_repeat=True):
            if any(staged):
                self._engine.accept().commit(version)
            else:
                self._engine.update_weights(weights, version)

    def accept(self) -> Any:
        """Return where an update of a link writes, if the engine says so."""
        if not hasattr(self._engine, "accept"):
            raise ConfigError(f"{type(self._engine).__name__} has no method accept(), which a link of weights needs")
        return self._engine.accept()

    def open_weights(self, link: str, in_place: bool, may_share: bool) -> int:
        """Take part in a link, unless that would change weights that requests are being answered with."""
        if in_place and not (hasattr(self._engine, "weights_changing") or isinstance(self.accept(), Committing)):
            what = f"{type(self._engine).__name__} has no method weights_changing() to pause in"
            raise ConfigError(f"{what}: in_place would mix versions", hint="leave in_place out")
        return super().open_weights(link, in_place, may_share)

    def weights_changing(self, version: int) -> AbstractContextManager[Any]:
        """Return what surrounds the moment in which a link changes the weights."""
        changing: Callable[[int], AbstractContextManager[Any]]
        changing = getattr(self._engine, "weights_changing", super().weights_changing)
        return changing(version)

    def served_version(self) -> int | None:
        """Return the version of the weights that it took last; None if it took none, or if the last update failed."""
        last = self._roost_versions.last
        return None if last == NO_VERSION else last

    def offload(self) -> None:
        """Free the accelerators' memory, if the engine can."""
        if hasattr(self._engine, "offload"):
            # What is left of it would stay on the device.
            self.let_go_of_weights()
            self._engine.offload()
            self._is_asleep = True

    def onload(self) -> None:
        """Take the memory back."""
        if hasattr(self._engine, "onload"):
            self._engine.onload()
            self._is_asleep = False

    def stop(self) -> None:
        """Stop the server."""
        self._engine.stop()


class RolloutEngines(contextlib.AbstractContextManager["RolloutEngines"]):
    """The engines that serve. Requests go to an engine's node 0; weights and memory concern every process of it.

    There are none if the flags ask for a router alone, or the engines run elsewhere.
    """

    def __init__(
        self, group: WorkerGroup[Any] | None, nodes_per_engine: Sequence[int], dp_size: int, timeout: float
    ) -> None:
        """Start engines on launched workers, of which each engine has the next few."""
        self._group = group
        self._dp_size = dp_size
        self._leases: dict[int, PortLease] = {}
        ranks = count()
        self._workers = [[next(ranks) for _ in range(num_nodes)] for num_nodes in nodes_per_engine]
        self.specs: list[EngineSpec] = []
        """The spec of each worker of the group, by rank."""
        if self._workers:
            self.specs += self._start(range(self.num_engines), Deadline.after(timeout), timeout).values()

    @property
    def group(self) -> WorkerGroup[Any]:
        """The workers of all engines; ClusterError if there are no engines."""
        if self._group is None:
            hint = "engines that run elsewhere join the router with POST /engines"
            raise ClusterError("there are no engines: the flags ask for no accelerators for them", hint=hint)
        return self._group

    @property
    def num_engines(self) -> int:
        """How many engines there are."""
        return len(self._workers)

    @property
    def urls(self) -> list[str]:
        """Where each engine serves."""
        return [spec.url for spec in self.specs if spec.node_rank == 0]

    def specs_of(self, engine_rank: int) -> dict[int, EngineSpec]:
        """Return what the workers of one engine were started with, by their rank in the group."""
        return {rank: self.specs[rank] for rank in self._ranks(engine_rank)}

    def workers_of(self, engine_rank: int) -> WorkerGroup[Any]:
        """Return the workers of one engine, its node 0 first."""
        return self.group.on(*self._ranks(engine_rank))

    def health(self, timeout: float = 30.0) -> list[bool]:
        """Return whether each engine can serve; an engine with a dead worker cannot."""
        return [all(one.is_ok and one.value for one in engine) for engine in self._outcomes("health", timeout)]

    def ill_urls(self, timeout: float = 5.0) -> list[str]:
        """Return where the engines are that say that they cannot serve, or of which a process has ended."""
        # One that does not answer in time says nothing about its weights.
        is_ill = [
            any(not one.value if one.is_ok else isinstance(one.error, EngineFailed | WorkerDied) for one in engine)
            for engine in self._outcomes("health", timeout)
        ]
        return [url for url, ill in zip(self.urls, is_ill, strict=True) if ill]

    def generate(self, request: Any, engine_rank: int = 0) -> CallResult[Any]:
        """Ask one engine directly, without HTTP."""
        return self.group[self._ranks(engine_rank)[0]].generate(request)

    def update_weights(self, weights: Any, version: int, engine_rank: int | None = None) -> CallResult[Any]:
        """Send new weights to every process of every engine, or of one engine; versions only go up."""
        workers = self.group if engine_rank is None else self.workers_of(engine_rank)
        if all(len(ranks) == 1 for ranks in self._workers):
            return workers.update_weights(weights, version)
        # Node 0 loads them for all nodes of its engine, which must have them by then.
        return workers.update_weights(weights, version, workers.stage_weights(weights, version))

    def rejoin(self, link: WeightLink, engine_rank: int, timeout: float = HEALTH_SECONDS) -> None:
        """Let an engine that was restarted take part in a link again, which has no version yet."""
        link.rejoin(*(f"{self.group.name}:{rank}" for rank in self._ranks(engine_rank)), timeout=timeout)

    def refill(self, link: WeightLink, engine_rank: int, timeout: float = HEALTH_SECONDS) -> None:
        """Bring an engine that was restarted to the present version of a link."""
        deadline = Deadline.after(timeout)
        # Its node 0 last, which then loads them for all its nodes.
        for rank in reversed(self._ranks(engine_rank)):
            link.refill(f"{self.group.name}:{rank}", max(GRACE_SECONDS, deadline.left))

    def versions(self, timeout: float = VERSIONS_SECONDS) -> list[int | None]:
        """Return the version of the weights that all processes of each engine have; None if that is not known."""
        by_engine = [{one.value for one in engine} for engine in self._outcomes("served_version", timeout)]
        return [versions.pop() if len(versions) == 1 else None for versions in by_engine]

    def offload(self) -> CallResult[Any]:
        """Let every engine free its accelerators' memory."""
        return self.group.offload()

    def onload(self) -> CallResult[Any]:
        """Let every engine take its memory back."""
        return self.group.onload()

    def restart(self, engine_rank: int, timeout: float = HEALTH_SECONDS) -> None:
        """Restart an engine in its place, in new processes and on new ports, even if it is dead or hangs."""
        deadline = Deadline.after(timeout)
        ranks = self._ranks(engine_rank)
        self.check_own()
        # An engine that hangs must not use up the time; what it does not end itself ends with its process.
        self.group.on(*ranks).stop().outcomes(min(STOP_SECONDS, timeout * _STOP_SHARE))
        for rank in ranks:
            self.group.restart(rank, force=True, timeout=max(GRACE_SECONDS, deadline.left))
        try:
            started = self._start([engine_rank], deadline, timeout)
        except BaseException:
            with contextlib.suppress(RoostError):
                self.group.on(*ranks).stop().outcomes(GRACE_SECONDS)
            raise
        self.specs = [started.get(rank, spec) for rank, spec in enumerate(self.specs)]

    def check_own(self) -> None:
        """Raise ClusterError in a process that only attached to the engines."""
        if not self.group.is_own:
            raise ClusterError("engines can only be restarted by the process that started them")

    def close(self) -> None:
        """Stop every engine and end its workers; a process that only attached lets go of them."""
        if self._group is None:
            return
        with contextlib.closing(self._group), contextlib.suppress(Exception):
            if self._group.is_own:
                self.group.stop().outcomes(STOP_SECONDS)

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return self.num_engines

    def _outcomes(self, method: str, timeout: float) -> list[list[Outcome]]:
        """Call all workers, and return how that went, by engine; nothing if there are none."""
        found = self.group.call(method).outcomes(timeout) if self.num_engines else []
        return [[found[rank] for rank in ranks] for ranks in self._workers]

    def _ranks(self, engine_rank: int) -> list[int]:
        """Return the ranks of an engine's workers, its node 0 first."""
        if engine_rank not in range(self.num_engines):
            raise ClusterError(f"there is no engine {engine_rank!r}: there are 0-{self.num_engines - 1}")
        return self._workers[engine_rank]

    def _start(self, engine_ranks: Sequence[int], deadline: Deadline, timeout: float) -> dict[int, EngineSpec]:
        """Lease ports for these engines and start them; where another program was quicker, again with other ports."""
        specs: dict[int, EngineSpec] = {}
        for _ in range(_MAX_TRIES):
            for engine_rank in engine_ranks:
                specs |= self._lease_specs(engine_rank)
            started = [rank for engine_rank in engine_ranks for rank in self._workers[engine_rank]]
            seconds = max(0.1, deadline.left)
            taken = self.group.on(*started).map("start_engine", [specs[rank] for rank in started]).wait(seconds)
            engine_ranks = sorted({specs[rank].engine_rank for rank, lost in zip(started, taken, strict=True) if lost})
            if not engine_ranks:
                _wait_until_healthy(self.group, specs, deadline, timeout)
                return specs
            # All processes of such an engine start again: they have to agree on its ports.
            half_started = [rank for engine_rank in engine_ranks for rank in self._workers[engine_rank]]
            self.group.on(*half_started).stop().outcomes(max(0.1, deadline.left))
        raise ClusterError(
            f"other programs took the ports of engine {join_words(engine_ranks)} {_MAX_TRIES} times before it could "
            f"listen, last port {join_words([port for lost in taken for port in lost])}",
            hint="give Cluster a port_range that no other program uses",
        )

    def _lease_specs(self, engine_rank: int) -> dict[int, EngineSpec]:
        """Lease consecutive ports for each worker of an engine on its own node; node 0 has more than the others."""
        group, leases = self.group, self._leases
        placements = {rank: group.placements[rank] for rank in self._workers[engine_rank]}
        for node_rank, (rank, placement) in enumerate(placements.items()):
            before = leases.get(rank)
            size = _DIST_INIT if node_rank else _DP_ATTENTION + self._dp_size
            leases[rank] = group.cluster.lease_ports(placement.cluster_node_rank, size, holder=f"{group.name}:{rank}")
            if before is not None:
                group.cluster.release_ports(before)
        first = leases[next(iter(placements))]
        secret = secrets.token_urlsafe(32)
        dist_init_addr = url_of(first.address, first.ports[_DIST_INIT]).removeprefix("http://")
        return {
            rank: EngineSpec(
                engine_rank=engine_rank,
                num_engines=self.num_engines,
                node_rank=node_rank,
                num_nodes=len(placements),
                cluster_node_rank=placement.cluster_node_rank,
                address=leases[rank].address,
                devices=placement.visible_accelerators,
                num_devices=sum(len(one.visible_accelerators) for one in placements.values()),
                port=leases[rank].ports[_SERVER],
                nccl_port=leases[rank].ports[_NCCL],
                dist_init_addr=dist_init_addr,
                dp_attention_ports=tuple(leases[rank].ports[_DP_ATTENTION:]),
                secret=secret,
            )
            for node_rank, (rank, placement) in enumerate(placements.items())
        }


def create_rollout_engines(
    args: object,
    engine_cls: type,
    pg: BundleGroup,
    *,
    num_gpus_per_engine: float | None = None,
    cluster: Cluster | None = None,
    name: str = ROLLOUT,
    engine_args: Sequence[Any] = (),
    engine_kwargs: Mapping[str, Any] | None = None,
    env_vars: Mapping[str, str] | None = None,
    timeout: float = LAUNCH_SECONDS,
    health_timeout: float = HEALTH_SECONDS,
) -> RolloutEngines:
    """Start the engines that the flags ask for, and wait until all of them can serve.

    - `engine_cls`: a class with start, health, generate, update_weights and stop; see `RolloutEngine`.
    - `pg`: `create_placement_groups(args)["rollout"]`.

    Each engine has a secret of its own, new at each start, which its `EngineSpec` has. An engine has one worker on each
    of the nodes that its accelerators are on, as Roost measured them.
    """
    flags = read_flags(args)
    cluster = cluster or Cluster()
    check_engine_class(engine_cls)
    if flags.engines_num_gpus == 0 and flags.mode is not Mode.TRAIN_ONLY:
        return RolloutEngines(None, [], flags.dp_attention_size, health_timeout)
    slots = slots_of(cluster, pg, flags.engines_num_gpus)
    nodes = [slot.piece.node_rank for slot in slots]
    parts = engine_parts(flags.engines_num_gpus, flags.rollout_num_gpus_per_engine, nodes)
    processes = [[slots[place] for place in places] for engine in parts for places in engine]
    group = EngineWorker.create_group(engine_cls, tuple(engine_args), dict(engine_kwargs or {})).launch(
        cluster,
        placement_strategy=strategy_of(cluster, processes),
        name=name,
        share=flags.num_gpus_per_engine if num_gpus_per_engine is None else num_gpus_per_engine,
        env_vars=env_vars,
        max_concurrency=_MAX_CALLS,
        timeout=timeout,
    )
    try:
        nodes_per_engine = [len(engine) for engine in parts]
        return RolloutEngines(group, nodes_per_engine, flags.dp_attention_size, health_timeout)
    except BaseException:
        with contextlib.closing(group), contextlib.suppress(RoostError):
            # Processes that an engine has started need not end with its worker.
            group.stop().outcomes(STOP_SECONDS * _STOP_SHARE)
        raise


def _wait_until_healthy(
    group: WorkerGroup[Any], specs: Mapping[int, EngineSpec], deadline: Deadline, timeout: float
) -> None:
    """Wait for these workers; the error names those that are not healthy, with the end of their logs."""
    ranks = list(specs)
    pause, longest = HEALTH_POLL_SECONDS
    while True:
        outcomes = group.on(*ranks).health().outcomes(max(0.1, deadline.left))
        ill = [rank for rank, outcome in zip(ranks, outcomes, strict=True) if not (outcome.is_ok and outcome.value)]
        if not ill:
            return
        why = next((str(outcome.error) for outcome in outcomes if isinstance(outcome.error, EngineFailed)), "")
        if why or deadline.is_over or not set(ill) <= set(group.alive):
            break
        time.sleep(pause)
        pause = min(longest, 2 * pause)
    cluster = group.cluster
    cluster.logs.catch_up()
    lines = []
    for rank in ill[:4]:
        spec = specs[rank]
        path = log_file(cluster.job.run_dir.logs, f"{group.name}:{rank}")
        said = logs.read_tail(path).splitlines()
        # The exception of `health`, which is in the log as well, would take the place of what the engine said.
        failed = (place for place, line in enumerate(said) if f" ERROR {group.name}:{rank} failed in health, " in line)
        end = "".join(f"\n      {line}" for line in said[: next(failed, None)][-10:])
        state = "" if rank in group.alive else ", its process is dead"
        node = cluster.nodes[spec.cluster_node_rank]
        lines.append(f"  engine {spec.engine_rank} ({group.name}:{rank} on {node}, {spec.url}){state}, log {path}{end}")
    details = "\n".join(lines + ([f"  and {len(ill) - 4} more"] if len(ill) > 4 else []))
    who = f"{plural(len(ill), 'process', 'processes')} of the engines"
    if not set(ill) <= set(group.alive):
        raise WorkerDied(f"{who} died or was not healthy before all could serve:\n{details}")
    if why:
        raise EngineFailed(f"{why}:\n{details}")
    hint = "see its log, or give it longer with health_timeout"
    raise LaunchTimedOut(f"{who} did not become healthy in {timeout:g} s:\n{details}", hint=hint)
