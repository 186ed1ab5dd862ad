"""Measures how data gets from worker to worker, compared with what Ray offers for it.

`SECTIONS` lists the tables. A section measures its parts, each in its own process, and prints a table of their figures.
The ways that a part compares alternate in it, so that a busy machine slows them alike.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from parts import finish, run, start

Figures = Mapping[str, float]
Judge = Callable[[str, float, float], str]
"""Takes what is measured, its value and its limit, and returns both as cells of a table."""

SECONDS = 300
STORE_BYTES = 10**9
SMALL_STORE_BYTES = 150_000_000
"""Room for the values, and not for a second copy of them."""
SMALL = "in a small object store"
"""Without a limit: what the way through the driver writes to disk slows down the next way, whichever that is."""
CHAINED = 2
"""Workers in each of the two groups."""
CHAINED_BYTES = 50_000_000
CHAIN_ROUNDS, SMALL_ROUNDS = 60, 18
CHAIN_LIMIT = 1.2

ITEM_BYTES = 1024
ITEMS = {"sync": 4000, "async": 20_000, "iterate": 20_000, "many": 200_000, "ray queue": 400}
BATCH = 1000
AHEAD = 4
"""How many batches a producer has under way."""
RATES = {"sync": 4000, "async": 15_000, "iterate": 15_000, "many": 200_000}
"""At least so many items a second, from worker to channel to worker."""
CHANNEL_ROUNDS = 5
LARGE_BYTES = 64 * 2**20
LARGE_ITEMS = 10
LARGE_PART = 0.4
"""Of the speed of one memcpy, at least."""
PAIRS = 8
PRODUCERS = 64
MOST_THREADS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One table of the benchmark."""

    parts: Mapping[str, Callable[[], dict[str, float]]]
    report: Callable[[Mapping[str, Figures], Judge], None]
    """Takes the figures by part."""


def in_turns(ways: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each way, measured in alternation after a round to warm up."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    # In every order, because Ray frees what one way has left behind while the next one runs.
    orders = itertools.cycle(itertools.permutations(ways))
    for number, order in enumerate(itertools.islice(orders, rounds + 1)):
        for name in order:
            began = time.perf_counter()
            ways[name]()
            if number:
                found[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in found.items()}


class Maker:
    """Makes arrays, as a plain Ray actor."""

    def generate(self, size: int) -> Any:
        import numpy as np

        return np.ones(size, dtype=np.uint8)


class Taker:
    """Takes all arrays, as a plain Ray actor."""

    def train(self, *arrays: Any) -> int:
        return sum(len(array) for array in arrays)


@contextlib.contextmanager
def two_groups(nodes: int, store: int) -> Iterator[tuple[Any, Any, list[Any], list[Any]]]:
    """Start makers on the first and takers on the last node, as groups and as plain actors."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from roost import Cluster, NodePlacementStrategy, Worker
    from roost.testing import local_cluster

    class Rollout(Worker):
        def generate(self, size: int) -> Any:
            return Maker().generate(size)

    class Actor(Worker):
        def train(self, arrays: list[Any]) -> int:
            return Taker().train(*arrays)

    first, last = ([node] * CHAINED for node in (0, nodes - 1))
    with (
        local_cluster(f"{nodes}x0", cpus=4 * CHAINED, object_store_memory=store),
        Cluster(num_nodes=nodes, quiet=True, record=False) as cluster,
        Rollout.create_group().launch(cluster, NodePlacementStrategy(first), "rollout") as rollout,
        Actor.create_group().launch(cluster, NodePlacementStrategy(last), "actor") as actor,
    ):

        def plain(cls: type, places: list[int]) -> list[Any]:
            ids = [cluster.nodes[node].ray_id for node in places]
            options = [{"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)} for node in ids]
            return [ray.remote(cls).options(**option).remote() for option in options]

        yield rollout, actor, plain(Maker, first), plain(Taker, last)


def chaining(nodes: int, store: int = STORE_BYTES, rounds: int = CHAIN_ROUNDS) -> dict[str, float]:
    """Measure a call whose results another call takes: with references, with plain Ray, and through the driver."""
    import ray

    with two_groups(nodes, store) as (rollout, actor, makers, takers):

        def plain() -> None:
            refs = [maker.generate.remote(CHAINED_BYTES) for maker in makers]
            check(ray.get([taker.train.remote(*refs) for taker in takers]))

        def roost() -> None:
            check(actor.train(rollout.generate(CHAINED_BYTES)).wait(SECONDS))

        def driver() -> None:
            check(actor.train(rollout.generate(CHAINED_BYTES).wait(SECONDS)).wait(SECONDS))

        return in_turns({"plain": plain, "roost": roost, "driver": driver}, rounds)


def check(sizes: list[int]) -> None:
    if sizes != [CHAINED * CHAINED_BYTES] * CHAINED:
        sys.exit(f"passed on {CHAINED} x {CHAINED_BYTES} bytes, but the workers received {sizes}")


def report_chaining(measured: Mapping[str, Figures], judge: Judge) -> None:
    print("\n| chaining | plain Ray with references, ms | Roost, ms | ratio | limit | through the driver, ms | ratio |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for place, found in measured.items():
        plain, roost, driver = (found[name] for name in ("plain", "roost", "driver"))
        ratio = roost / plain
        judged = f"{ratio:.2f} | |" if place == SMALL else judge(f"chaining {place}", ratio, CHAIN_LIMIT)
        label = f"{CHAINED} x {CHAINED_BYTES // 10**6} MB {place}"
        cells = [label, f"{plain * 1e3:.0f}", f"{roost * 1e3:.0f}", f"{judged} {driver * 1e3:.0f}"]
        print(f"| {' | '.join(cells)} | {driver / plain:.2f} |")


def produce(queue: Any, way: str, count: int) -> None:
    """Put items, one way or another."""
    item = b"x" * ITEM_BYTES
    handles: list[Any] = []
    if way == "many":
        for _ in range(count // BATCH):
            if len(handles) == AHEAD:
                handles.pop(0).wait(SECONDS)
            handles.append(queue.put_many([item] * BATCH, async_op=True))
    elif way in ("async", "iterate"):
        handles = [queue.put(item, async_op=True) for _ in range(count)]
    else:
        for _ in range(count):
            queue.put(item)
    for handle in handles:
        handle.wait(SECONDS)


def consume(queue: Any, way: str, count: int) -> float:
    """Take as many, and return when the last was there."""
    if way == "many":
        taken = 0
        while taken < count:
            taken += len(queue.get_many(min(BATCH, count - taken), wait=1))
    elif way == "iterate":
        for place, _ in enumerate(queue, 1):
            if place == count:
                break
    elif way == "async":
        ahead = [queue.get(async_op=True) for _ in range(min(64, count))]
        for place in range(count):
            ahead[place % 64].wait(SECONDS)
            if place + 64 < count:
                ahead[place % 64] = queue.get(async_op=True)
    else:
        for _ in range(count):
            queue.get()
    return time.time()


@contextlib.contextmanager
def producers_and_consumers(count: int) -> Iterator[tuple[Any, Any, Any]]:
    """Start some of each on one node; yields the Cluster and both groups."""
    from roost import Cluster, NodePlacementStrategy, Worker
    from roost.testing import local_cluster

    class Producer(Worker):
        def produce(self, queue: Any, way: str, items: int) -> float:
            began = time.time()
            produce(queue, way, items)
            return began

        def put_large(self, queue: Any) -> tuple[float, float]:
            import numpy as np

            array = np.ones(LARGE_BYTES, np.uint8)
            target = np.empty_like(array)
            copies = []
            for _ in range(LARGE_ITEMS):
                began = time.perf_counter()
                np.copyto(target, array)
                copies.append(time.perf_counter() - began)
            for _ in range(2):
                queue.put(array)
            began = time.time()
            for _ in range(LARGE_ITEMS):
                queue.put(array)
            return began, statistics.median(copies)

    class Consumer(Worker):
        def consume(self, queue: Any, way: str, items: int) -> float:
            return consume(queue, way, items)

        def take_large(self, queue: Any) -> float:
            for _ in range(LARGE_ITEMS + 2):
                array = queue.get()
                assert array[0] == 1  # noqa: S101 - it is there
            return time.time()

    places = NodePlacementStrategy([0] * count)
    with (
        local_cluster("1x0", cpus=4 * count),
        Cluster(num_nodes=1, quiet=True, record=False) as cluster,
        Producer.create_group().launch(cluster, places, "producer") as producer,
        Consumer.create_group().launch(cluster, places, "consumer") as consumer,
    ):
        yield cluster, producer, consumer


def rate(producer: Any, consumer: Any, queue: Any, way: str, items: int) -> float:
    """Return how many items a second go through, from the first put to the last get."""
    taken = consumer.consume(queue, way, items // len(consumer))
    began = min(producer.produce(queue, way, items // len(producer)).wait(SECONDS))
    return items / (max(taken.wait(SECONDS)) - began)


def channel_rates(count: int) -> dict[str, float]:
    """Measure each way to put and get small items, and Ray's own queue; and what an item costs the channel's home."""
    from ray.util.queue import Queue

    from roost import Channel

    found: dict[str, list[float]] = {}
    with producers_and_consumers(count) as (cluster, producer, consumer), Channel.create("items") as channel:
        (home,) = cluster.worker_manager.get_workers(["items:0"])
        queue = Queue()
        for number in range(CHANNEL_ROUNDS + 1):
            for way, items in ITEMS.items():
                before = cpu_seconds(home.pid)
                measured = rate(producer, consumer, queue if way == "ray queue" else channel, way, items)
                if number:
                    found.setdefault(way, []).append(measured)
                    found.setdefault(f"home {way}", []).append((cpu_seconds(home.pid) - before) / items)
        queue.shutdown()
    return {way: statistics.median(values) for way, values in found.items()}


def cpu_seconds(pid: int) -> float:
    import psutil

    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def channel_large() -> dict[str, float]:
    """Measure large arrays through a channel, as a part of the speed of one memcpy."""
    from roost import Channel

    parts = []
    with producers_and_consumers(1) as (_, producer, consumer), Channel.create("large", maxsize=2) as channel:
        for _ in range(CHANNEL_ROUNDS):
            taken = consumer.take_large(channel)
            ((began, copy),) = producer.put_large(channel).wait(SECONDS)
            parts.append(copy / ((taken.wait(SECONDS)[0] - began) / LARGE_ITEMS))
    return {"part": statistics.median(parts)}


def channel_threads() -> dict[str, float]:
    """Count the Python threads of a home that many producers use at once."""
    from roost import Channel, ChannelWorker, Cluster, NodePlacementStrategy, Worker
    from roost.testing import local_cluster

    class Counting(ChannelWorker):
        def threads(self) -> int:
            import threading

            return threading.active_count()

    class Producer(Worker):
        def put(self, channel: Any) -> None:
            for number in range(10):
                channel.put(number)

    with local_cluster("1x0", cpus=2 * PRODUCERS), Cluster(num_nodes=1, quiet=True, record=False) as cluster:
        place = NodePlacementStrategy([0])
        home = Counting.create_group().launch(cluster, place, "home", reserve=False)
        channel = Channel.connect("home")
        producers = Producer.create_group().launch(cluster, NodePlacementStrategy([0] * PRODUCERS), "producer")
        producers.put(channel).wait(SECONDS)
        return {"threads": home.threads().wait(SECONDS)[0], "items": channel.qsize()}


def report_channels(measured: Mapping[str, Figures], judge: Judge) -> None:
    one, eight = measured[ONE_PAIR], measured[EIGHT_PAIRS]
    print("\n| channels, 1 KB items/s | one pair | at least | needed / found | limit | 8 and 8 | Ray's queue | times |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for way, least in RATES.items():
        judged = judge(f"channel {way}", least / one[way], 1)
        times = one[way] / one["ray queue"]
        cells = [way, f"{one[way]:.0f}", str(least), f"{judged} {eight[way]:.0f}", f"{one['ray queue']:.0f}"]
        print(f"| {' | '.join(cells)} | {times:.1f} |")
    total = sum(one[way] / eight[way] for way in RATES) / len(RATES)
    print("\n| channels | found | limit |\n|---|---:|---:|")
    print(f"| one pair / 8 and 8, in all, mean | {judge('8 and 8', total, 1)}")
    for way in RATES:
        grows = eight[f"home {way}"] / one[f"home {way}"]
        print(f"| CPU time of the home for an item, {way}, 8 and 8 / one pair | {grows:.2f} | |")
    part = measured[LARGE]["part"]
    print(f"| {LARGE_PART} of a memcpy / 64 MB array through a channel | {judge('64 MB', LARGE_PART / part, 1)}")
    print(f"| threads with {PRODUCERS} producers | {judge('threads', measured[THREADS]['threads'], MOST_THREADS)}")


ONE_PAIR, EIGHT_PAIRS, LARGE, THREADS = "one pair", f"{PAIRS} and {PAIRS}", "64 MB", f"{PRODUCERS} producers"

SECTIONS = {
    "chaining": Section(
        parts={
            "on one node": lambda: chaining(1),
            "between two nodes": lambda: chaining(2),
            SMALL: lambda: chaining(1, SMALL_STORE_BYTES, SMALL_ROUNDS),
        },
        report=report_chaining,
    ),
    "channels": Section(
        parts={
            ONE_PAIR: lambda: channel_rates(1),
            EIGHT_PAIRS: lambda: channel_rates(PAIRS),
            LARGE: channel_large,
            THREADS: channel_threads,
        },
        report=report_channels,
    ),
}
PARTS = {f"{name}, {part}": measure for name, section in SECTIONS.items() for part, measure in section.parts.items()}


def main() -> None:
    over = []

    def judge(what: str, value: float, limit: float) -> str:
        if value > limit:
            over.append(what)
        return f"{value:.2f} | {limit:g} |"

    for name, section in SECTIONS.items():
        section.report({part: run(__file__, f"{name}, {part}") for part in section.parts}, judge)
    finish(over)


if __name__ == "__main__":
    start(PARTS, main)
