"""Files of YAML and JSON, with the line and column of every value.

YAML is composed but never constructed: scalars stay the text that was typed (`8:0`, `no`, `4090`), no tag
makes an object, and an alias costs nothing until it is read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from roost.config.document import MAX_DEPTH, KeyPath, Kind, PlainValue, Scalar, Value, first_line
from roost.errors import ConfigError, Where
from roost.text import shorten

JOB_FILE_LIMIT = 4 * 2**20
INVENTORY_FILE_LIMIT = 64 * 2**20
PLAN_FILE_LIMIT = 1024 * 2**20

_Pair = tuple[yaml.Node, yaml.Node]
_BEFORE_TEXT = re.compile(r"""(?:[&!]\S*\s+)*['"]?""")

# The C parser is part of every PyYAML wheel; a build without it only reads more slowly.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_file(path: str | Path, *, limit: int = JOB_FILE_LIMIT) -> Value:
    """Read a YAML or JSON file."""
    return parse_text(load_text(path, limit=limit), name=str(path))


def load_text(path: str | Path, *, limit: int) -> str:
    """Read the text of a file or a pipe, once and never more than `limit` bytes."""
    name = shorten(str(path).split("\n")[0], 200)
    try:
        with Path(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(limit + 1) if size <= limit else b""
    except (OSError, ValueError) as error:
        hint = "for YAML text use JobConfig.from_text" if "\n" in str(path) else ""
        hint = "give the file, not its folder" if isinstance(error, IsADirectoryError) else hint
        raise ConfigError(f"{name}: {getattr(error, 'strerror', None) or error}", hint=hint) from None
    check_size(name, max(size, len(data)), limit)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        hint = "this looks like UTF-16: save it as UTF-8" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        raise ConfigError(f"{name}: not a text file: byte {error.start} is not UTF-8", hint=hint) from None
    if "\0" in text:
        raise ConfigError(f"{name}: not a text file: byte {data.index(0)} is zero")
    return text


def check_size(name: str, size: int, limit: int) -> None:
    """Raise ConfigError for a file that is larger than such files are."""
    if size > limit:
        raise ConfigError(
            f"{name}: the file has {size / 2**20:.1f} MiB, and at most {limit // 2**20} MiB are read",
            hint="is this the right file?",
        )


def parse_text(text: str, *, name: str = "<text>") -> YamlValue:
    """Read YAML (or JSON) text; messages call the file `name`."""
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise ConfigError(f"{name}: not a text: it contains half a surrogate pair")
    if not text.strip():
        raise ConfigError(f"{name}: the file is empty")
    if name.endswith(".json"):
        text = _json_as_yaml(text, name)
    node, file = compose(text, SourceFile(name, text))
    if node is None:
        raise ConfigError(f"{name}: the file has comments but no values")
    return YamlValue(node, (), file)


def compose(text: str, file: SourceFile) -> tuple[yaml.Node | None, SourceFile]:
    """Compose the nodes of a YAML text that `file` shows in messages; return them and the file with its size."""
    try:
        sized = SourceFile(file.name, file.text, _checked_size(text, file.name))
        return yaml.compose(text, Loader=_Loader), sized
    except yaml.YAMLError as error:
        raise _yaml_error(error, file) from None


def as_document(config: object) -> Value:
    """Return any config as a document: a path, a dict, a DictConfig, or a document."""
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


def _checked_size(text: str, name: str) -> int:
    """Count the values of a file; refuse deep nesting before anything recurses into it."""
    depth = values = 0
    for event in yaml.parse(text, Loader=_Loader):
        values += 1
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                line = event.start_mark.line + 1 if event.start_mark else 0
                raise ConfigError(f"{name}:{line}: nested deeper than {MAX_DEPTH} levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
    return values


def _json_as_yaml(text: str, name: str) -> str:
    """Turn JSON into text that YAML reads too: JSON allows tabs and one character written as two escapes."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        # At the end of the file, point behind the last thing in it.
        at = min(error.pos, len(text.rstrip()))
        start = text.rfind("\n", 0, at) + 1
        line = text[start:].partition("\n")[0]
        where = Where(key="", file=name, line=text.count("\n", 0, at) + 1, text=line, offset=at - start)
        raise ConfigError(f"not JSON: {error.msg}", where=where) from None
    except RecursionError:
        raise ConfigError(f"{name}: nested deeper than {MAX_DEPTH} levels") from None
    except ValueError:
        raise ConfigError(f"{name}: a number has too many digits") from None
    pair = re.compile(r"(?<!\\)((?:\\\\)*)(\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})")
    return pair.sub(lambda match: match[1] + json.loads(f'"{match[2]}"'), text).replace("\t", " ")


def _yaml_error(error: yaml.YAMLError, file: SourceFile) -> ConfigError:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return ConfigError(f"{file.name}: not YAML: {first_line(error)}")
    text = file.line(mark.line)
    problem = getattr(error, "problem", None) or "cannot be read"
    context = getattr(error, "context", None)
    message = f"not YAML: {problem}" + (f" ({context})" if context else "")
    hint = ""
    if "\t" in text[: mark.column + 1]:
        hint = "YAML indents with spaces, not with tabs"
    elif "single document" in str(context):
        message, hint = "another document begins here", "a file holds one document: take out the '---'"
    elif "alias" in problem:
        hint = "an anchor (&name) must come before the alias (*name) that uses it"
    elif "duplicate anchor" in problem or "duplicate anchor" in str(context):
        message, hint = "this anchor (&name) is declared twice", "give each anchor its own name"
    elif "flow" in str(context) and "did not find expected" in problem:
        # Where the reader notices is often far below the bracket that is open, or at the end of the file.
        mark = getattr(error, "context_mark", None) or mark
        text = file.line(mark.line)
        opened = text[mark.column : mark.column + 1]
        message = f"not YAML: this {opened!r} is not closed, or a ',' is missing after it"
        hint = f"close it with {'}' if opened == '{' else ']'!r}, or quote a value that has brackets, commas or colons"
    elif "mapping values are not allowed" in problem:
        hint = "quote the value, or check the indentation"
    where = Where(key="", file=file.name, line=mark.line + 1, text=text, offset=min(mark.column, len(text)))
    return ConfigError(message, hint=hint, where=where)


class YamlValue(Value):
    """A value of a file, with line and column."""

    __slots__ = ("_file", "_node")

    def __init__(self, node: yaml.Node, path: KeyPath, file: SourceFile) -> None:
        super().__init__(path)
        self._node = node
        self._file = file
        file.count(1)

    @property
    def node(self) -> yaml.Node:
        """The node that the parser composed."""
        return self._node

    @property
    def file(self) -> SourceFile:
        """Where it was read."""
        return self._file

    def pairs(self) -> list[tuple[yaml.Node, yaml.Node]]:
        """Return the nodes of a mapping's pairs, merged keys included."""
        return self._pairs(self._node)

    @property
    def kind(self) -> Kind:
        if isinstance(self._node, yaml.MappingNode):
            return "mapping"
        return "list" if isinstance(self._node, yaml.SequenceNode) else "scalar"

    @property
    def scalar(self) -> Scalar:
        is_null = _is_plain(self._node) and self._node.value in ("", "~", "null", "Null", "NULL")
        return None if is_null or self.kind != "scalar" else str(self._node.value)

    def items(self) -> Iterator[tuple[Value, Value]]:
        for key, value in self._pairs(self._node):
            path = (*self.path, node_text(key))
            yield YamlValue(key, path, self._file.of(key)), self._file.value(value, path)

    def elements(self) -> Iterator[Value]:
        for index, node in enumerate(self._node.value):
            yield self._file.value(node, (*self.path, index))

    def keys(self) -> list[str]:
        return [node_text(key) for key, _ in self._pairs(self._node)]

    def where(self, span: tuple[int, int] | None = None) -> Where:
        mark = self._node.start_mark
        line = self._file.line(mark.line)
        column, length = mark.column, 1
        if isinstance(self._node, yaml.ScalarNode):
            text = str(self._node.value)
            # An anchor, a tag or a quote may precede the text; an escaped or folded text is not in the line as such.
            before = _BEFORE_TEXT.match(line, column)
            shown = before.end() if before else column
            if text and line.startswith(text, shown):
                start, stop = span or (0, len(text))
                column, length = shown + start, max(1, stop - start)
        return Where(key=self.key, file=self._file.name, line=mark.line + 1, text=line, offset=column, length=length)

    def _child(self, name: str) -> Value | None:
        found = [(key, value) for key, value in self._pairs(self._node) if node_text(key) == name]
        if len(found) > 1:
            again = YamlValue(found[1][0], (*self.path, name), self._file.of(found[1][0])).where()
            line = found[0][0].start_mark.line + 1
            raise ConfigError(f"{name!r} is written twice, first in line {line}", where=again)
        return self._file.value(found[0][1], (*self.path, name)) if found else None

    def _plain_scalar(self) -> Scalar:
        text = self.scalar
        if text is None or not _is_plain(self._node):
            return text
        if text in ("true", "false"):
            return text == "true"
        if re.fullmatch(r"[-+]?(0|[1-9][0-9]{0,17})", str(text)):
            return int(text)
        if re.fullmatch(r"[-+]?[0-9]{1,17}\.[0-9]{0,17}([eE][-+]?[0-9]{1,2})?", str(text)):
            return float(text)
        return text

    def _pairs(self, node: yaml.Node, depth: int = 0) -> list[_Pair]:
        """Return the pairs of a mapping, merged keys first; an earlier merge wins, and its own key wins over all."""
        own: list[_Pair] = []
        merged: dict[str, _Pair] = {}
        for key, value in node.value:
            if not (_is_plain(key) and key.value == "<<"):
                own.append((key, value))
                continue
            for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                if not isinstance(source, yaml.MappingNode) or depth >= MAX_DEPTH:
                    where = YamlValue(key, (*self.path, "<<"), self._file).where()
                    itself = isinstance(source, yaml.MappingNode)
                    message = "this '<<' merges itself" if itself else "'<<' merges a mapping, or a list of mappings"
                    raise ConfigError(message, where=where)
                inner = self._pairs(source, depth + 1)
                self._file.count(len(inner) + 1)
                for pair in inner:
                    merged.setdefault(node_text(pair[0]), pair)
        names = {node_text(key) for key, _ in own}
        return [*(pair for name, pair in merged.items() if name not in names), *own]


class SourceFile:
    """A composed file: its name, its lines, and the OmegaConf document that resolves its interpolations."""

    def __init__(self, name: str, text: str, values: int = 0) -> None:
        self.name = name
        self.text = text
        # Split as YAML does, so that its line numbers match.
        self._lines = re.split("\r\n|[\r\n\x85\u2028\u2029]", text)
        # A value is read a few times at most; only aliases and merges can make it many more.
        self._left = 100_000 + 8 * values
        self._whole: yaml.Node | None = None
        self._sources: Mapping[int, tuple[yaml.Node, SourceFile]] = {}
        self._omega: Any = None

    def change(self, whole: yaml.Node, sources: Mapping[int, tuple[yaml.Node, SourceFile]]) -> None:
        """Let the document be `whole`, whose nodes in `sources`, by their id, are from other files."""
        self._whole, self._sources, self._omega = whole, sources, None
        for _, other in sources.values():
            other._whole = whole

    def of(self, node: yaml.Node) -> SourceFile:
        """Return the file that a node of this document is from."""
        return self._sources.get(id(node), (node, self))[1]

    def line(self, index: int) -> str:
        return self._lines[index] if index < len(self._lines) else ""

    def count(self, values: int) -> None:
        self._left -= values
        if self._left < 0:
            raise ConfigError(f"{self.name}: its aliases and merges expand without end")

    def value(self, node: yaml.Node, path: KeyPath) -> Value:
        value = YamlValue(node, path, self.of(node))
        if not isinstance(node, yaml.ScalarNode) or "${" not in node.value:
            return value
        from omegaconf import OmegaConf  # slow to load, and most files do not interpolate

        try:
            if self._omega is None:
                text = self.text if self._whole is None else yaml.serialize(self._whole, Dumper=yaml.SafeDumper)
                self._omega = OmegaConf.create(text)
            found = self._omega
            for part in path:
                found = found[_omega_key(found, part)]
        except Exception as error:  # any resolver that the user registered may run here, and any tag be constructed
            broken = f"{shorten(repr(value.scalar))} cannot be resolved: {first_line(error)}"
            return PlainValue(None, path, value.where(), broken)
        return PlainValue(found, path, value.where())


def _omega_key(container: Any, part: str | int) -> Any:
    """Return the key as OmegaConf has it, which reads YAML 1.1: `4090` is a number there, and `no` is False."""
    if isinstance(part, int) or not isinstance(container, Mapping) or part in container:
        return part
    typed = yaml.safe_load(part)
    return typed if isinstance(typed, bool | int | float) else part


def node_text(key: yaml.Node) -> str:
    """Return a key's text; a mapping or a list as a key has none, so its identity stands in for it."""
    return str(key.value) if isinstance(key, yaml.ScalarNode) else f"?{id(key)}"


def _is_plain(node: yaml.Node) -> bool:
    """Whether a node is a scalar without quotes; the C parser says so with '' and the Python one with None."""
    return isinstance(node, yaml.ScalarNode) and not node.style
