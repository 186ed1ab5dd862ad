"""Parse a shell script into commands, without running anything.

The grammar is that of bash as launch scripts use it. Words keep their place in the text and are expanded by `script`;
what bash would refuse is skipped where the rest can still be read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from roost.errors import ConfigError

_MAX_DEPTH = 100
_PLAIN = re.compile(r"[^\s'\"\\$`;&|()<>]+")
_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGN = re.compile(r"([A-Za-z_]\w*)(?:\[((?:[^\]\[\"'$]|\$\{[^}]*\}|\$\w+|\"[^\"]*\"|'[^']*')*)\])?(\+?=)")
_REDIRECT = re.compile(r"(?:\d+|\{\w+\})?(<<<|<<-?|<>|<&|>>|>\||>&|&>>|&>|<|>)")
_BLANK = re.compile(r"(?:[ \t\r]|\\\r?\n)+")
_KEYWORD = re.compile(r"(?:[A-Za-z]+|[!{}]|\[\[)(?=[\s;&|()<>]|$)")
_FUNCTION = re.compile(r"(?:function[ \t]+)?([\w.:-]+)[ \t]*(\([ \t]*\))?\s*(?=[{(])")
_TEST_SIGN = re.compile(r"&&|\|\||[()<>]")
_DOLLAR_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_HEREDOC = re.compile(r"<<(-?)[ \t]*([\"']?)(\w+)\2")
_CASE_WORD = re.compile(r"case(?=\s)|esac\b")
_DOUBLE_PLAIN = re.compile(r'[^"\\$`]+')


@dataclass(frozen=True, slots=True)
class Word:
    """A word as it is written: from `start` to `stop` in the text."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Assign:
    """`NAME=value`, `NAME+=value`, `NAME[index]=value` or `NAME=(items)`."""

    name: str
    index: str | None
    append: bool
    value: Word | None
    items: tuple[Word, ...] | None


@dataclass(slots=True)
class Document:
    """A here-document: the line that ends it, and its place in the text, once the parser gets there."""

    mark: str
    indented: bool
    literal: bool
    start: int = 0
    stop: int = 0


@dataclass(frozen=True, slots=True)
class Simple:
    """A command: its assignments, its words, the file that its output goes to, and the document that it reads."""

    start: int
    assigns: tuple[Assign, ...]
    words: tuple[Word | Assign, ...]
    output: Word | None = None
    document: Document | None = None


@dataclass(frozen=True, slots=True)
class Chain:
    """Commands joined by `&&` and `||`; each pair has the operator before it, the first one `""`."""

    parts: tuple[tuple[str, Node], ...]


@dataclass(frozen=True, slots=True)
class Pipe:
    """Commands joined by `|`, or one that `!` negates."""

    parts: tuple[Node, ...]
    negated: bool


@dataclass(frozen=True, slots=True)
class If:
    """`if`: the conditions with their bodies, and `else` as a body without a condition."""

    start: int
    branches: tuple[tuple[Body | None, Body], ...]


@dataclass(frozen=True, slots=True)
class Case:
    """`case`: the word, and the patterns of each body."""

    start: int
    word: Word
    branches: tuple[tuple[tuple[Word, ...], Body], ...]


@dataclass(frozen=True, slots=True)
class For:
    """`for NAME in words`, or `for ((a; b; c))` with `steps`."""

    name: str
    words: tuple[Word, ...] | None
    steps: tuple[str, str, str] | None
    body: Body


@dataclass(frozen=True, slots=True)
class While:
    """`while`, or `until` if `negated`."""

    test: Body
    body: Body
    negated: bool


@dataclass(frozen=True, slots=True)
class Function:
    """The definition of a function."""

    name: str
    body: Node


@dataclass(frozen=True, slots=True)
class Group:
    """`{ … }`, or `( … )` with variables of its own."""

    body: Body
    own: bool


@dataclass(frozen=True, slots=True)
class Test:
    """`[[ … ]]`, as its words."""

    words: tuple[Word, ...]


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """`(( … ))`."""

    text: str


Node = Simple | Chain | Pipe | If | Case | For | While | Function | Group | Test | Arithmetic
Body = tuple[Node, ...]
_ENDS = frozenset({"then", "else", "elif", "fi", "do", "done", "esac", "}"})


class ShellSyntaxError(Exception):
    """A construct that ends nowhere."""


def parse_shell(text: str, name: str) -> Body:
    """Parse a script; ConfigError if it is nested too deep to be one, or ends within a quote or a bracket."""
    parser = _Parser(text)
    try:
        return parser.body()
    except ShellSyntaxError as error:
        line = text.count("\n", 0, min(int(error.args[1]), len(text))) + 1
        raise ConfigError(f"{name}:{line}: not a shell script that can be read: {error.args[0]}") from None
    except RecursionError:
        raise ConfigError(f"{name}: nested deeper than {_MAX_DEPTH} levels") from None


@dataclass(slots=True)
class _Parser:
    text: str
    at: int = 0
    depth: int = 0
    _heredocs: list[Document] = field(default_factory=list)
    _output: Word | None = None
    _document: Document | None = None

    def body(self, *, until: str = "") -> Body:
        """Parse commands up to a word that ends a body, or the bracket or `;;` that closes it."""
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise RecursionError
        found: list[Node] = []
        while True:
            self._skip_lines()
            if self.at >= len(self.text) or (until and self.text.startswith(until, self.at)):
                break
            if self._keyword() in _ENDS or self.text.startswith(";;", self.at):
                # At the top of a script such a word ends nothing, and is skipped.
                if self.depth > 1:
                    break
                self.at += 2 if self.text[self.at] == ";" else len(self._keyword())
                continue
            if self.text[self.at] in ")&|;":
                self.at += 1
                continue
            start = self.at
            found.append(self._chain())
            if self.at == start:
                self.at += 1
        self.depth -= 1
        return tuple(found)

    def _chain(self) -> Node:
        parts: list[tuple[str, Node]] = [("", self._pipe())]
        while True:
            self._blank()
            sign = self.text[self.at : self.at + 2]
            if sign not in ("&&", "||"):
                break
            self.at += 2
            self._skip_lines()
            parts.append((sign, self._pipe()))
        if self.text.startswith("&", self.at) or (
            self.text.startswith(";", self.at) and not self.text.startswith(";;", self.at)
        ):
            self.at += 1
        return parts[0][1] if len(parts) == 1 else Chain(tuple(parts))

    def _pipe(self) -> Node:
        self._blank()
        negated = False
        while self._keyword() in ("!", "time"):
            negated ^= self._keyword() == "!"
            self.at += len(self._keyword())
            self._blank()
        parts = [self._command()]
        while True:
            self._blank()
            if not self.text.startswith("|", self.at) or self.text.startswith("||", self.at):
                break
            self.at += 2 if self.text.startswith("|&", self.at) else 1
            self._skip_lines()
            parts.append(self._command())
        return parts[0] if len(parts) == 1 and not negated else Pipe(tuple(parts), negated)

    def _command(self) -> Node:
        node = self._compound()
        if node is None:
            return self._simple()
        while self._redirect():
            pass
        return node

    def _compound(self) -> Node | None:
        text, start = self.text, self.at
        keyword = self._keyword()
        if text.startswith("((", start):
            stop = _end_of_arithmetic(text, start)
            if stop:
                self.at = stop
                return Arithmetic(text[start + 2 : stop - 2])
        if text.startswith("(", start):
            self.at += 1
            return Group(self._closed(")"), own=True)
        if keyword == "{":
            self.at += 1
            inner = self.body()
            self._take("}")
            return Group(inner, own=False)
        if keyword == "[[":
            return self._test()
        if keyword == "if":
            return self._if()
        if keyword in ("while", "until"):
            self.at += len(keyword)
            test = self.body()
            return While(test, self._do(), keyword == "until")
        if keyword in ("for", "select"):
            self.at += len(keyword)
            return self._for()
        if keyword == "case":
            return self._case()
        return self._function(keyword)

    def _function(self, keyword: str) -> Node | None:
        has_word = keyword == "function"
        found = _FUNCTION.match(self.text, self.at)
        if found is None or not (has_word or found[2]):
            return None
        self.at = found.end()
        return Function(found[1], self._command())

    def _if(self) -> Node:
        start = self.at
        branches: list[tuple[Body | None, Body]] = []
        keyword = "if"
        while keyword in ("if", "elif", "else"):
            self.at += len(keyword)
            test = None
            if keyword != "else":
                test = self.body()
                self._take("then")
            branches.append((test, self.body()))
            keyword = self._keyword()
        self._take("fi")
        return If(start, tuple(branches))

    def _do(self) -> Body:
        self._take("do")
        inner = self.body()
        self._take("done")
        return inner

    def _for(self) -> Node:
        self._blank()
        if self.text.startswith("((", self.at):
            stop = _end_of_arithmetic(self.text, self.at) or self._fail("'((' is not closed")
            steps = [*self.text[self.at + 2 : stop - 2].split(";"), "", "", ""]
            self.at = stop
            self._skip_separators()
            return For("", None, (steps[0], steps[1], steps[2]), self._do())
        name = _NAME.match(self.text, self.at)
        if name is None:
            raise ShellSyntaxError("a 'for' without a name", self.at)
        self.at = name.end()
        self._skip_lines()
        words: list[Word] | None = None
        if self._keyword() == "in":
            self.at += 2
            words = []
            self._blank()
            while self.at < len(self.text) and self.text[self.at] not in "\n;":
                words.append(self._word())
                self._blank()
        self._skip_separators()
        return For(name[0], None if words is None else tuple(words), None, self._do())

    def _case(self) -> Node:
        start = self.at
        self.at += len("case")
        self._blank()
        word = self._word()
        self._skip_lines()
        self._take("in")
        branches: list[tuple[tuple[Word, ...], Body]] = []
        while True:
            self._skip_lines()
            if self.at >= len(self.text) or self._keyword() == "esac":
                break
            if self.text[self.at] == "(":
                self.at += 1
            patterns = []
            while True:
                self._blank()
                before = self.at
                patterns.append(self._word())
                self._blank()
                if self.text.startswith("|", self.at):
                    self.at += 1
                elif self.text.startswith(")", self.at):
                    self.at += 1
                    break
                elif self.at == before:
                    self._fail("a pattern of 'case' is not closed")
            branches.append((tuple(patterns), self.body()))
            if self.text.startswith(";;", self.at):
                self.at += 3 if self.text.startswith(";;&", self.at) else 2
        self._take("esac")
        return Case(start, word, tuple(branches))

    def _test(self) -> Node:
        self.at += 2
        words = []
        while True:
            self._skip_lines()
            if self.at >= len(self.text):
                self._fail("'[[' is not closed")
            if self._keyword() == "]]" or self.text.startswith("]]", self.at):
                self.at += 2
                break
            start = self.at
            sign = _TEST_SIGN.match(self.text, start)
            if sign:
                self.at = sign.end()
                words.append(Word(start, self.at))
                continue
            # A pattern after =~ may have brackets and bars of its own.
            is_pattern = bool(words) and self.text[words[-1].start : words[-1].stop] == "=~"
            words.append(self._word(brackets=is_pattern))
            if self.at == start:
                self.at += 1
        return Test(tuple(words))

    def _simple(self) -> Node:
        start = self.at
        assigns: list[Assign] = []
        words: list[Word | Assign] = []
        takes_assigns = False
        self._output = self._document = None
        while True:
            self._blank()
            ends = self.at >= len(self.text) or self.text[self.at] in "\n;)&|"
            if ends and not self.text.startswith("&>", self.at):
                break
            if self._redirect():
                continue
            before = self.at
            found = _ASSIGN.match(self.text, self.at) if not words or takes_assigns else None
            if found:
                assign = self._assign(found)
                (words if words else assigns).append(assign)
            else:
                word = self._word()
                if not words:
                    takes_assigns = self.text[word.start : word.stop] in _DECLARES
                words.append(word)
            if self.at == before:
                # A bracket where bash allows none.
                self.at += 1
        return Simple(start, tuple(assigns), tuple(words), self._output, self._document)

    def _assign(self, found: re.Match[str]) -> Assign:
        self.at = found.end()
        append = found[3] == "+="
        if self.text.startswith("(", self.at):
            self.at += 1
            items = []
            while True:
                self._skip_lines()
                if self.at >= len(self.text):
                    self._fail("'(' is not closed")
                if self.text[self.at] == ")":
                    self.at += 1
                    break
                before = self.at
                items.append(self._word())
                if self.at == before:
                    self.at += 1
            return Assign(found[1], found[2], append, None, tuple(items))
        return Assign(found[1], found[2], append, self._word(), None)

    def _redirect(self) -> bool:
        """Skip a redirection; note the here-document that it announces."""
        self._blank()
        found = _REDIRECT.match(self.text, self.at)
        if found is None or self.text.startswith(("<(", ">("), self.at):
            return False
        self.at = found.end()
        self._blank()
        target = self._word()
        if found[1] in ("<<", "<<-"):
            raw = self.text[target.start : target.stop]
            mark = re.sub(r"[\"'\\]", "", raw)
            self._document = Document(mark, found[1] == "<<-", mark != raw)
            self._heredocs.append(self._document)
        elif found[1] in (">", ">>", ">|"):
            self._output = target
        return True

    def _word(self, *, brackets: bool = False) -> Word:
        start = self.at
        self.at = _end_of_word(self.text, start, brackets=brackets)
        return Word(start, self.at)

    def _closed(self, bracket: str) -> Body:
        inner = self.body(until=bracket)
        if not self.text.startswith(bracket, self.at):
            self._fail(f"a bracket is not closed: {bracket!r} is missing")
        self.at += 1
        return inner

    def _take(self, word: str) -> None:
        self._skip_lines()
        if self._keyword() != word:
            self._fail(f"{word!r} is missing")
        self.at += len(word)

    def _fail(self, message: str) -> int:
        raise ShellSyntaxError(message, self.at)

    def _keyword(self) -> str:
        found = _KEYWORD.match(self.text, self.at)
        return found[0] if found else ""

    def _blank(self) -> None:
        """Skip spaces, continued lines and a comment."""
        while True:
            found = _BLANK.match(self.text, self.at)
            if found:
                self.at = found.end()
            if not self.text.startswith("#", self.at) or (self.at and self.text[self.at - 1] not in " \t\n\r;&|()"):
                return
            stop = self.text.find("\n", self.at)
            self.at = len(self.text) if stop < 0 else stop

    def _skip_lines(self) -> None:
        """Skip spaces, comments and line ends, and the here-documents that follow a line."""
        while True:
            self._blank()
            if not self.text.startswith("\n", self.at):
                return
            self.at += 1
            for document in self._heredocs:
                document.start = self.at
                self.at = document.stop = _end_of_heredoc(self.text, self.at, document.mark, document.indented)
            self._heredocs.clear()

    def _skip_separators(self) -> None:
        self._skip_lines()
        if self.text.startswith(";", self.at):
            self.at += 1
        self._skip_lines()


_DECLARES = frozenset({"export", "declare", "local", "readonly", "typeset", "alias"})


def _end_of_word(text: str, at: int, *, brackets: bool = False) -> int:
    """Return the end of a word, past its quotes and expansions."""
    size = len(text)
    while at < size:
        found = _PLAIN.match(text, at)
        if found:
            at = found.end()
            continue
        sign = text[at]
        if sign in "<>" and text[at + 1 : at + 2] == "(":
            at = _end_of_brackets(text, at + 2)
        elif brackets and sign in "()|":
            at += 1
        elif sign == "(" and at and text[at - 1] in "@?*+!=" and text[at - 2 : at - 1].strip():
            # A pattern such as @(a|b).
            at = _end_of_brackets(text, at + 1)
        elif sign in "\"'\\$`":
            at = _past(text, at)
        else:
            break
    return min(at, size)


def _past(text: str, at: int) -> int:
    """Return the place behind a quote, an escape or an expansion that begins here."""
    sign = text[at]
    if sign == "\\":
        return at + 2
    if sign == "'":
        return _find(text, "'", at + 1) + 1
    if sign == "`":
        return end_of_backticks(text, at) + 1
    if sign == '"':
        return end_of_double(text, at) + 1
    return end_of_dollar(text, at)


def end_of_double(text: str, at: int) -> int:
    """Return the place of the `"` that closes the one here."""
    start, at = at, at + 1
    while at < len(text):
        found = _DOUBLE_PLAIN.match(text, at)
        if found:
            at = found.end()
        elif text[at] == '"':
            return at
        elif text[at] == "$" and text[at + 1 : at + 2] in ("'", '"'):
            at += 1
        else:
            at = end_of_dollar(text, at, quoted=True) if text[at] == "$" else _past(text, at)
    raise ShellSyntaxError("a '\"' is not closed", start)


def end_of_backticks(text: str, at: int) -> int:
    """Return the place of the backtick that closes the one here."""
    stop = at + 1
    while stop < len(text) and text[stop] != "`":
        stop += 2 if text[stop] == "\\" else 1
    if stop >= len(text):
        raise ShellSyntaxError("a '`' is not closed", at)
    return stop


def end_of_dollar(text: str, at: int, depth: int = 0, *, quoted: bool = False) -> int:
    """Return the place behind the expansion that begins with the `$` here."""
    if text.startswith("$((", at):
        stop = _end_of_arithmetic(text, at + 1)
        if stop:
            return stop
    if text.startswith("$(", at):
        return _end_of_brackets(text, at + 2, depth + 1)
    if text.startswith("${", at):
        return _end_of_brace(text, at + 2, depth + 1, quoted=quoted)
    if text.startswith("$'", at):
        stop = at + 2
        while stop < len(text) and text[stop] != "'":
            stop += 2 if text[stop] == "\\" else 1
        return stop + 1
    if text.startswith('$"', at):
        return end_of_double(text, at + 1) + 1
    name = _DOLLAR_NAME.match(text, at + 1)
    return name.end() if name else at + 1


def _end_of_brace(text: str, at: int, depth: int, *, quoted: bool) -> int:
    if depth > _MAX_DEPTH:
        raise RecursionError
    start = at
    while at < len(text):
        sign = text[at]
        if sign == "}":
            return at + 1
        if sign == "$":
            at = end_of_dollar(text, at, depth, quoted=quoted)
        elif sign in '"\\`' or (sign == "'" and not quoted):
            # Between double quotes an apostrophe quotes nothing.
            at = _past(text, at)
        else:
            at += 1
    raise ShellSyntaxError("a '${' is not closed", start)


def _end_of_brackets(text: str, at: int, depth: int = 0) -> int:
    """Return the place behind the `)` that closes a bracket; `at` is behind the bracket."""
    if depth > _MAX_DEPTH:
        raise RecursionError
    start, level, cases = at, 1, 0
    heredocs: list[tuple[str, bool]] = []
    while at < len(text):
        sign = text[at]
        if sign == "(":
            level += 1
        elif sign == ")":
            # A `)` may close a pattern of `case` instead.
            if not cases or level > 1:
                level -= 1
            if not level:
                return at + 1
        elif sign == "$":
            at = end_of_dollar(text, at, depth)
            continue
        elif sign in "\"'\\`":
            at = _past(text, at)
            continue
        elif sign == "#" and text[at - 1] in " \t\n;":
            stop = text.find("\n", at)
            at = len(text) if stop < 0 else stop
            continue
        elif sign == "<" and (here := _HEREDOC.match(text, at)):
            heredocs.append((here[3], bool(here[1])))
            at = here.end()
            continue
        elif sign == "\n" and heredocs:
            at += 1
            for mark, indented in heredocs:
                at = _end_of_heredoc(text, at, mark, indented)
            heredocs = []
            continue
        elif sign in "ce" and not (text[at - 1].isalnum() or text[at - 1] in "_-./$"):
            word = _CASE_WORD.match(text, at)
            if word:
                cases += 1 if word[0] == "case" else -1
                at = word.end()
                continue
        at += 1
    raise ShellSyntaxError("a '(' is not closed", start)


def _end_of_arithmetic(text: str, at: int) -> int:
    """Return the place behind the `))` that closes the `((` here; 0 if these are two brackets of other meaning."""
    level, place = 0, at
    while place < len(text):
        sign = text[place]
        if sign == "(":
            level += 1
        elif sign == ")":
            level -= 1
            if level == 1 and text.startswith("))", place):
                return place + 2
            if level < 1:
                return 0
        elif sign in "\"'`\\":
            place = _past(text, place)
            continue
        elif sign == "$" and text.startswith(("$(", "${"), place):
            place = end_of_dollar(text, place)
            continue
        elif sign == "\n" and text[place - 1] != "\\" and level < 2:
            return 0
        place += 1
    return 0


def _end_of_heredoc(text: str, at: int, mark: str, indented: bool) -> int:
    """Return the place behind a here-document, whose text is no command; the end of the text if it never ends."""
    while at < len(text):
        stop = text.find("\n", at)
        stop = len(text) if stop < 0 else stop
        line = text[at:stop].rstrip("\r")
        at = min(stop + 1, len(text))
        if (line.lstrip("\t") if indented else line) == mark:
            # The line end closes the command, as it would without the document.
            return at
    return at


def _find(text: str, sign: str, at: int) -> int:
    found = text.find(sign, at)
    if found < 0:
        raise ShellSyntaxError(f"a {sign} is not closed", at - 1)
    return found
