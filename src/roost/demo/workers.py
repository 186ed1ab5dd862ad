"""The three roles of the demo's job. A job of your own has classes like these.

`Env` plays and asks a `Rollout` for every action; an `Actor` learns from what was played, together with the others.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from roost.demo.learning import Batch, Floats, Learner, Weights, choose
from roost.demo.timeline import Span, SpanRecorder
from roost.errors import CallTimedOut, ClusterError, WorkerDied
from roost.runtime.groups.group import WorkerGroup
from roost.runtime.groups.worker import Worker

_CALL_SECONDS = 30.0
_AWAY_SECONDS = 90.0
"""So long an environment waits for a rollout worker that died and is started again."""
_JOIN_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What an Env gives: its steps, and the returns of the episodes that ended meanwhile."""

    batch: Batch
    returns: tuple[float, ...]
    waited: float
    """Seconds in which its rollout worker was away."""
    spans: tuple[Span, ...]


class Env(Worker):
    """Some CartPoles on a node without accelerators; the actions come from the rollout worker of its number."""

    def __init__(self, games: int, seed: int) -> None:
        super().__init__()
        import gymnasium

        self._games = [gymnasium.make("CartPole-v1", disable_env_checker=True) for _ in range(games)]
        first = seed * 10_000 + self.rank * games
        self._seen = np.array([game.reset(seed=first + index)[0] for index, game in enumerate(self._games)], float)
        self._scores = np.zeros(games)
        self._rollout: WorkerGroup | None = None
        self._waited = 0.0
        self._recorder = SpanRecorder()

    def play(self, steps: int) -> Played:
        """Make so many steps in every game."""
        if self._rollout is None:
            group = WorkerGroup.attach("rollout")
            self._rollout = group[self.rank % group.world_size]
        self._waited = 0.0
        returns: list[float] = []
        shape = (steps, len(self._games))
        seen, rewards, ends = np.zeros((*shape, 4)), np.zeros(shape), np.zeros(shape, bool)
        actions, logprobs, versions = np.zeros(shape, int), np.zeros(shape), np.zeros(steps, int)
        for step in range(steps):
            seen[step] = self._seen
            actions[step], logprobs[step], versions[step] = self._ask(self._rollout)
            with self._recorder.span("step"):
                rewards[step], ends[step] = self._step(actions[step], returns)
        batch = Batch(
            observations=seen,
            actions=actions,
            logprobs=logprobs,
            rewards=rewards,
            ends=ends,
            last=self._seen.copy(),
            oldest=int(versions.min()),
            newest=int(versions.max()),
        )
        spans = tuple(self._recorder.take())
        return Played(batch=batch, returns=tuple(returns), waited=self._waited, spans=spans)

    def _ask(self, rollout: WorkerGroup) -> tuple[Any, Any, int]:
        """The actions for what is seen now; a rollout worker that died is waited for until it is back."""
        began = time.monotonic()
        while True:
            try:
                answer = rollout.act(self._seen).wait(_CALL_SECONDS)[0]
                if answer is not None:
                    break
            except WorkerDied as death:
                if time.monotonic() - began > _AWAY_SECONDS:
                    raise
                if not self._waited:
                    self.log_warning(f"{str(death).splitlines()[0]}; waiting for it")
            if time.monotonic() - began > _AWAY_SECONDS:
                raise CallTimedOut(f"{rollout.name}:{rollout.ranks[0]} has no weights")
            time.sleep(0.05)
            self._waited = time.monotonic() - began
        return answer  # type: ignore[no-any-return]

    def _step(self, actions: Any, returns: list[float]) -> tuple[list[float], list[bool]]:
        rewards, ends = [], []
        for index, game in enumerate(self._games):
            seen, reward, is_over, is_cut, _ = game.step(int(actions[index]))
            self._scores[index] += float(reward)
            ends.append(bool(is_over or is_cut))
            if ends[-1]:
                returns.append(float(self._scores[index]))
                self._scores[index] = 0.0
                seen, _ = game.reset()
            rewards.append(float(reward))
            self._seen[index] = seen
        return rewards, ends


class Rollout(Worker):
    """Policy inference: one process for some accelerators, with weights that have a version."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = np.random.default_rng([seed, self.rank])
        self._weights: Weights | None = None
        self._version = -1
        self._recorder = SpanRecorder()

    def load(self, weights: Weights, version: int) -> list[Span]:
        """Take new weights; gives what it did since the last time."""
        with self._recorder.span("load"):
            self._weights, self._version = weights, version
        return self._recorder.take()

    def act(self, observations: Floats) -> tuple[Any, Any, int] | None:
        """Choose an action for each observation; None where it has no weights yet, as after a restart."""
        if self._weights is None:
            return None
        with self._recorder.span("act"):
            return *choose(self._weights, observations, self._rng), self._version

    def pid(self) -> int:
        """Its process, for whoever wants to kill it."""
        return os.getpid()


class Actor(Worker):
    """One rank of the learner: data-parallel, each with the steps of its own environments."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._recorder = SpanRecorder()
        self._peers: list[socket.socket] = []
        self._server = None
        if self.rank == 0 and self.world_size > 1:
            # It listens before the launch is over: nobody has to try twice.
            self._server = socket.create_server((self.master_address, self.master_port), backlog=self.world_size)
        self._learner = Learner(seed, self._average)

    def learn(self, batch: Batch) -> list[Span]:
        """Make the same steps as all other ranks; gives what it did."""
        if not self._peers and self.world_size > 1:
            self._join()
        with self._recorder.span("learn"):
            self._learner.learn(batch)
        return self._recorder.take()

    def weights(self) -> Weights:
        """The weights as they are now."""
        return self._learner.weights

    def _join(self) -> None:
        if self._server is not None:
            self._server.settimeout(_JOIN_SECONDS)
            self._peers = [self._server.accept()[0] for _ in range(self.world_size - 1)]
        else:
            self._peers = [socket.create_connection((self.master_address, self.master_port), _JOIN_SECONDS)]
        for peer in self._peers:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.settimeout(_JOIN_SECONDS)

    def _average(self, own: Floats) -> Floats:
        """The mean over all ranks: rank 0 gathers, divides and sends it back."""
        if self.rank > 0:
            self._peers[0].sendall(own.tobytes())
            return _receive(self._peers[0], own)
        total = own + sum(_receive(peer, own) for peer in self._peers)
        mean: Floats = total / self.world_size
        for peer in self._peers:
            peer.sendall(mean.tobytes())
        return mean


def _receive(peer: socket.socket, like: Floats) -> Floats:
    data = bytearray(like.nbytes)
    view = memoryview(data)
    while view:
        count = peer.recv_into(view)
        if not count:
            raise ClusterError("a rank of the learner hung up")
        view = view[count:]
    return np.frombuffer(bytes(data)).reshape(like.shape)
