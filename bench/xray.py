"""Times `roost xray` on 64 actors and 8 nodes beside `ray status`, and what a look costs the job that is looked at.

The commands alternate, and so do steps with and without a look, so that a busy machine slows all alike.
"""

from __future__ import annotations

import logging
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from parts import finish, run, start

NODES, ACTORS = 8, 64
ROUNDS = 5
STEP_SECONDS = 2.0
LOOK_LIMIT = 5.0
STEP_LIMIT = 1.01
BIN = Path(sys.executable).parent


def looks() -> dict[str, float]:
    import ray

    from roost.testing import local_cluster

    with local_cluster(f"{NODES}x{ACTORS // NODES}") as local:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)

        @ray.remote(num_gpus=1, num_cpus=0)
        class Trainer:
            def step(self, seconds: float) -> None:
                time.sleep(seconds)

        trainers = [Trainer.remote() for _ in range(ACTORS)]
        ray.get([trainer.step.remote(0) for trainer in trainers])
        commands = {
            "ray status": [BIN / "ray", "status", "--address", local.address],
            "roost xray": [BIN / "roost", "xray", local.address],
            "roost xray --stacks": [BIN / "roost", "xray", local.address, "--stacks"],
        }
        environment = {**os.environ, **local.environment}
        found: dict[str, list[float]] = {}
        for _ in range(ROUNDS):
            for name, command in commands.items():
                began = time.perf_counter()
                subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
                found.setdefault(name, []).append(time.perf_counter() - began)
        for _ in range(ROUNDS):
            for name in ("step", "step with a look"):
                look = None
                if name != "step":
                    look = subprocess.Popen(commands["roost xray"], env=environment, stdout=subprocess.DEVNULL)
                began = time.perf_counter()
                ray.get([trainer.step.remote(STEP_SECONDS) for trainer in trainers])
                found.setdefault(name, []).append(time.perf_counter() - began)
                if look is not None:
                    look.wait(60)
        ray.shutdown()
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    found = run(__file__, "looks")
    base = found["ray status"]
    print(f"\n| {ACTORS} actors on {NODES} nodes | median s | relative to `ray status` |\n|---|---:|---:|")
    for name in ("ray status", "roost xray", "roost xray --stacks"):
        print(f"| `{name}` | {found[name]:.2f} | {found[name] / base:.2f} |")
    ratio = found["step with a look"] / found["step"]
    print(f"\nA step of {STEP_SECONDS:g} s with a look in it takes {ratio:.4f} of one without (limit {STEP_LIMIT}).")
    late = [f"an X-ray takes {found['roost xray']:.1f} s"] if found["roost xray"] > LOOK_LIMIT else []
    finish([*late, *([f"a step takes {ratio:.3f}"] if ratio > STEP_LIMIT else [])])


if __name__ == "__main__":
    start({"looks": looks}, main)
