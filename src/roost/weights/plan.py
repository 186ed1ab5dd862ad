"""`SyncPlan`: which bytes go from which worker to which, and how. A value; nothing here acts.

Tensors that are split alike have the same moves, so a plan keeps each pattern of moves once: a model of 70,000 tensors
has a few hundred.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from roost.comm.move.dtypes import SIZES
from roost.comm.move.route import End, choose_route
from roost.comm.move.route import Route as Route
from roost.errors import ConfigError, Problem
from roost.text import join_words, plural, size_text
from roost.weights.boxes import Box, count, intersect, offset, subtract
from roost.weights.layout import HeldTensor, Layout, Part, can_cast

if TYPE_CHECKING:
    from roost.placement.placement import Placement
    from roost.placement.plan import Plan

SYNC_PLAN_VERSION = 1
BUCKET_BYTES = 1 << 28


SPEEDS: Mapping[Route, float] = {Route.MEMORY: 1e12, Route.DEVICE: 1e12, Route.NODE: 20e9, Route.NETWORK: 10e9}
"""Bytes per second that a worker sends or receives, for an estimate where nothing was measured."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker is."""

    node: int
    devices: tuple[int, ...] = ()
    """The accelerators of the node that it uses."""

    @classmethod
    def of(cls, placement: Placement) -> Place:
        """Return where a placement puts a worker."""
        return cls(placement.cluster_node_rank, placement.local_hardware_ranks)


def places_of(plan: Plan) -> dict[str, Place]:
    """Return where the workers of a plan are."""
    return {
        f"{component.name}:{placement.rank}": Place.of(placement)
        for component in plan.components
        for placement in component.placements
    }


@dataclass(frozen=True, slots=True)
class Move:
    """A box of a tensor on its way from the memory of one worker to that of another, by their numbers."""

    source: int
    target: int
    box: Box
    source_at: tuple[int, ...]
    target_at: tuple[int, ...]
    source_storage: int
    target_storage: int


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor and the pattern of its moves."""

    name: str
    pattern: int
    source_dtype: str
    target_dtype: str
    source_storages: tuple[str, ...]
    target_storages: tuple[str, ...]

    @property
    def itemsize(self) -> int:
        """The bytes of an element on its way: it is cast where that leaves less to move."""
        return min(SIZES[self.source_dtype], SIZES[self.target_dtype])


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of a tensor that one worker copies from another."""

    name: str
    box: Box
    source: str
    target: str
    route: Route
    source_storage: str
    source_at: tuple[int, ...]
    target_storage: str
    target_at: tuple[int, ...]
    source_dtype: str
    target_dtype: str
    nbytes: int


class SyncPlan:
    """How the weights of some workers become those of others. Compares by content; `digest` names it."""

    def __init__(
        self,
        source: Layout,
        target: Layout,
        places: Mapping[str, Place],
        bucket_bytes: int,
        patterns: Sequence[tuple[Move, ...]],
        tensors: Sequence[PlannedTensor],
        ends: Mapping[str, End],
    ) -> None:
        """Use `make_sync_plan`."""
        self.source = source
        self.target = target
        self.places = dict(places)
        self.bucket_bytes = bucket_bytes
        self.patterns = tuple(patterns)
        self.tensors = tuple(tensors)
        self.workers = tuple(dict.fromkeys([*source.workers, *target.workers]))
        """All that take part."""
        self._ends = ends

    @functools.cached_property
    def digest(self) -> str:
        """A name that only plans with the same moves have."""
        found = hashlib.sha256()
        content = (self.source.workers, self.target.workers, self.bucket_bytes, sorted(self.places.items()))
        found.update(repr(content).encode())
        for item in itertools.chain(self.patterns, self.tensors):
            found.update(repr(item).encode())
        return found.hexdigest()

    def pieces(self, *, source: str | None = None, target: str | None = None) -> Iterator[Piece]:
        """Return what goes from a worker, or to one, or everything; in the order of the tensors."""
        sources, targets = self.source.workers, self.target.workers
        chosen = [
            [
                (move, self.route(sources[move.source], targets[move.target]))
                for move in pattern
                if source in (None, sources[move.source]) and target in (None, targets[move.target])
            ]
            for pattern in self.patterns
        ]
        for tensor in self.tensors:
            for move, route in chosen[tensor.pattern]:
                yield Piece(
                    name=tensor.name,
                    box=move.box,
                    source=sources[move.source],
                    target=targets[move.target],
                    route=route,
                    source_storage=tensor.source_storages[move.source_storage],
                    source_at=move.source_at,
                    target_storage=tensor.target_storages[move.target_storage],
                    target_at=move.target_at,
                    source_dtype=tensor.source_dtype,
                    target_dtype=tensor.target_dtype,
                    nbytes=count(move.box) * tensor.itemsize,
                )

    def buckets(self, source: str, target: str) -> list[list[Piece]]:
        """Return what goes from one worker to another in steps, none of which is larger than `bucket_bytes`."""
        steps: list[list[Piece]] = [[]]
        size = 0
        for piece in self.pieces(source=source, target=target):
            for part in _cut(piece, self.bucket_bytes):
                if steps[-1] and size + part.nbytes > self.bucket_bytes:
                    steps.append([])
                    size = 0
                steps[-1].append(part)
                size += part.nbytes
        return steps if steps[0] else []

    def route(self, source: str, target: str) -> Route:
        """Return how bytes go from one worker to another."""
        return choose_route(self._ends[source], self._ends[target])

    @functools.cached_property
    def traffic(self) -> Mapping[tuple[str, str], int]:
        """The bytes that go from one worker to another, by both."""
        found: Counter[tuple[int, int]] = Counter()
        # By pattern and size of an element: how many tensors there are.
        alike = Counter((tensor.pattern, tensor.itemsize) for tensor in self.tensors)
        for (pattern, itemsize), number in alike.items():
            for move in self.patterns[pattern]:
                found[move.source, move.target] += count(move.box) * itemsize * number
        sources, targets = self.source.workers, self.target.workers
        return {(sources[one], targets[other]): size for (one, other), size in sorted(found.items())}

    def bytes_by_route(self) -> dict[Route, int]:
        """Return how many bytes go which way."""
        found = dict.fromkeys(SPEEDS, 0)
        for (source, target), size in self.traffic.items():
            found[self.route(source, target)] += size
        return found

    def bytes_by_worker(self) -> dict[str, tuple[int, int]]:
        """Return how many bytes each worker sends and receives."""
        sent: Counter[str] = Counter()
        received: Counter[str] = Counter()
        for (source, target), size in self.traffic.items():
            sent[source] += size
            received[target] += size
        return {worker: (sent[worker], received[worker]) for worker in self.workers}

    def estimate(self, speeds: Mapping[Route, float] = SPEEDS) -> tuple[float, str]:
        """Return how many seconds an update takes at these bytes per second, and the worker that takes longest."""
        seconds: dict[tuple[str, bool], float] = defaultdict(float)
        for (source, target), size in self.traffic.items():
            taken = size / speeds[self.route(source, target)]
            seconds[source, True] += taken
            seconds[target, False] += taken
        return max(((taken, worker) for (worker, _), taken in seconds.items()), default=(0.0, ""))

    def without(self, dead: Iterable[str]) -> SyncPlan:
        """Return the plan without some workers; ConfigError if they alone held something that others need."""
        gone = set(dead)
        source = self.source.without(gone & set(self.source.workers))
        target = self.target.without(gone & set(self.target.workers))
        return make_sync_plan(source, target, self.places, bucket_bytes=self.bucket_bytes)

    def restricted(self, to: Iterable[str]) -> SyncPlan:
        """Return the plan for some of the targets."""
        return make_sync_plan(self.source, self.target.only(to), self.places, bucket_bytes=self.bucket_bytes)

    def to_json(self) -> str:
        """Return it as JSON: both layouts, the places, and what follows from them in short."""
        return json.dumps(
            {
                "version": SYNC_PLAN_VERSION,
                "digest": self.digest,
                "bucket_bytes": self.bucket_bytes,
                "bytes": {route.words: size for route, size in self.bytes_by_route().items()},
                "traffic": [[source, target, size] for (source, target), size in self.traffic.items()],
                "places": {name: [place.node, list(place.devices)] for name, place in self.places.items()},
                "source": self.source.to_value(),
                "target": self.target.to_value(),
            }
        )

    @classmethod
    def from_json(cls, text: str) -> SyncPlan:
        """Read what `to_json` returns; ConfigError if its digest is that of another plan."""
        value: dict[str, Any] = json.loads(text)
        if value.get("version") != SYNC_PLAN_VERSION:
            raise ConfigError(f"this is version {value.get('version')} of a plan, and Roost reads {SYNC_PLAN_VERSION}")
        plan = make_sync_plan(
            Layout.from_value(value["source"]),
            Layout.from_value(value["target"]),
            {name: Place(node, tuple(devices)) for name, (node, devices) in value["places"].items()},
            bucket_bytes=value["bucket_bytes"],
        )
        if plan.digest != value["digest"]:
            raise ConfigError("the plan was changed after it was written, or by another version of Roost")
        return plan

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SyncPlan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        total = size_text(sum(self.traffic.values()))
        sides = f"{plural(len(self.source.workers), 'worker')} to {len(self.target.workers)}"
        return f"<SyncPlan {self.digest[:8]} of {plural(len(self.tensors), 'tensor')}, {total} from {sides}>"


def make_sync_plan(
    source: Layout, target: Layout, places: Mapping[str, Place] | None = None, *, bucket_bytes: int = BUCKET_BYTES
) -> SyncPlan:
    """Decide where each part of each target comes from: from the nearest worker that has it, evenly among equals.

    ConfigError lists every tensor that is on one side only, has another shape, or a type that cannot be cast.
    """
    if bucket_bytes < max(SIZES.values()):
        raise ConfigError(f"bucket_bytes is {bucket_bytes}: that is less than one element")
    places = places or {}
    problems = []
    for here, there, words in ((source, target, "the source has it"), (target, source, "the targets have it")):
        problems += [Problem(message=f"{name}: only {words}") for name in here.tensors if name not in there.tensors]
    for name, wanted in target.tensors.items():
        if (held := source.tensors.get(name)) is None:
            continue
        if held.spec.shape != wanted.spec.shape:
            shapes = f"{list(held.spec.shape)} in the source, {list(wanted.spec.shape)} in the targets"
            problems.append(Problem(message=f"{name} has shape {shapes}"))
        elif not can_cast(held.spec.dtype, wanted.spec.dtype):
            problems.append(Problem(message=f"{name}: {held.spec.dtype} cannot be stored as {wanted.spec.dtype}"))
    if problems:
        raise ConfigError(problems)
    # Before there are processes, all that is known of an end is its place; without one it is far from the others.
    ends = {
        worker: End(process=worker, node=place.node, devices=place.devices)
        if (place := places.get(worker)) is not None
        else End(process=worker)
        for worker in (*source.workers, *target.workers)
    }
    numbers: dict[int, int] = {}
    contents: dict[tuple[Part, ...], int] = {}

    def number_of(parts: tuple[Part, ...]) -> int:
        """Number parts by content, so that the plan does not depend on which tensors share them; hash each once."""
        if id(parts) not in numbers:
            numbers[id(parts)] = contents.setdefault(parts, len(contents))
        return numbers[id(parts)]

    patterns: dict[object, int] = {}
    made: list[tuple[Move, ...]] = []
    tensors = []
    turns: Counter[object] = Counter()
    for name, wanted in target.tensors.items():
        held = source.tensors[name]
        alike = number_of(held.parts), number_of(wanted.parts)
        if alike not in patterns:
            moves, missing = _moves(held, wanted, source, target, ends)
            if missing is not None:
                where = f"[{', '.join(f'{start}:{stop}' for start, stop in missing)}]" if missing else ""
                problems.append(Problem(message=f"no source holds {name}{where}"))
                continue
            patterns[alike] = len(made)
            made.extend(moves)
            turns[alike, "variants"] = len(moves)
        variants = turns[alike, "variants"]
        turn = turns[alike]
        turns[alike] += 1
        tensors.append(
            PlannedTensor(
                name,
                patterns[alike] + turn % variants,
                held.spec.dtype,
                wanted.spec.dtype,
                held.storages,
                wanted.storages,
            )
        )
    if problems:
        raise ConfigError(problems)
    return SyncPlan(source, target, places, bucket_bytes, made, tensors, ends)


def _moves(
    held: HeldTensor, wanted: HeldTensor, source: Layout, target: Layout, ends: Mapping[str, End]
) -> tuple[list[tuple[Move, ...]], Box | None]:
    """Return the moves of a tensor, in as many variants as there are equal sources, and what no source has."""
    # By box: those who hold it.
    holders: dict[Box, list[Part]] = {}
    for part in held.parts:
        holders.setdefault(part.box, []).append(part)
    chosen: list[tuple[list[Part], Part, Box]] = []
    for part in wanted.parts:
        if not count(part.box):
            continue
        here = ends[target.workers[part.worker]]
        near: dict[Box, tuple[Route, list[Part]]] = {}
        for box, those in holders.items():
            if intersect(box, part.box) is None:
                continue
            routes = [choose_route(ends[source.workers[one.worker]], here) for one in those]
            best = min(routes)
            near[box] = best, [one for one, route in zip(those, routes, strict=True) if route == best]
        left = [part.box]
        # The nearest first, and of these the largest.
        for box, (_, those) in sorted(near.items(), key=lambda item: (item[1][0], -count(item[0]), item[0])):
            rest = []
            for hole in left:
                common = intersect(hole, box)
                if common is None:
                    rest.append(hole)
                else:
                    chosen.append((those, part, common))
                    rest += subtract(hole, common)
            left = rest
            if not left:
                break
        if left:
            return [], left[0]
    variants = max((len(those) for those, _, _ in chosen), default=1)
    found: list[tuple[Move, ...]] = []
    for turn in range(variants):
        moves = []
        for place, (those, part, box) in enumerate(chosen):
            one = those[(turn + place) % len(those)]
            starts = offset(box, one.box, one.at), offset(box, part.box, part.at)
            moves.append(Move(one.worker, part.worker, box, *starts, one.storage, part.storage))
        found.append(tuple(moves))
    return found, None


def _cut(piece: Piece, most: int) -> Iterator[Piece]:
    """Cut a piece that is larger than a bucket along its dimensions, the first one first."""
    if piece.nbytes <= most:
        yield piece
        return
    dim = next(place for place, (start, stop) in enumerate(piece.box) if stop - start > 1)
    low, high = piece.box[dim]
    step = max(1, most * (high - low) // piece.nbytes)
    for start in range(low, high, step):
        box = (*piece.box[:dim], (start, min(high, start + step)), *piece.box[dim + 1 :])
        part = replace(
            piece,
            box=box,
            nbytes=piece.nbytes * count(box) // count(piece.box),
            source_at=offset(box, piece.box, piece.source_at),
            target_at=offset(box, piece.box, piece.target_at),
        )
        yield from _cut(part, most)


def describe(plan: SyncPlan, *, most: int = 16) -> str:
    """Say in lines of text what a plan does; the shares of at most as many workers, or of none."""
    total = sum(plan.traffic.values())
    seconds, slowest = plan.estimate()
    lines = [
        f"{plural(len(plan.tensors), 'tensor')}, {size_text(total)} from {plural(len(plan.source.workers), 'worker')} "
        f"to {len(plan.target.workers)}, plan {plan.digest[:12]}",
    ]
    for route, size in plan.bytes_by_route().items():
        if size:
            lines.append(f"  {route.words:14} {size_text(size):>10}  {100 * size / total:3.0f} %")
    workers = plan.bytes_by_worker()
    for worker, (sent, received) in itertools.islice(workers.items(), most):
        lines.append(f"  {worker:14} sends {size_text(sent):>10}, receives {size_text(received):>10}")
    if len(workers) > most > 0:
        lines.append(f"  … and {len(workers) - most} more workers")
    if slowest:
        rates = join_words([f"{route.words} {speed / 1e9:g} GB/s" for route, speed in SPEEDS.items() if route > 1])
        lines.append(f"  about {seconds:.3g} s at {rates}; {slowest} takes longest")
    return "\n".join(lines)
