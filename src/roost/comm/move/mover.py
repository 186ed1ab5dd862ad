"""The seam that movers stand behind: a source offers its arrays, and a target copies from them without its help.

A mover knows one kind of memory: what another process finds an array by, and how this process then views or reads it.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from roost.comm.move.arrays import copy, cut, devices_of, dtype_of, is_on_host, is_tensor, strides_of, wrap
from roost.comm.move.cuda import CudaMover, DeviceCopy, as_device_copy, start_copies, uuid_of
from roost.comm.move.dtypes import SIZES
from roost.comm.move.host import HostMover, own_cookie
from roost.comm.move.route import End
from roost.errors import ConfigError

_CHECK_EVERY = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteArray:
    """One array of another process."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes."""
    device: str = ""
    """The UUID of the device that it is on; empty for the host."""
    places: Mapping[str, Any] = field(default_factory=dict)
    """By mover: what that finds it by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The arrays of a process, as others find them."""

    pid: int
    node: int
    arrays: Mapping[str, RemoteArray] = field(default_factory=dict)
    can_group: bool = False
    """Whether the process can be in process groups."""
    cookie: tuple[int, bytes] = (0, b"")
    """An address and what is there, by which a reader knows that the number of the process means this process."""


class Mover(Protocol):
    """Copies from one other process."""

    name: ClassVar[str]

    def __init__(self, owner: str, offer: Offer) -> None:
        """Take the name of the process, for messages, and what it offers."""

    @staticmethod
    def offer(arrays: Mapping[str, Any], *, may_share: bool) -> Mapping[str, Any]:
        """Return what another process finds arrays of this one by, by name; some need another mover."""

    def why_not(self, array: RemoteArray) -> str:
        """Say why this process cannot copy from that memory; empty if it can."""

    def view(self, array: RemoteArray) -> Any:
        """Return that memory as an array of this process; None if it can be read and not viewed."""

    def read(self, array: RemoteArray, at: Sequence[int], target: Any) -> None:
        """Copy a part that begins at `at` into an array on the host; WorkerDied if the process has ended."""

    def close(self) -> None:
        """Let go of its memory, which no view is used of any more; a view that is asked for later maps it again."""


MOVERS: tuple[type[Mover], ...] = (CudaMover, HostMover)
"""The first that has a place for an array copies it."""


def make_offer(
    tensors: Mapping[str, Any],
    node: int,
    *,
    may_share: bool,
    can_group: bool = False,
    movers: Sequence[type[Mover]] = MOVERS,
) -> Offer:
    """Describe arrays of this process; with `may_share`, storages of torch move into shared memory first."""
    plain = {name: one.detach() if is_tensor(one) else one for name, one in tensors.items()}
    places = {mover.name: mover.offer(plain, may_share=may_share) for mover in movers}
    arrays = {
        name: RemoteArray(
            dtype=dtype_of(one),
            shape=tuple(one.shape),
            strides=strides_of(one),
            device="" if is_on_host(one) else uuid_of(one.device),
            places={mover: found[name] for mover, found in places.items() if name in found},
        )
        for name, one in plain.items()
    }
    return Offer(pid=os.getpid(), node=node, arrays=arrays, can_group=can_group, cookie=own_cookie())


class RemoteMemory:
    """The arrays of another process, as this one copies from them."""

    def __init__(self, owner: str, offer: Offer, movers: Sequence[type[Mover]] = MOVERS) -> None:
        self.owner = owner
        self.offer = offer
        self._movers = [mover(owner, offer) for mover in movers]

    def end(self, names: Iterable[str]) -> End:
        """Return what is known of these arrays, to choose a route by."""
        arrays = [self.offer.arrays[name] for name in names]
        devices = {array.device for array in arrays}
        closed = ""
        for array in arrays:
            if not closed and 0 not in array.shape:
                mover = self._mover_of(array)
                closed = "no mover knows its memory" if mover is None else mover.why_not(array)
        return End(
            process=self.owner,
            node=self.offer.node,
            memory=devices.pop() if len(devices) == 1 else "",
            closed=closed,
            can_group=self.offer.can_group,
        )

    def view(self, name: str, at: Sequence[int], shape: Sequence[int]) -> Any:
        """Return a part of an array as one of this process, where it can be mapped; else None."""
        array, mover = self._part(name, at, shape)
        found = mover.view(array)
        return None if found is None else cut(found, at, shape)

    def read(self, name: str, at: Sequence[int], target: Any) -> None:
        """Copy a part of an array into another one of that shape; WorkerDied if its process has ended."""
        shape = tuple(target.shape)
        array, mover = self._part(name, at, shape)
        # Movers read into arrays of the same type on the host; others get it by way of one.
        is_plain = is_on_host(target) and dtype_of(target) == array.dtype
        buffer = target if is_plain else wrap(bytearray(math.prod(shape) * SIZES[array.dtype]), array.dtype, shape)
        mover.read(array, at, buffer)
        if not is_plain:
            copy(target, buffer)

    def close(self) -> None:
        """Let go of all of it until it is used again."""
        for mover in self._movers:
            mover.close()

    def _mover_of(self, array: RemoteArray) -> Mover | None:
        return next((mover for mover in self._movers if mover.name in array.places), None)

    def _part(self, name: str, at: Sequence[int], shape: Sequence[int]) -> tuple[RemoteArray, Mover]:
        """Return an array and its mover, if it has this part: nothing outside of it is read."""
        array = self.offer.arrays[name]
        mover = self._mover_of(array)
        if len(at) != len(array.shape) or any(
            start < 0 or start + size > whole for start, size, whole in zip(at, shape, array.shape, strict=True)
        ):
            what = f"{name} of {self.owner} has shape {list(array.shape)}"
            raise ConfigError(f"{what}: there is no {list(shape)} at {list(at)}")
        if mover is None:
            raise ConfigError(f"{name} of {self.owner} cannot be copied from here: no mover knows its memory")
        return array, mover


class Copies:
    """Pairs of arrays in memory that this process can map, found once and copied as quickly as can be."""

    def __init__(self) -> None:
        self.devices: set[Any] = set()
        """The devices that the arrays are on."""
        self._on_devices: dict[Any, list[DeviceCopy]] = defaultdict(list)
        self._others: list[tuple[Any, Any]] = []

    def add(self, target: Any, source: Any) -> None:
        """Take in a copy of the second array into the first."""
        self.devices |= devices_of((target, source))
        plain = as_device_copy(target, source)
        if plain is not None:
            self._on_devices[target.device].append(plain)
        else:
            self._others.append((target, source))

    def start(self, check: Callable[[], None]) -> None:
        """Start all of them, and call `check` now and then, which may break it off; devices finish later."""
        for device, plain in self._on_devices.items():
            start_copies(plain, device, check)
        for place, (target, source) in enumerate(self._others):
            copy(target, source)
            if place % _CHECK_EVERY == 0:
                check()
