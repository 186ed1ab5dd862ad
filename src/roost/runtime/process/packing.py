"""Arguments as bytes: pickled once for many workers, and loaded only when the receiver is ready for them.

The results of other calls are not pickled. They are arguments of Ray's: Ray brings their values from the workers that
made them, before it starts the call.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import cloudpickle

from roost.errors import ConfigError
from roost.runtime.events.waits import waiting
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


class Passable:
    """The result of a call, which may be an argument of another: it arrives as its values, or as its single value."""

    is_single: bool = False

    @property
    def refs(self) -> list[ray.ObjectRef[Any]]:
        """References to the values."""
        raise NotImplementedError

    @property
    def _source(self) -> Any:
        """The call that makes the result, as a call that takes it as an argument has to know it."""
        raise NotImplementedError

    def __str__(self) -> str:
        # Ray shows it where a program writes `ray.get([result])`.
        return f"{self!r} (its values: result.wait(), or ray.get(result.refs))"

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} can only be passed to a method of a group; elsewhere wait() for it, or send its refs"
        )


@dataclass(frozen=True, slots=True)
class Sent:
    """The arguments of a call as they are sent to one worker."""

    arguments: tuple[Any, ...] = ()
    """Nothing, or the packed arguments and then references to the values of the results among them."""
    sources: tuple[Any, ...] = ()
    """The calls that make those results."""


def pack(thing: Any, results: list[Passable] | None = None) -> Packed:
    """Pickle a value; raises what pickling raises. With a list for the results in it, these are left to Ray."""
    packed = Packed(data=b"", buffers=[], apart=[])
    out = io.BytesIO()
    packer: Any = _Packer(out, packed, results)
    packer.dump(thing)
    packed.data = out.getvalue()
    return packed


def ship(thing: Any, name: Callable[[], str], results: list[Passable] | None = None) -> Packed | ray.ObjectRef[Packed]:
    """Pack a value for many workers: pickled once, and stored once if large. ConfigError if it is not picklable."""
    try:
        packed = pack(thing, results)
    except Exception as error:
        raise ConfigError(
            f"{name()} cannot be sent to a worker: {shorten(str(error), 300)}",
            hint="arguments must be picklable: send what it is made from, and make it in the worker",
        ) from None
    blobs = (item for item in packed.apart if not isinstance(item, ray.ObjectRef))
    size = len(packed.data) + sum(memoryview(buffer).nbytes for buffer in (*packed.buffers, *blobs))
    return ray.put(packed) if size > _LARGE else packed


def pack_call(method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sent:
    """Pack the arguments of a call to many workers; nothing is sent if there are none."""
    if not args and not kwargs:
        return Sent()
    results: list[Passable] = []
    packed = ship((tuple(args), dict(kwargs)), lambda: f"{_culprit(args, kwargs)} of {method!r}", results)
    refs = (ref for result in results for ref in result.refs)
    return Sent((packed, *refs), tuple(result._source for result in results))


def _culprit(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Say which argument cannot be pickled."""
    for place, value in (*enumerate(args), *kwargs.items()):
        try:
            pack(value, [])
        except Exception:
            return f"argument {place!r} ({type(value).__name__})"
    return "an argument"


def unpack(sent: Sequence[Any]) -> Call:
    """Unpack what a call sent, and fetch arguments that are references. As in Ray, references inside of them stay."""
    call, refs = _load(sent)
    if not refs:
        return call
    with waiting(lambda: "its arguments"):
        return _fill(call, ray.get(refs))


async def unpack_async(sent: Sequence[Any]) -> Call:
    """Do the same without blocking the event loop, as a plain ray.get would."""
    call, refs = _load(sent)
    if not refs:
        return call
    with waiting(lambda: "its arguments"):
        return _fill(call, [await ref for ref in refs])


def make_object(packed: Packed) -> Any:
    """Construct an object; its class was packed as the first argument of the constructor."""
    (cls, *args), kwargs = unpack([packed])
    return cls(*args, **kwargs)


def _load(sent: Sequence[Any]) -> tuple[Call, list[Any]]:
    args, kwargs = _Unpacker(sent[0], sent[1:]).load() if sent else ((), {})
    return (args, kwargs), [value for value in (*args, *kwargs.values()) if isinstance(value, ray.ObjectRef)]


def _fill(call: Call, fetched: Iterable[Any]) -> Call:
    """Put fetched values in the places of the references, in the same order."""
    values = iter(fetched)
    args = tuple(next(values) if isinstance(value, ray.ObjectRef) else value for value in call[0])
    return args, {name: next(values) if isinstance(value, ray.ObjectRef) else value for name, value in call[1].items()}


class _Packer(cloudpickle.CloudPickler):
    def __init__(self, out: io.BytesIO, packed: Packed, results: list[Passable] | None) -> None:
        super().__init__(out, protocol=5, buffer_callback=packed.buffers.append)  # type: ignore[no-untyped-call]
        self._packed = packed
        self._results = results
        self._values = 0

    def persistent_id(self, thing: object) -> int | tuple[int, int | None] | None:
        """Return the place of what is not pickled: in `apart`, or the first and the number of values of a result."""
        if self._results is not None and isinstance(thing, Passable):
            first, count = self._values, len(thing.refs)
            self._values += count
            self._results.append(thing)
            return first, None if thing.is_single else count
        if isinstance(thing, ray.ObjectRef):
            self._packed.apart.append(thing)
        elif type(thing) is bytes and len(thing) > _LARGE:
            self._packed.apart.append(pickle.PickleBuffer(thing))
        else:
            return None
        return len(self._packed.apart) - 1


class _Unpacker(pickle.Unpickler):
    def __init__(self, packed: Packed, values: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(packed.data), buffers=packed.buffers)
        self._packed = packed
        self._values = values

    def persistent_load(self, place: int | tuple[int, int | None]) -> Any:
        if isinstance(place, tuple):
            first, count = place
            return self._values[first] if count is None else list(self._values[first : first + count])
        item = self._packed.apart[place]
        return item if isinstance(item, ray.ObjectRef) else bytes(item)
