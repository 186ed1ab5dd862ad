"""The stacks of a process of this machine, by py-spy, which the process does not notice."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig

from roost.machine.limits import PY_SPY_SECONDS
from roost.text import shorten

_TRIES = 3
"""py-spy does not stop the process, and so may read what changes meanwhile."""


def find_py_spy() -> str | None:
    """Return the program: of this environment, which `uvx` does not put on the path, or on the path."""
    return shutil.which("py-spy", path=sysconfig.get_path("scripts")) or shutil.which("py-spy")


def read_stacks(pid: int, *, native: bool = False, seconds: float = PY_SPY_SECONDS) -> tuple[str, str]:
    """Return the stacks of all threads of a process, or nothing and why there are none; py-spy has so many seconds.

    With `native`, with the frames of native code; py-spy then stops the process for some milliseconds.
    """
    program = find_py_spy()
    if program is None:
        return "", "py-spy is not installed: pip install 'roost[xray]'"
    command = [program, "dump", "--pid", str(pid), "--native" if native else "--nonblocking"]
    why = ""
    for _ in range(_TRIES):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)  # noqa: S603 - a number
        except (OSError, subprocess.SubprocessError) as error:
            return "", f"py-spy: {error}"
        if done.returncode == 0:
            return done.stdout, ""
        why = shorten((done.stderr.strip().splitlines() or ["no message"])[0], 200)
    return "", f"py-spy: {why}"
