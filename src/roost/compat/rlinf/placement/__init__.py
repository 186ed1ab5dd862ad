"""RLinf's strategies and component placements; it stands for `rlinf.utils.placement`, too."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

from roost.compat.rlinf.hardware import seen
from roost.compat.rlinf.refused import refused
from roost.errors import ConfigError, PlacementError
from roost.placement import components, model_parallel, strategies
from roost.placement.placement import Placement as Placement
from roost.placement.strategies import PlacementStrategy as PlacementStrategy

_WORDS = {
    "are on nodes": "they must be on the same node",
    "asks for": "it is out of range",
    "names a hardware rank twice": "they must be unique",
    "hardware_ranks_list is empty": "it must not be empty",
    "is named twice": "Resource ranks must be unique",
    "process ranks jump": "Process ranks must be in ascending order",
    "needs the component 'actor'": "Actor GPUs must be specified",
    "component 'inference' has": "Inference TP size does not fit",
}
"""By a part of our messages, what RLinf says, for code that looks for it."""


class MisplacedError(PlacementError, IndexError):
    """A broken rule of a placement, as any of the errors that RLinf raises for it."""


@contextmanager
def _in_their_words() -> Iterator[None]:
    try:
        yield
    except (ConfigError, PlacementError) as error:
        raise MisplacedError(_translated(error)) from None


def _translated(error: ConfigError | PlacementError) -> list[Any]:
    said = [
        (problem, [theirs for ours, theirs in _WORDS.items() if ours in problem.message]) for problem in error.problems
    ]
    return [dataclasses.replace(item, message="; ".join([item.message, *words])) for item, words in said]


class PlacementMode(StrEnum):
    """How the components share the hardware."""

    COLLOCATED = "collocated"
    DISAGGREGATED = "disaggregated"
    HYBRID = "hybrid"
    AUTO = "auto"


class RolloutSyncMode(StrEnum):
    """How the engines' weights travel."""

    COLLOCATED = "collocated"
    DISAGGREGATED = "disaggregated"


class _Theirs(PlacementStrategy):
    """A strategy that also takes one of RLinf's clusters."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _in_their_words():
            super().__init__(*args, **kwargs)

    def get_placement(self, cluster: Any, isolate_accelerator: bool = True) -> list[Placement]:
        """Return the placements in rank order."""
        with _in_their_words():
            return super().get_placement(seen(cluster), isolate_accelerator)  # type: ignore[safe-super]


class PackedPlacementStrategy(_Theirs, strategies.PackedPlacementStrategy):
    """Consecutive hardware."""


class FlexiblePlacementStrategy(_Theirs, strategies.FlexiblePlacementStrategy):
    """Any hardware for each process; all but an empty list is refused when it is used, as RLinf does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().__init__(*args, **kwargs)
        except MisplacedError as error:
            if _WORDS["hardware_ranks_list is empty"] in str(error):
                raise
            object.__setattr__(self, "_error", error)

    def get_placement(self, cluster: Any, isolate_accelerator: bool = True) -> list[Placement]:
        """Return the placements in rank order."""
        if error := vars(self).get("_error"):
            raise error
        return super().get_placement(cluster, isolate_accelerator)


class NodePlacementStrategy(_Theirs, strategies.NodePlacementStrategy):
    """Processes on nodes."""


class ComponentPlacement(components.ComponentPlacement):
    """Every component of a config on a cluster."""

    def __init__(self, config: Any, cluster: Any) -> None:
        self._strategies: dict[PlacementStrategy, PlacementStrategy] = {}
        with _in_their_words():
            super().__init__(config, seen(cluster))

    def get_strategy(self, component_name: str) -> PlacementStrategy:
        """Return the strategy that places a component: the same for components that share a rule."""
        ours: Any = super().get_strategy(component_name)
        made = self._strategies.get(ours)
        if made is None:
            made = self._strategies[ours] = object.__new__(globals()[type(ours).__name__])
            for field in dataclasses.fields(ours):
                object.__setattr__(made, field.name, getattr(ours, field.name))
        return made


class HybridComponentPlacement(ComponentPlacement):
    """Components on any sets of hardware."""


class ModelParallelComponentPlacement(ComponentPlacement, model_parallel.ModelParallelComponentPlacement):
    """Trainer and engines, colocated or disaggregated; with `auto_scheduler`, where they are at the beginning."""

    def __init__(self, config: Any, cluster: Any) -> None:
        section = dict(config["cluster"])
        self.is_auto = bool(section.pop("auto_scheduler", False))
        super().__init__({**config, "cluster": section} if self.is_auto else config, cluster)
        self._cluster_num_gpus = self.topology.num_accelerators
        if "reward" not in self.components:
            raise MisplacedError("component_placement has no 'reward': Reward GPUs must be specified")

    def get_strategy(self, component_name: str) -> PlacementStrategy:
        """Return the strategy that places a component."""
        if self.is_auto and component_name == "actor":
            return PackedPlacementStrategy(0, self._cluster_num_gpus - 1)
        return super().get_strategy(component_name)

    @property
    def placement_mode(self) -> Any:
        """How the components share the hardware."""
        return PlacementMode.AUTO if self.is_auto else PlacementMode(super().placement_mode.value)

    @property
    def _rollout_sync_mode(self) -> RolloutSyncMode:
        return RolloutSyncMode.COLLOCATED if self.is_collocated else RolloutSyncMode.DISAGGREGATED

    def has_dedicated_inference_for_role(self, role: str) -> bool:
        """Whether the role's log probabilities are computed on accelerators of their own."""
        return role == "actor" and self.has_dedicated_inference


def __getattr__(name: str) -> Any:
    return refused(name, __name__)
