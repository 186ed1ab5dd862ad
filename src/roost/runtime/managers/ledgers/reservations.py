"""Which accelerators the job has reserved, and who in the job uses which: plain state, no Ray calls, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ray.util.placement_group import PlacementGroup

from roost.errors import PlacementError
from roost.placement.plan import Piece
from roost.text import join_words

_SLACK = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One accelerator that Ray was told is taken: one bundle of a placement group."""

    piece: Piece
    """Which accelerator it is: measured, not guessed."""
    device: str
    """What its node's visible-devices variable calls it."""
    ray_id: str
    """Its node, as Ray calls it."""
    group: PlacementGroup
    bundle: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSlot:
    """A slot, and who in the job uses it with which share."""

    slot: Slot
    users: tuple[tuple[str, float | None], ...]


class SlotLedger:
    """The job's reservation: a slot for each accelerator, and its users. One that nobody uses any more is given back.

    A share is the part of an accelerator that a user declared; those who declared none are not counted. While a user
    is still trying, its placement groups are drafts: they go away with it.
    """

    def __init__(self) -> None:
        self._slots: dict[Piece, Slot] = {}
        self._users: dict[str, dict[Piece, float | None]] = {}
        self._drafts: dict[str, set[PlacementGroup]] = {}
        self._owners: dict[str, str] = {}

    @property
    def owners(self) -> set[str]:
        """Those on whose behalf something is used, and who can die."""
        return set(self._owners.values())

    def ask(self, user: str, shares: Mapping[Piece, float | None]) -> tuple[list[Slot], list[Piece]]:
        """Which of these accelerators the job has already, and which not; PlacementError where shares are above 1."""
        self._check_shares(user, shares)
        there = [self._slots[piece] for piece in shares if piece in self._slots]
        return there, [piece for piece in shares if piece not in self._slots]

    def add_drafts(self, user: str, owner: str | None, groups: Iterable[PlacementGroup]) -> None:
        """Placement groups that were made for a user, and may or may not be what it wants."""
        self._drafts.setdefault(user, set()).update(groups)
        if owner is not None:
            self._owners[user] = owner

    def discard_drafts(self, user: str, groups: Iterable[PlacementGroup]) -> None:
        """These were not what it wants, and are removed."""
        self._drafts.get(user, set()).difference_update(groups)

    def take(
        self, user: str, shares: Mapping[Piece, float | None], new: Sequence[Slot]
    ) -> tuple[list[Piece], list[PlacementGroup]]:
        """Use new slots and those that are there: what is not there any more, and the drafts that are not needed.

        Where something is not there any more nothing is done, and all drafts are not needed.
        """
        self._check_shares(user, shares)
        slots = {**self._slots, **{slot.piece: slot for slot in new}}
        gone = [piece for piece in shares if piece not in slots]
        drafts = self._drafts.pop(user, set())
        if gone:
            return gone, list(drafts)
        self._slots = slots
        self._users.setdefault(user, {}).update(shares)
        return [], list(drafts - {slot.group for slot in new})

    def let_go(self, user: str) -> list[PlacementGroup]:
        """A user is done; gives the placement groups that nobody needs any more."""
        self._users.pop(user, None)
        self._owners.pop(user, None)
        used = {piece for pieces in self._users.values() for piece in pieces}
        needed = {self._slots[piece].group for piece in used if piece in self._slots}
        unused = {slot.group for slot in self._slots.values()} - needed
        self._slots = {piece: slot for piece, slot in self._slots.items() if slot.group in needed}
        return [*unused, *self._drafts.pop(user, set())]

    def let_go_of_owner(self, owner: str) -> list[PlacementGroup]:
        """Somebody died: what was used on its behalf is not any more."""
        users = [user for user, found in self._owners.items() if found == owner]
        return [group for user in users for group in self.let_go(user)]

    def drop(self, pieces: Iterable[Piece]) -> list[PlacementGroup]:
        """These accelerators are not the job's any more; gives the placement groups that nothing is left of."""
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
            if share is None:
                continue
            others = {
                name: value for name, pieces in self._users.items() if name != user and (value := pieces.get(piece))
            }
            check_shares(piece, [*((name_of(name), value) for name, value in others.items()), (name_of(user), share)])


def check_shares(piece: Piece, declared: Sequence[tuple[str, float]]) -> None:
    """PlacementError where what is declared for one accelerator is more than it has."""
    total = sum(value for _, value in declared)
    if total > 1 + _SLACK:
        parts = [f"{name} {value:g}" for name, value in declared]
        raise PlacementError(
            f"the shares of accelerator {piece.local_rank} of node {piece.node_rank} add up to {total:g}: "
            f"{join_words(parts)}",
            hint="the shares of all that are on one accelerator add up to 1 at most: lower one of them",
        )


def name_of(user: str) -> str:
    """A user as messages name it: `actor` for the launch `actor#5f2c`."""
    return user.partition("#")[0]
