"""Requests to a channel and its replies as bytes.

Items are pickled one by one where they are put, and unpickled where they are got. In between they are bytes, of which a
table says where each begins: a home slices them and never looks inside.
"""

from __future__ import annotations

import marshal
import struct
from array import array
from collections.abc import Sequence
from typing import Any, Literal

from roost.comm.channels.queues import Answer, Item, Status, Want
from roost.comm.wire.connection import SHARED_FROM, Frame, SharedBuffer, view
from roost.errors import ConfigError
from roost.text import shorten

_FLOAT = struct.Struct("<d")
_UNSIGNED = "I"
_PLAIN = 2
"""The version of `marshal` that encodes each value for itself: quicker than `pickle`, and than any later one."""

_FEWEST_USED = 0.25
"""A block is passed on whole if at least this part of it is needed."""
_MOST_KEY_BYTES = 0xFFFF

ITEM_BYTES = 384
"""The memory of an item besides its content: measured with a million `None`s, as `put_many` brings them."""
BUFFER_BYTES = 512
"""The memory of a buffer next to a pickle, besides its content."""

Op = Literal["put", "get", "acknowledge", "cancel", "depth", "stats", "close", "describe", "peek"]
"""The requests to a home."""
Packed = tuple[Any, float, int, Any]
"""An item where it is put: its content, weight and size, and what lends its tensors on devices, if anything does.

For a home elsewhere the content is a pickle and the buffers next to it."""
Piece = tuple[Any, Sequence[Any], Any, int]
"""An item on its way: its pickle, the buffers next to it, the block that the pickle is in, if any, and where in it."""
_Table = tuple[bytes, bytes, list[tuple[int, int]]]
"""Of items that travel together: the sizes of their pickles, how many buffers each has if any has one, and for each
block where its first pickle begins and how many there are."""

_ARRIVED = [marshal.dumps(("acknowledge", count), _PLAIN) for count in (0, 1)]
"""That all items of a request arrived, or the first: made once, since most requests are these."""
_ONE_DONE = marshal.dumps((int(Status.DONE), None, 1, 0, ""), _PLAIN)
"""The answer to a put of one item that is in the queue, and to a get of one item, which comes along."""


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


def write_request(op: Op, arguments: Sequence[Any]) -> tuple[bytes, Any, Sequence[Any]]:
    """Encode a request; returns the envelope, the data and the buffers of its frame."""
    data: Any = b""
    buffers: Sequence[Any] = ()
    if op == "acknowledge":
        return _ARRIVED[arguments[0]], data, buffers
    if op == "put":
        key, items, waits, is_whole, version = arguments
        table, weights = None, items[0][1]
        if len(items) == 1:
            data, buffers = items[0][0]
        else:
            table, data, buffers = _write_items([item[0] for item in items], [])
            weights = [item[1] for item in items]
        arguments = key, waits, is_whole, version, weights, table
    elif op == "get":
        key, want = arguments
        arguments = key, *want
    return marshal.dumps((op, *arguments), _PLAIN), data, buffers


def read_request(frame: Frame) -> tuple[Op, Sequence[Any]]:
    """Decode a request; returns the arguments as `Queues` takes them."""
    op, *arguments = marshal.loads(frame.envelope)  # noqa: S302 - from a member of this job, which proved it
    if op == "put":
        key, waits, is_whole, version, weights, table = arguments
        pieces = [(frame.data, frame.buffers, None, 0)] if table is None else _read_items(table, frame)
        items = [
            Item(piece, weight, content_size(piece[0], piece[1]), version)
            for piece, weight in zip(pieces, [weights] if table is None else weights, strict=True)
        ]
        return op, (key, items, waits, is_whole)
    if op == "get":
        return op, (arguments[0], Want(*arguments[1:]))
    return op, arguments


def write_answer(answer: Answer, is_local: bool) -> tuple[bytes, Any, Sequence[Any]]:
    """Encode the answer to a request; returns the envelope, the data and the buffers of its frame.

    If it is for a process on the same node, items that are in shared memory stay where they are.
    """
    table: _Table | None = None
    data: Any = b""
    buffers: Sequence[Any] = ()
    if len(answer.items) == 1:
        data, buffers, _, _ = answer.items[0].content
        return _ONE_DONE, data, buffers
    if answer.items:
        contents = [item.content for item in answer.items]
        table, data, buffers = _write_items(contents, _runs(contents) if is_local else [])
    head = int(answer.status), table, answer.accepted, answer.weight, answer.problem
    return marshal.dumps(head, _PLAIN), data, buffers


def read_answer(frame: Frame) -> Answer:
    """Decode an answer; its items are their contents."""
    if frame.envelope == _ONE_DONE:
        return Answer("", frame.number, Status.DONE, ((frame.data, frame.buffers),), 1)
    status, table, accepted, weight, problem = marshal.loads(frame.envelope)  # noqa: S302 - likewise
    items = _read_items(table, frame) if table is not None else ()
    return Answer("", frame.number, Status(status), items, accepted, weight, problem)


def content_size(data: Any, buffers: Sequence[Any]) -> int:
    """Return what an item costs its home, in bytes."""
    if not buffers:
        return ITEM_BYTES + len(data)
    return ITEM_BYTES + len(data) + sum([int(buffer.nbytes) + BUFFER_BYTES for buffer in buffers])


def _runs(contents: Sequence[Piece]) -> list[tuple[Any, int, int]]:
    """Return the blocks of shared memory that items are in: each with where the first begins, and how many follow it.

    Empty if the items should be copied together.
    """
    runs: list[tuple[Any, int, int]] = []
    end = used = 0
    for data, _, block, start in contents:
        if not isinstance(block, SharedBuffer):
            return []
        if runs and runs[-1][0] is block and start == end:
            runs[-1] = block, runs[-1][1], runs[-1][2] + 1
        else:
            runs.append((block, start, 1))
        end = start + len(data)
        used += len(data)
    return runs if used >= _FEWEST_USED * sum(block.nbytes for block, _, _ in runs) else []


def _write_items(contents: Sequence[Any], runs: list[tuple[Any, int, int]]) -> tuple[_Table, bytes, list[Any]]:
    lengths = array(_UNSIGNED, [len(content[0]) for content in contents]).tobytes()
    buffers = [buffer for content in contents for buffer in content[1]]
    counts = array(_UNSIGNED, [len(content[1]) for content in contents]).tobytes() if buffers else b""
    data = b""
    if not runs:
        data = b"".join([content[0] for content in contents])
        if len(data) >= SHARED_FROM:
            # Large enough to go through shared memory.
            runs, data = [(memoryview(data), 0, len(contents))], b""
    return (lengths, counts, [run[1:] for run in runs]), data, [block for block, _, _ in runs] + buffers


def _read_items(table: _Table, frame: Frame) -> list[Piece]:
    """Decode items that were written together."""
    lengths, counts = array(_UNSIGNED, table[0]), array(_UNSIGNED, table[1])
    runs, first = table[2] or ((0, len(lengths)),), len(table[2])
    pieces: list[Piece] = []
    for place, (start, size) in enumerate(runs):
        block = frame.buffers[place] if first else None
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
