"""Arguments as bytes: pickled once for many workers, and loaded only when the receiver is ready for them."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import cloudpickle

_LARGE = 100 * 1024
"""Ray sends smaller arguments along with the call, and puts larger ones into its object store."""


@dataclass(slots=True)
class Packed:
    """A pickled value: large buffers kept apart, and object references where Ray can see and keep them."""

    data: bytes
    buffers: list[Any]
    refs: list[ray.ObjectRef[Any]]
    blobs: list[Any]
    """Large `bytes`, which plain pickle would copy again for every worker."""

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return len(self.data) + sum(memoryview(buffer).nbytes for buffer in (*self.buffers, *self.blobs))

    def load(self) -> Any:
        """Unpickle the value."""
        return _Unpacker(self).load()


def pack(thing: Any) -> Packed:
    """Pickle a value; raises what pickling raises."""
    packed = Packed(data=b"", buffers=[], refs=[], blobs=[])
    out = io.BytesIO()
    packer: Any = _Packer(out, packed)
    packer.dump(thing)
    packed.data = out.getvalue()
    return packed


def pack_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Pack the arguments of a call to many workers: pickled once, and stored once if large."""
    if not args and not kwargs:
        return ()
    return (ship(pack((tuple(args), dict(kwargs)))),)


def ship(packed: Packed) -> Packed | ray.ObjectRef[Packed]:
    """Return what each worker is sent: the packed value itself, or a reference to one copy in Ray's store."""
    return ray.put(packed) if packed.size > _LARGE else packed


@dataclass(slots=True)
class Arguments:
    """The arguments of a call, some of which may be object references that are not fetched yet.

    As in Ray, an argument that is a reference is fetched, and a reference inside an argument is not.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def unpack(cls, sent: tuple[Any, ...]) -> Arguments:
        """Unpack what `pack_call` packed."""
        return cls(*sent[0].load()) if sent else cls()

    @property
    def refs(self) -> list[ray.ObjectRef[Any]]:
        """The arguments that are references."""
        return [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, ray.ObjectRef)]

    def fetch(self) -> Arguments:
        """Return the same arguments with every reference fetched."""
        refs = self.refs
        return self._with(dict(zip(refs, ray.get(refs), strict=True))) if refs else self

    async def fetch_async(self) -> Arguments:
        """Do the same without blocking the event loop, as a plain ray.get would."""
        refs = self.refs
        return self._with({ref: await ref for ref in refs}) if refs else self

    def _with(self, values: Mapping[Any, Any]) -> Arguments:
        def fetched(value: Any) -> Any:
            return values[value] if isinstance(value, ray.ObjectRef) else value

        return Arguments(
            tuple(fetched(value) for value in self.args),
            {name: fetched(value) for name, value in self.kwargs.items()},
        )


def make_object(packed: Packed) -> Any:
    """Construct the object whose class and arguments were packed as `(cls, args, kwargs)`."""
    cls, args, kwargs = packed.load()
    arguments = Arguments(args, kwargs).fetch()
    return cls(*arguments.args, **arguments.kwargs)


class _Packer(cloudpickle.CloudPickler):
    def __init__(self, out: io.BytesIO, packed: Packed) -> None:
        super().__init__(out, protocol=5, buffer_callback=packed.buffers.append)  # type: ignore[no-untyped-call]
        self._packed = packed

    def persistent_id(self, thing: object) -> tuple[str, int] | None:
        if isinstance(thing, ray.ObjectRef):
            self._packed.refs.append(thing)
            return "ref", len(self._packed.refs) - 1
        if type(thing) is bytes and len(thing) > _LARGE:
            self._packed.blobs.append(pickle.PickleBuffer(thing))
            return "blob", len(self._packed.blobs) - 1
        return None


class _Unpacker(pickle.Unpickler):
    def __init__(self, packed: Packed) -> None:
        super().__init__(io.BytesIO(packed.data), buffers=packed.buffers)
        self._packed = packed

    def persistent_load(self, place: tuple[str, int]) -> Any:
        kind, index = place
        return self._packed.refs[index] if kind == "ref" else bytes(self._packed.blobs[index])
