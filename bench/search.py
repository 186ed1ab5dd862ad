"""Measures the search: how it grows with roles and devices, with the proof and its check.

Every problem has the counts 8, 16, 32 … up to all devices, roles of unlike work that scale worse than linearly, switch
costs, and a weight update that may be a step behind. A row is the slowest of some seeds. Run it with `make bench`, or
one size with `python bench/search.py 4 1024`.
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import time
from itertools import pairwise

from roost.search.check import check_proof
from roost.search.find import find_best
from roost.search.layout import lay_out
from roost.search.problem import SECOND, Call, Problem, Role, WeightUpdate
from roost.search.proof import make_proof

SIZES = ((2, 64), (3, 256), (4, 64), (4, 1024), (4, 4096), (5, 1024), (6, 1024), (6, 4096), (8, 1024), (8, 4096))
LIMITS = {(4, 1024): 1, (8, 4096): 20}
SEEDS = 4
PER_NODE = 8


def problem(roles: int, devices: int, seed: int) -> Problem:
    """Make a problem whose work takes about a minute if it is spread well."""
    dice = random.Random(f"{roles}/{devices}/{seed}")  # noqa: S311 - luck, not secrets
    counts = [PER_NODE]
    while counts[-1] < devices:
        counts.append(counts[-1] * 2)
    made, calls = [], []
    for number in range(roles):
        name, work = f"role{number}", dice.uniform(10, 60) * devices / roles
        power, fixed = dice.uniform(0.7, 0.98), dice.uniform(0, 3)
        times = {count: round((work / count**power + fixed) * SECOND) for count in counts}
        switch = {"wake": dice.randrange(5) * SECOND, "sleep": dice.randrange(5) * SECOND}
        made.append(Role(name=name, counts=(tuple(counts),), devices_per_worker=dice.choice((1, 2, 4, 8)), **switch))
        calls.append(Call(name=f"{name}.call", role=name, times=(times,)))
    # Every second seed has a chain of calls; in the others, all but the first and the last are side by side.
    edges = [(one.name, other.name) for one, other in pairwise(calls)]
    if seed % 2 and roles > 2:
        edges = [edge for one in calls[1:-1] for edge in ((calls[0].name, one.name), (one.name, calls[-1].name))]
    weights = WeightUpdate(source=made[-1].name, target="role0", time=2 * SECOND, staleness=seed // 2 % 2)
    nodes = (PER_NODE,) * (devices // PER_NODE)
    kinds = (0,) * len(nodes)
    return Problem(roles=tuple(made), calls=tuple(calls), edges=tuple(edges), weights=weights, nodes=nodes, kinds=kinds)


def measure(roles: int, devices: int) -> dict[str, float]:
    """Return the figures of the slowest seed: seconds to search, to prove and to check, and what the proof has."""
    found = []
    for seed in range(SEEDS):
        one = problem(roles, devices, seed)
        started = time.perf_counter()
        best = find_best(one)[0]
        searched = time.perf_counter()
        proof = json.dumps(make_proof(one, best.family, lay_out(one, best.family)))
        proven = time.perf_counter()
        refuted = check_proof(json.loads(proof))
        checked = time.perf_counter()
        found.append(
            {
                "search": searched - started,
                "proof": proven - searched,
                "check": checked - proven,
                "branches": refuted,
                "mb": len(proof) / 1e6,
            }
        )
    slowest = max(found, key=lambda figures: figures["search"] + figures["proof"])
    return slowest | {"mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def main() -> None:
    print(
        "| roles | devices | search, s | proof, s | limit, both | check, s | branches refuted | proof, MB | peak MiB |"
    )
    print("|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for size in SIZES:
        command = [sys.executable, __file__, *map(str, size)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        figures = json.loads(done.stdout)
        cells = [f"{size[0]}", f"{size[1]:,}", f"{figures['search']:.2f}", f"{figures['proof']:.2f}"]
        cells += [str(LIMITS.get(size, "")), f"{figures['check']:.2f}", f"{figures['branches']:,}"]
        cells += [f"{figures['mb']:.2f}", f"{figures['mib']:.0f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]))))
    else:
        main()
