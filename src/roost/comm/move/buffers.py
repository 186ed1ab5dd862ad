"""Arrays and tensors as raw bytes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from roost.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """The memory of an array or tensor, and what it is."""

    view: memoryview
    dtype: str
    shape: tuple[int, ...]
    on_device: Any = None
    """The tensor itself, if it is on a device; the memory is then one on the host, to be copied from."""

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.view.nbytes

    def as_tensor(self) -> Any:
        """Return its bytes as a tensor, on the device that it is on."""
        torch: Any = sys.modules["torch"]
        if self.on_device is not None and self.nbytes:
            return self.on_device.reshape(-1).view(torch.uint8)
        return torch.frombuffer(self.view, dtype=torch.uint8) if self.nbytes else torch.empty(0, dtype=torch.uint8)

    def move_to_device(self) -> None:
        """Copy what arrived in the host's memory to the device."""
        if self.nbytes:
            torch: Any = sys.modules["torch"]
            self.as_tensor().copy_(torch.frombuffer(self.view, dtype=torch.uint8))


def as_buffer(thing: Any, method: str, *, is_target: bool = False) -> Buffer:
    """Return the memory of a numpy array or a tensor; ConfigError if it has none that can be used."""
    torch: Any = sys.modules.get("torch")
    array: Any
    if torch is not None and isinstance(thing, torch.Tensor):
        shape, dtype = tuple(thing.shape), str(thing.dtype).removeprefix("torch.")
        plain = thing.detach()
        if is_target and not plain.is_contiguous():
            raise _not_contiguous(method)
        if is_target and plain.is_cuda:
            # Not touched, and so not there, unless something arrives on the host.
            host = np.empty(plain.numel() * plain.element_size(), np.uint8)
            return Buffer(view=memoryview(host.data), dtype=dtype, shape=shape, on_device=plain)
        flat = plain.cpu().contiguous().reshape(-1)
        array = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    elif isinstance(thing, np.ndarray):
        shape, dtype = thing.shape, str(thing.dtype)
        if thing.dtype.hasobject:
            raise ConfigError(f"{method} takes numbers, and this array has objects", hint="send takes any object")
        if is_target and not thing.flags.c_contiguous:
            raise _not_contiguous(method)
        if is_target and not thing.flags.writeable:
            raise ConfigError(f"{method} needs an array that can be written to, and this one is read-only")
        array = np.ascontiguousarray(thing).reshape(-1).view(np.uint8) if thing.size else np.empty(0, np.uint8)
    else:
        raise ConfigError(f"{method} takes a numpy array or a tensor, not a {type(thing).__name__}")
    return Buffer(view=memoryview(array).cast("B"), dtype=dtype, shape=shape)


def _not_contiguous(method: str) -> ConfigError:
    return ConfigError(f"{method} needs contiguous memory", hint="receive into tensor.contiguous(), then copy")
