"""Measures how planning scales: time and peak memory for 1k to 1M accelerators.

Every figure is the smallest time of three, each in its own process; memory is that process's peak resident size.
Run it with `make bench`, or one figure with `python bench/planning.py packed 4096`.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable

from roost import FlexiblePlacementStrategy, PackedPlacementStrategy, Topology, make_plan
from roost.render.grid import make_grid
from roost.render.terminal import draw_terminal

SIZES = (1_000, 4_096, 10_000, 100_000, 1_000_000)
PER_NODE = 8


Planning = Callable[[], object]


def packed(size: int, topology: Topology) -> Planning:
    return lambda: PackedPlacementStrategy(0, size - 1).get_placement(topology)


def strided(size: int, topology: Topology) -> Planning:
    return lambda: PackedPlacementStrategy(0, size - 1, num_hardware_per_process=2, stride=4).get_placement(topology)


def flexible(size: int, topology: Topology) -> Planning:
    ranks = [[rank] for rank in range(size)]
    return lambda: FlexiblePlacementStrategy(ranks).get_placement(topology)


def component(size: int, topology: Topology) -> Planning:
    job = {"cluster": {"component_placement": {"actor": f"0-{size - 1}"}}}
    return lambda: make_plan(job, topology)


def parallel(size: int, topology: Topology) -> Planning:
    job = {
        "cluster": {"component_placement": {"actor,rollout": f"0-{size - 1}"}},
        "actor": {"model": {"tensor_model_parallel_size": 8}},
        "rollout": {"tensor_parallel_size": 4},
    }
    return lambda: make_plan(job, topology)


KINDS: dict[str, Callable[[int, Topology], Planning]] = {
    "packed": packed,
    "strided": strided,
    "flexible": flexible,
    "component": component,
    "parallel": parallel,
}


def measure(kind: str, size: int) -> dict[str, float]:
    """Measure once, in this process: seconds to plan and peak MiB."""
    topology = Topology.from_shorthand(f"{size // PER_NODE}x{PER_NODE}")
    planning = KINDS[kind](size, topology)
    start = time.perf_counter()
    planning()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def measured(kind: str, size: int) -> dict[str, float]:
    """Return the fastest of three measurements, each in its own process."""
    runs = []
    for _ in range(3):
        done = subprocess.run([sys.executable, __file__, kind, str(size)], capture_output=True, text=True, check=True)
        runs.append(json.loads(done.stdout))
    return min(runs, key=lambda run: run["seconds"])


def comparing(nodes: int) -> float:
    """Return the seconds to compare two plans in which nearly every worker stays in place."""
    topology = Topology.from_shorthand(f"{nodes}x{PER_NODE}")
    plans = [
        make_plan({"cluster": {"component_placement": {"actor": f"0-{nodes * PER_NODE - last}"}}}, topology)
        for last in (1, 2)
    ]
    start = time.perf_counter()
    plans[0].diff(plans[1])
    return time.perf_counter() - start


def drawing() -> float:
    """Return the seconds to draw the unfolded map of 64 nodes of 8."""
    components = {"actor": "0-255", "rollout": "256-511:0-63", "reward": "0-7"}
    plan = make_plan({"cluster": {"component_placement": components}}, Topology.from_shorthand("64x8"))
    start = time.perf_counter()
    draw_terminal(make_grid(plan, fold=False), width=120)
    return time.perf_counter() - start


def obeying() -> float:
    """Return the seconds to place 4,608 workers by count on 64 racks of 18 nodes with 4, by rules about two levels."""
    labels = [{"nvlink": f"rack-{node // 18}", "rack": f"row-{node // 72}"} for node in range(1152)]
    topology = Topology.from_dict({"nodes": [{"accelerators": 4, "labels": own} for own in labels]})
    job = {
        "cluster": {"component_placement": {"actor": {"count": 4608}}},
        "mesh": {"actor": {"pp": 64, "dp": 9, "tp": 8}},
        "keep": ["actor.dp.tp within nvlink", "prefer actor.pp within rack"],
        "spread": ["prefer actor across nvlink, at least 3"],
    }
    start = time.perf_counter()
    make_plan(job, topology)
    return time.perf_counter() - start


def main() -> None:
    print("| accelerators | " + " | ".join(f"{kind}: ms | MiB" for kind in KINDS) + " |")
    print("|---:|" + "---:|" * (2 * len(KINDS)))
    table = {}
    for size in SIZES:
        table[size] = {kind: measured(kind, size) for kind in KINDS}
        cells = [f"{run['seconds'] * 1000:,.1f} | {run['mib']:,.0f}" for run in table[size].values()]
        print(f"| {size:,} | " + " | ".join(cells) + " |", flush=True)
    print()
    print("| figure | limit | " + " | ".join(KINDS) + " |")
    print("|---|---:|" + "---:|" * len(KINDS))
    ratios = [table[1_000_000][kind]["seconds"] / table[100_000][kind]["seconds"] for kind in KINDS]
    print("| 1M against 100k, time | 12 | " + " | ".join(f"{ratio:.1f}" for ratio in ratios) + " |")
    print("| 1M, peak MiB | 1,000 | " + " | ".join(f"{table[1_000_000][kind]['mib']:,.0f}" for kind in KINDS) + " |")
    print("| 4,096, ms | 50 | " + " | ".join(f"{table[4_096][k]['seconds'] * 1000:.1f}" for k in KINDS) + " |")
    small, large = (min(comparing(nodes) for _ in range(3)) for nodes in (512, 5120))
    print(f"\nComparing two plans of 40,960 workers takes {large / small:.1f} times as long as comparing two of 4,096.")
    print(f"\nThe map of a 64 x 8 plan, every node drawn: {min(drawing() for _ in range(3)) * 1000:.0f} ms.")
    print(f"\n64 racks of 72, 4,608 workers by count and rules: {min(obeying() for _ in range(3)) * 1000:.0f} ms.")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
    else:
        main()
