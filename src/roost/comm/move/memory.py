"""Memory for large buffers: shared by the processes of a node, or private; kept to be used again.

The first use of fresh memory costs more than copying into it. So a pool keeps what comes back, up to a limit. Shared
memory has no name: a process passes its descriptor to another one through a socket, and the kernel frees it when the
last process that has it is gone, however that ended.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

_STEP = 1 << 20
_KEPT_BYTES = 1 << 28
"""How much a pool keeps of what came back."""
_MOST_BYTES = 1 << 30
"""How much of a pool may be in use: what is larger goes through the socket."""
_MOST_PIECES = 64
"""Each piece of shared memory takes a descriptor."""
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

    def __init__(self, *, is_shared: bool) -> None:
        self._is_shared = is_shared
        self._free: list[Memory] = []
        self._used: set[Memory] = set()
        self._bytes = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> Memory | None:
        """Return memory for so many bytes; None if that would be too much, or if there is none."""
        with self._lock:
            fitting = [memory for memory in self._free if size <= memory.size <= 2 * max(size, _STEP)]
            if fitting:
                # Of the smallest the one that was used last: it is still in the caches.
                found = min(reversed(fitting), key=lambda memory: memory.size)
                self._free.remove(found)
                self._used.add(found)
                return found
            if self._bytes + size > _MOST_BYTES or len(self._used) >= _MOST_PIECES:
                return None
        rounded = -(-size // _STEP) * _STEP
        try:
            made = Memory(rounded, _shared_file(rounded) if self._is_shared else -1)
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
            self._free.append(memory)
            while sum(kept.size for kept in self._free) > _KEPT_BYTES:
                self._bytes -= self._free.pop(0).size

    def drop(self, memory: Memory) -> None:
        """Forget memory that another process may still use, although this one does not hear from it."""
        with self._lock:
            if memory in self._used:
                self._used.discard(memory)
                self._bytes -= memory.size

    @property
    def counts(self) -> dict[str, int]:
        """How many pieces are in use and kept, and their bytes."""
        return {"used": len(self._used), "free": len(self._free), "bytes": self._bytes}


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
