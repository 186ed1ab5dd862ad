"""Arrays of numpy and tensors of torch, handled alike. torch is used where it is loaded, and never loaded."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from roost.comm.move.dtypes import SIZES
from roost.errors import ConfigError


def is_tensor(array: Any) -> bool:
    """Whether this is a tensor of torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def is_on_device(thing: Any) -> bool:
    """Whether this is a tensor on a CUDA device."""
    return is_tensor(thing) and bool(thing.is_cuda)


def dtype_of(array: Any) -> str:
    """Return torch's name of the type of the elements."""
    name = str(array.dtype).removeprefix("torch.")
    if name not in SIZES:
        raise ConfigError(f"{name} is a type of elements that weights cannot have")
    return name


def is_on_host(array: Any) -> bool:
    """Whether it lies in the memory of this process, not of a device."""
    return not is_tensor(array) or array.device.type == "cpu"


def address_of(array: Any) -> int:
    """Return where its first element is."""
    return int(array.data_ptr() if is_tensor(array) else array.__array_interface__["data"][0])


def strides_of(array: Any) -> tuple[int, ...]:
    """Return how many bytes one row is from the next, in each dimension."""
    if is_tensor(array):
        return tuple(stride * array.element_size() for stride in array.stride())
    return tuple(array.strides)


def cut(array: Any, at: Sequence[int], shape: Sequence[int]) -> Any:
    """Return a part of an array, which shares its memory."""
    plain = array.detach() if is_tensor(array) else array
    return plain[tuple(slice(start, start + size) for start, size in zip(at, shape, strict=True))] if shape else plain


def wrap(buffer: Any, dtype: str, shape: Sequence[int]) -> Any:
    """Return an array over a writable buffer or a tensor of bytes: a tensor if torch is loaded; it has more types."""
    torch = sys.modules.get("torch")
    if torch is None:
        return np.frombuffer(buffer, dtype).reshape(shape)
    if is_tensor(buffer):
        return buffer.view(getattr(torch, dtype)).reshape(shape)
    if not math.prod(shape):
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(buffer, dtype=getattr(torch, dtype)).reshape(shape)


def can_wrap(dtype: str) -> bool:
    """Whether this process has arrays of a type: some are torch's alone."""
    return "torch" in sys.modules or dtype in np.sctypeDict


def empty_bytes(size: int, like: Sequence[Any]) -> Any:
    """Return memory for so many bytes, on the CUDA device that all of these are on, if they are; else on the host."""
    devices = {one.device if is_on_device(one) else None for one in like}
    if None in devices or len(devices) != 1:
        return np.empty(size, np.uint8)
    torch = sys.modules["torch"]
    return torch.empty(size, dtype=torch.uint8, device=devices.pop())


def bytes_of(tensor: Any) -> Any:
    """Return the bytes of a contiguous tensor as a tensor."""
    uint8 = sys.modules["torch"].uint8
    return tensor.reshape(-1).view(uint8) if tensor.numel() else tensor.new_empty(0, dtype=uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """The content of an array or tensor as bytes on the host, and what it is."""

    view: memoryview
    dtype: str
    shape: tuple[int, ...]
    on_device: Any = None
    """The tensor itself, if it is a target on a device, to which the bytes are to be copied."""

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.view.nbytes

    def as_tensor(self) -> Any:
        """Return its bytes as a tensor, on the device that it is on."""
        return wrap(self.view, "uint8", (self.nbytes,)) if self.on_device is None else bytes_of(self.on_device)


def as_buffer(thing: Any, method: str, *, is_target: bool = False) -> Buffer:
    """Return the memory of a numpy array or a tensor; ConfigError if it has none that can be used."""
    array: Any
    on_device = None
    if is_tensor(thing):
        plain, dtype = thing.detach(), str(thing.dtype).removeprefix("torch.")
        if is_target and not plain.is_contiguous():
            raise _not_contiguous(method)
        if is_target and plain.is_cuda:
            # Not touched, and so not there, unless something arrives on the host.
            on_device, array = plain, np.empty(plain.numel() * plain.element_size(), np.uint8)
        else:
            array = bytes_of(plain.cpu().contiguous()).numpy()
    elif isinstance(thing, np.ndarray):
        dtype = str(thing.dtype)
        if thing.dtype.hasobject:
            raise ConfigError(f"{method} takes numbers, and this array has objects", hint="send takes any object")
        if is_target and not thing.flags.c_contiguous:
            raise _not_contiguous(method)
        if is_target and not thing.flags.writeable:
            raise ConfigError(f"{method} needs an array that can be written to, and this one is read-only")
        array = np.ascontiguousarray(thing).reshape(-1).view(np.uint8) if thing.size else np.empty(0, np.uint8)
    else:
        raise ConfigError(f"{method} takes a numpy array or a tensor, not a {type(thing).__name__}")
    return Buffer(view=memoryview(array).cast("B"), dtype=dtype, shape=tuple(thing.shape), on_device=on_device)


def _not_contiguous(method: str) -> ConfigError:
    return ConfigError(f"{method} needs contiguous memory", hint="receive into tensor.contiguous(), then copy")


def copy(target: Any, source: Any) -> None:
    """Copy, and cast where the types differ; one of them may be an array and the other a tensor."""
    if is_tensor(target):
        source = source if is_tensor(source) else sys.modules["torch"].from_numpy(source)
        target.copy_(source, non_blocking=True)
    else:
        if is_tensor(source):
            # Cast before: numpy does not have all types.
            source = source.detach().to("cpu", getattr(sys.modules["torch"], dtype_of(target))).numpy()
        np.copyto(target, source, casting="unsafe")


def empty_like(array: Any) -> Any:
    """Return memory for the same content."""
    return sys.modules["torch"].empty_like(array) if is_tensor(array) else np.empty_like(array)


def devices_of(arrays: Iterable[Any]) -> set[Any]:
    """Return the devices that arrays are on, other than the host."""
    return {array.device for array in arrays if not is_on_host(array)}


def finish(devices: Iterable[Any]) -> None:
    """Wait until everything that was to be copied on these is there."""
    for device in devices:
        getattr(sys.modules["torch"], device.type).current_stream(device).synchronize()
