"""The section `weight_sync` of a job: which tensors there are, and how source and targets split them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roost.config.document import Value
from roost.config.fields import Field, Section, Table
from roost.config.job import read_job_draft
from roost.config.reading import Notes, known_hint, read_list, read_text
from roost.config.values import FILLED_TEXT, TEXT, Kind, by_name, items, typed, whole
from roost.errors import ConfigError
from roost.text import join_words


def _read_names(value: Value, notes: Notes, what: str) -> tuple[str, ...] | None:
    found = read_list(value, notes, what) if value.kind == "list" else [value]
    texts = [read_text(one, notes, what) for one in found]
    return tuple(text for text in texts if text is not None) or None


NAMES = Kind(_read_names, lambda: {"type": ["string", "array"], "items": TEXT.schema()})
RULE_FIELDS = Table(
    "How some tensors are split along an axis of the group.",
    Field("names", NAMES, "The tensors that it is about, as patterns: `*.q_proj.weight`."),
    Field("axis", FILLED_TEXT, "The axis along which workers differ."),
    Field("dim", whole(0, 16), "The dimension that is cut: 0 for outputs, 1 for inputs of linear layers."),
    Field("units", whole(1), "How many blocks the dimension has that are not cut, such as attention heads."),
    Field("at", Kind(lambda v, n, w: _read_index(v, n, w), lambda: typed("integer")), "The one worker that has them."),
    Field("numbered", FILLED_TEXT, "The names, with {} for a number that says which worker has them."),
    Field("count", whole(1), "How many numbers there are."),
    Field("fused", FILLED_TEXT, "What workers call the memory that has several tensors, with {} for what names share."),
    Field("of", NAMES, "The tensors that are in it, in order."),
    Field("tied", FILLED_TEXT, "A tensor that has the content of another one."),
    Field("to", FILLED_TEXT, "That other one."),
)
SIDE_FIELDS = Table(
    "How the workers of a component split the tensors.",
    Field("component", FILLED_TEXT, "The component.", required=True),
    Field("axes", by_name(whole(1), least=1), "The size of each axis, the last one counting fastest."),
    Field("dtype", FILLED_TEXT, "The type of its weights, if it is not the model's."),
    Field("rules", items(RULE_FIELDS), "What happens to which tensors, in order."),
)
WEIGHT_SYNC_FIELDS = Table(
    "Whose weights go where after each step, for `roost weights`.",
    Field("model", FILLED_TEXT, "A folder or file with safetensors, of which only the headers are read."),
    Field("tensors", by_name(NAMES), "In place of a model: for each tensor its type and its shape."),
    Field("source", SIDE_FIELDS, "The component whose weights they are.", required=True),
    Field("target", SIDE_FIELDS, "The component that gets them.", required=True),
    naming="weight_sync: {name}",
)
_SHAPES = {
    ("axis", "dim", "names"): "split",
    ("axis", "at", "names"): "at",
    ("axis", "count", "numbered"): "numbered",
    ("fused", "of"): "fused",
    ("tied", "to"): "tied",
}
"""Which keys a rule has, apart from `units`, and what kind of rule that makes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleConfig:
    """One rule, as it is written."""

    kind: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SideConfig:
    """How one component splits the tensors."""

    component: str
    axes: Mapping[str, int]
    rules: tuple[RuleConfig, ...]
    dtype: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSyncConfig:
    """The whole section."""

    model: str | None
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    source: SideConfig
    target: SideConfig


def read_weight_sync(config: object) -> WeightSyncConfig:
    """Read the section of a job; raise one error with all mistakes."""
    draft = read_job_draft(config)
    notes, document = draft.notes.copy(), draft.job.document
    value = document.get("weight_sync") if document.kind == "mapping" else None
    if value is None:
        notes.config(document, "the job has no section 'weight_sync'", hint="see the guide to weights")
        notes.raise_if_any()
        raise ConfigError("the job has no section 'weight_sync'")
    section = WEIGHT_SYNC_FIELDS.read(value, notes, "weight_sync")
    if ("model" in section) == ("tensors" in section):
        notes.config(value, "weight_sync has either a 'model' or 'tensors'")
    sides = {
        name: _read_side(section.value(name), draft.names, notes, f"weight_sync: {name}")
        for name in ("source", "target")
        if name in section
    }
    model, tensors = section.read("model"), _read_tensors(section, notes)
    notes.raise_if_any()
    return WeightSyncConfig(model=model, tensors=tensors, source=sides["source"], target=sides["target"])


def _read_side(value: Value, names: Sequence[str], notes: Notes, what: str) -> SideConfig:
    section = SIDE_FIELDS.read(value, notes, what)
    component = section.read("component", "")
    if component and component not in names:
        hint = known_hint(component, names)
        notes.config(section.value("component"), f"{what}: the job has no component {component!r}", hint)
    given = section.read("axes", {}).items()
    axes = {name: whole(1).read(pair.value, notes, f"{what}: {name}") or 1 for name, pair in given}
    rules = [_read_rule(one, axes, notes, f"{what}: a rule") for one in section.read("rules", [])]
    found = tuple(rule for rule in rules if rule is not None)
    return SideConfig(component=component, axes=axes, rules=found, dtype=section.read("dtype"))


def _read_rule(value: Value, axes: Mapping[str, int], notes: Notes, what: str) -> RuleConfig | None:
    noted = len(notes.problems)
    section = RULE_FIELDS.read(value, notes, what)
    kind = _SHAPES.get(tuple(sorted(name for name in section.pairs if name != "units")))
    if len(notes.problems) > noted:
        return None
    if kind is None:
        forms = join_words([f"{{{', '.join(keys)}}}" for keys in _SHAPES], last="or")
        notes.config(value, f"{what} has the keys {join_words(sorted(section.pairs))}", hint=f"it has {forms}")
        return None
    values = {name: section.read(name) for name in section.pairs}
    if "axis" in values and values["axis"] not in axes:
        hint = known_hint(str(values["axis"]), axes) if axes else "name it under axes"
        notes.config(section.value("axis"), f"{what} is about axis {values['axis']!r}, which is not there", hint)
    return RuleConfig(kind=kind, values=values)


def _read_tensors(section: Section, notes: Notes) -> dict[str, tuple[str, tuple[int, ...]]]:
    found = {}
    for name, pair in section.read("tensors", {}).items():
        dtype, *sizes = _read_names(pair.value, notes, f"weight_sync: tensor {name!r}") or ("",)
        if not dtype or not all(size.isascii() and size.isdigit() for size in sizes):
            message = f"weight_sync: tensor {name!r} is not a type and a shape"
            notes.config(pair.value, message, "write [bfloat16, 4096, 64]")
        else:
            found[name] = dtype, tuple(map(int, sizes))
    return found


def _read_index(value: Value, notes: Notes, what: str) -> int | None:
    """Read the index of a worker: -1 is the last."""
    if value.kind == "scalar" and str(value.scalar).strip() == "-1":
        return -1
    found: int | None = whole().read(value, notes, what)
    return found
