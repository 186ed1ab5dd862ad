"""Times the cluster layer: booting a local cluster, discovery, ports, and many workers.

The variants alternate within one run, each in its own process, so that a busy machine slows them alike.
"""

from __future__ import annotations

import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from parts import finish, run, start

ROUNDS = 5
SLOW_LIBRARY = """
import time
class NVMLError(Exception): pass
def nvmlInit():
    time.sleep(0.5)
    raise NVMLError
"""
BOOT_LIMIT = 0.4
DISCOVERY_LIMIT = 2.0


def stock_boot() -> dict[str, float]:
    """Boot four nodes the way Ray's own tests do."""
    import ray
    from ray.cluster_utils import Cluster

    start = time.perf_counter()
    nodes = {"num_cpus": 8, "num_gpus": 8}
    cluster = Cluster(initialize_head=True, head_node_args={**nodes, "node_ip_address": "127.0.1.1"})
    for number in range(2, 5):
        cluster.add_node(**nodes, node_ip_address=f"127.0.1.{number}")
    cluster.wait_for_nodes()
    booted = time.perf_counter() - start
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    used = _use(start)
    ray.shutdown()
    cluster.shutdown()
    return {"boot": booted, "boot and use": used}


def roost_boot() -> dict[str, float]:
    """Boot the same four nodes with `local_cluster`."""
    import ray

    from roost.testing import local_cluster

    start = time.perf_counter()
    with local_cluster("4x8", warm=False):
        booted = time.perf_counter() - start
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
        used = _use(start)
    return {"boot": booted, "boot and use": used}


def _use(start: float) -> float:
    """Start one actor on each node; return the seconds since `start` when all have answered."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    class Hello:
        def hello(self) -> int:
            return 1

    remote = ray.remote(num_cpus=0)(Hello)
    strategies = [NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False) for node in ray.nodes()]
    actors = [remote.options(scheduling_strategy=strategy).remote() for strategy in strategies]
    answers = ray.get([actor.hello.remote() for actor in actors], timeout=120)
    if answers != [1, 1, 1, 1]:
        sys.exit(f"expected four nodes, but {len(answers)} answered")
    return time.perf_counter() - start


def _do_nothing() -> None:
    pass


def discovery(nodes: int) -> dict[str, float]:
    """Time discovery with no worker process on any node, with one on each, and with a slow vendor library."""
    import ray

    from roost.deadline import Deadline
    from roost.runtime.nodes.discover import discover, live_nodes, on_nodes
    from roost.testing import LocalNode, local_cluster

    def timed(action: Callable[[], Mapping[str, object] | Sequence[object]]) -> float:
        start = time.perf_counter()
        if len(action()) != nodes:
            sys.exit(f"not all {nodes} nodes answered")
        return time.perf_counter() - start

    def look() -> Sequence[object]:
        return discover(live_nodes(), Deadline.after(120))[0]

    def nothing() -> Mapping[str, object]:
        return on_nodes({node.ray_id: node.name for node in live_nodes()}, _do_nothing, deadline=Deadline.after(120))

    found = {}
    # Nodes that are alike would share one probe, which machines of a real cluster do not.
    with local_cluster([LocalNode(accelerators=8, env={"NODE": str(rank)}) for rank in range(nodes)], warm=False):
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
        found["cold"] = timed(look)
        found["warm"] = statistics.median(timed(look) for _ in range(10))
        timed(nothing)
        found["nothing"] = statistics.median(timed(nothing) for _ in range(10))
    with tempfile.TemporaryDirectory() as folder:
        # A fake vendor library that takes as long as a real one does with eight devices.
        Path(folder, "pynvml.py").write_text(SLOW_LIBRARY, encoding="utf-8")
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        slow = [LocalNode(accelerators=8, env={"PYTHONPATH": path, "NODE": str(rank)}) for rank in range(nodes)]
        with local_cluster(slow, warm=False):
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
            timed(look)
            found["slow"] = statistics.median(timed(look) for _ in range(3))
    return found


def managers() -> dict[str, float]:
    """Time thousands of ports and workers."""
    from roost import Cluster, WorkerManager, WorkerRecord
    from roost.testing import local_cluster

    with local_cluster("4x8", warm=False), Cluster(num_nodes=4) as cluster:
        start = time.perf_counter()
        with ThreadPoolExecutor(16) as pool:
            leases = list(pool.map(lambda number: cluster.lease_ports(number % 4), range(1000)))
        leased = time.perf_counter() - start
        manager = WorkerManager.get_proxy()
        workers = [
            WorkerRecord(
                address=f"actor:{rank}", group="actor", rank=rank, node_rank=rank % 4, accelerators=(rank % 8,)
            )
            for rank in range(10_000)
        ]
        start = time.perf_counter()
        manager.register(workers)
        registered = time.perf_counter() - start
        start = time.perf_counter()
        found = manager.get_workers()
        read = time.perf_counter() - start
        start = time.perf_counter()
        for worker in workers[:1000]:
            manager.get_workers([worker.address])
        one_by_one = time.perf_counter() - start
    if [item.address for item in found] != [item.address for item in workers]:
        sys.exit("the manager did not return all workers")
    twice = len(leases) - len({lease.port for lease in leases})
    return {
        "leases": leased,
        "leased twice": twice,
        "registered": registered,
        "read": read,
        "one by one": one_by_one * 10,
    }


PARTS: dict[str, Callable[[], dict[str, float]]] = {
    "stock": stock_boot,
    "roost": roost_boot,
    "discover-1": lambda: discovery(1),
    "discover-8": lambda: discovery(8),
    "managers": managers,
}


def alternate(parts: list[str]) -> dict[str, dict[str, float]]:
    """Run parts alternately; return the medians of each."""
    found: dict[str, list[dict[str, float]]] = {part: [] for part in parts}
    for _ in range(ROUNDS):
        for part in parts:
            found[part].append(run(__file__, part))
    return {
        part: {name: statistics.median(item[name] for item in items) for name in items[0]}
        for part, items in found.items()
    }


def main() -> None:
    over = []
    boots = alternate(["stock", "roost"])
    print("\n| four nodes of eight | `ray.cluster_utils.Cluster`, s | `local_cluster`, s | ratio | limit |")
    print("|---|---:|---:|---:|---:|")
    for name, label in (("boot", "until all are registered"), ("boot and use", "until an actor on each has answered")):
        stock, ours = boots["stock"][name], boots["roost"][name]
        limit = f"{BOOT_LIMIT}" if name == "boot" else ""
        print(f"| {label} | {stock:.2f} | {ours:.2f} | {ours / stock:.2f} | {limit} |")
    if boots["roost"]["boot"] / boots["stock"]["boot"] > BOOT_LIMIT:
        over.append("boot")
    looks = alternate(["discover-1", "discover-8"])
    print("\n| discovery | 1 node, ms | 8 nodes, ms | ratio | limit |")
    print("|---|---:|---:|---:|---:|")
    labels = {
        "slow": "the vendor library takes half a second on each node",
        "warm": "no vendor library, a worker process is running",
        "nothing": "for comparison: an empty Ray task on each node",
        "cold": "no vendor library, each node starts a process first",
    }
    for name, label in labels.items():
        one, eight = (looks[part][name] * 1000 for part in ("discover-1", "discover-8"))
        limit = f"{DISCOVERY_LIMIT}" if name == "slow" else ""
        print(f"| {label} | {one:.1f} | {eight:.1f} | {eight / one:.2f} | {limit} |")
    if looks["discover-8"]["slow"] / looks["discover-1"]["slow"] > DISCOVERY_LIMIT:
        over.append("discovery")
    many = run(__file__, "managers")
    print("\n| thousands of ports and workers | s |")
    print("|---|---:|")
    print(f"| 1,000 port leases from 16 callers, {many['leased twice']:.0f} duplicates | {many['leases']:.2f} |")
    print(f"| 10,000 workers registered in one call | {many['registered']:.2f} |")
    print(f"| 10,000 workers read back in one call | {many['read']:.2f} |")
    print(f"| 10,000 workers read back one by one (from 1,000) | {many['one by one']:.1f} |")
    if many["leased twice"]:
        over.append("ports")
    finish(over)


if __name__ == "__main__":
    start(PARTS, main)
