r"""Texts of a script of which a part may be unknown.

What only the environment or a program knows is a mark within a text, `\ue000N\ue001`, where N counts the `Unknown`s of
the script. A mark travels through assignments like any other text, so that in the end each argument says which
variables it depends on. `\ue002NAME\ue003` is `${NAME:-}` of a variable that nobody gave: empty, unless the script ends
where it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from roost.errors import Where

MARK = re.compile("\ue000(\\d+)\ue001")
EMPTY = re.compile("\ue002(\\w+)\ue003")


class Token(NamedTuple):
    """One argument: its text, where it is written, and the variables that decide whether it is there at all."""

    text: str
    file: ScriptFile
    start: int
    stop: int
    maybe: tuple[str, ...] = ()

    def where(self, key: str = "") -> Where:
        """Return the place of the argument."""
        return self.file.where(self.start, self.stop, key, self.text)


@dataclass(frozen=True, slots=True)
class ScriptFile:
    """A script, or a file that it sources."""

    name: str
    text: str

    def where(self, start: int, stop: int, key: str, word: str = "") -> Where:
        """Return a place in the text; a word within a longer quoted text is looked for there."""
        within = self.text.find(word, start, stop) if word else -1
        start = within if within >= 0 else start
        stop = start + len(word) if within >= 0 else stop
        first = self.text.rfind("\n", 0, start) + 1
        line = self.text[first:].partition("\n")[0].rstrip("\r")
        number = self.text.count("\n", 0, start) + 1
        length = max(1, min(stop, first + len(line)) - start)
        return Where(key=key, file=self.name, line=number, text=line, offset=start - first, length=length)


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value that reading cannot find: the variables to ask for, why, and what it may be."""

    names: tuple[str, ...]
    why: str
    options: tuple[str, ...] = ()
    assumed: str | None = None
    """Its value in a test for emptiness: a variable that nobody gave counts as unset there."""
    owned: bool = False
    """Whether it is named after the variable that holds it, since nothing else can be asked for."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command that the script would start."""

    words: tuple[Token, ...]
    maybe: tuple[str, ...]
    """The variables that decide whether it is started."""
    start: Token
    """Where it is written."""


class Unsure(NamedTuple):
    """A condition that depends on something unknown; `likely` is how it ends for variables that nobody gave."""

    names: tuple[str, ...]
    likely: bool | None = None


Status = bool | Unsure


@dataclass(slots=True)
class Script:
    """A script as it was walked: what it would start, and what is unknown in it."""

    commands: list[Command] = field(default_factory=list)
    unknowns: list[Unknown] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    """The given variables that the script reads or sets."""
    ignored: dict[str, str] = field(default_factory=dict)
    """The given variables that the script sets itself, with its own values."""
    passes_arguments: bool = False
    literals: dict[str, list[str]] = field(default_factory=dict)
    """The text with which the script compares an unknown variable."""
    documents: dict[str, str] = field(default_factory=dict)
    """The files that it writes from here-documents: their names, and what is in them."""

    def unknowns_in(self, text: str) -> list[Unknown]:
        """Return what a text depends on."""
        return [self.unknowns[int(found)] for found in MARK.findall(text)]

    def names_in(self, text: str) -> tuple[str, ...]:
        """Return the variables that a text depends on."""
        return tuple(dict.fromkeys(name for item in self.unknowns_in(text) for name in item.names))

    def shown(self, text: str) -> str:
        """Return a text with names or question marks in place of what is unknown."""
        return MARK.sub(lambda found: f"${{{self.unknowns[int(found[1])].names[0]}}}"
                         if self.unknowns[int(found[1])].names else "?", text)  # fmt: skip


def has_mark(text: str) -> bool:
    """Tell whether a part of a text is unknown."""
    return "\ue000" in text


def clean(text: str) -> str:
    """Return the text of a file without signs that could be taken for marks."""
    return re.sub("[\ue000-\ue003]", "?", text).replace("\r\n", "\n")


def either(one: Status, other: Status) -> Status:
    """Return whether one of two conditions holds."""
    if one is True or other is True:
        return True
    if isinstance(one, Unsure) and isinstance(other, Unsure):
        both = (one.likely, other.likely)
        likely = True if True in both else False if both == (False, False) else None
        return Unsure(tuple(dict.fromkeys((*one.names, *other.names))), likely)
    return one if isinstance(one, Unsure) else other


def opposite(status: Status) -> Status:
    """Return whether a condition does not hold."""
    if isinstance(status, bool):
        return not status
    return Unsure(status.names, None if status.likely is None else not status.likely)
