"""Programs of others, on Roost. `make test-programs` installs what they need; without it these tests are skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

Program = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Runs a Python program to its end, on Roost if `compat` names the framework; a failure shows what it printed."""

    def run(
        *words: str, compat: str | None = None, cwd: Path = tmp_path, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        below = ["-m", "roost", "compat", compat, "--", sys.executable] if compat else []
        variables = {**os.environ, "ROOST_RUNS_DIR": str(tmp_path / "runs"), **(env or {})}
        done = subprocess.run(
            [sys.executable, *below, *words],
            cwd=cwd,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )
        assert done.returncode == 0, f"{' '.join(words)}:\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
        return done

    return run


@pytest.fixture(scope="session")
def checkout() -> Callable[..., Path]:
    """Finds a checkout by the environment variable that names it; a test is skipped where there is none."""

    def find(variable: str, address: str, file: str) -> Path:
        name = os.environ.get(variable)
        if not name:
            pytest.skip(f"{address} is no package: {variable}=path of a checkout make test-programs")
        if not (Path(name) / file).exists():
            pytest.fail(f"{variable}={name}: there is no {file} in it")
        return Path(name).absolute()

    return find
