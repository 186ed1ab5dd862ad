"""The user's document, as values that know their place: the model, and its implementation for dicts and DictConfigs.

Only the keys that a reader asks for are read. `yaml_file` implements the same model for YAML and JSON files.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from roost.errors import ConfigError, Where
from roost.text import shorten

MAX_DEPTH = 64
_MAX_SETTINGS = 100_000
_MAX_NUMBER = 10**18

Kind = Literal["mapping", "list", "scalar"]
Scalar = str | int | float | bool | None
KeyPath = tuple[str | int, ...]


class Value(ABC):
    """One value of a document: a mapping, a list or a scalar, and its place."""

    __slots__ = ("path",)

    def __init__(self, path: KeyPath) -> None:
        self.path: KeyPath = path

    @property
    def key(self) -> str:
        """The path as people write it: `cluster.node_groups[0].label`."""
        text = "".join(f"[{part}]" if isinstance(part, int) else f".{shorten(part)}" for part in self.path)
        return (text.removeprefix(".") or "the config").encode(errors="backslashreplace").decode()

    @property
    @abstractmethod
    def kind(self) -> Kind:
        """Whether this is a mapping, a list or a scalar."""

    @property
    @abstractmethod
    def scalar(self) -> Scalar:
        """The scalar: always text (None for null) from a file, the object itself from a dict."""

    @property
    def broken(self) -> ConfigError | None:
        """Why the value cannot be read, such as an interpolation without a target or a `???`; None if it can."""
        return None

    @abstractmethod
    def items(self) -> Iterator[tuple[Value, Value]]:
        """Yield the pairs of a mapping; keys are values too, so that a mistake in one can be shown."""

    @abstractmethod
    def elements(self) -> Iterator[Value]:
        """Yield the values of a list."""

    @abstractmethod
    def where(self, span: tuple[int, int] | None = None) -> Where:
        """Return the place of this value; `span` narrows it to a part of a scalar's text."""

    @abstractmethod
    def keys(self) -> list[str]:
        """Return the names of a mapping without reading their values."""

    @abstractmethod
    def _child(self, name: str) -> Value | None:
        """Return the value of `name` in a mapping without reading any other."""

    def get(self, *names: str) -> Value | None:
        """Return the value at the path `names`, or None; keys that are not on the path belong to the user."""
        found: Value | None = self
        for name in names:
            if found is None or found.kind != "mapping":
                return None
            found = found._child(name)
        return found

    def plain(self) -> Any:
        """Return the value as dicts, lists and scalars of Python; numbers and booleans follow YAML 1.2."""
        return self._plain([_MAX_SETTINGS], 0)

    def _plain(self, left: list[int], depth: int) -> Any:
        left[0] -= 1
        if left[0] < 0 or depth > MAX_DEPTH:
            raise ConfigError("these settings are too many or nested too deep", where=self.where())
        if self.broken is not None:
            raise self.broken
        if self.kind == "mapping":
            return {str(key.scalar): value._plain(left, depth + 1) for key, value in self.items()}
        if self.kind == "list":
            return [value._plain(left, depth + 1) for value in self.elements()]
        scalar = self._plain_scalar()
        if isinstance(scalar, float) and not math.isfinite(scalar):
            raise ConfigError(f"{scalar} cannot be a setting", where=self.where())
        return scalar

    def _plain_scalar(self) -> Scalar:
        return self.scalar


class PlainValue(Value):
    """A value of a dict or DictConfig, named by its key."""

    __slots__ = ("_anchor", "_broken", "_raw")

    def __init__(self, raw: object, path: KeyPath = (), anchor: Where | None = None, broken: str = "") -> None:
        super().__init__(path)
        # A DictConfig that is None or missing looks like an empty mapping, and equals what it stands for.
        nothings: tuple[object, ...] = (None, "???")
        self._raw = None if isinstance(raw, Mapping) and raw in nothings else raw
        self._anchor = anchor
        self._broken = broken

    @property
    def kind(self) -> Kind:
        if isinstance(self._raw, Mapping):
            return "mapping"
        if isinstance(self._raw, Sequence) and not isinstance(self._raw, str | bytes | bytearray):
            return "list"
        return "scalar"

    @property
    def scalar(self) -> Scalar:
        if self.broken is not None:
            raise self.broken
        return self._raw if self._raw is None or isinstance(self._raw, str | int | float) else None

    @property
    def broken(self) -> ConfigError | None:
        message, raw = self._broken, self._raw
        if isinstance(raw, int) and abs(raw) > _MAX_NUMBER:
            message = f"a number of about {int(raw.bit_length() * 0.30103)} digits is too large"
        elif self.kind == "scalar" and not (raw is None or isinstance(raw, str | int | float)):
            message = f"a value of the type {type(raw).__name__} is not allowed here"
        return ConfigError(message, where=self.where()) if message else None

    def items(self) -> Iterator[tuple[Value, Value]]:
        for key in self._raw if isinstance(self._raw, Mapping) else ():
            path = (*self.path, _key_text(key))
            yield PlainValue(key, path, self._anchor), self._item(key, path)

    def elements(self) -> Iterator[Value]:
        for index in range(len(self._raw) if isinstance(self._raw, Sequence) else 0):
            yield self._item(index, (*self.path, index))

    def keys(self) -> list[str]:
        return [_key_text(key) for key in self._raw] if isinstance(self._raw, Mapping) else []

    def where(self, span: tuple[int, int] | None = None) -> Where:
        if self._anchor:
            return self._anchor
        if self.kind != "scalar" or span is None:
            return Where(key=self.key)
        return Where(key=self.key, text=str(self._raw), offset=span[0], length=span[1] - span[0])

    def _child(self, name: str) -> Value | None:
        known = isinstance(self._raw, Mapping) and any(key == name for key in self._raw if isinstance(key, str))
        return self._item(name, (*self.path, name)) if known else None

    def _item(self, key: Any, path: KeyPath) -> Value:
        raw: Any = self._raw
        try:
            return PlainValue(raw[key], path, self._anchor)
        except Exception as error:  # an interpolation can run any resolver that the user registered
            if not type(raw).__module__.startswith("omegaconf"):
                raise
            is_missing = type(error).__name__ == "MissingMandatoryValue"
            broken = "??? has no value yet" if is_missing else f"cannot be read: {first_line(error)}"
            return PlainValue(None, path, self._anchor, broken)


def _key_text(key: object) -> str:
    is_huge = isinstance(key, int) and abs(key) > _MAX_NUMBER
    return type(key).__name__ if is_huge else shorten(str(key))


def first_line(error: Exception) -> str:
    """Return the first line of another library's message, safe to print."""
    lines = str(error).splitlines()
    text = lines[0] if lines else type(error).__name__
    return shorten("".join(c for c in text if c.isprintable()), 200)
