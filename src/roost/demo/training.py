"""One training run: launch the three groups, play and learn in rounds, restart workers that die."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from roost import (
    CallResult,
    CallTimedOut,
    Channel,
    Cluster,
    ClusterError,
    Outcome,
    OutcomeKind,
    Plan,
    WorkerDied,
    WorkerGroup,
)
from roost.deadline import Deadline
from roost.demo.jobs import GAMES, STEPS, Mode
from roost.demo.limits import POLL_SECONDS, ROUND_SECONDS, UPDATE_SECONDS
from roost.demo.rounds import Goal, Restart, Round, Trained, Watcher
from roost.demo.workers import Actor, Env, Played, Rollout
from roost.weights import WeightLink

_UPDATE_TRIES = 5
_RECENT = 40
"""The number of episodes that a mean return covers."""
_VICTIM = 2
"""The rank of the rollout worker that the demo kills."""
_KILL_ROUND = 4


def train(cluster: Cluster, plan: Plan, mode: Mode, *, seed: int, goal: Goal, kill: bool, watcher: Watcher) -> Trained:
    """Train in one mode until the goal is reached."""
    began = time.monotonic()
    with Channel.create("batches"), contextlib.ExitStack() as stack:
        groups: list[WorkerGroup[Any]] = []
        for cls, options in ((Actor, {}), (Rollout, {}), (Env, {"games": GAMES})):
            name, since = cls.__name__.lower(), time.monotonic()
            draft = cls.create_group(seed=seed, **options)
            groups.append(stack.enter_context(draft.launch(cluster, plan.get_strategy(name), name=name)))
            watcher.launched(name, groups[-1].world_size, time.monotonic() - since)
        run = _Run(groups, watcher, kill=kill, launch_seconds=time.monotonic() - began)
        run.colocate(goal) if mode is Mode.COLOCATE else run.disagg(goal)
        ended = time.time()
    seconds, restarts = run.seconds, run.restarts
    return Trained(mode=mode, rounds=run.rounds, seconds=seconds, began=run.began, ended=ended, restarts=restarts)


def check_died(end: Outcome) -> None:
    """Raise the error of a worker that failed: it would fail again after a restart. A worker that died would not."""
    if end.error is not None and end.kind is not OutcomeKind.DEATH:
        raise end.error


class _Run:
    """The three groups at work together, and the record of what they did."""

    def __init__(
        self, groups: Sequence[WorkerGroup[Any]], watcher: Watcher, *, kill: bool, launch_seconds: float
    ) -> None:
        self._actor, self._rollout, self._env = groups
        self._watcher = watcher
        self._has_to_kill = kill
        self.rounds: tuple[Round, ...] = ()
        self.restarts: tuple[Restart, ...] = ()
        self.seconds = {"launch": launch_seconds}
        self._returns: list[float] = []
        self.began = time.time()
        self._began = time.monotonic()
        self._version = 0
        self._pids = dict(zip(self._rollout.ranks, self._rollout.pid().wait(ROUND_SECONDS), strict=True))
        self._link = WeightLink.between(self._actor, self._rollout)
        self._serving = [self._rollout[rank].serve() for rank in self._rollout.ranks]
        self._update({})

    def colocate(self, goal: Goal) -> None:
        """Take turns: the environments play with the newest weights, then all ranks learn."""
        while not self._is_over(goal):
            seconds: dict[str, float] = {}
            with self._phase("play", seconds):
                played = self._wait(self._play())
            self._learn(played, seconds)

    def disagg(self, goal: Goal) -> None:
        """Work at the same time: the environments play the next round while the ranks learn from the last one."""
        playing = self._play()
        while not self._is_over(goal):
            seconds: dict[str, float] = {}
            with self._phase("play", seconds):
                played = self._wait(playing)
            playing = self._play()
            self._learn(played, seconds)
        self._wait(playing)

    def _is_over(self, goal: Goal) -> bool:
        if time.monotonic() - self._began > goal.seconds:
            # A summary needs at least one round.
            return bool(self.rounds)
        return len(self.rounds) >= goal.least_rounds and self.rounds[-1].mean_return >= goal.mean_return

    def _play(self) -> CallResult[Any]:
        playing = self._env.play(STEPS, self._version)
        if self._has_to_kill and self._version >= _KILL_ROUND:
            self._has_to_kill = False
            worker, pid = f"rollout:{_VICTIM}", self._pids[_VICTIM]
            self._watcher.killing(worker, pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return playing

    def _wait(self, playing: CallResult[Any]) -> list[Played]:
        """Return what the environments played; restart rollout workers that die before they finish."""
        deadline = Deadline.after(ROUND_SECONDS)
        while True:
            try:
                return playing.wait(POLL_SECONDS)
            except CallTimedOut:
                if playing.done():
                    # The last answer has just arrived, or an environment gave up waiting for its rollout worker.
                    return playing.wait(0)
                if deadline.is_over:
                    raise
            self._restart_dead()

    def _restart_dead(self) -> None:
        for rank, serving in enumerate(self._serving):
            if not serving.done():
                continue
            began, one, (end,) = time.monotonic(), self._rollout[rank], serving.outcomes()
            check_died(end)
            with self._phase("restart"):
                self._rollout.restart(rank)
                (pid,) = one.pid().wait(ROUND_SECONDS)
                self._link.refill(f"rollout:{rank}", UPDATE_SECONDS)
                self._serving[rank] = one.serve()
            place = one.placements[0]
            restart = Restart(
                worker=f"rollout:{rank}",
                where=f"node {place.cluster_node_rank}, accelerator {','.join(map(str, place.local_hardware_ranks))}",
                pid=pid,
                seconds=time.monotonic() - began,
                after_round=len(self.rounds),
                error=str(end.error),
            )
            self._pids[rank] = pid
            self.restarts += (restart,)
            self._watcher.restarted(restart)

    def _learn(self, played: list[Played], seconds: dict[str, float]) -> None:
        """Learn from what was played, send the new weights, and end the round."""
        with self._phase("learn", seconds):
            self._actor.learn().wait(ROUND_SECONDS)
        self._version += 1
        self._update(seconds)
        self._returns += [value for item in played for value in item.returns]
        recent = self._returns[-_RECENT:]
        done = Round(
            number=len(self.rounds) + 1,
            mean_return=fmean(recent) if recent else 0.0,
            episodes=sum(len(item.returns) for item in played),
            seconds=seconds,
            made_in=max(item.seconds for item in played),
            behind=self._version - 1 - min(item.oldest for item in played),
        )
        self.rounds += (done,)
        self._watcher.round_ended(done)

    def _update(self, seconds: dict[str, float]) -> None:
        """Bring the new weights into every rollout worker."""
        with self._phase("weights", seconds):
            for _ in range(_UPDATE_TRIES):
                with contextlib.suppress(WorkerDied, CallTimedOut):
                    if self._link.version < self._version:
                        self._link.update(self._version, UPDATE_SECONDS)
                    return
                # A rollout worker has just died, and perhaps is not known to be dead yet.
                time.sleep(POLL_SECONDS)
                self._restart_dead()
            raise ClusterError(f"an update of the weights failed {_UPDATE_TRIES} times: see the log")

    @contextlib.contextmanager
    def _phase(self, name: str, *rounds: dict[str, float]) -> Iterator[None]:
        """Add the time of the `with` block to the whole run, and to a round."""
        began = time.monotonic()
        try:
            yield
        finally:
            for seconds in (self.seconds, *rounds):
                seconds[name] = seconds.get(name, 0.0) + time.monotonic() - began
