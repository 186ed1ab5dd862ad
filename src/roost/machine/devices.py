"""The accelerators of this machine, as NVIDIA's library and the kernel show them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

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
    return Devices(
        nvidia=nvidia,
        nvidia_error=error,
        nvidia_files=_count(root / "dev", r"nvidia\d+"),
        nvidia_installed=_count(root / "proc/driver/nvidia/gpus", r".+"),
        amd=_amd(root / "sys/class/kfd/kfd/topology/nodes"),
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
    users = ask(nvml.nvmlDeviceGetComputeRunningProcesses) if with_users else ()
    return Device(
        index=index,
        model=nvml.nvmlDeviceGetName(device).removeprefix("NVIDIA "),
        uuid=ask(nvml.nvmlDeviceGetUUID) or "",
        memory=int(memory.total) if memory else None,
        memory_used=int(memory.used) if memory else None,
        pci=pci,
        numa=_numa_node(pci) if pci else None,
        users=tuple(_device_user(int(item.pid), item.usedGpuMemory) for item in users or ()),
    )


def _device_user(pid: int, memory: int | None) -> DeviceUser:
    try:
        process = psutil.Process(pid)
        names = [item.name() for item in (process, *process.parents())]
        return DeviceUser(
            pid=pid,
            memory=memory,
            command=one_line(process.cmdline() or [process.name()], 80),
            user=process.username(),
            of_ray=any(name.startswith("ray::") or name == "raylet" for name in names),
        )
    except psutil.Error:
        return DeviceUser(pid=pid, memory=memory)


def _numa_node(pci: str) -> int | None:
    """The kernel writes the domain with 4 digits where NVIDIA writes 8."""
    try:
        number = int(Path(f"/sys/bus/pci/devices/{pci[-12:]}/numa_node").read_text(encoding="ascii"))
    except OSError:
        return None
    return number if number >= 0 else None


def _amd(nodes: Path) -> int:
    """Count the nodes that have SIMD units: the kernel lists CPUs there too, and those have none."""
    found = 0
    for properties in nodes.glob("*/properties"):
        with contextlib.suppress(OSError):
            found += re.search(r"^simd_count [1-9]", properties.read_text(encoding="ascii"), re.M) is not None
    return found


def _count(folder: Path, pattern: str) -> int:
    try:
        return sum(re.fullmatch(pattern, path.name) is not None for path in folder.iterdir())
    except OSError:
        return 0
