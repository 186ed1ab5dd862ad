"""The three roles of the demo's job. A job of your own defines classes like these.

An `Env` plays and asks the `Rollout` of its rank for every action; the `Actor` ranks learn together from the steps
played, and send their weights to the rollout workers. None of it passes through the driver.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from roost import ANY, Worker, WorkerDied
from roost.demo.learning import Batch, Floats, Learner, Weights, choose
from roost.demo.timeline import Span, SpanRecorder

_AWAY_SECONDS = 90.0
"""How long an Env waits for a rollout worker that died and is being restarted."""
_PEER_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What an Env reports to the driver: the returns of the episodes that ended; the steps go to the actor."""

    returns: list[float]
    oldest: int
    """The oldest version of the weights that chose one of the actions."""
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
        self._batches = self.connect_channel("batches")
        self._asked = 0
        self._death: Any = None
        """Fails when the rollout worker dies, also between two questions: nothing is ever sent under its tag."""
        self._recorder = SpanRecorder()

    def play(self, steps: int, version: int) -> Played:
        """Play `steps` steps in every game, with weights of this version or newer; the actor gets the steps."""
        returns: list[float] = []
        played: list[tuple[Any, ...]] = []
        for _ in range(steps):
            seen, chosen = self._seen.copy(), self._ask(version)
            with self._recorder.span("step"):
                played.append((seen, *chosen, *self._step(chosen[0], returns)))
        names = ("observations", "actions", "logprobs", "versions", "rewards", "ends")
        arrays: dict[str, Any] = dict(zip(names, map(np.array, zip(*played, strict=True)), strict=True))
        oldest = int(arrays.pop("versions").min())
        self._batches.put(Batch(**arrays, last=self._seen.copy()), key=self.rank)
        return Played(returns=returns, oldest=oldest, spans=self._recorder.take())

    def _ask(self, version: int) -> tuple[Any, Any, int]:
        """Return the actions for the current observations; wait for a rollout worker that died to come back."""
        deadline, has_warned = time.monotonic() + _AWAY_SECONDS, False
        # A worker that died may have answered, so that the next one answers again: each question has a number.
        self._asked += 1
        while True:
            try:
                if self._death is None:
                    self._death = self.recv("rollout", self.rank, async_op=True, tag="death")
                if self._death.done():
                    self._death.wait()
                self.send((self._asked, version, self._seen), "rollout", self.rank, timeout=_AWAY_SECONDS)
                answer: tuple[Any, Any, int] = self.recv("rollout", self.rank, tag=self._asked, timeout=_AWAY_SECONDS)
                return answer
            except WorkerDied as death:
                self._death = None
                if time.monotonic() > deadline:
                    raise
                if not has_warned:
                    self.log_warning(f"{str(death).splitlines()[0]}; waiting for it")
                    has_warned = True
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
        self._weights: Weights = {}
        self._version = -1
        self._recorder = SpanRecorder()

    def serve(self) -> NoReturn:
        """Load weights as they come, and answer each question with actions, until the group is closed."""
        while True:
            message, sender = self.recv(ANY)
            if sender.root_group_name == "actor":
                self._load(*message)
                continue
            number, version, seen = message
            while self._version < version:
                self._load(*self.recv("actor", 0, timeout=_PEER_SECONDS))
            with self._recorder.span("act"):
                answer = *choose(self._weights, seen, self._rng), self._version
            self.send(answer, "env", sender.rank, tag=number)

    def _load(self, weights: Weights, version: int) -> None:
        with self._recorder.span("load"):
            self._weights, self._version = weights, version
        self.send(self._recorder.take(), "actor", 0, tag=version)

    def pid(self) -> int:
        """Return the process id, which the demo needs to kill this worker."""
        return os.getpid()


class Actor(Worker):
    """One data-parallel rank of the learner, which learns from the steps of the Env of its rank."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._batches = self.connect_channel("batches")
        self._learner = Learner(seed, self._average)
        self._recorder = SpanRecorder()

    def learn(self) -> list[Span]:
        """Take the same steps as all other ranks; return the spans since the last call."""
        batch = self._batches.get(self.rank, timeout=_PEER_SECONDS)
        with self._recorder.span("learn"):
            self._learner.learn(batch)
        return self._recorder.take()

    def publish(self, version: int, ranks: list[int]) -> list[list[Span]]:
        """Send the weights to rollout workers; return what each did since it was sent the last ones."""
        self.send((self._learner.weights, version), "rollout", ranks, timeout=_PEER_SECONDS)
        return [self.recv("rollout", rank, tag=version, timeout=_PEER_SECONDS) for rank in ranks]

    def _average(self, own: Floats) -> Floats:
        """Return the mean over all ranks: rank 0 receives, divides and broadcasts."""
        first, *others = range(self.world_size)
        if self.rank != first:
            self.send(own, "actor", first)
        else:
            own = (own + sum(self.recv("actor", rank, timeout=_PEER_SECONDS) for rank in others)) / self.world_size
        mean: Floats = self.broadcast(own, [("actor", [first, *others])], timeout=_PEER_SECONDS)
        return mean
