"""`carry_out`: an update of weights between objects of one process, without workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roost.comm.move.arrays import cut
from roost.comm.move.fake import FakeMover as FakeMover
from roost.comm.move.mover import Mover, Offer, RemoteMemory, make_offer
from roost.comm.move.route import End, choose_route, explain
from roost.errors import ClusterError, ConfigError
from roost.weights.adapters import as_weights
from roost.weights.boxes import shape_of
from roost.weights.plan import SyncPlan
from roost.weights.update import Detour, Moved, Request, Update, Verb


def carry_out(
    plan: SyncPlan, offered: Mapping[str, Any], accepted: Mapping[str, Any], *, mover: type[Mover] = FakeMover
) -> list[Detour]:
    """Carry a plan out between what the `offer` of each source and the `accept` of each target return.

    It raises what the update of a link would raise, and returns where bytes did not go as planned.

    >>> import numpy as np
    >>> from roost.weights import Layout, make_sync_plan
    >>> from roost.weights.adapters import DictWeights
    >>> trainer, engine = {"w": np.arange(3.0)}, {"w": np.zeros(3)}
    >>> sides = [{"actor:0": DictWeights(trainer).held()}, {"rollout:0": DictWeights(engine).held()}]
    >>> carry_out(make_sync_plan(*map(Layout.from_reports, sides)), {"actor:0": trainer}, {"rollout:0": engine})
    []
    >>> engine["w"]
    array([0., 1., 2.])
    """
    workers = _Workers(plan, offered, accepted, mover, {})
    update, steps = Update(plan=plan, attempt=1, version=0).begin()
    requests = deque(steps)
    while not update.is_over:
        request = requests.popleft()
        try:
            answer = workers.answer(request)
        except (ClusterError, ConfigError) as error:
            update, steps = update.failed(request, error)
        else:
            update, steps = update.answered(request, answer)
        requests.extend(steps)
    if update.error is not None:
        raise update.error
    return update.detours


@dataclass(frozen=True, slots=True)
class _Workers:
    plan: SyncPlan
    offered: Mapping[str, Any]
    accepted: Mapping[str, Any]
    mover: type[Mover]
    sources: dict[str, RemoteMemory]

    def answer(self, request: Request) -> Any:
        """Do what a request says; returns what a member would answer."""
        worker = request.worker
        match request.verb:
            case Verb.OFFER:
                tensors = as_weights(self.offered[worker], "offer").tensors()
                place = self.plan.places.get(worker)
                # Where nobody knows the place, it is on a node of its own.
                return 1, make_offer(tensors, place.node if place else -1, may_share=False, movers=(self.mover,))
            case Verb.CONNECT:
                return {source: self._connect(worker, source, offer) for source, offer in request.details.items()}
            case Verb.MOVE:
                live = as_weights(self.accepted[worker], "accept").tensors()
                for piece in self.plan.pieces(target=worker):
                    target = cut(live[piece.target_storage], piece.target_at, shape_of(piece.box))
                    self.sources[piece.source].read(piece.source_storage, piece.source_at, target)
                return Moved(seconds={})
            case Verb.COMMIT:
                return 0.0
        return None

    def _connect(self, worker: str, source: str, offer: Offer) -> Any:
        memory = self.sources[source] = RemoteMemory(source, offer, (self.mover,))
        place = self.plan.places.get(worker)
        here = End(process=worker, node=place.node if place else None)
        there = memory.end({piece.source_storage for piece in self.plan.pieces(source=source, target=worker)})
        taken = choose_route(there, here)
        return taken, explain(self.plan.route(source, worker), taken, there, here)
