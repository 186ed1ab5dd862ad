"""The communication groups of a job, as plain state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from roost.errors import ClusterError, NameTaken
from roost.text import join_words


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveGroup:
    """A communication group: who is in it, and where its first member listens."""

    name: str
    members: tuple[str, ...]
    node_rank: int
    address: str
    port: int


@dataclass(slots=True)
class CollectiveLedger:
    """Every communication group of the job by its name."""

    groups: dict[str, CollectiveGroup] = field(default_factory=dict)
    listeners: dict[str, str] = field(default_factory=dict)
    """By group: which instance of its first member listens, once that is known."""

    def find(self, name: str, members: Sequence[str], node_rank: int) -> CollectiveGroup | None:
        """Return the group, if it exists; NameTaken if it exists with other members or on another node."""
        found = self.groups.get(name)
        if found is None:
            return None
        if found.members != tuple(members):
            difference = f"with other members: {join_words(found.members)}, not {join_words(list(members))}"
        elif found.node_rank != node_rank:
            difference = f"on node {found.node_rank}, not on node {node_rank}"
        else:
            return found
        raise NameTaken(
            f"communication group {name!r} exists already, {difference}",
            hint=f"it ends when {found.members[0]}, which listens, is closed; remove_group({name!r}) ends it now",
        )

    def is_over(self, name: str, listener: str | None) -> bool:
        """Whether the first member of a group has died since it was seen; `listener` is its instance that lives now."""
        if listener is not None:
            self.listeners.setdefault(name, listener)
        return self.listeners.get(name) != listener

    def remove(self, name: str) -> None:
        """Remove a group."""
        self.groups.pop(name, None)
        self.listeners.pop(name, None)

    def get(self, name: str) -> CollectiveGroup:
        """Return a group by its name."""
        found = self.groups.get(name)
        if found is None:
            raise ClusterError(
                f"there is no communication group {name!r}",
                hint=f"there are {join_words(sorted(self.groups)) or 'none'}",
            )
        return found
