"""Measures what a group of workers costs compared with bare Ray: launching it, calling it, and memory per worker.

The variants alternate on one local cluster, so that a busy machine slows them alike. Before each launch, idle worker
processes that Ray keeps are killed, because the next launch would reuse them.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
from parts import finish, run, start

NODES = 4
PER_NODE = 8
ROUNDS = {16: 5, 32: 5}
CALLED, CALL_BLOCKS, CALLS = 32, 12, 25
SENT, LARGE_BLOCKS, LARGE_CALLS = 16, 8, 8
LARGE_BYTES = 8 * 2**20
WEIGHED = 8
WORKERS = ("Bare", "Trivial", "ray::IDLE", "default_worker.py")
"""The titles of a worker process while it starts, works or waits; the job's managers have other titles."""
SECONDS = 300
TIME_LIMIT = 0.65
CPU_LIMIT = 0.70
CALL_LIMIT = 1.15
LARGE_LIMIT = 1.5
MEMORY_LIMIT = 15.0


class Bare:
    """A minimal worker as a plain Ray actor."""

    def nothing(self) -> None:
        pass

    def size(self, thing: Any) -> int:
        return len(thing)

    def process(self) -> int:
        return os.getpid()


class Field:
    """The local cluster, the job on it, and the ways to start workers in the same places."""

    def __init__(self) -> None:
        from roost import Cluster, CollectiveManager
        from roost.testing import local_cluster

        self._stack = contextlib.ExitStack()
        self._numbers = itertools.count()
        with contextlib.ExitStack() as undo:
            local = undo.enter_context(local_cluster(f"{NODES}x{PER_NODE}", cpus=PER_NODE, warm=False))
            self._keeper = psutil.Process(local.keeper_pid)
            self._cluster = undo.enter_context(Cluster(num_nodes=NODES, quiet=True))
            # Start the managers' processes now, so that settle() does not find them idle.
            self._cluster.worker_manager.get_workers()
            CollectiveManager.get_proxy().get_groups()
            self._stack = undo.pop_all()

    def __enter__(self) -> Field:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def warm_up(self) -> None:
        """Launch each way once on every node: Ray starts the runtime_env agents on first use."""
        for way in (self.usual, self.floor, self.roost):
            with way(NODES):
                pass
            self.settle()

    def _processes(self) -> list[tuple[psutil.Process, str]]:
        """Return the processes of the cluster and their titles."""
        found = []
        for process in self._keeper.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                found.append((process, " ".join(process.cmdline()[:3]).strip()))
        return found

    @contextlib.contextmanager
    def roost(self, count: int) -> Iterator[Any]:
        """Launch a Roost group."""
        from roost import PackedPlacementStrategy, Worker

        class Trivial(Worker):
            def nothing(self) -> None:
                pass

            def size(self, thing: Any) -> int:
                return len(thing)

            def process(self) -> int:
                return os.getpid()

        last = NODES * PER_NODE - 1
        strategy = PackedPlacementStrategy(0, last, num_hardware_per_process=(last + 1) // count)
        with Trivial.create_group().launch(self._cluster, strategy, f"group{next(self._numbers)}") as group:
            group.nothing().wait(SECONDS)
            yield group

    @contextlib.contextmanager
    def usual(self, count: int) -> Iterator[list[Any]]:
        """Start Ray actors the usual way: each with a name and its own environment."""
        number = next(self._numbers)
        per_worker = NODES * PER_NODE // count
        per_node = count // NODES

        def options(rank: int) -> dict[str, Any]:
            local = rank % per_node
            devices = range(local * per_worker, (local + 1) * per_worker)
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(count),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(per_node),
                "NODE_RANK": str(rank // per_node),
                "MASTER_ADDR": self._cluster.nodes[0].address,
                "MASTER_PORT": "29500",
                "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)),
            }
            return {
                "name": f"usual{number}:{rank}",
                "runtime_env": {"env_vars": variables, "py_executable": sys.executable},
            }

        with self._actors(count, options) as actors:
            yield actors

    @contextlib.contextmanager
    def floor(self, count: int) -> Iterator[list[Any]]:
        """Start bare Ray actors: the time Ray itself takes to start a process."""
        with self._actors(count, lambda _: {}) as actors:
            yield actors

    @contextlib.contextmanager
    def _actors(self, count: int, options: Callable[[int], dict[str, Any]]) -> Iterator[list[Any]]:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        remote = ray.remote(num_cpus=0)(Bare)
        actors = []
        for rank in range(count):
            node = self._cluster.nodes[rank * NODES // count]
            where = NodeAffinitySchedulingStrategy(node_id=node.ray_id, soft=False)
            actors.append(remote.options(scheduling_strategy=where, **options(rank)).remote())
        try:
            ray.get([actor.nothing.remote() for actor in actors], timeout=SECONDS)
            yield actors
        finally:
            for actor in actors:
                ray.kill(actor)

    def settle(self) -> None:
        """Wait until earlier workers are gone, and kill the idle ones that Ray keeps."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            workers = [item for item in self._processes() if any(word in item[1] for word in WORKERS)]
            for process, title in workers:
                if title.startswith("ray::IDLE"):
                    with contextlib.suppress(psutil.Error):
                        process.kill()
            if not workers:
                # Give the raylets and the head time to clean up.
                time.sleep(0.5)
                gc.collect()
                return
            time.sleep(0.05)
        sys.exit(f"workers of an earlier round are still running: {[title for _, title in workers]}")

    def cpu(self) -> dict[tuple[int, float], float]:
        """Return the CPU seconds so far of this process and of each process of the cluster."""
        found = {(os.getpid(), 0.0): time.process_time()}
        for process in [self._keeper, *self._keeper.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                found[process.pid, process.create_time()] = sum(times[:4])
        return found


def launch(count: int) -> dict[str, float]:
    """Measure the seconds and CPU seconds until all workers have answered a call, for each way."""
    found: dict[str, list[float]] = {}
    with Field() as field:
        field.warm_up()
        ways = {"usual": field.usual, "roost": field.roost, "floor": field.floor}
        for _ in range(ROUNDS[count]):
            for name, way in ways.items():
                before = field.cpu()
                start = time.perf_counter()
                with way(count):
                    wall = time.perf_counter() - start
                    after = field.cpu()
                cpu = sum(value - before.get(key, 0.0) for key, value in after.items())
                found.setdefault(name, []).append(wall)
                found.setdefault(f"{name} cpu", []).append(cpu)
                print(f"    {count} {name}: {wall:.2f} s, {cpu:.2f} s of CPU", file=sys.stderr)
                field.settle()
    medians = {name: statistics.median(values) for name, values in found.items()}
    for key in ("", " cpu"):
        for other in ("usual", "floor"):
            medians[f"roost/{other}{key}"] = medians[f"roost{key}"] / medians[f"{other}{key}"]
    return medians


def in_turns(ways: dict[str, Callable[[], Any]], blocks: int, calls: int) -> dict[str, float]:
    """Return the median seconds of a call for each way, measured in alternating blocks."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for block in range(blocks + 1):
        for name, way in ways.items():
            for _ in range(calls):
                start = time.perf_counter()
                way()
                if block:
                    found[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in found.items()}


def use() -> dict[str, float]:
    """Measure memory per worker, an empty call, and a call with 8 MiB as an array and as bytes."""
    import numpy as np
    import ray

    array = np.random.default_rng(0).integers(0, 255, LARGE_BYTES, dtype=np.uint8)
    things = {"array": array, "bytes": array.tobytes()}
    with Field() as field:
        field.settle()
        with field.floor(CALLED) as actors, field.roost(CALLED) as group:
            found = {
                "bare memory": own_memory(ray.get([actor.process.remote() for actor in actors])),
                "roost memory": own_memory(group.process().wait()),
            }
            ways = {
                "bare empty": lambda: ray.get([actor.nothing.remote() for actor in actors]),
                "roost empty": lambda: group.nothing().wait(),
            }
            found.update(in_turns(ways, CALL_BLOCKS, CALLS))
            some_actors = actors[:: CALLED // SENT]
            some = group[:: CALLED // SENT]
            for kind, thing in things.items():

                def bare(thing: Any = thing) -> None:
                    ref = ray.put(thing)
                    check(ray.get([actor.size.remote(ref) for actor in some_actors]))

                def roost(thing: Any = thing) -> None:
                    check(some.size(thing).wait())

                found.update(in_turns({f"bare {kind}": bare, f"roost {kind}": roost}, LARGE_BLOCKS, LARGE_CALLS))
    return found


def check(sizes: list[int]) -> None:
    if sizes != [LARGE_BYTES] * SENT:
        sys.exit(f"sent {LARGE_BYTES} bytes to {SENT} workers, but they received {sizes}")


def own_memory(processes: list[int]) -> float:
    """Return the median of the MB unique to a process, over a sample of `processes`."""
    # Let Ray finish its work after the start.
    time.sleep(1)
    some = processes[:: len(processes) // WEIGHED]
    return statistics.median(psutil.Process(process).memory_full_info().uss for process in some) / 1e6


PARTS: dict[str, Callable[[], dict[str, float]]] = {
    "launch-16": lambda: launch(16),
    "launch-32": lambda: launch(32),
    "use": use,
}


def main() -> None:
    over = []

    def judge(what: str, value: float, limit: float) -> str:
        if value > limit:
            over.append(what)
        return f"{value:.2f} | {limit:g} |"

    launches = {count: run(__file__, f"launch-{count}") for count in ROUNDS}
    print("\n| launch | the usual way, s | Roost, s | ratio | limit | bare actors, s | bare / Roost |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for count, found in launches.items():
        for key, label, limit in (("", "time", TIME_LIMIT), (" cpu", "CPU time", CPU_LIMIT)):
            usual, floor, ours = (f"{found[f'{name}{key}']:.2f}" for name in ("usual", "floor", "roost"))
            judged = judge(f"{label} of launching {count}", found[f"roost/usual{key}"], limit)
            reached = 1 / found[f"roost/floor{key}"]
            print(f"| {count} workers, {label} | {usual} | {ours} | {judged} {floor} | {reached:.2f} |")
    found = run(__file__, "use")
    print("\n| call | bare Ray, ms | Roost, ms | ratio | limit |")
    print("|---|---:|---:|---:|---:|")
    rows = {
        "empty": (f"without arguments, {CALLED} workers", CALL_LIMIT),
        "array": (f"with an array of 8 MiB, {SENT} workers", LARGE_LIMIT),
        "bytes": (f"with bytes of 8 MiB, {SENT} workers", LARGE_LIMIT),
    }
    for key, (label, limit) in rows.items():
        bare, ours = found[f"bare {key}"], found[f"roost {key}"]
        judged = judge(f"a call {label}", ours / bare, limit)
        print(f"| {label} | {bare * 1000:.1f} | {ours * 1000:.1f} | {judged}")
    print("\n| memory unique to a process | bare actor, MB | worker, MB | difference, MB | limit |")
    print("|---|---:|---:|---:|---:|")
    bare, ours = found["bare memory"], found["roost memory"]
    judged = judge("memory", ours - bare, MEMORY_LIMIT)
    print(f"| median of {WEIGHED} | {bare:.1f} | {ours:.1f} | {judged}")
    finish(over)


if __name__ == "__main__":
    start(PARTS, main)
