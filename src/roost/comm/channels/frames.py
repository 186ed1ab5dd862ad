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
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from roost.comm.channels.queues import Answer, Item, Status, Want
from roost.comm.wire.connection import SHARED_FROM, Frame, SharedBuffer, view

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

_RUNS = 64
_FEWEST_USED = 0.25
"""What part of a block must be needed for the whole block to be passed on."""

Content = tuple[Any, Sequence[Any]]
"""An item where it is put: its pickle, and the buffers next to it."""
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


_ONE_DONE = _REPLY.pack(Status.DONE, 0, 0, 1, 0.0)


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
        data, buffers = item.content[:2]
        return _ASK.pack(Op.PUT, flags, len(key), 1, 0, item.weight) + key, data, buffers
    flags, table, data, buffers = _write_items(items, flags, [])
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
    # Most are the same again and again.
    known = _known.get(envelope)
    if known is None:
        op, flags, size, count, least, number = _ASK.unpack_from(envelope)
        key = read_key(envelope[_ASK.size : _ASK.size + size])
        waits = bool(flags & _WAITS)
        if op == Op.PUT and flags & _TABLE:
            return Put(key, _read_put(envelope, flags, count, frame), waits)
        if op == Op.GET:
            target = number if flags & _BATCH else None
            known = Get(key, Want(count, least, target, waits, bool(flags & _AHEAD)))
        else:
            known = key, number, waits
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[envelope] = known
    if isinstance(known, Get):
        return known
    key, weight, waits = known
    size = len(frame.data) if not frame.buffers else frame.size
    return Put(key, [Item((frame.data, frame.buffers, None, 0), weight, size)], waits)


_known: dict[bytes, Any] = {}
_MOST_KNOWN = 1024


def _read_put(envelope: bytes, flags: int, count: int, frame: Frame) -> list[Item]:
    start = _ASK.size + _ASK.unpack_from(envelope)[2]
    weights: Iterable[float] = ()
    if flags & _WEIGHTS:
        weights = _unpack("d", envelope[start : start + 8 * count])
        start += 8 * count
    pieces = _read_items(flags, memoryview(envelope)[start:], count, frame)
    if not flags & (_WEIGHTS | _BUFFERS):
        return [Item(piece, 0.0, len(piece[0])) for piece in pieces]
    weights = weights or itertools.repeat(0.0, count)
    return [Item(piece, weight, content_size(piece)) for piece, weight in zip(pieces, weights, strict=True)]


def write_answer(answer: Answer, is_local: bool) -> tuple[bytes, Any, Sequence[Any]]:
    """Encode the answer to a put or a get; returns the envelope, the data and the buffers of its frame.

    If it is for a process on the same node, items that are in shared memory stay where they are.
    """
    items = answer.items
    if len(items) == 1:
        data, buffers, _, _ = items[0].content
        return _ONE_DONE, data, buffers
    if not items:
        if answer.accepted == 1 and answer.status is Status.DONE:
            return _ONE_DONE, b"", ()
        return _REPLY.pack(answer.status, 0, 0, answer.accepted, answer.weight), b"", ()
    flags, table, data, buffers = _write_items(items, 0, _runs(items) if is_local else [])
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


def content_size(content: Content | Piece) -> int:
    """Return the size of an item in bytes."""
    data, buffers = content[:2]
    return len(data) + sum(buffer.nbytes for buffer in buffers) if buffers else len(data)


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
    items: Sequence[Item], flags: int, runs: list[tuple[Any, int, int]]
) -> tuple[int, bytes, bytes, list[Any]]:
    contents = [item.content for item in items]
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
        runs, data = [(data, 0, len(items))], b""
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
        data = memoryview(frame.data) if block is None else view(block)
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
