"""Which accelerators the job has reserved and which of its parts use them: plain state, no Ray calls, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roost.errors import PlacementError
from roost.text import join_words

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from roost.placement.plan import Piece

_SLACK = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One reserved accelerator: one bundle of a placement group."""

    piece: Piece
    """Which accelerator it is, as measured by a probe."""
    device: str
    """Its name in the node's visible-devices variable."""
    ray_id: str
    """Ray's id of its node."""
    group: PlacementGroup
    bundle: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSlot:
    """A slot, and the parts of the job that use it, with their shares."""

    slot: Slot
    users: tuple[tuple[str, float | None], ...]


class SlotLedger:
    """The job's reservation: a slot for each accelerator, and its users. A slot without users is released.

    A share is the part of an accelerator that a user declares; users without one do not count. While a user is still
    trying, its placement groups are drafts, which are removed if it gives up.
    """

    def __init__(self) -> None:
        self._slots: dict[Piece, Slot] = {}
        self._users: dict[str, dict[Piece, float | None]] = {}
        self._drafts: dict[str, set[PlacementGroup]] = {}
        self._owners: dict[str, str] = {}

    @property
    def owners(self) -> set[str]:
        """The processes that own users and can die."""
        return set(self._owners.values())

    def ask(self, user: str, shares: Mapping[Piece, float | None]) -> tuple[list[Slot], list[Piece]]:
        """Return which of these accelerators the job has, and which not; PlacementError if shares exceed 1."""
        self._check_shares(user, shares)
        there = [self._slots[piece] for piece in shares if piece in self._slots]
        return there, [piece for piece in shares if piece not in self._slots]

    def add_drafts(self, user: str, owner: str | None, groups: Iterable[PlacementGroup]) -> None:
        """Add placement groups that were made for a user and may not be what it wants."""
        self._drafts.setdefault(user, set()).update(groups)
        if owner is not None:
            self._owners[user] = owner

    def discard_drafts(self, user: str, groups: Iterable[PlacementGroup]) -> None:
        """Forget drafts that are removed because they are not what the user wants."""
        self._drafts.get(user, set()).difference_update(groups)

    def take(
        self, user: str, shares: Mapping[Piece, float | None], new: Sequence[Slot], seats: Sequence[Slot] = ()
    ) -> tuple[list[Piece], list[PlacementGroup]]:
        """Use new and existing slots; return the accelerators that are gone, and the drafts to remove.

        If any accelerator is gone, nothing is taken and all drafts are to be removed. Of a pool's `seats`, one is gone
        as well whose accelerator the job has reserved again since.
        """
        self._check_shares(user, shares)
        slots = {**self._slots, **{slot.piece: slot for slot in new}}
        gone = [piece for piece in shares if piece not in slots]
        gone += [slot.piece for slot in seats if slots.get(slot.piece, slot) != slot]
        drafts = self._drafts.pop(user, set())
        if gone:
            return gone, list(drafts)
        # Ray gave them again: their placement groups were removed, and with them the hold of their users.
        self.drop([slot.piece for slot in new if slot.piece in self._slots])
        self._slots = slots
        self._users.setdefault(user, {}).update(shares)
        return [], list(drafts - {slot.group for slot in new})

    def release(self, user: str) -> list[PlacementGroup]:
        """End a user's hold; return the placement groups that are not needed any more."""
        self._users.pop(user, None)
        self._owners.pop(user, None)
        used = {piece for pieces in self._users.values() for piece in pieces}
        needed = {self._slots[piece].group for piece in used if piece in self._slots}
        unused = {slot.group for slot in self._slots.values()} - needed
        self._slots = {piece: slot for piece, slot in self._slots.items() if slot.group in needed}
        return [*unused, *self._drafts.pop(user, set())]

    def release_owner(self, owner: str) -> list[PlacementGroup]:
        """End the hold of all users of an owner that died."""
        users = [user for user, found in self._owners.items() if found == owner]
        return [group for user in users for group in self.release(user)]

    def drop(self, pieces: Iterable[Piece]) -> list[PlacementGroup]:
        """Forget accelerators that the job has lost; return the placement groups of which nothing is left."""
        gone = {piece: self._slots.pop(piece) for piece in pieces if piece in self._slots}
        for used in self._users.values():
            for piece in gone:
                used.pop(piece, None)
        left = {slot.group for slot in self._slots.values()}
        return list({slot.group for slot in gone.values()} - left)

    @property
    def held(self) -> list[HeldSlot]:
        """Every slot with its users, in the order of nodes and accelerators."""
        return [
            HeldSlot(
                slot=self._slots[piece],
                users=tuple((user, pieces[piece]) for user, pieces in self._users.items() if piece in pieces),
            )
            for piece in sorted(self._slots)
        ]

    def _check_shares(self, user: str, shares: Mapping[Piece, float | None]) -> None:
        for piece, share in shares.items():
            if share is not None:
                others = ((name, pieces.get(piece)) for name, pieces in self._users.items() if name != user)
                declared = [(name_of(name), value) for name, value in others if value]
                check_shares(piece, [*declared, (name_of(user), share)])


def check_shares(piece: Piece, declared: Sequence[tuple[str, float]]) -> None:
    """Raise PlacementError if the shares declared for one accelerator exceed 1."""
    total = sum(value for _, value in declared)
    if total > 1 + _SLACK:
        parts = [f"{name} {value:g}" for name, value in declared]
        raise PlacementError(
            f"the shares of accelerator {piece.local_rank} of node {piece.node_rank} add up to {total:g}: "
            f"{join_words(parts)}",
            hint="the shares on one accelerator add up to 1 at most: lower one of them",
        )


def name_of(user: str) -> str:
    """Return a user's name for messages: `actor` for the launch `actor#5f2c`."""
    return user.partition("#")[0]
