"""The workers of the tests of channels."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from roost import Channel, ChannelClosed, Worker


class Odd:
    """Something that does not unpickle."""

    def __reduce__(self) -> Any:
        return _raise, ("it does not want to",)


def _raise(text: str) -> None:
    raise ValueError(text)


class Deadly:
    """Something that ends the process that unpickles it."""

    def __reduce__(self) -> Any:
        return os._exit, (7,)


class Own:
    """A class of the user's."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own) and self.value == other.value

    __hash__ = None  # type: ignore[assignment]


def plain() -> list[Any]:
    """Values of every kind."""
    return [
        None,
        b"",
        b"x" * 8191,
        b"x" * 8192,
        b"x" * (3 << 20),
        bytearray(b"y" * 10_000),
        "text" * 5000,
        {"a": [b"z" * 9000, (1, 2.5, None)]},
        np.arange(20_000),
        Own(b"w" * 8192),
    ]


def are_plain(found: list[Any]) -> bool:
    """Whether these are the same values."""
    return len(found) == len(plain()) and all(
        type(one) is type(other) and (np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other)
        for one, other in zip(found, plain(), strict=True)
    )


class Talker(Worker):
    """Puts and gets whatever a test says."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def pid(self) -> int:
        return os.getpid()

    def put(self, channel: Channel, *items: Any, **options: Any) -> int:
        for item in items:
            channel.put(item, **options)
        return channel.qsize(options.get("key", "default_queue"))

    def get(self, channel: Channel, count: int = 1, **options: Any) -> list[Any]:
        return [channel.get(**options) for _ in range(count)]

    def pass_on(self, channel: Channel, count: int) -> None:
        """Take items, and put them under another key: half of them one by one, the others together."""
        for _ in range(count // 2):
            channel.put(channel.get(), key="back")
        channel.put_many(channel.get_many(count - count // 2), key="back")

    def do(self, channel: Channel, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(channel, method)(*args, **kwargs)

    def connected(self, name: str) -> str:
        return repr(self.connect_channel(name))

    def put_ones(self, channel: Channel, size: int, count: int = 1) -> None:
        for _ in range(count):
            channel.put(np.ones(size, np.uint8))

    def put_async(self, channel: Channel, size: int, count: int) -> int:
        """Begin to put far more than fits, and keep the handles."""
        item = np.ones(size, np.uint8)
        self.kept += [channel.put(item, async_op=True) for _ in range(count)]
        return sum(handle.done() for handle in self.kept)

    def send_array(self, group: str, rank: int) -> None:
        """Begin to send what nobody receives."""
        self.kept.append(self.send(np.ones(100 << 20, np.uint8), group, rank, async_op=True))

    def wait_for_kept(self) -> int:
        for handle in self.kept:
            handle.wait(60)
        count = len(self.kept)
        self.kept.clear()
        return count

    def put_and_stay(self, channel: Channel, item: Any) -> None:
        """Put an item, and never return."""
        channel.put(item)
        time.sleep(3600)

    def lease_and_stay(self, channel: Channel, seen: Channel) -> None:
        """Take an item for a block that never ends."""
        with channel.lease() as item:
            seen.put(item)
            time.sleep(3600)

    def consume(self, channel: Channel, most: int = 10**9) -> list[Any]:
        found = []
        for item in channel:
            found.append(item)
            if len(found) == most:
                break
        return found

    def consume_one_and_stay(self, channel: Channel, seen: Channel) -> None:
        """Begin a loop, and never come to its second item."""
        for item in channel:
            seen.put(item)
            time.sleep(3600)

    def put_plain(self, channel: Channel) -> None:
        """Put values of every kind: one by one twice, then together twice."""
        for _ in range(2):
            for item in plain():
                channel.put(item)
        for _ in range(2):
            channel.put_many(plain())
        channel.close()

    def take_plain(self, channel: Channel) -> bool:
        """Take them in each way that there is."""
        count = len(plain())
        found = [[channel.get() for _ in range(count)], []]
        for _ in range(count):
            with channel.lease() as item:
                found[1].append(item)
        found.append(channel.get_many(count))
        found.append(list(channel))
        return all(map(are_plain, found))

    def put_deadly(self, channel: Channel) -> None:
        """Put an item that ends who gets it."""
        channel.put(Deadly())

    def put_odd(self, channel: Channel) -> None:
        """Put an item that only this process can unpickle."""
        channel.put(Odd())

    def create(self, name: str, **options: Any) -> Channel:
        self.made = self.create_channel(name, **options)
        return self.made

    def drop_kept(self) -> None:
        self.kept.clear()

    def from_threads_and_loops(self, channel: Channel, count: int) -> list[Any]:
        """Put and get in two threads and two event loops at once."""
        found: list[Any] = []

        async def in_loop(number: int) -> None:
            for place in range(count):
                await channel.put((number, place), key=number, async_op=True)
            found.extend([await channel.get(key=number, async_op=True) for _ in range(count)])

        def in_thread(number: int) -> None:
            for place in range(count):
                channel.put((number, place), key=number)
            found.extend([channel.get(key=number) for _ in range(count)])

        threads = [threading.Thread(target=in_thread, args=(number,)) for number in (0, 1)]
        threads += [threading.Thread(target=lambda number=number: asyncio.run(in_loop(number))) for number in (2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sorted(found)

    def shared_files(self) -> int:
        """How many pieces of shared memory this process has open."""
        folder = "/proc/self/fd"
        count = 0
        for name in os.listdir(folder):
            try:
                count += "memfd:roost" in os.readlink(f"{folder}/{name}")
            except OSError:
                continue
        return count

    def threads(self) -> list[str]:
        return sorted(thread.name for thread in threading.enumerate())


class Stage(Worker):
    """A part of a pipeline, which may end anywhere; called again, it goes on."""

    def produce(self, out: Channel, folder: Path, count: int) -> None:
        """Put as many numbers, each noted once its put has returned."""
        with (folder / f"put by {self.rank}").open("a+", buffering=1) as noted:
            noted.seek(0)
            for number in range(len(noted.readlines()), count):
                out.put((self.rank, number), timeout=120)
                noted.write(f"{number}\n")

    def relay(self, source: Channel, out: Channel) -> None:
        """Pass on what comes, until there will be no more."""
        with contextlib.suppress(ChannelClosed):
            while True:
                with source.lease(timeout=120) as item:
                    out.put(item, timeout=120)

    def consume(self, source: Channel, folder: Path) -> None:
        """Note what comes, until there will be no more."""
        with (folder / f"got by {self.rank}").open("a", buffering=1) as noted, contextlib.suppress(ChannelClosed):
            while True:
                with source.lease(timeout=120) as (rank, number):
                    noted.write(f"{rank} {number}\n")
