"""A worker's part in links: carries out, in threads of its own, the steps that `Membership` says."""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from roost.comm.move.arrays import can_wrap, cut, devices_of, empty_like, finish
from roost.comm.move.host import let_others_read
from roost.comm.move.loans import can_group
from roost.comm.move.mover import make_offer
from roost.comm.wire.connection import Frame, Kind
from roost.comm.wire.peer import Peer
from roost.deadline import Deadline
from roost.errors import CallTimedOut, ClusterError, ConfigError, RoostError
from roost.text import error_text, join_words
from roost.weights.adapters import Committing, as_weights
from roost.weights.transfer import ArraysSeen, Owed, Transfer
from roost.weights.update import Membership, Request, Step, Verb
from roost.weights.versions import NO_VERSION, Versions

if TYPE_CHECKING:
    from roost.weights.plan import SyncPlan
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
        worker._roost_messages.endpoint.serve(self._take)

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

        if request.verb is Verb.LEAVE:
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
        if wait(waiting, timeout).not_done:
            what = f"{self._worker.address} has not let go of the memory of updates after {timeout:g} s"
            raise CallTimedOut(what, hint="an update is under way there that does not end")


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
        """Open from the first byte of a change of the weights until the version is whole."""
        self._since = 0.0
        self._filled = NO_VERSION
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
        if request.verb is Verb.ABORT:
            # At once, and not after what it ends.
            self._abort(request.attempt)

        def run() -> None:
            try:
                value = self._carry_out(request, deadline)
            except RoostError as error:
                answer(False, error)
            except BaseException as error:
                log.exception("%r of a link of weights failed", request.verb.value)
                answer(False, ClusterError(f"{self._worker.address} failed in an update: {error_text(error)}"))
            else:
                answer(True, value)

        try:
            (self._sender if request.verb is Verb.SEND else self._thread).submit(run)
        except RuntimeError:
            answer(False, ClusterError(f"{self._worker.address} has left this link"))

    def _carry_out(self, request: Request, deadline: Deadline) -> Any:
        """Do what follows from a request, step by step; returns the answer of the last."""
        if request.verb is Verb.LEARN:
            return self._learn(*request.details)
        if request.verb is Verb.VERSION:
            return self._filled if request.details and self._commits() else self._versions.whole
        if request.verb is not Verb.ABORT and request.digest not in self.transfers:
            raise ConfigError(
                f"{self._worker.address} has another plan than {request.digest[:8]}: it has "
                f"{join_words([known[:8] for known in self.transfers]) or 'none'}"
            )
        # A source has nothing to overwrite.
        overwrites = request.verb is Verb.MOVE and self._in_place and not self._commits()
        with self._turn:
            before = self._state
            self._state, steps = before.take(request, overwrites=overwrites)

        def check(missing: str) -> None:
            self._state.check(request.attempt)
            # What is decided comes late rather than never.
            if deadline.is_over and request.verb is not Verb.COMMIT:
                raise CallTimedOut(f"{self._worker.address} has not got {missing} in time")

        value: Any = None
        try:
            for step in steps:
                if step is Step.BREAK_OFF:
                    self._break_off(ClusterError(f"update {before.attempt} was broken off"))
                    continue
                transfer = self.transfers[request.digest]
                match step:
                    case Step.OFFER:
                        value = self._offer(transfer, request.details)
                    case Step.CHECK:
                        self._versions.check(request.version)
                        transfer.check_target()
                    case Step.CONNECT:
                        value = transfer.connect(request.details)
                    case Step.SEND:
                        transfer.send(request.attempt, request.details, check, deadline)
                    case Step.BEGIN:
                        self._since = time.monotonic()
                        may_wait, pause = partial(check, "a turn to change its weights"), self._worker.weights_changing
                        self._changing.enter_context(self._versions.changing(request.version, may_wait, pause))
                    case Step.COPY:
                        self._filled = NO_VERSION
                        # Of each sender, what it sent before has come before.
                        value = transfer.copy_all(request.attempt, check, self._owed, in_place=self._in_place)
                        self._drop_owed()
                        with self._turn:
                            self._state = replace(self._state, has_all=True)
                    case Step.TAKE_OVER:
                        # A worker that ends in the middle of it is not used any more; nothing else breaks it off.
                        accepted = as_weights(self._worker.accept(), "accept")
                        if isinstance(accepted, Committing):
                            accepted.commit(request.version)
                            self._filled = request.version
                        else:
                            transfer.take_over(self.staged, accepted.tensors())
                    case Step.END:
                        self._changing.pop_all().close()
                        value = time.monotonic() - self._since
        except BaseException as error:
            # Weights that were being overwritten have no version.
            if request.verb is not Verb.SEND:
                self._break_off(error)
            raise
        return value

    def _break_off(self, error: BaseException) -> None:
        """Let a worker whose weights were being overwritten know that they are no whole version."""
        with self._turn:
            self._state = replace(self._state, is_changing=False)
        changing = self._changing.pop_all()
        with contextlib.suppress(BaseException):
            changing.__exit__(type(error), error, error.__traceback__)

    def _learn(self, plan: SyncPlan, method: str, is_main: bool) -> list[str]:
        """Learn a plan; returns what of this worker's memory does not fit it."""
        own = str(self._worker.address)
        if (old := self.transfers.pop(plan.digest, None)) is not None:
            old.let_go()
        self.transfers[plan.digest] = Transfer(plan, method, self._worker, self._name, self._targets)
        if is_main:
            self._main = plan.digest
        for digest in [known for known in self.transfers if known != self._main][:-_MOST_PLANS]:
            self.transfers.pop(digest).let_go()
        transfer = self.transfers[plan.digest]
        wrong = []
        if own in plan.target.workers:
            types = {piece.source_dtype for piece in plan.pieces(target=own)}
            wrong += [f"{own} gets {dtype}, which takes torch there" for dtype in sorted(types) if not can_wrap(dtype)]
        for role, layout in ((method, plan.source), ("accept", plan.target)):
            if own in layout.workers:
                tensors = as_weights(getattr(self._worker, role)(), role).tensors()
                wrong += transfer.misfits(layout, tensors)
                if layout is plan.source:
                    transfer.check_source(tensors)
        return wrong

    def _offer(self, transfer: Transfer, known: int) -> Any:
        """Return what this source offers, and the number of that offer, unless it is the one that is known."""
        tensors = transfer.source_arrays()
        number, seen = self._offered.get(transfer.method, (0, None))
        if known and known == number and seen is not None and seen.is_same(tensors):
            finish(seen.devices)
            return None
        transfer.check_source(tensors)
        may_share = self._may_share and transfer.method == "offer"
        groups = can_group(self._worker._roost_messages.endpoint)
        offer = make_offer(tensors, self._worker.node_rank, may_share=may_share, can_group=groups)
        # Sharing moves storages.
        seen = ArraysSeen(tensors)
        self._offered[transfer.method] = number + 1, seen
        finish(seen.devices)
        return number + 1, offer

    def _drop_owed(self) -> None:
        """Drop what came of attempts that were broken off, which nothing else would receive."""
        owed, self._owed = self._owed, []
        for name, tags in owed:
            with contextlib.suppress(ClusterError):
                # They come in order: where one is not here, the rest was not sent.
                for tag in tags:
                    # A tensor is received into memory, and is dropped without.
                    with contextlib.suppress(ConfigError):
                        self._worker._roost_messages.wait_for_next(name, tag, None, 0.0)

    def _commits(self) -> bool:
        """Whether the worker has memory beside its weights, and takes a version over itself."""
        return isinstance(as_weights(self._worker.accept(), "accept"), Committing)

    def _targets(self, transfer: Transfer) -> Mapping[str, Any]:
        """Return where the new version goes: into the weights themselves, or beside them."""
        accepted = as_weights(self._worker.accept(), "accept")
        tensors = accepted.tensors()
        if self._in_place or isinstance(accepted, Committing):
            return tensors
        for name in dict.fromkeys(name for name, _, _ in transfer.parts):
            staged, live = self.staged.get(name), tensors[name]
            is_other = staged is None or staged.shape != live.shape or staged.dtype != live.dtype
            if is_other or devices_of((staged,)) != devices_of((live,)):
                self.staged[name] = empty_like(cut(live, (0,) * len(live.shape), live.shape))
        return self.staged
