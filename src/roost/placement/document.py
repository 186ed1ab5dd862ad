"""What the user wrote, with where each value stands: a YAML or JSON file, a dict, or a DictConfig.

YAML is composed but never constructed: scalars stay the text that was typed (`8:0`, `no`, `4090`), no tag
makes an object, an alias costs nothing until it is looked at, and only the keys that we ask for are read.
"""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from roost.errors import ConfigError, Problem, Where

JOB_FILE_LIMIT = 4 * 2**20
INVENTORY_FILE_LIMIT = 64 * 2**20
PLAN_FILE_LIMIT = 1024 * 2**20
_MAX_DEPTH = 64
_MAX_VALUES = 2_000_000
"""How many values may be looked at: aliases can make a small file endless."""

Kind = Literal["mapping", "list", "scalar"]
Scalar = str | int | float | bool | None
_Pair = tuple[yaml.Node, yaml.Node]

# The C parser is part of every PyYAML wheel; a build without it only reads more slowly.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Value(ABC):
    """One value of a document: a mapping, a list or a scalar, and where it stands."""

    __slots__ = ("path",)

    def __init__(self, path: tuple[str | int, ...]) -> None:
        self.path = path

    @property
    def key(self) -> str:
        """The path as people write it: `cluster.node_groups[0].label`."""
        text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.path)
        return text.removeprefix(".") or "the config"

    @property
    @abstractmethod
    def kind(self) -> Kind: ...

    @property
    @abstractmethod
    def scalar(self) -> Scalar:
        """The scalar: from a file always its text (None for null), from a dict the object itself."""

    @abstractmethod
    def items(self) -> Iterator[tuple[Value, Value]]:
        """The pairs of a mapping, keys as values of their own so that a mistake in one can be shown."""

    @abstractmethod
    def elements(self) -> Iterator[Value]:
        """The values of a list."""

    @abstractmethod
    def where(self, span: tuple[int, int] | None = None) -> Where:
        """Where this stands; `span` narrows it to a part of a scalar's text."""

    def get(self, *keys: str) -> Value | None:
        """The value under `keys`, or None where there is none."""
        found: Value | None = self
        for name in keys:
            if found is None or found.kind != "mapping":
                return None
            found = next((value for key, value in found.items() if key.scalar == name), None)
        return found

    def plain(self) -> Any:
        """This value as dicts, lists and scalars of Python, with YAML 1.2's idea of numbers and booleans."""
        if self.kind == "mapping":
            return {str(key.scalar): value.plain() for key, value in self.items()}
        if self.kind == "list":
            return [value.plain() for value in self.elements()]
        return self._plain_scalar()

    def _plain_scalar(self) -> Scalar:
        return self.scalar


class PlainValue(Value):
    """A value of a dict or DictConfig, named by its key."""

    __slots__ = ("_anchor", "_raw")

    def __init__(self, raw: object, path: tuple[str | int, ...] = (), anchor: Where | None = None) -> None:
        super().__init__(path)
        self._raw = raw
        self._anchor = anchor

    @property
    def kind(self) -> Kind:
        if isinstance(self._raw, Mapping):
            return "mapping"
        if isinstance(self._raw, Sequence) and not isinstance(self._raw, str | bytes):
            return "list"
        return "scalar"

    @property
    def scalar(self) -> Scalar:
        if self._raw is None or isinstance(self._raw, str | int | float):
            return self._raw
        raise ConfigError(self._problem(f"a {type(self._raw).__name__} cannot stand here"))

    def items(self) -> Iterator[tuple[Value, Value]]:
        raw = self._raw
        if not isinstance(raw, Mapping):
            raise TypeError(f"{self.key} is no mapping")
        for key in raw:
            path = (*self.path, str(key))
            yield PlainValue(key, path, self._anchor), PlainValue(self._item(key, path), path, self._anchor)

    def elements(self) -> Iterator[Value]:
        raw = self._raw
        if not isinstance(raw, Sequence):
            raise TypeError(f"{self.key} is no list")
        for index in range(len(raw)):
            path = (*self.path, index)
            yield PlainValue(self._item(index, path), path, self._anchor)

    def where(self, span: tuple[int, int] | None = None) -> Where:
        if self._anchor:
            return self._anchor
        if self.kind != "scalar" or span is None:
            return Where(key=self.key)
        return Where(key=self.key, text=str(self._raw), offset=span[0], length=span[1] - span[0])

    def _item(self, key: Any, path: tuple[str | int, ...]) -> object:
        raw: Any = self._raw
        if not type(raw).__module__.startswith("omegaconf"):
            return raw[key]
        # Only a config of OmegaConf's own runs code when it is read: interpolations, and `???`.
        from omegaconf.errors import OmegaConfBaseException

        try:
            return raw[key]
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(PlainValue(None, path, self._anchor)._problem(f"cannot be read: {reason}")) from None

    def _problem(self, message: str) -> Problem:
        return Problem(message=message, where=self.where())


class YamlValue(Value):
    """A value of a file, with line and column."""

    __slots__ = ("_file", "_node")

    def __init__(self, node: yaml.Node, path: tuple[str | int, ...], file: _File) -> None:
        super().__init__(path)
        self._node = node
        self._file = file
        file.count()

    @property
    def kind(self) -> Kind:
        if isinstance(self._node, yaml.MappingNode):
            return "mapping"
        return "list" if isinstance(self._node, yaml.SequenceNode) else "scalar"

    @property
    def scalar(self) -> Scalar:
        text = str(self._node.value)
        if not self._quoted and text in ("", "~", "null", "Null", "NULL"):
            return None
        return text

    @property
    def _quoted(self) -> bool:
        return not _is_plain(self._node)

    def items(self) -> Iterator[tuple[Value, Value]]:
        pairs = self._pairs(self._node, 0)
        own = [(key, value) for key, value, merged in pairs if not merged]
        if len(own) < len(pairs):
            own = _merged([(key, value) for key, value, merged in pairs if merged], own)
        for key, value in own:
            path = (*self.path, str(key.value) if isinstance(key, yaml.ScalarNode) else "?")
            yield YamlValue(key, path, self._file), self._file.value(value, path)

    def elements(self) -> Iterator[Value]:
        for index, node in enumerate(self._node.value):
            yield self._file.value(node, (*self.path, index))

    def where(self, span: tuple[int, int] | None = None) -> Where:
        mark = self._node.start_mark
        line = self._file.line(mark.line)
        column = mark.column
        length = 1
        if isinstance(self._node, yaml.ScalarNode):
            text = str(self._node.value)
            shown = column + 1 if self._quoted else column
            # An escaped, folded or multi-line scalar does not stand in the line as it reads.
            if line[shown : shown + len(text)] == text:
                start, stop = span or (0, len(text))
                column, length = shown + start, max(1, stop - start)
        return Where(key=self.key, file=self._file.name, line=mark.line + 1, text=line, offset=column, length=length)

    def _plain_scalar(self) -> Scalar:
        text = self.scalar
        if text is None or self._quoted:
            return text
        if text in ("true", "false"):
            return text == "true"
        if re.fullmatch(r"[-+]?(0|[1-9][0-9]{0,17})", str(text)):
            return int(text)
        if re.fullmatch(r"[-+]?[0-9]+\.[0-9]*([eE][-+]?[0-9]{1,3})?", str(text)):
            return float(text)
        return text

    def _pairs(self, node: yaml.Node, depth: int) -> list[tuple[yaml.Node, yaml.Node, bool]]:
        found: list[tuple[yaml.Node, yaml.Node, bool]] = []
        for key, value in node.value:
            if not (_is_plain(key) and key.value == "<<"):
                found.append((key, value, depth > 0))
                continue
            sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
            for source in sources:
                self._file.count()
                if not isinstance(source, yaml.MappingNode) or depth >= _MAX_DEPTH:
                    raise ConfigError(
                        Problem(
                            message="'<<' merges a mapping, or a list of mappings",
                            where=YamlValue(key, (*self.path, "<<"), self._file).where(),
                        )
                    )
                found += [(k, v, True) for k, v, _ in self._pairs(source, depth + 1)]
        return found


def _merged(merged: list[_Pair], own: list[_Pair]) -> list[_Pair]:
    """Merged keys first, as OmegaConf has them; an earlier merge wins, and the mapping's own key over all."""
    names = {_name(key) for key, _ in own}
    found: dict[object, _Pair] = {}
    for key, value in merged:
        if _name(key) not in names:
            found.setdefault(_name(key), (key, value))
    return [*found.values(), *own]


def _name(key: yaml.Node) -> object:
    return key.value if isinstance(key, yaml.ScalarNode) else id(key)


def _is_plain(node: yaml.Node) -> bool:
    """Whether a node is a scalar without quotes; the C parser says so with '' and the Python one with None."""
    return isinstance(node, yaml.ScalarNode) and not node.style


class _File:
    """A composed file: its name, its lines, and what OmegaConf makes of it where it interpolates."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text
        self._lines = text.splitlines()
        self._left = _MAX_VALUES
        self._omega: Any = None

    def line(self, index: int) -> str:
        return self._lines[index] if index < len(self._lines) else ""

    def count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise ConfigError(f"{self.name}: its aliases and merges unfold to over {_MAX_VALUES} values")

    def value(self, node: yaml.Node, path: tuple[str | int, ...]) -> Value:
        value = YamlValue(node, path, self)
        if isinstance(node, yaml.ScalarNode) and "${" in node.value:
            return self._interpolated(value)
        return value

    def _interpolated(self, value: YamlValue) -> Value:
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            if self._omega is None:
                self._omega = OmegaConf.create(self.text)
            found = self._omega
            for part in value.path:
                found = found[part]
        except (OmegaConfBaseException, yaml.YAMLError, KeyError, TypeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(
                Problem(message=f"{value.scalar} cannot be resolved: {reason}", where=value.where())
            ) from None
        return PlainValue(found, value.path, anchor=value.where())


def read_file(path: str | Path, *, limit: int = JOB_FILE_LIMIT) -> Value:
    """Read a YAML or JSON file."""
    return read_text(load_text(path, limit=limit), name=str(path))


def load_text(path: str | Path, *, limit: int) -> str:
    """The text of a file (or a pipe), read once and never more than `limit` bytes of it."""
    try:
        with Path(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(limit + 1) if size <= limit else b""
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    check_size(str(path), max(size, len(data)), limit)
    return _decode(str(path), data)


def check_size(name: str, size: int, limit: int) -> None:
    """Refuse a file that is too large to be what it should be."""
    if size > limit:
        raise ConfigError(
            f"{name}: the file has {size / 2**20:.1f} MiB, and at most {limit // 2**20} MiB are read",
            hint="is this the right file?",
        )


def read_text(text: str, *, name: str = "<text>") -> Value:
    """Read YAML (or JSON) text; `name` stands for the file in messages."""
    if not text.strip():
        raise ConfigError(f"{name}: the file is empty", hint="a job file has a section 'cluster:'")
    if name.endswith(".json"):
        # JSON may be indented with tabs, which YAML forbids; inside its strings there are none.
        _check_json(text, name)
        text = text.replace("\t", " ")
    file = _File(name, text)
    try:
        _check_depth(text, name)
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise _yaml_error(error, file) from None
    if node is None:
        raise ConfigError(f"{name}: the file has comments but no values")
    return YamlValue(node, (), file)


def as_document(config: object) -> Value:
    """Any config as a document: a path, a dict, a DictConfig, or a document."""
    if isinstance(config, Value):
        return config
    if isinstance(config, str | Path):
        return read_file(config)
    if isinstance(config, Mapping):
        return PlainValue(config)
    raise ConfigError(
        f"a config is a path, a dict or a DictConfig, not a {type(config).__name__}",
        hint="for YAML text use roost.JobConfig.from_text",
    )


def _decode(name: str, data: bytes) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not a text file: byte {error.start} is not UTF-8") from None
    if "\0" in text:
        raise ConfigError(f"{name}: not a text file: byte {data.index(0)} is zero")
    return text


def _check_depth(text: str, name: str) -> None:
    """Refuse deep nesting before anything recurses into it."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _MAX_DEPTH:
                line = event.start_mark.line + 1 if event.start_mark else 0
                raise ConfigError(f"{name}:{line}: nested deeper than {_MAX_DEPTH} levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _check_json(text: str, name: str) -> None:
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from None
    except RecursionError:
        raise ConfigError(f"{name}: nested deeper than {_MAX_DEPTH} levels") from None


def _yaml_error(error: yaml.YAMLError, file: _File) -> ConfigError:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return ConfigError(f"{file.name}: not YAML: {str(error).splitlines()[0]}")
    text = file.line(mark.line)
    problem = getattr(error, "problem", None) or "cannot be read"
    context = getattr(error, "context", None)
    hint = ""
    if "\t" in text[: mark.column + 1]:
        hint = "YAML indents with spaces, not with tabs"
    elif "alias" in problem:
        hint = "an anchor (&name) must stand before the alias (*name) that uses it"
    elif "mapping values are not allowed" in problem:
        hint = "quote the value, or check the indentation"
    message = f"not YAML: {problem}" + (f" ({context})" if context else "")
    where = Where(key="", file=file.name, line=mark.line + 1, text=text, offset=min(mark.column, len(text)))
    return ConfigError(Problem(message=message, hint=hint, where=where))
