"""Objects as messages: pickled, with arrays and tensors next to the pickle as raw buffers."""

from __future__ import annotations

import functools
import io
import pickle
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from roost.comm.move.arrays import bytes_of, wrap
from roost.errors import ConfigError
from roost.text import shorten

if TYPE_CHECKING:
    from roost.comm.move.loans import Lending

_OUT_OF_BAND = 1 << 13
"""Smaller buffers are copied into the pickle."""

_NO_BUFFERS: tuple[Any, ...] = ()
_PLAIN = frozenset({bytes, str, int, float, bool, type(None)})

Packed = tuple[bytes, Sequence[Any]]


def pack(thing: Any, lending: Lending | None = None) -> Packed:
    """Pickle an object; returns the pickle, and the large buffers in it as they are, not copied.

    Tensors on a device stay there, and are lent to the receiver; without `lending` they are copied to the host.
    """
    kind = type(thing)
    if kind is bytes and len(thing) >= _OUT_OF_BAND:
        # Pickle would copy them.
        return b"", [memoryview(thing)]
    if kind in _PLAIN:
        return pickle.dumps(thing, 5), _NO_BUFFERS
    buffers: list[Any] = []
    keep = functools.partial(_keep, buffers)
    try:
        if "torch" in sys.modules:
            out = io.BytesIO()
            _TensorPickler(out, lending, keep).dump(thing)
            data = out.getvalue()
        else:
            data = pickle.dumps(thing, protocol=5, buffer_callback=keep)
        if b"__main__" not in data:
            return data, buffers
    except Exception as error:
        failure: Exception | None = error
    else:
        failure = None
    # Classes and functions of a script, and what plain pickle cannot do.
    from ray import cloudpickle

    buffers.clear()
    if lending is not None:
        lending.cancel()
    try:
        return cloudpickle.dumps(thing, protocol=5, buffer_callback=keep), buffers  # type: ignore[no-untyped-call]
    except Exception as error:
        raise ConfigError(
            f"a {type(thing).__name__} cannot be sent: {shorten(str(failure or error), 300)}",
            hint="what is sent must be picklable: send what it is made from, and make it at the other end",
        ) from None


def pack_many(things: Iterable[Any]) -> list[Packed]:
    """Pickle objects one by one: the same as `pack` for each, and quicker for many small ones."""
    if "torch" in sys.modules:
        return [pack(thing) for thing in things]
    buffers: list[Any] = []
    keep = functools.partial(_keep, buffers)
    packed: list[Packed] = []
    dumps = pickle.dumps
    for thing in things:
        try:
            data = b"" if type(thing) is bytes and len(thing) >= _OUT_OF_BAND else dumps(thing, 5, buffer_callback=keep)
        except Exception:
            data = b""
        if not data or (type(thing) not in _PLAIN and b"__main__" in data):
            buffers.clear()
            packed.append(pack(thing))
        elif buffers:
            packed.append((data, buffers.copy()))
            buffers.clear()
        else:
            packed.append((data, _NO_BUFFERS))
    return packed


def _keep(buffers: list[Any], buffer: pickle.PickleBuffer) -> bool:
    """Keep a large buffer out of the pickle; returns whether it goes into it."""
    raw = buffer.raw()
    if raw.nbytes < _OUT_OF_BAND:
        return True
    buffers.append(raw)
    return False


def unpack(data: Any, buffers: Sequence[Any]) -> Any:
    """Make the object of a message; raises what unpickling raises."""
    if not data:
        return bytes(buffers[0])
    return pickle.loads(data, buffers=buffers)  # noqa: S301 - from a member of this job, which proved it


class _TensorPickler(pickle.Pickler):
    """Pickles tensors as raw buffers or as loans; torch alone would copy them into an archive of its own."""

    def __init__(self, out: io.BytesIO, lending: Lending | None, keep: Callable[[pickle.PickleBuffer], bool]) -> None:
        super().__init__(out, protocol=5, buffer_callback=keep)
        self._lending = lending

    def reducer_override(self, thing: Any) -> Any:
        torch = sys.modules["torch"]
        if type(thing) is not torch.Tensor and type(thing) is not torch.nn.Parameter:
            return NotImplemented
        if thing.layout is not torch.strided or thing.device.type not in ("cpu", "cuda") or thing.is_quantized:
            return NotImplemented
        content: Any
        if thing.is_cuda and self._lending is not None:
            content = self._lending.lend(thing)
        else:
            content = pickle.PickleBuffer(bytes_of(thing.detach().cpu().contiguous()).numpy())
        name, is_parameter = str(thing.dtype).removeprefix("torch."), type(thing) is torch.nn.Parameter
        return _make_tensor, (content, name, tuple(thing.shape), thing.is_cuda, thing.requires_grad, is_parameter)


def _make_tensor(
    content: Any, dtype: str, shape: tuple[int, ...], was_on_device: bool, requires_grad: bool, is_parameter: bool
) -> Any:
    """Make a tensor from its bytes, or fetch one that was lent."""
    import torch

    from roost.comm.move.loans import Loan, fetch_tensor

    if isinstance(content, Loan):
        tensor = fetch_tensor(content)
    else:
        # Small ones arrive inside the pickle, where they cannot be written to.
        tensor = wrap(bytearray(content) if memoryview(content).readonly else content, dtype, shape)
        if was_on_device and torch.cuda.is_available():
            tensor = tensor.cuda()
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor
