"""The three roles of the demo's job. A job of your own defines classes like these.

An `Env` plays and asks a `Rollout` for every action; the `Actor` ranks learn together from the steps played.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from io import BufferedRWPair
from typing import Any

import numpy as np

from roost import CallTimedOut, ClusterError, Worker, WorkerDied, WorkerGroup
from roost.demo.learning import Batch, Floats, Learner, Weights, choose
from roost.demo.timeline import Span, SpanRecorder

_CALL_SECONDS = 30.0
_AWAY_SECONDS = 90.0
"""How long an Env waits for a rollout worker that died and is being restarted."""
_JOIN_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What an Env returns: its steps, and the returns of the episodes that ended among them."""

    batch: Batch
    returns: list[float]
    spans: list[Span]


class Env(Worker):
    """Some CartPole games on a node without accelerators; the rollout worker of the same rank chooses the actions."""

    def __init__(self, games: int, seed: int) -> None:
        super().__init__()
        import gymnasium

        self._games = [gymnasium.make("CartPole-v1", disable_env_checker=True) for _ in range(games)]
        first = seed * 10_000 + self.rank * games
        self._seen = np.array([game.reset(seed=first + index)[0] for index, game in enumerate(self._games)], float)
        self._scores = np.zeros(games)
        self._rollout: WorkerGroup | None = None
        self._recorder = SpanRecorder()

    def play(self, steps: int) -> Played:
        """Play `steps` steps in every game."""
        if self._rollout is None:
            group = WorkerGroup.attach("rollout")
            self._rollout = group[self.rank % group.world_size]
        returns: list[float] = []
        played: list[tuple[Any, ...]] = []
        for _ in range(steps):
            seen, chosen = self._seen.copy(), self._ask(self._rollout)
            with self._recorder.span("step"):
                played.append((seen, *chosen, *self._step(chosen[0], returns)))
        names = ("observations", "actions", "logprobs", "versions", "rewards", "ends")
        arrays: dict[str, Any] = dict(zip(names, map(np.array, zip(*played, strict=True)), strict=True))
        oldest = int(arrays.pop("versions").min())
        batch = Batch(**arrays, last=self._seen.copy(), oldest=oldest)
        return Played(batch=batch, returns=returns, spans=self._recorder.take())

    def _ask(self, rollout: WorkerGroup) -> tuple[Any, Any, int]:
        """Return the actions for the current observations; wait for a rollout worker that died to come back."""
        deadline, has_warned = time.monotonic() + _AWAY_SECONDS, False
        while True:
            problem: Exception = CallTimedOut(f"{rollout.name}:{rollout.ranks[0]} has no weights")
            try:
                answer: tuple[Any, Any, int] | None = rollout.act(self._seen).wait(_CALL_SECONDS)[0]
                if answer is not None:
                    return answer
            except WorkerDied as death:
                problem = death
                if not has_warned:
                    self.log_warning(f"{str(death).splitlines()[0]}; waiting for it")
                    has_warned = True
            if time.monotonic() > deadline:
                raise problem
            time.sleep(0.05)

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
    """Policy inference: one process on some accelerators, whose weights have a version."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = np.random.default_rng([seed, self.rank])
        self._weights: Weights | None = None
        self._version = -1
        self._recorder = SpanRecorder()

    def load(self, weights: Weights, version: int) -> list[Span]:
        """Take new weights; return the spans since the last call."""
        with self._recorder.span("load"):
            self._weights, self._version = weights, version
        return self._recorder.take()

    def act(self, observations: Floats) -> tuple[Any, Any, int] | None:
        """Choose an action for each observation, or return None if there are no weights yet, as after a restart."""
        if self._weights is None:
            return None
        with self._recorder.span("act"):
            return *choose(self._weights, observations, self._rng), self._version

    def pid(self) -> int:
        """Return the process id, which the demo needs to kill this worker."""
        return os.getpid()


class Actor(Worker):
    """One data-parallel rank of the learner, which learns from the steps of its own Env."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._recorder = SpanRecorder()
        self._peers: list[BufferedRWPair[Any, Any]] = []
        self._server = None
        if self.rank == 0 and self.world_size > 1:
            # Listen before the launch is over, so that no other rank has to retry.
            self._server = socket.create_server((self.master_address, self.master_port), backlog=self.world_size)
        self._learner = Learner(seed, self._average)

    def learn(self, batch: Batch) -> list[Span]:
        """Take the same steps as all other ranks; return the spans since the last call."""
        if not self._peers and self.world_size > 1:
            self._join()
        with self._recorder.span("learn"):
            self._learner.learn(batch)
        return self._recorder.take()

    def weights(self) -> Weights:
        """Return the current weights."""
        return self._learner.weights

    def _join(self) -> None:
        if self._server is not None:
            self._server.settimeout(_JOIN_SECONDS)
            sockets = [self._server.accept()[0] for _ in range(self.world_size - 1)]
        else:
            sockets = [socket.create_connection((self.master_address, self.master_port), _JOIN_SECONDS)]
        for peer in sockets:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.settimeout(_JOIN_SECONDS)
            self._peers.append(peer.makefile("rwb"))

    def _average(self, own: Floats) -> Floats:
        """Return the mean over all ranks: rank 0 gathers, divides and sends it back."""
        if self.rank > 0:
            _send(self._peers[0], own)
            return _receive(self._peers[0], own)
        mean: Floats = (own + sum(_receive(peer, own) for peer in self._peers)) / self.world_size
        for peer in self._peers:
            _send(peer, mean)
        return mean


def _send(peer: BufferedRWPair[Any, Any], values: Floats) -> None:
    peer.write(values.tobytes())
    peer.flush()


def _receive(peer: BufferedRWPair[Any, Any], like: Floats) -> Floats:
    data = peer.read(like.nbytes)
    if len(data) < like.nbytes:
        raise ClusterError("a rank of the learner closed its connection")
    return np.frombuffer(data).reshape(like.shape)
