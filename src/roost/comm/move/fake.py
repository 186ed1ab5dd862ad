"""`FakeMover`: a mover between arrays of one process, for tests."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from roost.comm.move.arrays import copy, cut
from roost.errors import WorkerDied

if TYPE_CHECKING:
    from roost.comm.move.mover import Offer, RemoteArray


class FakeMover:
    """Copies between arrays of this process as if they were in two, and notes what it copied.

    Each subclass has its own notes and says where it fails:

    >>> class Closed(FakeMover):
    ...     closed = "no IPC handle"
    """

    name: ClassVar[str] = "fake"
    closed: ClassVar[str] = ""
    """Why arrays cannot be copied without the help of their process."""
    dead: ClassVar[tuple[str, ...]] = ()
    """Processes that end before anything is read from them."""
    read_from: ClassVar[list[tuple[str, tuple[int, ...], tuple[int, ...]]]] = []
    """The copies made: the process, and where which shape began."""
    _arrays: ClassVar[dict[int, Any]] = {}
    _numbers: ClassVar[Any] = itertools.count()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.read_from, cls._arrays = [], {}

    def __init__(self, owner: str, offer: Offer) -> None:
        del offer
        self._owner = owner

    @classmethod
    def offer(cls, arrays: Mapping[str, Any], *, may_share: bool) -> dict[str, int]:
        """Keep the arrays, and return their numbers."""
        del may_share
        numbers = {name: next(cls._numbers) for name in arrays}
        cls._arrays.update({number: arrays[name] for name, number in numbers.items()})
        return numbers

    def why_not(self, array: RemoteArray) -> str:
        """Return what the subclass says."""
        del array
        return self.closed

    def view(self, array: RemoteArray) -> Any:
        """Return None: everything is read, and noted."""
        del array

    def read(self, array: RemoteArray, at: Sequence[int], target: Any) -> None:
        """Copy, unless the process is one that has ended."""
        if self._owner in self.dead:
            raise WorkerDied(f"{self._owner} has ended")
        shape = tuple(target.shape)
        copy(target, cut(self._arrays[array.places[self.name]], at, shape))
        self.read_from.append((self._owner, tuple(at), shape))

    def close(self) -> None:
        """Do nothing."""
