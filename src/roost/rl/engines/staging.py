"""Weights for a server in another process: a link fills them, and the server reads them.

They are a safetensors file in shared memory, or memory of the device that both processes use. The file has a folder of
its own, because some servers load folders.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from roost.comm.move.arrays import copy, wrap
from roost.comm.move.cuda import NO_HANDLE, export
from roost.comm.move.route import End, Route, choose_route
from roost.errors import ClusterError, ConfigError
from roost.rl.engine import EngineSpec
from roost.rl.host_copies import HostCopies, free_memory
from roost.weights.adapters import DictWeights
from roost.weights.safetensors import create_safetensors, map_safetensors, read_safetensors

SHARED_FOLDER = Path("/dev/shm")  # noqa: S108 - shared memory is the point
_ALIGNMENT = 256
_TYPES_OF_TORCH = frozenset(("bfloat16", "float8_e4m3fn", "float8_e5m2"))


def staging_folder(spec: EngineSpec) -> Path:
    """Return the folder of an engine in shared memory: of the same name on all its nodes, and no other engine's."""
    name = hashlib.sha256(f"{spec.secret} {spec.dist_init_addr}".encode()).hexdigest()[:16]
    return SHARED_FOLDER / f"roost-{os.geteuid()}-{name}"


Use = Callable[[Callable[[], dict[str, Any]], int], None]
"""Lets the server use a complete version: a function that returns where it lies, and its number."""


class StagedWeights(DictWeights, ABC):
    """Memory for the whole model, as its checkpoint has it; a version is used when it is committed."""

    def __init__(self, tensors: Mapping[str, Any], use: Use) -> None:
        super().__init__(tensors)
        self._use = use

    @abstractmethod
    def where(self) -> dict[str, Any]:
        """Return where it lies, for another process, as JSON."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back."""

    def fill(self, weights: Any) -> None:
        """Write weights that no link brings: arrays by name, or a path of safetensors files."""
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
        self._use(self.where, version)


class StagedFile(StagedWeights):
    """A safetensors file in shared memory."""

    def __init__(self, model: Path, folder: Path, use: Use) -> None:
        """Make room for the tensors of a model in a folder."""
        specs = read_safetensors(model)
        if any(spec.dtype in _TYPES_OF_TORCH for spec in specs.values()):
            _load_torch("bfloat16 and 8-bit floats need torch")
        self.path = folder / "model.safetensors"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ClusterError(f"{folder} cannot be made: {error.strerror}") from None
        super().__init__(create_safetensors(self.path, specs), use)

    def where(self) -> dict[str, Any]:
        return {"path": str(self.path)}

    def close(self) -> None:
        # A process that has mapped it can still read it.
        with contextlib.suppress(OSError):
            self.path.unlink()
            self.path.parent.rmdir()


class StagedOnDevice(StagedWeights):
    """One piece of this process's CUDA device, which the server maps while it loads a version."""

    def __init__(self, model: Path, use: Use) -> None:
        """Make room for the tensors of a model."""
        torch = _load_torch("weights on a device need torch")
        if not torch.cuda.is_available():
            raise ConfigError("torch finds no CUDA device for the weights", hint='leave weights_on="device" out')
        self._specs, self._places, size = read_safetensors(model), {}, 0
        for name, spec in self._specs.items():
            self._places[name] = size
            size += -(-spec.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._memory = torch.empty(max(size, 1), dtype=torch.uint8, device="cuda")
        self._away = HostCopies()
        super().__init__(self._views(), use)

    def _views(self) -> dict[str, Any]:
        found = {}
        for name, spec in self._specs.items():
            at = self._places[name]
            found[name] = wrap(self._memory[at : at + spec.nbytes], spec.dtype, spec.shape)
        return found

    def where(self) -> dict[str, Any]:
        memory = export(self._memory)
        own = End(process="engine", node=0, memory=memory.device, closed="" if memory.handle else NO_HANDLE)
        # The server is a child of this process, on the same devices.
        if choose_route(own, End(process="server", node=0, devices=(memory.device,))) is not Route.DEVICE:
            hint = 'torch\'s expandable segments are one cause; leave them out, or weights_on="device"'
            raise ClusterError("other processes cannot map this process's memory of the device", hint=hint)
        tensors = {name: (spec.dtype, spec.shape, self._places[name]) for name, spec in self._specs.items()}
        place = {"handle": memory.handle.hex(), "offset": memory.offset, "nbytes": memory.nbytes}
        return {"memory": place, "tensors": tensors}

    def leave(self) -> None:
        """Move to the host, for as long as another process has the device."""
        # The memory of the device is free when nothing looks at it.
        self._tensors = {}
        self._away.leave([self._memory])
        self._tensors = self._views()

    def come_back(self) -> None:
        """Move back."""
        self._away.come_back()
        self._tensors = self._views()

    def close(self) -> None:
        self._tensors, self._memory = {}, None
        free_memory()


def _load_torch(why: str) -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError:
        raise ConfigError(why, hint="pip install torch") from None
