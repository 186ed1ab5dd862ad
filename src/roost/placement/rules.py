"""The rules of a job about domains: check exact ranks, choose those of components that are placed by count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

from roost.config.hardware import ACCELERATOR
from roost.config.job import ComponentConfig
from roost.config.ranks import format_ranks
from roost.config.rules import Mesh, Rule, RulesConfig
from roost.config.topology import HasTopology, Topology, topology_of
from roost.errors import Problem
from roost.placement.domains import LABELS, NODE, Place, domains_of, label_of
from roost.placement.fit import write_ranks
from roost.placement.near import Demand, UndecidedError, solve
from roost.placement.placement import Placement
from roost.placement.plan import Plan
from roost.placement.strategies import PlacementStrategy, place
from roost.text import join_words, plural

_NO_RULES = RulesConfig(meshes={}, rules=())


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedPlacementStrategy(PlacementStrategy):
    """One process on each of these hardware ranks, in this order."""

    hardware_ranks: tuple[int, ...]
    node_groups: tuple[str, ...]

    def get_placement(self, cluster: HasTopology, isolate_accelerator: bool = True) -> list[Placement]:
        topology = topology_of(cluster)
        space = topology.space(self.node_groups or None)
        return place(topology, space, ((rank,) for rank in self.hardware_ranks), isolate_accelerator)


def broken(rules: RulesConfig, plan: Plan, *, preferred: bool) -> Iterator[tuple[Rule, str]]:
    """Yield the rules that a plan breaks, all that must hold or all that are preferred, and how it breaks them."""
    domains: dict[str, dict[Place, str | None]] = {}
    for rule in rules.rules:
        if rule.component in plan.names and rule.is_preferred == preferred:
            if rule.level not in domains:
                domains[rule.level] = domains_of(plan.topology, rule.level)
            placements = plan.component(rule.component).placements
            if said := _breaks(rule, rules.meshes.get(rule.component), placements, domains[rule.level]):
                yield rule, said


def _breaks(rule: Rule, mesh: Mesh | None, placements: Sequence[Placement], domains: Mapping[Place, str | None]) -> str:
    """Say how a component breaks a rule; nothing if it does not."""
    of = []
    for item in placements:
        local = item.local_hardware_ranks if item.hardware_type == ACCELERATOR else ()
        of.append({domains[item.cluster_node_rank, one] for one in local or (-1,)})
    if rule.least:
        found = set().union(*of) - {None}
        return "" if len(found) >= rule.least else f"{rule.component} is on {_named(rule.level, found)}"
    for ranks in _groups(rule, mesh, len(of)):
        together = set().union(*(of[rank] for rank in ranks))
        if None in together or len(together) > 1:
            nodes = sorted({placements[rank].cluster_node_rank for rank in ranks})
            bare = sorted({placements[rank].cluster_node_rank for rank in ranks if None in of[rank]})
            lack = f", and {_nodes(bare)} without a label for it" if bare else ""
            ranks_text = f"{rule.component}:{format_ranks(sorted(ranks))}"
            return f"{ranks_text} is on {_named(rule.level, together - {None})} ({_nodes(nodes)}){lack}"
    return ""


def _nodes(ranks: Sequence[int]) -> str:
    return f"{'node' if len(ranks) == 1 else 'nodes'} {format_ranks(ranks)}"


def _named(level: str, domains: set[str | None]) -> str:
    return f"{level} {join_words(sorted(map(str, domains)))}" if domains else f"no {level}"


def _groups(rule: Rule, mesh: Mesh | None, count: int) -> list[list[int]]:
    """Return the ranks that a rule keeps together: those that differ in its axes alone."""
    if not rule.axes or mesh is None:
        return [list(range(count))]
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(count):
        outside, rest = [], rank
        for axis, size in reversed(mesh.axes):
            rest, at = divmod(rest, size)
            outside += [] if axis in rule.axes else [at]
        found.setdefault(tuple(outside), []).append(rank)
    return list(found.values())


class _Wanted(Protocol):
    """The wishes of components under these rules, and with fewer workers of some."""

    def __call__(self, rules: Sequence[Rule], counts: Mapping[str, int] | None = None) -> list[Demand]: ...


class Chosen(NamedTuple):
    """Hardware ranks by component, over its node groups; or why there are none."""

    ranks: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    problems: tuple[Problem, ...] = ()


class RuleBook:
    """The rules of a job on a topology."""

    def __init__(self, topology: Topology, rules: RulesConfig | None, num_nodes: int | None) -> None:
        self._topology = topology
        self._rules = rules or _NO_RULES
        self._nodes = min(num_nodes or topology.num_nodes, topology.num_nodes)
        self._places = [
            (rank, local)
            for rank, node in enumerate(topology.nodes[: self._nodes])
            for local in range(len(node.accelerators))
        ]
        levels = dict.fromkeys(rule.level for rule in self._rules.rules)
        self._domains = {level: domains_of(topology, level) for level in levels}

    def check(self, sizes: Mapping[str, int]) -> list[Problem]:
        """Return what is wrong with meshes and levels, for components with so many workers."""
        found = []
        for name, mesh in self._rules.meshes.items():
            count = sizes.get(name, mesh.count)
            if count != mesh.count:
                axis, rest = mesh.axes[0][0], mesh.count // mesh.axes[0][1]
                hint = f"write {axis}: {count // rest}" if count % rest == 0 else f"take {rest} workers for each {axis}"
                message = f"the mesh of {name!r} is {mesh}, and the component has {plural(count, 'worker')}"
                found.append(Problem(message=message, hint=hint, where=mesh.where))
        for rule in self._rules.rules:
            if rule.level != NODE and label_of(self._topology, rule.level) is None and not rule.is_preferred:
                known = join_words([rule.level, *LABELS.get(rule.level, ())], last="or")
                there = sorted({key for node in self._topology.nodes for key, _ in node.labels})
                has = f"; the labels there are {join_words(there)}" if there else "; no node has any label"
                found.append(
                    Problem(
                        message=f"{rule.text!r}: no node and no accelerator has a label for {rule.level}{has}",
                        hint=f"label them {known}, or write {NODE}, whose domains are the nodes",
                        where=rule.where,
                    )
                )
        return found

    def check_exact(self, plan: Plan) -> Iterator[Problem]:
        """Yield the rules that exact ranks break, with ranks that would obey."""
        for rule, said in broken(self._rules, plan, preferred=False):
            component = plan.component(rule.component)
            taken = {
                (item.cluster_node_rank, local)
                for other in plan.components
                if other.name != rule.component
                for item in other.placements
                for local in item.local_hardware_ranks
            }
            hint = "name ranks of one domain, or write prefer" if not rule.least else "name ranks of more domains"
            if all(len(item.local_hardware_ranks) == 1 for item in component.placements) and not component.node_groups:
                demand = self._demand(component.name, component.world_size, None, taken, self._musts(rule.component))
                if (found := self._try([demand])) and (text := self._text(found[component.name])):
                    hint = f"{component.name}: {text} would obey"
            yield Problem(message=f"{rule.text!r} does not hold: {said}", hint=hint, where=rule.where)

    def choose(self, components: Sequence[ComponentConfig], taken: set[Place]) -> Chosen:
        """Choose accelerators for components that are placed by count, among those that are not taken.

        Preferred rules hold where that is possible, those written first before others.
        """
        names = {component.name for component in components}
        musts = [rule for rule in self._rules.rules if rule.component in names and not rule.is_preferred]
        prefers = [rule for rule in self._rules.rules if rule.component in names and rule.is_preferred]

        def wanted(rules: Sequence[Rule], counts: Mapping[str, int] | None = None) -> list[Demand]:
            return [
                self._demand(one.name, (counts or {}).get(one.name, one.count or 0), one, taken, rules)
                for one in components
            ]

        try:
            found = self._solve(wanted([*musts, *prefers])) if prefers else None
        except UndecidedError:
            found = None
        try:
            kept = list(musts)
            if found is None:
                found = self._solve(wanted(musts))
                for rule in prefers if found is not None else ():
                    if (better := self._try(wanted([*kept, rule]))) is not None:
                        kept, found = [*kept, rule], better
            if found is None:
                return Chosen({}, (self._clash(components, musts, wanted, taken),))
        except UndecidedError:
            names_text = join_words([one.name for one in components])
            message = f"no ranks for {names_text} were found in a second of trying, and none are known to be impossible"
            where = components[0].where()
            return Chosen({}, (Problem(message=message, hint="name ranks for one of them", where=where),))
        spaces = {one.name: self._topology.space(one.node_groups or None) for one in components}
        ranks = {
            name: tuple(spaces[name].rank_of(*self._places[at], ACCELERATOR) for at in own)
            for name, own in found.items()
        }
        return Chosen(ranks, ())

    def _musts(self, name: str) -> list[Rule]:
        return [rule for rule in self._rules.rules if rule.component == name and not rule.is_preferred]

    def _solve(self, demands: Sequence[Demand]) -> dict[str, list[int]] | None:
        return solve(demands, {level: [own[one] for one in self._places] for level, own in self._domains.items()})

    def _try(self, demands: Sequence[Demand]) -> dict[str, list[int]] | None:
        """Solve, where giving up is as good as finding nothing."""
        try:
            return self._solve(demands)
        except UndecidedError:
            return None

    def _is_impossible(self, demands: Sequence[Demand]) -> bool:
        try:
            return self._solve(demands) is None
        except UndecidedError:
            return False

    def _demand(
        self, name: str, count: int, component: ComponentConfig | None, taken: set[Place], rules: Sequence[Rule]
    ) -> Demand:
        """Return what a component wants; with fewer workers than its mesh has, the first axis is shorter."""
        mesh = self._rules.meshes.get(name, Mesh(axes=(("", count),)))
        inner = tuple(size for _, size in mesh.axes[1:])
        sizes = (count // max(1, mesh.count // mesh.axes[0][1]), *inner)
        axes = [axis for axis, _ in mesh.axes]
        keeps: dict[str, frozenset[int]] = {}
        for rule in rules:
            if rule.component == name and not rule.least:
                own = frozenset(axes.index(axis) for axis in rule.axes) if rule.axes else frozenset(range(len(axes)))
                keeps[rule.level] = keeps.get(rule.level, frozenset()) | own
        spreads = tuple((rule.level, rule.least) for rule in rules if rule.component == name and rule.least)
        groups = component.node_groups if component is not None else ()
        stretches = self._topology.space(groups or None).stretches
        nodes = {one.node_rank for one in stretches if one.kind == ACCELERATOR}
        free = (at for at, spot in enumerate(self._places) if spot[0] in nodes and spot not in taken)
        return Demand(name, sizes, keeps, spreads, frozenset(free))

    def _text(self, found: Sequence[int]) -> str | None:
        space = self._topology.space()
        return write_ranks([[space.rank_of(*self._places[at], ACCELERATOR)] for at in found])

    def _clash(
        self, components: Sequence[ComponentConfig], musts: Sequence[Rule], wanted: _Wanted, taken: set[Place]
    ) -> Problem:
        """Return the fewest rules that cannot hold together, what they meet, and the nearest that works."""
        free = len(frozenset[int]().union(*(one.allowed for one in wanted([]))))
        asked = join_words([f"{one.name} {one.count}" for one in components])
        if self._is_impossible(wanted([])):
            message = f"{asked} by count, and {plural(free, 'accelerator')} of {self._nodes} nodes are free for them"
            return Problem(
                message=message, hint="take fewer, more nodes, or other node groups", where=components[0].where()
            )
        clash = list(musts)
        for rule in musts:
            rest = [other for other in clash if other is not rule]
            if self._is_impossible(wanted(rest)):
                clash = rest
        both = len(clash) > 1
        message = f"{join_words([repr(rule.text) for rule in clash])} cannot hold" + (" together" if both else "")
        message += f" for {asked}: {'; '.join(self._facts(clash, taken))}"
        return Problem(message=message, hint=self._nearest(components, musts, clash, wanted), where=clash[0].where)

    def _facts(self, clash: Sequence[Rule], taken: set[Place]) -> Iterator[str]:
        """Yield for each level of a clash how many accelerators are free in each domain, and what has no label."""
        for level in dict.fromkeys(rule.level for rule in clash):
            free: dict[str | None, list[int]] = {}
            for spot in self._places:
                if spot not in taken:
                    free.setdefault(self._domains[level][spot], []).append(spot[0])
            bare = sorted(set(free.pop(None, ())))
            parts = [
                f"{name} has {len(own)} ({_nodes(sorted(set(own)))})"
                for name, own in sorted(free.items(), key=lambda item: -len(item[1]))
            ]
            more = f" and {len(parts) - 4} more with at most as many" if len(parts) > 4 else ""
            lack = f", {_nodes(bare)} without a label" if bare else ""
            yield f"free by {level}: {', '.join(parts[:4])}{more}{lack}"

    def _nearest(
        self, components: Sequence[ComponentConfig], musts: Sequence[Rule], clash: Sequence[Rule], wanted: _Wanted
    ) -> str:
        """Return the largest mesh that would obey, or the rule without which there is a plan."""
        for one in components:
            mesh = self._rules.meshes.get(one.name)
            if not any(rule.component == one.name for rule in clash):
                continue
            axis, size = mesh.axes[0] if mesh else ("count", one.count or 0)
            unit = (one.count or 0) // size
            low, high = 0, size - 1
            while low < high:
                middle = (low + high + 1) // 2
                is_enough = self._try(wanted(musts, {one.name: middle * unit})) is not None
                low, high = (middle, high) if is_enough else (low, middle - 1)
            if low:
                count = f", so count: {low * unit}," if mesh else ""
                return f"{one.name} with {axis}: {low}{count} would obey"
        for rule in clash:
            found = self._try(wanted([other for other in musts if other is not rule]))
            if found is not None:
                texts = {name: self._text(own) for name, own in found.items()}
                where = ", ".join(f"{name}: {text}" for name, text in texts.items() if text)
                return f"without {rule.text!r} it is possible" + (f": {where}" if where else "")
        return ""
