"""Where the memory of a source lies, as it tells others, and how a target of the same machine copies from it."""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roost.comm.move.cuda import CudaError, DeviceMemory, Mappings, export, visible_devices
from roost.errors import WorkerDied
from roost.weights.arrays import (
    Unreadable,
    address_of,
    copy,
    cut,
    dtype_of,
    is_on_host,
    is_tensor,
    read_memory,
    strides_of,
    wrap,
)
from roost.weights.boxes import count, shape_of
from roost.weights.layout import SIZES
from roost.weights.plan import Piece

_SHARED_FOLDER = "/dev/shm"  # noqa: S108 - where torch's shared memory lies
_SHARED_FROM = 1 << 16
_MOST_SHARED = 256
"""Each shared storage takes a descriptor."""

_MOST_MAPPED = 1 << 16

log: logging.Logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedArray:
    """One array of a source."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes."""
    address: int
    """In host memory."""
    shared: tuple[int, int] | None = None
    """The descriptor of shared memory that it lies in, and where."""
    device: DeviceMemory | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The arrays of a source."""

    pid: int
    node: int
    arrays: Mapping[str, OfferedArray] = field(default_factory=dict)


def make_offer(tensors: Mapping[str, Any], node: int, *, may_share: bool) -> Offer:
    """Describe arrays of this process; with `may_share`, storages of torch move into shared memory first."""
    found = {}
    shared: dict[int, int] = {}
    for name, one in tensors.items():
        plain = one.detach() if is_tensor(one) else one
        is_here = is_on_host(plain)
        place = _share(plain, shared) if is_here and may_share and is_tensor(plain) else None
        found[name] = OfferedArray(
            dtype=dtype_of(plain),
            shape=tuple(plain.shape),
            strides=strides_of(plain),
            address=address_of(plain) if is_here else 0,
            shared=place,
            device=None if is_here else export(plain),
        )
    return Offer(pid=os.getpid(), node=node, arrays=found)


def _share(tensor: Any, shared: dict[int, int]) -> tuple[int, int] | None:
    """Move the storage of a tensor into shared memory, if that is worth it; returns its descriptor, and the offset."""
    storage = tensor.untyped_storage()
    if storage.nbytes() < _SHARED_FROM or len(shared) >= _MOST_SHARED:
        return None
    if not storage.is_shared():
        if not storage.resizable():
            # torch did not allocate it, as that of an array of numpy, and cannot move it.
            return None
        # Writing to shared memory that there is no room for ends a process.
        if 2 * storage.nbytes() > shutil.disk_usage(_SHARED_FOLDER).free:
            log.warning("%s has no room for the weights of this process: others copy them more slowly", _SHARED_FOLDER)
            return None
        # Whatever else uses the storage, such as an optimizer, goes on with it.
        storage.share_memory_()
    # torch keeps the descriptor open as long as the storage lives, and has no public way to tell it.
    descriptor = shared.setdefault(storage.data_ptr(), storage._share_fd_cpu_()[0])
    return descriptor, tensor.data_ptr() - storage.data_ptr()


class Source:
    """A source as a target sees it: its arrays as they can be copied from here."""

    def __init__(self, name: str, offer: Offer) -> None:
        self.name = name
        self.offer = offer
        self._mappings = Mappings(_MOST_MAPPED)
        self._maps: dict[int, Any] = {}

    def close(self) -> None:
        """Let go of its memory, which no view is used of any more; a view that is asked for later maps it again."""
        self._maps.clear()
        self._mappings.close()

    def can_read(self, storages: Sequence[str]) -> bool:
        """Whether all of these can be copied from here without the source's help."""
        return all(self._can_read(self.offer.arrays[name]) for name in storages)

    def _can_read(self, array: OfferedArray) -> bool:
        if array.device is not None:
            return bool(array.device.handle) and "torch" in sys.modules and array.device.device in visible_devices()
        probe = wrap(bytearray(SIZES[array.dtype]), array.dtype, (1,))
        if 0 in array.shape:
            return True
        try:
            read_memory(self.offer.pid, array.address, (1,), probe)
        except Unreadable:
            return False
        return True

    def view(self, piece: Piece) -> Any:
        """Return the source's memory of a piece, where this process can map it; else None."""
        array = self.offer.arrays[piece.source_storage]
        if array.device is not None:
            return cut(self._on_device(array, array.device), piece.source_at, shape_of(piece.box))
        if array.shared is None or "torch" not in sys.modules:
            return None
        descriptor, offset = array.shared
        mapped = self._maps.get(descriptor)
        if mapped is None:
            mapped = self._maps[descriptor] = self._map(descriptor)
        torch = sys.modules["torch"]
        size = SIZES[array.dtype]
        flat = torch.frombuffer(mapped, dtype=torch.uint8)
        flat = flat[offset : offset + (len(mapped) - offset) // size * size].view(getattr(torch, array.dtype))
        whole = torch.as_strided(flat, array.shape, [stride // size for stride in array.strides])
        return cut(whole, piece.source_at, shape_of(piece.box))

    def copy(self, piece: Piece, target: Any) -> None:
        """Copy a piece into an array, through the kernel; WorkerDied if the source has ended."""
        array = self.offer.arrays[piece.source_storage]
        steps = zip(piece.source_at, array.strides, strict=True)
        address = array.address + sum(at * stride for at, stride in steps)
        # Only between arrays of the same type in host memory; else by way of one.
        is_plain = is_on_host(target) and dtype_of(target) == array.dtype
        shape = shape_of(piece.box)
        buffer = target if is_plain else wrap(bytearray(count(piece.box) * SIZES[array.dtype]), array.dtype, shape)
        try:
            read_memory(self.offer.pid, address, array.strides, buffer)
        except Unreadable:
            raise WorkerDied(f"{self.name} has ended, or its memory cannot be read any more") from None
        if not is_plain:
            copy(target, buffer)

    def _map(self, descriptor: int) -> Any:
        # The same user may open what another process has open; a process that ended has nothing.
        try:
            opened = os.open(f"/proc/{self.offer.pid}/fd/{descriptor}", os.O_RDWR)
        except OSError:
            raise WorkerDied(f"{self.name} has ended") from None
        try:
            return mmap.mmap(opened, 0)
        finally:
            os.close(opened)

    def _on_device(self, array: OfferedArray, memory: DeviceMemory) -> Any:
        torch = sys.modules["torch"]
        number = visible_devices()[memory.device]
        try:
            address = self._mappings.address(memory, torch.device("cuda", number))
        except CudaError:
            raise WorkerDied(f"{self.name} has ended, or its memory on the device is gone") from None
        size = SIZES[array.dtype]
        span = sum((count - 1) * stride for count, stride in zip(array.shape, array.strides, strict=True)) + size
        flat = torch.as_tensor(_CudaBytes(address, span), device=f"cuda:{number}").view(getattr(torch, array.dtype))
        return torch.as_strided(flat, array.shape, [stride // size for stride in array.strides])


class _CudaBytes:
    """Memory of a device, in the form in which libraries exchange it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
