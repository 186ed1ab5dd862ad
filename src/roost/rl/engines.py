"""Rollout engines: one worker for each node of each engine, told its ports and devices, started and found healthy."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from roost.errors import ClusterError, LaunchTimedOut, RoostError, WorkerDied
from roost.machine.ports import taken_ports
from roost.rl.engine import EngineSpec, check_engine_class
from roost.rl.flags import ROLLOUT, engine_parts, read_flags
from roost.rl.placement_groups import BundleGroup, slots_of, strategy_of
from roost.runtime.cluster import Cluster
from roost.runtime.groups.group import LAUNCH_SECONDS, WorkerGroup
from roost.runtime.groups.result import CallResult
from roost.runtime.groups.worker import Worker
from roost.runtime.managers.ledgers.ports import PortLease
from roost.runtime.process import output as logs
from roost.runtime.runs.folder import log_file
from roost.text import join_words, plural

HEALTH_SECONDS = 300.0
_MAX_CALLS = 64
_MAX_TRIES = 5
_STOP_SECONDS = 30.0
_POLL_SECONDS = (0.05, 1.0)
_SERVER, _NCCL, _DIST_INIT, _DP_ATTENTION = range(4)


class EngineWorker(Worker):
    """One process of an engine: it holds the user's engine object."""

    def __init__(self, engine_cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self._engine = engine_cls(*args, **kwargs)

    def start_engine(self, spec: EngineSpec) -> list[int]:
        """Start it; gives the leased ports that a stranger took meanwhile, in which case it is not started."""
        try:
            self._engine.start(spec)
        except Exception as error:
            with contextlib.suppress(Exception):
                self._engine.stop()
            taken = taken_ports([(port, 1) for port in own_ports(spec)])
            if not taken:
                raise
            what = f"{type(error).__name__}: {error}"
            self.log_warning(f"port {join_words(taken)} was taken by somebody else before the engine had it: {what}")
            return taken
        return []

    def health(self) -> bool:
        """Whether it can serve."""
        return bool(self._engine.health())

    def generate(self, request: Any) -> Any:
        """Answer a request."""
        return self._engine.generate(request)

    def update_weights(self, weights: Any, version: int) -> None:
        """Take new weights."""
        self._engine.update_weights(weights, version)

    def offload(self) -> None:
        """Give the accelerators' memory up, if the engine knows how to."""
        getattr(self._engine, "offload", _nothing)()

    def onload(self) -> None:
        """Take it back."""
        getattr(self._engine, "onload", _nothing)()

    def stop(self) -> None:
        """End the server."""
        self._engine.stop()


def _nothing() -> None:
    return None


def own_ports(spec: EngineSpec) -> list[int]:
    """The ports of a process that are on its own node."""
    ports = [spec.port, spec.nccl_port, *spec.dp_attention_ports]
    if spec.node_rank == 0:
        ports.append(int(spec.dist_init_addr.rpartition(":")[2]))
    return ports


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One process of an engine before it has ports."""

    engine_rank: int
    num_engines: int
    node_rank: int
    num_nodes: int
    num_devices: int


class RolloutEngines:
    """The engines that serve. Requests go to an engine's node 0; weights and memory concern every process of it."""

    def __init__(self, group: WorkerGroup, specs: Sequence[EngineSpec], leases: Mapping[int, PortLease]) -> None:
        self.group = group
        self.specs: list[EngineSpec] = list(specs)
        """What each worker of the group was told, by rank."""
        self._leases = dict(leases)

    @property
    def num_engines(self) -> int:
        """How many engines there are."""
        return self.specs[0].num_engines

    @property
    def urls(self) -> list[str]:
        """Where each engine serves."""
        return [spec.url for spec in self.specs if spec.node_rank == 0]

    def workers_of(self, engine_rank: int) -> WorkerGroup:
        """The workers of one engine, its node 0 first."""
        return self.group.on(*self._ranks(engine_rank))

    def health(self, timeout: float = 30.0) -> list[bool]:
        """Whether each engine can serve; one whose worker is dead cannot."""
        outcomes = self.group.health().outcomes(timeout)
        by_engine: dict[int, list[bool]] = {}
        for spec, outcome in zip(self.specs, outcomes, strict=True):
            by_engine.setdefault(spec.engine_rank, []).append(outcome.is_ok and bool(outcome.value))
        return [all(by_engine[rank]) for rank in range(self.num_engines)]

    def generate(self, request: Any, engine_rank: int = 0) -> CallResult:
        """Ask one engine, without the way through HTTP."""
        return self.group[self._ranks(engine_rank)[0]].generate(request)

    def update_weights(self, weights: Any, version: int) -> CallResult:
        """Give new weights to every process of every engine."""
        return self.group.update_weights(weights, version)

    def offload(self) -> CallResult:
        """Let every engine give its accelerators' memory up."""
        return self.group.offload()

    def onload(self) -> CallResult:
        """Let every engine take it back."""
        return self.group.onload()

    def restart(self, engine_rank: int, timeout: float = HEALTH_SECONDS) -> None:
        """Start an engine anew in its place, on new ports: dead workers again, and its server."""
        ranks = self._ranks(engine_rank)
        self.check_own()
        alive = self.group.alive
        for rank in ranks:
            if rank not in alive:
                self.group.restart(rank)
        with contextlib.suppress(RoostError):
            self.group.on(*ranks).stop().wait(timeout)
        parts = {rank: _as_part(self.specs[rank]) for rank in ranks}
        dp_size = len(self.specs[ranks[0]].dp_attention_ports)
        try:
            started = _start(self.group, parts, dp_size, timeout, self._leases)
        except BaseException:
            with contextlib.suppress(RoostError):
                self.group.on(*ranks).stop().outcomes(_STOP_SECONDS)
            raise
        for rank, spec in started.items():
            self.specs[rank] = spec

    def check_own(self) -> None:
        """Refuse in a process that only attached to the engines."""
        if not self.group.is_own:
            raise ClusterError("engines can only be restarted by the process that started them")

    def close(self) -> None:
        """Stop every engine and end its workers; a process that only attached lets go of them."""
        try:
            if self.group.is_own:
                with contextlib.suppress(Exception):
                    self.group.stop().outcomes(_STOP_SECONDS)
        finally:
            self.group.close()

    def __enter__(self) -> RolloutEngines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return self.num_engines

    def _ranks(self, engine_rank: int) -> list[int]:
        found = [rank for rank, spec in enumerate(self.specs) if spec.engine_rank == engine_rank]
        if not found:
            raise ClusterError(f"there is no engine {engine_rank!r}: there are 0-{self.num_engines - 1}")
        return found


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

    An engine has one worker on each of the nodes that its accelerators are on, as they were measured.
    """
    flags = read_flags(args)
    cluster = cluster or Cluster()
    check_engine_class(engine_cls)
    slots = slots_of(cluster, pg, flags.engines_num_gpus)
    nodes = [slot.piece.node_rank for slot in slots]
    engines = engine_parts(flags.engines_num_gpus, flags.rollout_num_gpus_per_engine, nodes)
    parts = [
        _Part(
            engine_rank=rank,
            num_engines=len(engines),
            node_rank=node,
            num_nodes=len(engine),
            num_devices=sum(map(len, engine)),
        )
        for rank, engine in enumerate(engines)
        for node in range(len(engine))
    ]
    group = EngineWorker.create_group(engine_cls, tuple(engine_args), dict(engine_kwargs or {})).launch(
        cluster,
        placement_strategy=strategy_of(
            cluster, [[slots[place] for place in places] for engine in engines for places in engine]
        ),
        name=name,
        share=flags.num_gpus_per_engine if num_gpus_per_engine is None else num_gpus_per_engine,
        env_vars=env_vars,
        max_concurrency=_MAX_CALLS,
        timeout=timeout,
    )
    try:
        leases: dict[int, PortLease] = {}
        specs = _start(group, dict(enumerate(parts)), flags.dp_attention_size, health_timeout, leases)
    except BaseException:
        group.close()
        raise
    return RolloutEngines(group, [specs[rank] for rank in range(len(parts))], leases)


def _start(
    group: WorkerGroup, parts: Mapping[int, _Part], dp_size: int, timeout: float, leases: dict[int, PortLease]
) -> dict[int, EngineSpec]:
    """Lease ports for these workers and start their engines, anew with others where a stranger was quicker.

    `leases` has what they have of ports, and is kept up to date.
    """
    deadline = time.monotonic() + timeout
    specs: dict[int, EngineSpec] = {}
    waiting = sorted({part.engine_rank for part in parts.values()})
    lost: list[int] = []
    for _ in range(_MAX_TRIES):
        ranks = [rank for rank, part in parts.items() if part.engine_rank in waiting]
        _lease(group, parts, ranks, dp_size, leases)
        specs |= {rank: _spec(group, parts, rank, leases, dp_size) for rank in ranks}
        seconds = max(0.1, deadline - time.monotonic())
        taken = group.on(*ranks).map("start_engine", [specs[rank] for rank in ranks]).wait(seconds)
        lost = [port for ports in taken for port in ports]
        waiting = sorted({parts[rank].engine_rank for rank, ports in zip(ranks, taken, strict=True) if ports})
        if not waiting:
            _wait_until_healthy(group, specs, deadline, timeout)
            return specs
        # All processes of such an engine begin again: they have to agree on its ports.
        half_started = [rank for rank in parts if parts[rank].engine_rank in waiting]
        group.on(*half_started).stop().outcomes(max(0.1, deadline - time.monotonic()))
    raise ClusterError(
        f"the ports of engine {join_words(waiting)} were taken by others {_MAX_TRIES} times before they were used, "
        f"last port {join_words(lost)}",
        hint="give Cluster a port_range that nobody else uses",
    )


def _lease(
    group: WorkerGroup, parts: Mapping[int, _Part], ranks: Sequence[int], dp_size: int, leases: dict[int, PortLease]
) -> None:
    """A block of ports in a row for each worker on its own node: server, NCCL, and node 0's own beside."""
    cluster = group.cluster
    for rank in ranks:
        before = leases.get(rank)
        count = _DP_ATTENTION + dp_size if parts[rank].node_rank == 0 else _DIST_INIT
        node_rank = group.placements[group.ranks.index(rank)].cluster_node_rank
        leases[rank] = cluster.lease_ports(node_rank, count, holder=f"{group.name}:{rank}")
        if before is not None:
            cluster.release_ports(before)


def _spec(
    group: WorkerGroup, parts: Mapping[int, _Part], rank: int, leases: Mapping[int, PortLease], dp_size: int
) -> EngineSpec:
    part, lease = parts[rank], leases[rank]
    first = next(
        other for other, found in parts.items() if found.engine_rank == part.engine_rank and found.node_rank == 0
    )
    placement = group.placements[group.ranks.index(rank)]
    host = f"[{leases[first].address}]" if ":" in leases[first].address else leases[first].address
    attention = lease.ports[_DP_ATTENTION : _DP_ATTENTION + dp_size] if part.node_rank == 0 else ()
    return EngineSpec(
        engine_rank=part.engine_rank,
        num_engines=part.num_engines,
        node_rank=part.node_rank,
        num_nodes=part.num_nodes,
        cluster_node_rank=placement.cluster_node_rank,
        address=lease.address,
        devices=placement.visible_accelerators,
        num_devices=part.num_devices,
        port=lease.ports[_SERVER],
        nccl_port=lease.ports[_NCCL],
        dist_init_addr=f"{host}:{leases[first].ports[_DIST_INIT]}",
        dp_attention_ports=tuple(attention),
    )


def _as_part(spec: EngineSpec) -> _Part:
    return _Part(
        engine_rank=spec.engine_rank,
        num_engines=spec.num_engines,
        node_rank=spec.node_rank,
        num_nodes=spec.num_nodes,
        num_devices=spec.num_devices,
    )


def _wait_until_healthy(group: WorkerGroup, specs: Mapping[int, EngineSpec], deadline: float, timeout: float) -> None:
    ranks = list(specs)
    pause, longest = _POLL_SECONDS
    while True:
        seconds = max(0.1, deadline - time.monotonic())
        outcomes = group.on(*ranks).health().outcomes(seconds)
        ill = [rank for rank, outcome in zip(ranks, outcomes, strict=True) if not (outcome.is_ok and outcome.value)]
        if not ill:
            return
        if time.monotonic() >= deadline or not set(ill) <= set(group.alive):
            raise _unhealthy(group, specs, ill, timeout)
        time.sleep(pause)
        pause = min(longest, 2 * pause)


def _unhealthy(group: WorkerGroup, specs: Mapping[int, EngineSpec], ill: Sequence[int], timeout: float) -> RoostError:
    cluster = group.cluster
    cluster.logs.catch_up()
    lines = []
    for rank in ill[:4]:
        spec = specs[rank]
        path = log_file(cluster.job.run_dir.logs, f"{group.name}:{rank}")
        end = "".join(f"\n      {line}" for line in logs.read_tail(path).splitlines()[-10:])
        state = "" if rank in group.alive else ", its process is dead"
        node = cluster.nodes[spec.cluster_node_rank]
        lines.append(f"  engine {spec.engine_rank} ({group.name}:{rank} on {node}, {spec.url}){state}, log {path}{end}")
    more = [f"  and {len(ill) - 4} more"] if len(ill) > 4 else []
    who = f"{plural(len(ill), 'process', 'processes')} of the engines"
    if not set(ill) <= set(group.alive):
        return WorkerDied("\n".join([f"{who} died or was ill before all could serve:", *lines, *more]))
    first = f"{who} did not become healthy in {timeout:g} s:"
    return LaunchTimedOut(
        "\n".join([first, *lines, *more]),
        hint="see its log, or give it longer with health_timeout",
    )
