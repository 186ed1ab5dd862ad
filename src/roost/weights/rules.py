"""Layouts from rules: how a kind of parallelism splits tensors over the workers of a group, by the names of tensors.

The workers of a group form a grid with an axis for each kind of parallelism. A rule says what happens along one axis to
the tensors whose names match; rules apply in order, each to what the ones before it left. Along an axis that no rule
mentions, all workers hold the same.
"""

from __future__ import annotations

import fnmatch
import functools
import itertools
import math
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

    def narrow(self, box: Box, index: int, size: int, name: str) -> Box | None:
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
    grid = [dict(zip(axes, place, strict=True)) for place in itertools.product(*map(range, axes.values()))]
    made = _Maker(axes, grid, rules)
    ties = {rule.name: rule.same_as for rule in rules if isinstance(rule, Tie)}
    tensors: dict[str, HeldTensor] = {}
    for name, spec in specs.items():
        if name not in ties:
            parts, storage = made.parts(name, specs)
            tensors[name] = HeldTensor(spec, parts, (storage,))
    for name, original in ties.items():
        if name not in specs:
            continue
        held = tensors.get(original)
        if held is None or held.spec.shape != specs[name].shape:
            raise ConfigError(f"{name} is tied to {original}, which is not there or has another shape")
        parts, storage = made.parts(name, specs)
        added = tuple(Part(part.worker, part.box, part.at, len(held.storages)) for part in parts)
        tensors[original] = HeldTensor(held.spec, (*held.parts, *added), (*held.storages, storage))
    return Layout([f"{group}:{rank}" for rank in range(len(grid))], tensors)


class _Maker:
    """Applies rules; tensors that are split alike share their parts."""

    def __init__(self, axes: Mapping[str, int], grid: Sequence[Mapping[str, int]], rules: Sequence[Rule]) -> None:
        self._axes = axes
        self._grid = grid
        self._rules = [rule for rule in rules if not isinstance(rule, Fuse | Tie)]
        self._fused = [(rule, member) for rule in rules if isinstance(rule, Fuse) for member in rule.members]
        self._known: dict[object, tuple[Part, ...]] = {}
        self._boxes_of: dict[object, list[Box | None]] = {}

    def parts(self, name: str, specs: Mapping[str, TensorSpec]) -> tuple[tuple[Part, ...], str]:
        """Return the parts of a tensor, and what workers call the memory that they are in."""
        storage, before = self._fusion(name, specs)
        key = self._key(name, specs[name].shape)
        known = (key, *(self._key(member, specs[member].shape) for member in before))
        if known not in self._known:
            offsets = [self._boxes(member, specs[member].shape) for member in before]
            parts = []
            for worker, box in enumerate(self._boxes(name, specs[name].shape)):
                if box is None or not count(box):
                    continue
                first = sum(_length(boxes[worker]) for boxes in offsets)
                at = (first, *(0,) * (len(box) - 1)) if box else ()
                parts.append(Part(worker, box, at))
            self._known[known] = tuple(parts)
        return self._known[known], storage

    def _fusion(self, name: str, specs: Mapping[str, TensorSpec]) -> tuple[str, list[str]]:
        """Return the storage of a tensor, and the tensors that come before it there."""
        for rule, pattern in self._fused:
            found = _template(pattern).fullmatch(name)
            if found is not None:
                place = rule.members.index(pattern)
                before = [member.format(found[1]) for member in rule.members[:place]]
                if missing := [member for member in before if member not in specs]:
                    raise ConfigError(f"{name} is fused with {join_words(missing)}, which is not there")
                return rule.storage.format(found[1]), before
        return name, []

    def _key(self, name: str, shape: tuple[int, ...]) -> tuple[object, ...]:
        """Return what the boxes of a tensor depend on."""
        actions: list[object] = []
        for rule in self._rules:
            if isinstance(rule, Numbered):
                index = rule.index(name, self._axes[rule.axis])
                if index is not None:
                    actions.append((rule.axis, index))
            elif _matches(rule.patterns, name):
                at = rule.at % self._axes[rule.axis] if isinstance(rule, At) else None
                actions.append((rule.axis, at) if isinstance(rule, At) else rule)
        return (shape, *actions)

    def _boxes(self, name: str, shape: tuple[int, ...]) -> list[Box | None]:
        """Return the box of a tensor that each worker has, or None."""
        key = self._key(name, shape)
        if key not in self._boxes_of:
            self._boxes_of[key] = [self._box(name, shape, key[1:], place) for place in self._grid]
        return self._boxes_of[key]

    def _box(
        self, name: str, shape: tuple[int, ...], actions: Sequence[object], place: Mapping[str, int]
    ) -> Box | None:
        box: Box | None = whole(shape)
        for action in actions:
            if isinstance(action, Split):
                box = action.narrow(box or (), place[action.axis], self._axes[action.axis], name)
            elif isinstance(action, tuple) and place[action[0]] != action[1]:
                return None
        return box


def _length(box: Box | None) -> int:
    if box is None or not math.prod(shape_of(box)):
        return 0
    return shape_of(box)[0] if box else 1


@functools.lru_cache(maxsize=1 << 20)
def _matches(patterns: tuple[str, ...], name: str) -> bool:
    return _compiled(patterns).match(name) is not None


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
