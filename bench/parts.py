"""Runs a benchmark in parts, each in its own process, so that leftovers of one do not slow down the next."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Parts = Mapping[str, Callable[[], dict[str, float]]]


def run(script: str, part: str) -> dict[str, Any]:
    """Run a part of a script; print and return its figures."""
    done = subprocess.run([sys.executable, script, part], stdout=subprocess.PIPE, text=True, check=True, timeout=900)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"  {part}: {', '.join(f'{name} {value:.3g}' for name, value in found.items())}", file=sys.stderr)
    return found


def start(parts: Parts, main: Callable[[], None]) -> None:
    """Run the part named on the command line, or all parts."""
    if len(sys.argv) > 1:
        print(json.dumps(parts[sys.argv[1]]()))
    else:
        main()


def finish(over: Sequence[str]) -> None:
    """Exit with a message if anything is over its limit."""
    if over:
        sys.exit(f"over the limit: {', '.join(over)}")
