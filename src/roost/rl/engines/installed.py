"""Which inference engines are installed, here or in another interpreter."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from roost.errors import ConfigError
from roost.rl.limits import FIND_SECONDS

PIP_LINES: Mapping[str, str] = {
    "vllm": "pip install vllm",
    "sglang": "pip install 'sglang[all]'",
    "transformers": "pip install 'transformers>=5' torch",
}
"""By the name of the package: how to install it on a machine with GPUs."""

_FIND = "import importlib.util, sys; sys.exit(not importlib.util.find_spec(sys.argv[1]))"


def is_installed(package: str, python: str, environment: Mapping[str, str] | None = None) -> bool:
    """Whether an interpreter finds a package, without importing it; ConfigError if there is no such interpreter."""
    try:
        found = subprocess.run(  # noqa: S603 - an interpreter that the user names
            [python, "-c", _FIND, package],
            env=None if environment is None else dict(environment),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=FIND_SECONDS,
            check=False,
        )
    except OSError as error:
        raise ConfigError(f"the interpreter {python} cannot be run: {error.strerror}") from None
    return found.returncode == 0


def check_installed(package: str, python: str, environment: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError with the line that installs a package, if an interpreter does not find it."""
    if not is_installed(package, python, environment):
        raise ConfigError(f"{python} has no package {package}", hint=f"{PIP_LINES[package]}, in that environment")
