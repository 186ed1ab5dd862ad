"""`plan_launch`: everything about a launch, decided as a value before Ray is asked for anything."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roost.config.node_groups import WORKER_VARIABLES
from roost.config.ranks import format_ranks
from roost.config.run import BINDS, MOST_CONCURRENCY
from roost.config.topology import Topology
from roost.errors import ConfigError
from roost.placement.environment import visible_variable, worker_environment, worker_interpreter
from roost.placement.plan import Piece
from roost.placement.strategies import NodePlacementStrategy, PackedPlacementStrategy, PlacementStrategy
from roost.runtime.limits import LAUNCH_SECONDS
from roost.runtime.managers.job_info import JOB_VARIABLE, JobInfo
from roost.runtime.managers.ledgers.reservations import Slot
from roost.runtime.nodes.info import NodeInfo
from roost.runtime.process.environment import build_environment, check_variables
from roost.runtime.process.identity import WorkerIdentity
from roost.runtime.process.spec import Report, WorkerSpec
from roost.runtime.reserve.occupancy import resource_of
from roost.runtime.reserve.pool import PoolStrategy
from roost.runtime.reserve.reservation import accelerators_of, check_share
from roost.text import join_words


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """One launch: who is started where and with what, and what is reserved before."""

    name: str
    specs: tuple[WorkerSpec, ...]
    """By rank."""
    shares: Mapping[Piece, float | None]
    """The accelerators to reserve, and the part of each that the group uses; None where it declares none."""
    seats: tuple[Slot, ...]
    """The ones that a pool has reserved, which the launch does not reserve again."""
    max_concurrency: int | None
    timeout: float
    restarts: int


def plan_launch(
    name: str,
    topology: Topology,
    nodes: Sequence[NodeInfo],
    job: JobInfo,
    *,
    strategy: PlacementStrategy | None = None,
    isolate_accelerator: bool = True,
    env_vars: Mapping[str, str] | None = None,
    max_concurrency: int | None = None,
    timeout: float = LAUNCH_SECONDS,
    restarts: int = 0,
    reserve: bool = True,
    share: float | None = None,
    bind: str = "numa",
) -> LaunchPlan:
    """Decide one launch; PlacementError and ConfigError say what cannot be launched so.

    Without a strategy there is one worker on each accelerator, or one on each node if there are none.
    """
    if max_concurrency is not None and (
        type(max_concurrency) is not int or not 1 <= max_concurrency <= MOST_CONCURRENCY
    ):
        raise ConfigError(
            f"max_concurrency is {max_concurrency!r}: it is a whole number from 1 to {MOST_CONCURRENCY:,}",
            hint="Ray starts a thread for each call at a time",
        )
    if not isinstance(timeout, int | float) or not (timeout > 0 and math.isfinite(timeout)):
        raise ConfigError(f"timeout is {timeout!r}: it is a number of seconds above 0")
    if type(restarts) is not int or restarts < 0:
        raise ConfigError(f"restarts is {restarts!r}: it is a whole number, at least 0")
    if not isinstance(reserve, bool):
        raise ConfigError(f"reserve is {reserve!r}: it is True or False")
    if share is not None and not reserve:
        raise ConfigError("share says how reserved accelerators are shared, but reserve is False")
    check_share(share, "share")
    if not isinstance(bind, str) or bind not in BINDS:
        raise ConfigError(f"bind is {bind!r}: it is {join_words(list(map(repr, BINDS)), last='or')}")
    seats: tuple[Slot, ...] = ()
    if isinstance(strategy, PoolStrategy):
        if not reserve:
            raise ConfigError("reserve is False, but the seats of a pool are reserved", hint="leave it out")
        if None not in (share, strategy.share):
            raise ConfigError("share is given twice: to pool.strategy and to launch", hint="leave one of them out")
        share, seats = strategy.share if share is None else share, strategy.pool.slots
    if strategy is None:
        count = topology.num_accelerators
        strategy = PackedPlacementStrategy(0, count - 1) if count else NodePlacementStrategy(range(len(topology.nodes)))
    if not isinstance(strategy, PlacementStrategy):
        raise ConfigError(
            f"placement_strategy is {strategy!r}",
            hint='it is a PlacementStrategy, such as PackedPlacementStrategy(0, 3) or placement.get_strategy("actor")',
        )
    placements = strategy.get_placement(topology, isolate_accelerator=isolate_accelerator)
    own = dict(env_vars or {})
    check_variables(own, taken={*WORKER_VARIABLES, *(str(visible_variable(item)) for item in placements)})
    specs, workers = [], Counter[Piece]()
    for placement in placements:
        node = nodes[placement.cluster_node_rank]
        accelerators = accelerators_of(placement)
        workers.update(accelerators)
        planned = worker_environment(topology, placement, len(placements))
        watched = visible_variable(placement)
        layers = [planned, own, {JOB_VARIABLE: f"{job.id}/{name}"}]
        late, early = build_environment(layers, dict(node.search_paths))
        cores, numa = _near(node, accelerators) if bind == "numa" else ((), None)
        of_kind = [piece for piece in node.hardware if piece.type == placement.hardware_type]
        specs.append(
            WorkerSpec(
                identity=WorkerIdentity(
                    group_name=name,
                    placement=placement,
                    world_size=len(placements),
                    node=str(node),
                    hardware=tuple(of_kind[local] for local in placement.local_hardware_ranks if local < len(of_kind)),
                ),
                ray_id=node.ray_id,
                variables=late,
                early_variables=early,
                interpreter=worker_interpreter(topology, placement),
                watched_variable=watched,
                visible=planned[watched] if watched else None,
                accelerators=tuple(piece.local_rank for piece in accelerators),
                resource=resource_of(node) if accelerators else "",
                share=share,
                run_dir=job.run_dir,
                keeps_events=job.keeps_events,
                cores=cores,
                numa=numa,
            )
        )
    return LaunchPlan(
        name=name,
        specs=tuple(specs),
        seats=seats,
        shares={piece: None if share is None else share * count for piece, count in workers.items() if reserve},
        max_concurrency=max_concurrency,
        timeout=timeout,
        restarts=restarts,
    )


def _near(node: NodeInfo, accelerators: Sequence[Piece]) -> tuple[tuple[int, ...], int | None]:
    """Return the cores near these accelerators, and their NUMA node if they have one; nothing if that is not known."""
    at = {node.accelerators[piece.local_rank].numa for piece in accelerators}
    if None in at:
        return (), None
    cores = sorted(core for number, own in node.numa if number in at for core in own)
    return tuple(cores), at.pop() if cores and len(at) == 1 else None


def differences(spec: WorkerSpec, report: Report, nodes: Sequence[NodeInfo]) -> list[str]:
    """Say what a worker reported that is not as planned, with both sides."""
    found = []
    if report.ray_id != spec.ray_id:
        names = {node.ray_id: str(node) for node in nodes}
        really = names.get(report.ray_id, f"a node outside this job ({report.host})")
        found.append(f"it is on {really}, and planned on {spec.identity.node}")
    if spec.interpreter is not None and report.interpreter != spec.interpreter:
        found.append(f"it runs {report.interpreter}, and its node group says {spec.interpreter}")
    if spec.watched_variable is not None and report.visible != spec.visible:
        found.append(f"it sees {spec.watched_variable}={report.visible!r}, and planned is {spec.visible!r}")
    # Empty after its constructor: an engine may choose its cores itself.
    if report.cores and report.cores != spec.cores:
        found.append(f"it runs on cores {format_ranks(report.cores)}, and planned are {format_ranks(spec.cores)}")
    return found
