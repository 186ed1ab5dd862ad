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
    address: str
    port: int


@dataclass(slots=True)
class CollectiveLedger:
    """Every communication group of the job by its name."""

    groups: dict[str, CollectiveGroup] = field(default_factory=dict)

    def find(self, name: str, members: Sequence[str]) -> CollectiveGroup | None:
        """Return the group, if it exists; NameTaken if it exists with other members."""
        found = self.groups.get(name)
        if found is not None and found.members != tuple(members):
            raise NameTaken(
                f"communication group {name!r} exists already, with other members: "
                f"{join_words(found.members)}, not {join_words(list(members))}"
            )
        return found

    def add(self, group: CollectiveGroup) -> CollectiveGroup:
        """Add a group, unless it was added in the meantime."""
        return self.groups.setdefault(group.name, group)

    def get(self, name: str) -> CollectiveGroup:
        """Return a group by its name."""
        found = self.groups.get(name)
        if found is None:
            raise ClusterError(
                f"there is no communication group {name!r}",
                hint=f"there are {join_words(sorted(self.groups)) or 'none'}",
            )
        return found
