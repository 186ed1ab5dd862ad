"""How much of the last time each component works and waits, over whole periods of what takes longest. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from statistics import mean, stdev

from roost.text import plural
from roost.watch.limits import WINDOW_SECONDS
from roost.watch.model import RunModel
from roost.watch.views import RunView, Span

LEAST_PERIODS = 3
"""Fewer calls than this tell nothing."""
TORCH = "torch.distributed"
_PERIODS = 10
_MOST_WORKERS = 512
_SLOWER = 1.15
"""A straggler takes so many times as long as the others, and more than their calls vary."""


@dataclass(slots=True)
class Role:
    """The workers of a component in the window, as shares of its time."""

    name: str
    works: dict[str, float] = field(default_factory=dict)
    """By worker: in calls, without waits."""
    any_works: float = 0.0
    """How much of the time at least one of them works."""
    waits: dict[str, float] = field(default_factory=dict)
    """By whom they wait for, the mean of all workers."""
    in_torch: float = 1.0
    """How much the one that waits least for `torch.distributed` does."""
    slow: tuple[str, ...] = ()
    slower: float = 0.0

    @property
    def share(self) -> float:
        """How much it works; with slow workers how much they do, since the others wait for them."""
        return mean(self.works[address] for address in self.slow or self.works)

    def words(self) -> str:
        """Say what its workers do."""
        most = sorted(((share, whom) for whom, share in self.waits.items()), reverse=True)
        waits = [f"waits {share:.0%} for {whom}" for share, whom in most[:3] if share >= 0.03]
        return f"{self.name} ({plural(len(self.works), 'worker')}) {', '.join([f'works {self.share:.0%}', *waits])}"


def own_seconds(spans: Iterable[Span]) -> list[tuple[Span, float]]:
    """Return the calls among the calls and waits of a worker, each with its seconds apart from its waits.

    A moment in which it waits twice, as for an update and inside of that for a message, counts once. Where several
    calls run at once, its waits are shared out among them. Waits beside the calls, in threads of the user's, belong to
    no call.
    """
    calls = [span for span in spans if not span.is_wait]
    own = {id(span): span.busy for span in calls}
    lasting = [span for span in spans if span.end > span.start and not span.is_aside]
    edges = [edge for span in lasting for edge in ((span.start, 1, span), (span.end, 0, span))]
    running: dict[int, float] = {}
    waiting: dict[int, float] = {}
    before = 0.0
    for at, is_start, span in sorted(edges, key=lambda edge: edge[:2]):
        load = sum(running.values())
        lost = (at - before) * min(1.0, sum(waiting.values()) / load) if load else 0.0
        for key, share in running.items() if lost else ():
            own[key] -= lost * share
        before, table = at, waiting if span.is_wait else running
        if is_start:
            # A line of several calls has pauses between them.
            table[id(span)] = min(1.0, span.busy / max(span.end - span.start, 1e-9))
        else:
            table.pop(id(span), None)
    return [(span, max(0.0, own[id(span)])) for span in calls]


def lane(model: RunModel, address: str, now: float) -> list[Span]:
    """Return the calls and waits of a worker or the driver, with those under way."""
    return [*model.spans(address), *model.under_way(address, now)]


def find_window(model: RunModel, view: RunView) -> tuple[float, float, int] | None:
    """Return from when to when to look, whole periods of what takes longest, and how many those are."""
    longest, reference, first = 0.0, [0.0], math.inf
    for worker in view.workers[:_MOST_WORKERS]:
        spans = lane(model, worker.address, view.now)
        first = min([first, *[span.start for span in spans[:1]]])
        known = model.spans(worker.address)
        times = {
            name: [(span.start, span.busy / span.calls) for span in known if span.name == name and not span.is_wait]
            for name in {span.name for span in known if not span.is_wait}
        }
        ends = [span.end for span in known if span.is_wait and not span.is_aside]
        if any(not span.is_wait and ends and span.start < ends[-1] for span in spans[len(known) :]):
            # In a call that lasts as long as the job, it is its waits that come again and again.
            times = {"": [(a, b - a) for a, b in pairwise(ends)]}
        for found in times.values():
            took = max((took for _, took in found[-20:]), default=0.0)
            if took > longest and len(found) >= LEAST_PERIODS:
                longest, reference = took, [start for start, _ in found]
    start = reference[-1] - max(WINDOW_SECONDS, _PERIODS * longest)
    if reference[0] < first + longest and len(reference) > LEAST_PERIODS:
        # Of the first period little is typical: things are compiled and caches are empty.
        reference = reference[1:]
    inside = [at for at in reference if at >= start]
    return (inside[0], inside[-1], len(inside) - 1) if len(inside) >= LEAST_PERIODS else None


def clip(spans: Sequence[Span], start: float, end: float) -> list[Span]:
    """Return the parts of spans that are inside an interval; those that are wholly inside as they are."""
    found = []
    for span in spans:
        a, b = max(span.start, start), min(span.end, end)
        if b > a:
            part = (b - a) / (span.end - span.start)
            found.append(span if part == 1 else replace(span, start=a, end=b, busy=span.busy * part))
    return found


def roles_of(model: RunModel, view: RunView, start: float, end: float) -> list[Role]:
    """Return the components that have calls."""
    roles = []
    length, every = end - start, math.ceil(len(view.workers) / _MOST_WORKERS)
    for name, some in groupby(view.workers, key=lambda worker: worker.component):
        workers, role = [*some][::every], Role(name)
        times: dict[str, dict[str, list[float]]] = {}
        edges: list[tuple[float, int]] = []
        for worker in workers:
            known = lane(model, worker.address, view.now)
            spans, whole = clip(known, start, end), {id(span) for span in known}
            own = own_seconds(spans)
            works = role.works[worker.address] = min(1.0, sum(seconds for _, seconds in own) / length)
            edges += _working(spans)
            by_whom: dict[str, float] = {}
            for span in spans:
                if span.is_wait and not span.is_aside:
                    group, _, rank = span.name.rpartition(":")
                    whom = group if rank.isdigit() else span.name
                    by_whom[whom] = by_whom.get(whom, 0.0) + span.busy / length
            for whom, share in by_whom.items():
                role.waits[whom] = role.waits.get(whom, 0.0) + min(share, 1 - works) / len(workers)
            role.in_torch = min(role.in_torch, by_whom.get(TORCH, 0.0))
            for span, seconds in own:
                if id(span) in whole:
                    times.setdefault(span.name, {}).setdefault(worker.address, []).append(seconds / span.calls)
        role.any_works = sum(b - a for a, b in _times_above(edges)) / length
        if any(role.works.values()):
            _find_slow(role, times)
            roles.append(role)
    return roles


def _working(spans: Sequence[Span]) -> list[tuple[float, int]]:
    """Return the edges of the times in which a worker is in a call and does not wait."""
    # A wait outweighs all calls around it.
    edges = []
    for span in spans:
        if not span.is_aside:
            weight = -1000 if span.is_wait else 1
            edges += [(span.start, weight), (span.end, -weight)]
    return [edge for a, b in _times_above(edges) for edge in ((a, 1), (b, -1))]


def _times_above(edges: Sequence[tuple[float, int]]) -> list[tuple[float, float]]:
    """Return the intervals in which the sum of the edges before is above zero."""
    out, level = [], 0
    for (at, change), (until, _) in pairwise(sorted(edges)):
        level += change
        if level > 0 and until > at:
            out.append((at, until))
    return out


def _find_slow(role: Role, times: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Find workers whose calls take longer than those of the others by more than chance."""
    method = max(times, key=lambda name: sum(map(sum, times[name].values())), default="")
    # The longest of each says little: it may be the first, or have met something of another program.
    known = {address: sorted(found)[:-1] for address, found in times.get(method, {}).items()}
    if len(known) == len(role.works) and all(len(found) >= LEAST_PERIODS for found in known.values()):
        taken = {address: mean(found) for address, found in known.items()}
        error = max(stdev(found) / math.sqrt(len(found)) for found in known.values())
    elif role.waits.get(TORCH, 0.0) > 0.05:
        # In calls that last as long as the job, those that wait less for the others are the slow ones.
        taken, error = role.works, 0.02
    else:
        return
    ordered = sorted(taken, key=lambda address: taken[address])
    # At least half of them are not slow.
    places = range((len(ordered) + 1) // 2, len(ordered))
    place = max(places, key=lambda at: taken[ordered[at]] / max(taken[ordered[at - 1]], 1e-9), default=0)
    if place and taken[ordered[place]] > max(
        _SLOWER * taken[ordered[place - 1]], taken[ordered[place - 1]] + 4 * error
    ):
        role.slow = tuple(sorted(ordered[place:], key=lambda address: (len(address), address)))
        role.slower = mean(taken[address] for address in role.slow) / mean(taken[a] for a in ordered[:place]) - 1
