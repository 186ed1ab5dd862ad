"""Typed reading of a document: readers note every mistake and go on, so that one error reports them all."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from roost.config.document import Scalar, Value
from roost.config.ranks import RankRange, Segment, SyntaxProblem, format_ranks, read_ranks, read_segments
from roost.errors import ConfigError, PlacementError, Problem, RoostError, Where
from roost.text import did_you_mean, join_words, shorten

MAX_NUMBER = 10_000_000
"""The largest whole number of a field that has no limit of its own."""
_MAX_LISTED_RANKS = 1_000_000
NAME_EXTRA = "_-."
"""The characters of a name other than letters and digits."""
FLAGS = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False}
_SPACE_HINT = "YAML makes a mapping of '0-3: 0-7': write 0-3:0-7 without a space"


class Notes:
    """The mistakes found so far.

    A broken placement rule makes the whole report a PlacementError, anything else a ConfigError.
    """

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self._placement = False

    def copy(self) -> Notes:
        """Return a copy, to continue without changing these."""
        other = Notes()
        other.problems, other._placement = list(self.problems), self._placement
        return other

    def config(self, value: Value, message: str, hint: str = "", span: tuple[int, int] | None = None) -> None:
        """Note a value that cannot be read or is not known."""
        self.problems.append(Problem(message=message, hint=hint, where=value.where(span)))

    def placement(self, *problems: Problem) -> None:
        """Note placement rules that are broken."""
        self.problems.extend(problems)
        self._placement = True

    def take(self, error: RoostError) -> None:
        """Note all problems of an error."""
        self.problems.extend(error.problems)
        self._placement = self._placement or isinstance(error, PlacementError)

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Note an error that is raised in the block, and leave the block."""
        try:
            yield
        except RoostError as error:
            self.take(error)

    def raise_if_any(self) -> None:
        """Raise one error with all problems, in the order of the file."""
        if not self.problems:
            return
        unique = list({str(problem): problem for problem in reversed(self.problems)}.values())[::-1]
        unique.sort(
            key=lambda item: (item.where.line, item.where.offset if item.where.line else 0) if item.where else (0, 0)
        )
        raise (PlacementError if self._placement else ConfigError)(unique)


class Pair(NamedTuple):
    """A key of a mapping, as it is written, and its value."""

    key: Value
    value: Value


def read_fields(value: Value, notes: Notes, what: str) -> dict[str, Pair]:
    """Read a mapping's pairs by name; note keys that are not text and keys named twice."""
    found: dict[str, Pair] = {}
    pairs: list[tuple[Value, Value]] = []
    with notes.catching():
        pairs = list(value.items()) if _is_kind(value, "mapping", notes, what) else []
    for key, item in pairs:
        name = read_text(key, notes, f"a key of {what}")
        if name in found:
            first = found[name].key.where().line
            notes.config(key, f"{what} names {shorten(name)!r} twice" + (f", first in line {first}" if first else ""))
        elif name is not None:
            found[name] = Pair(key, item)
    return found


def read_list(value: Value, notes: Notes, what: str) -> list[Value]:
    """Read the values of a list."""
    with notes.catching():
        return list(value.elements()) if _is_kind(value, "list", notes, what) else []
    return []


def read_plain(value: Value, notes: Notes, what: str, kind: str) -> Any:
    """Read a list or a mapping whose contents belong to the user, as lists, dicts and scalars of Python."""
    with notes.catching():
        return value.plain() if _is_kind(value, kind, notes, what) else None
    return None


def read_text(value: Value, notes: Notes, what: str) -> str | None:
    """Read a text; a whole number is the text that was typed, such as a label `4090`."""
    scalar = _scalar(value, notes, what)
    if isinstance(scalar, str):
        return scalar
    if isinstance(scalar, bool):
        typed = "yes, on or true" if scalar else "no, off or false"
        notes.config(
            value, f"{what} is the boolean {scalar}", hint=f"YAML 1.1 reads an unquoted {typed} as a boolean: quote it"
        )
    elif isinstance(scalar, int):
        return str(scalar)
    elif isinstance(scalar, float):
        notes.config(value, f"{what} is the number {scalar}", hint="quote it to keep it as typed")
    return None


def read_filled_text(value: Value, notes: Notes, what: str) -> str | None:
    """Read a text that is not blank."""
    text = read_text(value, notes, what)
    if text is not None and not text.strip():
        notes.config(value, f"{what} is empty")
    return text if text and text.strip() else None


def read_name(value: Value, notes: Notes, what: str) -> str | None:
    """Read a label or component name: letters and digits of any script, `_`, `-` and `.`."""
    text = read_text(value, notes, what)
    return None if text is None else check_name(text, value, notes, what)


def check_name(text: str, value: Value, notes: Notes, what: str) -> str | None:
    """Return the name in its normal form; note what is not a name and return None."""
    name = unicodedata.normalize("NFC", text.strip())
    problem = name_problem(name)
    if problem:
        notes.config(value, f"{what} {problem[0]}", hint=problem[1])
    return None if problem else name


def name_problem(name: str) -> tuple[str, str] | None:
    """Return what keeps a text from being a name, and a hint; None for a name in its normal form."""
    bad = [c for c in name if not (c.isalnum() or c in NAME_EXTRA or unicodedata.combining(c))]
    if not name:
        return "is empty", ""
    if bad:
        shown = repr(bad[0]) if bad[0].isprintable() else f"the character U+{ord(bad[0]):04X}"
        return f"{shorten(name)!r} has {shown} in it", "use letters, digits, '_', '-' and '.'"
    if len(name) > 64:
        return f"has {len(name)} characters", "use at most 64"
    return None


def read_int(value: Value, notes: Notes, what: str, *, minimum: int = 0, maximum: int = MAX_NUMBER) -> int | None:
    """Read a whole number from `minimum` to `maximum`."""
    scalar = _scalar(value, notes, what)
    if scalar is None:
        return None
    text = str(scalar).strip()
    digits = text.removeprefix("-")
    if isinstance(scalar, bool | float) or not (digits.isascii() and digits.isdigit()):
        foreign = not digits.isascii() and digits.isdecimal() and len(digits) <= 18
        hint = f"write it with the digits 0 to 9: {int(text)}" if foreign else ""
        notes.config(value, f"{what} must be a whole number, not {describe(value)}", hint)
        return None
    number = int(text) if len(text) <= 18 else minimum - 1 if text.startswith("-") else maximum + 1
    if number < minimum:
        notes.config(value, f"{what} is {shorten(text, 24)}, and must be at least {minimum}")
        return None
    if number > maximum:
        notes.config(value, f"{what} is {shorten(text, 24)}, and may be at most {maximum}", hint=pair_hint(scalar))
        return None
    return number


def read_bool(value: Value, notes: Notes, what: str) -> bool | None:
    """Read a boolean: `true` or `false`, or one of the older spellings."""
    scalar = _scalar(value, notes, what)
    if scalar is None or isinstance(scalar, bool):
        return scalar
    found = FLAGS.get(str(scalar).lower())
    if found is None:
        notes.config(value, f"{what} must be true or false, not {describe(value)}")
    return found


def read_rank_list(value: Value, notes: Notes, what: str) -> tuple[int, ...] | None:
    """Read ranks as text (`0-3,5`), as a number, or as a list of either: ascending, each once."""
    parts = read_list(value, notes, what) if value.kind == "list" else [value]
    if not parts and value.kind == "list" and value.broken is None:
        notes.config(value, f"{what} is an empty list")
    ranges: list[tuple[RankRange, Value]] = []
    for part in parts:
        text = read_text(part, notes, what)
        if text is None:
            return None
        try:
            ranges += [(item, part) for item in read_ranks(text)]
        except SyntaxProblem as problem:
            notes.config(part, f"{what}: {problem.message}", problem.hint, problem.span)
            return None
    for (before, _), (now, part) in pairwise(ranges):
        if now.first <= before.last:
            notes.config(part, f"{what}: {now} comes after {before}", hint="ranks ascend, and none is named twice")
            return None
    count = sum(len(item) for item, _ in ranges)
    if count > _MAX_LISTED_RANKS:
        notes.config(value, f"{what} names {count} ranks, and may name {_MAX_LISTED_RANKS}")
        return None
    return tuple(rank for item, _ in ranges for rank in item.as_range()) or None


@dataclass(frozen=True, slots=True)
class PlacementText:
    """A placement as it was typed: one text, or a joined list of texts, and the place of each."""

    value: Value
    text: str
    parts: tuple[tuple[int, Value], ...]

    def where(self, span: tuple[int, int] | None = None) -> Where:
        """Return the place of a part of the text."""
        if span is None:
            return self.value.where()
        start, part = [item for item in self.parts if item[0] <= span[0]][-1]
        return part.where((span[0] - start, span[1] - start))


def read_placement(value: Value, notes: Notes, what: str) -> tuple[PlacementText, tuple[Segment, ...]] | None:
    """Read a placement string, number or list of segments: the text as typed, and its segments."""
    if value.kind == "mapping":
        notes.config(value, f"{what}: a placement is ranks such as 0-7, not a mapping", hint=_SPACE_HINT)
        return None
    listed = value.kind == "list"
    items = read_list(value, notes, f"{what}: the placement") if listed else [value]
    texts = [read_text(item, notes, f"{what}: the placement") for item in items]
    if None in texts:
        return None
    parts: list[tuple[int, Value]] = []
    text = ""
    for item, part in zip(items, texts, strict=True):
        text += "," if parts else ""
        parts.append((len(text), item))
        text += str(part)
    source = PlacementText(value, text, tuple(parts) or ((0, value),))
    try:
        return source, read_segments(text)
    except SyntaxProblem as problem:
        where = source.where(problem.span)
        notes.placement(Problem(message=f"{what}: {problem.message}", hint=problem.hint, where=where))
        return None


def describe(value: Value) -> str:
    """Describe a value in a message."""
    if value.kind != "scalar":
        return f"a {value.kind}"
    if value.broken is not None:
        return "a value that cannot be read"
    scalar = value.scalar
    return "nothing" if scalar is None else shorten(repr(scalar), 42)


def known_hint(name: str, known: Iterable[str]) -> str:
    """Return a hint with the name that was probably meant, or with all that are known."""
    close, there = did_you_mean(name, known), join_words([repr(item) for item in sorted(known)])
    return f"did you mean {close!r}?" if close else there and f"it has {there}"


def pair_hint(scalar: object) -> str:
    """Return a hint if a number may have been a pair `a:b` that YAML 1.1 read in base 60."""
    if isinstance(scalar, bool) or not isinstance(scalar, int) or scalar < 60:
        return ""
    return f"YAML 1.1 reads an unquoted {scalar // 60}:{scalar % 60} as {scalar}: if that was meant, quote it"


def outside(ranks: list[int], what: str, nodes: int, limit: str) -> str:
    """Return the message for node ranks that do not exist."""
    word = "rank" if len(ranks) == 1 else "ranks"
    there = "the only node rank is 0" if nodes == 1 else f"node ranks are 0-{nodes - 1}"
    return f"{what} names node {word} {shorten(format_ranks(ranks))}, but {limit}, so {there}"


def _is_kind(value: Value, kind: str, notes: Notes, what: str) -> bool:
    if value.broken is not None:
        notes.take(value.broken)
    elif value.kind != kind:
        wanted = "single value" if kind == "scalar" else kind
        notes.config(value, f"{what} must be a {wanted}, not {describe(value)}")
    return value.broken is None and value.kind == kind


def _scalar(value: Value, notes: Notes, what: str) -> Scalar:
    if not _is_kind(value, "scalar", notes, what):
        return None
    if value.scalar is None:
        notes.config(value, f"{what} has no value")
    return value.scalar
