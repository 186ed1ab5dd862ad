"""`WorkerSpec`: all that one worker is started with, decided before anything is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roost.config.node_groups import DeclaredHardware
from roost.config.topology import Topology
from roost.errors import ConfigError
from roost.placement.environment import visible_variable, worker_environment, worker_interpreter
from roost.placement.placement import Placement
from roost.placement.plan import Piece
from roost.placement.strategies import NodePlacementStrategy, PackedPlacementStrategy, PlacementStrategy
from roost.runtime.managers.ledgers.reservations import Slot
from roost.runtime.managers.node_manager import JOB_VARIABLE
from roost.runtime.nodes.info import NodeInfo
from roost.runtime.nodes.placement_groups import schedule_in, take_share
from roost.runtime.process.actor import Report
from roost.runtime.process.environment import join_environments, split_environment
from roost.runtime.process.identity import WorkerIdentity
from roost.runtime.reserve.holdings import resource_of
from roost.runtime.reserve.reservation import accelerators_of


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """All that is needed to start one worker in its place, the first time and again."""

    identity: WorkerIdentity
    node: NodeInfo
    variables: dict[str, str]
    """Set in the process before any code of the user's is loaded."""
    early_variables: dict[str, str]
    """Must be set when the process begins."""
    interpreter: str | None
    watched_variable: str | None
    visible: str | None
    """The planned value of the watched variable."""
    slots: tuple[Slot, ...]
    """The accelerators reserved for it; its process runs in the bundle of the first."""
    share: float | None
    """The part of its accelerators that it declared to use."""

    @property
    def address(self) -> str:
        """The worker's name."""
        return self.identity.address

    @property
    def actor_options(self) -> dict[str, Any]:
        """The options by which Ray puts the actor in its place."""
        wanted = {"env_vars": self.early_variables, "py_executable": self.interpreter}
        runtime_env = {name: value for name, value in wanted.items() if value}
        options: dict[str, Any] = {"runtime_env": runtime_env} if runtime_env else {}
        if not self.slots:
            return {**options, "scheduling_strategy": on_node(self.node)}
        if self.share is not None:
            options |= take_share(resource_of(self.node), self.share)
        return {**options, "scheduling_strategy": schedule_in(self.slots[0].group, self.slots[0].bundle)}

    def differences(self, report: Report, nodes: Sequence[NodeInfo]) -> list[str]:
        """Say what a worker reported that is not as planned, with both sides."""
        found = []
        if report.ray_id != self.node.ray_id:
            names = {node.ray_id: str(node) for node in nodes}
            really = names.get(report.ray_id, f"a node outside this job ({report.host})")
            found.append(f"it is on {really}, and planned on {self.node}")
        if self.interpreter is not None and report.interpreter != self.interpreter:
            found.append(f"it runs {report.interpreter}, and its node group says {self.interpreter}")
        if self.watched_variable is not None and report.visible != self.visible:
            found.append(f"it sees {self.watched_variable}={report.visible!r}, and planned is {self.visible!r}")
        return found


def on_node(node: NodeInfo) -> NodeAffinitySchedulingStrategy:
    """Schedule on this node, and nowhere else."""
    return NodeAffinitySchedulingStrategy(node_id=node.ray_id, soft=False)


def place_group(
    topology: Topology, strategy: PlacementStrategy | None, *, isolate_accelerator: bool
) -> list[Placement]:
    """Place the workers: by default one on each accelerator, or one on each node if there are none."""
    if strategy is None:
        count = topology.num_accelerators
        strategy = PackedPlacementStrategy(0, count - 1) if count else NodePlacementStrategy(range(len(topology.nodes)))
    if not isinstance(strategy, PlacementStrategy):
        raise ConfigError(
            f"placement_strategy is {strategy!r}",
            hint='it is a PlacementStrategy, such as PackedPlacementStrategy(0, 3) or placement.get_strategy("actor")',
        )
    return strategy.get_placement(topology, isolate_accelerator=isolate_accelerator)


def make_worker_specs(
    name: str,
    topology: Topology,
    nodes: Sequence[NodeInfo],
    placements: Sequence[Placement],
    *,
    job_id: str,
    env_vars: Mapping[str, str],
    slots: Mapping[Piece, Slot],
    share: float | None,
) -> list[WorkerSpec]:
    """Make one spec for each placement; `slots` has what is reserved, if anything is."""
    specs = []
    marks = {JOB_VARIABLE: f"{job_id}/{name}"}
    for placement in placements:
        node = nodes[placement.cluster_node_rank]
        planned = worker_environment(topology, placement, len(placements))
        watched = visible_variable(placement)
        late, early = split_environment(join_environments([planned, env_vars, marks], dict(node.search_paths)))
        specs.append(
            WorkerSpec(
                identity=WorkerIdentity(
                    group_name=name,
                    placement=placement,
                    world_size=len(placements),
                    node=str(node),
                    hardware=_hardware_of(placement, node),
                ),
                node=node,
                variables=late,
                early_variables=early,
                interpreter=worker_interpreter(topology, placement),
                watched_variable=watched,
                visible=planned[watched] if watched else None,
                slots=tuple(slots[piece] for piece in accelerators_of(placement)) if slots else (),
                share=share,
            )
        )
    return specs


def _hardware_of(placement: Placement, node: NodeInfo) -> tuple[DeclaredHardware, ...]:
    of_kind = [piece for piece in node.hardware if piece.type == placement.hardware_type]
    return tuple(of_kind[local] for local in placement.local_hardware_ranks if local < len(of_kind))
