"""The values of a run of the demo: its goal, its rounds, restarted workers; and the interface of its watcher."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from roost.demo.jobs import Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """When a run ends: at a mean return, but not before some rounds, and after some seconds in any case."""

    mean_return: float
    seconds: float
    least_rounds: int = 1


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A worker that died and was restarted."""

    worker: str
    where: str
    pid: int
    seconds: float
    after_round: int
    """How many rounds were over when it died."""
    error: str
    """The error that a call to the dead worker raises."""


class Watcher(Protocol):
    """Follows a run as it happens."""

    def launched(self, group: str, workers: int, seconds: float) -> None: ...
    def round_ended(self, done: Round) -> None: ...
    def killing(self, worker: str, pid: int) -> None: ...
    def restarted(self, restart: Restart) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A finished run."""

    mode: Mode
    rounds: tuple[Round, ...]
    seconds: dict[str, float]
    """Spent in each phase."""
    began: float
    """When the first round began, in seconds since the epoch."""
    ended: float
    restarts: tuple[Restart, ...]
    remarks: tuple[str, ...] = ()
    """Further lines of the summary."""
    busy: dict[str, float] = field(default_factory=dict)
    """The busy shares of components whose work the events do not show, as that of engines that answer requests."""

    @property
    def before(self) -> float:
        """The mean return of the first round."""
        return self.rounds[0].mean_return

    @property
    def after(self) -> float:
        """The mean return of the last round."""
        return self.rounds[-1].mean_return
