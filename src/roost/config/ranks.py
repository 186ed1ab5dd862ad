"""The rank syntax: `0-3`, `0-1:0-3,3-5,7-10:7-14`, `all`.

A comma ends a segment; a segment is `resources[:processes]`. Ranges include both ends and are never
expanded here, so that a range of 10^12 costs nothing until a reader refuses it.

>>> parse_placement("0-1:0-3,3-5")
(Segment(resources=0-1, processes=0-3), Segment(resources=3-5, processes=4-6))
>>> format_placement(parse_placement("0-1:0-3, 3-5"))
'0-1:0-3,3-5'
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeVar

from roost.errors import PlacementError
from roost.text import shorten

MAX_PROCESSES = 2_000_000
"""More processes than this in one component is a typing mistake, not a job."""

_DIGITS = 15
_Span = tuple[int, int]
_Parsed = TypeVar("_Parsed")
_DASHES = ("..", "...", "…", "~", "to", "–", "—", "−", "‒", "－")
_TOKEN = re.compile(r"[0-9]+|[A-Za-z_]+|\d+|\.\.+|[-:,]|\s+|.", re.DOTALL)


@dataclass(frozen=True, slots=True)
class RankRange:
    """The ranks `first` to `last`, both included."""

    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

    __repr__ = __str__

    def as_range(self) -> range:
        """The ranks as a Python range."""
        return range(self.first, self.last + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One `resources[:processes]`; `resources` is None for `all`.

    `processes` is None only for an `all` without processes, whose count the hardware decides. `span` is the place
    of the segment in its string, and `last_span` that of its last resource.
    """

    resources: RankRange | None
    processes: RankRange | None
    explicit: bool = field(default=False, repr=False)
    span: _Span = field(default=(0, 0), compare=False, repr=False)
    last_span: _Span = field(default=(0, 0), compare=False, repr=False)

    def __str__(self) -> str:
        resources = "all" if self.resources is None else str(self.resources)
        return f"{resources}:{self.processes}" if self.explicit else resources


class SyntaxProblem(Exception):  # noqa: N818 - it is caught and becomes a Problem
    """A mistake in a rank string, and its place; it never leaves this package."""

    def __init__(self, message: str, span: tuple[int, int], hint: str = "") -> None:
        super().__init__(message)
        self.message: str = message
        self.span: tuple[int, int] = span
        self.hint: str = hint


def parse_placement(text: str) -> tuple[Segment, ...]:
    """Parse a placement string; PlacementError if it breaks a rule that needs no hardware."""
    return _parse(text, read_segments)


def format_placement(segments: Iterable[Segment]) -> str:
    """Return the shortest string that parses to `segments`."""
    return ",".join(str(segment) for segment in segments)


def parse_ranks(text: str) -> tuple[RankRange, ...]:
    """Parse `0-3,5,8-9`, a plain list of ranks as in `node_ranks`: ascending, each once."""
    return _parse(text, read_ranks)


def _parse(text: str, read: Callable[[str], _Parsed]) -> _Parsed:
    try:
        return read(text)
    except SyntaxProblem as problem:
        raise PlacementError(f"placement {shorten(text)!r}: {problem.message}", hint=problem.hint) from None


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ascending ranks as ranges: `[0, 1, 2, 5]` is `0-2,5`."""
    return ",".join(map(str, runs_of(ranks)))


def runs_of(ranks: Sequence[int]) -> list[RankRange]:
    """Return the runs of neighbours in ascending ranks."""
    # Neighbours are as far from their place in the list as each other.
    runs = [list(run) for _, run in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])]
    return [RankRange(run[0][1], run[-1][1]) for run in runs]


def read_segments(text: str) -> tuple[Segment, ...]:
    """Like `parse_placement`, but raises SyntaxProblem with the span within `text`."""
    parser = _Parser(text)
    segments: list[Segment] = []
    used: RankRange | None = None
    total = 0
    for resources, processes, span, last_span in parser.segments():
        if resources is None and (segments or not parser.at_end()):
            message = "'all' means every resource, so it must be the only segment"
            raise SyntaxProblem(message, span, "write 'all' alone, or name the ranges")
        if resources is not None:
            _check_ascending(used, resources, span)
            used = resources
        explicit = processes is not None
        if processes is None and resources is not None:
            processes = RankRange(total, total + len(resources) - 1)
        if processes is not None and processes.first != total:
            raise _process_gap(processes, total, span)
        total += len(processes or ())
        if total > MAX_PROCESSES:
            message = f"{total} processes are more than the {MAX_PROCESSES} that a component may have"
            raise SyntaxProblem(message, span, "ranges include both ends: 0-7 is eight ranks")
        found = Segment(resources=resources, processes=processes, explicit=explicit, span=span, last_span=last_span)
        segments.append(found)
    return tuple(segments)


def read_ranks(text: str) -> tuple[RankRange, ...]:
    """Like `parse_ranks`, but raises SyntaxProblem with the span within `text`."""
    parser = _Parser(text)
    ranges: list[RankRange] = []
    for resources, processes, span, _ in parser.segments():
        if resources is None or processes is not None:
            raise SyntaxProblem("a list of ranks takes numbers and ranges only", span, "such as 0-3,5")
        _check_ascending(ranges[-1] if ranges else None, resources, span)
        ranges.append(resources)
    return tuple(ranges)


def _check_ascending(before: RankRange | None, now: RankRange, span: tuple[int, int]) -> None:
    if before is None or now.first > before.last:
        return
    if now.last >= before.first:
        twice = RankRange(max(now.first, before.first), min(now.last, before.last))
        ranks = f"rank {twice} is" if len(twice) == 1 else f"ranks {twice} are"
        where = f": in {before} and in {now}" if before != now else ""
        raise SyntaxProblem(f"{ranks} named twice{where}", span)
    raise SyntaxProblem(f"ranks must ascend, and {now} comes after {before}", span, f"write {now},{before}")


def _process_gap(processes: RankRange, expected: int, span: _Span) -> SyntaxProblem:
    want = RankRange(expected, expected + len(processes) - 1)
    if expected == 0:
        message = f"process ranks start at {processes.first}, but must start at 0"
    elif processes.first < want.first:
        message = f"process rank {processes.first} is named twice: the segments before end at {want.first - 1}"
    else:
        message = f"process ranks jump from {want.first - 1} to {processes.first}"
    return SyntaxProblem(message, span, f"process ranks are 0 to N-1 in order, each once; write {want} here")


def _token_hint(text: str) -> str:
    hints = dict.fromkeys(_DASHES, "write a range with '-', as in 0-3")
    hints[":"] = "a segment is resources[:processes], as in 0-3:0-7"
    hints["-"] = "a range has two ends, as in 0-3"
    hints["."] = "ranks are whole numbers"
    return hints.get(text, "separate ranges with ',', as in 0-3,5")


class _Parser:
    """A recursive descent parser; spaces between tokens mean nothing."""

    def __init__(self, text: str) -> None:
        found = ((match.group(), *match.span()) for match in _TOKEN.finditer(text))
        self._tokens = [token for token in found if not token[0].isspace()]
        self._end = len(text)
        self._next = 0

    def at_end(self) -> bool:
        return self._next >= len(self._tokens)

    def segments(self) -> Iterable[tuple[RankRange | None, RankRange | None, _Span, _Span]]:
        """Yield the segments as (resources, processes, span, span of the last resource)."""
        if self.at_end():
            raise SyntaxProblem("no ranks are given", (0, max(1, self._end)), "write a range such as 0-7, or all")
        while True:
            start = self._peek()[1]
            resources = self._resources()
            last = self._tokens[self._next - 1][1:]
            processes = self._range("process") if self._take(":") else None
            end = self._tokens[self._next - 1][2]
            text, at, stop = self._peek()
            if not self.at_end() and text != ",":
                raise SyntaxProblem(f"unexpected {text!r}", (at, stop), self._range_hint() or _token_hint(text))
            yield resources, processes, (start, end), last
            if not self._take(","):
                return

    def _range_hint(self) -> str:
        """Return the range that was meant, if the next token joins two numbers in place of a dash."""
        before, (text, _, _), *after = self._tokens[self._next - 1 : self._next + 2]
        ends = [before[0], *(token[0] for token in after)]
        if text not in _DASHES or len(ends) < 2 or not all(end.isdecimal() and len(end) <= _DIGITS for end in ends):
            return ""
        return f"write a range with '-': {int(ends[0])}-{int(ends[1])}"

    def _peek(self) -> tuple[str, int, int]:
        return ("", self._end, self._end + 1) if self.at_end() else self._tokens[self._next]

    def _take(self, text: str) -> bool:
        if self._peek()[0] != text:
            return False
        self._next += 1
        return True

    def _resources(self) -> RankRange | None:
        text, at, stop = self._peek()
        if text.lower() == "all":
            if text != "all":
                raise SyntaxProblem(f"unexpected {text!r}", (at, stop), "write all in lower case")
            self._next += 1
            return None
        return self._range("resource")

    def _range(self, what: str) -> RankRange:
        start = self._peek()[1]
        first = self._number(what)
        last = self._number(what) if self._take("-") else first
        if last < first:
            span = start, self._tokens[self._next - 1][2]
            raise SyntaxProblem(f"range {first}-{last} runs backwards", span, f"write {last}-{first}")
        return RankRange(first, last)

    def _number(self, what: str) -> int:
        text, at, stop = self._peek()
        if not text:
            raise SyntaxProblem(f"a {what} rank is missing at the end", (at, stop))
        if text == "all":
            hint = "leave them out for one process on each resource"
            raise SyntaxProblem("process ranks cannot be 'all'", (at, stop), hint)
        if text == "-" and self._next and self._tokens[self._next - 1][0] == "-":
            raise SyntaxProblem("two dashes follow each other", (at, stop), "write a range as 0-3")
        if text == "-":
            raise SyntaxProblem("ranks cannot be negative", (at, stop), "ranks count from 0")
        if text in (",", ":"):
            raise SyntaxProblem(f"a {what} rank is missing before {text!r}", (at, stop), _token_hint(text))
        if text.isdecimal() and not text.isascii() and len(text) <= _DIGITS:
            hint = f"write it with the digits 0 to 9: {int(text)}"
            raise SyntaxProblem(f"{text!r} is not written with ASCII digits", (at, stop), hint)
        if not (text.isascii() and text.isdigit()):
            raise SyntaxProblem(f"expected a {what} rank, found {text!r}", (at, stop), "ranks are numbers from 0 on")
        if len(text) > _DIGITS:
            raise SyntaxProblem(f"a {what} rank of {len(text)} digits is too large", (at, stop))
        self._next += 1
        return int(text)
