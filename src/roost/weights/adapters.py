"""Where a worker's weights lie: what `offer` and `accept` return."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from roost.comm.move.arrays import dtype_of
from roost.errors import ConfigError
from roost.weights.boxes import Box, whole
from roost.weights.layout import Held, TensorSpec


class Weights(Protocol):
    """Weights in memory.

    Weights that are also `Committing` are memory beside the weights in use, such as those of a server in another
    process: a link fills it, and calls `commit` when all targets have everything.
    """

    def tensors(self) -> Mapping[str, Any]:
        """Return the arrays or tensors of this process by the name of their storage."""
        ...

    def held(self) -> list[Held]:
        """Return which part of which tensor each of them has."""
        ...


@runtime_checkable
class Committing(Protocol):
    """Weights that a version is taken over in when it is complete."""

    def commit(self, version: int) -> None:
        """Use what was written."""
        ...


def spec_of(array: Any) -> TensorSpec:
    """Return the shape and type of an array or tensor."""
    return TensorSpec(tuple(array.shape), dtype_of(array))


class DictWeights:
    """Whole tensors or arrays by their names."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = dict(tensors)

    def tensors(self) -> Mapping[str, Any]:
        """Return them."""
        return self._tensors

    def held(self) -> list[Held]:
        """Return that each is whole."""
        return [Held(name=name, spec=spec_of(one), box=whole(tuple(one.shape))) for name, one in self._tensors.items()]


class ModuleWeights:
    """The parameters of a torch module; those that are DTensors, as with FSDP2, are read as they are."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def tensors(self) -> Mapping[str, Any]:
        """Return the part of each that is in this process."""
        return {name: one.to_local() if _is_distributed(one) else one for name, one in self._module.named_parameters()}

    def held(self) -> list[Held]:
        """Return which part that is."""
        return [
            Held(name=name, spec=spec_of(one), box=_box(one))
            # With tied weights, a module names each parameter once.
            for name, one in self._module.named_parameters()
        ]


def as_weights(value: Any, what: str) -> Weights:
    """Return what a worker's `offer` or `accept` returned, if it can be used."""
    if isinstance(value, Mapping):
        return DictWeights(value)
    if hasattr(value, "tensors") and hasattr(value, "held"):
        weights: Weights = value
        return weights
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.nn.Module):
        return ModuleWeights(value)
    raise ConfigError(
        f"{what}() returned {type(value).__name__}",
        hint="return a torch module, a dict of tensors or arrays, or an object with `tensors` and `held`",
    )


def _is_distributed(tensor: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _box(tensor: Any) -> Box:
    """Return the part of a tensor that this process has: each sharding splits what the ones before it left."""
    box = whole(tuple(tensor.shape))
    if not _is_distributed(tensor):
        return box
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    for dim, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise ConfigError("a DTensor with partial values has no weights yet", hint="redistribute it first")
        if not placement.is_shard():
            continue
        if type(placement).__name__ != "Shard":
            # FSDP2 over tensor parallelism: the shards of the outer mesh dimension interleave. The only place where
            # torch says how these lie; there is no public one.
            from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

            shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
            return tuple((start, start + size) for start, size in zip(offset, shape, strict=True))
        start, stop = box[placement.dim]
        step = -(-(stop - start) // mesh.size(dim))
        low = min(stop, start + coordinate[dim] * step)
        box = (*box[: placement.dim], (low, min(stop, low + step)), *box[placement.dim + 1 :])
    return box
