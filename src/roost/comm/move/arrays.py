"""Arrays of numpy and tensors of torch, handled alike. torch is used where it is loaded, and never loaded."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
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


def raw_bytes(array: Any) -> memoryview:
    """Return the content of an array as bytes, in the order of its elements."""
    if not is_tensor(array):
        return memoryview(array.tobytes())
    plain = array.detach().cpu().contiguous().reshape(-1)
    return memoryview(plain.view(sys.modules["torch"].uint8).numpy()) if plain.numel() else memoryview(b"")


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
