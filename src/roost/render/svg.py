"""The picture as a self-contained SVG that follows the reader's light or dark setting and shows details on hover."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape as escape_markup
from itertools import pairwise

from roost.config.hardware import BARE_NODE
from roost.placement.placement import seat
from roost.placement.plan import Plan
from roost.redact import hide
from roost.render.grid import Block, Grid, Row, Run, Strip, cells_per_line, ink, short_names
from roost.text import printable_lines

_MARGIN = 24
_LABEL = (132, 220)
"""The least and the most width of the labels of nodes."""
_CELL = 92
_WIDEST_CELL = 150
"""Cells are widened up to this so that names fit."""
_KEY = 8
"""How many letters of a name stay where it does not fit."""
_LANE = 26
_GAP = 18
_LETTER = 7.4
"""The width of a 12 px letter, rounded up."""
_TITLE = 16 / 12 * 1.08
"""How much wider the letters of the title are, which is larger and bold."""
_WRAP = 10
_FILLED, _FULL = "#009E73", "#D55E00"
"""The colour of a bar, and of one that overflows."""
_NODE_CELLS = 4
"""A bare node is drawn this many cells wide, since many workers share it."""

LIGHT = {"paper": "#ffffff", "text": "#1f2328", "soft": "#59636e", "line": "#d1d9e0", "cell": "#f6f8fa"}
DARK = {"paper": "#0d1117", "text": "#f0f6fc", "soft": "#9198a1", "line": "#3d444d", "cell": "#151b23"}


def _colours(theme: Mapping[str, str]) -> str:
    return (
        f".roost text{{fill:{theme['text']}}}.roost .soft{{fill:{theme['soft']}}}.roost .paper{{fill:{theme['paper']}}}"
        f".roost .cell{{fill:{theme['cell']};stroke:{theme['line']}}}.roost .rule{{stroke:{theme['line']}}}"
        f".roost .block:hover rect{{stroke:{theme['text']}}}"
    )


# Plain colours: many viewers know no CSS variables, and would draw everything black. They ignore the dark theme.
STYLE = f"""
  .roost text{{font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}}
  .roost .title{{font-size:16px;font-weight:600}}.roost .node,.roost .mark{{font-weight:600}}
  {_colours(LIGHT)}
  .roost .block:hover rect{{stroke-width:2}}
  @media(prefers-color-scheme:dark){{{_colours(DARK)}}}
"""


def draw_svg(plan: Plan, grid: Grid) -> str:
    """Return the whole SVG document: the grid, with details from the plan on hover."""
    return _Drawing(plan, grid).document()


def draw_rows(plan: Plan, grid: Grid, *, cells: int) -> list[str]:
    """Return an SVG for each row of the grid, for a page that has the style and the legend; `cells` fit in a line."""
    return [_Drawing(plan, grid, cells).row(row) for row in grid.rows]


class _Drawing:
    def __init__(self, plan: Plan, grid: Grid, wrap: int = _WRAP) -> None:
        self._wrap = wrap
        self._plan = plan
        self._grid = grid
        self._names = [entry.name for entry in grid.legend]
        self._short = short_names(self._names, _KEY)
        widest = max((cells_per_line(strip.cells, self._wrap) for row in grid.rows for strip in row.strips), default=1)
        strips = [strip for row in grid.rows for strip in row.strips]
        labels = [row.name for row in grid.rows]
        labels += [text for strip in strips for text in (strip.title, *strip.ranks_texts)]
        self._label_width = min(max(_LABEL[0], round(max(map(_width, labels), default=0)) + 16), _LABEL[1])
        self._cell = self._cell_width()
        self._node_cells = min(_NODE_CELLS, wrap)
        self._width = max(widest, self._node_cells) * self._cell
        self._used_short: set[int] = set()
        self._out: list[str] = []
        self._y: float = _MARGIN

    def document(self) -> str:
        if self._grid.title:
            self._y += 12
            self._text(_MARGIN, self._grid.title, "title")
            self._y += 22
        self._text(_MARGIN, self._grid.summary, "soft")
        if self._grid.mark:
            self._y += 20
            self._text(_MARGIN, self._grid.mark, "mark")
        self._y += _GAP
        for row in self._grid.rows:
            self._row(row)
        self._legend()
        text = [_width(self._grid.title) * _TITLE, _width(self._grid.summary), _width(self._grid.mark) * _TITLE]
        longest = max(map(_width, self._names), default=0) + _width(f" ({'x' * _KEY}) ")
        text += [longest + _width(entry.summary) + 30 for entry in self._grid.legend]
        text += [self._label_width + _width(row.folded) for row in self._grid.rows if row.folded]
        width = round(max(self._label_width + self._width, *text)) + 2 * _MARGIN
        height = round(self._y + _MARGIN)
        label = f'"{escape(f"Placement map: {self._grid.title} {self._grid.summary}".strip())}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="roost" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img" aria-label={label}>\n<style>{STYLE}</style>\n'
            f'<rect class="paper" width="100%" height="100%"/>\n' + "\n".join(self._out) + "\n</svg>\n"
        )

    def row(self, row: Row) -> str:
        """Return the SVG of one row, without margins."""
        self._row(replace(row, folded=_clip(row.folded, self._width)))
        width, height = self._label_width + self._width, round(self._y - _MARGIN)
        return (
            f'<svg class="roost" width="{width:g}" height="{height}" viewBox="{_MARGIN} {_MARGIN} {width:g} {height}" '
            f'role="img" aria-label="{escape(row.title)}">' + "\n".join(self._out) + "</svg>"
        )

    def _text(self, x: float, text: str, kind: str = "", y: float | None = None) -> None:
        self._out.append(f'<text class="{kind}" x="{x:g}" y="{self._y if y is None else y:g}">{escape(text)}</text>')

    def _row(self, row: Row) -> None:
        for number, strip in enumerate(row.strips):
            labels = [(text, "soft") for text in (strip.title, *strip.ranks_texts)]
            if number == 0:
                labels.insert(0, (row.title, "node"))
                labels += [(row.name, "soft")] if row.name else []
            top = self._y
            self._strip(row, strip)
            bottom = self._y
            for index, (text, kind) in enumerate(labels):
                self._text(_MARGIN, _clip(text, self._label_width - 8), kind, top + 12 + 17 * index + 16)
            self._y = max(bottom, top + 17 * len(labels) + 12)
        for name, runs in row.lines:
            self._runs(row.strips[0], name, runs)
        if row.folded:
            self._y += 10
            self._text(_MARGIN + self._label_width, row.folded, "soft")
            self._y += 4
        self._y += _GAP

    def _strip(self, row: Row, strip: Strip) -> None:
        per_line = cells_per_line(strip.cells, self._wrap)
        for start in range(0, strip.cells, per_line):
            stop = min(start + per_line, strip.cells)
            height = max(len(strip.lanes), 1) * _LANE + 4
            if strip.cells > 1:
                for cell in range(start, stop):
                    self._text(self._x(cell, start) + 4, strip.label(cell), "soft", self._y + 10)
            top = self._y + 14
            span = self._node_cells if strip.kind == BARE_NODE else 1
            for cell in range(start, stop):
                self._out.append(
                    f'<rect class="cell" x="{self._x(cell, start):g}" y="{top:g}" width="{span * self._cell - 4}" '
                    f'height="{height}" rx="5"/>'
                )
            for cell, said in strip.empty().items():
                if start <= cell < stop:
                    self._text(self._x(cell, start) + 8, said, "soft", top + 19)
            for number, lane in enumerate(strip.lanes):
                for block in lane:
                    self._block(row, strip, block, range(start, stop), top + 2 + number * _LANE)
            self._y = top + height + 4
            for note in strip.notes:
                for cell in range(start, stop):
                    self._text(self._x(cell, start) + 8, note[cell], "soft", self._y + 10)
                self._y += 16

    def _runs(self, strip: Strip, name: str, runs: Sequence[Run]) -> None:
        """Draw domains as brackets, and how full memory is as bars."""
        per_line = cells_per_line(strip.cells, self._wrap)
        for start in range(0, strip.cells, per_line):
            self._text(_MARGIN, _clip(name, self._label_width - 8), "soft", self._y + 13)
            for run in runs:
                first, last = max(run.first, start), min(run.last, start + per_line - 1)
                if first > last:
                    continue
                x, span = self._x(first, start), self._node_cells if strip.kind == BARE_NODE else last - first + 1
                width = span * self._cell - 4
                box = f'x="{x:g}" y="{self._y:g}" height="18" rx="3"'
                self._out.append(f'<rect class="cell" {box} width="{width}"/>')
                if run.part is not None:
                    colour = _FULL if run.part > 1 else _FILLED
                    self._out.append(
                        f'<rect {box} width="{min(1, run.part) * width:.1f}" fill="{colour}" fill-opacity="0.4"/>'
                    )
                self._text(x + 8, _clip(run.text, width - 12), "", self._y + 13)
            self._y += 22

    def _block(self, row: Row, strip: Strip, block: Block, shown: range, top: float) -> None:
        runs = block.pieces(shown)
        if not runs:
            return
        entry = self._grid.legend[block.component]
        tip = "\n".join(_details(self._plan, self._names[block.component], row, strip, block))
        parts = [f'<g class="block" data-component="{block.component}" tabindex="0"><title>{escape(tip)}</title>']
        middle = top + (_LANE - 2) / 2
        for (_, before), (after, _) in pairwise(runs):
            parts.append(
                f'<line x1="{self._x(before, shown.start) + self._cell - 8:g}" y1="{middle:g}" '
                f'x2="{self._x(after, shown.start) + 4:g}" y2="{middle:g}" stroke="{entry.colour}" '
                f'stroke-width="4" stroke-dasharray="7 4"/>'
            )
        for first, last in runs:
            x = self._x(first, shown.start) + 3
            span = self._node_cells if strip.kind == BARE_NODE else last - first + 1
            width = span * self._cell - 10
            parts.append(
                f'<rect x="{x:g}" y="{top:g}" width="{width}" height="{_LANE - 2}" rx="4" fill="{entry.colour}"/>'
                f'<text x="{x + 7:g}" y="{top + 16:g}" style="fill:{ink(entry.colour)}">'
                f"{escape(self._label(block, width - 12))}</text>"
            )
        self._out.append("".join(parts) + "</g>")

    def _label(self, block: Block, room: float) -> str:
        before, after = ("◀ " if block.goes_on[0] else "", " ▶" if block.goes_on[1] else "")
        label = f"{before}{self._names[block.component]} {block.ranks_text}{after}"
        if _width(label) <= room:
            return label
        self._used_short.add(block.component)
        return _clip(f"{before}{self._short[block.component]} {block.ranks_text}{after}", room)

    def _legend(self) -> None:
        self._y += 8
        shown = [(index, entry) for index, entry in enumerate(self._grid.legend) if entry.shown]
        names = {
            index: f"{entry.name} ({self._short[index]})" if index in self._used_short else entry.name
            for index, entry in shown
        }
        column = _MARGIN + 36 + max((_width(name) for name in names.values()), default=0)
        for index, entry in shown:
            self._out.append(
                f'<rect x="{_MARGIN}" y="{self._y:g}" width="14" height="14" rx="3" fill="{entry.colour}"/>'
            )
            self._text(_MARGIN + 22, names[index], "node", self._y + 11.5)
            self._text(column, entry.summary, "soft", self._y + 11.5)
            self._y += 22

    def _cell_width(self) -> int:
        """Return a width with room for the name and the ranks of every block, even one of a single cell.

        Where that would be too wide, a key takes the place of the name.
        """
        alone = [
            block
            for row in self._grid.rows
            for strip in row.strips
            if strip.kind != BARE_NODE
            for block in strip.blocks
            if any(first == last for first, last in block.pieces(range(strip.cells)))
        ]

        def needed(names: Sequence[str]) -> int:
            labels = (f"{names[block.component]} {block.ranks_text}" for block in alone)
            return max(_CELL, round(max(map(_width, labels), default=0)) + 24)

        with_names, with_keys = needed(self._names), needed(self._short)
        return with_names if with_names <= _WIDEST_CELL else max(with_keys, _WIDEST_CELL)

    def _x(self, cell: int, start: int) -> float:
        return _MARGIN + self._label_width + (cell - start) * self._cell


def _details(plan: Plan, name: str, row: Row, strip: Strip, block: Block) -> Iterator[str]:
    """Yield the details of a block, shown on hover."""
    component = plan.component(name)
    first = component.placements[block.ranks[0]]
    yield f"{name}:{block.ranks_text} of {component.world_size}"
    yield seat(first) + (f" ({plan.topology.nodes[row.first].name})" if plan.topology.nodes[row.first].name else "")
    yield f"hardware: {strip.title}"
    yield f"node group: {first.node_group_label}"
    yield f"local rank {first.local_rank} of {first.local_world_size}"
    if len(block.ranks) > 1:
        yield f"{len(block.ranks)} workers here; the environment of {name}:{first.rank}:"
    for variable, value in plan.environment(name, first.rank).items():
        yield f"{variable}={hide(variable, value)}"


def escape(text: str) -> str:
    """Escape a text for SVG and HTML, with the control characters that neither may contain."""
    return escape_markup(printable_lines(text))


def _width(text: str) -> float:
    return sum(_LETTER * (1.8 if unicodedata.east_asian_width(c) in "WF" else 1) for c in text)


def _clip(text: str, room: float) -> str:
    if _width(text) <= room:
        return text
    kept = text
    while kept and _width(f"{kept}…") > room:
        kept = kept[:-1]
    return f"{kept}…"
