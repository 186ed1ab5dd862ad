"""A trainer for the stand-in of an engine."""

from __future__ import annotations

import numpy as np

from roost.weights.worker import WeightWorker


class Holder(WeightWorker):
    """Has two arrays, all elements of which are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.arrays = {"embed": np.zeros((40, 30), np.float32), "scale": np.zeros((), np.float32)}

    def offer(self) -> dict[str, np.ndarray]:
        return self.arrays

    def set(self, value: float) -> None:
        for array in self.arrays.values():
            array[...] = value
