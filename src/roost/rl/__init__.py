"""Training and rollout on one cluster, sharing accelerators or each on its own: the documents' train/rollout layer."""

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
    from roost.testing.numpy_engine import NumpyEngine, TinyPolicy

_HOME = {
    "EngineSpec": "engine",
    "InfoActor": "info",
    "Mode": "flags",
    "NumpyEngine": "numpy_engine",
    "PlacementGroups": "placement_groups",
    "RayTrainGroup": "train_group",
    "RolloutEngine": "engine",
    "RolloutEngines": "engines",
    "RolloutManager": "manager",
    "Router": "router",
    "TinyPolicy": "numpy_engine",
    "TrainRolloutFlags": "flags",
    "config_to_flags": "flags",
    "create_placement_groups": "placement_groups",
    "create_rollout_engines": "engines",
    "flags_to_config": "flags",
    "make_flags_plan": "flags",
    "read_flags": "flags",
    "sort_key": "info",
}

__all__ = [
    "EngineSpec",
    "InfoActor",
    "Mode",
    "NumpyEngine",
    "PlacementGroups",
    "RayTrainGroup",
    "RolloutEngine",
    "RolloutEngines",
    "RolloutManager",
    "Router",
    "TinyPolicy",
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
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'roost.rl' has no attribute {name!r}")
    return getattr(import_module(f"roost.rl.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
