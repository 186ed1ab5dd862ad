"""A worker's part in a link: answers what the link asks, and copies, in a thread of its own."""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
import pickle
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from roost.comm.wire.connection import Frame, Kind
from roost.comm.wire.loop import Handle
from roost.comm.wire.peer import Peer
from roost.errors import CallTimedOut, ClusterError, ConfigError, RoostError
from roost.text import error_text, join_words
from roost.weights.adapters import Committing, as_weights
from roost.weights.arrays import (
    address_of,
    can_wrap,
    copy,
    cut,
    devices_of,
    dtype_of,
    empty_bytes,
    empty_like,
    finish,
    is_tensor,
    let_others_read,
    strides_of,
    wrap,
)
from roost.weights.boxes import count, shape_of
from roost.weights.copies import Copies
from roost.weights.layout import SIZES
from roost.weights.offers import Offer, Source, make_offer
from roost.weights.plan import Piece, SyncPlan

if TYPE_CHECKING:
    from roost.weights.worker import WeightWorker

_MOST_PLANS = 4
"""How many plans a member keeps besides the link's own: those that filled single targets."""
_NEVER = 1 << 62
_LOOK_SECONDS = 0.5
_COMMANDS = frozenset(("plan", "prepare", "connect", "move", "commit", "status", "holds", "abort", "send"))
_ALIGNMENT = 16
_AHEAD = 2
"""How many buckets a source has on their way to each target."""

log: logging.Logger = logging.getLogger(__name__)


class _Memory:
    """Arrays by name as they were at a moment, to see whether they are still where they were."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.tensors = dict(tensors)
        self.devices = devices_of(tensors.values())
        self._places = [
            (name, address_of(one), tuple(one.shape), strides_of(one), one.dtype) for name, one in tensors.items()
        ]
        self._addresses = [place[1] for place in self._places]
        self._find = [one.data_ptr if is_tensor(one) else partial(address_of, one) for one in tensors.values()]

    def is_same(self, tensors: Mapping[str, Any]) -> bool:
        """Whether other arrays have the same memory."""
        # Quickly where they are the same objects, as they nearly always are.
        is_known = list(tensors) == list(self.tensors) and all(
            map(operator.is_, tensors.values(), self.tensors.values())
        )
        if is_known and [find() for find in self._find] == self._addresses:
            return True
        return self._places == _Memory(tensors)._places


@dataclass(slots=True)
class _Side:
    """What a worker knows of a plan in which it takes part."""

    plan: SyncPlan
    method: str
    """What its sources are asked for: `offer`, or `accept` if they are other targets."""
    sources: dict[str, Source] = field(default_factory=dict)
    """Those that this target copies from itself."""
    senders: tuple[str, ...] = ()
    """Those that have to send."""
    copies: Copies = field(default_factory=Copies)
    """From memory that this process can map."""
    reads: list[tuple[Source, Piece, Any]] = field(default_factory=list)
    """Pieces that the kernel copies, and where to."""
    memory: _Memory | None = None
    """Where the weights of this target were when these were made."""
    _parts: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)

    def let_go(self) -> None:
        """Let go of the memory of both sides, which is found again when it is needed."""
        finish(self.copies.devices)
        self.copies, self.reads, self.memory = Copies(), [], None
        for source in self.sources.values():
            source.close()

    def parts(self, worker: str) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """Return what a target gets: storages, and where in them; the rest of its memory is not touched."""
        if not self._parts:
            held = self.plan.target.held_by(worker)
            self._parts = [(one.storage, one.at or (0,) * len(one.box), shape_of(one.box)) for one in held]
        return self._parts


class Member:
    """The weights of this worker: their version, and the links that change them."""

    def __init__(self, worker: WeightWorker) -> None:
        self.version = -1
        """The version that all weights have; -1 if that is none."""
        self._worker = worker
        self._links: dict[str, _Link] = {}
        self._messages = worker._roost_talk.messages
        let_others_read()
        self._messages.endpoint.serve(self._take)

    def join(self, link: str, *, in_place: bool, may_share: bool) -> None:
        """Take part in a link."""
        self._leave(link)
        self._links[link] = _Link(self, self._worker, link, in_place, may_share)

    def _leave(self, link: str) -> None:
        found = self._links.pop(link, None)
        if found is not None:
            found.close()

    def _take(self, peer: Peer, frame: Frame) -> None:
        """Hand a request to the thread of its link; in the thread that reads."""
        link, command, arguments = pickle.loads(frame.data)  # noqa: S301 - from a member of the job
        found = self._links.get(link)

        def answer(succeeded: bool, value: Any) -> None:
            peer.send(Kind.REPLY, frame.number, b"", pickle.dumps((succeeded, value)))

        if command == "leave":
            self._leave(link)
            answer(True, None)
        elif found is None or command not in _COMMANDS:
            answer(False, ClusterError(f"{self._worker.address} was started again and is not in this link any more"))
        else:
            found.ask(command, arguments, answer)

    def let_go(self, timeout: float) -> None:
        """Let go of the memory that links took for updates; the next update takes it again."""
        waiting = []
        for link in [*self._links.values()]:
            # One that is being closed lets go of everything.
            with contextlib.suppress(RuntimeError):
                waiting.append(link.let_go())
        wait(waiting, timeout)

    @property
    def messages(self) -> Any:
        """The messages of this process."""
        return self._messages


class _Link:
    """One link, as a member of it sees it."""

    def __init__(self, member: Member, worker: WeightWorker, name: str, in_place: bool, may_share: bool) -> None:
        self._member = member
        self._worker = worker
        self._name = name
        self._in_place = in_place
        self._may_share = may_share
        self._sides: dict[str, _Side] = {}
        self._attempt = 0
        self._ended = -1
        """The last attempt that was broken off."""
        self._version = -1
        """The version that an attempt brings."""
        self._changing = contextlib.ExitStack()
        """What surrounds a change of the weights in place, from the first byte to the commit."""
        self._main = ""
        """The digest of the link's own plan."""
        self._staged: dict[str, Any] = {}
        self._since = 0.0
        self._filled = -1
        """The version that memory beside the weights has wholly, where the worker has such memory itself."""
        self._owed: list[tuple[str, deque[Hashable]]] = []
        """By sender: the tags of what it sends in an attempt, and was not received yet."""
        self._offered: dict[str, tuple[int, _Memory | None]] = {}
        """By method: the number of the last offer, and its arrays, which stay while others copy from them."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"roost-weights-{name}")
        self._sender = ThreadPoolExecutor(1, thread_name_prefix=f"roost-weights-{name}-send")

    def close(self) -> None:
        """Let go of everything, once what is under way has noticed."""
        self._ended = _NEVER
        self._thread.submit(self._break_off, ClusterError("the link of weights was closed"))
        self._thread.submit(self._let_go)
        self._thread.submit(self._drain)
        self._thread.shutdown(wait=False)
        self._sender.shutdown(wait=False)

    def let_go(self) -> Future[None]:
        """Break off what is under way, and let go of all memory that an update needs: the next one takes it again."""
        self._ended = max(self._ended, self._attempt)
        return self._thread.submit(self._let_go)

    def _let_go(self) -> None:
        self._break_off(ClusterError("the worker let go of the memory of the update"))
        self._staged = {}
        for side in self._sides.values():
            side.let_go()
        if "accept" in self._offered:
            self._offered["accept"] = self._offered["accept"][0], None

    def ask(self, command: str, arguments: Sequence[Any], answer: Callable[[bool, Any], None]) -> None:
        """Carry out a command, and answer."""
        if command == "abort":
            # Not after what it ends.
            self._ended = max(self._ended, arguments[0])

        def run() -> None:
            try:
                value = getattr(self, command)(*arguments)
            except RoostError as error:
                answer(False, error)
            except BaseException as error:
                log.exception("%s of a link of weights failed", command)
                answer(False, ClusterError(f"{self._worker.address} failed in an update: {error_text(error)}"))
            else:
                answer(True, value)

        try:
            (self._sender if command == "send" else self._thread).submit(run)
        except RuntimeError:
            answer(False, ClusterError(f"{self._worker.address} has left this link"))

    def plan(self, plan: SyncPlan, method: str, is_main: bool) -> list[str]:
        """Learn a plan; returns what of this worker's memory does not fit it."""
        if (old := self._sides.pop(plan.digest, None)) is not None:
            old.let_go()
        self._sides[plan.digest] = _Side(plan, method)
        if is_main:
            self._main = plan.digest
        for digest in [known for known in self._sides if known != self._main][:-_MOST_PLANS]:
            self._sides.pop(digest).let_go()
        own, wrong = self._worker.address, []
        if own in plan.target.workers:
            types = {piece.source_dtype for piece in plan.pieces(target=own)}
            wrong += [f"{own} gets {dtype}, which takes torch there" for dtype in sorted(types) if not can_wrap(dtype)]
        for role, layout in ((method, plan.source), ("accept", plan.target)):
            if own not in layout.workers:
                continue
            tensors = as_weights(getattr(self._worker, role)(), role).tensors()
            for held in layout.held_by(own):
                storage = held.storage or held.name
                if storage not in tensors:
                    wrong.append(f"{own} has no {storage}")
                    continue
                have, at = tensors[storage], held.at or (0,) * len(held.box)
                ends = [start + size for start, size in zip(at, shape_of(held.box), strict=True)]
                if dtype_of(have) != held.spec.dtype:
                    wrong.append(f"{storage} of {own} is {dtype_of(have)}, not {held.spec.dtype}")
                if len(have.shape) != len(ends) or any(end > size for end, size in zip(ends, have.shape, strict=True)):
                    wrong.append(f"{storage} of {own} has shape {list(have.shape)}: {ends} is needed")
        return wrong

    def prepare(self, attempt: int, version: int, digest: str, role: str, known: int) -> Any:
        """Say that this member is here, with the same plan.

        Returns what a source offers and the number of that offer, unless it is the one that is known.
        """
        self._check(attempt, digest)
        self._break_off(ClusterError(f"update {self._attempt} was not completed"))
        self._attempt, self._version = attempt, version
        if role == "target":
            self._check_newer(version)
            return None
        method = self._side(digest).method
        tensors = self._source(digest)
        number, memory = self._offered.get(method, (0, None))
        if known and known == number and memory is not None and memory.is_same(tensors):
            finish(memory.devices)
            return None
        offer = make_offer(tensors, self._worker.node_rank, may_share=self._may_share and method == "offer")
        # Sharing moves storages.
        memory = _Memory(tensors)
        self._offered[method] = number + 1, memory
        finish(memory.devices)
        return number + 1, offer

    def _source(self, digest: str) -> Mapping[str, Any]:
        """Return the arrays that this worker has as the source of a plan."""
        method = self._side(digest).method
        return as_weights(getattr(self._worker, method)(), method).tensors()

    def connect(self, digest: str, offers: Mapping[str, Offer]) -> tuple[str, ...]:
        """Learn where the memory of sources lies; returns those that have to send what is wanted of them."""
        side = self._side(digest)
        # Memory that a source has replaced is free only when it is mapped nowhere.
        side.let_go()
        own = self._worker.address
        wanted: dict[str, set[str]] = {}
        for piece in side.plan.pieces(target=own):
            wanted.setdefault(piece.source, set()).add(piece.source_storage)
        for name, offer in offers.items():
            if name in wanted:
                is_near = offer.node == self._worker.node_rank
                source = Source(name, offer)
                if name == own or (is_near and source.can_read(sorted(wanted[name]))):
                    side.sources[name] = source
                    continue
                side.sources.pop(name, None)
                if is_near:
                    log.warning(
                        "%s cannot read the memory of %s on the same node, and gets its weights by messages, which is "
                        "slower; torch's expandable segments are one cause on a GPU",
                        own,
                        name,
                    )
        side.senders = tuple(name for name in wanted if name not in side.sources)
        return side.senders

    def move(self, attempt: int, digest: str, timeout: float) -> dict[str, float]:
        """Copy everything that the plan says; returns the seconds for each source."""
        deadline = time.monotonic() + timeout
        self._check(attempt, digest)
        self._filled = -1
        if not self._overwrites:
            return self._move(attempt, self._side(digest), deadline)
        # Neither the old version nor the new one, until all of it is here.
        self._member.version = -1
        self._since = time.monotonic()
        self._changing.enter_context(self._worker.weights_changing(self._version))
        try:
            return self._move(attempt, self._side(digest), deadline)
        except BaseException as error:
            self._break_off(error)
            raise

    def _move(self, attempt: int, side: _Side, deadline: float) -> dict[str, float]:
        digest = side.plan.digest
        seconds: dict[str, float] = {}
        owed = {name: self._tags(side, name, attempt) for name in side.senders}
        self._owed += owed.items()
        began = time.monotonic()
        is_ready = side.memory is not None and not (self._in_place and not self._is_found(side))
        if not is_ready:
            self._find(side)
        self._copy(side, attempt, deadline)
        # Devices copy meanwhile; memory beside the weights can be written in vain.
        if is_ready and not self._in_place and not self._is_found(side):
            self._find(side)
            self._copy(side, attempt, deadline)
        seconds["mapped memory"] = time.monotonic() - began
        for source, piece, target in side.reads:
            began = time.monotonic()
            source.copy(piece, target)
            seconds[source.name] = seconds.get(source.name, 0.0) + time.monotonic() - began
            self._check(attempt, digest, deadline)
        self._receive(side, owed, attempt, deadline, seconds)
        # Of each sender, what it sent before has come before.
        self._drain()
        finish(side.copies.devices | devices_of(target for _, _, target in side.reads))
        self._check(attempt, digest, deadline)
        return seconds

    def commit(self, attempt: int, version: int, digest: str) -> float:
        """Let the new version be the one that this worker has; returns for how many seconds its weights changed."""
        self._check(attempt, digest)
        if self._overwrites:
            self._member.version = version
            self._changing.pop_all().close()
            return time.monotonic() - self._since
        began = time.monotonic()
        accepted = as_weights(self._worker.accept(), "accept")
        with self._worker.weights_changing(version):
            # Entering may take so long that the link is closed, or another one brings a newer version.
            self._check(attempt, digest)
            self._check_newer(version)
            # A worker that ends in the middle of it is not used any more; nothing else breaks it off.
            self._member.version = -1
            if isinstance(accepted, Committing):
                accepted.commit(version)
                self._filled = version
            else:
                live = accepted.tensors()
                for name, at, shape in self._side(digest).parts(self._worker.address):
                    copy(cut(live[name], at, shape), cut(self._staged[name], at, shape))
                finish(devices_of(live.values()))
            self._member.version = version
        return time.monotonic() - began

    def _break_off(self, error: BaseException) -> None:
        """Let a worker whose weights were being overwritten know that they are no whole version."""
        changing = self._changing.pop_all()
        with contextlib.suppress(BaseException):
            changing.__exit__(type(error), error, error.__traceback__)

    def status(self) -> int:
        """Return the version of this worker's weights."""
        return self._member.version

    def holds(self) -> int:
        """Return the version that others can copy from this worker."""
        return self._filled if self._commits() else self._member.version

    @property
    def _overwrites(self) -> bool:
        """Whether weights that are in use are written to before a version is complete."""
        return self._in_place and not self._commits()

    def _commits(self) -> bool:
        """Whether the worker has memory beside its weights, and takes a version over itself."""
        return isinstance(as_weights(self._worker.accept(), "accept"), Committing)

    def abort(self, attempt: int) -> None:
        """Break off an attempt; it was noted when the request came, and nothing of it is under way any more."""
        if attempt == self._attempt:
            self._break_off(ClusterError(f"update {attempt} was broken off"))

    def send(self, attempt: int, digest: str, targets: Sequence[str], timeout: float) -> None:
        """Send their parts to targets that cannot copy them; in a thread of its own."""
        deadline = time.monotonic() + timeout
        side, tensors = self._side(digest), self._source(digest)
        messages, own = self._member.messages, self._worker.address
        steps = [side.plan.buckets(own, target) for target in targets]
        on_their_way: list[Handle[None]] = []
        for number, step in enumerate(itertools.zip_longest(*steps, fillvalue=None)):
            for target, bucket in zip(targets, step, strict=True):
                if bucket is None:
                    continue
                self._check(attempt, digest, deadline)
                packed = _room(bucket, [tensors[piece.source_storage] for piece in bucket])
                for piece, part in _parts(bucket, packed):
                    copy(part, cut(tensors[piece.source_storage], piece.source_at, shape_of(piece.box)))
                finish(devices_of(tensors[piece.source_storage] for piece in bucket))
                handle = messages.send_tensor(packed, target, ("weights", self._name, attempt, number))
                on_their_way.append(handle)
                while len(on_their_way) > _AHEAD * len(targets):
                    self._wait(on_their_way.pop(0), attempt, digest, deadline)
        for handle in on_their_way:
            self._wait(handle, attempt, digest, deadline)

    def _tags(self, side: _Side, sender: str, attempt: int) -> deque[Hashable]:
        """Return the tags of what a sender sends to this worker."""
        buckets = side.plan.buckets(sender, self._worker.address)
        return deque(("weights", self._name, attempt, number) for number in range(len(buckets)))

    def _drain(self) -> None:
        """Drop what came of attempts that were broken off, which nothing else would receive."""
        left, self._owed = self._owed, []
        for name, tags in left:
            with contextlib.suppress(ClusterError):
                # They come in order: where one is not here, the rest was not sent.
                for tag in tags:
                    # A tensor is received into memory, and is dropped without.
                    with contextlib.suppress(ConfigError):
                        self._member.messages.wait_for_next(name, tag, None, 0.0)

    def _receive(
        self,
        side: _Side,
        owed: Mapping[str, deque[Hashable]],
        attempt: int,
        deadline: float,
        seconds: dict[str, float],
    ) -> None:
        messages, own = self._member.messages, self._worker.address
        live = self._targets(side)
        steps = [(name, side.plan.buckets(name, own)) for name in side.senders]
        for number in range(max((len(buckets) for _, buckets in steps), default=0)):
            for name, buckets in steps:
                if number >= len(buckets):
                    continue
                began = time.monotonic()
                packed = _room(buckets[number], [live[piece.target_storage] for piece in buckets[number]])
                tag = owed[name][0]
                is_here = False
                while not is_here:
                    self._check(attempt, side.plan.digest, deadline, f"those of {name}")
                    with contextlib.suppress(CallTimedOut):
                        # A receive that is late is withdrawn.
                        messages.wait_for_next(name, tag, packed, _LOOK_SECONDS)
                        is_here = True
                owed[name].popleft()
                for piece, part in _parts(buckets[number], packed):
                    copy(cut(live[piece.target_storage], piece.target_at, shape_of(piece.box)), part)
                finish(devices_of(live[piece.target_storage] for piece in buckets[number]))
                seconds[name] = seconds.get(name, 0.0) + time.monotonic() - began

    def _wait(self, handle: Handle[Any], attempt: int, digest: str, deadline: float) -> None:
        while not handle.done():
            self._check(attempt, digest, deadline)
            try:
                handle.wait(min(_LOOK_SECONDS, max(0.01, deadline - time.monotonic())))
            except CallTimedOut:
                continue
        handle.wait(1.0)

    def _copy(self, side: _Side, attempt: int, deadline: float) -> None:
        side.copies.start(lambda: self._check(attempt, side.plan.digest, deadline))

    def _is_found(self, side: _Side) -> bool:
        """Whether the memory that is copied is where it was."""
        return side.memory is not None and side.memory.is_same(self._targets(side))

    def _find(self, side: _Side) -> None:
        """Find the memory that is copied."""
        live = self._targets(side)
        side.copies, side.reads = Copies(), []
        own = self._worker.address
        mine = self._source(side.plan.digest) if own in side.sources else {}
        for piece in side.plan.pieces(target=own):
            source = side.sources.get(piece.source)
            if source is None or not count(piece.box):
                continue
            target = cut(live[piece.target_storage], piece.target_at, shape_of(piece.box))
            if piece.source == own:
                side.copies.add(target, cut(mine[piece.source_storage], piece.source_at, shape_of(piece.box)))
                continue
            view = source.view(piece)
            if view is None:
                side.reads.append((source, piece, target))
            else:
                side.copies.add(target, view)
        side.memory = _Memory(live)

    def _targets(self, side: _Side) -> Mapping[str, Any]:
        """Return where the new version goes: into the weights themselves, or beside them."""
        accepted = as_weights(self._worker.accept(), "accept")
        tensors = accepted.tensors()
        if self._in_place or isinstance(accepted, Committing):
            return tensors
        for name in dict.fromkeys(name for name, _, _ in side.parts(self._worker.address)):
            staged, live = self._staged.get(name), tensors[name]
            is_other = staged is None or staged.shape != live.shape or staged.dtype != live.dtype
            if is_other or devices_of((staged,)) != devices_of((live,)):
                self._staged[name] = empty_like(cut(live, (0,) * len(live.shape), live.shape))
        return self._staged

    def _side(self, digest: str) -> _Side:
        side = self._sides.get(digest)
        if side is None:
            raise ConfigError(
                f"{self._worker.address} has another plan than {digest[:8]}: it has "
                f"{join_words([known[:8] for known in self._sides]) or 'none'}"
            )
        return side

    def _check_newer(self, version: int) -> None:
        if version <= self._member.version:
            raise ConfigError(f"{self._worker.address} has version {self._member.version}: versions only go up")

    def _check(self, attempt: int, digest: str, deadline: float | None = None, which: str = "all weights") -> None:
        self._side(digest)
        if attempt < self._attempt or attempt <= self._ended:
            raise ClusterError(f"update {attempt} of {self._worker.address} was broken off")
        if deadline is not None and time.monotonic() > deadline:
            raise CallTimedOut(f"{self._worker.address} has not got {which} in time")


def _room(bucket: Sequence[Piece], like: Sequence[Any]) -> Any:
    """Return memory for a packed bucket, on the device of these arrays if they are on one."""
    return empty_bytes(sum(_aligned(piece.nbytes) for piece in bucket), like)


def _parts(bucket: Sequence[Piece], packed: Any) -> Iterator[tuple[Piece, Any]]:
    """Return the part of a packed bucket that each piece has, in the type that travels."""
    at = 0
    whole = packed if is_tensor(packed) else memoryview(packed)
    for piece in bucket:
        types = piece.target_dtype, piece.source_dtype
        dtype = min(types, key=SIZES.__getitem__)
        yield piece, wrap(whole[at : at + piece.nbytes], dtype, shape_of(piece.box))
        at += _aligned(piece.nbytes)


def _aligned(nbytes: int) -> int:
    """Return where the next part of any type can begin after so many bytes."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
