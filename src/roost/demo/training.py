"""One training run: launch the three groups, play and learn in rounds, restart workers that die."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from roost import (
    CallResult,
    CallTimedOut,
    Channel,
    Cluster,
    ClusterError,
    OutcomeKind,
    Plan,
    WorkerDied,
    WorkerGroup,
)
from roost.deadline import Deadline
from roost.demo.limits import POLL_SECONDS, ROUND_SECONDS, UPDATE_SECONDS
from roost.demo.rounds import Run
from roost.demo.tasks import GAMES, STEPS, Goal, Mode
from roost.demo.workers import Actor, Env, Played, Rollout
from roost.weights import WeightLink

_UPDATE_TRIES = 5
_RECENT = 40
"""The number of episodes that a mean return covers."""
_VICTIM = 2
"""The rank of the rollout worker that the demo kills."""
_KILL_ROUND = 4


def train(cluster: Cluster, plan: Plan, mode: Mode, *, seed: int, goal: Goal, kill: bool, watcher: Any) -> Run:
    """Train in one mode until the goal is reached."""
    run = _Run(mode=mode, cluster=cluster, watcher=watcher, has_to_kill=kill)
    with Channel.create("batches"), contextlib.ExitStack() as stack:
        groups: list[WorkerGroup[Any]] = []
        with run.phase("launch"):
            for cls, options in ((Actor, {}), (Rollout, {}), (Env, {"games": GAMES})):
                name, since = cls.__name__.lower(), time.monotonic()
                draft = cls.create_group(seed=seed, **options)
                groups.append(stack.enter_context(draft.launch(cluster, plan.get_strategy(name), name=name)))
                watcher.launched(name, groups[-1].world_size, time.monotonic() - since)
        run.start(groups)
        run.train(goal)
    return run


class _Run(Run):
    """The three groups at work together: the environments play with the newest weights, or with those before."""

    verb = "play"

    def start(self, groups: Sequence[WorkerGroup[Any]]) -> None:
        """Let the rollout workers serve, with the first weights."""
        self._actor, self._rollout, self._env = groups
        self._returns: list[float] = []
        self._version = 0
        self._link = WeightLink.between(self._actor, self._rollout)
        self._serving = [self._rollout[rank].serve() for rank in self._rollout.ranks]
        self._update({})

    def make(self, step: int) -> Callable[[], list[Played]]:
        del step
        playing = self._env.play(STEPS, self._version)
        if self.has_to_kill and self._version >= _KILL_ROUND:
            self.kill(f"rollout:{_VICTIM}")
        return partial(self.wait, playing)

    def wait(self, making: CallResult[Any]) -> list[Played]:
        """Return what the environments played; restart rollout workers that die before they finish."""
        deadline = Deadline.after(ROUND_SECONDS)
        while True:
            try:
                return making.wait(POLL_SECONDS)
            except CallTimedOut:
                if making.done():
                    # The last answer has just arrived, or an environment gave up waiting for its rollout worker.
                    return making.wait(0)
                if deadline.is_over:
                    raise
            self._restart_dead()

    def _restart_dead(self) -> None:
        for rank, serving in enumerate(self._serving):
            if not serving.done():
                continue
            began, one, (end,) = time.monotonic(), self._rollout[rank], serving.outcomes()
            if end.error is not None and end.kind is not OutcomeKind.DEATH:
                # It would fail again after a restart.
                raise end.error
            with self.phase("restart"):
                self._rollout.restart(rank)
                self._link.refill(f"rollout:{rank}", UPDATE_SECONDS)
                self._serving[rank] = one.serve()
            self.note_restart(f"rollout:{rank}", one, time.monotonic() - began, str(end.error))

    def learn(self, made: list[Played], seconds: dict[str, float]) -> None:
        with self.phase("learn", seconds):
            self._actor.learn().wait(ROUND_SECONDS)
        self._version += 1
        self._update(seconds)
        self._returns += [value for item in made for value in item.returns]
        recent = self._returns[-_RECENT:]
        self.end_round(
            mean_return=fmean(recent) if recent else 0.0,
            episodes=sum(len(item.returns) for item in made),
            seconds=seconds,
            made_in=max(item.seconds for item in made),
            behind=self._version - 1 - min(item.oldest for item in made),
        )

    def _update(self, seconds: dict[str, float]) -> None:
        """Bring the new weights into every rollout worker."""
        with self.phase("weights", seconds):
            for _ in range(_UPDATE_TRIES):
                with contextlib.suppress(WorkerDied, CallTimedOut):
                    if self._link.version < self._version:
                        self._link.update(self._version, UPDATE_SECONDS)
                    return
                # A rollout worker has just died, and perhaps is not known to be dead yet.
                time.sleep(POLL_SECONDS)
                self._restart_dead()
            raise ClusterError(f"an update of the weights failed {_UPDATE_TRIES} times: see the log")
