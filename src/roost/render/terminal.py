"""The picture on a terminal: text of a given width, with or without colour.

Every block has brackets around it and its component's name in it, so that nothing depends on colour:

    node 0     0       1       2       3       4       5       6       7
    8 x H100   [act 0 ][act 1 ][act 2 ][act 3 ][rol 0 ════════════════════════]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from roost.placement.hardware import BARE_NODE
from roost.render.grid import Block, Grid, Row, Strip, cells_per_line, ink, short_names

_LABEL_WIDTH = (8, 20)
_CELL_WIDTH = (7, 16)
_NODE_CELL_WIDTH = 32
_ASCII = {"═": "=", "┄": "-", "·": "-", "■": "#", "…": "~"}


def draw_terminal(grid: Grid, *, width: int = 80) -> Text:
    """The picture as styled text, no line longer than `width` where that can be."""
    return Text("\n").join(_Drawing(grid, width).lines())


class _Drawing:
    def __init__(self, grid: Grid, width: int) -> None:
        self._grid = grid
        self._width = max(40, width)
        labels = [_title(row) for row in grid.rows] + [s.title for row in grid.rows for s in row.strips]
        longest = max((cell_len(label) for label in labels), default=0)
        self._label = min(max(longest + 2, _LABEL_WIDTH[0]), _LABEL_WIDTH[1])
        self._names = self._fitting_names()

    def lines(self) -> Iterator[Text]:
        if self._grid.title:
            yield Text(_cut(self._grid.title, self._width), style="bold")
        yield Text(_cut(self._grid.summary, self._width), style="dim")
        yield Text("")
        for row in self._grid.rows:
            yield from self._row(row)
            yield Text("")
        yield from self._legend()

    def _cells(self, strip: Strip) -> tuple[int, int]:
        """How many cells stand in a line, and how wide each is; a wide node wraps and stays readable."""
        room = self._width - self._label
        if strip.kind == BARE_NODE:
            return 1, min(room, _NODE_CELL_WIDTH)
        per_line = cells_per_line(strip.cells, room // _CELL_WIDTH[0])
        return per_line, min(max(room // per_line, 4), _CELL_WIDTH[1])

    def _fitting_names(self) -> list[str]:
        """For each component the longest name that fits into all its blocks."""
        names = [entry.name for entry in self._grid.legend]
        room = dict.fromkeys(range(len(names)), self._width)
        for row in self._grid.rows:
            for strip in row.strips:
                width = self._cells(strip)[1]
                for block in (block for lane in strip.lanes for block in lane):
                    cells = min(last - first + 1 for first, last in block.pieces())
                    left = cells * width - 2 - len(f" {block.ranks_text}")
                    room[block.component] = min(room[block.component], left)
        cuts = [short_names(names, length) for length in (max(map(len, names), default=1), 4, 3, 2, 1)]
        return [
            next((cut[index] for cut in cuts if cell_len(cut[index]) <= room[index]), cuts[-1][index])
            for index in range(len(names))
        ]

    def _row(self, row: Row) -> Iterator[Text]:
        first = row.strips[0]
        yield self._line(_title(row), self._header(first, 0), "bold")
        for strip in row.strips:
            yield from self._strip(strip)
        if row.folded is not None:
            said = " · ".join(f"{self._grid.legend[index].name} {ranks}" for index, ranks in row.folded)
            text = f"{row.count} nodes alike: {said or 'idle'}"
            yield self._line("", Text(_cut(text, self._width - self._label), style="dim"))

    def _line(self, label: str, body: Text, style: str = "dim") -> Text:
        """A label, padded to its column, and what stands beside it."""
        text = Text(set_cell_size(_cut(label, self._label - 1), self._label), style=style)
        line = Text.assemble(text, body)
        line.rstrip()
        return line

    def _header(self, strip: Strip, start: int) -> Text:
        per_line, width = self._cells(strip)
        if strip.cells == 1:
            return Text("")
        shown = range(start, min(start + per_line, strip.cells))
        return Text("".join(f" {index}".ljust(width) for index in shown), style="dim")

    def _strip(self, strip: Strip) -> Iterator[Text]:
        empty = strip.empty()
        per_line, width = self._cells(strip)
        title = strip.title
        for start in range(0, strip.cells, per_line):
            shown = range(start, min(start + per_line, strip.cells))
            if start:
                yield self._line("", self._header(strip, start))
            lanes = [
                lane
                for lane in strip.lanes
                if any(block.cells[0] < shown.stop and block.cells[-1] >= shown.start for block in lane)
            ]
            for number, lane in enumerate(lanes or [()]):
                yield self._line(title, self._lane(lane, shown, width, empty if number == 0 else {}))
                title = ""

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
                line.append("┄" * width, style=self._colour(block))
                cell += 1
            else:
                stop = cell + 1
                while stop < shown.stop and stop in block.cells:
                    stop += 1
                line.append(self._block(block, stop - cell, width), style=self._style(block))
                cell = stop
        return line

    def _block(self, block: Block, cells: int, width: int) -> str:
        room = cells * width - 2
        label = f"{self._names[block.component]} {block.ranks_text}"
        if cell_len(label) > room:
            label = label.replace(" ", "", 1)
        label = _cut(label, room)
        fill = room - cell_len(label)
        joined = cells > 1 and fill > 1
        return "[" + label + (" " + "═" * (fill - 1) if joined else " " * fill) + "]"

    def _legend(self) -> Iterator[Text]:
        entries = self._grid.legend
        longest = max((cell_len(entry.name) for entry in entries), default=0)
        keys = ["" if key == entry.name else f" ({key})" for key, entry in zip(self._names, entries, strict=True)]
        for index, entry in enumerate(entries):
            if not entry.shown:
                continue
            line = Text("■ ", style=entry.colour)
            line.append(set_cell_size(entry.name, longest), style=f"bold {entry.colour}")
            line.append(set_cell_size(keys[index], max(map(cell_len, keys))), style="dim")
            room = self._width - cell_len(line.plain) - 2
            yield line.append("  " + _cut(entry.summary, room))

    def _style(self, block: Block) -> str:
        colour = self._grid.legend[block.component].colour
        return f"{ink(colour)} on {colour}"

    def _colour(self, block: Block) -> str:
        return self._grid.legend[block.component].colour


def _title(row: Row) -> str:
    return f"{row.title} {row.name}" if row.name and row.count == 1 else row.title


def _cut(text: str, room: int) -> str:
    return text if cell_len(text) <= room else set_cell_size(text, max(0, room - 1)) + "…"


def to_ascii(text: Text) -> Text:
    """The same text for a terminal that knows only ASCII."""
    plain = "".join(_ASCII.get(c, c if ord(c) < 128 else "?") for c in text.plain)
    return Text(plain, spans=list(text.spans))
