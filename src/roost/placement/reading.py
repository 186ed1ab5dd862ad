"""Typed reading of a document: every mistake is noted and reading goes on, so that all are shown at once."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from roost.errors import ConfigError, PlacementError, Problem, RoostError, said
from roost.placement.document import Value
from roost.placement.ranks import RankRange, Segment, SyntaxProblem, count_ranks, read_ranks, read_segments

_MAX_LISTED_RANKS = 1_000_000
_NAME_EXTRA = "_-."


class Notes:
    """The mistakes found so far.

    A broken placement rule makes the whole report a PlacementError, anything else a ConfigError.
    """

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self._placement = False

    def config(self, value: Value, message: str, hint: str = "", span: tuple[int, int] | None = None) -> None:
        """Note something that cannot be read or is not known."""
        self.problems.append(Problem(message=message, hint=hint, where=value.where(span)))

    def placement(self, *problems: Problem) -> None:
        """Note broken placement rules."""
        self.problems.extend(problems)
        self._placement = True

    def take(self, error: RoostError) -> None:
        """Note everything that an error says."""
        self.problems.extend(error.problems)
        self._placement = self._placement or isinstance(error, PlacementError)

    def raise_if_any(self) -> None:
        """Raise one error with all that was noted, in the order of the file."""
        if not self.problems:
            return
        unique = list(dict.fromkeys(self.problems))
        unique.sort(key=lambda problem: problem.where.line if problem.where else 0)
        raise (PlacementError if self._placement else ConfigError)(unique)


def read_mapping(
    value: Value, notes: Notes, what: str, known: Iterable[str] | None = None, required: Iterable[str] = ()
) -> dict[str, Value]:
    """A mapping's values by key; unknown keys, keys that are no text and keys named twice are noted."""
    found: dict[str, Value] = {}
    if value.kind != "mapping":
        notes.config(value, f"{what} must be a mapping, not {describe(value)}")
        return found
    known = None if known is None else list(known)
    try:
        pairs = list(value.items())
    except ConfigError as error:
        notes.take(error)
        return found
    lines: dict[str, int] = {}
    for key, item in pairs:
        name = read_text(key, notes, f"a key of {what}")
        if name is None:
            continue
        if name in found:
            first = f", first in line {lines[name]}" if lines[name] else ""
            notes.config(key, f"{what} names {name!r} twice{first}")
            continue
        lines[name] = key.where().line
        found[name] = item
        if known is not None and name not in known:
            notes.config(key, f"{what} has no key {name!r}", hint=nearest(name, known))
    for name in required:
        if name not in found:
            notes.config(value, f"{what} lacks {name!r}")
    return {name: item for name, item in found.items() if known is None or name in known}


def read_list(value: Value, notes: Notes, what: str) -> list[Value]:
    """The elements of a list."""
    if value.kind != "list":
        notes.config(value, f"{what} must be a list, not {describe(value)}")
        return []
    try:
        return list(value.elements())
    except ConfigError as error:
        notes.take(error)
        return []


def read_text(value: Value, notes: Notes, what: str) -> str | None:
    """A text; whole numbers are taken as the text they were typed as, such as a label `4090`."""
    scalar = _scalar(value, notes, what)
    if isinstance(scalar, str):
        return scalar
    if isinstance(scalar, bool):
        typed = "yes, on or true" if scalar else "no, off or false"
        notes.config(value, f"{what} is the boolean {scalar}", hint=f"YAML 1.1 reads an unquoted {typed} so: quote it")
    elif isinstance(scalar, int):
        return str(scalar)
    elif isinstance(scalar, float):
        notes.config(value, f"{what} is the number {scalar}", hint="quote it to keep it as it was typed")
    return None


def read_name(value: Value, notes: Notes, what: str) -> str | None:
    """A label or component name: letters and digits of any script, `_`, `-` and `.`."""
    text = read_text(value, notes, what)
    return None if text is None else check_name(text, value, notes, what)


def check_name(text: str, value: Value, notes: Notes, what: str) -> str | None:
    """The name in its normal form, or None with a note where it is none."""
    name = unicodedata.normalize("NFC", text.strip())
    bad = [c for c in name if not (c.isalnum() or c in _NAME_EXTRA or unicodedata.combining(c))]
    if not name:
        notes.config(value, f"{what} is empty")
        return None
    if bad:
        shown = bad[0] if bad[0].isprintable() else f"U+{ord(bad[0]):04X}"
        notes.config(value, f"{what} {name!r} has {shown!r} in it", hint="use letters, digits, '_', '-' and '.'")
        return None
    if len(name) > 64:
        notes.config(value, f"{what} has {len(name)} characters", hint="use at most 64")
        return None
    return name


def read_int(value: Value, notes: Notes, what: str, *, minimum: int = 0, maximum: int = 10_000_000) -> int | None:
    """A whole number from `minimum` to `maximum`."""
    scalar = _scalar(value, notes, what)
    if scalar is None:
        return None
    text = str(scalar).strip()
    digits = text.removeprefix("-")
    if isinstance(scalar, bool | float) or not (digits.isascii() and digits.isdigit()):
        notes.config(value, f"{what} must be a whole number, not {describe(value)}")
        return None
    number = int(text) if len(text) <= 18 else maximum + 1
    if number < minimum:
        notes.config(value, f"{what} is {number}, and must be at least {minimum}")
        return None
    if number > maximum:
        notes.config(value, f"{what} is {text[:24]}, and may be at most {maximum}", hint=pair_hint(scalar))
        return None
    return number


def read_bool(value: Value, notes: Notes, what: str) -> bool | None:
    """A boolean: `true` or `false`, or one of the older spellings."""
    scalar = _scalar(value, notes, what)
    if scalar is None or isinstance(scalar, bool):
        return scalar
    text = str(scalar).lower()
    if text in ("true", "yes", "on"):
        return True
    if text in ("false", "no", "off"):
        return False
    notes.config(value, f"{what} must be true or false, not {describe(value)}")
    return None


def read_rank_list(value: Value, notes: Notes, what: str) -> tuple[int, ...] | None:
    """Ranks as text (`0-3,5`), as a number, or as a list of either: ascending, each once."""
    parts = read_list(value, notes, what) if value.kind == "list" else [value]
    if not parts and value.kind == "list":
        notes.config(value, f"{what} is an empty list")
    ranges: list[RankRange] = []
    for part in parts:
        text = read_text(part, notes, what)
        if text is None:
            return None
        try:
            ranges += read_ranks(text)
        except SyntaxProblem as problem:
            notes.config(part, f"{what}: {problem.message}", problem.hint, problem.span)
            return None
    if count_ranks(ranges) > _MAX_LISTED_RANKS:
        notes.config(value, f"{what} names {count_ranks(ranges)} ranks, and may name {_MAX_LISTED_RANKS}")
        return None
    ranks = [rank for item in ranges for rank in item.as_range()]
    if ranks != sorted(set(ranks)):
        notes.config(value, f"{what} must ascend and name each rank once")
        return None
    return tuple(ranks) or None


def read_placement(value: Value, notes: Notes, what: str) -> tuple[str, tuple[Segment, ...]] | None:
    """A placement string, number or list of segments: the text as typed, and what it says."""
    if value.kind == "list":
        texts = [read_text(part, notes, what) for part in read_list(value, notes, what)]
        text = None if None in texts else ",".join(str(item) for item in texts)
    elif value.kind == "mapping":
        notes.config(value, f"{what} must be ranks such as 0-7, not a mapping", hint="an unquoted '0: 3' is one")
        return None
    else:
        text = read_text(value, notes, what)
    if text is None:
        return None
    try:
        return text, read_segments(text)
    except SyntaxProblem as problem:
        where = value.where(problem.span if value.kind == "scalar" else None)
        notes.placement(Problem(message=f"{what}: {problem.message}", hint=problem.hint, where=where))
        return None


def describe(value: Value) -> str:
    """A value in a few words, for messages."""
    if value.kind != "scalar":
        return f"a {value.kind}"
    try:
        scalar = value.scalar
    except ConfigError:
        return "an object"
    if scalar is None:
        return "nothing"
    shown = repr(scalar)
    return shown if len(shown) <= 42 else shown[:39] + "...'"


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint that names the key that was probably meant."""
    import difflib  # only a mistake needs it

    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"it has {said([repr(item) for item in known])}"


def pair_hint(scalar: object) -> str:
    """A hint where a number may have been a pair `a:b` that YAML 1.1 read in base 60."""
    if isinstance(scalar, bool) or not isinstance(scalar, int) or scalar < 60:
        return ""
    return f"YAML 1.1 reads an unquoted {scalar // 60}:{scalar % 60} as {scalar}: if that was meant, quote it"


def _scalar(value: Value, notes: Notes, what: str) -> str | int | float | bool | None:
    if value.kind != "scalar":
        notes.config(value, f"{what} must be a single value, not {describe(value)}")
        return None
    try:
        scalar = value.scalar
    except ConfigError as error:
        notes.take(error)
        return None
    if scalar is None:
        notes.config(value, f"{what} has no value")
    return scalar
