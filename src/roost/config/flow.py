"""The section `flow` of a job: the calls of one step, what feeds what, and whose weights go where."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from roost.config.document import Value
from roost.config.fields import Field, Table
from roost.config.reading import Notes, known_hint, read_list, read_text
from roost.config.values import Kind, typed, whole
from roost.errors import Where
from roost.text import shorten

MAX_STALENESS = 16
_CALL = r"[^\s>,]+\.[^\s>,.]+"
_ARROW = re.compile(r"\s*->\s*")


@dataclass(frozen=True, slots=True)
class _Word:
    """A name in a text of the flow, with its place."""

    text: str
    value: Value
    span: tuple[int, int]

    def note(self, notes: Notes, message: str, hint: str = "") -> None:
        notes.config(self.value, message, hint, self.span)


def _read_chains(value: Value, notes: Notes, what: str) -> list[list[_Word]] | None:
    texts = read_list(value, notes, what) if value.kind == "list" else [value]
    if not texts and value.kind == "list" and value.broken is None:
        notes.config(value, f"{what} names no call", hint="write rollout.generate -> actor.train")
    chains = [_read_chain(text, notes, what) for text in texts]
    return [chain for chain in chains if chain is not None] or None


def _read_chain(value: Value, notes: Notes, what: str) -> list[_Word] | None:
    text = read_text(value, notes, what)
    if text is None:
        return None
    words = []
    at = len(text) - len(text.lstrip())
    for part in _ARROW.split(text.strip()):
        at = text.index(part, at)
        words.append(_Word(part, value, (at, at + max(1, len(part)))))
        at += len(part)
    empty = next((word for word in words if not word.text), None)
    if empty is not None:
        empty.note(notes, f"{what} has an arrow with nothing on one side", "write rollout.generate -> actor.train")
        return None
    return words


def _read_arrow(value: Value, notes: Notes, what: str) -> tuple[_Word, _Word] | None:
    words = _read_chain(value, notes, what)
    if words is not None and len(words) != 2:
        notes.config(value, f"{what} names {len(words)} roles", hint="write two: actor -> rollout")
        return None
    return None if words is None else (words[0], words[1])


FLOW_FIELDS = Table(
    "The calls of one step and what feeds what, for `roost search`.",
    Field(
        "step",
        Kind(
            _read_chains,
            lambda: typed(
                *("string", "array"),
                pattern=rf"^\s*{_CALL}(\s*->\s*{_CALL})*\s*$",
                error="write calls with arrows between them: rollout.generate -> actor.train",
                items=typed("string"),
                minItems=1,
            ),
        ),
        "The calls, as component.method with arrows between them; a list where several feed one.",
        required=True,
        examples=("rollout.generate -> actor.train",),
    ),
    Field(
        "weights",
        Kind(_read_arrow, lambda: typed("string", pattern="->", error="write actor -> rollout")),
        "Whose weights go to whom after each step.",
        examples=("actor -> rollout",),
    ),
    Field("staleness", whole(0, MAX_STALENESS), "By how many steps the weights may lag behind.", examples=(1,)),
)


@dataclass(frozen=True, kw_only=True)
class FlowConfig:
    """The calls of a step as they are written, pairs of calls where one feeds the other, and the weights' way."""

    calls: tuple[str, ...]
    edges: tuple[tuple[str, str], ...]
    source: str = ""
    target: str = ""
    staleness: int = 0
    value: Value = field(repr=False, compare=False)
    places: Mapping[str, Where] = field(default_factory=dict, repr=False, compare=False)
    """Where each call is written first."""

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The calls in flow order: of those whose predecessors are all listed, the one written first comes next."""
        found: list[str] = []
        while len(found) < len(self.calls):
            ready = (
                call
                for call in self.calls
                if call not in found and all(one in found for one, other in self.edges if other == call)
            )
            found.append(next(ready))
        return tuple(found)

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of the calls, each once."""
        return tuple(dict.fromkeys(role_of(call) for call in self.calls))


def role_of(call: str) -> str:
    """Return the role of a call: `rollout` of `rollout.generate`."""
    return call.rpartition(".")[0]


def read_flow(value: Value, names: Sequence[str] | None, notes: Notes) -> FlowConfig | None:
    """Read the section of a job with these components, if they are known; None where a mistake is noted."""
    noted = len(notes.problems)
    section = FLOW_FIELDS.read(value, notes, "flow")
    chains = section.read("step", [])
    for word in (word for chain in chains for word in chain):
        if not re.fullmatch(_CALL, word.text):
            word.note(notes, f"flow: {shorten(word.text)!r} is not a call", "write component.method: rollout.generate")
        elif names is not None and role_of(word.text) not in names:
            role = role_of(word.text)
            word.note(notes, f"flow: the job has no component {shorten(role)!r}", known_hint(role, names))
    calls = tuple(dict.fromkeys(word.text for chain in chains for word in chain))
    edges: dict[tuple[str, str], _Word] = {}
    for chain in chains:
        for one, other in pairwise(chain):
            edges.setdefault((one.text, other.text), other)
    _note_cycle(edges, notes)
    weights = section.read("weights")
    roles = dict.fromkeys(role_of(call) for call in calls)
    for word in weights or ():
        if word.text not in roles:
            word.note(notes, f"flow: no call of {shorten(word.text)!r} is in the step", known_hint(word.text, roles))
    if weights and weights[0].text == weights[1].text:
        weights[1].note(notes, "flow: weights go from one role to another", "write actor -> rollout")
    staleness = section.read("staleness", 0)
    if staleness and weights is None and "weights" not in section:
        hint = "say whose: weights: actor -> rollout"
        notes.config(section.value("staleness"), "flow: staleness is the age of weights, and none go anywhere", hint)
    if len(notes.problems) > noted:
        return None
    source, target = (word.text for word in weights) if weights else ("", "")
    places: dict[str, Where] = {}
    for word in (word for chain in chains for word in chain):
        places.setdefault(word.text, word.value.where(word.span))
    return FlowConfig(
        calls=calls,
        edges=tuple(edges),
        source=source,
        target=target,
        staleness=staleness,
        value=value,
        places=places,
    )


def _note_cycle(edges: dict[tuple[str, str], _Word], notes: Notes) -> None:
    """Note the first arrow that closes a circle of calls."""
    after: dict[str, list[str]] = {}

    def path(start: str, end: str, seen: frozenset[str] = frozenset()) -> list[str] | None:
        if start == end:
            return [start]
        for other in after.get(start, ()):
            found = None if other in seen else path(other, end, seen | {other})
            if found:
                return [start, *found]
        return None

    for (one, other), word in edges.items():
        back = path(other, one)
        if back is not None:
            circle = " -> ".join([one, *back])
            hint = "an arrow leads on within a step; what the next step needs are the weights"
            word.note(notes, f"flow: a call waits for itself: {circle}", hint)
            return
        after.setdefault(one, []).append(other)
