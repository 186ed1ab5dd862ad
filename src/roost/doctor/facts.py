"""What `roost doctor` knows: facts about a machine and a cluster, and findings about them. Values only.

A look (`machine_look`, `node_look`) gives facts, a rule (`machine_rules`, `cluster_rules`) turns facts into findings.
A fact that could not be had is `Unseen`, and becomes a finding too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """How bad a finding is, from the best to the worst."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check saw, and what to do about it where it is not fine."""

    check: str
    level: Level
    seen: str
    do: str = ""
    nodes: tuple[str, ...] = ()
    """The nodes that it is about; none for this machine, or for the cluster as a whole."""


def ok(check: str, seen: str) -> Finding:
    """All is well."""
    return Finding(check=check, level=Level.OK, seen=seen)


def note(check: str, seen: str, do: str = "", nodes: tuple[str, ...] = ()) -> Finding:
    """Good to know."""
    return Finding(check=check, level=Level.NOTE, seen=seen, do=do, nodes=nodes)


def warning(check: str, seen: str, do: str, nodes: tuple[str, ...] = ()) -> Finding:
    """It may go wrong."""
    return Finding(check=check, level=Level.WARNING, seen=seen, do=do, nodes=nodes)


def problem(check: str, seen: str, do: str, nodes: tuple[str, ...] = ()) -> Finding:
    """It will go wrong."""
    return Finding(check=check, level=Level.PROBLEM, seen=seen, do=do, nodes=nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unseen:
    """A fact that could not be had; `do` where that is known to hinder jobs too."""

    why: str
    do: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """What runs there; `packages` are those that must fit between machines, with their versions."""

    python: str
    interpreter: str
    packages: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Room that can be used up, in bytes: memory, or a file system at a path."""

    total: int
    free: int
    path: str = ""
    uses: tuple[str, ...] = ()
    """What is kept there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a process may have; None is without limit."""

    open_files: int | None
    most_open_files: int | None
    """As far as the user may raise it."""
    tasks: int | None
    """Processes and threads together, as the kernel counts them."""
    tasks_now: int
    cpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The ports that the kernel hands out by itself, first and last, and all that are in use."""

    ephemeral: tuple[int, int]
    used: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUser:
    """A process that uses an accelerator; without a command it cannot be seen from here, as in another container."""

    pid: int
    command: str
    user: str
    memory: int | None
    of_ray: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """An accelerator as NVIDIA's library shows it now."""

    index: int
    model: str
    memory: int | None
    memory_used: int | None
    users: tuple[DeviceUser, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The accelerators that a machine shows to a process, whatever Ray counts."""

    nvidia: tuple[Device, ...] = ()
    nvidia_error: str = ""
    """What NVIDIA's library says where it does not work."""
    nvidia_files: int = 0
    """How many devices of NVIDIA there are in /dev."""
    nvidia_installed: int = 0
    """How many the kernel's driver knows, also those that a container does not show."""
    amd: int = 0
    ascend: int = 0

    @property
    def by_resource(self) -> dict[str, int]:
        """How many Ray would count, by its name for them."""
        return {"GPU": len(self.nvidia) + self.amd, "NPU": self.ascend}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostName:
    """What the machine calls itself, and the addresses that this name leads to."""

    name: str
    addresses: tuple[str, ...]
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayProcess:
    """A process of Ray: a service that belongs to a head, or a worker that belongs to a raylet."""

    pid: int
    name: str
    user: str
    head: str | None
    """Where the head is that a service belongs to."""
    belongs: bool
    """Whether that head answers, or that raylet is alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedProcess:
    """A process that a worker of a job of Roost started, or the worker itself; `job` is the mark."""

    pid: int
    command: str
    job: str
    head_answers: bool

    @property
    def head(self) -> str:
        """The cluster of its job."""
        return self.job.partition("|")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """One machine, as a process on it sees it."""

    machine: str
    """The same for all processes that share its memory, its disks and its ports."""
    software: Software | Unseen
    memory: Space | Unseen
    shm: Space | Unseen
    disks: tuple[Space, ...] | Unseen
    limits: Limits | Unseen
    ports: Ports | Unseen
    devices: Devices | Unseen
    host_name: HostName | Unseen
    environment: Mapping[str, str] | Unseen
    """Proxies and visible devices."""
    ray_processes: tuple[RayProcess, ...] | Unseen
    marked: tuple[MarkedProcess, ...] | Unseen


@dataclass(frozen=True, slots=True, kw_only=True)
class Practice:
    """A practice cluster that is up, and for how many seconds."""

    spec: str
    address: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Heap:
    """Files of one kind that nothing uses any more: how many folders, and how many bytes at least."""

    what: str
    folder: str
    pattern: str
    count: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeFacts:
    """What Roost and Ray keep for this user on the driver's machine."""

    practice: Practice | Unseen | None
    heaps: tuple[Heap, ...] | Unseen


@dataclass(frozen=True, slots=True, kw_only=True)
class RayletFacts:
    """How the raylet of a node was started."""

    session: str
    object_store: int
    object_store_folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLook:
    """What a task on a node found."""

    machine: MachineFacts
    host: str
    raylet: RayletFacts | Unseen
    sees_folder: bool
    """Whether the driver's file is in the run folder there."""
    drivers: tuple[int, ...]
    """Those of the drivers asked for that are alive there."""
    accelerator_problem: tuple[str, str] | None
    """Why a Cluster would refuse the node's accelerators, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """How far a node's clock is ahead of the driver's, in seconds, and how sure that is."""

    ahead: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """A node that answered."""

    name: str
    address: str
    resources: Mapping[str, float]
    look: NodeLook
    clock: Clock | Unseen


@dataclass(frozen=True, slots=True, kw_only=True)
class Silent:
    """A node that did not answer, and why."""

    name: str
    why: str
    do: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """A job of Roost."""

    namespace: str
    host: str
    pid: int | None
    """The driver; None where its manager does not answer."""
    missing: tuple[str, ...] = ()
    """The managers that died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """A Ray cluster, as the driver and its nodes see it."""

    address: str
    driver: MachineFacts
    nodes: tuple[NodeFacts, ...]
    silent: tuple[Silent, ...] = ()
    gone: tuple[str, ...] = ()
    """Nodes that were there before."""
    jobs: tuple[JobFacts, ...] | Unseen = ()
    """Those that were there before the nodes were looked at and after it."""
    marks: tuple[str, ...] = ()
    """What the marks of processes begin with that are of a job which is alive."""
    run_folder: str | Unseen = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All findings: of this machine, and of the cluster where there is one."""

    host: str
    machine: tuple[Finding, ...]
    address: str | None = None
    cluster: tuple[Finding, ...] = field(default=())

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All of them."""
        return (*self.machine, *self.cluster)

    @property
    def has_problem(self) -> bool:
        """Whether something has to be done before a job can run."""
        return any(item.level == Level.PROBLEM for item in self.findings)

    def count(self, level: Level) -> int:
        """How many findings are of this level."""
        return sum(item.level == level for item in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON can say it."""
        return {
            "host": self.host,
            "address": self.address,
            "problems": self.count(Level.PROBLEM),
            "warnings": self.count(Level.WARNING),
            "notes": self.count(Level.NOTE),
            "machine": [_finding(item) for item in self.machine],
            "cluster": [_finding(item) for item in self.cluster],
        }


def _finding(item: Finding) -> dict[str, Any]:
    return {
        "check": item.check,
        "level": str(item.level),
        "seen": item.seen,
        "do": item.do,
        "nodes": list(item.nodes),
    }
