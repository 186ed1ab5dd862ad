"""`Pool`: reserved seats, to slice, to share and to launch groups into before it is known which groups.

with cluster.reserve_seats([4, 4]) as pool:
    actor = Actor.create_group().launch(cluster, pool[:6].strategy(share=0.6))
    rollout = Rollout.create_group().launch(cluster, pool.strategy(share=0.4, per_process=2))
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

from ray.util.placement_group import PlacementGroup

from roost.config.hardware import ACCELERATOR, BARE_NODE
from roost.config.node_groups import CLUSTER
from roost.config.ranks import MAX_PROCESSES
from roost.config.topology import HasTopology, Stretch, topology_of
from roost.errors import ClusterError, ConfigError, ManagerDied, PlacementError
from roost.placement.placement import Listed, Placement
from roost.placement.plan import Piece, Plan, pieces_of
from roost.placement.strategies import PlacementStrategy, place_at
from roost.runtime.limits import CALL_SECONDS
from roost.runtime.managers.control import JobControl
from roost.runtime.managers.ledgers.reservations import Slot, name_of
from roost.runtime.reserve.reservation import Reservation, check_share, check_timeout
from roost.runtime.reserve.reserver import Reserver, reserve_accelerators
from roost.text import join_words, plural, shorten


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A place for one process: the accelerators that are reserved for it, or a node."""

    rank: int
    """Its place in the pool that was reserved; the seats of a slice keep theirs."""
    node_rank: int
    hardware_type: str
    """Its hardware, as in a `Placement`: `accelerator`, a declared kind, or `node` for a CPU seat."""
    local_hardware_ranks: tuple[int, ...]
    """Its hardware on its node; empty for a CPU seat."""
    node_group_label: str
    slots: tuple[Slot, ...]
    """The placement group and the bundle of each of its accelerators."""

    @property
    def accelerators(self) -> tuple[int, ...]:
        """The local ranks of its accelerators; a CPU seat has none."""
        return tuple(slot.piece.local_rank for slot in self.slots)


class Pool:
    """Seats that are reserved until `close()`; `pool[2:6]` and `pool[3]` are smaller pools of the same reservation."""

    def __init__(
        self,
        context: JobControl,
        name: str,
        reservations: Sequence[Reservation],
        seats: Sequence[Seat],
        *,
        is_part: bool = False,
    ) -> None:
        self._context = context
        self._reservations = reservations
        self._is_part = is_part
        self.name = name
        self.seats = tuple(seats)
        """The seats, in the order of their ranks."""

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The placement group and the bundle of each accelerator, each accelerator once."""
        return tuple(dict.fromkeys(slot for seat in self.seats for slot in seat.slots))

    @property
    def placement_groups(self) -> tuple[PlacementGroup, ...]:
        """Ray's placement groups behind the seats, to look at; removing one ends the workers in it."""
        return tuple(dict.fromkeys(slot.group for slot in self.slots))

    @property
    def is_closed(self) -> bool:
        """Whether its reservation, or one of them, was closed."""
        return any(reservation.is_closed for reservation in self._reservations)

    def strategy(self, share: float | None = None, per_process: int = 1) -> PoolStrategy:
        """Return the strategy to launch a group with: one process on each seat, or on `per_process` seats in a row.

        `share` is the part of each accelerator that a process uses; over all groups they add up to 1 at most.
        """
        check_share(share, "share")
        if type(per_process) is not int or per_process < 1:
            raise PlacementError(f"per_process is {shorten(repr(per_process))}: it is a number of seats, at least 1")
        if len(self) % per_process:
            raise PlacementError(
                f"{plural(len(self), 'seat')} cannot be divided among processes of {per_process} seats"
            )
        for first in range(0, len(self), per_process):
            own = self.seats[first : first + per_process]
            if len({(seat.node_rank, seat.hardware_type, seat.node_group_label) for seat in own}) > 1:
                raise PlacementError(
                    f"process {first // per_process} takes seats {own[0].rank}-{own[-1].rank} of {self.name!r}, "
                    f"which are on nodes {join_words(sorted({seat.node_rank for seat in own}))}",
                    hint="a process never leaves its node: take slices of the pool that do not",
                )
        return PoolStrategy(pool=self, share=share, per_process=per_process)

    def check_open(self) -> None:
        """Raise ClusterError if the pool or its Cluster was closed."""
        if self.is_closed:
            raise ClusterError(f"the pool {self.name!r} is closed", hint="reserve seats again")
        self._context.check_open()

    def close(self, timeout: float = CALL_SECONDS) -> None:
        """Release the seats. Those that groups still use are kept until the groups are closed; ClusterError names them.

        Closing a part of a pool is refused, since a reservation is closed as a whole.
        """
        if self._is_part:
            hint = "close the pools that reserve_seats returned"
            raise ConfigError(f"{self!r} is a part of a pool, or a sum of pools", hint=hint)
        users = self._users(timeout)
        for reservation in self._reservations:
            reservation.close(timeout)
        if users:
            raise ClusterError(
                f"the pool {self.name!r} was closed under {plural(len(users), 'group')}: {join_words(users)}",
                hint="close the groups first; their seats stay reserved until they are closed",
            )

    def _users(self, timeout: float) -> list[str]:
        """Return the groups of this process that use seats of the pool, unless it is closed."""
        context, mine = self._context, set(self.slots)
        if self.is_closed or not mine or not (context.open_groups and context.is_connected and context.is_reachable):
            return []
        own = {reservation.user for reservation in self._reservations}
        # Where the manager is gone for good, the placement groups go with the job.
        with contextlib.suppress(ManagerDied):
            held = [item for item in context.node_manager.within(timeout).get_slots() if item.slot in mine]
            users = {user for item in held for user, _ in item.users} - own
            return sorted(set(map(name_of, users)) & context.open_groups.keys())
        return []

    def __getitem__(self, which: SupportsIndex | slice) -> Pool:
        """Return a smaller pool: one seat, or a slice of them; PlacementError if they are not all there."""
        bounds = [which.start, which.stop] if isinstance(which, slice) else [which]
        found: tuple[Seat, ...] = ()
        with contextlib.suppress(IndexError, TypeError, ValueError):
            found = self.seats[which] if isinstance(which, slice) else (self.seats[which],)
        if not found or any(isinstance(bound, int) and abs(bound) > len(self) for bound in bounds):
            if isinstance(which, slice) and which.step is not None:
                bounds.append(which.step)
            asked = ":".join("" if bound is None else shorten(repr(bound)) for bound in bounds)
            raise PlacementError(
                f"{self.name!r} has no seats [{asked}]: it has {plural(len(self), 'seat')}",
                hint=f"take [0:{len(self)}] or a part of it",
            )
        return Pool(self._context, self.name, self._reservations, found, is_part=True)

    def __add__(self, other: object) -> Pool:
        """Return the seats of this pool and then those of another one, to launch a group on both."""
        if not isinstance(other, Pool):
            return NotImplemented
        both = (*self._reservations, *other._reservations)
        return Pool(self._context, f"{self.name}+{other.name}", both, (*self.seats, *other.seats), is_part=True)

    def __iter__(self) -> Iterator[Pool]:
        return (self[index] for index in range(len(self)))

    def __len__(self) -> int:
        return len(self.seats)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except ClusterError:
            # What ended the block says more.
            if kind is None:
                raise

    def __reduce__(self) -> Any:
        raise TypeError("a pool belongs to the process that reserved it: send the groups that you launch into it")

    def __repr__(self) -> str:
        return f"<Pool {self.name!r} of {plural(len(self), 'seat')}{', closed' if self.is_closed else ''}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStrategy(PlacementStrategy):
    """Processes on the seats of a pool, in their order."""

    pool: Pool
    share: float | None
    per_process: int

    def get_placement(self, cluster: HasTopology, isolate_accelerator: bool = True) -> list[Placement]:
        """Return one placement for each process; ClusterError if the pool is closed."""
        self.pool.check_open()
        stretches, local_ranks_of = [], []
        for first in range(0, len(self.pool), self.per_process):
            own = self.pool.seats[first : first + self.per_process]
            local = {rank for seat in own for rank in seat.local_hardware_ranks}
            local_ranks_of.append(Listed(sorted(local)))
            stretches.append(Stretch(own[0].node_group_label, own[0].node_rank, own[0].hardware_type, len(local)))
        return place_at(topology_of(cluster), stretches, local_ranks_of, isolate_accelerator)


def reserve_seats(
    context: JobControl, seats: Sequence[int] | PlacementStrategy | Plan, name: str, timeout: float
) -> Pool:
    """Reserve seats, as `Cluster.reserve_seats` says."""
    context.check_open()
    check_timeout(timeout)
    if not isinstance(name, str) or not name.strip() or "#" in name:
        raise ConfigError(f"name is {shorten(repr(name))}: it is the pool's name in messages, a text without '#'")
    wanted: list[tuple[str, list[Piece]]]
    if isinstance(seats, Plan | PlacementStrategy):
        strategies = {name: seats} if isinstance(seats, PlacementStrategy) else {}
        if isinstance(seats, Plan):
            strategies = {item.name: seats.get_strategy(item.name) for item in seats.components}
        components = {item: strategy.get_placement(context.topology) for item, strategy in strategies.items()}
        if isinstance(seats, Plan):
            wanted = [
                (seats.placement(*worker).node_group_label, [piece])
                for piece, workers in sorted(seats.occupants().items())
                # A node has a seat for each process, an accelerator one for all of them.
                for worker in (workers if piece.kind == BARE_NODE else workers[:1])
            ]
        else:
            wanted = [(placement.node_group_label, pieces_of(placement)) for placement in components[name]]
        pieces = [piece for _, own in wanted for piece in own if piece.kind == ACCELERATOR]
        reservation = reserve_accelerators(context, name, dict.fromkeys(pieces), components, timeout=timeout)
    else:
        counts = _check_counts(context, seats)
        user = f"{name}#{secrets.token_hex(4)}"
        on_accelerators = {rank: count for rank, count in counts.items() if context.nodes[rank].accelerators}
        slots = Reserver(context, user, timeout).reserve_on(on_accelerators) if on_accelerators else []
        reservation = Reservation(context, user, slots)
        bare = [Piece(rank, BARE_NODE, -1) for rank, count in counts.items() for _ in range(count)]
        bare = [piece for piece in bare if piece.node_rank not in on_accelerators]
        wanted = [(CLUSTER, [piece]) for piece in sorted([*bare, *(slot.piece for slot in slots)])]
    by_piece = {slot.piece: slot for slot in reservation.slots}
    found = [
        Seat(
            rank=rank,
            node_rank=own[0].node_rank,
            hardware_type=own[0].kind,
            local_hardware_ranks=tuple(piece.local_rank for piece in own if piece.kind != BARE_NODE),
            node_group_label=label,
            slots=tuple(by_piece[piece] for piece in own if piece in by_piece),
        )
        for rank, (label, own) in enumerate(wanted)
    ]
    return Pool(context, name, [reservation], found)


def _check_counts(context: JobControl, seats: object) -> dict[int, int]:
    """Return how many processes each node gets; ConfigError or PlacementError for what cannot be."""
    hint = "it is how many processes on each node, by node rank, as in [4, 4]; or a PlacementStrategy, or a Plan"
    if isinstance(seats, str | bytes) or not isinstance(seats, Sequence):
        raise ConfigError(f"seats is {shorten(repr(seats))}", hint=hint)
    for rank, count in enumerate(seats):
        if type(count) is not int or not 0 <= count <= MAX_PROCESSES:
            raise ConfigError(f"seats has {shorten(repr(count))} for node {rank}", hint=hint)
        if rank >= len(context.nodes):
            has = plural(len(context.nodes), "node")
            raise PlacementError(f"seats are asked for on {plural(len(seats), 'node')}, and the cluster has {has}")
        if count > (there := context.nodes[rank].num_accelerators) > 0:
            raise PlacementError(
                f"{plural(count, 'seat')} are asked for on node {rank}, which has {plural(there, 'accelerator')}",
                hint="processes without accelerators: reserve_seats(NodePlacementStrategy([0, 0, 1, 1]))",
            )
    if not any(seats):
        raise ConfigError(f"seats is {shorten(repr(seats))}: no process at all", hint=hint)
    return {rank: count for rank, count in enumerate(seats) if count}
