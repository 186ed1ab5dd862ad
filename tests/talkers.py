"""Workers that talk to each other, for tests."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import Any

import numpy as np

from roost import ANY, Worker


class Unloadable:
    """Pickles, and raises when it is unpickled."""

    def __reduce__(self) -> Any:
        return _explode, ()


def _explode() -> None:
    raise ArithmeticError("boom")


class Talker(Worker):
    """Sends and receives what it is asked to."""

    def say(self, thing: Any, group: str, rank: Any, **options: Any) -> None:
        self.send(thing, group, rank, **options)

    def hear(self, group: str, rank: Any = None, **options: Any) -> Any:
        return self.recv(group, rank, **options)

    def hear_many(self, group: str, rank: Any, count: int) -> list[Any]:
        handles = [self.recv(group, rank, async_op=True) for _ in range(count)]
        return [handle.wait(60) for handle in handles]

    def echo(self, group: str, rank: int, count: int) -> None:
        for _ in range(count):
            self.send(self.recv(group, rank, timeout=60), group, rank)

    def round_trip(self, things: list[Any], group: str, rank: int) -> list[Any]:
        got = []
        for thing in things:
            self.send(thing, group, rank, timeout=60)
            got.append(self.recv(group, rank, timeout=60))
        return got

    def say_unloadable(self, group: str, rank: int) -> None:
        self.send(Unloadable(), group, rank)

    def say_array(self, size: int, value: int, group: str, rank: int) -> None:
        self.send(np.full(size, value, np.uint8), group, rank, timeout=120)

    def hear_array(self, group: str, rank: int) -> tuple[int, int, bool]:
        array = self.recv(group, rank, timeout=120)
        writable = array.flags.writeable
        array[0] += 1
        return int(array[0]), int(array[-1]), writable

    def say_tensor(self, size: int, value: int, group: str, rank: int) -> None:
        self.send_tensor(np.full(size, value, np.uint8), group, rank, timeout=120)

    def hear_tensor(self, size: int, group: str, rank: int) -> set[int]:
        array = np.zeros(size, np.uint8)
        self.recv_tensor(array, group, rank, timeout=120)
        return set(np.unique(array).tolist())

    def interleave(self, group: str, rank: int) -> None:
        self.send("first", group, rank)
        self.send_tensor(np.arange(4), group, rank)
        self.send("last", group, rank)

    def hear_interleaved(self, group: str, rank: int) -> list[Any]:
        array = np.zeros(4, int)
        first = self.recv(group, rank)
        self.recv_tensor(array, group, rank)
        return [first, array.tolist(), self.recv(group, rank)]

    def hear_in_threads(self, group: str, count: int) -> list[Any]:
        """Receive in two threads and in two event loops at the same time."""
        got: list[Any] = []

        def plain() -> None:
            got.extend(self.recv(group, ANY, timeout=60)[0] for _ in range(count))

        def in_loop() -> None:
            async def receive() -> None:
                for _ in range(count):
                    got.append((await self.recv(group, ANY, async_op=True))[0])

            asyncio.run(receive())

        threads = [threading.Thread(target=target) for target in (plain, plain, in_loop, in_loop)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        return sorted(got)

    def pid(self) -> int:
        return os.getpid()

    def count_threads(self) -> int:
        return threading.active_count()

    def memory(self) -> int:
        """Return the bytes of memory that this process does not share."""
        with open("/proc/self/smaps_rollup") as lines:
            return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))

    def post_receives(self, group: str, rank: int, count: int) -> tuple[int, int]:
        """Post receives that wait; returns how many threads and bytes that cost."""
        threads, before = self.count_threads(), self.memory()
        self._kept = [self.recv(group, rank, async_op=True) for _ in range(count)]
        return self.count_threads() - threads, self.memory() - before

    def say_many(self, size: int, count: int, group: str, rank: int) -> None:
        """Send messages of some bytes one after the other, and wait while the other end takes no more."""
        for _ in range(count):
            self.send(bytes(size), group, rank, timeout=120)

    def flood(self, size: int, count: int, group: str, rank: int) -> int:
        """Send until the other end takes no more; returns how many messages it took."""
        handles = []
        for number in range(count):
            handle = self.send(bytes(size), group, rank, async_op=True)
            handles.append(handle)
            deadline = time.monotonic() + 2
            while not handle.done() and time.monotonic() < deadline:
                time.sleep(0.01)
            if not handle.done():
                return number
        return count

    def all_have(self, thing: Any, groups: Any, src: Any = None, **options: Any) -> Any:
        return self.broadcast(thing, groups, src, **options)

    def reduce(self, ranks: list[int] | None = None, **options: Any) -> list[float]:
        """Add up the ranks in two process groups at once."""
        import torch
        import torch.distributed as dist

        groups = [self.collective("talkers", ranks, **options) for _ in range(2)]
        sums = []
        for group in groups:
            value = torch.tensor([float(self.rank)])
            dist.all_reduce(value, group=group)
            sums.append(value.item())
            dist.destroy_process_group(group)
        return sums
