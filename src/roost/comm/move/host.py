"""Host memory of another process of the machine: mapped where it is shared, otherwise read through the kernel."""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import mmap
import os
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from roost.comm.move.arrays import address_of, dtype_of, is_on_host, is_tensor, strides_of
from roost.comm.move.dtypes import SIZES
from roost.comm.move.memory import standard_library
from roost.errors import WorkerDied

if TYPE_CHECKING:
    from roost.comm.move.mover import Offer, RemoteArray

_SHARED_FOLDER = "/dev/shm"  # noqa: S108 - where torch's shared memory lies
_SHARED_FROM = 1 << 16
_MOST_SHARED = 256
"""Each shared storage takes a descriptor."""
_MOST_SEGMENTS = 1024

log: logging.Logger = logging.getLogger(__name__)


class HostMover:
    """Maps storages of torch that lie in shared memory, and has the kernel copy from all other memory of the host."""

    name: ClassVar[str] = "host"

    def __init__(self, owner: str, offer: Offer) -> None:
        self._owner = owner
        self._pid = offer.pid
        self._cookie = offer.cookie
        self._why_not: str | None = None
        self._maps: dict[int, Any] = {}

    @staticmethod
    def offer(arrays: Mapping[str, Any], *, may_share: bool) -> dict[str, tuple[int, tuple[int, int] | None]]:
        """Return the address of each array, and if it lies in shared memory, the descriptor of that and where."""
        found: dict[str, tuple[int, tuple[int, int] | None]] = {}
        shared: dict[int, int] = {}
        for name, one in arrays.items():
            if is_on_host(one):
                place = _share(one, shared) if may_share and is_tensor(one) else None
                # Sharing moves it.
                found[name] = address_of(one), place
        return found

    def why_not(self, array: RemoteArray) -> str:
        del array
        if self._why_not is None:
            address, content = self._cookie
            found = np.zeros(len(content), np.uint8)
            try:
                read_memory(self._pid, address, (1,), found)
                is_it = found.tobytes() == content
                self._why_not = "" if is_it else f"process {self._pid} is another one here, as in a container"
            except Unreadable as error:
                self._why_not = str(error)
        return self._why_not

    def view(self, array: RemoteArray) -> Any:
        _, shared = array.places[self.name]
        torch = sys.modules.get("torch")
        if shared is None or torch is None:
            return None
        descriptor, offset = shared
        mapped = self._maps.get(descriptor)
        if mapped is None:
            # The same user may open what another process has open; a process that ended has nothing.
            try:
                opened = os.open(f"/proc/{self._pid}/fd/{descriptor}", os.O_RDWR)
            except OSError:
                raise WorkerDied(f"{self._owner} has ended") from None
            try:
                mapped = self._maps[descriptor] = mmap.mmap(opened, 0)
            finally:
                os.close(opened)
        size = SIZES[array.dtype]
        flat = torch.frombuffer(mapped, dtype=torch.uint8)
        flat = flat[offset : offset + (len(mapped) - offset) // size * size].view(getattr(torch, array.dtype))
        # torch refuses strides that reach beyond the mapping.
        return torch.as_strided(flat, array.shape, [stride // size for stride in array.strides])

    def read(self, array: RemoteArray, at: Sequence[int], target: Any) -> None:
        address, _ = array.places[self.name]
        address += sum(start * stride for start, stride in zip(at, array.strides, strict=True))
        try:
            read_memory(self._pid, address, array.strides, target)
        except Unreadable as error:
            raise WorkerDied(f"{self._owner} has ended, or its memory cannot be read any more: {error}") from None

    def close(self) -> None:
        self._maps.clear()


@functools.cache
def own_cookie() -> tuple[int, bytes]:
    """Return an address and what is there: a process that finds it at that address reads this one."""
    content = secrets.token_bytes(16)
    _kept.append(np.frombuffer(content, np.uint8).copy())
    return address_of(_kept[-1]), content


_kept: list[Any] = []


def _share(tensor: Any, shared: dict[int, int]) -> tuple[int, int] | None:
    """Move the storage of a tensor into shared memory, if that is worth it; return its descriptor, and the offset."""
    storage = tensor.untyped_storage()
    if storage.nbytes() < _SHARED_FROM or len(shared) >= _MOST_SHARED:
        return None
    if not storage.is_shared():
        if not storage.resizable():
            # torch did not allocate it, as with an array of numpy, and cannot move it.
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


class _Segment(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


class Unreadable(Exception):  # noqa: N818 - what happened
    """The memory of another process cannot be read from here."""


def read_memory(pid: int, address: int, strides: Sequence[int], target: Any) -> None:
    """Copy an array from the memory of another process of this user and machine into one here, of the same type.

    The kernel copies once, from one process to the other. Unreadable if it may not, or the process has ended.
    """
    itemsize = SIZES[dtype_of(target)]
    shape = tuple(target.shape)
    run, inner = itemsize, len(shape)
    # As many of the last dimensions as lie without gaps on both sides are one run.
    own = strides_of(target)
    while inner and (shape[inner - 1] == 1 or strides[inner - 1] == own[inner - 1] == run):
        inner -= 1
        run *= shape[inner]
    there, here = (
        _segments(first, steps, shape[:inner], run) for first, steps in ((address, strides), (address_of(target), own))
    )
    for first in range(0, len(there), _MOST_SEGMENTS):
        part = slice(first, first + _MOST_SEGMENTS)
        _read(pid, here[part], there[part], run * len(there[part]))


def _segments(first: int, strides: Sequence[int], shape: Sequence[int], run: int) -> Any:
    """Return where the runs of an array begin, each with its size."""
    places = np.full(1, first, np.uint64)
    for stride, size in zip(strides, shape, strict=False):
        places = (places[:, None] + (np.arange(size, dtype=np.int64) * stride).astype(np.uint64)).reshape(-1)
    return np.stack((places, np.full_like(places, run)), 1)


def _read(pid: int, here: Any, there: Any, size: int) -> None:
    """Read all segments; the kernel moves at most 2 GiB at once, and may stop between two segments."""
    done = 0
    while done < size:
        local, remote = _rest(here, done), _rest(there, done)
        pointers = [table.ctypes.data_as(ctypes.POINTER(_Segment)) for table in (local, remote)]
        got = standard_library().process_vm_readv(
            pid, pointers[0], ctypes.c_ulong(len(local)), pointers[1], ctypes.c_ulong(len(remote)), ctypes.c_ulong(0)
        )
        if got <= 0:
            number = ctypes.get_errno()
            hint = ": its system lets only parents read it (ptrace_scope), or it is another user's"
            why = f"{os.strerror(number)}{hint if number == errno.EPERM else ''}"
            raise Unreadable(f"cannot read the memory of process {pid}: {why}")
        done += got


def _rest(table: Any, done: int) -> Any:
    """Return the segments without the first bytes."""
    if not done:
        return table
    run = int(table[0, 1])
    rest = table[done // run :].copy()
    rest[0] += np.array([done % run, 0], np.uint64)
    rest[0, 1] -= np.uint64(done % run)
    return rest


def let_others_read() -> None:
    """Let processes of this user read this one's memory, also where the system allows that only to parents."""
    # PR_SET_PTRACER, for any process; it still takes the same user.
    standard_library().prctl(0x59616D61, ctypes.c_ulong(-1 & (2**64 - 1)), 0, 0, 0)
