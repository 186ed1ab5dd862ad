"""The folder of a run, as driver and workers know it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDir:
    """A run's folder, and a token by which a process tells that it sees the same one."""

    path: str
    token: str

    @property
    def marker(self) -> Path:
        """The file that shows whether somebody sees this very folder, as over a shared file system."""
        return Path(self.path) / f".roost-{self.token}"

    @property
    def logs(self) -> Path:
        """Where the workers' logs are."""
        return Path(self.path) / "logs"


def log_file(logs: Path, address: str) -> Path:
    """The log of a worker: `logs/actor/3.log` for `actor:3`."""
    *folders, name = address.split(":")
    return logs.joinpath(*folders, f"{name}.log")
