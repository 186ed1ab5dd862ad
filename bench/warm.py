"""Measures warm starts: a launch of workers that are forks of a process which has imported what they need.

Two local clusters alternate, one that starts each worker from scratch and one that forks it. The first launch on a
cluster also starts the process that forks.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from typing import Any

import psutil
from parts import finish, run, start

from roost import Cluster, NodePlacementStrategy, Worker
from roost.testing import local_cluster

ROUNDS = 3
COUNT = 16
TORCH_COUNT = 8
LIMIT = 0.3
TORCH_LIMIT = 0.15


class Warmed(Worker):
    """Imports what it needs."""

    def __init__(self, *modules: str) -> None:
        for name in modules:
            importlib.import_module(name)

    def memory(self) -> float:
        return psutil.Process().memory_full_info().uss / 2**20


def measure(count: int, *modules: str) -> dict[str, float]:
    """Launch workers that import some modules, from scratch and warm; a call by each of them says that it is up."""
    found: dict[str, Any] = {}
    for turn in range(ROUNDS):
        for name, warm in (("scratch", False), ("warm", True)):
            local = local_cluster("2x0", cpus=count, warm=warm, preload=modules)
            with local, Cluster(num_nodes=2, quiet=True, record=False) as cluster:
                for which in ("first", "later"):
                    place = NodePlacementStrategy([0] * (count // 2) + [1] * (count // 2))
                    began = time.perf_counter()
                    group = Warmed.create_group(*modules).launch(cluster, place, name=which)
                    group.memory().wait(300)
                    found.setdefault(f"{which} {name}", []).append(time.perf_counter() - began)
                    found.setdefault(f"MB {name}", []).extend(group.memory().wait(300))
                    group.close()
        print(f"  round {turn + 1} of {ROUNDS}", file=sys.stderr)
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    """Measure both, and print the table of docs/benchmarks.md."""
    print(
        "| launch | first, from scratch, s | first, warm, s | later, from scratch, s | later, warm, s | ratio | limit |"
    )
    print("|---|---|---|---|---|---|---|")
    over = []
    for part, limit in (("plain", LIMIT), ("torch", TORCH_LIMIT)):
        got = run(__file__, part)
        ratio = got["later warm"] / got["later scratch"]
        times = " | ".join(
            f"{got[name]:.2f}" for name in ("first scratch", "first warm", "later scratch", "later warm")
        )
        count = COUNT if part == "plain" else TORCH_COUNT
        memory = f"{got['MB scratch']:.0f} and {got['MB warm']:.0f} MB each"
        print(f"| {count} workers, {part}: {memory} | {times} | {ratio:.2f} | {limit} |")
        if ratio > limit or got["first warm"] > got["first scratch"]:
            over.append(part)
    finish(over)


if __name__ == "__main__":
    start({"plain": lambda: measure(COUNT), "torch": lambda: measure(TORCH_COUNT, "torch")}, main)
