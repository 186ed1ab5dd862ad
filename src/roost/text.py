"""Words for messages: joined, counted, cut to length, made safe to print."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def join_words(items: Sequence[object], *, last: str = "and", most: int = 8) -> str:
    """`[1, 2, 3]` as "1, 2 and 3", cut after `most` items so that a message stays readable."""
    words = [str(item) for item in items[:most]]
    if len(items) > most:
        return f"{', '.join(words)} {last} {len(items) - most} more"
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {last} {words[-1]}"


def at_most(lines: Sequence[str], most: int, more: str = "") -> list[str]:
    """Return the first lines and, if there are others, `more`: by default how many.

    >>> at_most(["a", "b", "c"], 1)
    ['a', 'and 2 more']
    """
    return [*lines[:most], more or f"and {len(lines) - most} more"] if len(lines) > most else list(lines)


def plural(number: int, one: str, many: str = "") -> str:
    """`1 node`, `2 nodes`; `many` is the plural where it is not `one` with an s."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def shorten(text: str, most: int = 60) -> str:
    """Cut a text that is too long for a message."""
    return text if len(text) <= most else text[: most - 3] + "..."


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that was probably meant."""
    import difflib  # only a mistake needs it

    close = difflib.get_close_matches(name[:100], sorted(known), n=1, cutoff=0.6)
    return close[0] if close else None


def printable(line: str) -> str:
    r"""Escape everything in a line that could upset a terminal.

    >>> printable("a\tb\x1b[2J")
    'a\tb\\x1b[2J'
    """
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in line)


def without_colours(text: str) -> str:
    r"""Return a text without the codes that colour it on a terminal.

    >>> without_colours("\x1b[31mred\x1b[0m")
    'red'
    """
    return _COLOUR.sub("", text)


def printable_lines(text: str) -> str:
    r"""Escape everything but line ends in a text that could upset a terminal.

    >>> printable_lines("a\nb\x1b[2J")
    'a\nb\\x1b[2J'
    """
    return "\n".join(map(printable, text.split("\n")))


def size_text(count: float, *, short: bool = False) -> str:
    """Bytes for people; the short form fits where there is little room.

    >>> size_text(3 * 2**30), size_text(64 * 2**20), size_text(1000), size_text(3 * 2**30, short=True)
    ('3.0 GiB', '64 MiB', '1000 bytes', '3.0G')
    """
    for unit, amount, digits in (("TiB", 2**40, 1), ("GiB", 2**30, 1), ("MiB", 2**20, 0), ("KiB", 2**10, 0)):
        if count >= amount:
            return f"{count / amount:.{digits}f}{unit[0] if short else f' {unit}'}"
    return f"{count:.0f}{'B' if short else ' bytes'}"


def cell_width(text: str) -> int:
    """Count the terminal cells that a text takes: East Asian wide characters take two."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def message_of(error: BaseException) -> str:
    """Return the message of an exception, or say that it has none to show: its class may be anyone's."""
    try:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as failure:
        return f"(its str() raises {type(failure).__name__})"


def error_text(error: BaseException) -> str:
    """Return `ValueError: its message`, or the type alone where an exception has no message."""
    message = message_of(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
