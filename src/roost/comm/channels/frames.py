"""Requests to a channel and its replies as bytes.

Items are pickled one by one where they are put, and unpickled where they are got. In between they are bytes, of which a
table says where each begins: a home slices them and never looks inside.
"""

from __future__ import annotations

import enum
import itertools
import pickle
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from roost.comm.channels.queues import Answer, Item, Status, Want
from roost.comm.wire.connection import SHARED_FROM, Frame, SharedBuffer, view
from roost.errors import ConfigError
from roost.text import shorten

_ASK = struct.Struct("<BBHIIdq")
"""The operation, flags, the sizes of the key and of the items or the most and least that are wanted, the weight of one
item or of a batch, and the version."""
_REPLY = struct.Struct("<BBHId")
_COUNT = struct.Struct("<BI")
_FLOAT = struct.Struct("<d")
_WEIGHTS = 1
_BUFFERS = 2
_TABLE = 4
_WAITS = 8
_AHEAD = 16
_BATCH = 32
_RUNS = 64
_WHOLE = 128
_VERSION = 1
"""Of a get, in the place of `_WEIGHTS`: it wants no older items."""
_UNSIGNED = "I"
_BIG_ENDIAN = sys.byteorder == "big"

_FEWEST_USED = 0.25
"""What part of a block must be needed for the whole block to be passed on."""
_MOST_KEY_BYTES = 0xFFFF
_MOST_KNOWN = 1024

ITEM_BYTES = 384
"""What an item costs its home besides its content: measured with a million `None`s, as `put_many` brings them."""
BUFFER_BYTES = 512
"""What a buffer next to a pickle costs besides its content."""

Packed = tuple[Any, float, int, Any]
"""An item where it is put: its content, weight and size, and what lends its tensors on devices, if anything does.

For a home elsewhere the content is a pickle and the buffers next to it."""
Piece = tuple[Any, Sequence[Any], Any, int]
"""An item on its way: its pickle, the buffers next to it, the block that the pickle is in, if any, and where in it."""


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


class Put(NamedTuple):
    """Items to put."""

    key: bytes
    items: list[Item]
    waits: bool
    is_whole: bool


class Get(NamedTuple):
    """Items to get."""

    key: bytes
    want: Want


ONE_DONE = _REPLY.pack(Status.DONE, 0, 0, 1, 0.0)
"""The answer to a put of one item that is in the queue, and to a get of one item, which comes along."""
CANCEL = bytes([Op.CANCEL])


def write_key(key: Any) -> bytes:
    """Encode a key, as queues know it: no two keys that differ in type or value are the same.

    >>> write_key("1"), write_key(1), write_key(1.0) == write_key(1)
    (b't1', b'i1', False)
    """
    kind = type(key)
    found = b""
    if kind is str:
        try:
            found = b"t" + key.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"key is {shorten(ascii(key), 100)}", hint="it has a half of a character") from None
    elif kind is int:
        found = b"i%x" % key
    elif kind is float and key == key:
        # -0.0 is 0.0.
        found = b"f" + _FLOAT.pack(key + 0.0)
    else:
        hint = "a key is a str, an int or a float, and nothing that only derives from one, such as a bool or an IntEnum"
        raise ConfigError(f"key is {shorten(repr(key), 100)}, a {kind.__name__}", hint=hint)
    if len(found) > _MOST_KEY_BYTES:
        raise ConfigError(
            f"a key has {len(found) - 1} bytes: {shorten(ascii(found[1:101]), 100)}", hint="65,534 are the most"
        )
    return found


def read_key(data: bytes) -> str | int | float:
    """Decode a key."""
    if data[:1] == b"t":
        return data[1:].decode()
    found: float = int(data[1:], 16) if data[:1] == b"i" else _FLOAT.unpack(data[1:])[0]
    return found


def key_text(data: bytes) -> str:
    """Return a key as statistics show it: text as it is, unless it could be taken for a number."""
    key = read_key(data)
    if not isinstance(key, str):
        return repr(key) if isinstance(key, float) or abs(key) < 1 << 64 else hex(key)
    try:
        float(key)
    except ValueError:
        return key
    return repr(key)


def write_put(key: bytes, items: Sequence[Packed], waits: bool, is_whole: bool, version: int) -> tuple[Any, ...]:
    """Encode a put; returns the envelope, the data and the buffers of its frame."""
    flags = (_WAITS if waits else 0) | (_WHOLE if is_whole else 0)
    if len(items) == 1:
        ((data, buffers), weight, _, _) = items[0]
        return _ASK.pack(Op.PUT, flags, len(key), 1, 0, weight, version) + key, data, buffers
    flags, table, data, buffers = _write_items([item[0] for item in items], flags, [])
    weights = b""
    if any(item[1] for item in items):
        flags |= _WEIGHTS
        weights = _pack("d", [item[1] for item in items])
    envelope = _ASK.pack(Op.PUT, flags, len(key), len(items), 0, 0.0, version) + key + weights + table
    return envelope, data, buffers


def write_get(key: bytes, want: Want) -> bytes:
    """Encode a get."""
    flags = (_WAITS if want.waits else 0) | (_AHEAD if want.ahead else 0)
    if want.target is not None:
        flags |= _BATCH
    if want.min_version is not None:
        flags |= _VERSION
    return _ASK.pack(Op.GET, flags, len(key), want.most, want.least, want.target or 0.0, want.min_version or 0) + key


def write_acknowledgement(count: int) -> bytes:
    """Encode that the first items of a request arrived; 0 is all."""
    return _COUNT.pack(Op.ACKNOWLEDGE, count)


def read_acknowledgement(envelope: bytes) -> int:
    """Decode how many items arrived; 0 is all."""
    count: int = _COUNT.unpack(envelope)[1]
    return count


def write_call(op: Op, *arguments: Any) -> bytes:
    """Encode a request that is not about items."""
    return bytes([op]) + pickle.dumps(arguments)


def read_ask(frame: Frame) -> Put | Get:
    """Decode a put or a get."""
    envelope = frame.envelope
    # Most are the same again and again.
    known = _known.get(envelope)
    if known is None:
        op, flags, size, count, least, number, version = _ASK.unpack_from(envelope)
        key = envelope[_ASK.size : _ASK.size + size]
        waits, is_whole = bool(flags & _WAITS), bool(flags & _WHOLE)
        if op == Op.PUT and flags & _TABLE:
            return Put(key, _read_put(envelope, flags, count, version, frame), waits, is_whole)
        if op == Op.GET:
            target = number if flags & _BATCH else None
            min_version = version if flags & _VERSION else None
            known = Get(key, Want(count, least, target, waits, bool(flags & _AHEAD), min_version))
        else:
            known = key, number, version, waits, is_whole
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[envelope] = known
    if isinstance(known, Get):
        return known
    key, weight, version, waits, is_whole = known
    size = ITEM_BYTES + (len(frame.data) if not frame.buffers else frame.size + BUFFER_BYTES * len(frame.buffers))
    return Put(key, [Item((frame.data, frame.buffers, None, 0), weight, size, version)], waits, is_whole)


_known: dict[bytes, Any] = {}


def _read_put(envelope: bytes, flags: int, count: int, version: int, frame: Frame) -> list[Item]:
    start = _ASK.size + _ASK.unpack_from(envelope)[2]
    weights: Iterable[float] = itertools.repeat(0.0, count)
    if flags & _WEIGHTS:
        weights = _unpack("d", envelope[start : start + 8 * count])
        start += 8 * count
    pieces = _read_items(flags, memoryview(envelope)[start:], count, frame)
    if not flags & _BUFFERS:
        return [
            Item(piece, weight, ITEM_BYTES + len(piece[0]), version)
            for piece, weight in zip(pieces, weights, strict=True)
        ]
    return [
        Item(piece, weight, content_size(piece[0], piece[1]), version)
        for piece, weight in zip(pieces, weights, strict=True)
    ]


def write_answer(answer: Answer, is_local: bool) -> tuple[bytes, Any, Sequence[Any]]:
    """Encode the answer to a put or a get; returns the envelope, the data and the buffers of its frame.

    If it is for a process on the same node, items that are in shared memory stay where they are.
    """
    items = answer.items
    if len(items) == 1:
        data, buffers, _, _ = items[0].content
        return ONE_DONE, data, buffers
    if not items:
        if answer.accepted == 1 and answer.status is Status.DONE:
            return ONE_DONE, b"", ()
        return _REPLY.pack(answer.status, 0, 0, answer.accepted, answer.weight), b"", ()
    flags, table, data, buffers = _write_items([item.content for item in items], 0, _runs(items) if is_local else [])
    return _REPLY.pack(answer.status, flags, 0, len(items), 0.0) + table, data, buffers


def read_status(frame: Frame) -> tuple[Status, int, float]:
    """Decode how a request ended: its status, how many items, and the weight of one that is too heavy."""
    status, _, _, count, weight = _REPLY.unpack_from(frame.envelope)
    return Status(status), count, weight


def read_contents(frame: Frame) -> list[Piece]:
    """Decode the items of an answer."""
    _, flags, _, count, _ = _REPLY.unpack_from(frame.envelope)
    if not flags & _TABLE:
        return [(frame.data, frame.buffers, None, 0)] if count else []
    return _read_items(flags, memoryview(frame.envelope)[_REPLY.size :], count, frame)


def write_failure(error: BaseException) -> bytes:
    """Encode that a request could not be handled."""
    return _REPLY.pack(Status.FAILED, 0, 0, 0, 0.0) + f"{type(error).__name__}: {error}".encode()


def read_failure(frame: Frame) -> str:
    """Decode why a request could not be handled."""
    return frame.envelope[_REPLY.size :].decode()


def content_size(data: Any, buffers: Sequence[Any]) -> int:
    """Return what an item costs its home, in bytes."""
    if not buffers:
        return ITEM_BYTES + len(data)
    return ITEM_BYTES + len(data) + sum([int(buffer.nbytes) + BUFFER_BYTES for buffer in buffers])


def _runs(items: Sequence[Item]) -> list[tuple[Any, int, int]]:
    """Return the blocks of shared memory that items are in: each with where the first begins, and how many follow it.

    Empty if the items should be copied together.
    """
    runs: list[tuple[Any, int, int]] = []
    end = used = 0
    for item in items:
        data, _, block, start = item.content
        if not isinstance(block, SharedBuffer):
            return []
        if runs and runs[-1][0] is block and start == end:
            runs[-1] = block, runs[-1][1], runs[-1][2] + 1
        else:
            runs.append((block, start, 1))
        end = start + len(data)
        used += len(data)
    return runs if used >= _FEWEST_USED * sum(block.nbytes for block, _, _ in runs) else []


def _write_items(
    contents: Sequence[Any], flags: int, runs: list[tuple[Any, int, int]]
) -> tuple[int, bytes, bytes, list[Any]]:
    lengths = [len(content[0]) for content in contents]
    table = _pack(_UNSIGNED, lengths)
    buffers = [buffer for content in contents for buffer in content[1]]
    flags |= _TABLE
    if buffers:
        flags |= _BUFFERS
        table += _pack(_UNSIGNED, [len(content[1]) for content in contents])
    data = b""
    if not runs:
        data = b"".join([content[0] for content in contents])
        if len(data) < SHARED_FROM:
            return flags, table, data, buffers
        # Large enough to go through shared memory.
        runs, data = [(memoryview(data), 0, len(contents))], b""
    table += _pack(_UNSIGNED, [len(runs), *(start for _, start, _ in runs), *(count for _, _, count in runs)])
    return flags | _RUNS, table, data, [block for block, _, _ in runs] + buffers


def _read_items(flags: int, table: memoryview, count: int, frame: Frame) -> list[Piece]:
    lengths = _unpack(_UNSIGNED, table[: 4 * count])
    table = table[4 * count :]
    counts: Any = None
    if flags & _BUFFERS:
        counts = _unpack(_UNSIGNED, table[: 4 * count])
        table = table[4 * count :]
    blocks: list[tuple[Any, int, int]] = [(None, 0, count)]
    first = 0
    if flags & _RUNS:
        numbers = _unpack(_UNSIGNED, table)
        first = numbers[0]
        starts, sizes = numbers[1 : first + 1], numbers[first + 1 : 2 * first + 1]
        blocks = list(zip(frame.buffers[:first], starts, sizes, strict=True))
    pieces: list[Piece] = []
    for block, start, size in blocks:
        # Parts of bytes are copies: an item that stays for long keeps no other's memory.
        data = frame.data if block is None else view(block)
        for length in lengths[len(pieces) : len(pieces) + size]:
            pieces.append((data[start : start + length], (), block, start))
            start += length
    if counts is None:
        return pieces
    with_buffers: list[Piece] = []
    for (data, _, block, start), number in zip(pieces, counts, strict=True):
        with_buffers.append((data, frame.buffers[first : first + number], block, start))
        first += number
    return with_buffers


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
