"""Arguments as bytes: pickled once for many workers, and loaded only when the receiver is ready for them."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import cloudpickle

from roost.errors import ConfigError
from roost.text import shorten

_LARGE = 100 * 1024
"""Ray sends smaller arguments along with the call, and puts larger ones into its object store."""

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call, some of which may be object references that are not fetched yet."""


@dataclass(slots=True)
class Packed:
    """A pickled value: large buffers kept apart, and object references where Ray can see and keep them."""

    data: bytes
    buffers: list[Any]
    apart: list[Any]
    """Object references, and large `bytes`, which plain pickle would copy again for every worker."""

    @property
    def size(self) -> int:
        """Its size in bytes."""
        blobs = (item for item in self.apart if not isinstance(item, ray.ObjectRef))
        return len(self.data) + sum(memoryview(buffer).nbytes for buffer in (*self.buffers, *blobs))


def pack(thing: Any) -> Packed:
    """Pickle a value; raises what pickling raises."""
    packed = Packed(data=b"", buffers=[], apart=[])
    out = io.BytesIO()
    packer: Any = _Packer(out, packed)
    packer.dump(thing)
    packed.data = out.getvalue()
    return packed


def ship(thing: Any, name: Callable[[], str]) -> Packed | ray.ObjectRef[Packed]:
    """Pack a value for many workers: pickled once, and stored once if large. ConfigError if it is not picklable."""
    try:
        packed = pack(thing)
    except Exception as error:
        raise ConfigError(
            f"{name()} cannot be sent to a worker: {shorten(str(error), 300)}",
            hint="arguments must be picklable: send what it is made from, and make it in the worker",
        ) from None
    return ray.put(packed) if packed.size > _LARGE else packed


def pack_call(method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Pack the arguments of a call to many workers; nothing is sent if there are none."""
    if not args and not kwargs:
        return ()
    return (ship((tuple(args), dict(kwargs)), lambda: f"{_culprit(args, kwargs)} of {method!r}"),)


def _culprit(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Say which argument cannot be pickled."""
    for place, value in (*enumerate(args), *kwargs.items()):
        try:
            pack(value)
        except Exception:
            return f"argument {place!r} ({type(value).__name__})"
    return "an argument"


def unpack(sent: Sequence[Packed]) -> Call:
    """Unpack the arguments of a call and fetch those that are references. As in Ray, references inside them stay."""
    call, refs = _load(sent)
    return _fill(call, ray.get(refs)) if refs else call


async def unpack_async(sent: Sequence[Packed]) -> Call:
    """Do the same without blocking the event loop, as a plain ray.get would."""
    call, refs = _load(sent)
    return _fill(call, [await ref for ref in refs]) if refs else call


def make_object(packed: Packed) -> Any:
    """Construct an object; its class was packed as the first argument of the constructor."""
    (cls, *args), kwargs = unpack([packed])
    return cls(*args, **kwargs)


def _load(sent: Sequence[Packed]) -> tuple[Call, list[Any]]:
    args, kwargs = _Unpacker(sent[0]).load() if sent else ((), {})
    return (args, kwargs), [value for value in (*args, *kwargs.values()) if isinstance(value, ray.ObjectRef)]


def _fill(call: Call, fetched: Iterable[Any]) -> Call:
    """Put fetched values in the places of the references, in the same order."""
    values = iter(fetched)
    args = tuple(next(values) if isinstance(value, ray.ObjectRef) else value for value in call[0])
    return args, {name: next(values) if isinstance(value, ray.ObjectRef) else value for name, value in call[1].items()}


class _Packer(cloudpickle.CloudPickler):
    def __init__(self, out: io.BytesIO, packed: Packed) -> None:
        super().__init__(out, protocol=5, buffer_callback=packed.buffers.append)  # type: ignore[no-untyped-call]
        self._packed = packed

    def persistent_id(self, thing: object) -> int | None:
        if isinstance(thing, ray.ObjectRef):
            self._packed.apart.append(thing)
        elif type(thing) is bytes and len(thing) > _LARGE:
            self._packed.apart.append(pickle.PickleBuffer(thing))
        else:
            return None
        return len(self._packed.apart) - 1


class _Unpacker(pickle.Unpickler):
    def __init__(self, packed: Packed) -> None:
        super().__init__(io.BytesIO(packed.data), buffers=packed.buffers)
        self._packed = packed

    def persistent_load(self, index: int) -> Any:
        item = self._packed.apart[index]
        return item if isinstance(item, ray.ObjectRef) else bytes(item)
