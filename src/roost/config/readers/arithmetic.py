"""The arithmetic of the shell: `$(( … ))`, `(( … ))` and `let`.

>>> calculate("(nodes - 1) * 8", {"nodes": "4"}.__getitem__, lambda name, value: None)
24
"""

from __future__ import annotations

import re
from collections.abc import Callable

_TOKEN = re.compile(
    r"\s*(0[xX][0-9a-fA-F]+|\d+#\w+|\d+|[A-Za-z_]\w*|\*\*|<<=|>>=|<<|>>|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%&|^]=|[-+*/%<>=!~&|^?:,()])"
)
_LEVELS = (
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!="),
    ("<", ">", "<=", ">="),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
)
_MOST = 2**63
_MAX_DEPTH = 40


class Undecided(Exception):  # noqa: N818 - the value is unknown
    """The expression depends on this text, which is not a number."""


def calculate(text: str, read: Callable[[str], str], write: Callable[[str, int], None], depth: int = 0) -> int:
    """Work out an expression; `read` gives the text of a variable, itself an expression."""
    return _Expression(text, read, write, depth).whole()


class _Expression:
    def __init__(self, text: str, read: Callable[[str], str], write: Callable[[str, int], None], depth: int) -> None:
        self._read, self._write, self._depth, self._text = read, write, depth, text
        self._at = 0
        self._tokens: list[str] = []
        if depth > _MAX_DEPTH or len(text) > 10_000:
            raise Undecided(text[:100])
        at, text = 0, text.strip()
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                raise Undecided(self._text)
            self._tokens.append(found[1])
            at = found.end()

    def whole(self) -> int:
        if not self._tokens:
            return 0
        value = self._assignment()
        while self._takes(","):
            value = self._assignment()
        if self._at < len(self._tokens):
            raise Undecided(self._text)
        return value

    def _next(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _takes(self, *signs: str) -> str:
        sign = self._next()
        if sign and sign in signs:
            self._at += 1
            return sign
        return ""

    def _assignment(self) -> int:
        name = self._next()
        sign = self._tokens[self._at + 1] if self._at + 1 < len(self._tokens) else ""
        if re.match(r"[A-Za-z_]", name) and (sign == "=" or re.fullmatch(r"[-+*/%&|^]=|<<=|>>=", sign)):
            self._at += 2
            value = self._assignment()
            value = value if sign == "=" else self._apply(sign[:-1], self._variable(name), value)
            self._write(name, value)
            return value
        return self._choice()

    def _choice(self) -> int:
        value = self._binary(0)
        if self._takes("?"):
            one = self._assignment()
            self._takes(":")
            other = self._assignment()
            return one if value else other
        return value

    def _binary(self, level: int) -> int:
        if level == len(_LEVELS):
            return self._power()
        value = self._binary(level + 1)
        while sign := self._takes(*_LEVELS[level]):
            value = self._apply(sign, value, self._binary(level + 1))
        return value

    def _power(self) -> int:
        value = self._unary()
        return self._apply("**", value, self._power()) if self._takes("**") else value

    def _unary(self) -> int:
        self._depth += 1
        if self._depth > _MAX_DEPTH * 2:
            raise Undecided(self._text[:100])
        sign = self._takes("-", "+", "!", "~", "++", "--")
        if sign in ("++", "--"):
            name = self._next()
            self._at += 1
            value = self._variable(name) + (1 if sign == "++" else -1)
            self._write(name, value)
        elif sign:
            value = self._unary()
            value = {"-": -value, "+": value, "!": int(not value), "~": ~value}[sign]
        else:
            value = self._atom()
        self._depth -= 1
        return value

    def _atom(self) -> int:
        atom = self._next()
        self._at += 1
        if atom == "(":
            value = self._assignment()
            self._takes(")")
            return value
        if re.match(r"[A-Za-z_]", atom):
            value = self._variable(atom)
            if sign := self._takes("++", "--"):
                self._write(atom, value + (1 if sign == "++" else -1))
            return value
        if not re.match(r"\d", atom) or len(atom) > 20:
            raise Undecided(self._text)
        if "#" in atom:
            base, _, digits = atom.partition("#")
            return int(digits, int(base)) if 2 <= int(base) <= 36 and digits.isalnum() else 0
        return int(atom, 16 if atom[:2] in ("0x", "0X") else 8 if re.fullmatch(r"0[0-7]+", atom) else 10)

    def _variable(self, name: str) -> int:
        return calculate(self._read(name), self._read, self._write, self._depth + 1)

    def _apply(self, sign: str, one: int, other: int) -> int:
        if sign in ("/", "%"):
            if not other:
                raise Undecided(self._text)
            quotient = abs(one) // abs(other) * (1 if (one < 0) == (other < 0) else -1)
            return quotient if sign == "/" else one - quotient * other
        if sign == "**" and (other < 0 or other > 64):
            raise Undecided(self._text)
        if sign in ("<<", ">>") and not 0 <= other < 64:
            raise Undecided(self._text)
        value = _OPERATIONS[sign](one, other)
        # As in the shell, numbers have 64 bits.
        return (value + _MOST) % (2 * _MOST) - _MOST


_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "**": lambda a, b: a**b,
    "<<": lambda a, b: a << b,
    ">>": lambda a, b: a >> b,
    "<": lambda a, b: int(a < b),
    ">": lambda a, b: int(a > b),
    "<=": lambda a, b: int(a <= b),
    ">=": lambda a, b: int(a >= b),
    "==": lambda a, b: int(a == b),
    "!=": lambda a, b: int(a != b),
    "&": lambda a, b: a & b,
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "&&": lambda a, b: int(bool(a) and bool(b)),
    "||": lambda a, b: int(bool(a) or bool(b)),
}
