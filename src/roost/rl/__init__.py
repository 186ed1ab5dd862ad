"""Training and rollout on one cluster, colocated or disaggregated: the documents' train/rollout layer."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roost.rl.engine import EngineSpec, RolloutEngine
    from roost.rl.engines import RolloutEngines, create_rollout_engines
    from roost.rl.flags import (
        Mode,
        TrainRolloutFlags,
        config_to_flags,
        flags_to_config,
        make_flags_plan,
        read_flags,
    )
    from roost.rl.info import InfoActor, sort_key
    from roost.rl.manager import RolloutManager
    from roost.rl.placement_groups import PlacementGroups, create_placement_groups
    from roost.rl.router import Router
    from roost.rl.train_group import RayTrainGroup

_HOMES = {
    "engine": ("EngineSpec", "RolloutEngine"),
    "engines": ("RolloutEngines", "create_rollout_engines"),
    "flags": ("Mode", "TrainRolloutFlags", "config_to_flags", "flags_to_config", "make_flags_plan", "read_flags"),
    "info": ("InfoActor", "sort_key"),
    "manager": ("RolloutManager",),
    "placement_groups": ("PlacementGroups", "create_placement_groups"),
    "router": ("Router",),
    "train_group": ("RayTrainGroup",),
}

__all__ = [
    "EngineSpec",
    "InfoActor",
    "Mode",
    "PlacementGroups",
    "RayTrainGroup",
    "RolloutEngine",
    "RolloutEngines",
    "RolloutManager",
    "Router",
    "TrainRolloutFlags",
    "config_to_flags",
    "create_placement_groups",
    "create_rollout_engines",
    "flags_to_config",
    "make_flags_plan",
    "read_flags",
    "sort_key",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"roost.rl.{home}"), name)
    raise AttributeError(f"module 'roost.rl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
