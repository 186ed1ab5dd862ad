"""Styled output: in colour on a terminal unless NO_COLOR is set, plain in a pipe or a file."""

from __future__ import annotations

import codecs
import io
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from roost.cli.options import TextFormat
from roost.cli.out import as_json, write_text
from roost.config.ranks import format_ranks
from roost.placement.plan import WorkerId
from roost.render.grid import Grid
from roost.render.terminal import ascii_of, draw_terminal, to_ascii, to_printable
from roost.text import at_most

if TYPE_CHECKING:
    from rich.console import Console

_GAP = 4
_NARROWEST = 56
"""Columns between two maps, and the fewest for one that stands beside another."""


def print_answer(form: TextFormat, answer: object, to_text: Callable[[], Text]) -> None:
    """Print an answer as JSON or as text."""
    if form == "json":
        write_text(as_json(answer))
    else:
        print_text(to_text())


def print_text(text: Text, out: Path | None = None) -> None:
    """Print styled text, or write it to a file without styles."""
    text = to_printable(text)
    if out is None and _is_ascii():
        text = to_ascii(text)
    if out is None and (console := _coloured_console()):
        console.print(text, soft_wrap=True)
    else:
        write_text(text.plain + "\n", out)


def draw_map(*grids: Grid, out: Path | None = None, above: Text | None = None, below: str = "") -> None:
    """Draw maps side by side, as wide as the terminal, or 120 columns wide into a file; text above and below them.

    Where there is too little room they stand above each other.
    """
    width = 120 if out is not None else shutil.get_terminal_size().columns
    console = _coloured_console()
    basic_colours = console is not None and console.color_system == "standard"
    own = (width - _GAP * (len(grids) - 1)) // len(grids)
    beside = len(grids) > 1 and own >= _NARROWEST
    drawn = [draw_terminal(grid, width=own if beside else width, basic_colours=basic_colours) for grid in grids]
    lines: list[Text] = []
    if beside:
        for parts in zip_longest(*(item.split("\n") for item in drawn), fillvalue=Text()):
            line = Text()
            for index, part in enumerate(parts):
                line.append(" " * (index * (own + _GAP) - line.cell_len)).append_text(part)
            line.rstrip()
            lines.append(line)
    whole = Text("\n").join(lines) if beside else Text("\n\n").join(drawn)
    print_text(Text("\n").join([*([above, Text()] if above else []), whole, *([Text(below)] if below else [])]), out)


def _coloured_console() -> Console | None:
    """Return a console where output may have colours."""
    if not (sys.stdout.isatty() or os.environ.get("FORCE_COLOR")):
        return None
    from rich.console import Console  # the half of rich that knows terminals: a pipe does without it

    return Console(highlight=False)


def _is_ascii() -> bool:
    return "utf" not in (getattr(sys.stdout, "encoding", "") or "").lower()


def speak_ascii() -> None:
    """Replace what standard output cannot encode by ASCII, for code that writes there directly."""

    def replace(error: UnicodeError) -> tuple[str, int]:
        if not isinstance(error, UnicodeEncodeError):
            raise error
        return "".join(map(ascii_of, error.object[error.start : error.end])), error.end

    if _is_ascii() and isinstance(sys.stdout, io.TextIOWrapper):
        codecs.register_error("roost", replace)
        sys.stdout.reconfigure(errors="roost")


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


def worker_names(workers: Sequence[WorkerId]) -> list[str]:
    """Name workers as `actor:3`, several of one component as `env:0-63`."""
    ranks: dict[str, list[int]] = {}
    for worker in workers:
        ranks.setdefault(worker.component, []).append(worker.rank)
    return [f"{name}:{format_ranks(sorted(found))}" for name, found in ranks.items()]
