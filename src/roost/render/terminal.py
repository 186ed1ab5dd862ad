"""The picture on a terminal: text of a given width, with or without colour.

Every block has brackets around it and its component's name in it, so that nothing depends on colour:

    node 0     0       1       2       3       4       5       6       7
    8 x H100   [ac… 0 ][ac… 1 ][ac… 2 ][ac… 3 ][rollout 0 ════════════════════]
    ranks 0-7
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from rich.cells import cell_len, set_cell_size
from rich.text import Span, Text

from roost.config.hardware import BARE_NODE
from roost.render.grid import Block, Grid, Row, Run, Strip, cells_per_line, ink, numbered, short_names
from roost.text import printable_lines

_LABEL_WIDTH = (8, 20)
_CELL_WIDTH = (7, 16)
_NODE_CELL_WIDTH = 32
_BASIC = ("blue", "yellow", "green", "magenta", "cyan", "red", "bright_yellow", "bright_black")
_DARK_INK = frozenset({"yellow", "green", "cyan", "bright_yellow"})
_ASCII = {"═": "=", "┄": "-", "·": "-", "■": "#", "…": "~", "│": "|", "┤": "|", "●": "*", "○": "o", "↑": "^", "↓": "v"}
_ASCII |= {"◀": "<", "▶": ">"}
_ASCII |= {"→": ">", "░": ".", "▒": ":", "▓": "+", "█": "#", **{chr(code): "*" for code in range(0x2801, 0x2900)}}
"""Replacements on a terminal that has only ASCII; the last are Braille patterns, which draw curves."""


def draw_terminal(grid: Grid, *, width: int = 80, basic_colours: bool = False) -> Text:
    """Return the picture as styled text, with no line longer than `width` if possible.

    With `basic_colours` it uses only the 16 colours that every terminal has, a different one for each component.
    """
    return Text("\n").join(_Drawing(grid, width, basic_colours).lines())


def terminal_colours(grid: Grid, *, basic_colours: bool = False) -> dict[str, str]:
    """Return the colour of each component in such a picture."""
    return {
        entry.name: _BASIC[index % len(_BASIC)] if basic_colours else entry.colour
        for index, entry in enumerate(grid.legend)
    }


class _Drawing:
    def __init__(self, grid: Grid, width: int, basic_colours: bool) -> None:
        self._grid = grid
        self._basic = basic_colours
        self._colours = list(terminal_colours(grid, basic_colours=basic_colours).values())
        self._width = max(40, width)
        strips = [strip for row in grid.rows for strip in row.strips]
        labels = [*map(_title, grid.rows), *(text for strip in strips for text in (strip.title, *strip.ranks_texts))]
        longest = max((cell_len(label) for label in labels), default=0)
        self._label = min(max(longest + 2, _LABEL_WIDTH[0]), _LABEL_WIDTH[1])
        self._shortest = short_names([entry.name for entry in grid.legend], 1)
        self._cells = {id(strip): self._lay_out(strip) for row in grid.rows for strip in row.strips}
        self._names = self._fitting_names()

    def lines(self) -> Iterator[Text]:
        if self._grid.title:
            yield Text(_cut(self._grid.title, self._width), style="bold")
        for text in _wrapped(self._grid.summary, self._width):
            yield Text(text, style="dim")
        for text in _wrapped(self._grid.mark, self._width) if self._grid.mark else ():
            yield Text(text, style="yellow")
        yield Text("")
        for row in self._grid.rows:
            yield from self._row(row)
            yield Text("")
        yield from self._legend()

    def _lay_out(self, strip: Strip) -> tuple[int, int]:
        """Return how many cells fit in a line, and the width of each, with room for key and ranks in every block."""
        room = self._width - self._label
        if strip.kind == BARE_NODE:
            return 1, min(room, _NODE_CELL_WIDTH)
        most = room // _CELL_WIDTH[0]
        while True:
            per_line = cells_per_line(strip.cells, most)
            width = min(room // per_line, _CELL_WIDTH[1])
            fits = all(
                cell_len(f"{self._shortest[block.component]} {block.ranks_text}") <= pieces * width - 2
                for block in strip.blocks
                for pieces in _pieces(block, _lines(strip.cells, per_line))
            )
            if fits:
                return per_line, width
            if per_line == 1:
                return 1, room
            most = per_line - 1

    def _fitting_names(self) -> list[str]:
        """Return the longest name of each component that fits into all its blocks."""
        names = [entry.name for entry in self._grid.legend]
        room = dict.fromkeys(range(len(names)), self._width)
        for strip in (strip for row in self._grid.rows for strip in row.strips):
            per_line, width = self._cells[id(strip)]
            for block in strip.blocks:
                cells = min(_pieces(block, _lines(strip.cells, per_line)))
                left = cells * width - 2 - len(f" {block.ranks_text}")
                room[block.component] = min(room[block.component], left)
        longest = max(map(len, names), default=1)
        cuts = [short_names(names, length) for length in (longest, *range(min(longest - 1, 8), 1, -1))]
        keys = [
            next((cut[index] for cut in cuts if cell_len(cut[index]) <= room[index]), self._shortest[index])
            for index in range(len(names))
        ]
        # Keys of different lengths can still be equal; those are numbered.
        counts = Counter(keys)
        return [key if counts[key] == 1 else numbered(names[index], index) for index, key in enumerate(keys)]

    def _row(self, row: Row) -> Iterator[Text]:
        for number, strip in enumerate(row.strips):
            header = self._header(strip, _lines(strip.cells, self._cells[id(strip)][0])[0])
            if number == 0:
                yield self._line(_title(row), header, "bold")
            elif header:
                yield self._line("", header)
            labels = [strip.title, *strip.ranks_texts]
            yield from self._strip(strip, labels)
            if row.folded and number == len(row.strips) - 1:
                folded = Text(_cut(row.folded, self._width - self._label), style="dim")
                yield self._line(labels.pop(0) if labels else "", folded)
            yield from (self._line(label, Text("")) for label in labels)
        for name, runs in row.lines:
            per_line, width = self._cells[id(row.strips[0])]
            # What is alike over all cells needs no second line.
            count = row.strips[0].cells
            is_whole = len(runs) == 1 and runs[0].last - runs[0].first + 1 == count
            for shown in _lines(per_line if is_whole else count, per_line):
                body = Text()
                for run in runs:
                    cells = min(run.last, shown.stop - 1) - max(run.first, shown.start) + 1
                    if cells > 0:
                        body.append(" " * ((max(run.first, shown.start) - shown.start) * width - len(body)))
                        body.append(*_run(run, cells * width))
                yield self._line(name, body)

    def _line(self, label: str, body: Text, style: str = "dim") -> Text:
        """Return a line of a label, padded to its column, and a body."""
        text = Text(set_cell_size(_cut(label, self._label - 1), self._label), style=style)
        line = Text.assemble(text, body)
        line.rstrip()
        return line

    def _header(self, strip: Strip, shown: range) -> Text:
        """Return the numbers of the cells in a line; a bare node has none."""
        width = self._cells[id(strip)][1]
        bare = strip.kind == BARE_NODE
        return Text("" if bare else "".join(f" {strip.label(index)}".ljust(width) for index in shown), style="dim")

    def _strip(self, strip: Strip, labels: list[str]) -> Iterator[Text]:
        """Yield the lines of a strip, with the labels in front of them; labels that do not fit stay in the list."""
        empty = strip.empty()
        per_line, width = self._cells[id(strip)]
        for shown in _lines(strip.cells, per_line):
            if shown.start:
                yield self._line(labels.pop(0) if labels else "", self._header(strip, shown))
            lanes = [
                lane
                for lane in strip.lanes
                if any(block.cells[0] < shown.stop and block.cells[-1] >= shown.start for block in lane)
            ]
            for number, lane in enumerate(lanes or [()]):
                body = self._lane(lane, shown, width, empty if number == 0 else {})
                yield self._line(labels.pop(0) if labels else "", body)
            for note in strip.notes:
                words = "".join(_cut(f" {note[cell]}", width - 1).ljust(width) for cell in shown)
                yield self._line(labels.pop(0) if labels else "", Text(words, style="dim"))

    def _lane(self, lane: Sequence[Block], shown: range, width: int, empty: dict[int, str]) -> Text:
        line = Text()
        at = {cell: block for block in lane for cell in range(block.cells[0], block.cells[-1] + 1)}
        cell = shown.start
        while cell < shown.stop:
            block = at.get(cell)
            if block is None:
                line.append(f" {empty.get(cell, '')}".ljust(width), style="dim")
                cell += 1
            elif cell not in block.cells:
                line.append("┄" * width, style=self._colours[block.component])
                cell += 1
            else:
                stop = cell + 1
                while stop < shown.stop and stop in block.cells:
                    stop += 1
                text = self._block(block, stop - cell, width)
                # A block that continues on another line has no bracket there.
                before, after = cell - 1 in block.cells, stop in block.cells
                first, last = cell == block.cells[0], stop - 1 == block.cells[-1]
                # What is one on several nodes points to where it goes on.
                opening = "◀" if block.goes_on[0] and first else "═" if before else "["
                text = opening + text + ("▶" if block.goes_on[1] and last else "═" if after else "]")
                colour = self._colours[block.component]
                basic_ink = "black" if colour in _DARK_INK else "white"
                line.append(text, style=f"{basic_ink if self._basic else ink(colour)} on {colour}")
                cell = stop
        return line

    def _block(self, block: Block, cells: int, width: int) -> str:
        room = cells * width - 2
        label = _cut(f"{self._names[block.component]} {block.ranks_text}", room)
        fill = room - cell_len(label)
        joined = cells > 1 and fill > 1
        return label + (" " + "═" * (fill - 1) if joined else " " * fill)

    def _legend(self) -> Iterator[Text]:
        entries = self._grid.legend
        keys = ["" if key == entry.name else f" ({key})" for key, entry in zip(self._names, entries, strict=True)]
        widest = max(map(cell_len, keys), default=0)
        longest = min(max((cell_len(entry.name) for entry in entries), default=0), self._width // 2)
        for index, entry in enumerate(entries):
            if not entry.shown:
                continue
            colour = self._colours[index]
            line = Text("■ ", style=colour)
            line.append(set_cell_size(_cut(entry.name, longest), longest), style=f"bold {colour}")
            line.append(set_cell_size(keys[index], widest), style="dim")
            room = self._width - cell_len(line.plain) - 2
            if cell_len(entry.summary) <= room:
                yield line.append(f"  {entry.summary}")
                continue
            line.rstrip()
            yield line
            for text in _wrapped(entry.summary, self._width - 4):
                yield Text(f"    {text}")


def _run(run: Run, room: int) -> tuple[str, str]:
    """Return a domain or a bar with its text, as wide as there is room, and its style."""
    if run.part is None:
        return f"│{_cut(run.text, room - 3)}".ljust(room - 1, "┄") + "│", "dim"
    short = "?" if run.text.endswith("?") else f"{run.part:.0%}"
    text = run.text if len(run.text) + 8 <= room else short
    bar = room - len(text) - 2
    full = min(bar, round(run.part * bar))
    style = "red" if run.part > 1 else "yellow" if run.part > 0.9 else "green"
    return f"{'█' * full}{'░' * (bar - full)} {text} ", style


def _title(row: Row) -> str:
    return f"{row.title} {row.name}" if row.name and row.count == 1 else row.title


def _cut(text: str, room: int) -> str:
    return text if cell_len(text) <= room else set_cell_size(text, max(0, room - 1)) + "…"


def _lines(cells: int, per_line: int) -> list[range]:
    """Return the cells of each line of a wrapped strip."""
    return [range(start, min(start + per_line, cells)) for start in range(0, cells, per_line)]


def _pieces(block: Block, lines: Sequence[range]) -> list[int]:
    """Return how many cells each piece of a block has after wrapping."""
    return [last - first + 1 for shown in lines for first, last in block.pieces(shown)]


def _wrapped(text: str, width: int) -> list[str]:
    """Break the text at spaces into lines of at most `width` cells; cut a word that is too long."""
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if cell_len(longer) <= width or not lines[-1]:
            lines[-1] = _cut(longer, width)
        else:
            lines.append(_cut(word, width))
    return lines


def ascii_of(character: str) -> str:
    """Return the replacement of a character on a terminal that has only ASCII, of the same width."""
    return _ASCII.get(character, character if ord(character) < 128 else "?" * cell_len(character))


def to_ascii(text: Text) -> Text:
    """Return the text for a terminal that has only ASCII, every character as wide as before."""
    return _replace(text, ascii_of)


def to_printable(text: Text) -> Text:
    """Return the text without anything that could upset a terminal, apart from its own styles."""
    return text if text.plain.replace("\n", "").isprintable() else _replace(text, printable_lines)


def _replace(text: Text, replacement: Callable[[str], str]) -> Text:
    """Replace each character and keep the styles."""
    parts = [replacement(c) for c in text.plain]
    starts = [0, *accumulate(map(len, parts))]
    spans = [Span(starts[span.start], starts[span.end], span.style) for span in text.spans]
    return Text("".join(parts), spans=spans)
