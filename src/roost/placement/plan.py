"""All placements of a job as one value that compares and hashes by content, and reads and writes JSON."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from roost.config.hardware import AcceleratorType
from roost.config.topology import HasTopology, Topology, topology_of
from roost.errors import ConfigError, PlacementError, RoostError
from roost.placement.environment import worker_environment
from roost.placement.placement import Piece, Placement, WorkerId, pieces_of, seat
from roost.placement.strategies import PlacementStrategy
from roost.text import join_words, plural, shorten

if TYPE_CHECKING:
    from roost.placement.diff import PlanDiff

__all__ = ["ComponentPlan", "Piece", "PlacementMode", "Plan", "PlannedStrategy", "WorkerId", "pieces_of", "seat"]

PLAN_VERSION = 1
_CONTENT = ("mode", "num_nodes", "sizes_ignored", "topology", "component_order", "components")
_PLACEMENT_FIELDS = tuple(field.name for field in fields(Placement))
_COMPONENT_FIELDS = ("node_groups", "hardware_ranks", "stride", "tensor_parallel_size", "model_parallel_size")
_SHAPE_FIELDS = ("parallel", "together", "by_count")
_TUPLES = frozenset({"node_groups", "hardware_ranks", "visible_accelerators", "local_hardware_ranks"})


class PlacementMode(Enum):
    """How the components of a job share the hardware."""

    COLLOCATED = "collocated"
    """Actor and rollout on the same accelerators."""
    DISAGGREGATED = "disaggregated"
    """Each component on its own accelerators."""
    HYBRID = "hybrid"
    """Any component on any hardware."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentPlan:
    """The placements of one component, in rank order, and how they were made."""

    name: str
    node_groups: tuple[str, ...]
    hardware_ranks: tuple[int, ...]
    placements: tuple[Placement, ...]
    stride: int = 1
    """The distance between the accelerators of one process, if it is strided on purpose."""
    tensor_parallel_size: int = 1
    """How many consecutive ranks are one tensor-parallel group, if known."""
    model_parallel_size: int = 1
    """How many consecutive ranks hold one copy of the model, if known."""
    parallel: tuple[tuple[str, int], ...] = ()
    """How it is split, as another framework calls it: `("TP", 4), ("DP", 2)`, in the order of its ranks."""
    together: int = 1
    """How many consecutive ranks work as one, such as an engine: pictures draw them as one."""
    by_count: bool = False
    """Whether only the number of accelerators is asked for, and Ray chooses which."""

    def __post_init__(self) -> None:
        if not self.placements:
            raise PlacementError(f"component {self.name!r} has no workers")

    @property
    def world_size(self) -> int:
        """How many workers the component has."""
        return len(self.placements)

    @property
    def shape(self) -> str:
        """How it is split, in words: `TP 4 · 2 engines`."""
        words = (
            plural(size, name.removesuffix("s")) if name.islower() else f"{name} {size}" for name, size in self.parallel
        )
        return " · ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which worker of a job goes where, on which topology.

    >>> from roost import make_plan
    >>> job = {"cluster": {"num_nodes": 1, "component_placement": {"actor": "0-3"}}}
    >>> plan = make_plan(job, Topology.from_shorthand("1x4"))
    >>> plan.environment("actor", 2)["CUDA_VISIBLE_DEVICES"]
    '2'
    >>> Plan.from_json(plan.to_json()) == plan
    True
    """

    topology: Topology
    components: tuple[ComponentPlan, ...]
    num_nodes: int | None = None
    """The number of nodes in the config."""
    mode: PlacementMode = PlacementMode.HYBRID
    sizes_ignored: str | None = None
    """Why the job's parallel sizes do not decide the placement, if it has some."""

    @property
    def names(self) -> list[str]:
        """The names of the components, in the order of the config."""
        return [component.name for component in self.components]

    def component(self, name: str) -> ComponentPlan:
        """Return a component by its name."""
        found = next((item for item in self.components if item.name == name), None)
        if found is None:
            names = [repr(item.name) for item in self.components]
            raise PlacementError(f"the plan has no component {name!r}", hint=f"it has {join_words(names)}")
        return found

    def placement(self, component: str, rank: int) -> Placement:
        """Return the placement of one worker."""
        placements = self.component(component).placements
        if not isinstance(rank, int) or not 0 <= rank < len(placements):
            last = len(placements) - 1
            has = "only rank 0" if last == 0 else f"ranks 0-{last}"
            raise PlacementError(f"component {component!r} has no rank {shorten(str(rank))}: it has {has}")
        return placements[rank]

    def get_strategy(self, component: str) -> PlannedStrategy:
        """Return a strategy that places a component exactly as this plan does, on the same hardware."""
        return PlannedStrategy(plan=self, component=self.component(component).name)

    def environment(self, component: str, rank: int) -> dict[str, str]:
        """Return exactly the variables that a worker gets, apart from what only a running job knows."""
        placement = self.placement(component, rank)
        return worker_environment(self.topology, placement, self.component(component).world_size)

    def diff(self, other: Plan) -> PlanDiff:
        """Return what changes from this plan to `other`."""
        from roost.placement.diff import diff_plans  # planning and launching do without it

        return diff_plans(self, other)

    def __str__(self) -> str:
        """Return the picture of `roost plan`, without colours: 80 columns wide."""
        return str(_picture("terminal").draw_terminal(_picture("grid").make_grid(self)).plain)

    def _repr_svg_(self) -> str:
        """Return the picture that a notebook shows."""
        return str(_picture("svg").draw_svg(self, _picture("grid").make_grid(self)))

    def occupants(self) -> dict[Piece, list[WorkerId]]:
        """Return the workers on each piece of hardware in use, in order of components and ranks."""
        found: dict[Piece, list[WorkerId]] = {}
        for component in self.components:
            for placement in component.placements:
                worker = WorkerId(component.name, placement.rank)
                for piece in pieces_of(placement):
                    found.setdefault(piece, []).append(worker)
        return found

    def only(self, names: Iterable[str]) -> Plan:
        """Return the plan with these components only."""
        known, wanted = set(self.names), set(names)
        for name in sorted(wanted - known):
            # Says which there are.
            self.component(name)
        return replace(self, components=tuple(item for item in self.components if item.name in wanted))

    @property
    def hash(self) -> str:
        """A hash of everything in the plan, the same on every machine and in every run."""
        return _hash(self._content())

    def to_dict(self, *, only: Iterable[str] | None = None) -> dict[str, Any]:
        """Return the plan as JSON has it; `docs/reference/plan-json.md` describes it.

        With `only` it is a part of a plan, which cannot be read back: some components, with the hash of the whole.
        """
        content = self._content()
        out = {"version": PLAN_VERSION, "hash": _hash(content), **content}
        if only is None:
            return out
        kept = self.only(only).names
        components = {name: content["components"][name] for name in kept}
        return {**out, "partial": True, "component_order": kept, "components": components}

    def to_json(self, indent: int | None = 2, *, only: Iterable[str] | None = None) -> str:
        """Return the plan, or a part of it, as JSON text."""
        return json.dumps(self.to_dict(only=only), indent=indent, ensure_ascii=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Read what `to_dict` wrote; ConfigError if the plan was edited since."""
        if not isinstance(data, Mapping) or "components" not in data or "version" not in data:
            raise ConfigError("this is not a plan: it lacks 'version' or 'components'")
        if data["version"] != PLAN_VERSION:
            raise ConfigError(f"the plan has version {data['version']!r}, and this Roost reads {PLAN_VERSION}")
        if data.get("partial"):
            raise ConfigError("this is a part of a plan, made with --component", hint="save the whole plan")
        try:
            plan = cls(
                topology=Topology.from_dict(data["topology"]),
                components=tuple(_read_component(name, data["components"][name]) for name in data["component_order"]),
                num_nodes=data["num_nodes"],
                mode=PlacementMode(data["mode"]),
                sizes_ignored=data["sizes_ignored"],
            )
            edited = _hash({key: data[key] for key in _CONTENT}) != data.get("hash")
        except RoostError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ConfigError(f"this plan cannot be read: {type(error).__name__}: {shorten(str(error), 200)}") from None
        if edited:
            raise ConfigError(
                "this plan's hash does not fit its content: it was edited after it was made",
                hint="change the job and plan again",
            )
        return plan

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"this plan is not JSON: {shorten(str(error), 200)}") from None
        return cls.from_dict(data)

    def _content(self) -> dict[str, Any]:
        return {
            "mode": self.mode.value,
            "num_nodes": self.num_nodes,
            "sizes_ignored": self.sizes_ignored,
            "topology": self.topology.to_dict(),
            # The components have an order, which tools need not keep in a JSON object.
            "component_order": self.names,
            "components": {item.name: _write_component(item) for item in self.components},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStrategy(PlacementStrategy):
    """The placements of a component, as a plan has them."""

    plan: Plan
    component: str

    def get_placement(self, cluster: HasTopology, isolate_accelerator: bool = True) -> list[Placement]:
        """Return the plan's placements; PlacementError if one of their nodes has changed since."""
        topology = topology_of(cluster)
        there, planned = topology.nodes, self.plan.topology.nodes
        placements = list(self.plan.component(self.component).placements)
        if placements[0].isolate_accelerator and not isolate_accelerator:
            raise PlacementError(
                f"component {self.component!r} was planned with isolated accelerators",
                hint="plan with isolate_accelerator=False, or leave it out here",
            )
        for label in {placement.node_group_label for placement in placements}:
            try:
                topology.group(label)
            except PlacementError:
                raise PlacementError(
                    f"component {self.component!r} was planned on node group {label!r}, which does not exist",
                    hint="make it with the same config: Cluster(cluster_cfg=config.cluster)",
                ) from None
        for rank in sorted({placement.cluster_node_rank for placement in placements}):
            if rank >= len(there) or there[rank].devices != planned[rank].devices:
                offers = join_words(there[rank].devices) or "none" if rank < len(there) else ""
                is_now = f"offers {offers}" if offers else "does not exist"
                planned_on = f"node {rank} with the accelerators {join_words(planned[rank].devices) or 'none'}"
                raise PlacementError(
                    f"component {self.component!r} was planned on {planned_on}, and that node {is_now}",
                    hint="plan again on the cluster as it is now",
                )
        return placements


def _picture(module: str) -> Any:
    """Load a module of pictures, which are made from plans: planning and launching do without them."""
    return importlib.import_module(f"roost.render.{module}")


def _write_component(component: ComponentPlan) -> dict[str, Any]:
    placements = [_write(placement, _PLACEMENT_FIELDS) for placement in component.placements]
    shape: dict[str, Any] = {}
    if component.parallel or component.together > 1 or component.by_count:
        shape = {"parallel": [list(pair) for pair in component.parallel], **_write(component, _SHAPE_FIELDS[1:])}
    return {
        "world_size": component.world_size,
        **_write(component, _COMPONENT_FIELDS),
        **shape,
        "placements": placements,
    }


def _write(item: object, names: tuple[str, ...]) -> dict[str, Any]:
    values = [(name, getattr(item, name)) for name in names]
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values}


def _read_component(name: str, data: Mapping[str, Any]) -> ComponentPlan:
    placements = [_read(item, _PLACEMENT_FIELDS) for item in data["placements"]]
    return ComponentPlan(
        name=name,
        placements=tuple(
            Placement(**{**item, "accelerator_type": AcceleratorType(item["accelerator_type"])}) for item in placements
        ),
        **_read(data, _COMPONENT_FIELDS),
        **_read_shape(data),
    )


def _read_shape(data: Mapping[str, Any]) -> dict[str, Any]:
    """Read what only the roles of other frameworks have."""
    if not any(name in data for name in _SHAPE_FIELDS):
        return {}
    parallel = tuple((str(name), int(size)) for name, size in data["parallel"])
    return {"parallel": parallel, "together": int(data["together"]), "by_count": bool(data["by_count"])}


def _read(data: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: tuple(data[name]) if name in _TUPLES else data[name] for name in names}


def _hash(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
