"""`Reservation`: accelerators that are the job's until it is closed, in the eyes of all that runs on the same Ray."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from roost.config.hardware import ACCELERATOR
from roost.config.values import share_problem
from roost.errors import ConfigError, RoostError
from roost.placement.placement import Placement
from roost.placement.plan import Piece, Plan, pieces_of
from roost.runtime.managers.ledgers.reservations import Slot, check_shares
from roost.text import plural

if TYPE_CHECKING:
    from roost.runtime.cluster import Cluster


class Reservation:
    """Accelerators that Ray knows are taken. `close()` gives them back, unless a group of the job still uses them."""

    def __init__(self, cluster: Cluster, user: str, slots: Iterable[Slot]) -> None:
        self._cluster = cluster
        self._user = user
        self._slots = tuple(sorted(slots, key=lambda slot: slot.piece))
        self._is_closed = False

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The placement group and the bundle of each accelerator, in the order of nodes and accelerators."""
        return self._slots

    @property
    def accelerators(self) -> list[tuple[int, int]]:
        """What is reserved: node rank and local rank of each accelerator."""
        return [(slot.piece.node_rank, slot.piece.local_rank) for slot in self._slots]

    def close(self) -> None:
        """Give back what nobody in the job uses any more."""
        if self._slots and not self._is_closed and self._cluster.is_connected():
            # Where the job's manager is gone, Ray gives it all back with it.
            with contextlib.suppress(RoostError):
                self._cluster.node_manager.let_go_slots(self._user)
        self._is_closed = True

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._slots)

    def __repr__(self) -> str:
        return f"<Reservation of {plural(len(self._slots), 'accelerator')}{', closed' if self._is_closed else ''}>"


def accelerators_of(placement: Placement) -> list[Piece]:
    """The accelerators that a worker has of its own."""
    return [piece for piece in pieces_of(placement) if piece.kind == ACCELERATOR]


def plan_accelerators(plan: Plan, shares: Mapping[str, float]) -> list[Piece]:
    """The accelerators of a plan, each once; PlacementError where the shares of its components do not add up."""
    if not isinstance(shares, Mapping):
        raise ConfigError(f"shares is {shares!r}", hint='it is a dict, as in {"actor": 0.8, "rollout": 0.2}')
    for name, share in shares.items():
        plan.component(name)
        if share is None:
            raise ConfigError(f"the share of {name!r} is None", hint="leave out who declares none")
        check_share(share, f"the share of {name!r}")
    declared: dict[Piece, dict[str, float]] = {}
    for component in plan.components:
        for piece in (piece for placement in component.placements for piece in accelerators_of(placement)):
            on_piece = declared.setdefault(piece, {})
            on_piece[component.name] = on_piece.get(component.name, 0.0) + shares.get(component.name, 0.0)
    for piece, found in declared.items():
        check_shares(piece, list(found.items()))
    return list(declared)


def plan_components(plan: Plan) -> dict[str, Sequence[Placement]]:
    """The placements of each component."""
    return {component.name: component.placements for component in plan.components}


def check_share(share: float | None, what: str) -> None:
    """Raise ConfigError for a value that is not a part of an accelerator."""
    if share is not None and (problem := share_problem(share)):
        raise ConfigError(f"{what} is {share!r}: {problem}")


def check_timeout(timeout: float) -> None:
    """Refuse what is no number of seconds."""
    if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not 0 <= timeout < math.inf:
        raise ConfigError(f"timeout is {timeout!r}: it is a number of seconds, 0 or more")
