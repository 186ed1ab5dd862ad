"""Jobs drawn at random, of which it is known what limits them: simulated, and written as the events of a run.

Nothing here knows how the verdict is found. Durations vary, the first calls take longer, the scale goes from calls of
50 ms to calls of a minute.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from random import Random

from roost.runtime.events.format import header, line_of
from roost.runtime.limits import LEAST_WAIT_SECONDS
from roost.watch.model import RunModel
from roost.watch.reading import parse_lines

BEGAN = 1_800_000_000.0
LEAST_MARGIN = 1.35
"""What limits a drawn job takes so many times as long as what comes next."""


@dataclass
class DrawnJob:
    """A job: the model that read its events, the moment to look at it, and what limits it."""

    model: RunModel
    now: float
    kind: str
    limits: tuple[str, ...]
    """The verdicts that are right."""
    who: set[str]


@dataclass
class _Log:
    """The events of one process while they are simulated."""

    who: str
    calls: list[tuple[str, float, float]] = field(default_factory=list)
    waits: list[tuple[str, float, float]] = field(default_factory=list)
    open_calls: list[tuple[str, float]] = field(default_factory=list)
    open_waits: list[tuple[str, float]] = field(default_factory=list)
    dies: float | None = None
    silent_from: float | None = None
    idle_from: float = math.inf
    """From when on its CPU has nothing to do."""


class _Sim:
    """What all kinds of jobs have in common."""

    def __init__(self, seed: int) -> None:
        self.draw = Random(seed)  # noqa: S311 - nothing secret
        self.scale = 10 ** self.draw.uniform(-1.0, 1.2)
        self.jitter = self.draw.choice([0.05, 0.15, 0.4])
        self.logs: dict[str, _Log] = {}
        self.driver = _Log("driver")
        self.end = max(40.0, 14 * self.scale * 3)
        self.now = self.end

    def group(self, name: str, size: int) -> list[_Log]:
        made = [_Log(f"{name}:{rank}") for rank in range(size)]
        self.logs |= {log.who: log for log in made}
        return made

    def around(self, seconds: float, first: bool = False) -> float:
        return seconds * self.draw.lognormvariate(0, self.jitter) * (self.draw.uniform(1, 4) if first else 1)

    def job(self, kind: str, limits: str, *who: str) -> DrawnJob:
        """Write what was simulated until now, as the processes would have."""
        texts = [header("driver", run="abc", pid=1, host="head", wall=BEGAN)]
        texts += self._lines(self.driver, is_driver=True)
        texts += [line_of("died", log.who, t=log.dies) for log in self.logs.values() if log.dies is not None]
        for place, log in enumerate(self.logs.values()):
            texts.append(header(log.who, run="abc", pid=place, host="head", wall=BEGAN, node=place // 8))
            texts += self._lines(log)
        model = RunModel()
        model.take(parse_lines(text.encode() for text in texts))
        return DrawnJob(model, BEGAN + self.now, kind, tuple(limits.split()), set(who))

    def _lines(self, log: _Log, is_driver: bool = False) -> list[str]:
        until = min(self.now, *[t for t in (log.dies, log.silent_from) if t is not None], self.now)
        out: list[tuple[float, str]] = []
        for ended, going, items, unfinished in (
            ("call", "began", log.calls, log.open_calls),
            ("wait", "waiting", log.waits, log.open_waits),
        ):
            for name, start, end in items:
                if end <= until:
                    if end - start > (LEAST_WAIT_SECONDS if ended == "wait" else 0):
                        out.append((end, line_of(ended, name, t=round(start, 6), d=round(end - start, 6))))
                elif start < until - 0.2:
                    out.append((start, line_of(going, name, t=round(start, 6))))
            out += [(start, line_of(going, name, t=round(start, 6))) for name, start in unfinished if start < until]
        t = 0.0
        while t < until and not is_driver:
            t += 2.0
            cpu = self.draw.uniform(0, 0.02) if t > log.idle_from else self.draw.uniform(0.3, 1.2)
            out.append((t, line_of("usage", round(cpu, 3), t=t, memory=900)))
        return [text for _, text in sorted(out)]


NAMES = ("rollout", "reward", "actor", "critic", "judge", "learner", "env")


def pipeline(seed: int, is_balanced: bool = False) -> DrawnJob:
    """Stages with channels between them; one takes longer than the others."""
    sim = _Sim(seed)
    draw = sim.draw
    names = draw.sample(NAMES, draw.randint(2, 4))
    slowest = draw.randrange(len(names))
    stages = [sim.group(name, draw.randint(1, 6)) for name in names]
    times = []
    for place, stage in enumerate(stages):
        margin = 1.0 if place == slowest else 1 / draw.uniform(LEAST_MARGIN, 8)
        if is_balanced:
            margin = draw.uniform(0.97, 1.0)
        times.append(sim.scale * margin * len(stage))
    room = draw.randint(1, 6)
    is_loop = draw.random() < 0.4
    queues = [0] * (len(stages) - 1)
    takers: list[list[tuple[_Log, int, float]]] = [[] for _ in queues]
    putters: list[list[tuple[_Log, int, float]]] = [[] for _ in queues]
    began: dict[str, float] = {}
    events: list[tuple[float, int, str, int]] = []
    order = 0

    def begin(log: _Log, stage: int, t: float, since: float) -> None:
        nonlocal order
        if stage and t > since:
            log.waits.append((f"channel 'q{stage - 1}'", since, t))
        order += 1
        length = sim.around(times[stage], first=log.who not in began)
        began.setdefault(log.who, t)
        heapq.heappush(events, (t + length, order, log.who, stage))
        began[log.who] = since

    def ask(log: _Log, stage: int, t: float) -> None:
        if stage == 0:
            begin(log, stage, t, t)
        elif queues[stage - 1]:
            queues[stage - 1] -= 1
            begin(log, stage, t, t)
            if putters[stage - 1]:
                other, place, since = putters[stage - 1].pop(0)
                put(other, place, t, since)
        else:
            takers[stage - 1].append((log, stage, t))

    def put(log: _Log, stage: int, t: float, since: float) -> None:
        if t > since:
            log.waits.append((f"channel 'q{stage}'", since, t))
        if takers[stage]:
            other, place, asked = takers[stage].pop(0)
            begin(other, place, t, asked)
        else:
            queues[stage] += 1
        finish(log, stage, t)

    def finish(log: _Log, stage: int, t: float) -> None:
        if not is_loop:
            log.calls.append((f"do_{stage}", began[log.who], t))
        ask(log, stage, t)

    for place, stage in enumerate(stages):
        for log in stage:
            ask(log, place, 1.0)
    while events and events[0][0] < sim.end:
        t, _, who, stage = heapq.heappop(events)
        log = sim.logs[who]
        if stage == len(stages) - 1:
            finish(log, stage, t)
        elif queues[stage] < room or takers[stage]:
            put(log, stage, t, t)
        else:
            putters[stage].append((log, stage, t))
    for _, _, who, stage in events:
        if not is_loop:
            sim.logs[who].open_calls.append((f"do_{stage}", min(began[who], sim.end - 0.01)))
    for waiting in (*takers, *putters):
        for log, stage, since in waiting:
            queue = stage - 1 if any(log is item[0] for line in takers for item in line) else stage
            log.open_waits.append((f"channel 'q{queue}'", since))
            if not is_loop:
                log.open_calls.append((f"do_{stage}", since if queue == stage - 1 else began[log.who]))
    if is_loop:
        for log in sim.logs.values():
            log.open_calls.append(("run", 1.0))
    sim.driver.open_waits.append((f"{names[-1]}, run", 1.0))
    if is_balanced:
        return sim.job("balanced", "balance unclear")
    return sim.job("pipeline", "pace", names[slowest])


def turns(seed: int) -> DrawnJob:
    """Roles that take turns, called by the driver; one takes longer than the others, or the driver itself."""
    sim = _Sim(seed)
    draw = sim.draw
    names = draw.sample(NAMES, draw.randint(1, 4))
    groups = [sim.group(name, draw.randint(1, 8)) for name in names]
    is_driver = draw.random() < 0.2
    slowest = draw.randrange(len(names))
    times = [sim.scale / draw.uniform(LEAST_MARGIN, 6) for _ in names]
    times[slowest] = sim.scale
    between = sim.scale * draw.uniform(0, 0.2)
    if is_driver:
        between = sum(times) * draw.uniform(1.6, 4)
    colocated = draw.random() < 0.3
    t, step = 1.0, 0
    while t < sim.end:
        for place, group in enumerate(groups):
            lengths = [sim.around(times[place], first=step == 0) for _ in group]
            for log, length in zip(group, lengths, strict=True):
                log.calls.append((f"do_{place}", t, t + length))
            if colocated and place + 1 < len(groups):
                for log in groups[place + 1]:
                    log.waits.append(("the lock of its accelerators", t, t + max(lengths)))
                    log.calls.append(("onload", t, t + max(lengths)))
            sim.driver.waits.append((f"{names[place]}, do_{place}", t, t + max(lengths)))
            t += max(lengths)
        t += sim.around(between) if between else 0
        step += 1
    if is_driver:
        return sim.job("driver", "driver", "driver")
    return sim.job("turns", "pace", names[slowest])


def straggler(seed: int, is_alike: bool = False) -> DrawnJob:
    """A group whose members wait for each other, of which some are slow; others feed it and are quicker."""
    sim = _Sim(seed)
    draw = sim.draw
    size = draw.randint(3, 16)
    group = sim.group("learner", size)
    feeders = sim.group("rollout", draw.randint(1, 4)) if draw.random() < 0.5 else []
    slow = set() if is_alike else set(draw.sample(range(size), draw.randint(1, max(1, size // 4))))
    by = draw.uniform(1.3, 2.0)
    sim.jitter = min(sim.jitter, 0.08)
    style = draw.choice(["torch", "torch", "driver", "loop"])
    reduce = sim.scale * draw.uniform(0.6, 1.2) if is_alike else sim.scale * draw.uniform(0.01, 0.1)
    if is_alike:
        style = draw.choice(["torch", "loop"])
    feeding = sim.scale * draw.uniform(0.1, 0.5)
    t, step = 1.0, 0
    while t < sim.end:
        lengths = [sim.around(sim.scale * (by if rank in slow else 1), first=step == 0) for rank in range(size)]
        until = t + max(lengths) + (reduce if style != "driver" else 0)
        for log, length in zip(group, lengths, strict=True):
            if style != "driver":
                log.waits.append(("torch.distributed", t + length, until))
            if style != "loop":
                log.calls.append(("train", t, until if style == "torch" else t + length))
        for log in feeders:
            fed = t + min(sim.around(feeding), until - t)
            log.calls.append(("generate", t, fed))
        sim.driver.waits.append(("learner, train", t, until))
        t, step = until, step + 1
    if style == "loop":
        for log in group:
            log.open_calls.append(("fit", 1.0))
    if is_alike:
        return sim.job("communication", "communication", "learner")
    return sim.job("straggler", "straggler", *[f"learner:{rank}" for rank in slow])


def hang(seed: int) -> DrawnJob:
    """A job of turns in which a worker hangs, falls silent or dies, or does not come to where the others wait."""
    sim = _Sim(seed)
    draw = sim.draw
    size = draw.randint(1, 8)
    group, others = sim.group("rollout", size), sim.group("actor", draw.randint(1, 4))
    how = draw.choice(["call", "call", "silent", "dead", "torch", "early"])
    if how == "torch" and size < 3:
        how = "call"
    victim = draw.choice(group)
    steps = draw.randint(3, 12)
    t, longest = 1.0, 0.0
    for step in range(steps):
        lengths = [sim.around(sim.scale, first=step == 0) for _ in group]
        longest = max(longest, *lengths)
        for log, length in zip(group, lengths, strict=True):
            log.calls.append(("generate", t, t + length))
        sim.driver.waits.append(("rollout, generate", t, t + max(lengths)))
        t += max(lengths)
        lengths = [sim.around(sim.scale * draw.uniform(0.2, 2)) for _ in others]
        for log, length in zip(others, lengths, strict=True):
            log.calls.append(("train", t, t + length))
        sim.driver.waits.append(("actor, train", t, t + max(lengths)))
        t += max(lengths)
    sim.driver.open_waits.append(("rollout, generate", t))
    patience = max(60.0, 5 * longest)
    sim.now = sim.end = t + patience * draw.uniform(1.05, 4)
    if how == "early":
        sim.now = sim.end = t + max(10.0, 5 * longest) * 1.1 + 4
    for log in group:
        if log is victim:
            log.idle_from = t + 2
            if how != "torch":
                log.open_calls.append(("generate", t))
        elif how == "torch":
            log.open_calls.append(("generate", t))
            log.open_waits.append(("torch.distributed", t + 0.1))
            log.waits.append(("torch.distributed", 1.5, 1.5 + 0.5 * longest))
        else:
            log.calls.append(("generate", t, t + sim.around(sim.scale)))
    if how == "silent":
        victim.silent_from = t + 1.0
    if how == "dead":
        victim.dies = t + 0.5 * sim.scale
    return sim.job(f"hang, {how}", "death" if how == "dead" else "hang", victim.who)


def young(seed: int) -> DrawnJob:
    """A job that has only begun: nothing can be known."""
    made = _Sim(seed)
    for name in ("rollout", "actor"):
        for log in made.group(name, 2):
            log.calls.append(("load", 1.0, 1.0 + made.scale))
            log.open_calls.append(("work", 1.0 + made.scale))
    made.now = made.end = 2.0 + made.scale
    return made.job("young", "unclear")


KINDS = (
    *[pipeline] * 6,
    *[turns] * 5,
    *[straggler] * 5,
    *[hang] * 5,
    lambda seed: pipeline(seed, is_balanced=True),
    lambda seed: straggler(seed, is_alike=True),
    young,
)


def draw_job(seed: int) -> DrawnJob:
    """Return the job of a seed."""
    return KINDS[seed % len(KINDS)](seed)
