"""Who runs a job and what it runs on, as its node manager tells everyone who asks."""

from __future__ import annotations

import os
import socket
import sys
import time
from dataclasses import dataclass

from roost.config.node_groups import NodeGroup
from roost.machine.processes import account
from roost.redact import hide_in_words
from roost.runtime.nodes.info import NodeInfo
from roost.runtime.runs.folder import RunDir

JOB_VARIABLE = "ROOST_JOB"
"""Marks what the workers of a job start: by it, processes that outlive their job are found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInfo:
    """Who runs a job: enough to tell jobs on a shared cluster apart."""

    cluster: str
    """Ray's address."""
    namespace: str
    host: str
    pid: int
    user: str
    command: str
    since: float
    run_dir: RunDir
    """The folder of this run, on the driver's machine."""
    keeps_events: bool = False
    """Whether its processes write events into that folder."""

    @property
    def id(self) -> str:
        """Unique among all jobs, including earlier ones in the same namespace."""
        return f"{self.cluster}|{self.namespace}:{self.host}:{self.pid}:{self.since:.0f}"

    @classmethod
    def of_this_process(cls, cluster: str, namespace: str, run_dir: RunDir, *, keeps_events: bool) -> JobInfo:
        """Describe the job that this process begins."""
        return cls(
            cluster=cluster,
            namespace=namespace,
            host=socket.gethostname(),
            pid=os.getpid(),
            user=account(),
            command=" ".join(hide_in_words(sys.argv))[:200],
            since=time.time(),
            run_dir=run_dir,
            keeps_events=keeps_events,
        )


def driver_of(mark: str) -> int | None:
    """Return the process id of the driver of the job in a value of ROOST_JOB.

    >>> driver_of("127.3.4.1:6379|roost:head:4711:1797000000/actor:3")
    4711
    """
    pid = mark.partition("|")[2].partition("/")[0].rsplit(":", 2)[-2:][0]
    return int(pid) if pid.isdigit() else None


def job_of(mark: str) -> tuple[str, str]:
    """Return Ray's address and the namespace of the job in a value of ROOST_JOB.

    >>> job_of("127.3.4.1:6379|roost:head:4711:1797000000/actor:3")
    ('127.3.4.1:6379', 'roost')
    """
    cluster, _, rest = mark.partition("|")
    return cluster, rest.rpartition("/")[0].rsplit(":", 3)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """All that a process needs to attach to a job, in one answer."""

    nodes: tuple[NodeInfo, ...]
    groups: tuple[NodeGroup, ...]
    job: JobInfo
    master_port: int
    port_range: tuple[int, int] | None
