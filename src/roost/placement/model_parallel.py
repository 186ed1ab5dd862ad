"""Placement for model-parallel jobs: an actor, a rollout, and perhaps inference and reward.

Colocated, actor and rollout share all their accelerators, and the rollout is strided so that the source ranks of both
are on the same ones (weights then move without a copy). Disaggregated, each has its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from roost.config.hardware import ACCELERATOR, BARE_NODE
from roost.config.job import ComponentConfig, ParallelSizes
from roost.config.reading import Notes
from roost.errors import PlacementError, Problem
from roost.placement.components import ComponentLayout, ComponentPlacement, ResolvedSegment, pointed, ranks_of, resolve
from roost.placement.plan import PlacementMode
from roost.placement.strategies import PackedPlacementStrategy
from roost.text import plural

_MODEL_COMPONENTS = ("actor", "rollout", "inference")


class _Place(NamedTuple):
    """Neighbouring accelerators of one node: local ranks from `start` up to but not including `stop`."""

    node_rank: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """The accelerators of one model-parallel component."""

    component: ComponentConfig
    segments: list[ResolvedSegment]
    first: int
    last: int
    places: list[_Place]

    @property
    def count(self) -> int:
        return self.last - self.first + 1

    def common(self, other: _Share) -> int:
        """Count the accelerators that both have."""
        mine = {place.node_rank: place for place in self.places}
        both = [(mine[place.node_rank], place) for place in other.places if place.node_rank in mine]
        return sum(max(0, min(a.stop, b.stop) - max(a.start, b.start)) for a, b in both)


class ModelParallelComponentPlacement(ComponentPlacement):
    """Actor, rollout and optional inference on consecutive accelerators, divided by their parallel sizes."""

    @cached_property
    def _sizes(self) -> ParallelSizes:
        return self._job.parallel_sizes()

    @property
    def placement_mode(self) -> PlacementMode:
        """Colocated if actor and rollout have the same accelerators, else disaggregated."""
        return self._mode

    @property
    def is_collocated(self) -> bool:
        """Whether actor and rollout share all their accelerators."""
        return self._mode is PlacementMode.COLLOCATED

    @property
    def is_disaggregated(self) -> bool:
        """Whether every component has its own accelerators."""
        return self._mode is PlacementMode.DISAGGREGATED

    @property
    def is_pipeline(self) -> bool:
        """Whether rollout and training can run at the same time."""
        return self.is_disaggregated

    @property
    def has_dedicated_inference(self) -> bool:
        """Whether inference has its own accelerators."""
        return "inference" in self._shares

    @property
    def actor_tp_size(self) -> int:
        """Tensor-parallel size of the actor."""
        return self._sizes.actor_tp

    @property
    def actor_pp_size(self) -> int:
        """Pipeline-parallel size of the actor."""
        return self._sizes.actor_pp

    @property
    def actor_cp_size(self) -> int:
        """Context-parallel size of the actor."""
        return self._sizes.actor_cp

    @property
    def actor_world_size(self) -> int:
        """How many accelerators the actor has."""
        return self._shares["actor"].count

    @property
    def actor_dp_size(self) -> int:
        """Data-parallel size of the actor."""
        return self.actor_world_size // (self.actor_tp_size * self.actor_pp_size * self.actor_cp_size)

    @property
    def rollout_tp_size(self) -> int:
        """Tensor-parallel size of a rollout engine."""
        return self._sizes.rollout_tp

    @property
    def rollout_pp_size(self) -> int:
        """Pipeline-parallel size of a rollout engine."""
        return self._sizes.rollout_pp

    @property
    def rollout_world_size(self) -> int:
        """How many accelerators the rollout has; its processes are `get_world_size("rollout")`."""
        return self._shares["rollout"].count

    @property
    def rollout_dp_size(self) -> int:
        """How many rollout engines there are."""
        return self.rollout_world_size // (self.rollout_tp_size * self.rollout_pp_size)

    @property
    def inference_tp_size(self) -> int:
        """Tensor-parallel size of inference; the actor's unless the config says otherwise."""
        return self._sizes.inference_tp

    @property
    def inference_pp_size(self) -> int:
        """Pipeline-parallel size of inference; the actor's unless the config says otherwise."""
        return self._sizes.inference_pp

    @property
    def inference_world_size(self) -> int:
        """How many accelerators inference has; 0 if it has none of its own."""
        return self._shares["inference"].count if self.has_dedicated_inference else 0

    @property
    def inference_dp_size(self) -> int:
        """How many complete copies of the model inference has; lint reports accelerators left over."""
        return self.inference_world_size // (self.inference_tp_size * self.inference_pp_size)

    def _lay_out(self, notes: Notes) -> dict[str, ComponentLayout]:
        self._shares: dict[str, _Share] = {}
        # A mistake may hide what decides the mode, so after one each component is checked separately.
        if not notes.problems and self._take_shares(notes):
            self._check_shares(notes)
        if notes.problems:
            self._shares = {}
        return super()._lay_out(notes)

    def _take_shares(self, notes: Notes) -> bool:
        """Find the accelerators of each model-parallel component; return false if a mistake is noted."""
        by_name = {component.name: component for component in self._job.cluster.components}
        for name in ("actor", "rollout"):
            if name not in by_name:
                message = f"a model-parallel job needs the component {name!r}"
                notes.placement(Problem(message=message, where=self._job.where_components()))
        for component in (by_name[name] for name in _MODEL_COMPONENTS if name in by_name):
            if not self._has_groups(component, notes):
                continue
            try:
                self._shares[component.name] = self._share(component)
            except PlacementError as error:
                notes.placement(*(pointed(problem, component) for problem in error.problems))
        return not notes.problems

    def _check_shares(self, notes: Notes) -> None:
        """Find the mode and check the sizes, noting mistakes."""
        with notes.catching():
            self._mode = _find_mode(self._shares, self._sizes)
            for check in (_check_actor, _check_rollout, _check_inference):
                with notes.catching():
                    check(self._shares, self._sizes)

    def _lay_out_component(self, component: ComponentConfig) -> ComponentLayout:
        share = self._shares.get(component.name)
        if share is None:
            return super()._lay_out_component(component)
        per_process = stride = 1
        if component.name == "rollout":
            # Colocated, each pipeline stage of an engine is a process, next to the actor's.
            per_process = self.rollout_tp_size * (1 if self.is_collocated else self.rollout_pp_size)
            stride = self._rollout_stride()
        parallel = {
            "actor": (self.actor_tp_size, self.actor_tp_size * self.actor_pp_size * self.actor_cp_size),
            "inference": (self.inference_tp_size, self.inference_tp_size * self.inference_pp_size),
        }
        tensor, model = parallel.get(component.name, (1, 1))
        sizes = {"stride": stride, "tensor_parallel_size": tensor, "model_parallel_size": model}
        strategy = PackedPlacementStrategy(share.first, share.last, per_process, stride, component.node_groups or None)
        layout = self._layout(component, ranks_of(share.segments), strategy, **sizes)
        _check_asked(share, layout.plan.world_size)
        return layout

    def _rollout_stride(self) -> int:
        """Return the stride that puts the source ranks of actor and rollout on the same accelerators."""
        if not self.is_collocated or self.actor_tp_size <= self.rollout_tp_size:
            return 1
        return self.actor_tp_size // self.rollout_tp_size

    def _share(self, component: ComponentConfig) -> _Share:
        space = self._topology.space(component.node_groups or None)
        what = f"component {component.name!r}"
        segments = resolve(component, space, self._too_few_nodes())
        ranges = [segment.resources for segment in segments]
        for before, after, segment in zip(ranges, ranges[1:], segments[1:], strict=False):
            if after.first != before.last + 1:
                message = f"{what} must have consecutive accelerators, and {before.last} is followed by {after.first}"
                hint = "the components of a model-parallel job take one unbroken range each"
                raise PlacementError(message, hint=hint, where=component.where(segment.segment))
        first, last = ranges[0].first, ranges[-1].last
        places: list[_Place] = []
        rank = first
        while rank <= last:
            stretch, start = space.stretch_of(rank)
            if stretch.kind != ACCELERATOR:
                there = "bare nodes" if stretch.kind == BARE_NODE else f"{stretch.kind!r} there"
                message = f"{what} needs accelerators, and {space.name} has {there}"
                raise PlacementError(message, where=component.where_group())
            end = min(last + 1, start + stretch.size)
            places.append(_Place(stretch.node_rank, rank - start, end - start))
            rank = end
        return _Share(component=component, segments=segments, first=first, last=last, places=places)


def _find_mode(shares: dict[str, _Share], sizes: ParallelSizes) -> PlacementMode:
    actor, rollout, inference = shares["actor"], shares["rollout"], shares.get("inference")
    if actor.common(rollout) == actor.count == rollout.count:
        if actor.places != rollout.places:
            raise PlacementError(
                "actor and rollout have the same accelerators, but not in the same order",
                hint="name their node groups in the same order: the source ranks of both must meet",
                where=rollout.component.where_group(),
            )
        if inference is not None:
            raise PlacementError(
                "actor and rollout share their accelerators (colocated), so inference cannot have its own",
                hint="remove 'inference', or give actor and rollout different accelerators",
                where=inference.component.where(),
            )
        return PlacementMode.COLLOCATED
    pairs = [(actor, rollout)] + ([(actor, inference), (rollout, inference)] if inference else [])
    for one, other in pairs:
        both = one.common(other)
        if both:
            raise PlacementError(
                f"components {one.component.name!r} and {other.component.name!r} share {both} of "
                f"{one.count} and {other.count} accelerators: neither colocated nor disaggregated",
                hint="give actor and rollout the same accelerators, or give every component its own",
                where=other.component.where(),
            )
    if inference and not sizes.recompute_logprobs:
        raise PlacementError(
            "inference has its own accelerators, but algorithm.recompute_logprobs is "
            + ("not set" if sizes.recompute_logprobs is None else "false"),
            hint="set algorithm.recompute_logprobs: true, or remove 'inference'",
            where=inference.component.where(),
        )
    return PlacementMode.DISAGGREGATED


def _check_asked(share: _Share, world_size: int) -> None:
    """Refuse process ranks in the config that contradict the parallel sizes."""
    explicit = [item.segment for item in share.segments if item.segment.explicit]
    asked = share.segments[-1].processes
    if explicit and asked.last + 1 != world_size:
        raise PlacementError(
            f"component {share.component.name!r} asks for {asked.last + 1} processes, but its parallel "
            f"sizes make {world_size} of {plural(share.count, 'accelerator')}",
            hint="leave the process ranks out: the parallel sizes decide them",
            where=share.component.where(explicit[0]),
        )


def _check_actor(shares: dict[str, _Share], sizes: ParallelSizes) -> None:
    _check_divides(shares["actor"], tensor=sizes.actor_tp, pipeline=sizes.actor_pp, context=sizes.actor_cp)


def _check_rollout(shares: dict[str, _Share], sizes: ParallelSizes) -> None:
    rollout = shares["rollout"]
    _check_divides(rollout, tensor=sizes.rollout_tp, pipeline=sizes.rollout_pp)
    collocated = rollout.places == shares["actor"].places
    if collocated and sizes.actor_tp > sizes.rollout_tp and sizes.actor_tp % sizes.rollout_tp:
        raise PlacementError(
            f"actor and rollout share their accelerators, and the actor's tensor-parallel size "
            f"{sizes.actor_tp} is not a multiple of the rollout's {sizes.rollout_tp}",
            hint="the source ranks of both must meet on the same accelerators",
            where=rollout.component.where(),
        )


def _check_inference(shares: dict[str, _Share], sizes: ParallelSizes) -> None:
    inference, size = shares.get("inference"), sizes.inference_tp * sizes.inference_pp
    # Explicit sizes may leave accelerators over, as in the original system; lint reports it.
    if inference is not None and (inference.count < size or not sizes.inference_is_own):
        _check_divides(inference, tensor=sizes.inference_tp, pipeline=sizes.inference_pp)


def _check_divides(share: _Share, **sizes: int) -> None:
    size = math.prod(sizes.values())
    if share.count % size:
        fits = share.count // size * size
        hint = f"take {fits} or {fits + size} accelerators" if fits else f"take {size} accelerators"
        has = f"component {share.component.name!r} has {plural(share.count, 'accelerator')}"
        product = " x ".join(f"{name} {number}" for name, number in sizes.items())
        message = f"{has}, which {product} = {size} does not divide"
        raise PlacementError(message, hint=hint, where=share.component.where())
