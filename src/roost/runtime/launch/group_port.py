"""The port on rank 0's node at which a group meets: torch's MASTER_PORT."""

from __future__ import annotations

from roost.deadline import Deadline
from roost.runtime.managers.ledgers.ports import PortLease
from roost.runtime.managers.node_manager import NodeManager
from roost.runtime.process.identity import Master

_CANDIDATES = 8
"""How many ports are proposed for a group: processes outside the job may use some of them."""


class GroupPort:
    """Candidates that rank 0 tries in its own process, which saves starting one for that; then the chosen port."""

    def __init__(self, node_manager: NodeManager, node_rank: int, holder: str | None) -> None:
        self._node_manager = node_manager
        self._node_rank = node_rank
        self._holder = holder
        self._leases: list[PortLease] = []

    def propose(self, deadline: Deadline) -> None:
        """Lease candidates."""
        self._leases = self._node_manager.until(deadline).propose_ports(self._node_rank, _CANDIDATES, self._holder)

    @property
    def candidates(self) -> tuple[int, ...]:
        """The ports for rank 0 to try."""
        return tuple(lease.port for lease in self._leases)

    def choose(self, free_port: int | None, deadline: Deadline) -> Master:
        """Keep the candidate that rank 0 found free and release the others; lease another if none was free."""
        manager = self._node_manager.until(deadline)
        # If that fails, all are still to be released.
        manager.release_ports([lease for lease in self._leases if lease.port != free_port])
        self._leases = [lease for lease in self._leases if lease.port == free_port]
        if not self._leases:
            self._leases = [manager.lease_ports(self._node_rank, 1, self._holder)]
        return self.master

    @property
    def master(self) -> Master:
        """Where rank 0 listens, once the port is chosen."""
        return Master(address=self._leases[0].address, port=self._leases[0].port)

    def release(self, deadline: Deadline) -> None:
        """Release everything."""
        if self._leases:
            self._node_manager.until(deadline).release_ports(self._leases)
            self._leases = []
