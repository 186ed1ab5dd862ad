"""Ports as leases: decided in one place, and tried on the node before they are handed out.

`PortLedger` decides and does no I/O; the `NodeManager` carries it out. Ports lie below the kernel's ephemeral range, so
that no outgoing connection takes one between the lease and its use.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from roost.errors import ConfigError, PortsExhausted
from roost.text import plural

# Ray's own defaults lie below: 6379, 8265, 10001, and 10002 to 19999 for its workers.
_FIRST_PORT = 20000
_FEWEST_PORTS = 1000
_LAST_PORT = 65535
_LOWEST_PORT = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PortLease:
    """Consecutive ports on one node, held until released or until the holder dies."""

    node_rank: int
    address: str
    start: int
    count: int
    holder: str | None
    number: int = 0
    """Distinguishes this lease from earlier leases of the same ports."""

    @property
    def port(self) -> int:
        """The first port, or the only one."""
        return self.start

    @property
    def ports(self) -> range:
        """All ports of the lease."""
        return range(self.start, self.start + self.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Consecutive ports, and the number under which they are held."""

    start: int
    count: int
    number: int

    @property
    def ports(self) -> range:
        """The ports."""
        return range(self.start, self.start + self.count)


class _Hold(NamedTuple):
    number: int
    holder: str | None


def lease_range(ephemeral: tuple[int, int], wanted: tuple[int, int] | None = None) -> range:
    """The ports to lease from on a node: those asked for, else a stretch outside the kernel's own range.

    >>> lease_range((32768, 60999))
    range(20000, 32768)
    >>> lease_range((15000, 60999))
    range(10904, 15000)
    >>> lease_range((1024, 60999))
    range(61000, 65536)
    """
    if wanted is not None:
        return range(wanted[0], wanted[1] + 1)
    low, high = ephemeral
    if low - _FIRST_PORT >= _FEWEST_PORTS:
        return range(_FIRST_PORT, low)
    if low - _FEWEST_PORTS >= _LOWEST_PORT:
        return range(max(_LOWEST_PORT, low - 4096), low)
    if _LAST_PORT - high >= _FEWEST_PORTS:
        return range(max(_LOWEST_PORT, high + 1), _LAST_PORT + 1)
    # The kernel's range is nearly everything: there is no better place, and every port is tried before it is leased.
    return range(_FIRST_PORT, _LAST_PORT + 1)


def check_port_range(wanted: object) -> tuple[int, int] | None:
    """A range as the user gives it: first and last port."""
    if wanted is None:
        return None
    if (
        isinstance(wanted, Sequence)
        and len(wanted) == 2
        and all(type(port) is int for port in wanted)
        and 1 <= wanted[0] <= wanted[1] <= _LAST_PORT
    ):
        return (wanted[0], wanted[1])
    raise ConfigError(f"port_range is {wanted!r}", hint="it is the first and the last port, as in (20000, 29999)")


class PortLedger:
    """Which ports are leased, by network; a network is a machine whose nodes share their ports."""

    def __init__(self, ranges: Mapping[str, range], seed: int = 0) -> None:
        self._ranges = dict(ranges)
        self._held: dict[str, dict[int, _Hold]] = {network: {} for network in ranges}
        self._numbers = itertools.count(1)
        self._busy: dict[str, set[int]] = {network: set() for network in ranges}
        # Two jobs on one machine know nothing of each other, so each starts at a random place.
        start = random.Random(seed)  # noqa: S311 - not a secret
        self._next = {network: start.choice(ports) for network, ports in self._ranges.items()}

    def propose(self, network: str, count: int, holder: str | None) -> Block:
        """Take a block that may be free; PortsExhausted if there is none. Call `refuse` if it is not."""
        ports, held, busy = self._ranges[network], self._held[network], self._busy[network]
        run = 0
        for port in self._from_next(network):
            free = port not in held and port not in busy
            # A block does not go over the end of the range.
            run = (run + 1 if port != ports.start else 1) if free else 0
            if run == count:
                block = Block(start=port - count + 1, count=count, number=next(self._numbers))
                held.update(dict.fromkeys(block.ports, _Hold(block.number, holder)))
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
        count = 0
        for held in self._held.values():
            for port in [port for port, hold in held.items() if hold.holder == holder]:
                del held[port]
                count += 1
        return count

    @property
    def holders(self) -> set[str]:
        """The names of all holders that can die."""
        return {hold.holder for held in self._held.values() for hold in held.values() if hold.holder is not None}

    @property
    def held(self) -> int:
        """How many ports are leased."""
        return sum(len(held) for held in self._held.values())

    def _from_next(self, network: str) -> Iterable[int]:
        ports, start = self._ranges[network], self._next[network]
        yield from range(start, ports.stop)
        # Once around, and on for a block that began before the end.
        yield from ports
