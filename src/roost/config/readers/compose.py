"""The settings of a config file and of the files beside it that it builds on: YAML with `defaults:`, and TOML."""

from __future__ import annotations

import os.path
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from roost.config.document import MAX_DEPTH, KeyPath
from roost.config.readers.files import Folder
from roost.config.readers.framework import Setting
from roost.config.yaml_file import YamlValue, parse_text
from roost.errors import ConfigError, Where
from roost.text import shorten

_MAX_DEPTH = 20
_MOST_SETTINGS = 20_000
_GROUP = re.compile(r"(?:optional\s+)?(?P<group>[^@\s]+?)(?:@(?P<package>[\w.]+))?$")


def read_yaml(folder: Folder, name: str, text: str) -> dict[str, Setting]:
    """Read a YAML file and what its `defaults:` name, as far as it is there; its own values come last."""
    return _Composer(folder).file(name, text, "", ())


def flatten(value: YamlValue, prefix: str = "") -> dict[str, Setting]:
    """Return the values of a document by their dotted keys; a list has each of its elements by number."""
    found: dict[str, Setting] = {}
    for key, node in _flat(value, prefix):
        if len(found) > _MOST_SETTINGS:
            raise ConfigError(f"{value.file.name}: it has more than {_MOST_SETTINGS} values")
        found[key] = Setting(key=key, text=_scalar(node), where=node.where())
    return found


def _flat(value: YamlValue, prefix: str) -> Iterator[tuple[str, YamlValue]]:
    if len(value.path) > MAX_DEPTH:
        raise ConfigError(f"nested deeper than {MAX_DEPTH} levels: it may hold itself", where=value.where())
    if isinstance(value.node, yaml.MappingNode):
        if not value.node.value and prefix:
            yield prefix, value
        for key, node in value.pairs():
            name = str(key.value) if isinstance(key, yaml.ScalarNode) else "?"
            path: KeyPath = (*value.path, name)
            yield from _flat(YamlValue(node, path, value.file), f"{prefix}.{name}" if prefix else name)
    elif isinstance(value.node, yaml.SequenceNode):
        yield prefix, value
        for index, node in enumerate(value.node.value):
            yield from _flat(YamlValue(node, (*value.path, index), value.file), f"{prefix}.{index}")
    else:
        yield prefix, value


def _scalar(value: YamlValue) -> str | None:
    if isinstance(value.node, yaml.SequenceNode):
        return "[" + ", ".join(str(item.value) for item in value.node.value if isinstance(item, yaml.ScalarNode)) + "]"
    return "{}" if isinstance(value.node, yaml.MappingNode) else value.scalar  # type: ignore[return-value]


class _Composer:
    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def file(
        self, name: str, text: str, package: str, above: tuple[str, ...], named: Where | None = None
    ) -> dict[str, Setting]:
        """Return the values of a file under a package, over those of the files that it builds on."""
        path = os.path.realpath(name)
        if path in above:
            hint = "take one of them out of the defaults"
            raise ConfigError(f"{name} builds on itself, over its defaults", hint=hint, where=named)
        if len(above) > _MAX_DEPTH:
            message = f"{name}: its defaults are nested deeper than {_MAX_DEPTH} files"
            raise ConfigError(message, hint="build on fewer files", where=named)
        if not re.sub(r"(?m)^\s*#.*$", "", text).strip():
            return {}
        document = parse_text(text, name=name)
        own: dict[str, Setting] = {}
        bases: list[tuple[str, str, yaml.Node]] = []
        if isinstance(document.node, yaml.MappingNode):
            own = flatten(document)
            bases = [base for key, node in document.pairs() if str(key.value) == "defaults" for base in _bases(node)]
        own = {key: item for key, item in own.items() if key != "defaults" and not key.startswith("defaults.")}
        found: dict[str, Setting] = {}
        has_own = False
        for target, within, node in bases:
            if target == "_self_":
                _put(found, own, package)
                has_own = True
                continue
            where = YamlValue(node, ("defaults",), document.file).where()
            opened = self._folder.open(target, name, ("", ".yaml", ".yml"), where)
            if opened is not None:
                inner = ".".join(part for part in (package, within) if part)
                found.update(self.file(*opened, inner, (*above, path), where))
        if not has_own:
            _put(found, own, package)
        return found


def _put(found: dict[str, Setting], own: Mapping[str, Setting], package: str) -> None:
    for key, item in own.items():
        name = f"{package}.{key}" if package else key
        # A value in place of a mapping, or the other way round, replaces it.
        for old in [old for old in found if old.startswith(f"{name}.")] if item.text is None else ():
            del found[old]
        found[name] = item


def _bases(node: yaml.Node) -> Iterator[tuple[str, str, yaml.Node]]:
    """Yield the files of a list of defaults, each with the package that its values go to, and where it is named."""
    if isinstance(node, yaml.ScalarNode):
        yield str(node.value), "", node
        return
    for item in node.value if isinstance(node, yaml.SequenceNode) else ():
        if isinstance(item, yaml.ScalarNode):
            text = str(item.value)
            target, _, package = text.partition("@")
            group = "" if package in ("_here_", "_global_") else package
            yield target.removeprefix("/"), group, item
        elif isinstance(item, yaml.MappingNode):
            for key, value in item.value:
                found = _GROUP.match(str(key.value))
                if not found or not isinstance(value, yaml.ScalarNode) or str(key.value).startswith("override"):
                    continue
                group, package = found["group"].removeprefix("/"), found["package"]
                place = group.replace("/", ".") if package is None else package
                yield f"{group}/{value.value}", "" if place in ("_here_", "_global_") else place, value


def read_toml(name: str, text: str) -> dict[str, Setting]:
    """Read a TOML file."""
    found: dict[str, Setting] = {}
    places = _toml_places(name, text)
    try:
        for key, value in _pairs(tomllib.loads(text), "", 0):
            if len(found) > _MOST_SETTINGS:
                break
            where = places.get(key) or Where(key=key, file=name, line=1)
            found[key] = Setting(key=key, text=_toml_text(value), where=where)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{name}: not TOML: {shorten(str(error), 120)}") from None
    except ValueError:
        # Python reads and writes whole numbers of 4300 digits at most.
        raise ConfigError(f"{name}: a number has too many digits") from None
    if len(found) > _MOST_SETTINGS:
        raise ConfigError(f"{name}: it has more than {_MOST_SETTINGS} values")
    return found


def _pairs(data: Any, prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    if depth > _MAX_DEPTH:
        return
    if isinstance(data, dict):
        if prefix:
            yield prefix, data
        for key, value in data.items():
            yield from _pairs(value, f"{prefix}.{key}" if prefix else key, depth + 1)
    elif isinstance(data, list):
        yield prefix, data
        for index, value in enumerate(data):
            yield from _pairs(value, f"{prefix}.{index}", depth + 1)
    else:
        yield prefix, data


def _toml_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return (
        "[" + ", ".join(map(str, value)) + "]"
        if isinstance(value, list)
        else "{}"
        if isinstance(value, dict)
        else str(value)
    )


def _toml_places(name: str, text: str) -> dict[str, Where]:
    """Find the line of each key: below the heading of its table, or written out before it."""
    found: dict[str, Where] = {}
    table = ""
    for number, line in enumerate(text.split("\n"), 1):
        if heading := re.match(r"\s*\[\[?\s*([\w.\"-]+)\s*\]\]?", line):
            table = heading[1].replace('"', "")
        elif named := re.match(r"\s*([\w.-]+)\s*=", line):
            key = ".".join(part for part in (table, named[1]) if part)
            at = named.start(1)
            length = len(line.rstrip()) - at
            found.setdefault(key, Where(key=key, file=name, line=number, text=line, offset=at, length=length))
    return found
