"""Tokens become text while they are made: whole characters, up to the first stop text, with calls of tools apart."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

_BROKEN = "\ufffd"
"""Decoders write it for bytes that are no character, or not yet."""
_MOST_BROKEN = 3
"""How many of the bytes of a character may come before the last one."""
_MOST_WINDOW = 64
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def length_without(text: str, marks: Sequence[str]) -> int:
    """Return how much of a text cannot be the beginning of a mark.

    >>> length_without("1 < 2 <to", ["<tool>"])
    6
    """
    first = max(0, len(text) + 1 - max(map(len, marks), default=1))
    return next((at for at in range(first, len(text)) if any(one.startswith(text[at:]) for one in marks)), len(text))


class TokenText:
    """The text of a sample, as its tokens are made: what it returns never changes with the tokens that follow.

    `decode` returns the text of tokens. A stop text is not part of the text, nor is what follows it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self.is_stopped: bool = False
        """Whether a stop text has come."""
        self._decode = decode
        self._stops = stops
        # How a token reads depends on the one before it, so the window has the last tokens that were read, too.
        self._window: list[int] = []
        self._num_old = 0
        self._told = 0
        """How much of the window's text is known."""
        self._held = ""
        """Text that may be the beginning of a stop text."""

    def add(self, token: int) -> str:
        """Take the next token, and return the text that is certain now."""
        self._window.append(token)
        text = self._decode(self._window)
        is_full = len(self._window) > _MOST_WINDOW
        certain = len(text) if is_full else max(len(text.rstrip(_BROKEN)), len(text) - _MOST_BROKEN)
        new, self._told = text[self._told : certain], max(self._told, certain)
        if certain == len(text):
            self._window = self._window[self._num_old :]
            self._num_old = len(self._window)
            self._told = len(self._decode(self._window))
        return self._release(new)

    def end(self) -> str:
        """Return the rest of the text: no token follows."""
        if self.is_stopped:
            return ""
        text = self._release(self._decode(self._window)[self._told :])
        return text if self.is_stopped else text + self._held

    def _release(self, new: str) -> str:
        """Return what comes before a stop text, or what cannot be the beginning of one."""
        self._held += new
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        self.is_stopped = bool(found)
        end = min(found) if found else length_without(self._held, self._stops)
        text, self._held = self._held[:end], self._held[end:]
        return text


class ToolCall(NamedTuple):
    """A function that a model wants to be called."""

    name: str
    arguments: str
    """A JSON object."""


class ToolCallReader:
    """Takes the calls of tools out of a text, as models that were trained on Hermes' form write them, such as Qwen's.

    A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. What is not one stays text.
    """

    def __init__(self) -> None:
        self._held = ""

    def add(self, text: str, *, is_last: bool = False) -> tuple[str, list[ToolCall]]:
        """Take the next piece of the text, and return what is certain not to be a call, and the calls."""
        self._held += text
        plain, calls = "", list[ToolCall]()
        while _OPEN in self._held:
            before, _, rest = self._held.partition(_OPEN)
            body, close, after = rest.partition(_CLOSE)
            plain += before
            if not (close or is_last):
                self._held = _OPEN + rest
                return plain, calls
            if (call := _read_call(body)) is None:
                plain += _OPEN + body + close
            else:
                calls.append(call)
            self._held = after
        end = len(self._held) if is_last else length_without(self._held, [_OPEN])
        plain, self._held = plain + self._held[:end], self._held[end:]
        return plain, calls


def _read_call(body: str) -> ToolCall | None:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not (isinstance(call, dict) and isinstance(call.get("name"), str)):
        return None
    arguments = call.get("arguments", {})
    return ToolCall(call["name"], json.dumps(arguments)) if isinstance(arguments, dict) else None
