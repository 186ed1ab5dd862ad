"""The return curve and the timeline: as text for the terminal, as SVG for the run's folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from xml.sax.saxutils import escape

from roost.demo.timeline import Timeline
from roost.render.svg import STYLE

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bits of a Braille character, by line and column."""
_BRAILLE = 0x2800
_SHADES = " ░▒▓█"
_MARGIN = 24
_LABEL = 88
_WIDTH = 720


def curve_text(values: Sequence[float], *, width: int, height: int, top: float) -> list[str]:
    r"""A curve as lines of text, with its scale at the left.

    >>> print(*curve_text([0, 50, 100], width=4, height=2, top=100), sep="\n")
     100 ┤  ⣠⠞
       0 ┤⣠⠞⠁
    """
    cells = [[0] * width for _ in range(height)]
    for x, y in _points(values, width * 2, height * 4, top):
        cells[height - 1 - y // 4][x // 2] |= _DOTS[3 - y % 4][x % 2]
    scale = {0: f"{top:.0f}", height - 1: "0"}
    return [
        f"{scale.get(row, ''):>4} ┤" + "".join(chr(_BRAILLE + dots) if dots else " " for dots in line).rstrip()
        for row, line in enumerate(cells)
    ]


def _points(values: Sequence[float], width: int, height: int, top: float) -> Iterator[tuple[int, int]]:
    """A dot for each column that the curve reaches, and those between two that are far apart."""
    if not values:
        return
    last = max(len(values) - 1, 1)
    before: int | None = None
    for x in range(width if len(values) > 1 else 1):
        place = x / (width - 1) * last
        left = min(int(place), len(values) - 1)
        right = min(left + 1, len(values) - 1)
        value = values[left] + (values[right] - values[left]) * (place - left)
        y = round(min(max(value / top, 0.0), 1.0) * (height - 1))
        step = 1 if before is None or y >= before else -1
        for between in range(y if before is None else before, y + step, step):
            yield x, between
        before = y


def timeline_text(timeline: Timeline, *, width: int, start: float, end: float) -> list[str]:
    """A line for each component: the darker, the more of its workers were at work."""
    names = list(dict.fromkeys(track.component for track in timeline.tracks))
    longest = max(map(len, names), default=0)
    slice_ = (end - start) / width
    lines = []
    for name in names:
        parts = [timeline.at_work(name, start + index * slice_, start + (index + 1) * slice_) for index in range(width)]
        shades = "".join(_SHADES[min(len(_SHADES) - 1, -int(-part * (len(_SHADES) - 1) // 1))] for part in parts)
        lines.append(f"{name:<{longest}} │{shades}│")
    return lines


def curve_svg(title: str, values: Sequence[float], *, top: float, marks: Mapping[int, str]) -> str:
    """The mean return by round, with what happened in some of them."""
    height, floor = 220, _MARGIN + 52 + 220
    left, last = _MARGIN + 48, max(len(values) - 1, 1)

    def at(index: int) -> tuple[float, float]:
        return left + index / last * (_WIDTH - 48), floor - min(values[index] / top, 1.0) * height

    body = [_text(_MARGIN, _MARGIN + 12, title, "title"), _text(_MARGIN, _MARGIN + 34, "mean return by round", "soft")]
    for part in range(5):
        y = floor - part / 4 * height
        body.append(f'<line x1="{left}" x2="{left + _WIDTH - 48}" y1="{y:g}" y2="{y:g}" stroke="var(--line)"/>')
        body.append(_text(_MARGIN, y + 4, f"{top * part / 4:.0f}", "soft"))
    for index, said in marks.items():
        if 0 <= index < len(values):
            x, y = at(index)
            body.append(_upright(x, y, floor, said))
            body.append(_text(x + 5, floor - 6, said, "soft"))
    points = " ".join(f"{x:g},{y:g}" for x, y in map(at, range(len(values))))
    body.append(f'<polyline points="{points}" fill="none" stroke="#0072B2" stroke-width="2.5"/>')
    for index, value in enumerate(values):
        x, y = at(index)
        body.append(
            f'<circle cx="{x:g}" cy="{y:g}" r="3" fill="#0072B2">{_tip(f"round {index + 1}: {value:.0f}")}</circle>'
        )
    body.append(_text(left, floor + 20, "round 1", "soft"))
    body.append(_text(left + _WIDTH - 48 - 52, floor + 20, f"round {len(values)}", "soft"))
    return _document(_WIDTH + 2 * _MARGIN, floor + 20 + _MARGIN, title, body)


def timeline_svg(title: str, timeline: Timeline, colours: Mapping[str, str]) -> str:
    """A line for each worker, and what it did when."""
    seconds = max(timeline.end - timeline.start, 1e-9)
    top, lane, left = _MARGIN + 52, 18, _MARGIN + _LABEL
    wide = _WIDTH - _LABEL
    floor = top + lane * len(timeline.tracks)

    def x_of(at: float) -> float:
        return left + (at - timeline.start) / seconds * wide

    body = [_text(_MARGIN, _MARGIN + 12, title, "title")]
    body.append(_text(_MARGIN, _MARGIN + 34, f"who did what when, {seconds:.0f} s in all", "soft"))
    for row, track in enumerate(timeline.tracks):
        y = top + row * lane
        body.append(_text(_MARGIN, y + 12, track.worker, "soft"))
        body.append(f'<rect class="cell" x="{left}" y="{y}" width="{wide}" height="{lane - 3}" rx="2"/>')
        for span in track.spans:
            width = max(x_of(span.end) - x_of(span.start), 0.6)
            tip = _tip(f"{track.worker} {span.name}: {span.end - span.start:.3f} s, {span.calls} calls")
            body.append(
                f'<rect x="{x_of(span.start):.2f}" y="{y + 1}" width="{width:.2f}" height="{lane - 5}" '
                f'fill="{colours.get(track.component, "#999999")}">{tip}</rect>'
            )
    for index, mark in enumerate(timeline.marks):
        body.append(_upright(x_of(mark.at), top - 4, floor, mark.name))
        body.append(_text(min(x_of(mark.at), left + wide - 130), floor + 14 + 15 * index, f"│ {mark.name}", "soft"))
    height = floor + 15 * len(timeline.marks) + _MARGIN
    return _document(_WIDTH + 2 * _MARGIN, height, title, body)


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>'


def _upright(x: float, top: float, bottom: float, tip: str) -> str:
    """A line for something that happened."""
    return f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{top:g}" y2="{bottom:g}" stroke="#D55E00">{_tip(tip)}</line>'


def _tip(text: str) -> str:
    return f"<title>{escape(text)}</title>"


def _document(width: float, height: float, label: str, body: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="roost" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}">\n<style>{STYLE}</style>\n'
        f'<rect class="paper" width="100%" height="100%"/>\n' + "\n".join(body) + "\n</svg>\n"
    )
