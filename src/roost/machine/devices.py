"""The accelerators of this machine, as NVIDIA's library and the kernel show them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from roost.machine.numa import nearest_nic, numa_of
from roost.machine.processes import one_line


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUser:
    """A process that uses a device; `command` is empty if the process is not visible here, as in another container."""

    pid: int
    memory: int | None
    command: str = ""
    user: str = ""
    of_ray: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device of NVIDIA; what its library does not say is None."""

    index: int
    model: str
    uuid: str = ""
    memory: int | None = None
    memory_used: int | None = None
    pci: str | None = None
    numa: int | None = None
    nic: str | None = None
    """The InfiniBand or RoCE card that is nearest to it."""
    users: tuple[DeviceUser, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The accelerators that a machine shows to a process, whatever Ray counts."""

    nvidia: tuple[Device, ...] = ()
    nvidia_error: str = ""
    """Why NVIDIA's library does not work here."""
    nvidia_files: int = 0
    """The number of NVIDIA devices in /dev."""
    nvidia_installed: int = 0
    """The number of devices that the kernel's driver knows, including those hidden from a container."""
    amd: int = 0
    ascend: int = 0

    @property
    def by_resource(self) -> dict[str, int]:
        """The number of devices by Ray's name for them."""
        return {"GPU": len(self.nvidia) + self.amd, "NPU": self.ascend}


def find_devices(root: Path = Path("/")) -> Devices:
    """Return the accelerators of every vendor, and the processes that use those of NVIDIA."""
    nvidia, error = nvidia_devices(with_users=True)
    amd = 0
    for properties in (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        # The kernel lists CPUs there too, which have no SIMD units.
        with contextlib.suppress(OSError):
            amd += re.search(r"^simd_count [1-9]", properties.read_text(encoding="ascii"), re.M) is not None
    return Devices(
        nvidia=nvidia,
        nvidia_error=error,
        nvidia_files=_count(root / "dev", r"nvidia\d+"),
        nvidia_installed=_count(root / "proc/driver/nvidia/gpus", r".+"),
        amd=amd,
        ascend=_count(root / "dev", r"davinci\d+"),
    )


def nvidia_devices(*, with_users: bool = False) -> tuple[tuple[Device, ...], str]:
    """Return the devices that NVIDIA's library lists, in its order, or none and the reason why it does not work."""
    try:
        import pynvml  # type: ignore[import-untyped]

        pynvml.nvmlInit()
    except Exception as error:
        # No library, no driver, a driver of another version.
        return (), str(error)
    try:
        return tuple(_nvidia_device(pynvml, index, with_users) for index in range(pynvml.nvmlDeviceGetCount())), ""
    except pynvml.NVMLError as error:
        return (), str(error)
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def nvidia_sampler() -> Callable[[], list[tuple[float | None, int | None, int | None]]]:
    """Return a function that says how busy NVIDIA's devices are: load from 0 to 1, memory in use, and all its memory.

    It keeps the library open, because to open it takes long. What the library does not say is None.
    """
    handles: list[Any] = []
    # No library, no driver, a driver of another version: a machine without devices of NVIDIA.
    with contextlib.suppress(Exception):
        import pynvml as nvml

        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]

    def sample() -> list[tuple[float | None, int | None, int | None]]:
        found = []
        for handle in handles:
            load = used = total = None
            # A question that this device or driver does not know leaves a gap.
            with contextlib.suppress(nvml.NVMLError):
                load = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
            with contextlib.suppress(nvml.NVMLError):
                memory = nvml.nvmlDeviceGetMemoryInfo(handle)
                used, total = int(memory.used), int(memory.total)
            found.append((load, used, total))
        return found

    return sample


def _nvidia_device(nvml: Any, index: int, with_users: bool) -> Device:
    device = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(question: Callable[[Any], Any]) -> Any:
        # A question that this device or driver does not know leaves a gap.
        try:
            return question(device)
        except nvml.NVMLError:
            return None

    memory, bus = ask(nvml.nvmlDeviceGetMemoryInfo), ask(nvml.nvmlDeviceGetPciInfo)
    pci = bus.busId.lower() if bus else None
    users = []
    for item in (ask(nvml.nvmlDeviceGetComputeRunningProcesses) if with_users else ()) or ():
        user = DeviceUser(pid=int(item.pid), memory=item.usedGpuMemory)
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(user.pid)
            names = [one.name() for one in (process, *process.parents())]
            user = replace(
                user,
                command=one_line(process.cmdline() or [process.name()], 80),
                user=process.username(),
                of_ray=any(name.startswith("ray::") or name == "raylet" for name in names),
            )
        users.append(user)
    return Device(
        index=index,
        model=nvml.nvmlDeviceGetName(device).removeprefix("NVIDIA "),
        uuid=ask(nvml.nvmlDeviceGetUUID) or "",
        memory=int(memory.total) if memory else None,
        memory_used=int(memory.used) if memory else None,
        pci=pci,
        numa=numa_of(pci) if pci else None,
        nic=nearest_nic(pci) if pci else None,
        users=tuple(users),
    )


def _count(folder: Path, pattern: str) -> int:
    try:
        return sum(re.fullmatch(pattern, path.name) is not None for path in folder.iterdir())
    except OSError:
        return 0
