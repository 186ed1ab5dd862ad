"""Turn the config's `component_placement` into a strategy for each component."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from roost.config.hardware import ACCELERATOR
from roost.config.job import ClusterConfig, ComponentConfig, JobConfig, read_job_draft
from roost.config.ranks import MAX_PROCESSES, RankRange, Segment
from roost.config.reading import Notes, pair_hint
from roost.config.rules import RulesConfig
from roost.config.run import RunDraft, WorkerConfig, read_run_draft
from roost.config.topology import RankSpace, Topology, topology_of
from roost.config.values import variable_problem
from roost.errors import ConfigError, PlacementError, Problem
from roost.placement.environment import visible_variable
from roost.placement.placement import Placement
from roost.placement.plan import ComponentPlan, PlacementMode, Plan
from roost.placement.strategies import FlexiblePlacementStrategy, NodePlacementStrategy, PlacementStrategy
from roost.text import join_words, plural


class ResolvedSegment(NamedTuple):
    """A segment with `all` expanded: ranks that exist, and the processes on them."""

    resources: RankRange
    processes: RankRange
    segment: Segment


class ComponentLayout(NamedTuple):
    """One component, resolved against the hardware: its strategy, and the plan that it makes."""

    strategy: PlacementStrategy
    plan: ComponentPlan


class ComponentPlacement:
    """Place every component of a config on a cluster.

    >>> from roost import Topology
    >>> config = {"cluster": {"num_nodes": 1, "component_placement": {"actor,inference": "0-7"}}}
    >>> placement = ComponentPlacement(config, Topology.from_shorthand("1x8"))
    >>> placement.components, placement.get_world_size("actor")
    (['actor', 'inference'], 8)
    """

    def __init__(self, config: object, cluster: object, *, isolate_accelerator: bool = True) -> None:
        draft = read_job_draft(config)
        if not isinstance(draft, RunDraft) and any(one.count is not None for one in draft.job.cluster.components):
            # The rules decide which accelerators these get.
            draft = read_run_draft(draft)
        notes = draft.notes.copy()
        self._job = draft.job
        self._isolate_accelerator = isolate_accelerator
        self._topology = _join_groups(topology_of(cluster), draft.job, notes)
        self._layouts = self._lay_out(notes)
        counted = [one for one in draft.job.cluster.components if one.count is not None]
        rules = draft.rules if isinstance(draft, RunDraft) else None
        if (counted or rules is not None) and not notes.problems:
            self._obey(rules, counted, notes)
        if isinstance(draft, RunDraft):
            self._check_variables(draft.workers, notes)
        notes.raise_if_any()

    @property
    def topology(self) -> Topology:
        """The hardware of the plan, with the groups of inventory and config."""
        return self._topology

    @property
    def config(self) -> ClusterConfig:
        """The `cluster` section of the config."""
        return self._job.cluster

    @property
    def placement_mode(self) -> PlacementMode:
        """How the components share the hardware."""
        return PlacementMode.HYBRID

    @property
    def components(self) -> list[str]:
        """The names of the components, in the order of the config."""
        return list(self._layouts)

    def get_hardware_ranks(self, component_name: str) -> list[int]:
        """Return the hardware ranks of a component, counted over its node groups (node ranks on bare nodes)."""
        return list(self._layout_of(component_name).plan.hardware_ranks)

    def get_world_size(self, component_name: str) -> int:
        """Return how many processes a component has."""
        return self._layout_of(component_name).plan.world_size

    def get_strategy(self, component_name: str) -> PlacementStrategy:
        """Return the strategy that places a component."""
        return self._layout_of(component_name).strategy

    def get_placement(self, component_name: str) -> list[Placement]:
        """Return the placements of a component, in rank order."""
        return list(self._layout_of(component_name).plan.placements)

    def plan(self) -> Plan:
        """Return all placements as one value."""
        return Plan(
            topology=self._topology,
            components=tuple(layout.plan for layout in self._layouts.values()),
            num_nodes=self._job.cluster.num_nodes,
            mode=self.placement_mode,
        )

    def _layout_of(self, component_name: str) -> ComponentLayout:
        try:
            return self._layouts[component_name]
        except KeyError:
            raise PlacementError(
                f"the job has no component {component_name!r}",
                hint=f"it has {join_words([repr(name) for name in self._layouts])}",
            ) from None

    def _lay_out(self, notes: Notes) -> dict[str, ComponentLayout]:
        """Lay out every component; note and leave out components that cannot be placed."""
        layouts: dict[str, ComponentLayout] = {}
        for component in self._job.cluster.components:
            if not self._has_groups(component, notes) or component.count is not None:
                continue
            try:
                layouts[component.name] = self._lay_out_component(component)
            except PlacementError as error:
                notes.placement(*(pointed(problem, component) for problem in error.problems))
        return layouts

    def _obey(self, rules: RulesConfig | None, counted: Sequence[ComponentConfig], notes: Notes) -> None:
        """Check the rules about domains, and place the components that say how many accelerators they want."""
        from roost.placement.rules import Chosen, RankedPlacementStrategy, RuleBook  # few jobs need it

        book = RuleBook(self._topology, rules, self._job.cluster.num_nodes)
        sizes = {name: layout.plan.world_size for name, layout in self._layouts.items()}
        notes.placement(*book.check(sizes | {one.name: one.count or 0 for one in counted}))
        if notes.problems:
            return
        exact = self.plan()
        notes.placement(*book.check_exact(exact))
        pieces = (piece for piece in exact.occupants() if piece.kind == ACCELERATOR)
        chosen = (
            book.choose(counted, {(piece.node_rank, piece.local_rank) for piece in pieces}) if counted else Chosen()
        )
        notes.placement(*chosen.problems)
        for component in counted if not chosen.problems else ():
            ranks = chosen.ranks[component.name]
            strategy = RankedPlacementStrategy(hardware_ranks=ranks, node_groups=component.node_groups)
            self._layouts[component.name] = self._layout(component, sorted(ranks), strategy)
        # In the order of the config.
        self._layouts = {one.name: self._layouts[one.name] for one in self._job.cluster.components
                         if one.name in self._layouts}  # fmt: skip

    def _check_variables(self, workers: Mapping[str, WorkerConfig], notes: Notes) -> None:
        """Note the variables that say which devices a worker sees, where the plan sets them."""
        for name in workers.keys() & self._layouts.keys():
            worker, placements = workers[name], self._layouts[name].plan.placements
            for variable in worker.env_vars.keys() & {visible_variable(placement) for placement in placements}:
                message, hint = variable_problem(variable, "", taken=[variable]) or ("", "")
                where = worker.where_variable(variable)
                notes.take(ConfigError(Problem(message=f"worker {name!r}: {message}", hint=hint, where=where)))

    def _has_groups(self, component: ComponentConfig, notes: Notes) -> bool:
        """Return whether the component's node groups exist and can be combined; note it if not."""
        # First each group, then all of them together.
        for label in (*component.node_groups, None):
            try:
                self._topology.space(label or component.node_groups or None)
            except PlacementError as error:
                # The reader has already noted a group that the job declares wrongly.
                if label is None or self._job.where_group(label) is None:
                    notes.placement(pointed(error.problems[0], component).at(component.where_group(label)))
                return False
        return True

    def _lay_out_component(self, component: ComponentConfig) -> ComponentLayout:
        labels = component.node_groups or None
        space = self._topology.space(labels)
        segments = resolve(component, space, self._too_few_nodes())
        if space.is_bare:
            nodes = [node for segment in segments for node in _share_nodes(segment, component)]
            return self._layout(component, ranks_of(segments), NodePlacementStrategy(nodes, labels))
        processes = [ranks for segment in segments for ranks in _share_hardware(segment, component)]
        return self._layout(component, ranks_of(segments), FlexiblePlacementStrategy(processes, labels))

    def _too_few_nodes(self) -> str:
        """Return a hint if ranks are missing because the cluster is smaller than the job says."""
        wanted, there = self._job.cluster.num_nodes, self._topology.num_nodes
        if wanted is None or wanted <= there:
            return ""
        return f"num_nodes is {wanted}, but the given cluster has {plural(there, 'node')}"

    def _layout(
        self, component: ComponentConfig, ranks: Iterable[int], strategy: PlacementStrategy, **sizes: Any
    ) -> ComponentLayout:
        plan = ComponentPlan(
            name=component.name,
            node_groups=component.node_groups,
            hardware_ranks=tuple(ranks),
            placements=tuple(strategy.get_placement(self._topology, self._isolate_accelerator)),
            **sizes,
        )
        return ComponentLayout(strategy, plan)


class HybridComponentPlacement(ComponentPlacement):
    """Components on any sets of hardware, as in embodied jobs."""


def _join_groups(topology: Topology, job: JobConfig, notes: Notes) -> Topology:
    """Add the job's node groups to the topology; note and leave out groups that do not fit."""
    try:
        return topology.with_groups(job.cluster.node_groups)
    except ConfigError:
        for group in job.cluster.node_groups:
            try:
                topology = topology.with_groups([group])
            except ConfigError as error:
                notes.take(ConfigError(problem.at(job.where_group(group.label)) for problem in error.problems))
        return topology


def resolve(component: ComponentConfig, space: RankSpace, hint: str = "") -> list[ResolvedSegment]:
    """Resolve the component's segments against the hardware; `hint` explains ranks that do not exist."""
    found: list[ResolvedSegment] = []
    for segment in component.segments:
        resources = segment.resources or RankRange(0, space.count - 1)
        try:
            space.check([resources.first, resources.last], f"component {component.name!r}")
        except PlacementError as error:
            hint = hint or _range_hint(component, resources, space)
            where = component.where(segment, last=True)
            raise PlacementError(error.problems[0].message, hint=hint, where=where) from None
        processes = segment.processes or RankRange(0, len(resources) - 1)
        if len(processes) > MAX_PROCESSES:
            raise PlacementError(f"component {component.name!r} has {len(processes)} processes")
        found.append(ResolvedSegment(resources, processes, segment))
    return found


def ranks_of(segments: Iterable[ResolvedSegment]) -> Iterator[int]:
    """Yield the hardware ranks of segments."""
    return (rank for segment in segments for rank in segment.resources.as_range())


def _range_hint(component: ComponentConfig, resources: RankRange, space: RankSpace) -> str:
    """Return what to write instead of a range that exceeds the hardware."""
    if not space.count:
        return ""
    if resources.first < space.count:
        return f"ranges include both ends; write {RankRange(resources.first, space.count - 1)}"
    value = component.source.value
    return pair_hint(value.scalar if value.kind == "scalar" else None) or "ranks count from 0"


def _share_hardware(segment: ResolvedSegment, component: ComponentConfig) -> Iterator[range]:
    """Yield the hardware of each process of a segment: several pieces each, or one piece for several."""
    resources, processes = segment.resources, segment.processes
    pieces, count = len(resources), len(processes)
    if pieces % count and count % pieces:
        raise PlacementError(
            f"component {component.name!r}: {plural(count, 'process', 'processes')} ({processes}) on "
            f"{pieces} pieces of hardware ({resources}): neither number divides the other",
            hint=_even_hint(pieces, count),
            where=component.where(segment.segment),
        )
    each, share = max(1, pieces // count), max(1, count // pieces)
    starts = (resources.first + index // share * each for index in range(count))
    return (range(start, start + each) for start in starts)


def _share_nodes(segment: ResolvedSegment, component: ComponentConfig) -> Iterator[int]:
    """Yield the node of each process of a segment, spread evenly; the first nodes take one more."""
    resources, processes = segment.resources, segment.processes
    nodes, count = len(resources), len(processes)
    if nodes > count:
        raise PlacementError(
            f"component {component.name!r}: {plural(count, 'process', 'processes')} ({processes}) on "
            f"{nodes} nodes ({resources}): a process never has two nodes",
            hint=f"name {plural(count, 'node rank')}, or {nodes} processes",
            where=component.where(segment.segment),
        )
    each, more = divmod(count, nodes)
    return (resources.first + index for index in range(nodes) for _ in range(each + 1 if index < more else each))


def _even_hint(pieces: int, count: int) -> str:
    if count > pieces:
        return f"take {count // pieces * pieces} or {(count // pieces + 1) * pieces} processes"
    fits = [number for number in range(1, pieces + 1) if pieces % number == 0] if pieces <= 10_000 else []
    close = sorted(fits, key=lambda number: abs(number - count))[:2]
    return f"take {join_words(sorted(close), last='or')} processes" if close else ""


def pointed(problem: Problem, component: ComponentConfig) -> Problem:
    """Return the problem with the component's name and the place of its placement."""
    if problem.where is not None:
        return problem
    ranges = {item.resources.as_range(): item for item in component.segments if item.resources}
    segment = next((item for ranks, item in ranges.items() if problem.ranks and problem.ranks[0] in ranks), None)
    named = f"component {component.name!r}"
    message = problem.message if named in problem.message else f"{named}: {problem.message}"
    return replace(problem, message=message, where=component.where(segment))
