"""A bar for each role: which part of a step it is busy, switching and idle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from roost.render.svg import STYLE, escape

_MARKS = (("█", "busy"), ("▒", "switching"), ("░", "idle"))
_ROW = 26
_WIDTH = 480
_MARGIN = 24
_LETTER = 7.4


class Bar(NamedTuple):
    """A role with its colour and its parts of a step: busy, switching, idle."""

    name: str
    colour: str
    parts: tuple[float, float, float]
    note: str = ""


def draw_bars(bars: Sequence[Bar], *, width: int = 80) -> Text:
    """Return a line for each bar, as wide as `width` if possible."""
    name = max(cell_len(bar.name) for bar in bars) + 2
    texts = [_text(bar) for bar in bars]
    room = max(10, min(40, width - name - max(map(cell_len, texts)) - 2))
    lines = []
    for bar, text in zip(bars, texts, strict=True):
        line = Text(set_cell_size(bar.name, name), style="bold")
        # The cells add up, and what is there is seen.
        busy = round(bar.parts[0] * room)
        switching = max(round(bar.parts[1] * room), 1 if bar.parts[1] > 0 and busy < room else 0)
        for (mark, _), cells in zip(_MARKS, (busy, switching, room - busy - switching), strict=True):
            line.append(mark * cells, style=bar.colour)
        lines.append(line.append(f"  {text}"))
    return Text("\n").join(lines)


def draw_bars_svg(bars: Sequence[Bar], title: str) -> str:
    """Return the bars as an SVG that follows the reader's light or dark setting."""
    left = _MARGIN + max(len(bar.name) for bar in bars) * _LETTER + 16
    texts = [_text(bar) for bar in bars]
    width = round(max(left + _WIDTH + 12 + max(map(len, texts)) * _LETTER, len(title) * _LETTER) + 2 * _MARGIN)
    height = 2 * _MARGIN + 24 + _ROW * len(bars)
    out = [f'<text class="node" x="{_MARGIN}" y="{_MARGIN + 8}">{escape(title)}</text>']
    for row, (bar, text) in enumerate(zip(bars, texts, strict=True)):
        top = _MARGIN + 24 + row * _ROW
        out.append(f'<text class="node" x="{_MARGIN}" y="{top + 13}">{escape(bar.name)}</text>')
        out.append(f'<rect class="cell" x="{left:g}" y="{top}" width="{_WIDTH}" height="18" rx="3"/>')
        at = left
        for part, opacity in zip(bar.parts[:2], (1, 0.45), strict=True):
            size = part * _WIDTH
            if size > 0:
                fill = f'fill="{bar.colour}" fill-opacity="{opacity}"'
                out.append(f'<rect x="{at:g}" y="{top}" width="{size:.6g}" height="18" {fill}/>')
            at += size
        out.append(f'<text class="soft" x="{left + _WIDTH + 12:g}" y="{top + 13}">{escape(text)}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="roost" width="{width}" height="{height}" '
    label = f'viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
    return "\n".join(
        [head + label, f"<style>{STYLE}</style>", '<rect class="paper" width="100%" height="100%"/>', *out, "</svg>\n"]
    )


def _text(bar: Bar) -> str:
    said = [f"{part * 100:.0f} % {word}" for part, (_, word) in zip(bar.parts, _MARKS, strict=True) if round(part, 2)]
    return ", ".join(said) + (f"; {bar.note}" if bar.note else "")
