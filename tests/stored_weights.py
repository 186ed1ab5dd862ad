"""A trainer for the stand-in of an engine."""

from __future__ import annotations

from typing import Any

import numpy as np

from roost.weights.worker import WeightWorker


class Holder(WeightWorker):
    """Has two arrays, or tensors on a device, all elements of which are the same."""

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.arrays: dict[str, Any] = {"embed": np.zeros((40, 30), np.float32), "scale": np.zeros((), np.float32)}
        if device:
            import torch

            self.arrays = {name: torch.from_numpy(one).to(device) for name, one in self.arrays.items()}

    def offer(self) -> dict[str, Any]:
        return self.arrays

    def set(self, value: float) -> None:
        for array in self.arrays.values():
            array[...] = value
