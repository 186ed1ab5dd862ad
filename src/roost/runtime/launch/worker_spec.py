"""Where each worker of a group goes and what it gets there: decided before anything is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roost.config.node_groups import WORKER_VARIABLES, DeclaredHardware
from roost.config.topology import Topology
from roost.errors import ConfigError
from roost.placement.environment import visible_variable, worker_environment, worker_interpreter
from roost.placement.placement import Placement
from roost.placement.strategies import NodePlacementStrategy, PackedPlacementStrategy, PlacementStrategy
from roost.runtime.managers.ledgers.reservations import Slot
from roost.runtime.nodes.info import NodeInfo
from roost.runtime.nodes.placement_groups import schedule_in, take_share
from roost.runtime.process.actor import Report, Setup
from roost.runtime.process.environment import check_variables, join_environments, split_environment
from roost.runtime.process.identity import WorkerIdentity
from roost.runtime.reserve.occupancy import resource_of
from roost.runtime.runs.run_dir import RunDir


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """All that is needed to start one worker in its place, once or again."""

    identity: WorkerIdentity
    node: NodeInfo
    variables: dict[str, str]
    """Set in the process, before anything of the user's is loaded."""
    early_variables: dict[str, str]
    """Those that must be there when the process begins."""
    interpreter: str | None
    watched_variable: str | None
    visible: str | None
    """What the watched variable has to say."""
    slots: tuple[Slot, ...] = ()
    """What was reserved for it: its process is in the first of them."""
    share: float | None = None
    """The part of its accelerators that it declared to use."""

    @property
    def schedule(self) -> dict[str, Any]:
        """The options by which Ray puts its process in its place, and what it takes there in Ray's accounts."""
        if not self.slots:
            return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=self.node.ray_id, soft=False)}
        taken = {} if self.share is None else take_share(resource_of(self.node), self.share)
        return {"scheduling_strategy": schedule_in(self.slots[0].group, self.slots[0].bundle), **taken}

    @property
    def address(self) -> str:
        """The worker's name."""
        return self.identity.address

    def setup(self, run_dir: RunDir, ports_to_try: tuple[int, ...] = (), *, is_restart: bool) -> Setup:
        """What the process is told first."""
        return Setup(
            identity=self.identity,
            variables=self.variables,
            run_dir=run_dir,
            is_restart=is_restart,
            watched_variable=self.watched_variable,
            ports_to_try=ports_to_try,
        )


def place_group(
    topology: Topology, strategy: PlacementStrategy | None, *, isolate_accelerator: bool
) -> list[Placement]:
    """Where the workers go: with no strategy one on each accelerator, or on each node where there is none."""
    if strategy is None:
        count = topology.num_accelerators
        strategy = PackedPlacementStrategy(0, count - 1) if count else NodePlacementStrategy(range(len(topology.nodes)))
    if not isinstance(strategy, PlacementStrategy):
        raise ConfigError(
            f"placement_strategy is {strategy!r}",
            hint='it is a PlacementStrategy, such as PackedPlacementStrategy(0, 3) or placement.get_strategy("actor")',
        )
    return strategy.get_placement(topology, isolate_accelerator=isolate_accelerator)


def make_seats(
    name: str,
    topology: Topology,
    placements: Sequence[Placement],
    nodes: Sequence[NodeInfo],
    env_vars: Mapping[str, str],
    marks: Mapping[str, str],
) -> list[Seat]:
    """One seat for each placement; `env_vars` are the caller's, `marks` what is set in every process of the job."""
    seats = []
    for placement in placements:
        node = nodes[placement.cluster_node_rank]
        planned = worker_environment(topology, placement, len(placements))
        watched = visible_variable(placement)
        check_variables(env_vars, taken={*WORKER_VARIABLES, str(watched)})
        joined = join_environments([planned, env_vars, marks], dict(node.search_paths))
        late, early = split_environment(joined)
        identity = WorkerIdentity(
            group_name=name,
            placement=placement,
            world_size=len(placements),
            node=str(node),
            hardware=_hardware_of(placement, node),
        )
        seats.append(
            Seat(
                identity=identity,
                node=node,
                variables=late,
                early_variables=early,
                interpreter=worker_interpreter(topology, placement),
                watched_variable=watched,
                visible=planned[watched] if watched else None,
            )
        )
    return seats


def differences(seat: Seat, report: Report, nodes: Sequence[NodeInfo]) -> list[str]:
    """What a worker said of itself that is not as planned, both sides of it."""
    found = []
    if report.ray_id != seat.node.ray_id:
        names = {node.ray_id: str(node) for node in nodes}
        really = names.get(report.ray_id, f"a node that is not of this job ({report.host})")
        found.append(f"it is on {really}, and planned on {seat.node}")
    if seat.interpreter is not None and report.interpreter != seat.interpreter:
        found.append(f"it runs {report.interpreter}, and its node group says {seat.interpreter}")
    if seat.watched_variable is not None and report.visible != seat.visible:
        found.append(f"it sees {seat.watched_variable}={report.visible!r}, and planned is {seat.visible!r}")
    return found


def _hardware_of(placement: Placement, node: NodeInfo) -> tuple[DeclaredHardware, ...]:
    of_kind = [piece for piece in node.hardware if piece.type == placement.hardware_type]
    return tuple(of_kind[local] for local in placement.local_hardware_ranks if local < len(of_kind))
