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


SECTIONS = {
    "chaining": Section(
        parts={
            "on one node": lambda: chaining(1),
            "between two nodes": lambda: chaining(2),
            SMALL: lambda: chaining(1, SMALL_STORE_BYTES, SMALL_ROUNDS),
        },
        report=report_chaining,
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
