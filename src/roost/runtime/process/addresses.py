"""Names of workers: `actor:3`, or `actor:3:1` for rank 1 of a group that actor:3 launched."""

from __future__ import annotations

from collections.abc import Iterable

from roost.errors import ConfigError


class WorkerAddress(str):
    """The name of a worker in its job: a string that knows its parts, and is ordered by their numbers.

    >>> address = WorkerAddress("actor:10:1")
    >>> address.root_group_name, address.rank_path, address.rank
    ('actor', (10, 1), 1)
    >>> address.get_parent_address(), address > WorkerAddress("actor:9:5")
    ('actor:10', True)
    """

    __slots__ = ()

    def __new__(cls, name: str, ranks: int | Iterable[int] = ()) -> WorkerAddress:
        """Take a whole name, or the name of a group and the ranks that follow it."""
        path = (ranks,) if isinstance(ranks, int) else tuple(ranks)
        return super().__new__(cls, ":".join([name, *map(str, path)]))

    @property
    def root_group_name(self) -> str:
        """The name of the group that the driver launched."""
        return self.partition(":")[0]

    @property
    def rank_path(self) -> tuple[int, ...]:
        """The ranks, from that group down to this worker; names of groups between them are left out."""
        return tuple(int(part) for part in self.split(":")[1:] if part.isdigit())

    @property
    def rank(self) -> int:
        """The rank in its own group."""
        last = self.rpartition(":")[2]
        if not last.isdigit():
            raise ConfigError(f"{str(self)!r} is the name of a group, not of a worker")
        return int(last)

    def get_name(self) -> str:
        """Return it as a plain string."""
        return str.__str__(self)

    def get_parent_rank(self) -> int:
        """Return the rank of the worker that launched its group."""
        return self.get_parent_address().rank

    def get_parent_address(self) -> WorkerAddress:
        """Return the address of the worker that launched its group; the group's name for one of the driver's."""
        parent = self.rpartition(":")[0]
        if not parent:
            raise ConfigError(f"{str(self)!r} has no parent")
        return WorkerAddress(parent)

    def get_child_address(self, rank: int) -> WorkerAddress:
        """Return the address of a rank under this one."""
        return WorkerAddress(f"{self}:{rank}")

    @classmethod
    def from_name(cls, name: str) -> WorkerAddress:
        """Make one from a string."""
        return cls(name)

    @classmethod
    def from_parent_name_rank(cls, parent: str, rank: int) -> WorkerAddress:
        """Make the address of a rank under a name."""
        return cls(f"{parent}:{rank}")

    # A string has all of these already.
    def __lt__(self, other: str) -> bool:
        return _parts(self) < _parts(other)

    def __le__(self, other: str) -> bool:
        return _parts(self) <= _parts(other)

    def __gt__(self, other: str) -> bool:
        return _parts(self) > _parts(other)

    def __ge__(self, other: str) -> bool:
        return _parts(self) >= _parts(other)


def _parts(name: str) -> list[tuple[bool, int, str]]:
    """Split a name so that numbers are compared as numbers, and come before words."""
    return [(False, int(part), "") if part.isdigit() else (True, 0, part) for part in name.split(":")]
