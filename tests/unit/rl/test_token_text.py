"""Text of tokens that are still being made: that of all of them, whole characters, stop texts, calls of tools."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roost.rl.engines.token_text import TokenText, ToolCall, ToolCallReader


def as_bytes(tokens):
    """What a tokenizer decodes whose tokens are bytes."""
    return bytes(tokens).decode(errors="replace")


def read(tokens, stops=(), decode=as_bytes):
    """The pieces of the text, and how many tokens were read."""
    text, pieces = TokenText(decode, stops), []
    for token in tokens:
        pieces.append(text.add(token))
        if text.is_stopped:
            break
    return [*pieces, text.end()], len(pieces)


@given(st.text(max_size=80))
def test_the_pieces_are_the_text_and_each_character_comes_whole(text):
    pieces, _ = read(text.encode(errors="replace"))
    assert "".join(pieces) == text.encode(errors="replace").decode()
    for number, piece in enumerate(pieces[:-1]):
        assert len(piece) <= 1, f"as soon as it is there: {number}"


@given(st.lists(st.integers(0, 255), max_size=300))
def test_bytes_that_are_no_text_are_told_as_such_in_time(tokens):
    pieces, _ = read(tokens)
    assert "".join(pieces) == as_bytes(tokens)
    told = 0
    for number, piece in enumerate(pieces[:-1], 1):
        told += len(piece)
        assert told >= len(as_bytes(tokens[:number])) - 3


def test_a_token_reads_as_it_does_after_the_one_before():
    words = ["▁Hello", "▁world", "s", "▁of", "▁us"]

    def decode(tokens):
        """As SentencePiece: the first token of a text loses its space."""
        return "".join(words[one] for one in tokens).replace("▁", " ").removeprefix(" ")

    assert read(range(5), decode=decode)[0] == ["Hello", " world", "s", " of", " us", ""]


@pytest.mark.parametrize(
    ("text", "stops", "expected", "num_read"),
    [
        ("one two three", ["two"], "one ", 7),
        ("one two three", ["two", "one t"], "", 5),
        ("one two three", ["e t", "ee"], "on", 5),
        ("aaab", ["aab"], "a", 4),
        ("a<<b", ["<<<"], "a<<b", 4),
        ("a<<", ["<<<"], "a<<", 3),
        ("é€😀!", ["€😀"], "é", 9),
        ("nothing", ["x"], "nothing", 7),
    ],
)
def test_a_text_ends_before_its_first_stop_text(text, stops, expected, num_read):
    pieces, count = read(text.encode(), stops)
    assert ("".join(pieces), count) == (expected, num_read)


@given(st.text("ab<", max_size=30), st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3))
def test_nothing_of_a_stop_text_is_ever_told(text, stops):
    first = min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)
    told = "".join(read(text.encode(), stops)[0])
    if first is None:
        assert told == text
    else:
        assert text.startswith(told)
        assert not any(stop in told for stop in stops)


def call(name="add", arguments='{"a": 1}'):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "plain", "calls"),
    [
        ("no call < at <tool> all", "no call < at <tool> all", []),
        (call(), "", [ToolCall("add", '{"a": 1}')]),
        (
            f"I add. {call()}{call('sub', '{}')} Done",
            "I add.  Done",
            [ToolCall("add", '{"a": 1}'), ToolCall("sub", "{}")],
        ),
        (call().removesuffix("</tool_call>"), "", [ToolCall("add", '{"a": 1}')]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [ToolCall("f", "{}")]),
        ("<tool_call>nonsense</tool_call>!", "<tool_call>nonsense</tool_call>!", []),
        (call(arguments="[1]"), call(arguments="[1]"), []),
        ('<tool_call>{"name": 7}</tool_call>', '<tool_call>{"name": 7}</tool_call>', []),
        ('<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
        ("<tool_call>" + "[" * 100_000, "<tool_call>" + "[" * 100_000, []),
        ("<tool_cal", "<tool_cal", []),
    ],
)
def test_calls_are_taken_out_of_the_text(text, plain, calls, size):
    if size == 1 and len(text) > 1000:
        size = 1000
    reader, found_plain, found = ToolCallReader(), "", []
    for start in range(0, len(text), size):
        more, new = reader.add(text[start : start + size])
        assert "<tool_call>{" not in more or not calls
        found_plain, found = found_plain + more, found + new
    more, new = reader.add("", is_last=True)
    assert (found_plain + more, found + new) == (plain, calls)
    for one in calls:
        json.loads(one.arguments)
