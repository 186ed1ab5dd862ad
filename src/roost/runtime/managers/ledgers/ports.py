"""Ports as leases: decided in one place, and tried on the node before they are handed out.

`PortLedger` decides and does no I/O; the `NodeManager` carries it out. Ports lie below the kernel's ephemeral range, so
that no outgoing connection takes one between the lease and its use.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from roost.errors import PortsExhausted
from roost.text import plural


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Consecutive ports of one machine."""

    start: int
    count: int
    holder: str | None
    number: int = 0
    """Distinguishes this lease from earlier leases of the same ports."""

    @property
    def ports(self) -> range:
        """All ports of the lease."""
        return range(self.start, self.start + self.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class PortLease(Block):
    """Consecutive ports on one node, held until released or until the holder dies."""

    node_rank: int
    address: str

    @property
    def port(self) -> int:
        """The first port, or the only one."""
        return self.start


class PortLedger:
    """Which ports are leased, by network; a network is a machine whose nodes share their ports."""

    def __init__(self, ranges: Mapping[str, range], seed: int = 0) -> None:
        self._ranges = dict(ranges)
        self._held: dict[str, dict[int, Block]] = {network: {} for network in ranges}
        self._last_number = 0
        self._busy: dict[str, set[int]] = {network: set() for network in ranges}
        # Two jobs on one machine know nothing of each other, so each starts at a random place.
        start = random.Random(seed)  # noqa: S311 - not a secret
        self._next = {network: start.choice(ports) for network, ports in self._ranges.items()}

    def propose(self, network: str, count: int, holder: str | None) -> Block:
        """Take a block that may be free; PortsExhausted if there is none. Call `refuse` if it is not."""
        ports, held, busy = self._ranges[network], self._held[network], self._busy[network]
        run = 0
        # Once around, and on for a block that began before the end.
        for port in itertools.chain(range(self._next[network], ports.stop), ports):
            free = port not in held and port not in busy
            # A block does not go over the end of the range.
            run = (run + 1 if port != ports.start else 1) if free else 0
            if run == count:
                self._last_number += 1
                block = Block(start=port - count + 1, count=count, holder=holder, number=self._last_number)
                held.update(dict.fromkeys(block.ports, block))
                self._next[network] = port + 1 if port + 1 in ports else ports.start
                return block
        taken_by_others = len(busy)
        # They may be free next time.
        busy.clear()
        raise PortsExhausted(
            f"no {plural(count, 'free port')} in a row between {ports.start} and {ports.stop - 1}: "
            f"{len(held)} of {len(ports)} are leased by this job, {taken_by_others} are in use by others",
            hint="give Cluster a wider port_range",
        )

    def refuse(self, network: str, block: Block, taken: Iterable[int]) -> None:
        """Release a block of which some ports turned out to be in use."""
        self._busy[network].update(taken)
        self.release(network, block)

    def release(self, network: str, block: Block) -> None:
        """Release a block, except for ports that were released before and leased again since."""
        held = self._held[network]
        for port in block.ports:
            if port in held and held[port].number == block.number:
                del held[port]

    def release_holder(self, holder: str) -> int:
        """Release all ports of a holder; return how many there were."""
        before = self.held
        for network, held in self._held.items():
            self._held[network] = {port: block for port, block in held.items() if block.holder != holder}
        return before - self.held

    @property
    def holders(self) -> set[str]:
        """The names of all holders that can die."""
        return {block.holder for held in self._held.values() for block in held.values() if block.holder is not None}

    @property
    def held(self) -> int:
        """How many ports are leased."""
        return sum(len(held) for held in self._held.values())
