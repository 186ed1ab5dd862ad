"""The copies of an update between memory that this process can map, found once and started as quickly as can be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from roost.comm.move.cuda import DeviceCopy, as_device_copy, start_copies
from roost.weights.arrays import copy, devices_of

_CHECK_EVERY = 64


class Copies:
    """Pairs of arrays, the second of which is to be copied into the first."""

    def __init__(self) -> None:
        self.devices: set[Any] = set()
        """Those that the arrays are on."""
        self._on_devices: dict[Any, list[DeviceCopy]] = defaultdict(list)
        self._others: list[tuple[Any, Any]] = []

    def add(self, target: Any, source: Any) -> None:
        """Take a copy in."""
        self.devices |= devices_of((target, source))
        plain = as_device_copy(target, source)
        if plain is not None:
            self._on_devices[target.device].append(plain)
        else:
            self._others.append((target, source))

    def start(self, check: Callable[[], None]) -> None:
        """Start all of them, and call `check` now and then, which may break it off; devices finish later."""
        for device, plain in self._on_devices.items():
            start_copies(plain, device, check)
        for place, (target, source) in enumerate(self._others):
            copy(target, source)
            if place % _CHECK_EVERY == 0:
                check()
