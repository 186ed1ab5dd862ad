"""The variables of a script, and the words that it expands to.

`Variables` knows how the shell expands a word; what `$(…)` prints is the business of the walk that is built on it.
"""

from __future__ import annotations

import os.path
import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import translate

from roost.config.readers import shell
from roost.config.readers.arithmetic import Undecided, calculate
from roost.config.readers.marks import EMPTY, MARK, Script, ScriptFile, Token, Unknown, Unsure, has_mark
from roost.errors import ConfigError
from roost.text import shorten

_PLAIN_WORD = re.compile(r"[\w./:,+@%^=\[\]{}?*-]+")
_PARAMETER = re.compile(r"([#!]?)([A-Za-z_]\w*|\d+|[@*#?$!-])(?:\[((?:[^\[\]]|\[[^\[\]]*\])*)\])?")
_WHOLE_ARRAY = re.compile(r"\$(@|\{@\}|\{\w+\[@\][^{}]*\})")
_OPERATOR = re.compile(r":?[-=?+]|##?|%%?|//?|\^\^?|,,?|:|@")
_QUOTED_PLAIN = re.compile(r'[^"\\$`]+')
_UNQUOTED_PLAIN = re.compile(r"[^'\"\\$`]+")
_MOST_CHARACTERS = 4 * 2**20
_NO_ARGUMENTS = Unknown(("1",), "the arguments of the script", assumed="0")

Values = str | list[Token] | dict[str, str]


@dataclass(slots=True)
class Variables:
    """The variables of a script at one place in it."""

    script: Script
    given: dict[str, str]
    file: ScriptFile
    values: dict[str, Values] = field(default_factory=dict)
    arguments: list[Token] | None = None
    place: str = "."
    """The folder that it is in, as far as `cd` says."""
    required: set[str] = field(default_factory=set)
    """The variables without which the script ends."""
    size: int = 0

    @abstractmethod
    def output_of(self, inner: str) -> str:
        """Return what a command prints, or a mark."""

    def expand(self, word: shell.Word) -> list[Token]:
        """Return the arguments that a word becomes."""
        raw = self.file.text[word.start : word.stop]
        if _PLAIN_WORD.fullmatch(raw):
            return [Token(raw, self.file, word.start, word.stop)]
        fields = Fields(self.file, word.start, word.stop)
        self._expand(raw, fields)
        found = fields.close()
        self.grow(sum(len(item.text) for item in found))
        return [part for item in found for part in self._options(item)]

    def _options(self, token: Token) -> Iterator[Token]:
        """Yield what an unquoted variable may add, each such word marked with what decides it."""
        found = MARK.fullmatch(token.text)
        unknown = self.script.unknowns[int(found[1])] if found else None
        several = unknown is not None and any(not text or " " in text or text[0] == "-" for text in unknown.options)
        if unknown is None or not several or token.maybe:
            yield token
            return
        names = unknown.names or ("?",)
        for option in unknown.options:
            for text in option.split():
                yield token._replace(text=text, maybe=names)

    def one(self, word: shell.Word) -> str:
        """Return a word as one text, as on the right of `=`."""
        raw = self.file.text[word.start : word.stop]
        return raw if _PLAIN_WORD.fullmatch(raw) else self.text_of(raw)

    def text_of(self, raw: str) -> str:
        """Expand a text as one word."""
        fields = Fields(self.file, 0, 0, splits=False)
        self._expand(raw, fields)
        return " ".join(item.text for item in fields.close())

    def pattern(self, word: shell.Word) -> str:
        """Return a pattern of `case`: quotes make its signs literal."""
        raw = self.file.text[word.start : word.stop]
        quoted = re.fullmatch(r"\"([^\"$`\\]*)\"|'([^']*)'", raw)
        if quoted:
            return re.sub(r"([*?\[])", r"[\1]", quoted[1] or quoted[2] or "")
        return self.text_of(raw)

    def _expand(self, raw: str, fields: Fields, *, quoted: bool = False) -> None:
        at = 0
        while at < len(raw):
            found = (_QUOTED_PLAIN if quoted else _UNQUOTED_PLAIN).match(raw, at)
            if found:
                fields.add(found[0])
                at = found.end()
                continue
            sign = raw[at]
            if sign == "\\":
                following = raw[at + 1 : at + 2]
                if following != "\n":
                    fields.add(following if not quoted or following in '$`"\\' else sign + following)
                at += 2
            elif sign == "'":
                stop = raw.find("'", at + 1)
                fields.add(raw[at + 1 : stop])
                at = stop + 1
            elif sign == '"' and quoted:
                # Quotes within `"${NAME:-"…"}"` are not part of the value.
                at += 1
            elif sign == '"':
                stop = shell.end_of_double(raw, at)
                if not _WHOLE_ARRAY.fullmatch(raw, at + 1, stop):
                    fields.add("")
                self._expand(raw[at + 1 : stop], fields, quoted=True)
                at = stop + 1
            elif sign == "`":
                stop = shell.end_of_backticks(raw, at)
                self._put(self.output_of(raw[at + 1 : stop]), fields, quoted)
                at = stop + 1
            elif sign == "$":
                stop = shell.end_of_dollar(raw, at, quoted=quoted)
                if raw.startswith("$'", at) and not quoted:
                    fields.add(raw[at + 2 : stop - 1])
                elif stop == at + 1:
                    fields.add("$")
                else:
                    self._put(self.dollar(raw[at:stop], quoted), fields, quoted)
                at = stop
            else:
                fields.add(sign)
                at += 1

    def _put(self, value: str | list[Token], fields: Fields, quoted: bool) -> None:
        if isinstance(value, list):
            fields.add_items(value)
        elif quoted or not fields.splits:
            fields.add(value)
        else:
            fields.add_split(value)

    def dollar(self, raw: str, quoted: bool) -> str | list[Token]:
        if raw.startswith("$((") and raw.endswith("))"):
            found = self.number(raw[3:-2])
            return self.mark(Unknown(found.names, "arithmetic")) if isinstance(found, Unsure) else str(found)
        if raw.startswith("$("):
            return self.output_of(raw[2:-1])
        if raw.startswith("${"):
            return self.parameter(raw[2:-1], quoted)
        return self.parameter(raw[1:], quoted)

    def parameter(self, inner: str, quoted: bool) -> str | list[Token]:
        """Expand what is between the braces of `${…}`."""
        found = _PARAMETER.match(inner)
        if found is None:
            return self.unknown((), f"${{{shorten(inner)}}}")
        prefix, name, index = found.groups()
        rest = inner[found.end() :]
        if inner in ("#", "!") or (prefix and not rest and not index and inner == prefix):
            prefix, name = "", inner
        everything = index in ("@", "*") or name in ("@", "*")
        if prefix == "#":
            return self._length(name, index)
        if prefix == "!":
            if index:
                value = self.values.get(name)
                return [Token(key, self.file, 0, 0) for key in value] if isinstance(value, dict) else []
            name = self.lookup(name)
            if has_mark(name) or not re.fullmatch(r"[A-Za-z_]\w*", name):
                return self.unknown(self.script.names_in(name), "an indirect variable")
        if everything:
            items = self._items(name)
            items = self._slice(items, rest) if rest.startswith(":") else items
            return " ".join(item.text for item in items) if quoted and "*" in (index, name) else items
        value = self._value(name, index)
        operator = _OPERATOR.match(rest)
        if operator is None:
            return self.environment(name) if value is None else value
        sign, word = operator[0], rest[operator.end() :]
        if sign.lstrip(":") in ("-", "=", "?", "+"):
            return self._default(name, value, sign, word, quoted)
        if value is None:
            return self.environment(name)
        value = self.settled(value)
        if has_mark(value):
            return self.unknown(self.script.names_in(value), "a part of an unknown value")
        return self._edited(value, sign, word)

    def _default(self, name: str, value: str | None, sign: str, word: str, quoted: bool) -> str | list[Token]:
        unset = value is None or (not self.settled(value) and sign.startswith(":"))
        if sign.endswith("+"):
            return "" if unset else self._inner(word, quoted)
        if not unset and value is not None:
            return value
        if sign.endswith("?"):
            return self.environment(name)
        if value is None and not word and sign.endswith("-") and not name.isdecimal():
            return f"\ue002{name}\ue003"
        text = self._inner(word, quoted)
        if sign.endswith("="):
            self.set(name, text if isinstance(text, str) else " ".join(item.text for item in text))
        return text

    def _inner(self, word: str, quoted: bool) -> str | list[Token]:
        fields = Fields(self.file, 0, 0, splits=False)
        self._expand(word, fields, quoted=quoted)
        found = fields.close()
        return found[0].text if len(found) == 1 else found

    def _edited(self, value: str, sign: str, word: str) -> str:
        if sign == ":":
            start, _, length = word.partition(":")
            first, count = self.number(start or "0"), self.number(length) if length else None
            if isinstance(first, Unsure) or isinstance(count, Unsure):
                return self.unknown((), "a part of a text")
            tail = value[first:] if abs(first) <= len(value) else ""
            return tail if count is None else tail[:count]
        if sign in ("^^", ",,"):
            return value.upper() if sign == "^^" else value.lower()
        if sign in ("^", ","):
            return (value[:1].upper() if sign == "^" else value[:1].lower()) + value[1:]
        pattern = self.text_of(word)
        if sign in ("/", "//"):
            old, new = _split_pattern(word)
            return _replaced(value, self.text_of(old), self.text_of(new), everywhere=sign == "//")
        ends = range(len(value), -1, -1) if sign in ("##", "%") else range(len(value) + 1)
        if len(value) > 4096 or sign == "@":
            return value
        if sign in ("#", "##"):
            return next((value[end:] for end in ends if matches(value[:end], pattern)), value)
        return next((value[:end] for end in ends if matches(value[end:], pattern)), value)

    def _items(self, name: str) -> list[Token]:
        if name in ("@", "*"):
            self.script.passes_arguments = True
            return self.arguments or []
        value = self.values.get(name)
        if isinstance(value, list):
            return value
        if isinstance(value, dict):
            return [Token(text, self.file, 0, 0) for text in value.values()]
        return [] if value is None else [Token(value, self.file, 0, 0)]

    def _slice(self, items: list[Token], rest: str) -> list[Token]:
        if not rest or rest[1:2] in "-+=?":
            return items
        start, _, count = rest[1:].partition(":")
        first, most = self.number(start), self.number(count) if count else len(items)
        if isinstance(first, Unsure) or isinstance(most, Unsure):
            return items
        return items[first : first + most] if items is not self.arguments else items[max(0, first - 1) :][:most]

    def _length(self, name: str, index: str | None) -> str:
        if index in ("@", "*") or name in ("@", "*"):
            items = self._items(name)
            unsure = tuple(dict.fromkeys(one for item in items for one in item.maybe))
            return self.unknown(unsure, "how many there are") if unsure else str(len(items))
        if name == "#":
            return str(len(self.arguments)) if self.arguments is not None else self.mark(_NO_ARGUMENTS)
        value = self._value(name, index)
        if value is None or has_mark(value):
            return self.unknown((name,), "its length")
        return str(len(value))

    def _value(self, name: str, index: str | None = None) -> str | None:
        """Return the value of a variable as one text; None if nothing here sets it."""
        if name == "#":
            return str(len(self.arguments)) if self.arguments is not None else self.mark(_NO_ARGUMENTS)
        if name.isdecimal():
            return self._argument(int(name))
        if name in ("?", "$", "!", "-"):
            return self.unknown((), f"${name}")
        value = self.values.get(name)
        if isinstance(value, dict):
            return value.get(self.text_of(index or "0"))
        if isinstance(value, list):
            number = self.number(index or "0")
            if isinstance(number, Unsure):
                return self.unknown(number.names, "an index")
            return value[number].text if -len(value) <= number < len(value) else None
        if value is not None:
            return value
        if name in self.given:
            self.script.used.add(name)
            return self.given[name]
        return self._own_names(name)

    def _own_names(self, name: str) -> str | None:
        if name in ("BASH_SOURCE", "SCRIPT"):
            return self.file.name if name == "BASH_SOURCE" else None
        return self.place if name == "PWD" else None

    def _argument(self, number: int) -> str | None:
        if number == 0:
            return self.file.name
        self.script.passes_arguments = True
        return self.arguments[number - 1].text if self.arguments and number <= len(self.arguments) else None

    def lookup(self, name: str, missing: str | None = None) -> str:
        """Return the value of a variable, or what says that it is unknown."""
        value = self._value(name)
        if value is None:
            return self.environment(name) if missing is None else missing
        return value

    def settled(self, text: str) -> str:
        """Return a text with a variable that is empty unless the user gives it: unknown if the script needs it."""
        if "\ue002" not in text:
            return text
        return EMPTY.sub(lambda found: self.environment(found[1]) if found[1] in self.required else "", text)

    def environment(self, name: str) -> str:
        """Return a mark for a variable that only the environment knows."""
        return self.mark(Unknown((name,), "the environment", assumed=""))

    def unknown(self, names: tuple[str, ...], why: str) -> str:
        return self.mark(Unknown(names, why))

    def mark(self, unknown: Unknown) -> str:
        self.script.unknowns.append(unknown)
        return f"\ue000{len(self.script.unknowns) - 1}\ue001"

    def number(self, text: str) -> int | Unsure:
        """Work out an arithmetic expression."""

        def read(name: str) -> str:
            return self.settled(self.lookup(name, "0" if name in self.values else None))

        def write(name: str, value: int) -> None:
            self.set(name, str(value))

        try:
            text = self.text_of(text) if "$" in text or "`" in text or '"' in text else text
            text = self.settled(text)
            return calculate(text, read, write)
        except Undecided as error:
            return Unsure(self.script.names_in(str(error)))

    def set(self, name: str, text: str) -> None:
        """Give a variable its value; one that the user gave stands in for what is unknown."""
        self.grow(len(text))
        found = MARK.fullmatch(text)
        unknown = self.script.unknowns[int(found[1])] if found else None
        if unknown is not None and (unknown.owned or not unknown.names):
            text = self.mark(replace(unknown, names=(name,), owned=True))
        if name in self.given:
            self.script.used.add(name)
            if has_mark(text):
                text = self.given[name]
            elif text != self.given[name]:
                self.script.ignored[name] = text
        if self.script.ignored.get(name) not in (None, text):
            self.script.ignored.pop(name, None)
        self.values[name] = text

    def grow(self, size: int) -> None:
        self.size += size
        if self.size > _MOST_CHARACTERS * 4 or size > _MOST_CHARACTERS:
            raise ConfigError(f"{self.file.name}: its variables expand without end")


class Fields:
    """The arguments that a word becomes, while it is expanded."""

    def __init__(self, file: ScriptFile, start: int, stop: int, *, splits: bool = True) -> None:
        self._place = (file, start, stop)
        self.splits = splits
        self._done: list[Token] = []
        self._open: list[str] | None = None
        self._maybe: tuple[str, ...] = ()

    def add(self, text: str) -> None:
        self._open = [*(self._open or []), text] if self._open is None or len(self._open) < 8 else self._packed(text)

    def _packed(self, text: str) -> list[str]:
        return ["".join(self._open or []) + text]

    def add_split(self, text: str) -> None:
        if text and text[0].isspace():
            self._end()
        parts = text.split()
        for index, part in enumerate(parts):
            if index:
                self._end()
            self.add(part)
        if parts and text[-1].isspace():
            self._end()

    def add_items(self, items: Sequence[Token]) -> None:
        """Add the items of an array, of which the first and the last join what is around them."""
        if self._open is None and items:
            self._done += items[:-1]
            last = items[-1]
            self._done.append(last)
            return
        for index, item in enumerate(items):
            if index:
                self._end()
            self.add(item.text)

    def _end(self) -> None:
        if self._open is not None:
            self._done.append(Token("".join(self._open), *self._place))
        self._open = None

    def close(self) -> list[Token]:
        self._end()
        return self._done


def matches(text: str, pattern: str) -> bool:
    """Compare a text with a pattern of the shell."""
    if not re.search(r"[*?\[]", pattern):
        return text == pattern
    if len(pattern) > 1000 or len(text) > 10_000:
        return False
    return re.match(translate(pattern), text) is not None


def _split_pattern(word: str) -> tuple[str, str]:
    """Split `old/new` at the first `/` that is not quoted."""
    at = 0
    while at < len(word) and word[at] != "/":
        at = shell.end_of_dollar(word, at) if word[at] == "$" else at + (2 if word[at] == "\\" else 1)
    return word[:at], word[at + 1 :]


def _replaced(value: str, old: str, new: str, *, everywhere: bool) -> str:
    if not old or len(value) > 10_000:
        return value
    if not re.search(r"[*?\[]", old):
        return value.replace(old, new) if everywhere else value.replace(old, new, 1)
    pattern = translate(old).removesuffix("\\Z").removesuffix("\\z")
    return re.sub(pattern, lambda _: new, value, count=0 if everywhere else 1)


def joined_path(place: str, target: str) -> str:
    """Return a path from a folder, as far as both are known."""
    return os.path.normpath(os.path.join(place, target)) if not has_mark(place) else target
