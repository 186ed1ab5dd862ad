"""Requests to a channel and its replies as bytes.

Items are pickled one by one where they are put, and unpickled where they are got. In between they are bytes, of which a
table says where each begins: a home slices them and never looks inside.
"""

from __future__ import annotations

import enum
import functools
import itertools
import struct
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

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

_FEWEST_USED = 0.25
"""What part of a block must be needed for the whole block to be passed on."""
_MOST_KEY_BYTES = 0xFFFF
_MOST_KNOWN = 1024
"""How many envelopes are remembered: most are the same again and again."""

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
    if any(item[1] for item in items):
        flags |= _WEIGHTS
        table += array("d", [item[1] for item in items]).tobytes()
    return _ASK.pack(Op.PUT, flags, len(key), len(items), 0, 0.0, version) + key + table, data, buffers


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


@functools.lru_cache(_MOST_KNOWN)
def read_get(envelope: bytes) -> tuple[bytes, Want]:
    """Decode a get: its key, and what it wants."""
    flags, key, most, least, number, version = _read_ask(envelope)
    target = number if flags & _BATCH else None
    min_version = version if flags & _VERSION else None
    return key, Want(most, least, target, bool(flags & _WAITS), bool(flags & _AHEAD), min_version)


def read_put(frame: Frame) -> tuple[bytes, list[Item], bool, bool]:
    """Decode a put: its key, its items, whether it waits, and whether they go in as a whole."""
    envelope = frame.envelope
    is_one = not envelope[1] & _TABLE
    flags, key, count, _, weight, version = (_read_known if is_one else _read_ask)(envelope)
    if is_one:
        pieces: list[Piece] = [(frame.data, frame.buffers, None, 0)]
    else:
        pieces = _read_items(flags, memoryview(envelope)[_ASK.size + len(key) :], count, frame)
    weights: Iterable[float] = itertools.repeat(weight, count)
    if flags & _WEIGHTS:
        weights = array("d", envelope[-8 * count :])
    items = [
        Item(piece, weight, content_size(piece[0], piece[1]), version)
        for piece, weight in zip(pieces, weights, strict=True)
    ]
    return key, items, bool(flags & _WAITS), bool(flags & _WHOLE)


def _read_ask(envelope: bytes) -> tuple[int, bytes, int, int, float, int]:
    """Decode flags, the key, the number of items or the most and least that are wanted, weight and version."""
    _, flags, size, count, least, number, version = _ASK.unpack_from(envelope)
    return flags, envelope[_ASK.size : _ASK.size + size], count, least, number, version


_read_known = functools.lru_cache(_MOST_KNOWN)(_read_ask)


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
        head = _REPLY.pack(answer.status, 0, 0, answer.accepted, answer.weight)
        return head + answer.problem.encode(errors="backslashreplace"), b"", ()
    flags, table, data, buffers = _write_items([item.content for item in items], 0, _runs(items) if is_local else [])
    return _REPLY.pack(answer.status, flags, 0, len(items), 0.0) + table, data, buffers


def read_answer(frame: Frame) -> Answer:
    """Decode an answer; its items are their contents."""
    if frame.envelope == ONE_DONE:
        return Answer("", frame.number, Status.DONE, ((frame.data, frame.buffers),), 1)
    status, flags, _, count, weight = _REPLY.unpack_from(frame.envelope)
    rest = memoryview(frame.envelope)[_REPLY.size :]
    items = _read_items(flags, rest, count, frame) if flags & _TABLE else ()
    return Answer("", frame.number, Status(status), items, count, weight, "" if items else str(rest, "utf-8"))


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
    numbers = [len(content[0]) for content in contents]
    buffers = [buffer for content in contents for buffer in content[1]]
    flags |= _TABLE
    if buffers:
        flags |= _BUFFERS
        numbers += [len(content[1]) for content in contents]
    data = b""
    if not runs:
        data = b"".join([content[0] for content in contents])
        if len(data) >= SHARED_FROM:
            # Large enough to go through shared memory.
            runs, data = [(memoryview(data), 0, len(contents))], b""
    if runs:
        flags |= _RUNS
        numbers += [len(runs), *(start for _, start, _ in runs), *(count for _, _, count in runs)]
    return flags, array(_UNSIGNED, numbers).tobytes(), data, [block for block, _, _ in runs] + buffers


def _read_items(flags: int, table: memoryview, count: int, frame: Frame) -> list[Piece]:
    """Decode items that were written together; the weights that follow the table are not looked at."""
    numbers = array(_UNSIGNED, bytes(table))
    at = 2 * count if flags & _BUFFERS else count
    lengths, counts = numbers[:count], numbers[count:at]
    blocks: list[tuple[Any, int, int]] = [(None, 0, count)]
    first = 0
    if flags & _RUNS:
        first = numbers[at]
        starts, sizes = numbers[at + 1 : at + first + 1], numbers[at + first + 1 : at + 2 * first + 1]
        blocks = list(zip(frame.buffers[:first], starts, sizes, strict=True))
    pieces: list[Piece] = []
    for block, start, size in blocks:
        # Parts of bytes are copies: an item that stays for long keeps no other's memory.
        data = frame.data if block is None else view(block)
        for length in lengths[len(pieces) : len(pieces) + size]:
            pieces.append((data[start : start + length], (), block, start))
            start += length
    if not counts:
        return pieces
    with_buffers: list[Piece] = []
    for (data, _, block, start), number in zip(pieces, counts, strict=True):
        with_buffers.append((data, frame.buffers[first : first + number], block, start))
        first += number
    return with_buffers
