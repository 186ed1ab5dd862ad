"""Settings on the command line, such as `cluster.num_nodes=2`: they replace those of a job's file.

A setting is a key of the file, with dots between the levels, and a value as YAML. `+key=value` adds a key that the file
does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import yaml

from roost.config.reading import Notes
from roost.config.yaml_file import SourceFile, YamlValue, compose, node_text
from roost.errors import ConfigError, Where
from roost.text import did_you_mean, join_words

_NAME = "command line"
_TEXT_TAG = "tag:yaml.org,2002:str"
_MAPPING_TAG = "tag:yaml.org,2002:map"


def override(document: YamlValue, settings: Sequence[str]) -> YamlValue:
    """Return a document with some of its settings replaced; ConfigError names every setting that is wrong."""
    if not settings:
        return document
    notes = Notes()
    whole, change = document.node, _Change()
    for text in settings:
        with notes.catching():
            whole = change.apply(YamlValue(whole, (), document.file), _Setting(text))
    notes.raise_if_any()
    document.file.change(whole, change.sources)
    return YamlValue(whole, (), document.file)


class _Setting:
    """One setting as it was typed."""

    def __init__(self, text: str) -> None:
        self.typed, self._text = text.partition("=")[0], text
        key = self.typed.removeprefix("+")
        self.adds: bool = self.typed.startswith("+")
        self.names: list[str] = key.split(".")
        if "=" not in text or not all(self.names):
            raise ConfigError(f"{text!r} is not a setting", hint="write key=value, such as cluster.num_nodes=2")
        # Blanks in place of the key, so that columns are those of what was typed.
        value = " " * (len(self.typed) + 1) + text[len(self.typed) + 1 :]
        node, self.file = compose(value, SourceFile(_NAME, text))
        self.node: yaml.Node = yaml.ScalarNode("tag:yaml.org,2002:null", "", _mark(), _mark()) if node is None else node

    def problem(self, names: Sequence[str], message: str, hint: str) -> ConfigError:
        """Make the error about a part of the key: the last of `names`."""
        start = len(self.typed) - len(".".join(self.names)) + len(".".join([*names[:-1], ""]))
        where = Where(key="", file=_NAME, line=1, text=self._text, offset=start, length=len(names[-1]))
        return ConfigError(message, hint=hint, where=where)


@dataclass
class _Change:
    """The nodes that settings have put into a document, by their id, with the settings they are from."""

    sources: dict[int, tuple[yaml.Node, SourceFile]] = field(default_factory=dict)

    def apply(self, document: YamlValue, setting: _Setting) -> yaml.Node:
        """Return the document's node with one value replaced; nodes on the way are copies, others may share them."""
        return self._put(document, setting, [])

    def _put(self, value: YamlValue, setting: _Setting, done: list[str]) -> yaml.Node:
        left = setting.names[len(done) :]
        if not left:
            return self._from(setting, setting.node)
        node = value.node
        if isinstance(node, yaml.SequenceNode):
            return self._put_in_list(value, node, setting, done)
        here = ".".join(done) or "the file"
        if not isinstance(node, yaml.MappingNode):
            raise setting.problem([*done, left[0]], f"{here} has no keys", "it is a single value")
        pairs = value.pairs()
        known = {node_text(key): inner for key, inner in pairs}
        # A name may have dots in it.
        name = next((name for end in range(len(left), 0, -1) if (name := ".".join(left[:end])) in known), None)
        if name is None and not setting.adds:
            close = did_you_mean(left[0], known)
            has = f"did you mean {close!r}?" if close else f"it has {join_words(sorted(map(repr, known)), most=12)};"
            hint = f"{has} +{'.'.join(setting.names)}=… adds it"
            raise setting.problem([*done, left[0]], f"{here} has no {left[0]!r}", hint)
        if name is None:
            name = left[0]
            key: yaml.Node = self._from(setting, yaml.ScalarNode(_TEXT_TAG, name, _mark(), _mark()))
            inner: yaml.Node = self._from(setting, yaml.MappingNode(_MAPPING_TAG, [], _mark(), _mark()))
        else:
            key, inner = next(pair for pair in pairs if node_text(pair[0]) == name)
        new = self._put(YamlValue(inner, (), value.file), setting, [*done, *name.split(".")])
        own = [(key, new) if node_text(old) == name else (old, item) for old, item in node.value]
        if name not in [node_text(old) for old, _ in node.value]:
            own.append((key, new))
        return self._like(node, yaml.MappingNode(node.tag, own, node.start_mark, node.end_mark))

    def _put_in_list(self, value: YamlValue, node: yaml.SequenceNode, setting: _Setting, done: list[str]) -> yaml.Node:
        name = setting.names[len(done)]
        if not (name.isascii() and name.isdigit() and int(name) < len(node.value)):
            here = ".".join(done)
            has = f"it has 0 to {len(node.value) - 1}" if node.value else "it is empty"
            raise setting.problem([*done, name], f"{here} is a list, and has no {name!r}", has)
        items = list(node.value)
        items[int(name)] = self._put(YamlValue(items[int(name)], (), value.file), setting, [*done, name])
        return self._like(node, yaml.SequenceNode(node.tag, items, node.start_mark, node.end_mark))

    def _from(self, setting: _Setting, node: yaml.Node) -> yaml.Node:
        self.sources[id(node)] = (node, setting.file)
        return node

    def _like(self, old: yaml.Node, copy: yaml.Node) -> yaml.Node:
        """Note that a copy is from where the node was."""
        if id(old) in self.sources:
            self.sources[id(copy)] = (copy, self.sources[id(old)][1])
        return copy


def _mark() -> yaml.Mark:
    return yaml.Mark("", 0, 0, 0, None, 0)
