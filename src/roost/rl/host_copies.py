"""Tensors that leave an accelerator for a while, so that another process can have its memory."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterable
from typing import Any


class HostCopies:
    """Moves tensors to the host and back: they stay the same objects, and their memory is elsewhere meanwhile.

    Memory of the host is pinned, which devices copy to at full speed, and kept: taking it takes longer than a copy.
    """

    def __init__(self) -> None:
        self._hosts: dict[int, tuple[Any, Any]] = {}
        """By identity of a tensor: the tensor, and its memory on the host."""
        self._away: list[tuple[Any, Any]] = []
        """The tensors that are on the host, and the device of each."""

    def leave(self, tensors: Iterable[Any]) -> None:
        """Move tensors to the host, and give the memory of their device back; those on the host stay as they are."""
        torch: Any = importlib.import_module("torch")
        leaving = [tensor for tensor in tensors if tensor.device.type != "cpu"]
        hosts = []
        for tensor in leaving:
            _, host = self._hosts.get(id(tensor), (None, None))
            if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
                host = torch.empty_like(tensor, device="cpu", pin_memory=True)
                self._hosts[id(tensor)] = tensor, host
            hosts.append(host)
        with torch.no_grad():
            for tensor, host in zip(leaving, hosts, strict=True):
                host.copy_(tensor, non_blocking=True)
            for device in {tensor.device for tensor in leaving}:
                torch.accelerator.synchronize(device)
        for tensor, host in zip(leaving, hosts, strict=True):
            self._away.append((tensor, tensor.device))
            tensor.data = host
        free_memory()

    def come_back(self) -> None:
        """Move the tensors that left back to their devices."""
        torch: Any = importlib.import_module("torch")
        devices = {device for _, device in self._away}
        while self._away:
            # A tensor that there is no room for stays, for the next try.
            tensor, device = self._away[-1]
            tensor.data = tensor.data.to(device, non_blocking=True)
            self._away.pop()
        for device in devices:
            torch.accelerator.synchronize(device)


def free_memory() -> None:
    """Give memory that no tensor uses any more back to the accelerator."""
    torch: Any = importlib.import_module("torch")
    if torch.accelerator.is_available():
        gc.collect()
        torch.get_device_module().empty_cache()
