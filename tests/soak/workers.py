"""The workers of the soak: they hold their accelerators, and answer in a way that can be checked."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from roost import CallTimedOut, Channel, ChannelClosed
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

    def take(self, channel: Channel, number: int, timeout: float) -> list[tuple[int, int]]:
        """Take so many items out of a channel, and give up receives in between."""
        taken = []
        while len(taken) < number:
            taken += give_up(channel.get(async_op=True)) or [channel.get(timeout=timeout)]
        return taken

    def pass_on(self, value: int, tag: int, timeout: float) -> Any:
        """Send a value to the next rank, and return the one that comes from the last; give up receives before that.

        What an earlier round sent that failed may still wait for its receiver, under another tag.
        """
        ranks = self.world_size
        source = (self.group_name, (self.rank - 1) % ranks)
        early = give_up(self.recv(*source, tag=tag, async_op=True))
        # Each array takes a descriptor on the same node.
        thing = [value, *(np.full(20_000, value) for _ in range(4))]
        sent = self.send(thing, self.group_name, (self.rank + 1) % ranks, async_op=True, tag=tag)
        early = early or give_up(self.recv(*source, tag=tag, async_op=True))
        got, *arrays = early[0] if early else self.recv(*source, tag=tag, timeout=timeout)
        sent.wait(timeout)
        return got if all((array == got).all() and len(array) == 20_000 for array in arrays) else (got, arrays)

    def score(self, name: str) -> None:
        """Raise, and write down before what: an exception with a name that is there once."""
        self._recorder.note("raised", name=name, address=self.address)
        raise Oops(name)

    def feed(self, channel: Channel, pipeline: str, ids: list[str], timeout: float) -> None:
        """Put items into a pipeline, and write down which of them were acknowledged."""
        for item in ids:
            self._recorder.note("feeding", pipeline=pipeline, ids=[item])
            channel.put(item, timeout=timeout)
            self._recorder.note("fed", pipeline=pipeline, ids=[item])

    def judge(self, source: Channel, sink: Channel, pipeline: str, dies_at: int | None, timeout: float) -> None:
        """Pass the items of a pipeline on until it is closed, or die with one: before it is passed on, or after."""
        with contextlib.suppress(ChannelClosed):
            for number in itertools.count(1):
                with source.lease(timeout=timeout) as item:
                    if number == -(dies_at or 0):
                        self._end(pipeline)
                    sink.put(item, timeout=timeout)
                    if number == dies_at:
                        self._end(pipeline)

    def _end(self, pipeline: str) -> None:
        self._recorder.note("dying", pipeline=pipeline)
        os._exit(3)

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


def give_up(handle: Any) -> list[Any]:
    """Give up a receive in one of the ways there are; returns what came before that, if anything did."""
    way = random.choice(["drop", "cancel", "time out"])  # noqa: S311 - what happens depends on the moment anyway

    async def cancel() -> list[Any]:
        waiting = asyncio.ensure_future(handle.async_wait())
        await asyncio.sleep(0)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            return [await waiting]
        return []

    if way == "cancel":
        return asyncio.run(cancel())
    if way == "time out":
        with contextlib.suppress(CallTimedOut):
            return [handle.wait(0.0)]
    return []


def inside(manager: RolloutManager, timeout: float, folder: Path, who: str, op: Any) -> None:
    """Hold the lock for a moment, and write it down if another one holds it too."""
    import fcntl

    with manager.lock(timeout), contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context((folder / "inside").open("a+"))
        except OSError as error:
            # A process that is starved of descriptors: this code is the user's.
            raise Oops(f"cannot open its file: {error}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            op.note("clash", what="the lock", mine=who, theirs="another caller")
        time.sleep(0.05)
