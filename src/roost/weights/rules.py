"""Layouts from rules: how a kind of parallelism splits tensors over the workers of a group, by the names of tensors.

The workers of a group form a grid with an axis for each kind of parallelism. A rule says what happens along one axis to
the tensors whose names match; rules apply in order, each to what the ones before it left. Along an axis that no rule
mentions, all workers hold the same.
"""

from __future__ import annotations

import fnmatch
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roost.errors import ConfigError
from roost.text import join_words, plural
from roost.weights.boxes import Box, count, shape_of, whole
from roost.weights.layout import HeldTensor, Layout, Part, TensorSpec


@dataclass(frozen=True, slots=True)
class Split:
    """Tensors are cut along a dimension, and each worker of the axis has one part, as with FSDP or tensor parallelism.

    Parts are as long as the first one, except at the end, where they are shorter or empty. `units` says that the
    dimension consists of as many blocks, such as attention heads, which are not cut: workers have whole blocks, and
    where there are more workers than blocks, several have the same one.
    """

    axis: str
    dim: int
    patterns: tuple[str, ...]
    units: int = 0

    def narrow(self, box: Box, index: int, size: int, name: str) -> Box:
        """Return the part of a box that a worker of the axis has."""
        if not box:
            return box
        if not -len(box) <= self.dim < len(box):
            raise ConfigError(f"{name} has no dimension {self.dim}: its shape is {list(shape_of(box))}")
        dim = self.dim % len(box)
        start, stop = box[dim]
        length = stop - start
        if self.units:
            if length % self.units:
                raise ConfigError(
                    f"dimension {dim} of {name} has {length} rows, which are not {self.units} equal units"
                )
            unit = length // self.units
            first = index * self.units // size
            last = max(first + 1, (index + 1) * self.units // size)
            low, high = start + first * unit, start + last * unit
        else:
            step = -(-length // size)
            low, high = min(stop, start + index * step), min(stop, start + (index + 1) * step)
        return (*box[:dim], (low, high), *box[dim + 1 :])


@dataclass(frozen=True, slots=True)
class Numbered:
    """The number in a tensor's name says which worker of the axis has it: a layer's pipeline stage, an expert's owner.

    `pattern` has `{}` where the number is. Workers have equally many consecutive numbers below `count`.
    """

    axis: str
    pattern: str
    count: int

    def index(self, name: str, size: int) -> int | None:
        """Return which worker of the axis has a tensor; None for one whose name does not match."""
        found = _numbered(self.pattern).fullmatch(name)
        if found is None:
            return None
        number = int(found[1])
        if number >= self.count:
            raise ConfigError(f"{name} has number {number}, and the rule counts {self.count}")
        return number * size // self.count


@dataclass(frozen=True, slots=True)
class At:
    """Only one worker of the axis has these tensors: embeddings on the first pipeline stage, -1 for the last."""

    axis: str
    at: int
    patterns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fuse:
    """Workers hold several tensors in one: their parts one after the other, along the first dimension.

    All names have one `{}`, which stands for the same text: `Fuse("{}.qkv.weight", ("{}.q.weight", "{}.k.weight"))`.
    """

    storage: str
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tie:
    """A tensor that has the content of another one: where workers hold both, both are filled."""

    name: str
    same_as: str


Rule = Split | Numbered | At | Fuse | Tie


def columns(axis: str, *patterns: str, units: int = 0) -> Split:
    """Split the outputs of linear layers, weights and biases: the first dimension."""
    return Split(axis, 0, patterns, units)


def rows(axis: str, *patterns: str, units: int = 0) -> Split:
    """Split the inputs of linear layers: the second dimension of their weights."""
    return Split(axis, 1, patterns, units)


def fully_sharded(axis: str = "dp") -> Split:
    """Split every tensor along its first dimension, as FSDP and ZeRO do."""
    return Split(axis, 0, ("*",))


def make_layout(
    specs: Mapping[str, TensorSpec], group: str, axes: Mapping[str, int], rules: Sequence[Rule] = ()
) -> Layout:
    """Return which worker of a group holds what.

    `axes` has the size of each axis in the order in which ranks count, the last one fastest: `{"pp": 2, "tp": 4}` are
    eight workers, the first four of which are the first stage.
    """
    for name, size in axes.items():
        if type(size) is not int or size < 1:
            raise ConfigError(f"axis {name!r} has size {size!r}: it is 1 or more")
    for rule in rules:
        if not isinstance(rule, Fuse | Tie) and rule.axis not in axes:
            raise ConfigError(f"a rule is about axis {rule.axis!r}", hint=f"the axes are {join_words(list(axes))}")
    workers = [dict(zip(axes, place, strict=True)) for place in itertools.product(*map(range, axes.values()))]
    fused = [(rule, member) for rule in rules if isinstance(rule, Fuse) for member in rule.members]
    ties = {rule.name: rule.same_as for rule in rules if isinstance(rule, Tie)}
    # Tensors that are split alike share their boxes and parts, of which there may be hundreds for thousands of tensors.
    alike: dict[object, list[Box | None]] = {}
    known: dict[tuple[int, ...], tuple[Part, ...]] = {}

    @functools.cache
    def boxes_of(name: str) -> list[Box | None]:
        """Return the box of a tensor that each worker has, or None."""
        actions: list[Split | tuple[str, int]] = []
        for rule in rules:
            if isinstance(rule, Numbered):
                if (index := rule.index(name, axes[rule.axis])) is not None:
                    actions.append((rule.axis, index))
            elif isinstance(rule, Split | At) and _compiled(rule.patterns).match(name):
                actions.append(rule if isinstance(rule, Split) else (rule.axis, rule.at % axes[rule.axis]))
        shape = specs[name].shape
        key = (shape, *actions)
        if key not in alike:
            alike[key] = []
            for worker in workers:
                box: Box | None = whole(shape)
                for action in actions:
                    if box is not None and isinstance(action, Split):
                        box = action.narrow(box, worker[action.axis], axes[action.axis], name)
                    elif isinstance(action, tuple) and worker[action[0]] != action[1]:
                        box = None
                alike[key].append(box)
        return alike[key]

    def find(name: str) -> tuple[tuple[Part, ...], str]:
        """Return the parts of a tensor, and what workers call the memory that they are in."""
        storage, before = name, []
        for rule, pattern in fused:
            if (found := _template(pattern).fullmatch(name)) is not None:
                storage = rule.storage.format(found[1])
                before = [member.format(found[1]) for member in rule.members[: rule.members.index(pattern)]]
                if missing := [member for member in before if member not in specs]:
                    raise ConfigError(f"{name} is fused with {join_words(missing)}, which is not there")
                break
        own, *others = (boxes_of(one) for one in (name, *before))
        key = tuple(map(id, (own, *others)))
        if key not in known:
            parts = []
            for worker, box in enumerate(own):
                if box is not None and count(box):
                    lower = [other for boxes in others if (other := boxes[worker]) is not None and count(other)]
                    first = sum(shape_of(other)[0] if other else 1 for other in lower)
                    parts.append(Part(worker, box, (first, *(0,) * (len(box) - 1)) if box else ()))
            known[key] = tuple(parts)
        return known[key], storage

    tensors: dict[str, HeldTensor] = {}
    for name in (one for one in specs if one not in ties):
        parts, storage = find(name)
        tensors[name] = HeldTensor(specs[name], parts, (storage,))
    for name, original in ties.items():
        if name not in specs:
            continue
        held = tensors.get(original)
        if held is None or held.spec.shape != specs[name].shape:
            raise ConfigError(f"{name} is tied to {original}, which is not there or has another shape")
        parts, storage = find(name)
        added = tuple(Part(part.worker, part.box, part.at, len(held.storages)) for part in parts)
        tensors[original] = HeldTensor(held.spec, (*held.parts, *added), (*held.storages, storage))
    return Layout([f"{group}:{rank}" for rank in range(len(workers))], tensors)


@functools.cache
def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(fnmatch.translate, patterns)))


@functools.cache
def _numbered(pattern: str) -> re.Pattern[str]:
    parts = pattern.split("{}")
    if len(parts) != 2:
        raise ConfigError(f"{pattern!r} has {plural(len(parts) - 1, 'place')} for a number: write {{}} once")
    before, after = (fnmatch.translate(part).removesuffix(r"\Z").removesuffix(r"\z") for part in parts)
    return re.compile(f"{before}([0-9]+){after}")


@functools.cache
def _template(pattern: str) -> re.Pattern[str]:
    before, mark, after = pattern.partition("{}")
    if not mark or "{}" in after:
        raise ConfigError(f"{pattern!r} has not one {{}}, which stands for the same text in all names of a fusion")
    return re.compile(f"{re.escape(before)}(.+){re.escape(after)}")
