r"""Tables of fields: each section of a file has one, next to its reader, and `schema` makes JSON Schemas of the same.

>>> from roost.config.document import PlainValue
>>> from roost.config.values import TEXT, whole
>>> table = Table("One node.", Field("name", TEXT, "Its name."), Field("cpus", whole(), "How many CPUs it has."))
>>> notes = Notes()
>>> node = table.read(PlainValue({"name": "head", "cpu": 8}), notes, "a node")
>>> node.read("name"), node.read("cpus", 0), str(notes.problems[0])
('head', 0, "cpu: a node has no key 'cpu'\n  hint: did you mean 'cpus'?")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roost.config.document import Value
from roost.config.reading import Notes, Pair, known_hint, read_fields
from roost.config.values import Reads, Schema, typed
from roost.text import did_you_mean, shorten


@dataclass(frozen=True, slots=True)
class Field:
    """A key that a section may have: the kind of its value, and what editors say about it unless the kind says it."""

    name: str
    kind: Reads
    about: str = ""
    required: bool = False
    examples: tuple[Any, ...] = ()

    def schema(self) -> Schema:
        """Describe the field as JSON Schema."""
        about = {"description": self.about} if self.about else {}
        return self.kind.schema() | about | ({"examples": list(self.examples)} if self.examples else {})


class Table:
    """The fields of a section. Where there is a `short` form, such a value may be written in place of the mapping.

    `naming` is how messages name a field; `is_open` says that other keys belong to the user; `otherwise` is the hint
    for an unknown key that resembles none; `elsewhere` says of keys of other programs what they are for.
    """

    def __init__(
        self,
        about: str,
        *fields: Field,
        short: Reads | None = None,
        naming: str = "{what}: {name}",
        is_open: bool = False,
        otherwise: str = "",
        elsewhere: Mapping[str, str] | None = None,
    ) -> None:
        self.about = about
        self.fields: dict[str, Field] = {field.name: field for field in fields}
        self.short = short
        self.naming = naming
        self.is_open = is_open
        self.otherwise = otherwise
        self.elsewhere = elsewhere or {}

    @property
    def required(self) -> list[str]:
        """The names of the required fields."""
        return [field.name for field in self.fields.values() if field.required]

    def optional(self, *, is_open: bool = False) -> Table:
        """Return the same table with no field required."""
        fields = [Field(field.name, field.kind, field.about, False, field.examples) for field in self.fields.values()]
        return Table(self.about, *fields, naming=self.naming, is_open=is_open, otherwise=self.otherwise)

    def read(self, value: Value, notes: Notes, what: str) -> Section:
        """Open a mapping to read it field by field; note the keys that are unknown or missing."""
        noted = len(notes.problems)
        pairs = read_fields(value, notes, what)
        section = Section(self, pairs, notes, what)
        if not pairs and len(notes.problems) > noted:
            return section
        meant: set[str | None] = set()
        for name, pair in pairs.items():
            if name in self.elsewhere and name not in self.fields:
                message = f"{what} has no key {name!r}: it is for {self.elsewhere[name]}, which Roost does not have"
                notes.config(pair.key, message, hint="leave it out: it decides no placement")
            elif name not in self.fields and not self.is_open:
                close = did_you_mean(name, self.fields)
                meant.add(close)
                hint = self.otherwise if self.otherwise and close is None else known_hint(name, self.fields)
                notes.config(pair.key, f"{what} has no key {shorten(name)!r}", hint=hint)
        for name in self.required:
            if name not in pairs and name not in meant:
                notes.config(value, f"{what} lacks {name!r}")
        return section

    def schema(self) -> Schema:
        """Describe the mapping, and its short form, as one JSON Schema."""
        found = typed("object", "string", properties={name: field.schema() for name, field in self.fields.items()})
        if not self.is_open:
            found["additionalProperties"] = False
        if self.required:
            found["required"] = self.required
        if self.short:
            short = self.short.schema()
            types = [short["type"]] if isinstance(short["type"], str) else short["type"]
            found |= short | {"type": [*types, "object"]}
        return found | {"description": self.about}


@dataclass(frozen=True, slots=True)
class Section:
    """A mapping of a document, with the table to read it by."""

    table: Table
    pairs: Mapping[str, Pair]
    notes: Notes
    what: str

    def __contains__(self, name: str) -> bool:
        return name in self.pairs

    def value(self, name: str) -> Value:
        """Return the value of a field as it is written."""
        return self.pairs[name].value

    def read(self, name: str, default: Any = None, what: str = "") -> Any:
        """Read a field; `default` where it is absent or where a mistake is noted."""
        if name not in self.pairs:
            return default
        what = what or self.table.naming.format(what=self.what, name=name)
        found = self.table.fields[name].kind.read(self.value(name), self.notes, what)
        return default if found is None else found
