"""A worker's part in links: carries out, in threads of its own, the steps that `Membership` says."""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from roost.comm.move.arrays import can_wrap, cut, devices_of, empty_like, finish
from roost.comm.move.host import let_others_read
from roost.comm.move.loans import can_group
from roost.comm.move.mover import make_offer
from roost.comm.wire.connection import Frame, Kind
from roost.comm.wire.peer import Peer
from roost.deadline import NEVER, Deadline
from roost.errors import CallTimedOut, ClusterError, ConfigError, RoostError
from roost.text import error_text, join_words
from roost.weights.adapters import Committing, Weights, as_weights
from roost.weights.transfer import ArraysSeen, Check, Owed, Transfer, drop_owed, specs_of
from roost.weights.update import (
    Abort,
    AskVersion,
    BeginChange,
    BreakOff,
    CheckTarget,
    Commit,
    Connect,
    CopyAll,
    EndChange,
    Learn,
    Leave,
    Membership,
    MemberStep,
    Move,
    OfferWeights,
    Prepare,
    Refuse,
    Request,
    Send,
    TakeOver,
)
from roost.weights.versions import Versions

if TYPE_CHECKING:
    from roost.weights.worker import WeightWorker

_MOST_PLANS = 4
"""How many plans a member keeps besides the link's own: those that filled single targets."""
_CLOSED = 1 << 62
"""As if all attempts were broken off."""

log: logging.Logger = logging.getLogger(__name__)

Answer = Callable[[bool, Any], None]


class Member:
    """The weights of this worker: their version, and the links that change them."""

    def __init__(self, worker: WeightWorker) -> None:
        self.versions: Versions = vars(worker).setdefault("_roost_versions", Versions(str(worker.address)))
        self._worker = worker
        self.links: dict[str, MemberLink] = {}
        let_others_read()
        worker._roost_talk.messages.endpoint.serve(self._take)

    def join(self, link: str, *, in_place: bool, may_share: bool) -> None:
        """Take part in a link."""
        self._leave(link)
        self.links[link] = MemberLink(self._worker, self.versions, link, in_place=in_place, may_share=may_share)

    def _leave(self, link: str) -> None:
        found = self.links.pop(link, None)
        if found is not None:
            found.close()

    def _take(self, peer: Peer, frame: Frame) -> None:
        """Hand a request to the thread of its link; in the thread that reads."""
        link, request, seconds = pickle.loads(frame.data)  # noqa: S301 - from a member of the job
        found = self.links.get(link)

        def answer(succeeded: bool, value: Any) -> None:
            peer.send(Kind.REPLY, frame.number, b"", pickle.dumps((succeeded, value)))

        if isinstance(request, Leave):
            self._leave(link)
            answer(True, None)
        elif found is None:
            answer(False, ClusterError(f"{self._worker.address} was started again and is not in this link any more"))
        else:
            found.ask(request, Deadline.after(seconds), answer)

    def let_go(self, timeout: float) -> None:
        """Let go of the memory that links took for updates; the next update takes it again."""
        waiting = []
        for link in [*self.links.values()]:
            # A link that is being closed lets go of everything.
            with contextlib.suppress(RuntimeError):
                waiting.append(link.let_go())
        wait(waiting, timeout)


class MemberLink:
    """One link, as a member of it sees it."""

    def __init__(self, worker: WeightWorker, versions: Versions, name: str, *, in_place: bool, may_share: bool) -> None:
        self.transfers: dict[str, Transfer] = {}
        """By digest: the plans that it knows."""
        self.staged: dict[str, Any] = {}
        """Memory beside the weights, for the next version."""
        self._worker = worker
        self._versions = versions
        self._name = name
        self._in_place = in_place
        self._may_share = may_share
        self._state = Membership(who=str(worker.address))
        self._turn = threading.Lock()
        """Around each change of the state: the thread that reads notes at once what is broken off."""
        self._main = ""
        """The digest of the link's own plan."""
        self._changing = contextlib.ExitStack()
        """What surrounds a change of the weights in place, from the first byte to the commit."""
        self._since = 0.0
        self._filled = -1
        """The version that memory beside the weights has wholly, where the worker has such memory itself."""
        self._owed: Owed = []
        self._offered: dict[str, tuple[int, ArraysSeen | None]] = {}
        """By method: the number of the last offer, and its arrays, which stay while others copy from them."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"roost-weights-{name}")
        self._sender = ThreadPoolExecutor(1, thread_name_prefix=f"roost-weights-{name}-send")

    def close(self) -> None:
        """Let go of everything, once what is under way has noticed."""
        self._abort(_CLOSED)
        self._thread.submit(self._let_go, "the link of weights was closed")
        self._thread.submit(self._drop_owed)
        self._thread.shutdown(wait=False)
        self._sender.shutdown(wait=False)

    def let_go(self) -> Future[None]:
        """Break off what is under way, and let go of all memory that an update needs: the next one takes it again."""
        self._abort(self._state.attempt)
        return self._thread.submit(self._let_go, "the worker let go of the memory of the update")

    def _let_go(self, why: str) -> None:
        self._break_off(ClusterError(why))
        self.staged = {}
        for transfer in self.transfers.values():
            transfer.let_go()
        if "accept" in self._offered:
            self._offered["accept"] = self._offered["accept"][0], None

    def _abort(self, attempt: int) -> None:
        with self._turn:
            self._state = self._state.abort(attempt)

    def ask(self, request: Request, deadline: Deadline, answer: Answer) -> None:
        """Carry out a request in the thread of the link, and answer."""
        if isinstance(request, Abort):
            # At once, and not after what it ends.
            self._abort(request.attempt)

        def run() -> None:
            try:
                value = self._carry_out(request, deadline)
            except RoostError as error:
                answer(False, error)
            except BaseException as error:
                log.exception("%s of a link of weights failed", type(request).__name__)
                answer(False, ClusterError(f"{self._worker.address} failed in an update: {error_text(error)}"))
            else:
                answer(True, value)

        try:
            (self._sender if isinstance(request, Send) else self._thread).submit(run)
        except RuntimeError:
            answer(False, ClusterError(f"{self._worker.address} has left this link"))

    def _carry_out(self, request: Request, deadline: Deadline) -> Any:
        """Do what follows from a request, step by step; returns the answer of the last."""
        match request:
            case Learn():
                return self._learn(request)
            case Connect():
                return self._transfer(request.digest).connect(request.offers)
            case AskVersion():
                return self._filled if request.to_copy and self._commits() else self._versions.whole
            case Prepare() | Move() | Send() | Commit() if request.digest not in self.transfers:
                self._transfer(request.digest)
        # Sources have nothing to overwrite.
        overwrites = isinstance(request, Move) and self._overwrites
        with self._turn:
            self._state, steps = self._state.take(request, overwrites=overwrites)
        value = None
        for step in steps:
            value = self._do(step, deadline)
        if isinstance(request, Send):
            check = self._check_of(request.attempt, deadline)
            self._transfer(request.digest).send(request.attempt, request.targets, check, deadline)
        return value

    def _do(self, step: MemberStep, deadline: Deadline) -> Any:
        attempt = self._state.attempt
        check = self._check_of(attempt, deadline)
        match step:
            case Refuse():
                raise step.error
            case BreakOff():
                self._break_off(ClusterError(step.why))
            case CheckTarget():
                self._versions.check(step.version)
                self._transfer(step.digest).check_target()
            case OfferWeights():
                return self._offer(self._transfer(step.digest), step.known)
            case BeginChange():
                self._since = time.monotonic()
                self._breaks_off(lambda: self._changing.enter_context(self._change(step.version, check)))
            case CopyAll():
                self._filled = -1
                # Of each sender, what it sent before has come before.
                moved = self._breaks_off(
                    lambda: self._transfer(step.digest).copy_all(attempt, check, self._owed, in_place=self._in_place)
                )
                self._drop_owed()
                with self._turn:
                    self._state = self._state.copied()
                return moved
            case TakeOver():
                return self._take_over(step, self._check_of(attempt, NEVER))
            case EndChange():
                self._changing.pop_all().close()
                return time.monotonic() - self._since
        return None

    def _change(self, version: int, check: Check) -> AbstractContextManager[None]:
        """Return what surrounds a change of the weights, for which this worker may have to wait for another link."""
        what = "a turn to change its weights"
        return self._versions.changing(version, lambda: check(what), self._worker.weights_changing)

    def _breaks_off(self, act: Callable[[], Any]) -> Any:
        """Do something that, if it fails, leaves weights that were being overwritten without a version."""
        try:
            return act()
        except BaseException as error:
            self._break_off(error)
            raise

    def _break_off(self, error: BaseException) -> None:
        """Let a worker whose weights were being overwritten know that they are no whole version."""
        with self._turn:
            self._state, _ = self._state.broken_off("")
        changing = self._changing.pop_all()
        with contextlib.suppress(BaseException):
            changing.__exit__(type(error), error, error.__traceback__)

    def _take_over(self, step: TakeOver, check: Check) -> float:
        began = time.monotonic()
        accepted = as_weights(self._worker.accept(), "accept")
        with self._change(step.version, check):
            # A worker that ends in the middle of it is not used any more; nothing else breaks it off.
            if isinstance(accepted, Committing):
                accepted.commit(step.version)
                self._filled = step.version
            else:
                self._transfer(step.digest).take_over(self.staged, accepted.tensors())
        return time.monotonic() - began

    def _learn(self, request: Learn) -> list[str]:
        """Learn a plan; returns what of this worker's memory does not fit it."""
        plan, own = request.plan, str(self._worker.address)
        if (old := self.transfers.pop(plan.digest, None)) is not None:
            old.let_go()
        self.transfers[plan.digest] = Transfer(plan, request.method, self._worker, self._name, self._targets)
        if request.is_main:
            self._main = plan.digest
        for digest in [known for known in self.transfers if known != self._main][:-_MOST_PLANS]:
            self.transfers.pop(digest).let_go()
        wrong = []
        if own in plan.target.workers:
            types = {piece.source_dtype for piece in plan.pieces(target=own)}
            wrong += [f"{own} gets {dtype}, which takes torch there" for dtype in sorted(types) if not can_wrap(dtype)]
        for role, layout in ((request.method, plan.source), ("accept", plan.target)):
            if own in layout.workers:
                arrays = as_weights(getattr(self._worker, role)(), role).tensors()
                needed = {held.storage for held in layout.held_by(own)}
                wrong += layout.misfits(own, specs_of({name: arrays[name] for name in needed if name in arrays}))
        return wrong

    def _offer(self, transfer: Transfer, known: int) -> Any:
        """Return what this source offers, and the number of that offer, unless it is the one that is known."""
        tensors = transfer.source_arrays()
        number, seen = self._offered.get(transfer.method, (0, None))
        if known and known == number and seen is not None and seen.is_same(tensors):
            finish(seen.devices)
            return None
        may_share = self._may_share and transfer.method == "offer"
        groups = can_group(self._worker._roost_talk.messages.endpoint)
        offer = make_offer(tensors, self._worker.node_rank, may_share=may_share, can_group=groups)
        # Sharing moves storages.
        seen = ArraysSeen(tensors)
        self._offered[transfer.method] = number + 1, seen
        finish(seen.devices)
        return number + 1, offer

    def _drop_owed(self) -> None:
        owed, self._owed = self._owed, []
        drop_owed(self._worker._roost_talk.messages, owed)

    @property
    def _overwrites(self) -> bool:
        """Whether weights that are in use are written to before a version is complete."""
        return self._in_place and not self._commits()

    def _commits(self) -> bool:
        """Whether the worker has memory beside its weights, and takes a version over itself."""
        return isinstance(self._accepted(), Committing)

    def _accepted(self) -> Weights:
        return as_weights(self._worker.accept(), "accept")

    def _targets(self, transfer: Transfer) -> Mapping[str, Any]:
        """Return where the new version goes: into the weights themselves, or beside them."""
        accepted = self._accepted()
        tensors = accepted.tensors()
        if self._in_place or isinstance(accepted, Committing):
            return tensors
        for name in dict.fromkeys(name for name, _, _ in transfer.parts):
            staged, live = self.staged.get(name), tensors[name]
            is_other = staged is None or staged.shape != live.shape or staged.dtype != live.dtype
            if is_other or devices_of((staged,)) != devices_of((live,)):
                self.staged[name] = empty_like(cut(live, (0,) * len(live.shape), live.shape))
        return self.staged

    def _transfer(self, digest: str) -> Transfer:
        found = self.transfers.get(digest)
        if found is None:
            raise ConfigError(
                f"{self._worker.address} has another plan than {digest[:8]}: it has "
                f"{join_words([known[:8] for known in self.transfers]) or 'none'}"
            )
        return found

    def _check_of(self, attempt: int, deadline: Deadline) -> Check:
        def check(missing: str) -> None:
            if self._state.is_over(attempt):
                raise self._state.over_error(attempt)
            if deadline.is_over:
                raise CallTimedOut(f"{self._worker.address} has not got {missing} in time")

        return check
