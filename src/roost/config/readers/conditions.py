"""The conditions of a script: `[ … ]` and `[[ … ]]`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from roost.config.readers import shell
from roost.config.readers.expand import Variables, matches
from roost.config.readers.marks import EMPTY, MARK, Script, Status, Token, Unsure, either, has_mark, opposite


def double_test(variables: Variables, node: shell.Test) -> Status:
    """Judge `[[ … ]]`."""
    raws = [variables.file.text[word.start : word.stop] for word in node.words]
    texts: list[tuple[str, bool]] = []
    for index, (word, raw) in enumerate(zip(node.words, raws, strict=True)):
        if raw in ("&&", "||", "(", ")", "!", "<", ">", "==", "!=", "=", "=~"):
            texts.append((raw, True))
        elif index and raws[index - 1] in ("==", "!=", "="):
            texts.append((variables.pattern(word), False))
        else:
            texts.append((variables.one(word), raw.startswith("-") and len(raw) < 4))
    return _Condition(variables, texts, patterns=True).whole()


def single_test(variables: Variables, words: list[Token]) -> Status:
    """Judge `[ … ]`, whose words are expanded."""
    signs = ("!", "(", ")", "-a", "-o", "=", "==", "!=", "<", ">")
    texts = [(item.text, item.text in signs or bool(re.fullmatch(r"-[a-z]{1,2}", item.text))) for item in words]
    return _Condition(variables, texts, patterns=False).whole()


def note_literals(script: Script, text: str, others: Iterable[str]) -> None:
    """Note what an unknown variable is compared with, to offer it to the user."""
    for name in script.names_in(text):
        known = script.literals.setdefault(name, [])
        known += [item for item in others if re.fullmatch(r"[\w.+-]{1,24}", item) and item not in known]


@dataclass(slots=True)
class _Condition:
    """The words of `[ … ]` or `[[ … ]]`, each with whether it is an operator."""

    variables: Variables
    texts: list[tuple[str, bool]]
    patterns: bool
    at: int = 0

    def whole(self) -> Status:
        return self._any() if self.texts else False

    def _any(self) -> Status:
        found = self._all()
        while self._takes("||", "-o"):
            found = either(found, self._all())
        return found

    def _all(self) -> Status:
        found = self._one()
        while self._takes("&&", "-a"):
            found = opposite(either(opposite(found), opposite(self._one())))
        return found

    def _takes(self, *signs: str) -> bool:
        if self.at < len(self.texts) and self.texts[self.at] in [(sign, True) for sign in signs]:
            self.at += 1
            return True
        return False

    def _one(self) -> Status:
        if self._takes("!"):
            return opposite(self._one())
        left = len(self.texts) - self.at
        if left >= 3 and self.texts[self.at + 1][0] in _COMPARE:
            first, sign, second = (text for text, _ in self.texts[self.at : self.at + 3])
            self.at += 3
            return self._compare(first, sign, second)
        if self._takes("("):
            found = self._any()
            self._takes(")")
            return found
        if left >= 2 and re.fullmatch(r"-[a-zA-Z]", self.texts[self.at][0]):
            sign, text = self.texts[self.at][0], self.texts[self.at + 1][0]
            self.at += 2
            if sign in ("-z", "-n"):
                return opposite(self._filled(text)) if sign == "-z" else self._filled(text)
            if sign == "-v":
                return text in self.variables.values or text in self.variables.given or Unsure((text,), likely=False)
            return Unsure(())
        if left:
            text = self.texts[self.at][0]
            self.at += 1
            return self._filled(text)
        return False

    def _filled(self, text: str) -> Status:
        script = self.variables.script
        if names := tuple(name for name in EMPTY.findall(text) if name not in self.variables.required):
            return True if EMPTY.sub("", text) else Unsure(names, likely=False)
        text = self.variables.settled(text)
        if MARK.sub("", text):
            return True
        unknowns = script.unknowns_in(text)
        if not unknowns:
            return False
        likely = False if all(item.assumed == "" for item in unknowns) else None
        return Unsure(script.names_in(text), likely)

    def _compare(self, first: str, sign: str, second: str) -> Status:
        script = self.variables.script
        if sign in ("=", "==", "!=") and not (first and second) and "\ue002" in first + second:
            found = self._filled(first or second)
            return found if sign == "!=" else opposite(found)
        first, second = self.variables.settled(first), self.variables.settled(second)
        if has_mark(first) or has_mark(second):
            if sign in ("=", "==", "!=") and not (first and second):
                found = self._filled(first or second)
                return found if sign == "!=" else opposite(found)
            for text, other in ((first, second), (second, first)):
                note_literals(script, text, [other])
            unknowns = script.unknowns_in(first + second)
            likely = None
            if sign in _NUMERIC and all(item.assumed == "0" for item in unknowns):
                known = self._compare(MARK.sub("0", first), sign, MARK.sub("0", second))
                likely = known if isinstance(known, bool) else None
            return Unsure(script.names_in(first + second), likely)
        if sign in _NUMERIC:
            numbers = self.variables.number(first or "0"), self.variables.number(second or "0")
            counts = [number for number in numbers if isinstance(number, int)]
            return _NUMERIC[sign](counts[0], counts[1]) if len(counts) == 2 else Unsure(())
        if sign == "=~":
            digits = re.fullmatch(r"\^\[0-9\]([+*])\$", second)
            return bool(re.fullmatch(f"[0-9]{digits[1]}", first)) if digits else Unsure(())
        if sign in ("<", ">"):
            return first < second if sign == "<" else first > second
        same = matches(first, second) if self.patterns else first == second
        return same is (sign != "!=")


_NUMERIC: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
_COMPARE = frozenset({"=", "==", "!=", "=~", "<", ">", *_NUMERIC})
