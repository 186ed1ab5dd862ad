"""`WorkerSpec`: all that one worker's process is started with, decided before anything is started."""

from __future__ import annotations

from dataclasses import dataclass

from roost.runtime.process.identity import WorkerIdentity
from roost.runtime.process.output import LogPlace
from roost.runtime.runs.folder import RunDir


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """All that is needed to start one worker in its place, the first time and again; its process gets it whole."""

    identity: WorkerIdentity
    ray_id: str
    """Ray's id of its node."""
    variables: dict[str, str]
    """Set in the process before any code of the user's is loaded."""
    early_variables: dict[str, str]
    """Must be set when the process begins."""
    interpreter: str | None
    watched_variable: str | None
    """The variable that says which devices the process sees."""
    visible: str | None
    """The planned value of the watched variable."""
    accelerators: tuple[int, ...]
    """The accelerators that it sits on, by their local ranks."""
    resource: str
    """Ray's name for the accelerators of its node."""
    share: float | None
    """The part of its accelerators that it declared to use."""
    run_dir: RunDir
    keeps_events: bool
    """Whether the process writes its events into the run folder."""
    cores: tuple[int, ...] = ()
    """The cores that it runs on, those near its accelerators; none: where the system puts it."""
    numa: int | None = None
    """The NUMA node of its memory, if its accelerators are at one."""

    @property
    def address(self) -> str:
        """The worker's name."""
        return self.identity.address

    @property
    def node_rank(self) -> int:
        """The rank of its node."""
        return self.identity.placement.cluster_node_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Where a process really is, as seen from inside."""

    ray_id: str
    """Ray's id of its node."""
    host: str
    pid: int
    instance: str
    """Ray's id of its actor."""
    interpreter: str
    visible: str | None
    log: LogPlace
    cores: tuple[int, ...] = ()
    """The cores on which its threads may run, before the user's code is there; empty if it is not bound."""
    free_port: int | None = None
    """The first of the ports to try that is free on its node."""
