"""Memory of a CUDA device that two processes use: one exports it, the other maps it and copies from it.

This is the driver's own interface for it, which every CUDA installation has. torch's way to share a tensor leaves it to
the receiver when the memory of the sender is free again; here the receiver copies, and what it got is its own.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from roost.comm.move.arrays import is_on_device, is_on_host
from roost.comm.move.dtypes import SIZES
from roost.errors import WorkerDied

if TYPE_CHECKING:
    from roost.comm.move.mover import Offer, RemoteArray

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_MOST_MAPPED = 16
"""How many allocations of other processes stay mapped: mapping one takes longer than copying from it."""

_MOST_MAPPED_OF_ONE = 1 << 16
"""The same for a source of weights, all of whose allocations are copied from in each update."""
NO_HANDLE = "no IPC handle for its memory of the device, as with torch's expandable segments"
"""Why other processes cannot map memory whose handle is empty."""
_STREAMS = 4
_CHECK_EVERY = 64


class CudaError(Exception):
    """The driver refused a call."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * _HANDLE_BYTES),)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes on a device, as another process can find them."""

    device: str
    """The device's UUID."""
    handle: bytes
    """The handle by which the driver maps the allocation; empty if it cannot be mapped."""
    offset: int
    nbytes: int


@functools.cache
def visible_devices() -> dict[str, int]:
    """Return the number that each device has in this process, by its UUID."""
    cuda = sys.modules["torch"].cuda
    return {str(cuda.get_device_properties(number).uuid): number for number in range(cuda.device_count())}


def export(tensor: Any) -> DeviceMemory:
    """Let other processes read a contiguous tensor, once all that was to be written to it is there."""
    torch = sys.modules["torch"]
    # Also makes the device's context the one of this thread.
    torch.cuda.current_stream(tensor.device).synchronize()
    nbytes = tensor.numel() * tensor.element_size()
    uuid = uuid_of(tensor.device)
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    try:
        _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(tensor.data_ptr()))
        _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    except CudaError:
        # As with torch's expandable segments: it has to be copied to the host.
        return DeviceMemory(device=uuid, handle=b"", offset=0, nbytes=nbytes)
    offset = tensor.data_ptr() - (base.value or 0)
    return DeviceMemory(device=uuid, handle=bytes(handle), offset=offset, nbytes=nbytes)


class Mappings:
    """The allocations of other processes that this one has mapped."""

    def __init__(self, most: int = _MOST_MAPPED) -> None:
        self._most = most
        self._mapped: OrderedDict[bytes, int] = OrderedDict()
        self._copies: list[Any] = []
        """Copies that may still be under way."""
        self._lock = threading.Lock()

    def copy(self, memory: DeviceMemory, target: Any) -> Any:
        """Copy into a contiguous tensor on the same device, as torch would on its current stream; returns the event.

        CudaError if the owner of the memory has ended.
        """
        cuda = sys.modules["torch"].cuda
        stream = cuda.current_stream(target.device)
        if not _uses_device.__dict__.get(target.device):
            # Makes the device's context the one of this thread.
            stream.synchronize()
            _uses_device.__dict__[target.device] = True
        done = cuda.Event()
        with self._lock:
            source = self._map(memory.handle) + memory.offset
            sizes = ctypes.c_uint64(target.data_ptr()), ctypes.c_uint64(source), ctypes.c_size_t(memory.nbytes)
            _call("cuMemcpyDtoDAsync_v2", *sizes, ctypes.c_void_p(stream.cuda_stream))
            done.record(stream)
            self._copies = [copy for copy in self._copies if not copy.query()] + [done]
        return done

    def address(self, memory: DeviceMemory, device: Any) -> int:
        """Return where memory of another process is in this one; it stays mapped. CudaError if its owner has ended."""
        # Makes the device's context the one of this thread.
        sys.modules["torch"].cuda.current_stream(device).synchronize()
        with self._lock:
            return self._map(memory.handle) + memory.offset

    def close(self) -> None:
        """Unmap everything."""
        with self._lock:
            while self._mapped:
                self._unmap()

    def _map(self, handle: bytes) -> int:
        found = self._mapped.get(handle)
        if found is None:
            while len(self._mapped) >= self._most:
                self._unmap()
            place = ctypes.c_uint64()
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(place), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
            found = self._mapped[handle] = place.value or 0
        self._mapped.move_to_end(handle)
        return found

    def _unmap(self) -> None:
        for copy in self._copies:
            copy.synchronize()
        _, place = self._mapped.popitem(last=False)
        _call("cuIpcCloseMemHandle", ctypes.c_uint64(place))


class CudaMover:
    """Maps memory of devices that both processes use."""

    name: ClassVar[str] = "cuda"

    def __init__(self, owner: str, offer: Offer) -> None:
        del offer
        self._owner = owner
        self._mappings = Mappings(_MOST_MAPPED_OF_ONE)

    @staticmethod
    def offer(arrays: Mapping[str, Any], *, may_share: bool) -> dict[str, DeviceMemory]:
        """Return where arrays on devices are; memory of the device is always shared."""
        del may_share
        return {name: export(one) for name, one in arrays.items() if not is_on_host(one)}

    def why_not(self, array: RemoteArray) -> str:
        memory: DeviceMemory = array.places[self.name]
        if not memory.handle:
            return NO_HANDLE
        if "torch" not in sys.modules:
            return "torch is not loaded, which memory of a device takes"
        return "" if memory.device in visible_devices() else f"device {memory.device} of {self._owner} is not seen"

    def view(self, array: RemoteArray) -> Any:
        torch = sys.modules["torch"]
        memory: DeviceMemory = array.places[self.name]
        number = visible_devices()[memory.device]
        try:
            address = self._mappings.address(memory, torch.device("cuda", number))
        except CudaError:
            raise WorkerDied(f"{self._owner} has ended, or its memory on the device is gone") from None
        size = SIZES[array.dtype]
        span = sum((count - 1) * stride for count, stride in zip(array.shape, array.strides, strict=True)) + size
        flat = torch.as_tensor(_CudaBytes(address, span), device=f"cuda:{number}").view(getattr(torch, array.dtype))
        return torch.as_strided(flat, array.shape, [stride // size for stride in array.strides])

    def read(self, array: RemoteArray, at: Sequence[int], target: Any) -> None:
        del at, target
        raise CudaError(f"memory of a device is viewed, not read: {array}")

    def close(self) -> None:
        self._mappings.close()


class _CudaBytes:
    """Memory of a device, in the form in which libraries exchange it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


DeviceCopy = tuple[ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t]
"""Where to, where from and how many bytes."""


def as_device_copy(target: Any, source: Any) -> DeviceCopy | None:
    """Return the copy of a tensor into another of its shape, if it is one of bytes without gaps within a device."""
    is_plain = (
        is_on_device(target)
        and target.device == source.device
        and target.dtype == source.dtype
        and target.is_contiguous()
        and source.is_contiguous()
    )
    if not is_plain:
        return None
    size = ctypes.c_size_t(target.numel() * target.element_size())
    return ctypes.c_uint64(target.data_ptr()), ctypes.c_uint64(source.data_ptr()), size


def start_copies(copies: Sequence[DeviceCopy], device: Any, check: Callable[[], None]) -> None:
    """Start copies, after what is in torch's current stream of their device and before what comes later.

    The driver starts one in less time than torch. The device pauses between two copies of a stream, in which those of
    other streams go on. `check` is called now and then, and may break it off.
    """
    cuda, start = sys.modules["torch"].cuda, _driver().cuMemcpyDtoDAsync_v2
    current = cuda.current_stream(device)
    others = _streams.__dict__.setdefault(device, [])
    others += [cuda.Stream(device) for _ in range(_STREAMS - 1 - len(others))]
    streams = [ctypes.c_void_p(stream.cuda_stream) for stream in (current, *others)]
    with cuda.device(device):
        for stream in others:
            stream.wait_stream(current)
        try:
            for place, (target, source, size) in enumerate(copies):
                if code := start(target, source, size, streams[place % _STREAMS]):
                    raise CudaError(f"cuMemcpyDtoDAsync: CUDA error {code}")
                if place % _CHECK_EVERY == 0:
                    check()
        finally:
            for stream in others:
                current.wait_stream(stream)


_uses_device = threading.local()
_streams = threading.local()
"""By device: streams for copies, besides torch's current one."""


@functools.cache
def uuid_of(device: Any) -> str:
    """Return the UUID of a device."""
    return str(sys.modules["torch"].cuda.get_device_properties(device).uuid)


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code:
        raise CudaError(f"{name}: CUDA error {code}")
