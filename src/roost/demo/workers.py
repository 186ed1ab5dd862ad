"""The three roles of the demo's job. A job of your own defines classes like these.

An `Env` plays and asks the `Rollout` of its rank for every action; the `Actor` ranks learn together from the steps
played, and a link brings their weights into the rollout workers. None of it passes through the driver.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from roost import ANY, CallTimedOut, Worker, WorkerDied
from roost.deadline import Deadline
from roost.demo.learning import Batch, Floats, Learner, Weights, choose, first_weights
from roost.demo.limits import AWAY_SECONDS, PEER_SECONDS, RETRY_SECONDS
from roost.weights import WeightWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The report of an Env to the driver; the steps themselves go to the actor."""

    returns: list[float]
    """Of the episodes that ended."""
    oldest: int
    """The oldest version of the weights that chose one of the actions."""
    seconds: float
    """How long it played."""


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

    def play(self, steps: int, version: int) -> Played:
        """Play `steps` steps in every game, with weights of this version or newer; the actor gets the steps."""
        began = time.monotonic()
        returns: list[float] = []
        played: list[tuple[Any, ...]] = []
        for _ in range(steps):
            seen, chosen = self._seen.copy(), self._ask(version)
            played.append((seen, *chosen, *self._step(chosen[0], returns)))
        names = ("observations", "actions", "logprobs", "versions", "rewards", "ends")
        arrays: dict[str, Any] = dict(zip(names, map(np.array, zip(*played, strict=True)), strict=True))
        oldest = int(arrays.pop("versions").min())
        self._batches.put(Batch(**arrays, last=self._seen.copy()), key=self.rank)
        if returns:
            self.log_metric("episode return", sum(returns) / len(returns), step=version)
        return Played(returns=returns, oldest=oldest, seconds=time.monotonic() - began)

    def _ask(self, version: int) -> tuple[Any, Any, int]:
        """Return the actions for the current observations; wait for a rollout worker that died to come back."""
        deadline, has_warned = Deadline.after(AWAY_SECONDS), False
        # A worker that died may have answered, so that the next one answers again: each question has a number.
        self._asked += 1
        while True:
            try:
                if self._death is None:
                    self._death = self.recv("rollout", self.rank, async_op=True, tag="death")
                if self._death.done():
                    self._death.wait()
                self.send((self._asked, version, self._seen), "rollout", self.rank, timeout=AWAY_SECONDS)
                answer: tuple[Any, Any, int] = self.recv("rollout", self.rank, tag=self._asked, timeout=AWAY_SECONDS)
                return answer
            except WorkerDied as death:
                self._death = None
                if deadline.is_over:
                    raise
                if not has_warned:
                    self.log_warning(f"{str(death).splitlines()[0]}; waiting for it")
                    has_warned = True
                time.sleep(RETRY_SECONDS)

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


class Rollout(WeightWorker):
    """Policy inference: one process on some accelerators, whose weights have a version."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = np.random.default_rng([seed, self.rank])
        self._weights = first_weights(seed)
        self._changed = threading.Condition()

    def accept(self) -> Weights:
        """Return the weights that each update overwrites."""
        return self._weights

    @contextlib.contextmanager
    def weights_changing(self, version: int) -> Iterator[None]:
        """Answer no question while they change."""
        del version
        with self._changed:
            yield
            self._changed.notify_all()

    def serve(self) -> NoReturn:
        """Answer each question with actions, until the group is closed."""
        while True:
            question, sender = self.recv(ANY)
            self.send(self._answer(*question), "env", sender.rank, tag=question[0])

    def _answer(self, _number: int, version: int, seen: Floats) -> tuple[Any, ...]:
        """Choose actions with weights of a version or a newer one."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.weights_version >= version, PEER_SECONDS):
                raise CallTimedOut(f"version {version} of the weights has not come in {PEER_SECONDS:g} s")
            return *choose(self._weights, seen, self._rng), self.weights_version


class Actor(WeightWorker):
    """One data-parallel rank of the learner, which learns from the steps of the Env of its rank."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._batches = self.connect_channel("batches")
        self._learner = Learner(seed, self._average)

    def learn(self) -> None:
        """Take the same steps as all other ranks."""
        self._learner.learn(self._batches.get(self.rank, timeout=PEER_SECONDS))

    def offer(self) -> Weights:
        """Return the weights, of which all ranks have the same."""
        return self._learner.weights

    def _average(self, own: Floats) -> Floats:
        """Return the mean over all ranks: rank 0 receives, divides and broadcasts."""
        first, *others = range(self.world_size)
        if self.rank != first:
            self.send(own, "actor", first)
        else:
            own = (own + sum(self.recv("actor", rank, timeout=PEER_SECONDS) for rank in others)) / self.world_size
        mean: Floats = self.broadcast(own, [("actor", [first, *others])], timeout=PEER_SECONDS)
        return mean
