"""The sections `memory` and `phases` of a job: what the roles hold in each state, and which states go together."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from roost.config.document import Value
from roost.config.fields import Field, Table
from roost.config.reading import Notes, Pair, known_hint, read_fields, read_text
from roost.config.values import MEMORY, UNITS, Kind, Schema, by_name, typed, whole
from roost.errors import Where
from roost.text import did_you_mean, join_words, shorten

_MOST = 64
"""Roles, states of a role, and phases: far more than any job has."""


_UNIT = "|".join(unit for unit in UNITS if unit)


def _read_size(value: Value, notes: Notes, what: str) -> int | None:
    """Read memory with its unit: a bare number may mean anything."""
    bare = value.scalar if value.broken is None and value.kind == "scalar" else None
    text = str(bare) if isinstance(bare, float) else read_text(value, notes, what)
    if text is None:
        return None
    if text.strip().startswith("-"):
        notes.config(value, f"{what} is {shorten(text.strip(), 24)}: no memory is below zero")
    elif re.fullmatch(r"\s*[0-9.]+\s*", text) and text.strip() != "0":
        notes.config(value, f"{what} is {shorten(text.strip(), 24)}, without a unit", f"write {text.strip()}GiB")
    elif not re.fullmatch(rf"\s*([0-9]+(\.[0-9]+)?\s*({_UNIT})|0)\s*", text):
        notes.config(value, f"{what} is {shorten(text.strip(), 24)!r}", "write a size with its unit: 61GiB, 512MB")
    else:
        return int(found) if (found := MEMORY.read(value, notes, what)) is not None else None
    return None


SIZE = Kind(
    _read_size,
    lambda: typed(
        *("string", "integer"),
        pattern=rf"^\s*([0-9]+(\.[0-9]+)?\s*({_UNIT})|0)\s*$",
        error="write a size with its unit: 61GiB",
        minimum=0,
        maximum=0,
        examples=["61GiB"],
    ),
)
STATE_FIELDS = Table(
    "What a worker holds in this state on each of its accelerators; or a mapping with its host memory.",
    Field("device", SIZE, "On each of its accelerators."),
    Field("host", SIZE, "Memory of its node; by default that of the role."),
    Field("pinned", SIZE, "Pinned memory of its node, besides `host`; by default that of the role."),
    short=SIZE,
)
ROLE_FIELDS = Table(
    "What a worker of the role holds: a size for each state, by a name of your own.",
    Field("host", SIZE, "Memory of its node in every state that says nothing else."),
    Field("pinned", SIZE, "Pinned memory of its node, besides `host`, in every state that says nothing else."),
    Field("start_host", SIZE, "Memory of its node that it needs besides while it starts."),
    Field("start_at_once", whole(1), "How many of its workers start on a node at the same time; by default all."),
    is_open=True,
)


def _role_schema() -> Schema:
    return ROLE_FIELDS.schema() | {"additionalProperties": STATE_FIELDS.schema()}


MEMORY_FIELDS = Kind(
    read_fields,
    lambda: by_name(Kind(read_fields, _role_schema)).schema() | {"description": "What the roles hold in each state."},
)
PHASES_FIELDS = Kind(
    read_fields,
    lambda: typed(
        *("object", "string"),
        additionalProperties=typed("object", "string", additionalProperties=typed("string", "integer")),
        minProperties=1,
        description="The phases of a step in their order, each with the state of every role: "
        "`train: {actor: train, rollout: asleep}`. The first follows the last.",
    ),
)


class Amount(NamedTuple):
    """Bytes that a worker holds: on each of its accelerators, and on its node."""

    device: int = 0
    host: int = 0
    pinned: int = 0

    def most(self, other: Amount) -> Amount:
        """Return the larger of both, of each kind of memory."""
        return Amount(*map(max, self, other))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleMemory:
    """The memory that a worker of a role holds in each state, and while it starts."""

    name: str
    states: Mapping[str, Amount]
    start_host: int = 0
    start_at_once: int | None = None
    value: Value | None = field(default=None, repr=False, compare=False)

    def where(self, key: str = "") -> Where | None:
        """Return the place of one of its keys, or of the role."""
        return None if self.value is None else (self.value.get(key) or self.value).where()


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A phase, with the state of every role that says what it holds."""

    name: str
    states: Mapping[str, str]
    where: Where | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """The roles' memory, and the phases in their order; the first follows the last."""

    roles: tuple[RoleMemory, ...]
    phases: tuple[Phase, ...]


def read_memory(
    memory: Value | None, phases: Value | None, names: Sequence[str] | None, notes: Notes, meant: str = ""
) -> MemoryConfig | None:
    """Read both sections of a job with these components, if they are known; None where a mistake is noted.

    `meant` is a hint for a section that is missing.
    """
    if memory is None or phases is None:
        if memory is not None:
            hint = meant or "write phases: {train: {actor: train, rollout: asleep}}"
            notes.config(memory, "memory without phases: nothing says which states go together", hint)
        if phases is not None:
            hint = meant or "write memory: {actor: {train: 61GiB, asleep: 1.4GiB}}"
            notes.config(phases, "phases without memory: nothing says what the roles hold in their states", hint)
        return None
    noted = len(notes.problems)
    roles: dict[str, RoleMemory] = {}
    mentioned: set[str] = set()
    for name, pair in _bounded(memory, notes, "memory").items():
        mentioned.add(name)
        if names is not None and name not in names:
            notes.config(pair.key, f"memory: the job has no component {shorten(name)!r}", known_hint(name, names))
            # The one that is meant is not missed as well.
            mentioned.add(did_you_mean(name, names) or name)
        elif (role := _read_role(name, pair.value, notes)) is not None:
            roles[name] = role
    found = [
        Phase(name=name, states=_read_phase(name, pair.value, roles, mentioned, notes), where=pair.key.where())
        for name, pair in _bounded(phases, notes, "phases").items()
    ]
    return MemoryConfig(roles=tuple(roles.values()), phases=tuple(found)) if len(notes.problems) == noted else None


def _bounded(value: Value, notes: Notes, what: str) -> Mapping[str, Pair]:
    found = read_fields(value, notes, what)
    if len(found) > _MOST:
        notes.config(value, f"{what} has {len(found)} entries, and may have {_MOST}")
        return {}
    if not found and value.kind == "mapping":
        notes.config(value, f"{what} is empty", "leave it out, or fill it in")
    return found


def _read_role(name: str, value: Value, notes: Notes) -> RoleMemory | None:
    what = f"memory of {name!r}"
    noted = len(notes.problems)
    section = ROLE_FIELDS.read(value, notes, what)
    base = Amount(0, section.read("host", 0), section.read("pinned", 0))
    states = {
        key: _read_state(pair.value, base, notes, f"{what} in state {shorten(key)!r}")
        for key, pair in section.pairs.items()
        if key not in ROLE_FIELDS.fields
    }
    if not states and len(notes.problems) == noted:
        notes.config(value, f"{what} names no state", "name one for each phase: train: 61GiB")
    if len(states) > _MOST:
        notes.config(value, f"{what} has {len(states)} states, and may have {_MOST}")
    if len(notes.problems) > noted:
        return None
    start = {key: section.read(key) for key in ("start_host", "start_at_once") if key in section}
    return RoleMemory(name=name, states=states, value=value, **start)


def _read_state(value: Value, base: Amount, notes: Notes, what: str) -> Amount:
    if value.kind != "mapping":
        return base._replace(device=SIZE.read(value, notes, what) or 0)
    section = STATE_FIELDS.read(value, notes, what)
    return Amount(*(section.read(key, before) for key, before in zip(Amount._fields, base, strict=True)))


def _read_phase(
    name: str, value: Value, roles: Mapping[str, RoleMemory], mentioned: set[str], notes: Notes
) -> dict[str, str]:
    what = f"phase {shorten(name)!r}"
    noted = len(notes.problems)
    states: dict[str, str] = {}
    named = read_fields(value, notes, what)
    for role, pair in named.items():
        state = read_text(pair.value, notes, f"{what}: the state of {role}")
        if role not in mentioned:
            close = did_you_mean(role, roles)
            hint = f"did you mean {close!r}?" if close else "say what it holds in its states, under memory"
            notes.config(pair.key, f"{what}: nothing says what {shorten(role)!r} holds", hint)
        elif state is not None and role in roles:
            if state not in roles[role].states:
                message = f"{what}: {role} has no state {shorten(state)!r}"
                notes.config(pair.value, message, known_hint(state, roles[role].states))
            states[role] = state
    missing = [role for role in roles if role not in named]
    if missing and len(notes.problems) == noted:
        known = join_words(list(roles[missing[0]].states), last="or")
        notes.config(value, f"{what} has no state of {join_words(missing)}", f"add {missing[0]}: {known}")
    return states
