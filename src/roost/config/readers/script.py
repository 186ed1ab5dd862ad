"""The programs that a shell script would start, found by reading: variables are followed, and nothing is run."""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from roost.config.readers import shell
from roost.config.readers.conditions import double_test, note_literals, single_test
from roost.config.readers.expand import Fields, Values, Variables, joined_path, matches
from roost.config.readers.files import Folder
from roost.config.readers.marks import (
    EMPTY,
    Command,
    Script,
    ScriptFile,
    Status,
    Token,
    Unknown,
    Unsure,
    clean,
    has_mark,
    opposite,
)
from roost.errors import ConfigError
from roost.text import shorten

_HOLDS_COMMANDS = re.compile(r"(?:^|[\s;&|])(?:python[\d.]*|ray|torchrun|uv|deepspeed|bash|accelerate)\s+[-\w./]+")
_NAME = re.compile(r"[A-Za-z_]\w*")
_READS_ALL = re.compile(r"(?:-r )?-r?d (?: ?-r)?")
_MOST_STEPS = 50_000
_MOST_ROUNDS = 100
_MOST_CALLS = 30
_PURE = frozenset({"printf", "sleep", "mkdir", "pkill", "kill", "rm", "cat", "ls", "which"})


def walk_script(
    text: str, folder: Folder, given: Mapping[str, str], arguments: Sequence[str], *, argument_file: ScriptFile
) -> Script:
    """Follow a script from its first line to its last; `given` stands for the environment, `arguments` for `$@`."""
    walk = _Walk(Script(), dict(given), ScriptFile(folder.name, clean(text)), folder=folder)
    if arguments:
        walk.arguments = [Token(item, argument_file, 0, 0) for item in arguments]
    try:
        walk.body(shell.parse_shell(walk.file.text, walk.file.name))
    except _Stop:
        pass
    except RecursionError:
        raise ConfigError(f"{folder.name}: nested too deep to be read") from None
    return walk.script


class _Stop(Exception):  # noqa: N818 - the script ends here
    """`exit`, or `exec`."""


class _Leave(Exception):  # noqa: N818 - not an error
    """`break`, `continue` or `return`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


@dataclass(slots=True, kw_only=True)
class _Walk(Variables):
    folder: Folder
    functions: dict[str, tuple[shell.Node, ScriptFile]] = field(default_factory=dict)
    maybe: tuple[str, ...] = ()
    exported: set[str] = field(default_factory=set)
    steps: int = 0
    calls: int = 0

    def body(self, nodes: Iterable[shell.Node]) -> Status:
        status: Status = True
        for node in nodes:
            status = self.node(node)
        return status

    def node(self, node: shell.Node) -> Status:
        self.steps += 1
        if self.steps > _MOST_STEPS:
            raise ConfigError(f"{self.file.name}: its loops do not end within {_MOST_STEPS} steps")
        if isinstance(node, shell.Simple):
            return self.simple(node)
        if isinstance(node, shell.Chain):
            return self.chain(node)
        if isinstance(node, shell.If):
            return self.branches(node.branches)
        if isinstance(node, shell.Case):
            return self.case(self.settled(self.one(node.word)), node.branches)
        if isinstance(node, shell.For):
            return self.loop(node)
        if isinstance(node, shell.While):
            test, negated = node.test, node.negated
            return self.rounds(lambda: opposite(self.body(test)) if negated else self.body(test), node.body)
        if isinstance(node, shell.Test):
            return double_test(self, node)
        if isinstance(node, shell.Arithmetic):
            return self._truth(node.text)
        if isinstance(node, shell.Function):
            self.functions[node.name] = (node.body, self.file)
            return True
        if isinstance(node, shell.Group):
            return self.apart(node.body) if node.own else self.body(node.body)
        for part in node.parts[:-1]:
            self.apart((part,))
        # The last part of a pipe has a process of its own, too; what it reads is unknown.
        status = self.node(node.parts[0]) if len(node.parts) == 1 else self.apart(node.parts[-1:], piped=True)
        return opposite(status) if node.negated else status

    def apart(self, nodes: Iterable[shell.Node], *, piped: bool = False) -> Status:
        """Walk commands that have variables of their own."""
        values, place = self._copy(), self.place
        try:
            status = self.body(nodes)
        except _Stop:
            status = Unsure(())
        self.values, self.place = values, place
        return Unsure(()) if piped and not isinstance(status, Unsure) else status

    def chain(self, node: shell.Chain) -> Status:
        status = self.node(node.parts[0][1])
        for sign, part in node.parts[1:]:
            wanted = sign == "&&"
            if isinstance(status, bool):
                status = self.node(part) if status is wanted else status
                continue
            status = self._next(status, wanted, part)
        return status

    def _next(self, status: Unsure, wanted: bool, part: shell.Node) -> Status:
        return self.choose(status, wanted, lambda: self.node(part), lambda: status)

    def choose(self, status: Unsure, wanted: bool, yes: Callable[[], Status], no: Callable[[], Status]) -> Status:
        """Walk what an unsure condition leads to, and what it does not, and join the two.

        A way that leaves the script is not the one that starts a job. A variable that nobody gave is unset, where the
        script has a way for that.
        """
        if status.likely is not None:
            before = self._state()
            try:
                return yes() if status.likely is wanted else no()
            except _Stop:
                self._restore(before)
                self.required.update(status.names)
                return no() if status.likely is wanted else yes()
        before, outer = self._state(), self.maybe
        ways: list[tuple[dict[str, Values], Status]] = []
        left: list[Exception] = []
        for way in (yes, no):
            self._restore(before)
            self.maybe = tuple(dict.fromkeys((*outer, *status.names))) if status.names else (*outer, "?")
            try:
                found = way()
                ways.append((self.values, found))
            except (_Stop, _Leave) as end:
                left.append(end)
            self.maybe = outer
        if not ways:
            raise left[0]
        self.values = ways[0][0]
        if len(ways) == 1:
            return ways[0][1]
        self.values = self._joined(ways[0][0], ways[1][0], status)
        return ways[0][1] if ways[0][1] == ways[1][1] else Unsure(status.names)

    def branches(self, parts: Sequence[tuple[shell.Body | None, shell.Body]]) -> Status:
        if not parts:
            return True
        (test, body), *rest = parts
        status: Status = True if test is None else self.body(test)
        if isinstance(status, bool):
            return self.body(body) if status else self.branches(rest)
        return self.choose(status, True, lambda: self.body(body), lambda: self.branches(rest))

    def case(self, text: str, branches: Sequence[tuple[tuple[shell.Word, ...], shell.Body]]) -> Status:
        if not branches:
            return True
        (patterns, body), *rest = branches
        texts = [self.pattern(item) for item in patterns]
        if not has_mark(text):
            return self.body(body) if any(matches(text, item) for item in texts) else self.case(text, rest)
        note_literals(self.script, text, texts)
        if any(re.fullmatch(r"\*+", item) for item in texts):
            return self.body(body)
        status = Unsure(self.script.names_in(text))
        return self.choose(status, True, lambda: self.body(body), lambda: self.case(text, rest))

    def loop(self, node: shell.For) -> Status:
        if node.steps is not None:
            first, test, step = node.steps
            self.number(first)
            return self.rounds(lambda: self._truth(test), node.body, step)
        listed = [item for word in node.words or () for item in self.expand(word)]
        for word in (self.arguments or [] if node.words is None else listed)[:_MOST_ROUNDS]:
            self.values[node.name] = word.text
            if not self._round(node.body):
                break
        return True

    def rounds(self, test: Callable[[], Status], body: shell.Body, step: str = "") -> Status:
        for _ in range(_MOST_ROUNDS):
            status = test()
            if isinstance(status, Unsure) and status.likely is None:
                # How often is unknown, so what the body sets is, too.
                self.choose(status, True, lambda: self._round(body), lambda: True)
                return True
            ends = not status if isinstance(status, bool) else status.likely is False
            if ends or not self._round(body):
                break
            self.number(step)
        return True

    def _truth(self, text: str) -> Status:
        found = self.number(text) if text.strip() else 1
        return found if isinstance(found, Unsure) else found != 0

    def _round(self, body: shell.Body) -> bool:
        """Walk the body of a loop once; return whether the loop goes on."""
        try:
            self.body(body)
        except _Leave as leave:
            if leave.kind == "return":
                raise
            return leave.kind == "continue"
        return True

    # One command.

    def simple(self, node: shell.Simple) -> Status:
        if not node.words:
            for assign in node.assigns:
                self.assign(assign)
            return True
        words: list[Token] = []
        for word in node.words:
            if isinstance(word, shell.Assign):
                if any(item.text.startswith("-") and "A" in item.text for item in words):
                    self.values[word.name] = {}
                self.assign(word)
                self.exported.add(word.name)
            else:
                words += self.expand(word)
        if not words:
            return True
        name, rest = words[0].text, words[1:]
        if node.document is not None and node.output is not None:
            self.script.documents[self.one(node.output)] = self.text_of_document(node.document)
        assigns = {item.name: self._scalar(item) for item in node.assigns}
        if node.document is not None and name == "read" and self.read_document(rest, node.document, assigns):
            return Unsure(())
        if name in self.functions:
            return self.call(name, rest, assigns)
        if name in ("[", "test"):
            return single_test(self, rest[:-1] if name == "[" else rest)
        words = [item._replace(text=self.settled(item.text)) for item in words if not EMPTY.fullmatch(item.text)]
        rest = words[1:]
        status = self.builtin(name, rest)
        if status is not None:
            return status
        if name in _PURE or self.started_script(words, assigns):
            return Unsure(())
        before = len(self.script.commands)
        # A job of Slurm gets the exported variables, and launchers hand it its command in one of them.
        handed = {key: self.values.get(key) for key in self.exported} if name == "sbatch" else {}
        texts = [text for text in (*assigns.values(), *handed.values()) if isinstance(text, str)]
        for token in (*words[1:], *(words[0]._replace(text=text) for text in texts)):
            if _HOLDS_COMMANDS.search(token.text):
                self.read_text(token.text, token)
        if len(self.script.commands) == before:
            place = Token(words[0].text, self.file, node.start, node.start + 1)
            self.script.commands.append(Command(tuple(words), self.maybe, place))
        return Unsure(())

    def started_script(self, words: list[Token], assigns: Mapping[str, str]) -> bool:
        """Follow `bash other.sh` into that script, which gets the exported variables; return whether it is there."""
        at = next((index for index, word in enumerate(words) if word.text.endswith(".sh")), None)
        shells = [word for word in words[:at] if not word.text.startswith("-")]
        if at is None or any(word.text not in ("bash", "sh", "env", "nohup", "time") for word in shells):
            return False
        found = None if has_mark(words[at].text) else self.folder.open(words[at].text)
        if found is None:
            return False
        outer = self.values, self.arguments, self.file, self.functions, self.maybe
        self.values = {name: value for name, value in self.values.items() if name in self.exported} | dict(assigns)
        self.arguments, self.functions = words[at + 1 :] or None, {}
        try:
            self.walk_file(*found)
        except _Stop:
            pass
        finally:
            self.values, self.arguments, self.file, self.functions, self.maybe = outer
        return True

    def read_document(self, rest: list[Token], document: shell.Document, assigns: Mapping[str, str]) -> bool:
        """Do `read -r -d '' NAME`, which takes a whole document, and `read NAME`, which takes its one line.

        False for other ways to read, which divide the text or take a part of it.
        """
        *options, name = [item.text for item in rest] or [""]
        is_whole, is_raw = _READS_ALL.fullmatch(" ".join(options)), any("r" in item for item in options)
        if not _NAME.fullmatch(name) or not (is_whole or options in ([], ["-r"])) or any(assigns.values()):
            return False
        text = self.text_of_document(document)
        if ("\n" in text and not is_whole) or ("\\" in text and not is_raw):
            return False
        self.set(name, text if assigns else text.strip(" \t\n"))
        return True

    def text_of_document(self, document: shell.Document) -> str:
        text = self.file.text[document.start : document.stop].rstrip("\n").rpartition("\n")[0]
        if not document.literal:
            fields = Fields(self.file, 0, 0, splits=False)
            self._expand(text, fields, quoted=True)
            text = "".join(item.text for item in fields.close())
        return text

    def call(self, name: str, rest: list[Token], assigns: Mapping[str, str]) -> Status:
        body, file = self.functions[name]
        outer = self.arguments, self.file
        self.arguments, self.file = rest, file
        self.values.update(assigns)
        self.calls += 1
        if self.calls > _MOST_CALLS:
            raise ConfigError(f"{self.file.name}: its function {shorten(name)} calls itself without end")
        try:
            return self.node(body)
        except _Leave as leave:
            if leave.kind != "return":
                raise
            return Unsure(())
        finally:
            self.calls -= 1
            self.arguments, self.file = outer

    def assign(self, assign: shell.Assign) -> None:
        name = assign.name
        before = self.values.get(name)
        if assign.items is not None:
            self._assign_items(assign, before)
            return
        text = self._scalar(assign)
        if assign.index is not None:
            index = self.text_of(assign.index)
            if isinstance(before, dict):
                before[index] = text
            elif index.isdecimal() and int(index) < _MOST_ROUNDS:
                kept = list(before) if isinstance(before, list) else []
                kept += [Token("", self.file, 0, 0)] * (int(index) + 1 - len(kept))
                kept[int(index)] = Token(text, self.file, 0, 0)
                self.values[name] = kept
            return
        if assign.append:
            if isinstance(before, list):
                self.values[name] = [*before, Token(text, self.file, 0, 0)]
                return
            text = self.lookup(name, missing="") + text
        self.set(name, text)

    def _assign_items(self, assign: shell.Assign, before: Values | None) -> None:
        if isinstance(before, dict):
            for word in assign.items or ():
                raw = self.file.text[word.start : word.stop]
                found = re.match(r"\[([^\]]*)\]=", raw)
                if found:
                    before[self.text_of(found[1])] = self.text_of(raw[found.end() :])
            return
        items = [item for word in assign.items or () for item in self.expand(word)]
        kept = list(before) if isinstance(before, list) and assign.append else []
        self.values[assign.name] = [*kept, *items]
        self.script.used.update({assign.name} & self.given.keys())

    def _scalar(self, assign: shell.Assign) -> str:
        return self.one(assign.value) if assign.value else ""

    def output_of(self, inner: str) -> str:
        """Return what a command substitution gives, where that follows from its text; else that it is unknown."""
        why = f"the output of `{shorten(' '.join(inner.split()), 40)}`"
        self.calls += 1
        outer, commands = self.file, len(self.script.commands)
        if self.calls > _MOST_CALLS:
            raise ConfigError(f"{self.file.name}: nested too deep to be read")
        self.file = ScriptFile(outer.name, inner)
        found: str | None = None
        try:
            nodes = shell.parse_shell(inner, outer.name)
            found = self._printed(nodes) if len(nodes) == 1 else None
        except ConfigError:
            pass
        finally:
            self.file = outer
            self.calls -= 1
        del self.script.commands[commands:]
        return self.unknown((), why) if found is None else found

    def _printed(self, nodes: shell.Body) -> str | None:
        """Return what one command prints, if it is one whose answer depends on its words alone."""
        node = nodes[0]
        if isinstance(node, shell.Chain) and [sign for sign, _ in node.parts] == ["", "&&"]:
            first, second = (self._plain_words(part) for _, part in node.parts)
            if first and second and first[0] == "cd" and second[0] in ("pwd", "echo"):
                return joined_path(self.place, first[-1]) if len(first) > 1 else None
            return None
        if isinstance(node, shell.Pipe):
            return self._piped(node)
        words = self._plain_words(node)
        if not words or (any(has_mark(word) for word in words[1:]) and words[0] != "echo"):
            return None
        name, rest = words[0], [word for word in words[1:] if word != "--"]
        options = [word for word in rest if word.startswith("-") and len(word) > 1]
        rest = [word for word in rest if word not in options] if name != "echo" else rest
        if name == "echo" and rest[:1] != ["-e"]:
            return " ".join(rest[1:] if rest[:1] == ["-n"] else rest)
        if name == "pwd":
            return self.place
        if name == "dirname" and rest:
            return os.path.dirname(rest[0].rstrip("/")) or ("/" if rest[0].startswith("/") else ".")
        if name == "basename" and rest:
            base = os.path.basename(rest[0].rstrip("/"))
            return base.removesuffix(rest[1]) if len(rest) > 1 else base
        if name in ("realpath", "readlink") and rest:
            return joined_path(self.place, rest[-1])
        if name == "seq" and rest and all(re.fullmatch(r"-?\d{1,6}", item) for item in rest):
            start, last = int(rest[0]) if len(rest) > 1 else 1, int(rest[-1])
            each = int(rest[1]) if len(rest) == 3 else 1
            counted = range(start, last + (1 if each > 0 else -1), each) if each else range(0)
            return "\n".join(map(str, counted[:_MOST_ROUNDS]))
        return None

    def _piped(self, node: shell.Pipe) -> str | None:
        """Return what `echo text | tr …` and the like print."""
        text = self._printed((node.parts[0],))
        if text is None or has_mark(text) or node.negated:
            return None
        for part in node.parts[1:]:
            words = self._plain_words(part)
            if words == ["wc", "-w"]:
                text = str(len(text.split()))
            elif words and words[0] == "tr" and len(words) == 3 and len(words[1]) == len(words[2]) == 1:
                text = text.replace(words[1], words[2])
            elif words and words[0] == "tr" and words[1:2] == ["-d"] and len(words) == 3:
                text = "".join(c for c in text if c not in words[2])
            elif words and words[0] == "xargs" and len(words) == 1:
                text = " ".join(text.split())
            else:
                return None
        return text

    def _plain_words(self, node: shell.Node) -> list[str]:
        if not isinstance(node, shell.Simple) or node.assigns:
            return []
        return [item.text for word in node.words if isinstance(word, shell.Word) for item in self.expand(word)]

    # State.

    def _copy(self) -> dict[str, Values]:
        return {name: dict(value) if isinstance(value, dict) else value for name, value in self.values.items()}

    def _state(self) -> tuple[dict[str, Values], str, list[Token] | None, int]:
        return self._copy(), self.place, self.arguments, len(self.script.commands)

    def _restore(self, state: tuple[dict[str, Values], str, list[Token] | None, int]) -> None:
        values, self.place, self.arguments, _ = state
        self.values = {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}

    def _joined(self, one: dict[str, Values], other: dict[str, Values], status: Unsure) -> dict[str, Values]:
        """Return the variables after a condition that went either way."""
        found = dict(one)
        for name in {**one, **other}:
            first, second = one.get(name), other.get(name)
            names = status.names or (name,)
            if isinstance(first, list) or isinstance(second, list):
                found[name] = _joined_items(self._as_items(first), self._as_items(second), names)
            elif isinstance(first, dict) or isinstance(second, dict):
                found[name] = first if first is not None else second or {}
            elif first != second and name in self.given:
                found[name] = self.given[name]
                self.script.used.add(name)
            elif first != second:
                texts = tuple(item for item in (first, second) if isinstance(item, str))
                plain = all(not has_mark(item) for item in texts)
                options = texts if plain and len(texts) == 2 else ()
                found[name] = self.mark(Unknown(names, "a condition", options, owned=not status.names))
        return found

    def _as_items(self, value: Values | None) -> list[Token]:
        if isinstance(value, list):
            return value
        return [Token(value, self.file, 0, 0)] if isinstance(value, str) and value else []

    # Builtins.

    def builtin(self, name: str, rest: list[Token]) -> Status | None:
        """Do what a command of the shell itself does; None for other commands."""
        match name:
            case "true" | ":" | "echo":
                return True
            case "false":
                return False
            case "exit":
                raise _Stop
            case "return" | "break" | "continue":
                raise _Leave(name)
            case "source" | ".":
                found = self.folder.open(rest[0].text) if rest and not has_mark(rest[0].text) else None
                return Unsure(()) if found is None else self.walk_file(*found)
            case "eval":
                return self.read_text(" ".join(item.text for item in rest), rest[0]) if rest else True
            case "exec" if rest:
                self.script.commands.append(Command(tuple(rest), self.maybe, rest[0]))
                raise _Stop
            case "cd" | "pushd":
                target = rest[-1].text if rest else ""
                self.place = self.unknown((), "the folder") if has_mark(target) else joined_path(self.place, target)
            case "unset":
                for item in rest:
                    self.values.pop(item.text, None)
            case "read" | "mapfile" | "readarray" | "getopts":
                for item in rest:
                    if _NAME.fullmatch(item.text):
                        self.set(item.text, self.unknown((), "what is read"))
                return Unsure(())
            case "export" | "declare" | "typeset" | "local" | "readonly":
                if name == "export":
                    self.exported.update(item.text.partition("=")[0] for item in rest)
                self.declare(rest)
            case "set" if rest and rest[0].text == "--":
                self.arguments = rest[1:]
            case "shift":
                count = int(rest[0].text) if rest and rest[0].text.isdecimal() else 1
                self.arguments = self.arguments[count:] if self.arguments else self.arguments
            case "let":
                for item in rest:
                    self.number(item.text)
            case "exec" | "set" | "wait" | "trap":
                pass
            case _:
                return None
        return True

    def walk_file(self, name: str, text: str) -> Status:
        outer = self.file
        self.calls += 1
        if self.calls > _MOST_CALLS:
            raise ConfigError(f"{outer.name}: {name} is started within itself")
        self.file = ScriptFile(name, clean(text))
        try:
            return self.body(shell.parse_shell(self.file.text, name))
        except _Leave:
            return True
        finally:
            self.calls -= 1
            self.file = outer

    def read_text(self, text: str, token: Token) -> Status:
        """Walk a text that holds commands, such as the argument of `bash -c`."""
        outer = self.file
        self.calls += 1
        if self.calls > _MOST_CALLS:
            raise ConfigError(f"{outer.name}: its commands nest without end")
        before, values = len(self.script.commands), self._copy()
        self.file = ScriptFile(outer.name, text)
        try:
            return self.body(shell.parse_shell(text, outer.name))
        except (ConfigError, _Stop):
            # It only looked like commands.
            return Unsure(())
        finally:
            self.values = values
            self.calls -= 1
            self.file = outer
            # The words stand somewhere in the text that they are from.
            for index in range(before, len(self.script.commands)):
                command = self.script.commands[index]
                words = tuple(
                    item._replace(file=token.file, start=token.start, stop=token.stop) for item in command.words
                )
                self.script.commands[index] = replace(command, words=words, start=words[0])

    def declare(self, rest: list[Token]) -> None:
        flags = "".join(item.text[1:] for item in rest if item.text.startswith("-"))
        for item in rest:
            name, sign, value = item.text.partition("=")
            if not _NAME.fullmatch(name):
                continue
            if sign:
                self.set(name, value)
            elif "A" in flags:
                self.values[name] = {}
            elif "a" in flags:
                self.values.setdefault(name, [])


def _joined_items(one: list[Token], other: list[Token], names: tuple[str, ...]) -> list[Token]:
    """Join two arrays: what is in only one of them may be there or not."""
    if [item.text for item in one] == [item.text for item in other]:
        return one
    same = takewhile(lambda pair: pair[0].text == pair[1].text, zip(one, other, strict=False))
    start = sum(1 for _ in same)
    rest = [item._replace(maybe=item.maybe or names) for item in (*one[start:], *other[start:])]
    return [*one[:start], *rest]
