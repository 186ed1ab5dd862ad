"""A run of the demo: its rounds, the workers that it restarted, and what runs of both tasks do alike."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from roost.demo.tasks import Goal, Mode

if TYPE_CHECKING:
    from roost import Cluster, WorkerGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The result of one round."""

    number: int
    mean_return: float
    """Over the most recent episodes that ended."""
    episodes: int
    seconds: dict[str, float]
    made_in: float
    """How long it took to make what the round learned from, whatever else went on meanwhile."""
    behind: int
    """How many versions the oldest actions were behind the weights that learned from them."""


@dataclass(kw_only=True)
class Run:
    """The record of one run, and what writes it."""

    mode: Mode
    cluster: Cluster
    watcher: Any
    """Follows the run as it happens, as `show.Display` does."""
    has_to_kill: bool = False
    """Whether the demo still has to kill a worker."""
    rounds: list[Round] = field(default_factory=list)
    restarts: dict[str, float] = field(default_factory=dict)
    """The workers that died, and how long it took until each was back."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Spent in each phase."""
    began: float = 0.0
    """When the first round began, in seconds since the epoch."""
    ended: float = 0.0
    remarks: tuple[str, ...] = ()
    """Further lines of the summary."""
    busy: dict[str, float] = field(default_factory=dict)
    """The busy shares of components whose work the events do not show, as that of engines that answer requests."""
    _clock: float = 0.0
    """When it began, on the clock that does not jump."""
    verb: ClassVar[str] = ""
    """The phase in which it is made."""

    @property
    def before(self) -> float:
        """The mean return of the first round."""
        return self.rounds[0].mean_return

    @property
    def after(self) -> float:
        """The mean return of the last round."""
        return self.rounds[-1].mean_return

    def train(self, goal: Goal) -> None:
        """Make what is learned from and learn, in turns; or make the next round while the ranks learn from the last."""
        self.began, self._clock = time.time(), time.monotonic()
        wait: Callable[[], Any] | None = None
        while not self.is_over(goal):
            seconds: dict[str, float] = {}
            with self.phase(self.verb, seconds):
                wait = wait or self.make(len(self.rounds))
                made = wait()
            wait = self.make(len(self.rounds) + 1) if self.mode is Mode.DISAGG else None
            self.learn(made, seconds)
        if wait is not None:
            wait()
        self.ended = time.time()

    def make(self, step: int) -> Callable[[], Any]:
        """Begin to make what the round `step` learns from; return what waits for it."""
        raise NotImplementedError

    def learn(self, made: Any, seconds: dict[str, float]) -> None:
        """Learn from it, bring the new weights to where they are used, and end the round."""
        raise NotImplementedError

    def is_over(self, goal: Goal) -> bool:
        """Whether the goal is reached, or its time is over."""
        if time.monotonic() - self._clock > goal.seconds:
            # A summary needs at least one round.
            return bool(self.rounds)
        return len(self.rounds) >= goal.least_rounds and self.after >= goal.mean_return

    @contextlib.contextmanager
    def phase(self, name: str, *rounds: dict[str, float]) -> Iterator[None]:
        """Add the time of the `with` block to the whole run, and to a round."""
        began = time.monotonic()
        try:
            yield
        finally:
            for spent in (self.seconds, *rounds):
                spent[name] = spent.get(name, 0.0) + time.monotonic() - began

    def end_round(self, **result: Any) -> None:
        """Note the result of a round: the fields of `Round` but its number."""
        self.rounds.append(Round(number=len(self.rounds) + 1, **result))
        self.watcher.round_ended(self.rounds[-1])

    def pid_of(self, worker: str) -> int:
        """Return the process id of a worker, the last if it was restarted."""
        return self.cluster.worker_manager.get_workers([worker])[0].pid or 0

    def kill(self, worker: str) -> None:
        """Kill a worker on purpose."""
        self.has_to_kill, pid = False, self.pid_of(worker)
        self.watcher.killing(worker, pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def note_restart(self, worker: str, group: WorkerGroup[Any], seconds: float, error: str) -> None:
        """Note that a worker, which is a group of one here, is back; `error` is what a call to the dead one raised."""
        place = group.placements[0]
        where = f"node {place.cluster_node_rank}, accelerator {','.join(map(str, place.local_hardware_ranks))}"
        self.restarts[worker] = seconds
        self.watcher.restarted(worker, f"{where}, now pid {self.pid_of(worker)}", seconds, error)
