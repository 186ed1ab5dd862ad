"""An engine whose processes take weights in before one of them uses them for all."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from roost.rl.engine import EngineSpec
from roost.testing import NumpyEngine
from roost.weights.adapters import DictWeights
from roost.weights.worker import WeightWorker
from waiting import wait_until


class NeverReady(NumpyEngine):
    """Never becomes healthy, and leaves a file when it is stopped."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)

    def health(self) -> bool:
        return False

    def stop(self, seconds: float = 2.0) -> None:
        (self.folder / str(os.getpid())).touch()
        super().stop(seconds)


class Giver(WeightWorker):
    """A trainer of engines that pause."""

    def __init__(self) -> None:
        super().__init__()
        self.arrays = {"w": np.zeros(1000)}

    def offer(self) -> dict[str, np.ndarray]:
        return self.arrays

    def set(self, value: float) -> None:
        self.arrays["w"][...] = value


class PausingEngine(NumpyEngine):
    """Lets links overwrite its weights, in one pause at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.arrays = {"w": np.zeros(1000)}
        self.pause = threading.Lock()

    def accept(self) -> dict[str, np.ndarray]:
        return self.arrays

    @contextmanager
    def weights_changing(self, _version: int) -> Iterator[None]:
        with self.pause:
            yield

    def generate(self, _request: Any) -> list[float]:
        return sorted(set(self.arrays["w"].tolist()))


class StagingEngine(NumpyEngine):
    """Notes in files of a folder which process has taken a version in, and what the first one found when it used it."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.weights: Any = None
        self.node = 0

    def start(self, spec: EngineSpec) -> None:
        self.node = spec.node_rank
        super().start(spec)

    def stage_weights(self, weights: Any) -> None:
        if self.node:
            # The other one is quicker.
            wait_until((self.folder / f"{weights}-0").exists, "node 0 has its weights")
        self.weights = weights
        (self.folder / f"{weights}-{self.node}").touch()

    def accept(self) -> DictWeights:
        engine = self

        class Staged(DictWeights):
            def commit(self, version: int) -> None:
                if engine.node == 0:
                    found = sorted(path.name for path in engine.folder.glob(f"{engine.weights}-*"))
                    (engine.folder / f"used-{version}").write_text(" ".join(found))

        return Staged({})

    def update_weights(self, weights: Any, version: int) -> None:
        self.stage_weights(weights)
        self.accept().commit(version)
