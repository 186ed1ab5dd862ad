"""Workers whose connections break, whose descriptors run out, and who send what the others cannot read, for tests."""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import sys
import threading
from typing import Any

import numpy as np

from channel_workers import Own
from roost import Channel, ChannelClosed, RoostError, Worker, WorkerFailed

# Every so many messages one has a buffer that travels through shared memory on the same node.
_LARGE_EACH = 50


def message(number: int) -> Any:
    """The message of that number: most are small."""
    return np.full(20_000, number) if number % _LARGE_EACH == 0 else number


def is_message(got: Any, number: int) -> bool:
    """Whether it arrived as it was sent."""
    if number % _LARGE_EACH == 0:
        return isinstance(got, np.ndarray) and len(got) == 20_000 and bool((got == number).all())
    return bool(got == number)


def plain() -> list[Any]:
    """Values of every kind; with classes that only the script knows."""
    own = type("Mine", (Own,), {"__module__": "__main__", "__qualname__": "Mine"})
    # Found there, as the classes of a script are: the other end has another script.
    vars(sys.modules["__main__"])["Mine"] = own
    values = [
        *(None, True, 0, 2.5, "", "text", b"", b"x" * 8191, b"x" * 8192, b"x" * 3_000_000, bytearray(8192)),
        *([], [b"x" * 9000, {"a": (1, {2})}], np.zeros((0, 3), np.float32), np.arange(20_000)[::3], np.array(3.5)),
        *({"nested": [np.ones(100_000), b"y" * 70_000]}, Own(b"w" * 8192), Own([1]), own(7)),
    ]
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        values += [torch.arange(6).reshape(2, 3), torch.ones(50_000, dtype=torch.bfloat16)]
    return values


def is_same(got: Any, sent: Any) -> bool:
    """Whether a value arrived as it was sent."""
    if type(got).__module__ == "__main__":
        # Another process has made its class again.
        return (type(got).__name__, got.value) == (type(sent).__name__, sent.value)
    if type(got) is not type(sent):
        return False
    if isinstance(sent, dict):
        return got.keys() == sent.keys() and all(is_same(got[key], sent[key]) for key in sent)
    if isinstance(sent, list):
        return len(got) == len(sent) and all(map(is_same, got, sent))
    if isinstance(sent, np.ndarray):
        return (got.dtype, got.shape) == (sent.dtype, sent.shape) and bool((got == sent).all())
    if type(sent).__module__ == "torch":
        return (got.dtype, got.shape) == (sent.dtype, sent.shape) and bool((got == sent).all())
    return bool(got == sent)


class Wired(Worker):
    """Says and hears a great deal, or something odd."""

    def pid(self) -> int:
        return os.getpid()

    def open_files(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def exchange(self, peers: list[int], count: int) -> list[str]:
        """Send so many messages to each peer while as many come from it; returns what did not arrive as it was sent."""
        wrong: list[str] = []

        def say(peer: int) -> None:
            try:
                for number in range(count):
                    self.send(message(number), self.group_name, peer, timeout=120)
            except RoostError as error:
                wrong.append(f"{self.address} to {peer}: {error}")

        def hear(peer: int) -> None:
            try:
                for number in range(count):
                    if not is_message(got := self.recv(self.group_name, peer, timeout=120), number):
                        wrong.append(f"{self.address} got {got!r:.80} of {peer}, not {number}")
                        return
            except RoostError as error:
                wrong.append(f"{self.address} of {peer}: {error}")

        threads = [threading.Thread(target=run, args=(peer,)) for peer in peers for run in (say, hear)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return wrong

    def produce(self, channel: Channel, count: int, keys: int) -> None:
        """Put so many items under each of some keys."""
        for number in range(count):
            for key in range(keys):
                channel.put((self.rank, number, message(number)), key=key, timeout=120)

    def consume(self, channel: Channel, key: int, by_loop: bool) -> list[tuple[int, int]]:
        """Take all items under a key until it is closed; returns from whom each was, and its number."""
        found = []

        def take(item: tuple[int, int, Any]) -> None:
            source, number, content = item
            if not is_message(content, number):
                raise ValueError(f"item {number} of {source} is {content!r:.80}")
            found.append((source, number))

        if by_loop:
            for item in channel.iterate(key):
                take(item)
            return found
        with contextlib.suppress(ChannelClosed):
            while True:
                take(channel.get(key, timeout=120))
        return found

    def say_under_odd_tag(self, folder: str, rank: int) -> str:
        """Send ten messages, and one between them under a tag of a class that only this process can import."""
        sys.path.insert(0, folder)
        try:
            tag = importlib.import_module("only_here").Tag(1)
        finally:
            sys.path.remove(folder)
        for number in range(5):
            self.send(number, self.group_name, rank)
        bad = self.send(np.ones(100_000), self.group_name, rank, tag=tag, async_op=True)
        for number in range(5, 10):
            self.send(number, self.group_name, rank)
        self.send("after", self.group_name, rank, tag=("plain", 1))
        try:
            bad.wait(60)
        except WorkerFailed as error:
            return str(error)
        return ""

    def hear_ten(self, rank: int) -> list[Any]:
        return [self.recv(self.group_name, rank, timeout=60) for _ in range(10)] + [
            self.recv(self.group_name, rank, tag=("plain", 1), timeout=60)
        ]

    def say_arrays(self, count: int, rank: int) -> None:
        """Once a rank on this node is ready, send it arrays of 1 MiB, each of which needs a descriptor there."""
        self.recv(self.group_name, rank, timeout=60)
        handles = [
            self.send(np.full(1 << 20, value, np.uint8), self.group_name, rank, async_op=True) for value in range(count)
        ]
        for handle in handles:
            handle.wait(60)

    def hear_arrays_without_descriptors(self, count: int, rank: int) -> list[tuple[int, int]]:
        """Receive and keep them while this process can open nothing; returns the first and last byte of each."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        # The kernel gives the lowest number that is free.
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            self.send("ready", self.group_name, rank)
            kept = [self.recv(self.group_name, rank, timeout=60) for _ in range(count)]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return [(int(array[0]), int(array[-1])) for array in kept]

    def import_torch(self) -> None:
        importlib.import_module("torch")

    def say_plain(self, rank: int) -> None:
        for value in plain():
            self.send(value, self.group_name, rank, timeout=60)
            self.send(value, self.group_name, rank, tag="tagged", piggyback_payload=7, timeout=60)

    def hear_plain(self, rank: int) -> list[str]:
        """Receive what `say_plain` sends; returns what is not the same."""
        wrong = []
        for value in plain():
            for got in (
                self.recv(self.group_name, rank, timeout=60),
                self.recv(self.group_name, rank, tag="tagged", timeout=60),
            ):
                thing, payload = got if isinstance(got, tuple) else (got, 7)
                if payload != 7 or not is_same(thing, value):
                    wrong.append(f"{thing!r:.80} for {value!r:.80}")
        return wrong

    def share_plain(self, source: int) -> list[str]:
        """Broadcast them from one rank to all; returns what is not the same."""
        members = [(self.group_name, list(range(self.world_size)))]
        wrong = []
        for value in plain():
            sent = value if self.rank == source else None
            got = self.broadcast(sent, members, (self.group_name, source), timeout=60)
            if not is_same(got, value):
                wrong.append(f"{got!r:.80} for {value!r:.80}")
        return wrong
