"""Text in columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from roost.text import at_most


def aligned(rows: Sequence[Sequence[str]]) -> Text:
    """Lay out rows of cells in columns, without spaces at the ends of lines."""
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(set_cell_size(cell, size) for cell, size in zip(row, widths, strict=True)) for row in rows]
    return Text("\n".join(line.rstrip() for line in lines))


def facts(lines: Sequence[tuple[str, str]]) -> Text:
    """Lay out names and values in two columns."""
    size = max(cell_len(name) for name, _ in lines) + 2
    return Text("\n").join(Text.assemble((set_cell_size(name, size), "bold"), value) for name, value in lines)


def titled(title: str, items: Sequence[str], most: int | None = None) -> list[tuple[str, str]]:
    """Make lines for `facts` of which only the first has the title; what is over `most` is counted."""
    shown = at_most(items, len(items) if most is None else most)
    return [(title if number == 0 else "", text) for number, text in enumerate(shown)]
