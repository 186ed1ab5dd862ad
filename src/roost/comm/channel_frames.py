"""Requests to a channel and its replies as bytes.

Items are pickled one by one where they are put, and unpickled where they are got. In between they are bytes, of which a
table says where each begins: a home slices them and never looks inside.
"""

from __future__ import annotations

import enum
import pickle
import struct
import sys
from array import array
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from roost.comm.connection import Frame, SharedBuffer
from roost.comm.queues import Answer, Item, Status, Want

_ASK = struct.Struct("<BBHIId")
_REPLY = struct.Struct("<BBHId")
_WEIGHTS = 1
_BUFFERS = 2
_TABLE = 4
_WAITS = 8
_AHEAD = 16
_BATCH = 32
_UNSIGNED = "I"
_BIG_ENDIAN = sys.byteorder == "big"

Content = tuple[Any, Sequence[Any]]
"""What a home knows of an item: its pickle, and the buffers next to it."""


class Op(enum.IntEnum):
    """What is asked of a home."""

    PUT = 1
    GET = 2
    ACKNOWLEDGE = 3
    CANCEL = 4
    DEPTH = 5
    STATS = 6
    CLOSE = 7
    DESCRIBE = 8
    LOCATE = 9
    ASSIGN = 10
    RELEASE = 11


class Put(NamedTuple):
    """Items to put."""

    key: Hashable
    items: list[Item]
    waits: bool


class Get(NamedTuple):
    """Items to get."""

    key: Hashable
    want: Want


def write_key(key: Hashable) -> bytes:
    """Encode a key: text as it is, other values pickled."""
    return b"t" + key.encode() if isinstance(key, str) else b"p" + pickle.dumps(key)


def read_key(data: bytes) -> Hashable:
    """Decode a key."""
    if data[:1] == b"t":
        return data[1:].decode()
    found: Hashable = pickle.loads(data[1:])  # noqa: S301 - from a member of this job
    return found


def write_put(key: bytes, items: Sequence[Item], waits: bool) -> tuple[bytes, bytes, Sequence[Any]]:
    """Encode a put; returns the envelope, the data and the buffers of its frame."""
    flags = _WAITS if waits else 0
    if len(items) == 1:
        (item,) = items
        data, buffers = item.content
        return _ASK.pack(Op.PUT, flags, len(key), 1, 0, item.weight) + key, data, buffers
    flags, table, data, buffers = _write_items(items, flags)
    weights = b""
    if any(item.weight for item in items):
        flags |= _WEIGHTS
        weights = _pack("d", [item.weight for item in items])
    return _ASK.pack(Op.PUT, flags, len(key), len(items), 0, 0.0) + key + weights + table, data, buffers


def write_get(key: bytes, want: Want) -> bytes:
    """Encode a get."""
    flags = (_WAITS if want.waits else 0) | (_AHEAD if want.ahead else 0)
    if want.target is not None:
        flags |= _BATCH
    return _ASK.pack(Op.GET, flags, len(key), want.most, want.least, want.target or 0.0) + key


def read_ask(frame: Frame) -> Put | Get:
    """Decode a put or a get."""
    envelope = frame.envelope
    op, flags, size, count, least, number = _ASK.unpack_from(envelope)
    start = _ASK.size + size
    key = read_key(envelope[_ASK.size : start])
    waits = bool(flags & _WAITS)
    if op == Op.GET:
        target = number if flags & _BATCH else None
        return Get(key, Want(count, least, target, waits, bool(flags & _AHEAD)))
    if not flags & _TABLE:
        return Put(key, [Item((frame.data, frame.buffers), number, frame.size)], waits)
    weights: Sequence[float] = ()
    if flags & _WEIGHTS:
        weights = _unpack("d", envelope[start : start + 8 * count])
        start += 8 * count
    contents = _read_items(flags, memoryview(envelope)[start:], count, frame)
    return Put(
        key,
        [
            Item(content, weights[place] if weights else 0.0, content_size(content))
            for place, content in enumerate(contents)
        ],
        waits,
    )


def write_answer(answer: Answer) -> tuple[bytes, Any, Sequence[Any]]:
    """Encode the answer to a put or a get; returns the envelope, the data and the buffers of its frame."""
    items = answer.items
    if len(items) == 1:
        data, buffers = items[0].content
        return _REPLY.pack(answer.status, 0, 0, 1, 0.0), data, buffers
    if not items:
        return _REPLY.pack(answer.status, 0, 0, answer.accepted, answer.weight), b"", ()
    flags, table, data, buffers = _write_items(items, 0)
    return _REPLY.pack(answer.status, flags, 0, len(items), 0.0) + table, data, buffers


def read_status(frame: Frame) -> tuple[Status, int, float]:
    """Decode how a request ended: its status, how many items, and the weight of one that is too heavy."""
    status, _, _, count, weight = _REPLY.unpack_from(frame.envelope)
    return Status(status), count, weight


def read_contents(frame: Frame) -> list[Content]:
    """Decode the items of an answer."""
    _, flags, _, count, _ = _REPLY.unpack_from(frame.envelope)
    if not flags & _TABLE:
        return [(frame.data, frame.buffers)] if count else []
    return _read_items(flags, memoryview(frame.envelope)[_REPLY.size :], count, frame)


def write_failure(error: BaseException) -> bytes:
    """Encode that a request could not be handled."""
    return _REPLY.pack(Status.FAILED, 0, 0, 0, 0.0) + f"{type(error).__name__}: {error}".encode()


def read_failure(frame: Frame) -> str:
    """Decode why a request could not be handled."""
    return frame.envelope[_REPLY.size :].decode()


def content_size(content: Content) -> int:
    """Return the size of an item in bytes."""
    data, buffers = content
    return len(data) + sum(buffer.nbytes for buffer in buffers) if buffers else len(data)


def view(buffer: Any) -> memoryview:
    """Return the bytes of a buffer as it arrived."""
    return buffer.view if isinstance(buffer, SharedBuffer) else memoryview(buffer).cast("B")


def _write_items(items: Sequence[Item], flags: int) -> tuple[int, bytes, bytes, list[Any]]:
    contents = [item.content for item in items]
    table = _pack(_UNSIGNED, [len(content[0]) for content in contents])
    buffers = [buffer for content in contents for buffer in content[1]]
    flags |= _TABLE
    if buffers:
        flags |= _BUFFERS
        table += _pack(_UNSIGNED, [len(content[1]) for content in contents])
    return flags, table, b"".join([content[0] for content in contents]), buffers


def _read_items(flags: int, table: memoryview, count: int, frame: Frame) -> list[Content]:
    lengths = _unpack(_UNSIGNED, table[: 4 * count])
    data, start = memoryview(frame.data), 0
    contents: list[Content] = []
    counts = _unpack(_UNSIGNED, table[4 * count : 8 * count]) if flags & _BUFFERS else None
    first = 0
    for place, length in enumerate(lengths):
        buffers: Sequence[Any] = ()
        if counts is not None:
            buffers = frame.buffers[first : first + counts[place]]
            first += counts[place]
        contents.append((data[start : start + length], buffers))
        start += length
    return contents


def _pack(kind: str, numbers: Sequence[Any]) -> bytes:
    packed = array(kind, numbers)
    if _BIG_ENDIAN:
        packed.byteswap()
    return packed.tobytes()


def _unpack(kind: str, data: Any) -> Any:
    found = array(kind)
    found.frombytes(data)
    if _BIG_ENDIAN:
        found.byteswap()
    return found
