"""Weights for a server in another process: a safetensors file in shared memory, which a link fills and it reads.

The file has a folder of its own, because some servers load folders.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from roost.errors import ClusterError, ConfigError
from roost.weights.adapters import DictWeights
from roost.weights.arrays import copy
from roost.weights.specs import create_safetensors, map_safetensors, read_safetensors

_SHARED_FOLDER = Path("/dev/shm")  # noqa: S108 - shared memory is the point
_TYPES_OF_TORCH = frozenset(("bfloat16", "float8_e4m3fn", "float8_e5m2"))


def staging_folder(name: str) -> Path:
    """Return the folder of this user and name in shared memory."""
    return _SHARED_FOLDER / f"roost-{os.geteuid()}-{name}"


class StagedWeights(DictWeights):
    """Memory for the whole model, as its checkpoint has it; a version is used when it is committed."""

    def __init__(self, model: Path, folder: Path, use: Callable[[Path, int], None]) -> None:
        """Make room for the tensors of a model in a folder; `use` takes a complete version into the server."""
        specs = read_safetensors(model)
        if any(spec.dtype in _TYPES_OF_TORCH for spec in specs.values()):
            _load_torch()
        self.path = folder / "model.safetensors"
        self._use = use
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ClusterError(f"{folder} cannot be made: {error.strerror}") from None
        super().__init__(create_safetensors(self.path, specs))

    def fill(self, weights: Any) -> None:
        """Write weights that are not those of a link: arrays by name, or a path of safetensors files."""
        given = map_safetensors(weights) if isinstance(weights, str | os.PathLike) else weights
        if not isinstance(given, Mapping):
            raise ConfigError(f"weights are arrays by name, or a path, not {type(weights).__name__}")
        own = self.tensors()
        wrong = sorted({*own} ^ {*given}) or [name for name, one in own.items() if one.shape != given[name].shape]
        if wrong:
            raise ConfigError(f"the weights do not fit the model: {', '.join(wrong[:5])}")
        for name, one in own.items():
            copy(one, given[name])

    def commit(self, version: int) -> None:
        """Let the server use what was written."""
        self._use(self.path, version)

    def close(self) -> None:
        """Remove the file. A process that has mapped it can still read it."""
        with contextlib.suppress(OSError):
            self.path.unlink()
            self.path.parent.rmdir()


def _load_torch() -> None:
    try:
        importlib.import_module("torch")
    except ImportError:
        raise ConfigError("bfloat16 and 8-bit floats need torch", hint="pip install torch") from None
