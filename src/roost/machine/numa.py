"""Which cores and network cards are near a device, as the kernel says; and binding this process to them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
from collections.abc import Collection
from pathlib import Path

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""The number of the system call, for which C libraries have no function."""
_MPOL_PREFERRED, _MASK_BITS = 1, 64


def numa_cores(allowed: Collection[int] | None = None, root: Path = Path("/")) -> dict[int, tuple[int, ...]]:
    """Return the cores of each NUMA node, of those that are allowed; none of a machine that has one node.

    >>> numa_cores(root=Path("/nowhere"))
    {}
    """
    found: dict[int, tuple[int, ...]] = {}
    for path in sorted((root / "sys/devices/system/node").glob("node[0-9]*/cpulist")):
        with contextlib.suppress(OSError, ValueError):
            cores = parse_cores(path.read_text(encoding="ascii"))
            found[int(path.parent.name[4:])] = tuple(one for one in cores if allowed is None or one in allowed)
    return found if len(found) > 1 else {}


def parse_cores(text: str) -> list[int]:
    """Return the numbers of a list as the kernel writes it.

    >>> parse_cores("0-2,8,10-11")
    [0, 1, 2, 8, 10, 11]
    """
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def numa_of(pci: str, root: Path = Path("/")) -> int | None:
    """Return the NUMA node of a device; None if the kernel does not tell."""
    try:
        node = int((_device(pci, root) / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def nearest_nic(pci: str, root: Path = Path("/")) -> str | None:
    """Return the InfiniBand or RoCE card that shares most of its way to the processor with a device.

    None without such a card, or if none is below the same root of the PCI tree.
    """
    own = os.path.realpath(_device(pci, root)).split(os.sep)
    depth = next((at for at, part in enumerate(own) if re.fullmatch(r"pci[0-9a-f:]+", part)), len(own))
    best, nearest = depth, None
    for card in sorted((root / "sys/class/infiniband").glob("*")):
        other = os.path.realpath(card / "device").split(os.sep)
        shared = next((at for at, (one, two) in enumerate(zip(own, other, strict=False)) if one != two), len(own))
        if shared > best:
            best, nearest = shared, card.name
    return nearest


def bind_to(cores: Collection[int], node: int | None) -> None:
    """Let all threads of this process run on these cores alone, and take new memory from a NUMA node if there is room.

    Threads and processes that begin later inherit both. A thread without the policy, because it began before or the
    container allows none, has its memory from the node of the core that first touches it.
    """
    # A thread that was not bound yet may have begun another one meanwhile.
    for _ in range(2):
        for task in os.listdir("/proc/self/task"):
            # A thread may have ended, and a core may be taken from this process: who asks looks at `own_cores`.
            with contextlib.suppress(OSError):
                os.sched_setaffinity(int(task), cores)
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is not None and node is not None and 0 <= node < _MASK_BITS:
        mask = ctypes.c_ulong(1 << node)
        last = ctypes.c_ulong(_MASK_BITS + 1)  # the kernel counts one more than it reads
        ctypes.CDLL(None).syscall(ctypes.c_long(number), ctypes.c_long(_MPOL_PREFERRED), ctypes.byref(mask), last)


def own_cores() -> tuple[int, ...]:
    """Return the cores on which any thread of this process may run."""
    found: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            found |= os.sched_getaffinity(int(task))
    return tuple(sorted(found))


def _device(pci: str, root: Path) -> Path:
    # The kernel writes the domain with 4 digits where NVIDIA writes 8.
    return root / "sys/bus/pci/devices" / pci[-12:].lower()
