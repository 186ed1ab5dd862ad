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
"""Ray sends an argument below this size along with the call, and puts a larger one into its store."""


@dataclass(slots=True)
class Packed:
    """Something pickled: its large buffers beside it, and references where Ray sees and keeps them."""

    data: bytes
    buffers: list[Any]
    refs: list[ray.ObjectRef[Any]]
    blobs: list[Any]
    """Large `bytes`, which pickle by itself would copy once more for every worker."""

    @property
    def size(self) -> int:
        """How many bytes it is."""
        return len(self.data) + sum(memoryview(buffer).nbytes for buffer in (*self.buffers, *self.blobs))

    def load(self) -> Any:
        """What was packed."""
        return _Unpacker(self).load()


def pack(thing: Any) -> Packed:
    """Pickle something; raises what pickling raises."""
    packed = Packed(data=b"", buffers=[], refs=[], blobs=[])
    out = io.BytesIO()
    packer: Any = _Packer(out, packed)
    packer.dump(thing)
    packed.data = out.getvalue()
    return packed


def pack_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments of a call for many workers, as what is handed to each: pickled once, and shipped once if large.

    A call without arguments stays one, and references are left to Ray, which fetches them before the call.
    """
    if not args and not kwargs:
        return ()
    return (ship(pack((tuple(args), dict(kwargs)))),)


def ship(packed: Packed) -> Packed | ray.ObjectRef[Packed]:
    """What is handed to each of many workers: the thing itself, or one copy in Ray's store if it is large."""
    return ray.put(packed) if packed.size > _LARGE else packed


@dataclass(slots=True)
class Arguments:
    """The arguments of a call, some of which may be references that are still to be fetched.

    As Ray does it: an argument that is a reference is fetched, one inside an argument is not.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def unpack(cls, sent: tuple[Any, ...]) -> Arguments:
        """What `pack_call` packed."""
        return cls(*sent[0].load()) if sent else cls()

    @property
    def refs(self) -> list[ray.ObjectRef[Any]]:
        """The arguments that are to be fetched."""
        return [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, ray.ObjectRef)]

    def fetch(self) -> Arguments:
        """The same with every reference fetched."""
        refs = self.refs
        return self._with(dict(zip(refs, ray.get(refs), strict=True))) if refs else self

    async def fetch_async(self) -> Arguments:
        """The same; in an actor with an event loop a plain ray.get would hold up everybody."""
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
    """Make the object whose class and arguments were packed as `(cls, args, kwargs)`."""
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
