"""Measures messages between two workers, compared with a raw socket, with copying memory, and with a call of Ray's.

The ways alternate in one run, so that a busy machine slows them alike.
"""

from __future__ import annotations

import pickle
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from parts import finish, run, start

from roost import Cluster, NodePlacementStrategy, Worker
from roost.testing import local_cluster

SMALL = b"x" * 1000
LARGE_BYTES = 64 << 20
BLOCKS, TRIPS, LARGE_TRIPS = 20, 200, 15
TRIP_LIMIT, TAIL_LIMIT = 3.0, 5.0
SHARES = {"send and recv": 0.5, "send_tensor and recv_tensor": 0.7}
FAR_SHARE = 0.6
SECONDS = 120


class Talker(Worker):
    """Either end of a conversation."""

    def answer(self, peer: str, count: int) -> None:
        for _ in range(count):
            self.send(self.recv(peer, 0, timeout=SECONDS), peer, 0)

    def ask(self, peer: str, count: int) -> list[float]:
        return timed(lambda: (self.send(SMALL, peer, 0), self.recv(peer, 0, timeout=SECONDS)), count)

    def answer_socket(self, path: str, count: int) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            connection, _ = listener.accept()
            with connection:
                for _ in range(count):
                    put(connection, get(connection))

    def ask_socket(self, path: str, count: int) -> list[float]:
        with socket.socket(socket.AF_UNIX) as connection:
            connect(connection, path)
            return timed(lambda: (put(connection, SMALL), get(connection)), count)

    def nothing(self, data: bytes) -> bytes:
        return data

    def take(self, peer: str, count: int, how: str) -> None:
        """Take arrays, and answer to each with its last byte."""
        target = np.zeros(LARGE_BYTES, np.uint8)
        for _ in range(count):
            if how == "send and recv":
                last = self.recv(peer, 0, timeout=SECONDS)[-1]
            else:
                self.recv_tensor(target, peer, 0, timeout=SECONDS)
                last = target[-1]
            self.send(int(last), peer, 0)

    def give(self, peer: str, count: int, how: str) -> list[float]:
        array = np.full(LARGE_BYTES, 7, np.uint8)
        send = self.send if how == "send and recv" else self.send_tensor
        return timed(lambda: (send(array, peer, 0), self.recv(peer, 0, timeout=SECONDS)), count)

    def copy(self, count: int) -> list[float]:
        source, target = np.full(LARGE_BYTES, 7, np.uint8), np.zeros(LARGE_BYTES, np.uint8)
        return timed(lambda: np.copyto(target, source), count)

    def take_stream(self, address: str, port: int, count: int) -> None:
        target = memoryview(np.zeros(LARGE_BYTES, np.uint8))
        with socket.create_server((address, port)) as listener:
            connection, _ = listener.accept()
            with connection:
                for _ in range(count):
                    at = 0
                    while at < LARGE_BYTES:
                        at += connection.recv_into(target[at:])
                    connection.sendall(b".")

    def give_stream(self, address: str, port: int, count: int) -> list[float]:
        array = np.full(LARGE_BYTES, 7, np.uint8)
        with socket.socket() as connection:
            connect(connection, (address, port))
            return timed(lambda: (connection.sendall(array), connection.recv(1)), count)


def timed(do: Callable[[], Any], count: int) -> list[float]:
    do()
    found = []
    for _ in range(count - 1):
        began = time.perf_counter()
        do()
        found.append(time.perf_counter() - began)
    return found


def connect(connection: socket.socket, target: Any) -> None:
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            return connection.connect(target)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def put(connection: socket.socket, thing: Any) -> None:
    data = pickle.dumps(thing)
    connection.sendall(struct.pack("<I", len(data)) + data)


def get(connection: socket.socket) -> Any:
    (size,) = struct.unpack("<I", take_exactly(connection, 4))
    return pickle.loads(take_exactly(connection, size))  # noqa: S301 - from the other end of this bench


def take_exactly(connection: socket.socket, size: int) -> bytes:
    data = connection.recv(size)
    while len(data) < size:
        data += connection.recv(size - len(data))
    return data


def small() -> dict[str, float]:
    """Round trips of a small message between two workers of one node."""
    with local_cluster("1x0", cpus=4) as local, Cluster(num_nodes=1, quiet=True, record=False) as cluster:
        one, two = (Talker.create_group().launch(cluster, NodePlacementStrategy([0]), name) for name in ("one", "two"))
        found: dict[str, list[float]] = {"roost": [], "raw": [], "ray": []}
        for block in range(BLOCKS):
            answered = two.answer("one", TRIPS)
            found["roost"] += one.ask("two", TRIPS).wait(SECONDS)[0]
            answered.wait(SECONDS)
            path = str(local.folder / f"raw{block}")
            answered = two.answer_socket(path, TRIPS)
            found["raw"] += one.ask_socket(path, TRIPS).wait(SECONDS)[0]
            answered.wait(SECONDS)
            found["ray"] += timed(lambda: two.nothing(SMALL).wait(SECONDS), TRIPS // 10)
    figures = {f"{name} p50": statistics.median(values) for name, values in found.items()}
    return figures | {"roost p99": statistics.quantiles(found["roost"], n=100)[-1]}


def large() -> dict[str, float]:
    """A large array from one worker to another, on the same node and on another."""
    with local_cluster("2x0", cpus=4), Cluster(num_nodes=2, quiet=True, record=False) as cluster:
        names = {"one": 0, "near": 0, "far": 1}
        groups = {
            name: Talker.create_group().launch(cluster, NodePlacementStrategy([node]), name)
            for name, node in names.items()
        }
        one = groups["one"]
        found: dict[str, list[float]] = {}

        def add(name: str, values: list[float]) -> None:
            found.setdefault(name, []).extend(values)

        for block in range(3):
            add("copy", one.copy(LARGE_TRIPS).wait(SECONDS)[0])
            for place in ("near", "far"):
                for how in SHARES:
                    taken = groups[place].take("one", LARGE_TRIPS, how)
                    add(f"{how}, {place}", one.give(place, LARGE_TRIPS, how).wait(SECONDS)[0])
                    taken.wait(SECONDS)
            lease = cluster.lease_ports(1)
            taken = groups["far"].take_stream(lease.address, lease.port, LARGE_TRIPS)
            add("stream", one.give_stream(lease.address, lease.port, LARGE_TRIPS).wait(SECONDS)[0])
            taken.wait(SECONDS)
            if block == 0:
                # The first use of memory is not what is measured.
                found.clear()
    return {name: statistics.median(values) for name, values in found.items()}


def receives() -> dict[str, float]:
    """What a thousand receives cost that wait."""
    with local_cluster("1x0"), Cluster(num_nodes=1, quiet=True, record=False) as cluster:

        class Waiter(Worker):
            def post(self, count: int) -> tuple[int, float]:
                self.recv("waiter", 0, async_op=True)
                before, threads = memory(), threading.active_count()
                self.kept = [self.recv("waiter", 0, async_op=True) for _ in range(count)]
                return threading.active_count() - threads, (memory() - before) / 2**20

        group = Waiter.create_group().launch(cluster, NodePlacementStrategy([0]), "waiter")
        threads, mib = group.post(1000).wait(SECONDS)[0]
    return {"threads": threads, "MiB": mib}


def memory() -> int:
    with open("/proc/self/smaps_rollup") as lines:
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


PARTS: Mapping[str, Callable[[], dict[str, float]]] = {"small": small, "large": large, "receives": receives}


def main() -> None:
    over = []

    def judge(what: str, value: float, limit: float, *, is_least: bool = False) -> str:
        if value < limit if is_least else value > limit:
            over.append(what)
        return f"{value:.2f} | {'at least ' if is_least else ''}{limit:g} |"

    trips = run(__file__, "small")
    print("\n| round trip of 1 kB between two workers | µs | ratio | limit |\n|---|---:|---:|---:|")
    print(f"| raw unix socket with pickle | {trips['raw p50'] * 1e6:.0f} | 1.00 | |")
    ratio = judge("round trip", trips["roost p50"] / trips["raw p50"], TRIP_LIMIT)
    print(f"| `send` and `recv` | {trips['roost p50'] * 1e6:.0f} | {ratio}")
    tail = judge("tail", trips["roost p99"] / trips["roost p50"], TAIL_LIMIT)
    print(f"| its 99th percentile, against its median | {trips['roost p99'] * 1e6:.0f} | {tail}")
    print(f"| a call from the driver | {trips['ray p50'] * 1e6:.0f} | {trips['ray p50'] / trips['raw p50']:.1f} | |")
    bulk = run(__file__, "large")
    print("\n| an array of 64 MiB | ms | share of its speed | limit |\n|---|---:|---:|---:|")
    print(f"| copied in memory | {bulk['copy'] * 1e3:.1f} | | |")
    for how, share in SHARES.items():
        cell = judge(how, bulk["copy"] / bulk[f"{how}, near"], share, is_least=True)
        print(f"| `{how.replace(' and ', '` and `')}`, same node | {bulk[f'{how}, near'] * 1e3:.1f} | {cell}")
    print(f"| a TCP stream on loopback | {bulk['stream'] * 1e3:.1f} | | |")
    for how in SHARES:
        cell = judge(f"{how}, far", bulk["stream"] / bulk[f"{how}, far"], FAR_SHARE, is_least=True)
        print(f"| `{how.replace(' and ', '` and `')}`, other node | {bulk[f'{how}, far'] * 1e3:.1f} | {cell}")
    waiting = run(__file__, "receives")
    print("\n| a thousand receives that wait | | limit |\n|---|---:|---:|")
    print(f"| threads more | {waiting['threads']:.0f} | 1 |\n| MiB more | {waiting['MiB']:.1f} | 20 |")
    finish(over)


if __name__ == "__main__":
    start(PARTS, main)
