"""Times calls of four verl workers on Roost, compared with verl on Ray alone; needs verl and torch.

Two programs on one local cluster take turns, one on Ray alone and one below `roost compat verl`, so that a busy machine
slows them alike; the medians of the rounds are compared.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec

from parts import finish

from roost.testing import local_cluster

ROUNDS = 20
CALLS = 100
WORKERS = 4
LIMIT = 1.3
ARGUMENTS = ("nothing", "1 kB", "a DataProto of 256 kB")
ALONE = [sys.executable, __file__, "program"]
COMMANDS = {"on Ray alone": ALONE, "on Roost": [sys.executable, "-m", "roost", "compat", "verl", "--", *ALONE]}


def program() -> None:
    """Make four workers; time the calls of a round for each line on standard input."""
    import ray
    import torch
    from verl import DataProto
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch, register
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    class Echo(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def take(self, value: object) -> object:
            return value

        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def compute(self, value: DataProto) -> DataProto:
            return value

    ray.init(log_to_driver=False)
    group = RayWorkerGroup(RayResourcePool([WORKERS], max_colocate_count=1), RayClassWithInitArgs(ray.remote(Echo)))
    data = DataProto.from_dict({"x": torch.zeros(WORKERS * 64, 256)})
    calls = (lambda: group.take(None), lambda: group.take(b"x" * 1000), lambda: group.compute(data))
    for call in calls * CALLS:
        call()
    print("ready", flush=True)
    for _ in sys.stdin:
        taken = []
        for call in calls:
            times = []
            for _ in range(CALLS):
                began = time.perf_counter()
                call()
                times.append(time.perf_counter() - began)
            taken.append(statistics.median(times))
        print("took", *taken, flush=True)


def next_line(running: subprocess.Popen[str], word: str) -> list[float]:
    for line in running.stdout or ():
        if line.startswith(word):
            return [float(value) for value in line.split()[1:]]
    sys.exit(f"{running.args} has ended")


def main() -> None:
    if find_spec("verl") is None:
        sys.exit("needs verl: make test-programs makes an environment that has it")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    rounds: dict[str, list[list[float]]] = {name: [] for name in COMMANDS}
    with local_cluster(f"1x{2 * WORKERS}") as local:
        environment = os.environ | local.environment
        programs = {
            name: subprocess.Popen(command, env=environment, **pipes)  # type: ignore[call-overload]
            for name, command in COMMANDS.items()
        }
        for running in programs.values():
            next_line(running, "ready")
        for _ in range(ROUNDS):
            for name, running in programs.items():
                running.stdin.write("go\n")
                running.stdin.flush()
                rounds[name].append(next_line(running, "took"))
        for running in programs.values():
            running.communicate(timeout=60)
    ratios = []
    print(f"\n| a call of {WORKERS} verl workers with | {' | '.join(f'{name}, ms' for name in COMMANDS)} | ratio |")
    print("|---|---:|---:|---:|")
    for place, what in enumerate(ARGUMENTS):
        alone, ours = (statistics.median(found[place] for found in rounds[name]) * 1000 for name in COMMANDS)
        ratios.append(ours / alone)
        print(f"| {what} | {alone:.2f} | {ours:.2f} | {ratios[-1]:.2f} |")
    print(f"\nThe limit is {LIMIT}.")
    finish([what for what, ratio in zip(ARGUMENTS, ratios, strict=True) if ratio > LIMIT])


if __name__ == "__main__":
    program() if "program" in sys.argv else main()
