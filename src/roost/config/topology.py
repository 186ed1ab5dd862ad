"""The hardware of a cluster as a value: nodes, their accelerators, declared hardware, node groups.

>>> topology = Topology.from_shorthand("2x8")
>>> topology.space().locate(11)
Spot(node_rank=1, local_rank=3, kind='accelerator', label='cluster')
>>> topology.space().rank_of(1, 3)
11
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from roost.config.hardware import ACCELERATOR, BARE_NODE, AcceleratorType
from roost.config.node_groups import CLUSTER, NODE, RESERVED, EnvConfig, NodeGroup, declared_twice
from roost.errors import ConfigError, PlacementError, Problem
from roost.text import did_you_mean, join_words, shorten


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One accelerator: its vendor's type, its model, its memory in bytes.

    `device` is what the visible-devices variable calls it, if that is not its index on the node: a node
    started with `CUDA_VISIBLE_DEVICES=3,1` has the devices 3 and 1, in this order.
    """

    type: AcceleratorType = AcceleratorType.NVIDIA
    model: str | None = None
    memory: int | None = None
    device: str | None = None
    labels: tuple[tuple[str, str], ...] = ()
    """Labels of its own, which go before those of its node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine. Its rank is its index in `Topology.nodes`."""

    accelerators: tuple[Accelerator, ...] = ()
    name: str | None = None
    address: str | None = None
    labels: tuple[tuple[str, str], ...] = ()
    cpus: int | None = None
    memory: int | None = None

    @property
    def accelerator_type(self) -> AcceleratorType:
        """The type of the node's accelerators; NONE if it has none."""
        return self.accelerators[0].type if self.accelerators else AcceleratorType.NONE

    @property
    def devices(self) -> tuple[str, ...]:
        """The name of each accelerator in the visible-devices variable, by local rank."""
        return tuple(item.device or str(local) for local, item in enumerate(self.accelerators))

    def accelerator_types(self) -> list[str]:
        """Return the types of the accelerators; a node of a topology has at most one."""
        return sorted({item.type for item in self.accelerators})

    def doubled_devices(self) -> list[str]:
        """Return the devices that two accelerators claim."""
        return sorted(device for device, count in Counter(self.devices).items() if count > 1)


class Spot(NamedTuple):
    """Where one hardware rank is."""

    node_rank: int
    local_rank: int
    kind: str
    label: str


class Stretch(NamedTuple):
    """The hardware of one kind on one node, as one group sees it: consecutive hardware ranks."""

    label: str
    node_rank: int
    kind: str
    size: int


class RankSpace:
    """The hardware ranks of one or several node groups, in the order named.

    Both directions are fast: a binary search from rank to place, a lookup from place to rank.
    """

    __slots__ = ("_by_place", "_starts", "count", "labels", "stretches")

    def __init__(self, labels: tuple[str, ...], stretches: Sequence[Stretch]) -> None:
        self.labels: tuple[str, ...] = labels
        self.stretches: tuple[Stretch, ...] = tuple(stretches)
        self.count: int
        *self._starts, self.count = accumulate((item.size for item in stretches), initial=0)
        places = ((item.node_rank, item.kind) for item in stretches)
        self._by_place = dict(zip(places, self._starts, strict=True))

    @property
    def is_bare(self) -> bool:
        """Whether the ranks are node ranks, with no hardware behind them."""
        return all(item.kind == BARE_NODE for item in self.stretches)

    @property
    def name(self) -> str:
        """The groups as messages name them: `node group 'a800'`."""
        word = "node group" if len(self.labels) == 1 else "node groups"
        return f"{word} {join_words([repr(label) for label in self.labels])}"

    @property
    def unit(self) -> str:
        """The thing that a rank counts: `node rank` or `hardware rank`."""
        return "node rank" if self.is_bare else "hardware rank"

    def stretch_of(self, rank: int) -> tuple[Stretch, int]:
        """Return the stretch that holds a rank, and its first rank; `rank` must be below `count`."""
        index = bisect_right(self._starts, rank) - 1
        return self.stretches[index], self._starts[index]

    def locate(self, rank: int) -> Spot:
        """Return the node and local rank of a hardware rank."""
        self.check([rank])
        stretch, start = self.stretch_of(rank)
        return Spot(stretch.node_rank, rank - start, stretch.kind, stretch.label)

    def rank_of(self, node_rank: int, local_rank: int, kind: str | None = None) -> int:
        """Return the hardware rank of a node and local rank; `kind` is needed only if a node has several."""
        if kind is None:
            kinds = {item.kind for item in self.stretches}
            kind = kinds.pop() if len(kinds) == 1 else ACCELERATOR
        start = self._by_place.get((node_rank, kind))
        if start is None or not 0 <= local_rank < self.stretch_of(start)[0].size:
            raise PlacementError(f"{self.name} has no {kind} {local_rank} on node rank {node_rank}")
        return start + local_rank

    def check(self, ranks: Sequence[int], who: str = "the placement") -> None:
        """Raise PlacementError if one of these ascending ranks does not exist."""
        if not ranks or (ranks[0] >= 0 and ranks[-1] < self.count):
            return
        outside = ranks[0] if ranks[0] < 0 else next(rank for rank in reversed(ranks) if rank >= self.count)
        has = "which has" if len(self.labels) == 1 else "which have"
        there = "none" if not self.count else "only 0" if self.count == 1 else f"0-{self.count - 1}"
        message = f"{who} asks for {self.unit} {outside} of {self.name}, {has} {there}"
        raise PlacementError(Problem(message=message, ranks=(outside,)))


@dataclass(slots=True)
class _Cache:
    """A topology's groups by label, their rank spaces and the hardware of each node, computed once."""

    groups: dict[str, NodeGroup] = field(default_factory=dict)
    spaces: dict[tuple[str, ...], RankSpace] = field(default_factory=dict)
    env_configs: dict[str, dict[int, EnvConfig]] = field(default_factory=dict)
    declared: dict[int, Counter[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Nodes in the order of their ranks, and the node groups over them."""

    nodes: tuple[Node, ...]
    groups: tuple[NodeGroup, ...] = ()
    _cache: _Cache = field(default_factory=_Cache, init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        if not isinstance(self.nodes, tuple) or not isinstance(self.groups, tuple) or not self.nodes:
            raise ConfigError("a topology has a tuple of nodes, at least one, and a tuple of node groups")
        checked: set[int] = set()
        for rank, node in enumerate(self.nodes):
            # A large cluster has few kinds of node.
            if id(node.accelerators) in checked:
                continue
            checked.add(id(node.accelerators))
            if len(types := node.accelerator_types()) > 1:
                raise ConfigError(f"node {rank} has accelerators of several types: {', '.join(types)}")
            if twice := node.doubled_devices():
                raise ConfigError(f"node {rank} has two accelerators with the device {', '.join(twice)}")
        declared: dict[tuple[str, int], str] = {}
        for group in self.groups:
            if group.label in self._cache.groups or group.label in RESERVED:
                raise ConfigError(f"the node group label {group.label!r} is declared twice, or reserved")
            self._cache.groups[group.label] = group
            if group.node_ranks[-1] >= len(self.nodes):
                has = "only 0" if len(self.nodes) == 1 else f"0-{len(self.nodes) - 1}"
                raise ConfigError(
                    f"node group {group.label!r} names node rank {group.node_ranks[-1]}, but the cluster has {has}",
                    hint="plan on more nodes, or change the group's node_ranks",
                )
            if problem := declared_twice(group, declared):
                raise ConfigError(problem[0], hint=problem[1])

    @classmethod
    def from_shorthand(cls, text: str) -> Topology:
        """Read `2x8`, or `4x8:H100,2x4:4090,1x0`: nodes x accelerators : model."""
        # The readers make topologies, so this module loads them only when it is asked to read.
        from roost.config.inventory import read_shorthand

        return read_shorthand(text)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Topology:
        """Read the inventory format from a dict."""
        from roost.config.inventory import read_inventory

        return read_inventory(data)

    @classmethod
    def from_file(cls, path: str | Path) -> Topology:
        """Read an inventory file, YAML or JSON."""
        from roost.config.inventory import read_inventory_file

        return read_inventory_file(path)

    def to_dict(self) -> dict[str, Any]:
        """Return the inventory format; `Topology.from_dict(t.to_dict()) == t`."""
        from roost.config.inventory import write_inventory

        return write_inventory(self)

    @property
    def topology(self) -> Topology:
        """Itself: a topology can be used in place of a cluster."""
        return self

    @property
    def num_nodes(self) -> int:
        """How many nodes there are."""
        return len(self.nodes)

    @property
    def num_accelerators(self) -> int:
        """How many accelerators there are on all nodes."""
        return sum(len(node.accelerators) for node in self.nodes)

    def group(self, label: str) -> NodeGroup:
        """Return a node group by its label; the reserved ones hold all nodes."""
        found = self._cache.groups.get(label)
        if found is None and label in RESERVED:
            everywhere = tuple(range(len(self.nodes)))
            found = NodeGroup(label=label, node_ranks=everywhere, ignore_hardware=label == NODE)
            self._cache.groups[label] = found
        if found is None:
            known = [group.label for group in self.groups] + list(RESERVED)
            close = did_you_mean(label, known)
            hint = f"did you mean {close!r}?" if close else f"there are {join_words([repr(item) for item in known])}"
            raise PlacementError(f"there is no node group {shorten(label)!r}", hint=hint)
        return found

    def env_config(self, label: str, node_rank: int) -> EnvConfig | None:
        """Return the environment that a group gives its workers on a node, if any."""
        by_node = self._cache.env_configs.get(label)
        if by_node is None:
            by_node = {rank: item for item in self.group(label).env_configs for rank in item.node_ranks}
            self._cache.env_configs[label] = by_node
        return by_node.get(node_rank)

    def declared_on(self, node_rank: int) -> dict[str, int]:
        """Count the pieces of each declared kind on a node."""
        if not self._cache.declared:
            for item in (item for group in self.groups for item in group.hardware):
                self._cache.declared.setdefault(item.node_rank, Counter())[item.type] += 1
        return dict(self._cache.declared.get(node_rank, {}))

    def with_groups(self, groups: Iterable[NodeGroup]) -> Topology:
        """Return the same hardware with more groups; a label may come twice if both groups are equal."""
        mine = {group.label: group for group in self.groups}
        new = [group for group in groups if mine.get(group.label) != group]
        if twice := [group.label for group in new if group.label in mine]:
            message = f"node group {twice[0]!r} is in the job and in the inventory, and they differ"
            raise ConfigError(message, hint="declare it in one of the two")
        return replace(self, groups=(*self.groups, *new)) if new else self

    def space(self, labels: str | Sequence[str] | None = None) -> RankSpace:
        """Return the hardware ranks of a group, of several in the order named, or of the cluster.

        A label may itself be a list in text, as in YAML: `"a800,4090"`.
        """
        names = split_labels(labels) or (CLUSTER,)
        found = self._cache.spaces.get(names)
        if found is None:
            stretches = [stretch for label in names for stretch in self._stretches(self.group(label))]
            found = self._cache.spaces[names] = _make_space(names, stretches)
        return found

    def node_space(self, labels: str | Sequence[str] | None = None) -> RankSpace:
        """Return the nodes of the groups as bare nodes, whatever hardware they have."""
        names = split_labels(labels) or (CLUSTER,)
        bare = [Stretch(label, rank, BARE_NODE, 1) for label in names for rank in self.group(label).node_ranks]
        return _make_space(names, bare)

    def _stretches(self, group: NodeGroup) -> list[Stretch]:
        if group.hardware:
            counts = Counter(item.node_rank for item in group.hardware)
            kind = group.hardware[0].type
            return [Stretch(group.label, rank, kind, count) for rank, count in counts.items()]
        if not group.ignore_hardware:
            sizes = [(rank, len(self.nodes[rank].accelerators)) for rank in group.node_ranks]
            if found := [Stretch(group.label, rank, ACCELERATOR, size) for rank, size in sizes if size]:
                return found
        return [Stretch(group.label, rank, BARE_NODE, 1) for rank in group.node_ranks]


def _make_space(names: tuple[str, ...], stretches: Sequence[Stretch]) -> RankSpace:
    """Make a rank space; PlacementError if one piece would have two ranks, or bare nodes mix with hardware."""
    seen: dict[tuple[int, str], str] = {}
    for stretch in stretches:
        other = seen.setdefault((stretch.node_rank, stretch.kind), stretch.label)
        if other != stretch.label:
            what = "hold" if stretch.kind == BARE_NODE else f"hold the {stretch.kind} hardware of"
            raise PlacementError(
                f"node groups {other!r} and {stretch.label!r} both {what} node rank "
                f"{stretch.node_rank}, which would have two ranks",
                hint="name groups that do not overlap",
            )
    space = RankSpace(names, stretches)
    kinds = {item.kind for item in stretches}
    if BARE_NODE in kinds and len(kinds) > 1:
        bare = sorted({item.label for item in stretches if item.kind == BARE_NODE})
        raise PlacementError(
            f"{space.name} cannot be used together: {join_words([repr(item) for item in bare])} "
            f"has bare nodes and the rest has hardware",
            hint="a component takes either hardware or nodes",
        )
    return space


class HasTopology(Protocol):
    """A cluster, live or planned: anything with a topology."""

    @property
    def topology(self) -> Topology: ...


def topology_of(cluster: object) -> Topology:
    """Return the topology of a cluster, or a topology itself."""
    found = getattr(cluster, "topology", None)
    if isinstance(found, Topology):
        return found
    raise ConfigError(
        f"a placement needs a Topology or something that has one, not a {type(cluster).__name__}",
        hint='for example Topology.from_shorthand("2x8")',
    )


def split_labels(labels: str | int | Sequence[str] | None) -> tuple[str, ...]:
    """Split `"a800, 4090"` or `["a800", "4090"]` into labels; None has none."""
    if labels is None:
        return ()
    parts = [labels] if isinstance(labels, str | int) else list(labels) if isinstance(labels, Iterable) else []
    if not parts or not all(isinstance(part, str | int) for part in parts):
        raise PlacementError("a node group is named by its label, or by a list of labels")
    names = [name.strip() for part in parts for name in str(part).split(",")]
    if not all(names):
        raise PlacementError("a node group's label is empty")
    for name in names:
        if names.count(name) > 1:
            raise PlacementError(f"node group {name!r} is named twice")
    return tuple(names)
