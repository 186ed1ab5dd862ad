"""The return curve and the timeline: as text for the terminal, as SVG for the run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import ceil, log10
from math import floor as floor_of
from xml.sax.saxutils import escape

import numpy as np

from roost.demo.timeline import Timeline
from roost.render.svg import STYLE

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bits of a Braille character, by line and column."""
_BRAILLE = 0x2800
_SHADES = " ░▒▓█"
_MARGIN = 24
_LABEL = 88
_WIDTH = 720
_LEAST_WIDTH = 2.0
"""A call is drawn at least so wide, or a short one would not be seen."""


def curve_text(values: Sequence[float], *, width: int, height: int, top: float) -> list[str]:
    r"""Return a curve as lines of text, with its scale on the left.

    >>> print(*curve_text([0, 50, 100], width=4, height=2, top=100), sep="\n")
     100 ┤  ⣠⠞
       0 ┤⣠⠞⠁
    """
    cells = [[0] * width for _ in range(height)]
    count = len(values)
    places = np.linspace(0, count - 1, width * 2 if count > 1 else count)
    reached = np.interp(places, range(count), values) if count else places
    dots = [round(part) for part in np.clip(reached / top, 0, 1) * (height * 4 - 1)]
    # The dots of a column join it to the column before.
    for x, (before, dot) in enumerate(pairwise(dots[:1] + dots)):
        for y in range(min(before, dot), max(before, dot) + 1):
            cells[height - 1 - y // 4][x // 2] |= _DOTS[3 - y % 4][x % 2]
    scale = {0: f"{top:.0f}", height - 1: "0"}
    return [
        f"{scale.get(row, ''):>4} ┤" + "".join(chr(_BRAILLE + dots) if dots else " " for dots in line).rstrip()
        for row, line in enumerate(cells)
    ]


def timeline_text(timeline: Timeline, *, width: int, start: float, end: float) -> list[str]:
    """Return a line for each component: the darker, the more of its workers were at work."""
    names = list(dict.fromkeys(track.component for track in timeline.tracks))
    longest = max(map(len, names), default=0)
    darkest = len(_SHADES) - 1
    times = [start + index * (end - start) / width for index in range(width + 1)]
    lines = []
    for name in names:
        parts = [timeline.at_work(name, since, until) for since, until in pairwise(times)]
        shades = "".join(_SHADES[min(darkest, ceil(part * darkest))] for part in parts)
        lines.append(f"{name:<{longest}} │{shades}│")
    return lines


def curve_svg(title: str, noun: str, values: Sequence[float], *, top: float, marks: Mapping[int, str]) -> str:
    """Draw a value by round, with the events of some rounds."""
    height, floor = 220, _MARGIN + 52 + 220
    left, right = _MARGIN + 48, _MARGIN + _WIDTH
    step = (right - left) / max(len(values) - 1, 1)
    dots = [(left + index * step, floor - min(value / top, 1.0) * height) for index, value in enumerate(values)]
    body = []
    for part in range(5):
        y = floor - part / 4 * height
        body.append(f'<line x1="{left}" x2="{right}" y1="{y:g}" y2="{y:g}" class="rule"/>')
        body.append(_text(_MARGIN, y + 4, f"{top * part / 4:g}", "soft"))
    for index, said in marks.items():
        if 0 <= index < len(values):
            x, y = dots[index]
            body += [_upright(x, y, floor, said), _text(x + 5, floor - 6, said, "soft")]
    points = " ".join(f"{x:g},{y:g}" for x, y in dots)
    body.append(f'<polyline points="{points}" fill="none" stroke="#0072B2" stroke-width="2.5"/>')
    for number, (value, (x, y)) in enumerate(zip(values, dots, strict=True), start=1):
        tip = _tip(f"round {number}: {value:.3g}")
        body.append(f'<circle cx="{x:g}" cy="{y:g}" r="3" fill="#0072B2">{tip}</circle>')
    body.append(_text(left, floor + 20, "round 1", "soft"))
    body.append(_text(right - 52, floor + 20, f"round {len(values)}", "soft"))
    return _document(title, f"{noun} by round", floor + 20 + _MARGIN, body)


def timeline_svg(title: str, timeline: Timeline, colours: Mapping[str, str]) -> str:
    """Draw a line for each worker: what it did, and when; with the seconds below, and what the colours mean."""
    start = timeline.start
    seconds = max(timeline.end - start, 1e-9)
    top, lane, left = _MARGIN + 52, 18, _MARGIN + _LABEL
    wide = _WIDTH - _LABEL
    floor = top + lane * len(timeline.tracks)

    def x_of(at: float) -> float:
        return left + (at - start) / seconds * wide

    body = []
    for row, track in enumerate(timeline.tracks):
        y = top + row * lane
        body.append(_text(_MARGIN, y + 12, track.worker, "soft"))
        body.append(f'<rect class="cell" x="{left}" y="{y}" width="{wide}" height="{lane - 3}" rx="2"/>')
    for tick in axis_ticks(seconds):
        x = x_of(start + tick)
        body.append(f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{top}" y2="{floor + 4}" class="rule"/>')
        body.append(_text(x + 2, floor + 15, f"{tick:g} s", "soft"))
    for row, track in enumerate(timeline.tracks):
        y = top + row * lane
        for span in track.spans:
            width = max(x_of(span.end) - x_of(span.start), _LEAST_WIDTH)
            tip = _tip(f"{track.worker} {span.name}: {span.end - span.start:.3f} s, {span.calls} calls")
            body.append(
                f'<rect x="{min(x_of(span.start), left + wide - width):.2f}" y="{y + 1}" width="{width:.2f}" '
                f'height="{lane - 5}" fill="{colours.get(track.component, "#999999")}">{tip}</rect>'
            )
    for mark in timeline.marks:
        body.append(_upright(x_of(mark.at), top - 4, floor, mark.name))
    y = floor + 40
    for mark in timeline.marks:
        body.append(f'<line x1="{_MARGIN + 7}" x2="{_MARGIN + 7}" y1="{y - 11}" y2="{y + 2}" stroke="#D55E00"/>')
        body.append(_text(_MARGIN + 22, y, f"{mark.at - start:.1f} s: {mark.name}", "soft"))
        y += 18
    for name in dict.fromkeys(track.component for track in timeline.tracks):
        spans = (span for track in timeline.tracks if track.component == name for span in track.spans)
        calls = ", ".join(dict.fromkeys(span.name for span in spans))
        colour = colours.get(name, "#999999")
        body.append(f'<rect x="{_MARGIN}" y="{y - 11}" width="14" height="14" rx="3" fill="{colour}"/>')
        body += [_text(_MARGIN + 22, y, name, "node"), _text(left, y, calls, "soft")]
        y += 20
    return _document(title, f"who did what when, {seconds:.0f} s in all", y - 20 + _MARGIN, body)


def axis_ticks(seconds: float) -> list[float]:
    """Return round numbers of seconds for an axis, from 0, at most ten of them.

    >>> axis_ticks(47), axis_ticks(1.3)
    ([0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 35.0, 40.0, 45.0], [0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2])
    """
    power = 10.0 ** floor_of(log10(seconds / 10))
    step = next(power * part for part in (1, 2, 5, 10, 20) if seconds / (power * part) < 10)
    return [float(f"{number * step:.6g}") for number in range(int(seconds / step) + 1)]


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>'


def _upright(x: float, top: float, bottom: float, tip: str) -> str:
    """Draw a vertical line at an event."""
    return f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{top:g}" y2="{bottom:g}" stroke="#D55E00">{_tip(tip)}</line>'


def _tip(text: str) -> str:
    return f"<title>{escape(text)}</title>"


def _document(title: str, subtitle: str, height: float, body: Sequence[str]) -> str:
    width = _WIDTH + 2 * _MARGIN
    head = [_text(_MARGIN, _MARGIN + 12, title, "title"), _text(_MARGIN, _MARGIN + 34, subtitle, "soft")]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="roost" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}">\n<style>{STYLE}</style>\n'
        '<rect class="paper" width="100%" height="100%"/>\n' + "\n".join([*head, *body]) + "\n</svg>\n"
    )
