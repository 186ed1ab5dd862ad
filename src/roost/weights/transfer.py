"""`Transfer`: one plan, as one of its workers carries it out: where its sources are, what it copies, what it sends."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from roost.comm.move.arrays import (
    address_of,
    copy,
    cut,
    devices_of,
    empty_bytes,
    finish,
    is_on_device,
    is_tensor,
    wrap,
)
from roost.comm.move.cuda import uuid_of, visible_devices
from roost.comm.move.dtypes import SIZES
from roost.comm.move.loans import can_group, why_refused
from roost.comm.move.mover import Copies, Offer, RemoteMemory
from roost.comm.move.route import End, Route, choose_route, explain
from roost.deadline import Deadline
from roost.errors import CallTimedOut, ConfigError, Problem
from roost.weights.adapters import as_weights, spec_of
from roost.weights.boxes import count, shape_of
from roost.weights.layout import Layout
from roost.weights.limits import LOOK_SECONDS, SENT_SECONDS
from roost.weights.plan import Piece, SyncPlan
from roost.weights.update import Moved

if TYPE_CHECKING:
    from roost.comm.messages import Messages
    from roost.comm.wire.loop import Handle
    from roost.weights.worker import WeightWorker

_TAG = "weights"
_ALIGNMENT = 16
_AHEAD = 2
"""How many buckets a source has on their way to each target."""

log: logging.Logger = logging.getLogger(__name__)

Check = Callable[[str], None]
"""Raises if the attempt was broken off, or if the deadline has passed; takes what is still missing, for the error."""
Owed = list[tuple[str, deque[Hashable]]]
"""By sender: the tags of what it sends in an attempt, and was not received yet."""


class ArraysSeen:
    """Arrays by name as they were at a moment, to see whether they are still the same memory."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.tensors = dict(tensors)
        self.devices = devices_of(tensors.values())
        self._places = _places_of(tensors)

    def is_same(self, tensors: Mapping[str, Any]) -> bool:
        """Whether these arrays lie where those lay: the same objects can have another form, and other memory."""
        return self._places == _places_of(tensors)


def _places_of(tensors: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    # A model can have 70,000, which are looked at in each update.
    kind = sys.modules["torch"].Tensor if "torch" in sys.modules else ()
    return [
        (name, one.data_ptr(), one.shape, one.stride(), one.dtype)
        if isinstance(one, kind)
        else (name, address_of(one), one.shape, one.strides, one.dtype)
        for name, one in tensors.items()
    ]


class Transfer:
    """A plan, as a worker that takes part in it knows it."""

    def __init__(
        self, plan: SyncPlan, method: str, worker: WeightWorker, link: str, targets: Callable[[Transfer], Any]
    ) -> None:
        """Take a plan, what its sources are asked for, and what returns the memory that the new version goes to."""
        self.plan = plan
        self.method = method
        self.seen: ArraysSeen | None = None
        """Where the weights of this target were when the copies were found."""
        self._worker = worker
        self._own = str(worker.address)
        self._link = link
        self._targets = targets
        self._sources: dict[str, RemoteMemory] = {}
        """The sources that this target copies from without their help."""
        self._routes: dict[str, tuple[Route, str]] = {}
        self._copies = Copies()
        """From memory that this process can map."""
        self._reads: list[tuple[RemoteMemory, Piece, Any]] = []
        """Pieces that are read, and where to."""
        self._forms: list[tuple[Any, ...]] | None = None
        """The shapes and types of this target's memory when that was last found to fit the plan."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        """By storage: its shape in this source when it learned the plan."""

    @functools.cached_property
    def parts(self) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """The storages, and places in them, that this target gets; the rest of its memory is not touched."""
        held = self.plan.target.held_by(self._own)
        return [(one.storage, one.at, shape_of(one.box)) for one in held]

    def source_arrays(self) -> Mapping[str, Any]:
        """Return the arrays that this worker has as a source."""
        return as_weights(getattr(self._worker, self.method)(), self.method).tensors()

    def check_source(self, tensors: Mapping[str, Any]) -> None:
        """Raise ConfigError if an array of this source has another shape than it had when the link was made.

        Also if it is larger, and has all that is needed: what lies where the plan looks is something else then.
        """
        names = dict.fromkeys(one.storage for one in self.plan.source.held_by(self._own))
        now = {name: tuple(tensors[name].shape) for name in names if name in tensors}
        self._shapes = self._shapes or now
        changed = [(name, shape) for name, shape in now.items() if shape != self._shapes[name]]
        if changed:
            words = [f"{name} of {self._own} has shape {list(shape)}" for name, shape in changed]
            hints = [f"it had {list(self._shapes[name])} when the link was made: make a new one" for name, _ in changed]
            raise ConfigError([Problem(message=what, hint=hint) for what, hint in zip(words, hints, strict=True)])

    def check_target(self) -> None:
        """Raise ConfigError if the memory of this target has changed, and does not fit the plan any more."""
        accepted = as_weights(self._worker.accept(), "accept").tensors()
        # Without holding on to the arrays, whose memory the worker may give back.
        forms = [(name, accepted[name].shape, accepted[name].dtype) for name, _, _ in self.parts if name in accepted]
        if forms != self._forms:
            if wrong := self.misfits(self.plan.target, accepted):
                raise ConfigError([Problem(message=line) for line in wrong])
            self._forms = forms

    def misfits(self, layout: Layout, tensors: Mapping[str, Any]) -> list[str]:
        """Say which arrays of this worker are not as a side of the plan says."""
        needed = dict.fromkeys(held.storage for held in layout.held_by(self._own))
        return layout.misfits(self._own, {name: spec_of(tensors[name]) for name in needed if name in tensors})

    def connect(self, offers: Mapping[str, Offer]) -> dict[str, tuple[Route, str]]:
        """Learn where the memory of sources is; returns how the bytes of each come, and why if not as planned."""
        # Memory that a source has replaced is free only when it is mapped nowhere.
        self.let_go()
        wanted: dict[str, dict[str, str]] = {}
        for piece in self.plan.pieces(target=self._own):
            wanted.setdefault(piece.source, {})[piece.source_storage] = piece.target_storage
        self._sources, self._routes = {}, {}
        for name, storages in wanted.items():
            source = RemoteMemory(name, offers[name])
            has_device = any(offers[name].arrays[storage].device for storage in storages)
            tensors = self._targets(self) if has_device else {}
            into = [tensors[storage] for storage in storages.values() if storage in tensors]
            devices = {uuid_of(one.device) if is_on_device(one) else "" for one in into}
            there = source.end(storages)
            here = End(
                process=self._own,
                node=self._worker.node_rank,
                devices=visible_devices() if has_device and "torch" in sys.modules else (),
                memory=devices.pop() if len(devices) == 1 else "",
                can_group=can_group(self._messages.endpoint),
            )
            taken, planned = choose_route(there, here), self.plan.route(name, self._own)
            why = explain(planned, taken, there, here)
            if not taken.is_sent:
                self._sources[name] = source
            elif why:
                log.warning("%s gets the weights of %s by messages, which is slower: %s", self._own, name, why)
            self._routes[name] = taken, why
        return self._routes

    @property
    def _messages(self) -> Messages:
        return self._worker._roost_messages

    def let_go(self) -> None:
        """Let go of the memory of both sides, which is found again when it is needed."""
        finish(self._copies.devices)
        self._copies, self._reads, self.seen = Copies(), [], None
        for source in self._sources.values():
            source.close()

    def copy_all(self, attempt: int, check: Check, owed: Owed, *, in_place: bool) -> Moved:
        """Copy everything that the plan says; returns the seconds for each source."""
        senders = [name for name, (route, _) in self._routes.items() if route.is_sent]
        coming = {name: self.plan.buckets(name, self._own) for name in senders}
        tags: dict[str, deque[Hashable]] = {
            name: deque((_TAG, self._link, attempt, number) for number in range(len(buckets)))
            for name, buckets in coming.items()
        }
        owed += tags.items()
        began = time.monotonic()
        seen = self.seen
        is_ready = seen is not None and not (in_place and not seen.is_same(self._targets(self)))
        if not is_ready:
            self._find()
        self._copies.start(lambda: check("all weights"))
        # Devices copy meanwhile; memory beside the weights can be written in vain.
        if is_ready and seen is not None and not in_place and not seen.is_same(self._targets(self)):
            self._find()
            self._copies.start(lambda: check("all weights"))
        seconds = {"mapped memory": time.monotonic() - began}
        for source, piece, target in self._reads:
            began = time.monotonic()
            source.read(piece.source_storage, piece.source_at, target)
            seconds[source.owner] = seconds.get(source.owner, 0.0) + time.monotonic() - began
            check("all weights")
        live = self._targets(self) if coming else {}
        for number in range(max(map(len, coming.values()), default=0)):
            for name, buckets in coming.items():
                if number >= len(buckets):
                    continue
                began, bucket = time.monotonic(), buckets[number]
                packed, parts = _pack(bucket, [live[piece.target_storage] for piece in bucket])
                is_here = False
                while not is_here:
                    check(f"those of {name}")
                    # A receive that is late is withdrawn.
                    with contextlib.suppress(CallTimedOut):
                        self._messages.wait_for_next(name, tags[name][0], packed, LOOK_SECONDS)
                        is_here = True
                tags[name].popleft()
                for piece, part in zip(bucket, parts, strict=True):
                    copy(cut(live[piece.target_storage], piece.target_at, shape_of(piece.box)), part)
                finish(devices_of(live[piece.target_storage] for piece in bucket))
                seconds[name] = seconds.get(name, 0.0) + time.monotonic() - began
        finish(self._copies.devices | devices_of(target for _, _, target in self._reads))
        check("all weights")
        endpoint = self._messages.endpoint
        refused = {name: why_refused(endpoint, name) for name in senders if self._routes[name][0] is Route.GROUP}
        return Moved(seconds=seconds, detours={name: why for name, why in refused.items() if why})

    def take_over(self, staged: Mapping[str, Any], live: Mapping[str, Any]) -> None:
        """Copy what lies beside the weights over them."""
        for name, at, shape in self.parts:
            copy(cut(live[name], at, shape), cut(staged[name], at, shape))
        finish(devices_of(live.values()))

    def send(self, attempt: int, targets: Sequence[str], check: Check, deadline: Deadline) -> None:
        """Send their parts to targets that cannot copy them."""
        tensors = self.source_arrays()
        steps = [self.plan.buckets(self._own, target) for target in targets]
        on_their_way: deque[Handle[None]] = deque()
        for number, step in enumerate(itertools.zip_longest(*steps, fillvalue=None)):
            for target, bucket in zip(targets, step, strict=True):
                if bucket is None:
                    continue
                check("sent all weights")
                packed, parts = _pack(bucket, [tensors[piece.source_storage] for piece in bucket])
                for piece, part in zip(bucket, parts, strict=True):
                    copy(part, cut(tensors[piece.source_storage], piece.source_at, shape_of(piece.box)))
                finish(devices_of(tensors[piece.source_storage] for piece in bucket))
                tag = _TAG, self._link, attempt, number
                on_their_way.append(self._messages.send_tensor(packed, target, tag))
                while len(on_their_way) > _AHEAD * len(targets):
                    _wait(on_their_way.popleft(), check, deadline)
        for handle in on_their_way:
            _wait(handle, check, deadline)

    def _find(self) -> None:
        """Find the memory that is copied."""
        live = self._targets(self)
        self._copies, self._reads = Copies(), []
        if wrong := self.misfits(self.plan.target, live):
            raise ConfigError([Problem(message=line) for line in wrong])
        mine = self.source_arrays() if self._own in self._sources else {}
        for piece in self.plan.pieces(target=self._own):
            source, shape = self._sources.get(piece.source), shape_of(piece.box)
            if source is None or not count(piece.box):
                continue
            target = cut(live[piece.target_storage], piece.target_at, shape)
            if piece.source == self._own:
                self._copies.add(target, cut(mine[piece.source_storage], piece.source_at, shape))
                continue
            view = source.view(piece.source_storage, piece.source_at, shape)
            if view is None:
                self._reads.append((source, piece, target))
            else:
                self._copies.add(target, view)
        self.seen = ArraysSeen(live)


def _wait(handle: Handle[Any], check: Check, deadline: Deadline) -> None:
    while not handle.done():
        check("sent all weights")
        handle.within(max(0.01, deadline.within(LOOK_SECONDS).left))
    handle.wait(SENT_SECONDS)


def _pack(bucket: Sequence[Piece], like: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return memory for a bucket, on the device of these arrays if they are on one, and the part of each piece there.

    Parts have the type that travels, and begin where any type can.
    """
    starts = [0, *itertools.accumulate(-(-piece.nbytes // _ALIGNMENT) * _ALIGNMENT for piece in bucket)]
    packed = empty_bytes(starts[-1], like)
    whole = packed if is_tensor(packed) else memoryview(packed)
    parts = []
    for piece, at in zip(bucket, starts, strict=False):
        dtype = min(piece.target_dtype, piece.source_dtype, key=SIZES.__getitem__)
        parts.append(wrap(whole[at : at + piece.nbytes], dtype, shape_of(piece.box)))
    return packed, parts
