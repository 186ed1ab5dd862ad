"""What a failure of a worker looks like from the job: what Ray says, the state of its node, the end of its log."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ray.exceptions import ActorUnavailableError
from ray.util import list_named_actors

from roost.runtime import logs
from roost.runtime.discover import live_nodes
from roost.runtime.failures import Failure, FailureKind, describe_death, failure_of
from roost.runtime.identity import WorkerIdentity
from roost.runtime.run_dir import RunDir, log_file
from roost.runtime.shell import Report

if TYPE_CHECKING:
    from roost.runtime.cluster import Cluster


def describe_failure(cluster: Cluster, identity: WorkerIdentity, error: BaseException) -> Failure:
    """What an error of Ray says of a worker, with its node's state and the end of its log."""
    path = log_file(cluster.job.run_dir.logs, identity.address)
    found = failure_of(error, address=identity.address, rank=identity.rank, node=identity.node, log_path=str(path))
    if isinstance(error, ActorUnavailableError) and _is_alive(identity.address):
        return replace(found, kind=FailureKind.EXCEPTION)
    if found.kind is not FailureKind.DEATH:
        return found
    cluster.logs.catch_up()
    tail = logs.read_tail(path)
    # What an earlier process of this rank printed says nothing about the end of this one.
    what = describe_death(error, tail.rpartition(logs.STARTED_AGAIN)[2])
    with contextlib.suppress(Exception):
        node = cluster.nodes[identity.placement.cluster_node_rank]
        if node.ray_id not in {item.ray_id for item in live_nodes()}:
            what = "its node is gone"
    return replace(found, what=what, log_tail=tail)


def _is_alive(address: str) -> bool:
    try:
        return address in list_named_actors()
    except Exception:
        return False


class JobSite:
    """The job around a launch."""

    def __init__(self, cluster: Cluster, identities: Mapping[str, WorkerIdentity], stopped: threading.Event) -> None:
        self._cluster = cluster
        self._identities = identities
        self._stopped = stopped

    @property
    def is_closing(self) -> bool:
        return self._stopped.is_set()

    @property
    def run_dir(self) -> RunDir:
        return self._cluster.job.run_dir

    def describe(self, error: BaseException, address: str) -> Failure:
        return describe_failure(self._cluster, self._identities[address], error)

    def note_report(self, address: str, report: Report) -> None:
        if not report.log.is_shared:
            self._cluster.logs.fetch_from(report.ray_id, address, report.log.path)

    def read_stack(self, address: str) -> tuple[str, str]:
        self._cluster.logs.catch_up()
        path = log_file(self.run_dir.logs, address)
        return str(path), logs.read_stack(path)
