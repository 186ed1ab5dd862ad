"""Kinds of value that a field can have: how the readers read each one, and how a JSON Schema describes it.

A schema knows shapes and never the hardware: what it refuses, the readers refuse as well, and they refuse more. One
schema describes all forms of a value (`"type": ["string", "array", …]`) instead of listing alternatives, so that an
editor can say what is wrong with the form that the user began. Any value may be an interpolation.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from roost.config import reading
from roost.config.document import Value
from roost.config.reading import Notes, describe, read_fields, read_filled_text, read_list, read_text
from roost.text import shorten

Schema = dict[str, Any]

LEAST_SHARE = 0.0001
"""Ray counts no finer than this."""
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_FROM_PLAN = "it follows from the plan: place the workers differently"
_REFERENCE = r"\$\{"
_SCALARS = ("string", "integer", "number", "boolean")
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*[.:][A-Za-z_]\w*")
_DECIMAL = r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE]-?[0-9]+)?"


class Reads(Protocol):
    """The kind of value of a field: `read` returns None where it noted a mistake."""

    @property
    def read(self) -> Callable[[Value, Notes, str], Any]: ...
    @property
    def schema(self) -> Callable[[], Schema]: ...


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value: one function reads it, another describes it."""

    read: Callable[[Value, Notes, str], Any]
    schema: Callable[[], Schema]


def typed(*types: str, pattern: str = "", error: str = "", **more: object) -> Schema:
    """Return the schema of these types; text that neither fits the pattern nor interpolates shows `error`."""
    found: Schema = {"type": list(types) if len(types) > 1 else types[0], **more}
    if pattern:
        return found | {"pattern": f"{pattern}|{_REFERENCE}", "patternErrorMessage": error}
    # Text in place of a list or a mapping can only interpolate one.
    return found | {"pattern": _REFERENCE} if {"array", "object"} & set(types) else found


def items(of: Reads, *, least: int = 0) -> Kind:
    """A list; it is read as the values in it."""
    return Kind(read_list, lambda: typed("array", "string", items=of.schema(), minItems=least))


def by_name(of: Reads, *, least: int = 0) -> Kind:
    """A mapping from names, or several with commas between them; it is read as its fields."""
    return Kind(
        read_fields,
        lambda: typed("object", "string", propertyNames=_NAMES, additionalProperties=of.schema(), minProperties=least),
    )


def whole(minimum: int = 0, maximum: int = reading.MAX_NUMBER) -> Kind:
    """A whole number, which may be quoted."""
    digits = r"^\s*0*[1-9][0-9]*\s*$" if minimum else r"^\s*-?[0-9]+\s*$"
    error = f"write a whole number from {minimum} on"
    return Kind(
        lambda value, notes, what: reading.read_int(value, notes, what, minimum=minimum, maximum=maximum),
        lambda: typed("integer", "string", pattern=digits, error=error, minimum=minimum, maximum=maximum),
    )


def name(taken: Callable[[], Iterable[str]], error: str) -> Kind:
    """A name that is not one of those taken, which its reader refuses with a hint of its own."""
    return Kind(
        reading.read_name,
        lambda: typed(*_SCALARS, pattern=rf"^(?!\s*({_any(sorted(taken()))})\s*$)\s*{_NAME}\s*$", error=error),
    )


def choice(known: Callable[[], Iterable[str]], noun: str) -> Kind:
    """One of the words that are known when the file is read."""

    def read(value: Value, notes: Notes, what: str) -> str | None:
        text = read_text(value, notes, what)
        if text is not None and text not in known():
            notes.config(value, f"{noun} {shorten(text)!r} is not known", hint=reading.known_hint(text, known()))
            return None
        return text

    return Kind(read, lambda: typed("string", pattern=rf"^({_any(known())})$", error=f"known are {', '.join(known())}"))


def variables(taken: Callable[[], Iterable[str]], *, lists: bool = False) -> Kind:
    """Environment variables by name, none of them `taken`; with `lists`, also a list of such mappings."""

    def read(value: Value, notes: Notes, what: str) -> dict[str, str]:
        found: dict[str, str] = {}
        seen: set[str] = set()
        group = what.removesuffix(": env_vars")
        for part in read_list(value, notes, what) if lists and value.kind == "list" else [value]:
            for variable, entry in read_fields(part, notes, what).items():
                if variable in seen:
                    notes.config(entry.key, f"{what} names {variable!r} twice")
                elif problem := variable_problem(variable, "", taken()):
                    notes.config(entry.key, f"{group}: {problem[0]}", hint=problem[1])
                elif (text := _variable_text(entry.value, notes, f"{group}: the variable {variable}")) is not None:
                    if problem := variable_problem(variable, text):
                        notes.config(entry.value, f"{group}: {problem[0]}", hint=problem[1])
                    found[variable] = text
                seen.add(variable)
        return found

    def schema() -> Schema:
        one = typed("object", "string") | {
            "propertyNames": {
                "pattern": rf"^(?!({_any(sorted(taken()))})$){VARIABLE.pattern}$",
                "patternErrorMessage": "this cannot be set as an environment variable here",
            },
            "additionalProperties": typed(*_SCALARS),
            "description": "Environment variables for the workers, by name; a number is taken as it is typed.",
        }
        return one | {"type": ["object", "array", "string"], "items": one} if lists else one

    return Kind(read, schema)


def variable_problem(variable: object, value: object, taken: Iterable[str] = ()) -> tuple[str, str] | None:
    """Return what keeps a worker from getting an environment variable, and a hint; None if nothing does."""
    if not isinstance(variable, str) or not VARIABLE.fullmatch(variable):
        return f"{shorten(str(variable))!r} cannot name an environment variable", ""
    if variable in taken:
        return f"{variable} is set by Roost for each worker and cannot be set here", _FROM_PLAN
    if isinstance(value, bool):
        return f"the variable {variable} is the boolean {value}", f'quote it: "{str(value).lower()}"'
    if not isinstance(value, str):
        return f"the variable {variable} is {shorten(repr(value), 42)}, not text", f"write {str(value)!r}"
    return (f"the variable {variable} has a zero byte in it", "") if "\0" in value else None


def share_problem(share: object) -> str:
    """Return what a share must be if this is not one, else an empty text."""
    is_number = isinstance(share, int | float) and not isinstance(share, bool)
    is_share = is_number and LEAST_SHARE <= share <= 1  # type: ignore[operator]
    return "" if is_share else f"it is a part of an accelerator, from {LEAST_SHARE:g} to 1"


def _variable_text(value: Value, notes: Notes, what: str) -> str | None:
    """A file's own spelling of a number or boolean is text; in a dict, a boolean has no one spelling."""
    if value.broken is None and value.kind == "scalar":
        if isinstance(value.scalar, float):
            return repr(value.scalar)
        if value.scalar is None:
            notes.config(value, f"{what} has no value", hint='write "" for an empty one')
            return None
    return read_text(value, notes, what)


def _read_share(value: Value, notes: Notes, what: str) -> float | None:
    if value.broken is not None:
        notes.take(value.broken)
        return None
    text = str(value.scalar).strip()
    share = float(text) if re.fullmatch(_DECIMAL, text) else None
    if problem := share_problem(share):
        notes.config(value, f"{what} is {describe(value)}: {problem}")
        return None
    return share


def _reads(
    read: Callable[[Value, Notes, str], str | None], convert: Callable[[str], Any], message: str, hint: str
) -> Any:
    """Return a reader of text that `convert` turns into a value, or into None if it has the wrong form."""

    def reader(value: Value, notes: Notes, what: str) -> Any:
        text = read(value, notes, what)
        found = None if text is None else convert(text)
        if text is not None and found is None:
            notes.config(value, f"{what}{message.format(describe(value))}", hint=hint)
        return found

    return reader


def _read_modules(value: Value, notes: Notes, what: str) -> tuple[str, ...]:
    found = [_read_module(item, notes, what) for item in read_list(value, notes, what) or ()]
    return tuple(dict.fromkeys(name for name in found if name))


def _read_labels(value: Value, notes: Notes, what: str) -> dict[str, Value] | None:
    """The labels of node groups, each with the value that names it."""
    found: dict[str, Value] = {}
    for part in read_list(value, notes, what) if value.kind == "list" else [value]:
        text = read_text(part, notes, what)
        if text is None:
            return None
        for item in text.split(","):
            label = reading.check_name(item, part, notes, what)
            if label in found:
                notes.config(part, f"{what} names {label!r} twice")
            if label is None or label in found:
                return None
            found[label] = part
    if not found:
        notes.config(value, f"{what} is an empty list")
    return found or None


def _read_texts(value: Value, notes: Notes, what: str) -> dict[str, str]:
    texts = (
        (key, read_text(item.value, notes, f"{what}: {key!r}")) for key, item in read_fields(value, notes, what).items()
    )
    return {key: text for key, text in texts if text is not None}


def _bytes(text: str) -> int | None:
    """Convert bytes, or a number with a unit: `80GiB`, `512 GB`."""
    match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2] not in UNITS:
        return None
    return int(float(match[1]) * UNITS[match[2]]) if "." in match[1] else int(match[1]) * UNITS[match[2]]


def _is_null(value: Value) -> bool:
    return value.broken is None and value.kind == "scalar" and value.scalar is None


def _any(words: Iterable[str]) -> str:
    return "|".join(re.escape(word) for word in words)


def _not_in(extra: str) -> str:
    """For a class of characters: the ASCII punctuation that is not in `extra`. The readers check what is not ASCII."""
    return "".join(f"\\{c}" if c in r"\]^-[" else c for c in string.punctuation if c not in extra)


_NAME = rf"[^\s{_not_in(reading.NAME_EXTRA)}]+"
_IDENTIFIER = rf"[A-Za-z_][^\s{_not_in('_')}]*"
_RANGE = r"[0-9]+(\s*-\s*[0-9]+)?"
_SEGMENT = rf"{_RANGE}(\s*:\s*{_RANGE})?"
# A pattern in a schema has no flags, so each letter is written in both cases.
_FLAG = "|".join("".join(f"[{c}{c.upper()}]" for c in word) for word in reading.FLAGS)


_NAMES = {
    "pattern": rf"^\s*{_NAME}\s*(,\s*{_NAME}\s*)*$",
    "patternErrorMessage": "a name has letters, digits, '_', '-' and '.' in it",
}


def _one_or_several(*types: str, examples: list[Any], **one: Any) -> Schema:
    """Return the schema of a value, or of a list of such values."""
    return typed(*types, "array", **one) | {"items": typed(*types, **one), "minItems": 1, "examples": examples}


TEXT = Kind(read_text, lambda: typed(*_SCALARS))
FILLED_TEXT = Kind(read_filled_text, lambda: typed(*_SCALARS) | {"pattern": r"\S"})
OPTIONAL_TEXT = Kind(
    lambda value, notes, what: None if _is_null(value) else read_filled_text(value, notes, what),
    lambda: typed(*_SCALARS, "null") | {"pattern": r"\S"},
)
TEXTS = Kind(_read_texts, lambda: typed("object", "string", additionalProperties=typed(*_SCALARS, description="Text.")))
PLAIN_LIST = Kind(partial(reading.read_plain, kind="list"), lambda: typed("array", "string"))
PLAIN_MAPPING = Kind(partial(reading.read_plain, kind="mapping"), lambda: typed("object", "string"))
FLAG = Kind(
    reading.read_bool,
    lambda: typed("boolean", "string", pattern=f"^({_FLAG})$", error="write true or false", default=False),
)
NODE_RANKS = Kind(
    reading.read_rank_list,
    lambda: _one_or_several(
        *("string", "integer"),
        pattern=rf"^\s*(all|{_RANGE}(\s*,\s*{_RANGE})*)\s*$",
        error="write node ranks such as 0-3,5, or all",
        minimum=0,
        examples=[0, "0-3", "all"],
    ),
)
PLACEMENT = Kind(
    reading.read_placement,
    lambda: _one_or_several(
        *("string", "integer"),
        pattern=rf"^\s*(all(\s*:\s*{_RANGE})?|{_SEGMENT}(\s*,\s*{_SEGMENT})*)\s*$",
        error="write ranks such as 0-7, 0-3:0-7 (without a space) or all",
        minimum=0,
        examples=["0-7", "0-3:0-7", "all"],
    ),
)
LABELS = Kind(
    _read_labels,
    lambda: _one_or_several(
        *_SCALARS,
        pattern=_NAMES["pattern"],
        error="write the label of a node group, or several with commas",
        examples=["cluster", "node"],
    ),
)
TARGET = Kind(
    _reads(
        read_filled_text,
        lambda text: text.replace(":", ".") if _TARGET.fullmatch(text) else None,
        ": {} cannot be imported",
        "write module.Name",
    ),
    lambda: typed("string", pattern=rf"^{_IDENTIFIER}(\.{_IDENTIFIER})*[.:]{_IDENTIFIER}$", error="write module.Name"),
)
_read_module = _reads(
    read_filled_text,
    lambda text: text if _MODULE.fullmatch(text) else None,
    ": {} is not the name of a module",
    "write it as an import does: torch, transformers.models",
)
MODULES = Kind(
    _read_modules,
    lambda: typed(
        *("array", "string"),
        items=typed("string", pattern=rf"^{_IDENTIFIER}(\.{_IDENTIFIER})*$", error="write the name of a module"),
    ),
)
SHARE = Kind(
    _read_share,
    lambda: typed(
        *("number", "string"),
        pattern=rf"^\s*{_DECIMAL}\s*$",
        error=f"write a part of an accelerator, from {LEAST_SHARE:g} to 1",
        minimum=LEAST_SHARE,
        maximum=1,
        examples=[0.5],
    ),
)
MEMORY = Kind(
    _reads(read_text, _bytes, " is {}", "write bytes, or a unit: 80GiB, 512GB"),
    lambda: typed(
        *("string", "integer", "number"),
        pattern=rf"^\s*[0-9]+(\.[0-9]+)?\s*({_any(unit for unit in UNITS if unit)})?\s*$",
        error="write bytes, or a unit: 80GiB, 512GB",
        minimum=0,
        examples=["80GiB"],
    ),
)
DEVICE = Kind(
    _reads(
        read_filled_text,
        lambda text: text if re.fullmatch(r"[\w.:/-]+", text) else None,
        " is {}",
        "an index such as 3, or a UUID",
    ),
    lambda: typed(*_SCALARS, pattern=rf"^[^\s{_not_in('_.:/-')}]+$", error="write an index such as 3, or a UUID"),
)
