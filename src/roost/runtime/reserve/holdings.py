"""Who holds which accelerator, as values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from roost.config.hardware import ACCELERATOR, accelerator_types
from roost.placement.plan import Piece
from roost.runtime.nodes.info import NodeInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """An accelerator, or part of one, that is held."""

    amount: float
    holder: str
    """Job, actor and pid, as messages name them."""
    namespace: str | None = None
    """The namespace of the holder, if it is a job of Roost."""
    users: tuple[str, ...] = ()
    """The groups of that job that use it."""

    def __str__(self) -> str:
        return self.holder if self.amount >= 1 else f"{self.amount:g} of it {self.holder}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """Who has what."""

    by_piece: Mapping[Piece, Sequence[Holding]] = field(default_factory=dict)
    somewhere: Mapping[int, Sequence[Holding]] = field(default_factory=dict)
    """By node: what is taken there, without knowing which accelerator it is."""
    free: Mapping[int, float] = field(default_factory=dict)
    """By node: how much is free, as far as Ray's head knows."""

    def of(self, piece: Piece, *, except_for: str | None = None) -> list[Holding]:
        """Return who holds a piece, leaving out one job."""
        return [item for item in self.by_piece.get(piece, ()) if item.namespace is None or item.namespace != except_for]

    def free_pieces(self, nodes: Sequence[NodeInfo], *, except_for: str | None = None) -> set[Piece]:
        """Return the accelerators that are free, as far as is known."""
        return {
            piece
            for node in nodes
            for piece in pieces_on(node)
            if not self.of(piece, except_for=except_for) and not self.somewhere.get(node.rank)
        }


def pieces_on(node: NodeInfo) -> list[Piece]:
    """Return the accelerators of a node."""
    return [Piece(node.rank, ACCELERATOR, local) for local in range(node.num_accelerators)]


def resource_of(node: NodeInfo) -> str:
    """Return Ray's name for the resource of the node's accelerators."""
    return accelerator_types()[node.accelerator_type].resource
