"""`Reservation`: accelerators that belong to the job until it is closed, for everything on the same Ray."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable

from roost.config.hardware import ACCELERATOR
from roost.config.values import share_problem
from roost.errors import ConfigError, ManagerDied
from roost.placement.placement import Placement
from roost.placement.plan import Piece, pieces_of
from roost.runtime.limits import CALL_SECONDS
from roost.runtime.managers.control import JobControl
from roost.runtime.managers.ledgers.reservations import Slot
from roost.runtime.nodes.discover import live_nodes
from roost.runtime.nodes.placement_groups import read_group
from roost.text import join_words, plural


class Reservation:
    """Accelerators that Ray counts as taken. `close()` releases them, unless a group of the job still uses them."""

    def __init__(self, context: JobControl, user: str, slots: Iterable[Slot]) -> None:
        self._context = context
        self.user = user
        """The name under which the job's manager keeps it."""
        self.slots = tuple(sorted(slots, key=lambda slot: slot.piece))
        """The placement group and the bundle of each accelerator, in the order of nodes and accelerators."""
        self.is_closed = False
        """Whether `close` was called."""

    @property
    def accelerators(self) -> list[tuple[int, int]]:
        """Node rank and local rank of each reserved accelerator."""
        return [(slot.piece.node_rank, slot.piece.local_rank) for slot in self.slots]

    def close(self, timeout: float = CALL_SECONDS) -> None:
        """Release what no other part of the job uses; if that fails, ClusterError, and it can be closed again."""
        if self.slots and not self.is_closed and self._context.is_connected:
            if self._context.connection is not None and not self._context.is_reachable:
                raise self._context.connection.head.gone(f": {self!r} is not released")
            # If the job's manager is gone for good, its placement groups go with the job.
            with contextlib.suppress(ManagerDied):
                self._context.node_manager.within(timeout).release_slots(self.user)
        self.is_closed = True

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.slots)

    def __repr__(self) -> str:
        return f"<Reservation of {plural(len(self.slots), 'accelerator')}{', closed' if self.is_closed else ''}>"


def lost_slots(slots: Iterable[Slot]) -> list[Slot]:
    """Return the slots that are lost: their placement group was removed, or Ray moves them off a node that is gone."""
    found = list(slots)
    tables = {group: read_group(group) for group in {slot.group for slot in found}}
    # While Ray looks for a new place for one bundle, the others are where they were.
    existing = {group for group, table in tables.items() if table.get("state") in ("CREATED", "RESCHEDULING")}
    places = {group: tables[group]["bundles_to_node_id"] for group in existing}
    return [slot for slot in found if places.get(slot.group, {}).get(slot.bundle) != slot.ray_id]


def describe_loss(context: JobControl, slots: Iterable[Slot]) -> str | None:
    """Say which of these slots are lost and why, or None if all are there."""
    pieces = [slot.piece for slot in lost_slots(slots)]
    if not pieces:
        return None
    alive = {node.ray_id for node in live_nodes()}
    nodes = {rank: context.nodes[rank] for rank in sorted({piece.node_rank for piece in pieces})}
    gone = [str(node) for node in nodes.values() if node.ray_id not in alive]
    if gone:
        return f"{join_words(gone)} {'is' if len(gone) == 1 else 'are'} gone, and what was reserved there"
    what = [f"accelerator {piece.local_rank} of {nodes[piece.node_rank]}" for piece in sorted(pieces)]
    return f"{join_words(what)} {'is' if len(what) == 1 else 'are'} not reserved any more: the reservation was removed"


def accelerators_of(placement: Placement) -> list[Piece]:
    """Return the accelerators that a worker sits on."""
    return [piece for piece in pieces_of(placement) if piece.kind == ACCELERATOR]


def check_share(share: float | None, what: str) -> None:
    """Raise ConfigError for a value that is not a part of an accelerator."""
    if share is not None and (problem := share_problem(share)):
        raise ConfigError(f"{what} is {share!r}: {problem}")


def check_timeout(timeout: float) -> None:
    """Raise ConfigError unless this is a number of seconds."""
    if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not 0 <= timeout < math.inf:
        raise ConfigError(f"timeout is {timeout!r}: it is a number of seconds, 0 or more")
