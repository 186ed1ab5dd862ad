"""Memory for large buffers: shared by the processes of a node, or private; kept to be used again.

The first use of fresh memory costs up to fifteen times as much as copying into it. So a pool keeps what comes back, up
to a limit; of private memory it keeps all that was used within the last seconds. Shared memory has no name: a process
passes its descriptor to another one through a socket, and the kernel frees it when the last process that has it is
gone, however that ended.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from roost.comm.limits import KEPT_SECONDS

_STEP = 1 << 20
_KEPT_BYTES = 1 << 28
"""How much a pool keeps of what came back: of private memory, what was not used for a while."""
_MOST_BYTES = 1 << 30
_MOST_PIECES = 64
"""How much shared memory of a pool may be in use before it is scarce; each piece takes a descriptor."""
_MORE_BYTES = 1 << 28
_MORE_PIECES = 16
"""How much more there may be, for what is copied at once: what is beyond that goes through the socket."""
_FAILED = ctypes.c_void_p(-1).value


class Memory:
    """A piece of memory; a shared one has a descriptor, which it closes."""

    __slots__ = ("__weakref__", "fd", "map", "size")

    def __init__(self, size: int, fd: int) -> None:
        self.fd = fd
        self.size = size
        # Python's own `mmap` would keep a second descriptor for each, which before Python 3.13 cannot be helped.
        libc = standard_library()
        flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
        if address in (None, _FAILED):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        mapped = (ctypes.c_ubyte * size).from_address(address)
        # It is unmapped when nothing looks at it any more.
        weakref.finalize(mapped, libc.munmap, address, size).atexit = False
        self.map = memoryview(mapped).cast("B")

    def borrow(self, size: int, give_back: Callable[[], None]) -> tuple[memoryview, weakref.finalize[Any, Any]]:
        """Return its first bytes, and what calls `give_back` when no object uses them any more, in any thread."""
        view = (ctypes.c_ubyte * size).from_buffer(self.map)
        finalizer = weakref.finalize(view, give_back)
        finalizer.atexit = False
        return memoryview(view).cast("B"), finalizer

    def __del__(self) -> None:
        # A handler of a signal may have raised before it was made.
        if getattr(self, "fd", -1) >= 0:
            os.close(self.fd)


class Pool:
    """Hands out memory and takes it back."""

    def __init__(self, later: Callable[[float, Callable[[], None]], None] | None = None) -> None:
        """Take what calls a function later, which private memory needs; without it the pool is of shared memory."""
        self._later = later
        self._is_watched = False
        """Whether it is looked at soon how much of what is kept was not used."""
        self._free: dict[int, deque[Memory]] = {}
        """By size, the one last that had a piece come back last."""
        self._used: set[Memory] = set()
        self._bytes = self._free_bytes = 0
        self._unused_bytes = 0
        """How much was free all the time since that was looked at last."""
        self._lock = threading.Lock()

    def take(self, size: int) -> Memory | None:
        """Return memory for so many bytes; None if that would be too much shared memory, or if there is none."""
        with self._lock:
            fits = [kept for kept, pieces in self._free.items() if pieces and size <= kept <= 2 * max(size, _STEP)]
            if fits:
                # Of the smallest the one that was used last: it is still in the caches.
                found = self._free[min(fits)].pop()
                self._free_bytes -= found.size
                self._unused_bytes = min(self._unused_bytes, self._free_bytes)
                self._used.add(found)
                return found
            has_many = len(self._used) >= _MOST_PIECES + _MORE_PIECES
            if self._later is None and (has_many or self._bytes + size > _MOST_BYTES + _MORE_BYTES):
                return None
        rounded = -(-size // _STEP) * _STEP
        try:
            made = Memory(rounded, _shared_file(rounded) if self._later is None else -1)
        except OSError:
            # No memory, or no descriptor.
            return None
        with self._lock:
            self._used.add(made)
            self._bytes += rounded
        return made

    def give(self, memory: Memory) -> None:
        """Take back memory that no process uses."""
        with self._lock:
            if memory not in self._used:
                return
            self._used.discard(memory)
            self._free.setdefault(memory.size, deque()).append(memory)
            self._free[memory.size] = self._free.pop(memory.size)
            self._free_bytes += memory.size
            if self._later is None:
                self._let_go(self._free_bytes - _KEPT_BYTES)
            elif self._free_bytes > _KEPT_BYTES and not self._is_watched:
                self._watch(self._later)

    def _watch(self, later: Callable[[float, Callable[[], None]], None]) -> None:
        self._is_watched = True
        self._unused_bytes = self._free_bytes
        later(KEPT_SECONDS, self._tidy)

    def _tidy(self) -> None:
        """Return to the system what was not used for a while."""
        with self._lock:
            self._let_go(self._unused_bytes - _KEPT_BYTES)
            self._is_watched = False
            if self._later is not None and self._free_bytes > _KEPT_BYTES:
                self._watch(self._later)

    def _let_go(self, surplus: int) -> None:
        """Return so many bytes to the system, the pieces first whose size was not used for longest."""
        while surplus > 0:
            size, pieces = next(iter(self._free.items()))
            if not pieces:
                del self._free[size]
                continue
            pieces.popleft()
            surplus -= size
            self._bytes -= size
            self._free_bytes -= size

    def drop(self, memory: Memory) -> None:
        """Forget memory that another process may still use, although this one does not hear from it."""
        with self._lock:
            if memory in self._used:
                self._used.discard(memory)
                self._bytes -= memory.size

    @property
    def is_scarce(self) -> bool:
        """Whether so much is in use that it should come back at once."""
        return len(self._used) > _MOST_PIECES or self._bytes - self._free_bytes > _MOST_BYTES

    @property
    def counts(self) -> dict[str, int]:
        """How many pieces are in use and kept, and their bytes."""
        free = sum(map(len, self._free.values()))
        return {"used": len(self._used), "free": free, "bytes": self._bytes}


def copy(source: Any, target: Any, size: int) -> None:
    """Copy bytes from one buffer to another; other threads run meanwhile."""
    np.copyto(np.frombuffer(target, np.uint8, size), np.frombuffer(source, np.uint8, size))


@functools.cache
def standard_library() -> ctypes.CDLL:
    """Return the C library, for what Python has no function for."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    libc.mmap.restype = ctypes.c_void_p
    libc.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t
    return libc


def _shared_file(size: int) -> int:
    create: Any = os.memfd_create
    fd: int = create("roost", os.MFD_CLOEXEC)
    try:
        os.truncate(fd, size)
    except OSError:
        os.close(fd)
        raise
    return fd
