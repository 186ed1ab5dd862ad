"""The job around a group: its port, its logs, and what a failure of a worker looks like from there."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ray.exceptions import ActorUnavailableError
from ray.util import list_named_actors

from roost.errors import ClusterError
from roost.runtime.failures.failure import Failure, FailureKind, describe_death, failure_of
from roost.runtime.managers.ledgers.ports import PortLease
from roost.runtime.managers.ledgers.reservations import Slot
from roost.runtime.nodes.discover import live_nodes
from roost.runtime.nodes.placement_groups import lost_slots
from roost.runtime.process import output as logs
from roost.runtime.process.actor import Master, Report
from roost.runtime.process.identity import WorkerIdentity
from roost.runtime.runs.folder import RunDir, log_file
from roost.text import join_words

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


_CANDIDATES = 8
"""So many ports are proposed for a group: strangers may have some of them."""


class JobSite:
    """The job around a group: its logs, its ports, and whether it is to be closed."""

    def __init__(self, cluster: Cluster, identities: Mapping[str, WorkerIdentity], stopped: threading.Event) -> None:
        self._cluster = cluster
        self._identities = identities
        self._stopped = stopped
        self.slots: tuple[Slot, ...] = ()
        """What is reserved for the group."""
        self._proposed: list[PortLease] = []
        self._port: PortLease | None = None

    def propose_ports(self, node_rank: int) -> None:
        """Lease some ports for rank 0 to try."""
        self._proposed = self._cluster.propose_ports(node_rank, _CANDIDATES)

    def release_ports(self) -> None:
        """Give back what the group has."""
        held = [*self._proposed, *([self._port] if self._port else [])]
        self._proposed, self._port = [], None
        if held:
            self._cluster.node_manager.release_ports(held)

    @property
    def ports_to_try(self) -> tuple[int, ...]:
        return tuple(lease.port for lease in self._proposed)

    def take_master(self, report: Report | None) -> Master:
        if self._port is None and report is not None:
            proposed, self._proposed = self._proposed, []
            chosen = [lease for lease in proposed if lease.port == report.free_port]
            self._cluster.node_manager.release_ports([lease for lease in proposed if lease not in chosen])
            self._port = chosen[0] if chosen else self._cluster.lease_ports(proposed[0].node_rank)
        if self._port is None:
            raise ClusterError("the group has no port")
        return Master(address=self._port.address, port=self._port.port)

    @property
    def is_closing(self) -> bool:
        return self._stopped.is_set()

    @property
    def run_dir(self) -> RunDir:
        return self._cluster.job.run_dir

    def describe(self, error: BaseException, address: str) -> Failure:
        return describe_failure(self._cluster, self._identities[address], error)

    def lost_reservation(self) -> str | None:
        pieces = [slot.piece for slot in lost_slots(self.slots)]
        if not pieces:
            return None
        alive = {node.ray_id for node in live_nodes()}
        nodes = {rank: self._cluster.nodes[rank] for rank in sorted({piece.node_rank for piece in pieces})}
        gone = [str(node) for node in nodes.values() if node.ray_id not in alive]
        if gone:
            return f"{join_words(gone)} {'is' if len(gone) == 1 else 'are'} gone, and what was reserved there"
        what = [f"accelerator {piece.local_rank} of {nodes[piece.node_rank]}" for piece in sorted(pieces)]
        return f"{join_words(what)} {'is' if len(what) == 1 else 'are'} not reserved any more: somebody gave it back"

    def note_report(self, address: str, report: Report) -> None:
        if not report.log.is_shared:
            self._cluster.logs.fetch_from(report.ray_id, address, report.log.path)

    def read_stack(self, address: str) -> tuple[str, str]:
        self._cluster.logs.catch_up()
        path = log_file(self.run_dir.logs, address)
        return str(path), logs.read_stack(path)
