"""The workers of the soak: they hold their accelerators, and answer in a way that can be checked."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from roost import Channel
from roost.weights.worker import WeightWorker
from soak.claims import claim
from soak.record import Recorder

if TYPE_CHECKING:
    from roost.rl import RolloutManager


class Oops(Exception):  # noqa: N818 - the user's own
    """What the user's code raises."""


class SoakWorker(WeightWorker):
    """Holds its accelerators from its constructor to its end."""

    def __init__(self, folder: str, who: str) -> None:
        super().__init__()
        self._recorder = Recorder(Path(folder), who, in_worker=True)
        self._folder = Path(folder)
        self._trained, self._served = ({"a": np.zeros(3), "b": np.zeros(10_000)} for _ in range(2))
        # With a device of every accelerator of its node a worker that sits on the node itself holds none.
        on_accelerators = self.placement.hardware_type == "accelerator"
        for rank in self.placement.local_hardware_ranks if on_accelerators else ():
            device = f"node{self.node_rank_of_machine()}-{rank}"
            if other := claim(self._folder / "claims", device, who):
                self._recorder.note("clash", what=device, mine=f"{who} ({self.address})", theirs=other)

    def node_rank_of_machine(self) -> str:
        """The node, by a name that is the same for all jobs."""
        import ray

        return str(ray.get_runtime_context().get_node_id())[:12]

    def echo(self, value: Any) -> tuple[int, Any]:
        return self.rank, value

    def count(self, number: int) -> Iterator[tuple[int, int]]:
        for item in range(number):
            yield self.rank, item

    def nap(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.rank

    def pour(self, channel: Channel, values: list[int], timeout: float) -> None:
        """Put values into a channel, each of them acknowledged."""
        for value in values:
            channel.put((self.rank, value), timeout=timeout)

    def pass_on(self, value: int, tag: int, timeout: float) -> Any:
        """Send a value to the next rank, and return the one that comes from the last.

        What an earlier round sent that failed may still wait for its receiver, under another tag.
        """
        ranks = self.world_size
        sent = self.send(value, self.group_name, (self.rank + 1) % ranks, async_op=True, tag=tag)
        got = self.recv(self.group_name, (self.rank - 1) % ranks, tag=tag, timeout=timeout)
        sent.wait(timeout)
        return got

    def offer(self) -> dict[str, np.ndarray]:
        return self._trained

    def accept(self) -> dict[str, np.ndarray]:
        return self._served

    def train(self, version: int) -> None:
        """Change all weights that it offers."""
        for array in self._trained.values():
            array[:] = version

    def served(self) -> tuple[int, list[float]]:
        """Return the version that its accepted weights are said to have, and all values that they have."""
        return self.weights_version, sorted({*np.concatenate([*self._served.values()]).tolist()})

    def fail(self) -> None:
        raise Oops(f"rank {self.rank} of {self.group_name}")

    def die(self) -> None:
        os._exit(3)

    def consume(self, manager: RolloutManager, count: int, timeout: float) -> int:
        """Take samples, and write down which before anything else."""
        with self._recorder.op("get", timeout, count=count) as op:
            op.note("get", ids=manager.get(count, timeout=timeout))
        return count if op.ok else 0

    def enter(self, manager: RolloutManager, timeout: float) -> bool:
        """Go through the lock."""
        with self._recorder.op("lock", 2 * timeout) as op:
            inside(manager, timeout, self._folder, self.address, op)
        return op.ok


def inside(manager: RolloutManager, timeout: float, folder: Path, who: str, op: Any) -> None:
    """Hold the lock for a moment, and write it down if another one holds it too."""
    import fcntl

    with manager.lock(timeout), (folder / "inside").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            op.note("clash", what="the lock", mine=who, theirs="another caller")
        time.sleep(0.05)
