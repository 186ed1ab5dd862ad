"""Boxes: parts of a tensor with the same range of rows, columns and so on."""

from __future__ import annotations

import math
from collections.abc import Sequence

Box = tuple[tuple[int, int], ...]
"""The first index and the one after the last, of each dimension; `()` is the one element of a tensor without any."""


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return tuple((0, size) for size in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    """Return the size of a box in each dimension."""
    return tuple(stop - start for start, stop in box)


def count(box: Box) -> int:
    """Return how many elements a box has."""
    return math.prod(stop - start for start, stop in box)


def intersect(one: Box, other: Box) -> Box | None:
    """Return what two boxes have in common; None if that is nothing.

    >>> intersect(((0, 4), (0, 8)), ((2, 6), (4, 8)))
    ((2, 4), (4, 8))
    """
    found = []
    for (start, stop), (begin, end) in zip(one, other, strict=True):
        low, high = max(start, begin), min(stop, end)
        if low >= high:
            return None
        found.append((low, high))
    return tuple(found)


def subtract(box: Box, hole: Box) -> list[Box]:
    """Return what is left of a box without a part of it, as boxes that do not overlap.

    >>> subtract(((0, 4), (0, 4)), ((0, 2), (1, 4)))
    [((2, 4), (0, 4)), ((0, 2), (0, 1))]
    """
    left = []
    for place, ((start, stop), (low, high)) in enumerate(zip(box, hole, strict=True)):
        before, after = hole[:place], box[place + 1 :]
        if start < low:
            left.append((*before, (start, low), *after))
        if high < stop:
            left.append((*before, (high, stop), *after))
    return left


def offset(box: Box, outer: Box, at: Sequence[int]) -> tuple[int, ...]:
    """Return where a box begins in memory in which a box around it begins at `at`."""
    return tuple(place + inner[0] - around[0] for inner, around, place in zip(box, outer, at, strict=True))
