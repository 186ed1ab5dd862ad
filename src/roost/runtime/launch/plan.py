"""`plan_launch`: everything about a launch, decided as a value before Ray is asked for anything."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from roost.config.node_groups import WORKER_VARIABLES
from roost.config.topology import Topology
from roost.errors import ConfigError
from roost.placement.environment import visible_variable, worker_environment, worker_interpreter
from roost.placement.placement import Placement
from roost.placement.plan import Piece
from roost.placement.strategies import NodePlacementStrategy, PackedPlacementStrategy, PlacementStrategy
from roost.runtime.limits import LAUNCH_SECONDS
from roost.runtime.managers.job_info import JOB_VARIABLE, JobInfo
from roost.runtime.nodes.info import NodeInfo
from roost.runtime.process.environment import check_variables, join_environments, split_environment
from roost.runtime.process.identity import WorkerIdentity
from roost.runtime.process.spec import Report, WorkerSpec
from roost.runtime.reserve.occupancy import resource_of
from roost.runtime.reserve.reservation import accelerators_of, check_share


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """What the caller of `launch` asks for; ConfigError if something of it is wrong."""

    strategy: PlacementStrategy | None = None
    isolate_accelerator: bool = True
    env_vars: Mapping[str, str] = field(default_factory=dict)
    max_concurrency: int | None = None
    timeout: float = LAUNCH_SECONDS
    restarts: int = 0
    reserve: bool = True
    share: float | None = None

    def __post_init__(self) -> None:
        """Check each of them."""
        if self.max_concurrency is not None and (type(self.max_concurrency) is not int or self.max_concurrency < 1):
            raise ConfigError(f"max_concurrency is {self.max_concurrency!r}: it is a whole number, at least 1")
        if not isinstance(self.timeout, int | float) or not (self.timeout > 0 and math.isfinite(self.timeout)):
            raise ConfigError(f"timeout is {self.timeout!r}: it is a number of seconds above 0")
        if type(self.restarts) is not int or self.restarts < 0:
            raise ConfigError(f"restarts is {self.restarts!r}: it is a whole number, at least 0")
        if not isinstance(self.reserve, bool):
            raise ConfigError(f"reserve is {self.reserve!r}: it is True or False")
        if self.share is not None and not self.reserve:
            raise ConfigError("share says how reserved accelerators are shared, but reserve is False")
        check_share(self.share, "share")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """One launch: who is started where and with what, and what is reserved before."""

    name: str
    options: LaunchOptions
    specs: tuple[WorkerSpec, ...]
    """By rank."""
    shares: Mapping[Piece, float | None]
    """The accelerators to reserve, and the part of each that the group uses; None where it declares none."""

    @property
    def placements(self) -> list[Placement]:
        """Where the workers sit, by rank."""
        return [spec.identity.placement for spec in self.specs]

    @property
    def master_node(self) -> int:
        """The node on which the group leases the port where rank 0 listens."""
        return self.specs[0].node_rank


def plan_launch(
    name: str, options: LaunchOptions, topology: Topology, nodes: Sequence[NodeInfo], job: JobInfo
) -> LaunchPlan:
    """Decide one launch; PlacementError and ConfigError say what cannot be launched so."""
    placements = _place(topology, options)
    env_vars = dict(options.env_vars)
    check_variables(env_vars, taken={*WORKER_VARIABLES, *(str(visible_variable(item)) for item in placements)})
    marks = {JOB_VARIABLE: f"{job.id}/{name}"}
    specs, workers = [], Counter[Piece]()
    for placement in placements:
        node = nodes[placement.cluster_node_rank]
        accelerators = accelerators_of(placement)
        workers.update(accelerators)
        planned = worker_environment(topology, placement, len(placements))
        watched = visible_variable(placement)
        late, early = split_environment(join_environments([planned, env_vars, marks], dict(node.search_paths)))
        of_kind = [piece for piece in node.hardware if piece.type == placement.hardware_type]
        hardware = tuple(of_kind[local] for local in placement.local_hardware_ranks if local < len(of_kind))
        specs.append(
            WorkerSpec(
                identity=WorkerIdentity(
                    group_name=name,
                    placement=placement,
                    world_size=len(placements),
                    node=str(node),
                    hardware=hardware,
                ),
                ray_id=node.ray_id,
                variables=late,
                early_variables=early,
                interpreter=worker_interpreter(topology, placement),
                watched_variable=watched,
                visible=planned[watched] if watched else None,
                accelerators=tuple(piece.local_rank for piece in accelerators),
                resource=resource_of(node) if accelerators else "",
                share=options.share,
                run_dir=job.run_dir,
                keeps_events=job.keeps_events,
            )
        )
    share = options.share
    shares = {piece: None if share is None else share * count for piece, count in workers.items()}
    return LaunchPlan(name=name, options=options, specs=tuple(specs), shares=shares if options.reserve else {})


def _place(topology: Topology, options: LaunchOptions) -> list[Placement]:
    """Place the workers: by default one on each accelerator, or one on each node if there are none."""
    strategy = options.strategy
    if strategy is None:
        count = topology.num_accelerators
        strategy = PackedPlacementStrategy(0, count - 1) if count else NodePlacementStrategy(range(len(topology.nodes)))
    if not isinstance(strategy, PlacementStrategy):
        raise ConfigError(
            f"placement_strategy is {strategy!r}",
            hint='it is a PlacementStrategy, such as PackedPlacementStrategy(0, 3) or placement.get_strategy("actor")',
        )
    return strategy.get_placement(topology, isolate_accelerator=options.isolate_accelerator)


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
    return found
