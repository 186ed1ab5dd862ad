"""The workers that tests launch, in a module that their processes import and that loads little."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import ray

from roost import Cluster, NodePlacementStrategy, Worker, WorkerGroup

AT_IMPORT = dict(os.environ)
"""The environment when this module was imported."""


class Unpicklable(Exception):  # noqa: N818 - the name says what it is
    """An exception that holds a lock."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class TwoArguments(Exception):  # noqa: N818 - the name says what it is
    """An exception that pickles, and does not come back: its constructor wants two arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class Performer(Worker):
    """A worker that can do, and break, everything."""

    def __init__(self, word: str = "", *, fails_on: int | None = None, hangs_on: int | None = None) -> None:
        super().__init__()
        self.word = word
        self.calls = 0
        if self.rank == fails_on:
            raise ValueError(f"rank {self.rank} does not want to be made")
        if self.rank == hangs_on:
            self.hang_here()

    def has_loaded(self, *names: str) -> list[str]:
        return [name for name in names if name in sys.modules]

    def torch_seed(self) -> int:
        return int(importlib.import_module("torch").initial_seed())

    def hang_here(self) -> None:
        time.sleep(3600)

    def who(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "_rank": self._rank,
            "world_size": self.world_size,
            "_world_size": self._world_size,
            "local_rank": self.local_rank,
            "local_world_size": self.local_world_size,
            "node_rank": self.node_rank,
            "group_name": self.group_name,
            "address": self.address,
            "devices": self.devices,
            "placement": self.placement,
            "master": (self.master_address, self.master_port),
            "cluster_nodes": self.cluster.num_nodes,
        }

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def environment_at_import(self) -> dict[str, str]:
        return AT_IMPORT

    def modules(self) -> list[str]:
        return sorted(sys.modules)

    def interpreter(self) -> str:
        return sys.executable

    def pid(self) -> int:
        return os.getpid()

    def rank_of(self) -> int:
        return self.rank

    def echo(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    def length(self, data: bytes) -> tuple[int, int]:
        return len(data), id(type(data))

    def make(self, length: int) -> Any:
        """An array of this worker's rank."""
        import numpy as np

        return np.full(length, self.rank)

    def look(self, arrays: list[Any]) -> list[tuple[int, int, bool]]:
        """The first number and the length of each array, and whether it is a copy of this worker's."""
        return [(int(array[0]), len(array), array.flags.writeable) for array in arrays]

    def count(self) -> int:
        self.calls += 1
        return self.calls

    def fail(self, ranks: list[int], text: str = "bad reward") -> int:
        print(f"about to fail with {text}")
        if self.rank in ranks:
            raise ValueError(f"{text} on {self.rank}")
        return self.rank

    def fail_unpicklable(self) -> None:
        raise Unpicklable("it has a lock")

    def fail_two_arguments(self) -> None:
        raise TwoArguments("this", "that")

    def fail_or_wait(self, rank: int, folder: str) -> None:
        """One fails, and the others wait for something that never comes, as in a collective call."""
        if self.rank == rank:
            raise RuntimeError("one of us is missing")
        wait_for_file(folder, "never")

    def wait_or_fail(self, folder: str, rank: int) -> None:
        """The same, and what they wait for comes."""
        if self.rank == rank:
            raise RuntimeError("one of us is missing")
        wait_for_file(folder, "go")

    def fail_large(self, rank: int, folder: str) -> None:
        if self.rank == rank:
            raise ValueError("x" * 3_000_000)
        wait_for_file(folder, "never")

    def interrupt(self) -> None:
        raise KeyboardInterrupt("from inside")

    def stop_iteration(self) -> None:
        raise StopIteration("from inside")

    def endless(self, folder: str) -> Iterator[int]:
        try:
            for number in range(10**9):
                (Path(folder) / f"{self.rank}-{number}").touch()
                yield number
        finally:
            (Path(folder) / f"closed-{self.rank}").touch()

    def two_items(self, folder: str) -> Iterator[str]:
        yield "at once"
        wait_for_file(folder, "go")
        yield "late"

    def unpicklable_result(self) -> Any:
        return threading.Lock()

    def wait_for(self, folder: str, name: str) -> int:
        (Path(folder) / f"waiting-{self.rank}").touch()
        wait_for_file(folder, name)
        return self.rank

    def late(self, folder: str, late_rank: int) -> int:
        if self.rank == late_rank:
            wait_for_file(folder, "go")
        return self.rank

    def end(self, rank: int, how: str) -> int:
        if self.rank != rank:
            return self.rank
        print(f"ending by {how}", flush=True)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "exit":
            sys.exit(3)
        os._exit(7)

    def eat(self, rank: int, size: int) -> int:
        """Take memory bit by bit, until it is `size` or the process is killed."""
        kept = []
        for _ in range(size // 2**26 if self.rank == rank else 0):
            kept.append(bytearray(b"x" * 2**26))
            time.sleep(0.02)
        if kept:
            wait_for_file("/nowhere", "never")
        return len(kept)

    def items(self, count: int) -> Iterator[tuple[int, int]]:
        for index in range(count):
            yield self.rank, index

    def ticks(self) -> Iterator[int]:
        """Items without end, which leave the machine to others."""
        for number in itertools.count():
            yield number
            time.sleep(0.05)

    def numbers(self, first: int, count: int) -> Iterator[int]:
        yield from range(first, first + count)

    def items_then_fail(self, count: int) -> Iterator[int]:
        yield from range(count)
        raise KeyError("no more")

    @Worker.timer("whole")
    def timed(self) -> None:
        with self.worker_timer("half"):
            deadline = time.perf_counter() + 0.01 * (1 + self.rank)
            while time.perf_counter() < deadline:
                pass
        with self.worker_timer():
            pass

    def say(self, text: str) -> None:
        self.log_metric("said", 1)
        print(text)

    def say_binary(self) -> None:
        sys.stdout.buffer.write(b"\xff\x00\x1b[2Jbinary\n")
        sys.stdout.flush()
        os.write(2, b"straight to the descriptor \xfe\n")

    def bar(self) -> None:
        for percent in range(0, 100, 10):
            print(f"\r{percent}%", end="", flush=True)

    def say_much(self, megabytes: int) -> None:
        line = "x" * 1023 + "\n"
        for _ in range(megabytes * 1024):
            sys.stdout.write(line)
        print("the last line")

    def log_levels(self) -> None:
        self.log_debug("a detail")
        self.log_info("some news")
        self.log_warning("a warning")
        self.log_error("an error")

    def listen(self) -> int:
        """Rank 0 listens on the group's port, the others knock."""
        if self.rank == 0:
            with socket.create_server((self.master_address, self.master_port)) as server:
                server.settimeout(60)
                for _ in range(self.world_size - 1):
                    server.accept()[0].close()
            return self.master_port
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                socket.create_connection((self.master_address, self.master_port), timeout=5).close()
                return self.master_port
            except OSError:
                time.sleep(0.05)
        raise TimeoutError("rank 0 does not listen")

    def launch_children(self, count: int, name: str | None = None) -> list[str]:
        strategy = NodePlacementStrategy([self.node_rank] * count)
        self.children = Performer.create_group().launch(self.cluster, placement_strategy=strategy, name=name)
        return [found["address"] for found in self.children.who().wait(60)]

    def close_children(self) -> None:
        self.children.close()

    def start_child_task(self) -> tuple[str, str, list[str]]:
        """Where a task of this worker's runs that wants an accelerator and a CPU."""
        return ray.get(_child_task.remote(), timeout=60)

    def take_turns(self, turns: int) -> list[tuple[float, float]]:
        """When this worker had the device lock."""
        spans = []
        for _ in range(turns):
            with self.device_lock:
                began = time.time()
                time.sleep(0.02)
                spans.append((began, time.time()))
        return spans


@ray.remote(num_gpus=1, num_cpus=1)
def _child_task() -> tuple[str, str, list[str]]:
    group = ray.util.get_current_placement_group()
    context = ray.get_runtime_context()
    return group.id.hex(), context.get_node_id(), context.get_accelerator_ids()["GPU"]


class Claimant(Worker):
    """A worker that claims its accelerator by creating a file, which no other worker may have created."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.claim = Path(folder) / f"claims-{self.node_rank}-{self.devices[0]}"
        self.folder = folder

    def check(self) -> None:
        try:
            self.claim.touch(exist_ok=False)
        except FileExistsError:
            (Path(self.folder) / f"clash-{self.claim.name}").touch()
            raise
        # Long enough for another one to come, if it could.
        time.sleep(0.2)
        self.claim.unlink()


class Talker(Worker):
    """A worker whose methods are asynchronous."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived = asyncio.Event()

    async def echo(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    async def meet(self, first: bool) -> str:
        """One of two calls that can only end if both run at the same time."""
        if first:
            await asyncio.wait_for(self.arrived.wait(), 60)
            return "met"
        self.arrived.set()
        return "came"

    async def items(self, count: int) -> AsyncIterator[int]:
        for index in range(count):
            await asyncio.sleep(0)
            yield index

    async def endless(self, folder: str) -> AsyncIterator[int]:
        number = 0
        try:
            while True:
                await asyncio.sleep(0)
                yield number
                number += 1
        finally:
            (Path(folder) / f"closed-{self.rank}").touch()

    async def fail(self) -> None:
        raise LookupError("asynchronously")

    async def cancelled(self) -> None:
        raise asyncio.CancelledError("from inside")

    @Worker.timer
    async def timed(self) -> None:
        await asyncio.sleep(0.001)


class Meddler(Worker):
    """A worker whose constructor changes what it sees."""

    def __init__(self) -> None:
        super().__init__()
        os.environ["CUDA_VISIBLE_DEVICES"] = "7"


class Stubborn(Worker):
    """A worker whose constructor reports its pid and then waits for a file."""

    def __init__(self, folder: str, rank: int) -> None:
        super().__init__()
        if self.rank == rank:
            (Path(folder) / f"pid-{os.getpid()}").touch()
            wait_for_file(folder, "never")


class Waiter(Worker):
    """A worker whose constructor waits for a file before it goes on."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        (Path(folder) / f"pid-{os.getpid()}").touch()
        wait_for_file(folder, "go")
        if (Path(folder) / "broken").exists():
            raise ValueError("it cannot be made any more")

    def pid(self) -> int:
        return os.getpid()


class AsyncWaiter(Waiter):
    """The same with an event loop."""

    async def pid(self) -> int:
        return os.getpid()


class Peer(Worker):
    """A worker that calls the workers of another group."""

    def meet(self, group: WorkerGroup) -> None:
        self.group = group

    def ask(self, method: str, *args: Any) -> list[Any]:
        return self.group.call(method, *args).wait(60)

    def take_as_pid_2(self, method: str, *args: Any) -> list[Any]:
        """Take all items of a stream, in a process whose number is 2 as it can be in a container."""
        own, os.getpid = os.getpid, lambda: 2
        try:
            stream = self.group.stream(method, *args)
        finally:
            os.getpid = own
        return [item for _, item in stream]

    def die_in_a_stream(self, method: str, *args: Any) -> None:
        next(self.group.stream(method, *args))
        os.kill(os.getpid(), signal.SIGKILL)


class Blind(Worker):
    """A worker without arguments that returns what its Cluster sees."""

    def view(self) -> int:
        return Cluster().num_accelerators


def wait_for_file(folder: str, name: str) -> None:
    """Wait for a file that another process creates, but not for ever."""
    deadline = time.monotonic() + 300
    while not (Path(folder) / name).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(name)
        time.sleep(0.01)
