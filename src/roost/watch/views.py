"""A run at one moment, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class State(StrEnum):
    """The present state of a worker."""

    BUSY = "busy"
    WAITING = "waiting"
    """It is in a call, and waits for another process."""
    IDLE = "idle"
    SILENT = "silent"
    """It should have written something: it hangs and lets no other thread run, or its node is gone."""
    STUCK = "stuck"
    """It is in a call, and nothing has come of it for much longer than usual."""
    ASLEEP = "asleep"
    """An engine that has given its memory back."""
    DEAD = "dead"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One call, or several merged, or a wait inside a call; times are of the driver's clock."""

    name: str
    start: float
    end: float
    calls: int = 1
    busy: float = 0.0
    """Seconds inside the calls."""
    failed: int = 0
    is_wait: bool = False
    """Whether it is a wait: `name` then says for whom."""
    is_aside: bool = False
    """Whether it is a wait outside any call, as in a thread of the user's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """A worker at one moment."""

    address: str
    component: str
    rank: int
    node: int | None
    devices: tuple[int, ...]
    host: str
    pid: int
    state: State
    doing: str
    """The method it is in, or was in last."""
    waits_for: str
    """Whom it waits for; empty if it does not wait."""
    since: float
    """When its state began, as far as is known."""
    progress: float
    """When something last came of its work."""
    patience: float
    """For how many seconds its call or wait may bring nothing before it is stuck."""
    calls: int
    failed: int
    restarts: int
    idle_share: float
    """Of the last seconds, from 0 to 1; waits count as idle."""
    last_seconds: float | None
    """How long its last call took."""
    cpu: float | None
    memory: int | None
    """In MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened, in words."""

    when: float
    what: str
    who: str
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A metric of one worker: step or None, value and time of each point."""

    worker: str
    name: str
    points: tuple[tuple[float | None, float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """The last sample of a node; each device has its load, its memory in use and in all, in MiB."""

    rank: int
    cpu: float
    memory: int
    memory_total: int
    devices: tuple[tuple[float | None, int | None, int | None], ...]
    loads: tuple[tuple[float, float, float | None], ...] = ()
    """Over time: when, CPU, and the mean load of the devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelView:
    """A channel, all its homes together."""

    name: str
    depth: int
    most: int | None
    """How many items it takes; None without a limit."""
    puts_per_second: float
    gets_per_second: float
    getters: int
    """How many gets wait."""
    putters: int
    """How many puts wait."""
    depths: tuple[tuple[float, float], ...]
    """Depth over time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkView:
    """A link of weights."""

    name: str
    version: int
    updated: float
    seconds: float
    pause: float
    size: int
    """In MiB."""
    updates: tuple[tuple[float, float], ...]
    """When, and how long it took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """An engine: the process that serves."""

    worker: str
    version: int | None
    behind: int | None
    """How many versions it is behind the newest of its link; None if one of them is not known."""
    is_asleep: bool
    busy: int
    served: int
    failed: int
    per_second: float | None
    latency: float | None
    """The mean of the last requests, in seconds."""
    rates: tuple[tuple[float, float], ...]
    """Requests per second over time."""
    latencies: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """The step under way: which it is, since when, and how long steps took lately."""

    number: float
    since: float
    usual: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The parts of a picture of a run that come from its plan, so that both look alike."""

    hash: str | None = None
    columns: Mapping[int, int] = field(default_factory=dict)
    """By node: how many accelerators it has, used or not."""
    components: tuple[str, ...] = ()
    """In the order of their colours."""


class Limit(StrEnum):
    """What limits a run."""

    DEATH = "death"
    HANG = "hang"
    BOUND = "bound"
    """Nothing: it is as quick as its placement can be."""
    STRAGGLER = "straggler"
    COMMUNICATION = "communication"
    PACE = "pace"
    """One component: the others wait for it, or take less of each step."""
    WEIGHTS = "weights"
    DRIVER = "driver"
    BALANCE = "balance"
    """No component more than another."""
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What limits a run."""

    limit: Limit
    sentence: str
    evidence: tuple[str, ...] = ()
    """Its evidence, a sentence each; empty where nothing is known yet."""
    is_sure: bool = False
    who: tuple[str, ...] = ()
    """The components or workers that it is about."""

    def __str__(self) -> str:
        return self.sentence if self.is_sure or self.limit is Limit.UNCLEAR else f"probably: {self.sentence}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run at one moment."""

    now: float
    began: float
    is_over: bool
    workers: tuple[WorkerView, ...]
    nodes: tuple[NodeView, ...]
    events: tuple[Event, ...]
    """Newest first."""
    curves: tuple[Curve, ...]
    steps: tuple[tuple[float, float], ...]
    """Each step of the job, and how many seconds it took: the time between the first metrics of two steps."""
    step: StepView | None
    """The step under way; None before the second one, and when the run is over."""
    channels: tuple[ChannelView, ...]
    links: tuple[LinkView, ...]
    engines: tuple[EngineView, ...]
    dropped: int
    lost: tuple[str, ...]
    """The parts that are missing, and why; among the notices too."""
    notices: tuple[str, ...]
    """Remarks on the figures, such as a clock that differs."""
    verdict: Verdict | None = None
    """The verdict on what limits it; None before `judge` was called."""

    @property
    def counts(self) -> dict[State, int]:
        """How many workers are in each state."""
        return {state: sum(worker.state is state for worker in self.workers) for state in State}
