"""The types of elements that weights can have, by torch's names; this loads neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Mapping

SIZES: Mapping[str, int] = {
    **dict.fromkeys(("float64", "int64", "uint64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "int8", "uint8", "bool"), 1),
}
"""The bytes of an element, by torch's name of its type."""
