"""`Layout`: which worker holds which part of which tensor. A value, made from rules or from what workers report."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from roost.comm.move.dtypes import SIZES
from roost.errors import ConfigError, Problem
from roost.text import join_words
from roost.weights.boxes import Box, count, whole

_CAST = ("float64", "float32", "float16", "bfloat16")


def can_cast(source: str, target: str) -> bool:
    """Whether values of one type may be stored as another: only between the plain floating-point types."""
    return source == target or (source in _CAST and target in _CAST)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The shape and type of a whole tensor."""

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in SIZES:
            raise ConfigError(f"{self.dtype!r} is not a type of elements", hint=f"there are {join_words(list(SIZES))}")

    @property
    def nbytes(self) -> int:
        """How many bytes the whole tensor takes."""
        return math.prod(self.shape) * SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor that one worker holds."""

    worker: int
    """Which of the layout's workers."""
    box: Box
    at: tuple[int, ...]
    """Where the box begins in that worker's memory."""
    storage: int = 0
    """Which of the tensor's storages it lies in."""


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A tensor, and the parts of it that workers hold."""

    spec: TensorSpec
    parts: tuple[Part, ...]
    storages: tuple[str, ...]
    """Its names in the memory of workers: another one if it is fused with others, two if it is there twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A tensor that one worker says it holds."""

    name: str
    spec: TensorSpec
    box: Box
    storage: str = ""
    """The worker's name for the memory, if it is not that of the tensor."""
    at: tuple[int, ...] = ()
    """Where the box begins there; at the start unless that says otherwise."""

    def __post_init__(self) -> None:
        if not self.storage:
            object.__setattr__(self, "storage", self.name)
        if not self.at and self.box:
            object.__setattr__(self, "at", (0,) * len(self.box))


class Layout:
    """Which worker holds which part of which tensor."""

    def __init__(self, workers: Sequence[str], tensors: Mapping[str, HeldTensor]) -> None:
        self.workers = tuple(workers)
        self.tensors = dict(tensors)
        if len(set(self.workers)) != len(self.workers):
            raise ConfigError(f"a worker is named twice: {join_words(self.workers)}")

    @classmethod
    def from_reports(cls, reports: Mapping[str, Iterable[Held]]) -> Layout:
        """Make a layout of what each worker says that it holds; ConfigError if they contradict each other."""
        specs: dict[str, tuple[TensorSpec, str]] = {}
        storages: dict[str, list[str]] = {}
        parts: dict[str, list[Part]] = {}
        wrong = []
        for number, (worker, held) in enumerate(reports.items()):
            for one in held:
                spec, first = specs.setdefault(one.name, (one.spec, worker))
                if spec != one.spec:
                    known, other = (f"{each.dtype} {list(each.shape)}" for each in (spec, one.spec))
                    wrong.append(Problem(message=f"{one.name} is {known} in {first}, and {other} in {worker}"))
                names = storages.setdefault(one.name, [])
                if one.storage not in names:
                    names.append(one.storage)
                parts.setdefault(one.name, []).append(Part(number, one.box, one.at, names.index(one.storage)))
        if wrong:
            raise ConfigError(wrong)
        shared: dict[tuple[Part, ...], tuple[Part, ...]] = {}
        return cls(
            tuple(reports),
            {
                name: HeldTensor(specs[name][0], shared.setdefault(tuple(found), tuple(found)), tuple(storages[name]))
                for name, found in parts.items()
            },
        )

    def only(self, workers: Iterable[str]) -> Layout:
        """Return the same layout with some of its workers."""
        wanted = set(workers)
        if unknown := wanted - set(self.workers):
            raise ConfigError(f"{join_words(sorted(unknown))}: not in a layout of {join_words(self.workers)}")
        kept = [number for number, worker in enumerate(self.workers) if worker in wanted]
        numbers = {old: new for new, old in enumerate(kept)}
        shared: dict[int, tuple[Part, ...]] = {}
        for held in self.tensors.values():
            if id(held.parts) not in shared:
                shared[id(held.parts)] = tuple(
                    replace(part, worker=numbers[part.worker]) for part in held.parts if part.worker in numbers
                )
        return Layout(
            [self.workers[number] for number in kept],
            {name: HeldTensor(held.spec, shared[id(held.parts)], held.storages) for name, held in self.tensors.items()},
        )

    def without(self, workers: Iterable[str]) -> Layout:
        """Return the same layout without some workers."""
        dropped = set(workers)
        return self.only([worker for worker in self.workers if worker not in dropped])

    def held_by(self, worker: str) -> Iterator[Held]:
        """Return what a worker holds."""
        number = self.workers.index(worker)
        # Tensors that are split alike share their parts, of which there may be hundreds for thousands of tensors.
        own: dict[int, list[Part]] = {}
        for name, held in self.tensors.items():
            parts = own.get(id(held.parts))
            if parts is None:
                parts = own[id(held.parts)] = [part for part in held.parts if part.worker == number]
            for part in parts:
                storage = held.storages[part.storage]
                yield Held(name=name, spec=held.spec, box=part.box, storage=storage, at=part.at)

    def misfits(self, worker: str, arrays: Mapping[str, Any]) -> list[str]:
        """Say which memory of a worker is not as the layout says: arrays by name, with a shape and a named `dtype`."""
        wrong = []
        for held in self.held_by(worker):
            storage, have = held.storage, arrays.get(held.storage)
            if have is None:
                wrong.append(f"{worker} has no {storage}")
                continue
            ends = [start + stop - first for start, (first, stop) in zip(held.at, held.box, strict=True)]
            if have.dtype != held.spec.dtype:
                wrong.append(f"{storage} of {worker} is {have.dtype}, not {held.spec.dtype}")
            if len(have.shape) != len(ends) or any(end > size for end, size in zip(ends, have.shape, strict=True)):
                wrong.append(f"{storage} of {worker} has shape {list(have.shape)}: {ends} is needed")
        return list(dict.fromkeys(wrong))

    def bytes_by_worker(self) -> dict[str, int]:
        """Return how many bytes each worker holds."""
        found = [0] * len(self.workers)
        for held in self.tensors.values():
            for part in held.parts:
                found[part.worker] += count(part.box) * SIZES[held.spec.dtype]
        return dict(zip(self.workers, found, strict=True))

    def to_value(self) -> dict[str, Any]:
        """Return it as lists and dicts."""
        tables: dict[tuple[Part, ...], int] = {}
        tensors = {
            name: [
                list(held.spec.shape),
                held.spec.dtype,
                list(held.storages),
                tables.setdefault(held.parts, len(tables)),
            ]
            for name, held in self.tensors.items()
        }
        parts = [
            [[part.worker, [list(pair) for pair in part.box], list(part.at), part.storage] for part in table]
            for table in tables
        ]
        return {"workers": list(self.workers), "parts": parts, "tensors": tensors}

    @classmethod
    def from_value(cls, value: Mapping[str, Any]) -> Layout:
        """Read what `to_value` returns."""
        tables = [
            tuple(
                Part(worker, tuple((start, stop) for start, stop in box), tuple(at), storage)
                for worker, box, at, storage in table
            )
            for table in value["parts"]
        ]
        return cls(
            value["workers"],
            {
                name: HeldTensor(TensorSpec(tuple(shape), dtype), tables[table], tuple(storages))
                for name, (shape, dtype, storages, table) in value["tensors"].items()
            },
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and (self.workers, self.tensors) == (other.workers, other.tensors)

    def __hash__(self) -> int:
        return hash(json.dumps(self.to_value(), sort_keys=True))

    def __repr__(self) -> str:
        return f"<Layout of {len(self.tensors)} tensors in {len(self.workers)} workers>"


def replicated(specs: Mapping[str, TensorSpec], workers: Sequence[str]) -> Layout:
    """Return the layout in which each worker holds every tensor whole."""
    tables = {
        spec.shape: tuple(Part(number, whole(spec.shape), (0,) * len(spec.shape)) for number in range(len(workers)))
        for spec in specs.values()
    }
    return Layout(workers, {name: HeldTensor(spec, tables[spec.shape], (name,)) for name, spec in specs.items()})
