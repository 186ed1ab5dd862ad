"""The sections `mesh`, `keep` and `spread` of a job: which workers belong near each other, and which apart."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from roost.config.document import Value
from roost.config.reading import Notes, check_name, known_hint, read_fields, read_list, read_text
from roost.config.values import Kind, Schema, typed, whole
from roost.errors import Where
from roost.text import join_words, shorten

_MOST = 64
"""Axes of a mesh, and rules: far more than any job has."""
_LONGEST = 1_000
"""Characters of a rule: names and labels are shorter."""
_SIZE = whole(1, 2_000_000)
_KEEP = re.compile(r"\s*(prefer\s+)?(\S+)\s+within\s+(\S+)\s*")
_SPREAD = re.compile(r"\s*(prefer\s+)?(\S+)\s+across\s+([^\s,]+)\s*(?:,?\s*at\s+least\s+([0-9]{1,7})\s*)?")
_EXAMPLES = {"keep": "actor.tp within nvlink", "spread": "rollout across rack, at least 2"}


def _texts(name: str, about: str) -> Kind:
    def schema() -> Schema:
        return typed("array", "string", items=typed("string")) | {"description": about, "examples": [[_EXAMPLES[name]]]}

    return Kind(read_list, schema)


MESH_FIELDS = Kind(
    read_fields,
    lambda: typed(
        *("object", "string"),
        additionalProperties=typed("object", "string", additionalProperties=_SIZE.schema(), minProperties=1),
        description="How the ranks of a component are split, the axis of neighbouring ranks last: "
        "`actor: {dp: 9, tp: 8}`.",
    ),
)
KEEP_FIELDS = _texts("keep", "Which workers stay within one domain: those that differ in these axes alone.")
SPREAD_FIELDS = _texts("spread", "Over how many domains a component is spread at least.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The axes of a component with their sizes; neighbouring ranks differ in the last."""

    axes: tuple[tuple[str, int], ...]
    where: Where | None = field(default=None, repr=False, compare=False)

    @property
    def count(self) -> int:
        """How many ranks it has."""
        return math.prod(size for _, size in self.axes)

    def __str__(self) -> str:
        return f"{' × '.join(f'{name} {size}' for name, size in self.axes)} = {self.count}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule about the workers of a component and the domains of a level."""

    component: str
    level: str
    text: str
    axes: tuple[str, ...] = ()
    """To keep within one domain: workers that differ in these axes alone; none means all workers."""
    least: int = 0
    """To spread: over how many domains at least. 0 for a rule that keeps together."""
    is_preferred: bool = False
    where: Where | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RulesConfig:
    """The meshes by component, and the rules in the order of the file."""

    meshes: Mapping[str, Mesh]
    rules: tuple[Rule, ...]


def read_rules(
    mesh: Value | None, keep: Value | None, spread: Value | None, names: Sequence[str] | None, notes: Notes
) -> RulesConfig | None:
    """Read the sections of a job with these components, if they are known; None if it has none of them."""
    if mesh is None and keep is None and spread is None:
        return None
    meshes: dict[str, Mesh] = {}
    for text, pair in (read_fields(mesh, notes, "mesh") if mesh is not None else {}).items():
        if names is not None and text not in names:
            notes.config(pair.key, f"mesh: the job has no component {shorten(text)!r}", known_hint(text, names))
        elif (found := _read_mesh(text, pair.value, notes)) is not None:
            meshes[text] = found
    rules: list[Rule] = []
    for name, section in (("keep", keep), ("spread", spread)):
        for value, text in _read_texts(name, section, notes) if section is not None else ():
            rule = _read_rule(name, value, text, meshes, mesh, names, notes)
            if rule is not None and any(rule == other for other in rules):
                notes.config(value, f"{name}: {shorten(text)!r} is there twice")
            elif rule is not None:
                rules.append(rule)
    return RulesConfig(meshes=meshes, rules=tuple(rules))


def _read_mesh(name: str, value: Value, notes: Notes) -> Mesh | None:
    what = f"mesh of {name!r}"
    noted = len(notes.problems)
    axes: list[tuple[str, int]] = []
    pairs = read_fields(value, notes, what)
    for axis, pair in pairs.items():
        size = _SIZE.read(pair.value, notes, f"{what}: {shorten(axis)}")
        if "." in axis or check_name(axis, pair.key, notes, f"{what}: the axis") is None:
            notes.config(pair.key, f"{what}: an axis is a word such as tp, not {shorten(axis)!r}")
        elif size is not None:
            axes.append((axis, size))
    if not 0 < len(pairs) <= _MOST and len(notes.problems) == noted:
        notes.config(value, f"{what} has {len(pairs)} axes, and must have 1 to {_MOST}", "write {dp: 9, tp: 8}")
    return Mesh(axes=tuple(axes), where=value.where()) if len(notes.problems) == noted else None


def _read_texts(name: str, section: Value, notes: Notes) -> list[tuple[Value, str]]:
    """Read the texts of rules; in `[rollout across rack, at least 2]` YAML takes the comma for its own."""
    values = read_list(section, notes, name) if section.kind == "list" else [section]
    if len(values) > _MOST:
        notes.config(section, f"{name} has {len(values)} rules, and may have {_MOST}")
        return []
    found: list[tuple[Value, str]] = []
    for value in values:
        text = read_text(value, notes, f"a rule of {name}")
        if text is not None and found and re.fullmatch(r"\s*at\s+least\s+\S+\s*", text):
            found[-1] = (found[-1][0], f"{found[-1][1]}, {text.strip()}")
        elif text is not None:
            found.append((value, text))
    return found


def _read_rule(
    name: str,
    value: Value,
    text: str,
    meshes: Mapping[str, Mesh],
    mesh: Value | None,
    names: Sequence[str] | None,
    notes: Notes,
) -> Rule | None:
    match = (_KEEP if name == "keep" else _SPREAD).fullmatch(text)
    # `actor. within rack` lacks the axis, and would be about all of actor.
    if match is None or "" in match[2].split(".")[1:] or len(text) > _LONGEST:
        notes.config(value, f"{name}: {shorten(text)!r} is not a rule", f"write {_EXAMPLES[name]}")
        return None
    is_preferred, who, level = bool(match[1]), match[2], match[3]
    # A component's name may have dots, an axis has none.
    known = list(names or ())
    component = next((one for one in sorted(known, key=len, reverse=True) if f"{who}.".startswith(f"{one}.")), "")
    if not component:
        if names is not None:
            hint = known_hint(who.split(".")[0], known)
            notes.config(value, f"{name}: the job has no component {shorten(who.split('.')[0])!r}", hint)
        return None
    axes = tuple(dict.fromkeys(part for part in who[len(component) + 1 :].split(".") if part))
    has = [axis for axis, _ in meshes[component].axes] if component in meshes else []
    if name == "spread" and axes:
        notes.config(value, f"spread: {shorten(text)!r} names an axis", f"spread {component} as a whole")
    elif axes and mesh is not None and mesh.get(component) is not None and not has:
        return None  # the mesh is noted already
    elif axes and not has:
        example = ", ".join(f"{axis}: 8" for axis in axes)
        notes.config(
            value, f"keep: {component} has no mesh", f"say how it is split: mesh: {{{component}: {{{example}}}}}"
        )
    elif unknown := [axis for axis in axes if axis not in has]:
        hint = known_hint(unknown[0], has) or f"its axes are {join_words(has)}"
        notes.config(value, f"keep: the mesh of {component} has no axis {shorten(unknown[0])!r}", hint)
    elif name == "spread" and match[4] is not None and int(match[4]) < 2:
        notes.config(value, f"spread: at least {int(match[4])} is no spread", "write at least 2 or more")
    else:
        least = 0 if name == "keep" else int(match[4] or 2)
        shown = " ".join(text.split())
        return Rule(component=component, level=level, text=shown, axes=axes, least=least,
                    is_preferred=is_preferred, where=value.where())  # fmt: skip
    return None
