"""How busy this machine is: its processors, its memory, its accelerators."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUsage:
    """How busy one device is; what its library does not say is None."""

    index: int
    load: float | None
    """From 0 to 1."""
    memory: int | None
    memory_total: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUsage:
    """How busy a machine is now."""

    cpu: float
    """The share of all its processors that was in use since the last sample, from 0 to 1."""
    memory: int
    memory_total: int
    devices: tuple[DeviceUsage, ...] = ()


class NodeProbe:
    """Samples this machine; keeps NVIDIA's library open, because to open it takes long."""

    def __init__(self) -> None:
        psutil.cpu_percent(None)
        self._nvml: Any = None
        self._devices: list[Any] = []
        try:
            import pynvml  # type: ignore[import-untyped]

            pynvml.nvmlInit()
            self._devices = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            self._nvml = pynvml
        except Exception:
            # No library, no driver, a driver of another version: a machine without devices of NVIDIA.
            self._devices = []

    def sample(self) -> NodeUsage:
        """Return how busy the machine is since the last sample."""
        memory = psutil.virtual_memory()
        return NodeUsage(
            cpu=psutil.cpu_percent(None) / 100,
            memory=int(memory.total - memory.available),
            memory_total=int(memory.total),
            devices=tuple(self._device(index, device) for index, device in enumerate(self._devices)),
        )

    def _device(self, index: int, device: Any) -> DeviceUsage:
        load = memory = total = None
        # A question that this device or driver does not know leaves a gap.
        with contextlib.suppress(self._nvml.NVMLError):
            load = self._nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100
        with contextlib.suppress(self._nvml.NVMLError):
            found = self._nvml.nvmlDeviceGetMemoryInfo(device)
            memory, total = int(found.used), int(found.total)
        return DeviceUsage(index=index, load=load, memory=memory, memory_total=total)
