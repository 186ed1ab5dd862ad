"""Times `roost plan` on a small job, compared with only importing the libraries it uses.

The commands alternate, so that a busy machine slows them alike; the medians are compared.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 15
LIMIT = 2.2
COMMANDS = {
    "import omegaconf, typer, rich, yaml": [sys.executable, "-c", "import omegaconf, typer, rich, yaml"],
    "roost plan (map)": [str(Path(sys.executable).parent / "roost"), "plan", "examples/job.yaml", "-c", "2x8,1x0"],
    "import roost": [sys.executable, "-c", "import roost"],
}


# An installed package comes with bytecode; a checkout gets it on the first run unless this variable forbids it.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def main() -> None:
    for command in COMMANDS.values():
        seconds(command)
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(ROUNDS):
        for name, command in COMMANDS.items():
            times[name].append(seconds(command))
    base, *_ = medians = [statistics.median(found) for found in times.values()]
    print("\n| command | median ms | relative to the first |")
    print("|---|---:|---:|")
    for name, median in zip(times, medians, strict=True):
        print(f"| `{name}` | {median * 1000:.0f} | {median / base:.2f} |")
    print(f"\nThe limit for `roost plan` is {LIMIT}.")
    if medians[1] / base > LIMIT:
        sys.exit("roost plan is over its limit")


if __name__ == "__main__":
    main()
