"""A stand-in for torch on machines without accelerators: it counts the devices that this process may see."""

from __future__ import annotations

import os
from types import SimpleNamespace


def _devices() -> list[str]:
    return os.environ["CUDA_VISIBLE_DEVICES"].split(",")


cuda = SimpleNamespace(device_count=lambda: len(_devices()), get_device_properties=lambda index: _devices()[index])
