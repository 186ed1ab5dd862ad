"""From the section `weight_sync` of a job and the job's plan to the plan of its weights."""

from __future__ import annotations

import math
from pathlib import Path

from roost.config.weight_sync import RuleConfig, SideConfig, WeightSyncConfig
from roost.errors import ConfigError
from roost.placement.placement import Piece, pieces_of
from roost.placement.plan import Plan
from roost.weights.layout import Layout, TensorSpec
from roost.weights.plan import SyncPlan, make_sync_plan, places_of
from roost.weights.rules import At, Fuse, Numbered, Rule, Split, Tie, make_layout
from roost.weights.safetensors import read_safetensors


def plan_weights(config: WeightSyncConfig, plan: Plan, folder: Path) -> SyncPlan:
    """Plan what a section says; a path of a model is relative to `folder`."""
    if config.model is not None:
        specs = read_safetensors(folder / config.model)
    else:
        specs = {name: TensorSpec(shape, dtype) for name, (dtype, shape) in config.tensors.items()}
    source, target = (_layout(side, specs, plan) for side in (config.source, config.target))
    return make_sync_plan(source, target, places_of(plan))


def bytes_by_piece(weights: SyncPlan, plan: Plan) -> tuple[dict[Piece, float], dict[Piece, float]]:
    """Return how many bytes leave and reach each piece of hardware; those of a worker are spread over its own."""
    sent: dict[Piece, float] = {}
    received: dict[Piece, float] = {}
    traffic = weights.bytes_by_worker()
    for component in plan.components:
        for placement in component.placements:
            pieces = pieces_of(placement)
            for found, size in zip(
                (sent, received), traffic.get(f"{component.name}:{placement.rank}", ()), strict=False
            ):
                for piece in pieces:
                    found[piece] = found.get(piece, 0.0) + size / len(pieces)
    return sent, received


def _layout(side: SideConfig, specs: dict[str, TensorSpec], plan: Plan) -> Layout:
    workers = next(len(one.placements) for one in plan.components if one.name == side.component)
    axes = dict(side.axes) or {"workers": workers}
    if math.prod(axes.values()) != workers:
        product = " x ".join(f"{name} {size}" for name, size in axes.items())
        raise ConfigError(
            f"{side.component!r} has {workers} workers in the plan, and axes of {product}",
            hint="the sizes of the axes multiply to the number of workers",
        )
    if side.dtype is not None:
        specs = {name: TensorSpec(spec.shape, side.dtype) for name, spec in specs.items()}
    return make_layout(specs, side.component, axes, [_rule(rule) for rule in side.rules])


def _rule(rule: RuleConfig) -> Rule:
    values = rule.values
    if rule.kind == "split":
        return Split(values["axis"], values["dim"], values["names"], values.get("units", 0))
    if rule.kind == "at":
        return At(values["axis"], values["at"], values["names"])
    if rule.kind == "numbered":
        return Numbered(values["axis"], values["numbered"], values["count"])
    if rule.kind == "fused":
        return Fuse(values["fused"], values["of"])
    return Tie(values["tied"], values["to"])
