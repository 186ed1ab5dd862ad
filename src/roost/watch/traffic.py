"""Traffic between the workers of a run, from its events: channels, links of weights, requests to engines. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from roost.watch.limits import RATE_SECONDS
from roost.watch.reading import Line, finite
from roost.watch.views import ChannelView, EngineView, LinkView

KINDS = ("channel", "weights", "engine", "requests")
_CHANNEL = ("depth", "puts", "gets", "getters", "putters", "most")
_REQUESTS = ("served", "failed", "busy")
_MOST_NAMES = 500
_MOST_POINTS = 600
_MOST_COUNT = 10**15

Point = tuple[float, float]


@dataclass(slots=True)
class _Count:
    """A count over time, and what it rises by in a second."""

    marks: deque[Point] = field(default_factory=lambda: deque(maxlen=60))

    def take(self, when: float, count: float) -> None:
        if self.marks and count < self.marks[-1][1]:
            # A new process counts from the beginning.
            self.marks.clear()
        self.marks.append((when, count))

    def rise(self, now: float) -> tuple[float, float]:
        """Return by how much it rose in the last seconds, and how many seconds those are."""
        if not self.marks:
            return 0.0, RATE_SECONDS
        since = now - RATE_SECONDS
        before = [mark for mark in self.marks if mark[0] <= since]
        first = before[-1] if before else self.marks[0]
        return self.marks[-1][1] - first[1], max(1.0, now - max(first[0], since))

    def rate(self, now: float) -> float:
        rise, seconds = self.rise(now)
        return rise / seconds


@dataclass(slots=True)
class _Channel:
    values: dict[str, dict[str, int]] = field(default_factory=dict)
    """By home: the figures of its last line."""
    puts: dict[str, _Count] = field(default_factory=dict)
    gets: dict[str, _Count] = field(default_factory=dict)
    depths: deque[Point] = field(default_factory=lambda: deque(maxlen=_MOST_POINTS))

    def total(self, key: str) -> int:
        return sum(values[key] for values in self.values.values())


@dataclass(slots=True)
class _Requests:
    values: dict[str, int] = field(default_factory=dict)
    served: _Count = field(default_factory=_Count)
    seconds: _Count = field(default_factory=_Count)
    rates: deque[Point] = field(default_factory=lambda: deque(maxlen=_MOST_POINTS))
    latencies: deque[Point] = field(default_factory=lambda: deque(maxlen=_MOST_POINTS))

    def latency(self, now: float) -> float | None:
        rise, _ = self.served.rise(now)
        return self.seconds.rise(now)[0] / rise if rise else None


class Traffic:
    """All traffic that the events tell of so far."""

    def __init__(self) -> None:
        self._channels: dict[str, _Channel] = {}
        self.links: dict[str, LinkView] = {}
        """By name, in the order of their first updates."""
        self._engines: dict[str, tuple[str, int | None, bool]] = {}
        """By worker: its url, the version of its weights, and whether it is asleep."""
        self._requests: dict[str, _Requests] = {}

    def take(self, line: Line, when: float) -> None:
        """Take a line of one of the `KINDS`; ValueError and the like if it is odd."""
        name, values = str(line.name)[:200], line.values
        tables: dict[str, Mapping[str, object]] = {
            "channel": self._channels,
            "weights": self.links,
            "engine": self._engines,
            "requests": self._requests,
        }
        if name not in tables[line.kind] and len(tables[line.kind]) >= _MOST_NAMES:
            raise ValueError("too many names")
        if line.kind == "channel":
            home, figures = line.process.who, {key: _whole(values.get(key)) for key in _CHANNEL}
            channel = self._channels.setdefault(name, _Channel())
            channel.values[home] = figures
            channel.puts.setdefault(home, _Count()).take(when, figures["puts"])
            channel.gets.setdefault(home, _Count()).take(when, figures["gets"])
            channel.depths.append((when, channel.total("depth")))
        elif line.kind == "weights":
            before = self.links[name].updates if name in self.links else ()
            seconds = finite(values["d"])
            self.links[name] = LinkView(
                name=name,
                version=_whole(values["version"]),
                updated=when,
                seconds=seconds,
                pause=finite(values.get("pause") or 0),
                size=_whole(values.get("size")),
                updates=(*before, (when, seconds))[-_MOST_POINTS:],
            )
        elif line.kind == "engine":
            version = values.get("version")
            known = None if version is None else _whole(version)
            self._engines[name] = (str(values.get("url")), known, "asleep" in values)
        else:
            figures, seconds = {key: _whole(values.get(key)) for key in _REQUESTS}, finite(values["seconds"])
            requests = self._requests.setdefault(name, _Requests())
            requests.values = figures
            requests.served.take(when, figures["served"])
            requests.seconds.take(when, seconds)
            requests.rates.append((when, requests.served.rate(when)))
            if (latency := requests.latency(when)) is not None:
                requests.latencies.append((when, latency))

    def is_asleep(self, worker: str) -> bool:
        """Whether a worker is an engine that has given its memory back."""
        return worker in self._engines and self._engines[worker][2]

    def channels(self, now: float) -> tuple[ChannelView, ...]:
        """Return the channels by name."""
        return tuple(
            ChannelView(
                name=name,
                depth=channel.total("depth"),
                most=channel.total("most") or None,
                puts_per_second=sum(count.rate(now) for count in channel.puts.values()),
                gets_per_second=sum(count.rate(now) for count in channel.gets.values()),
                getters=channel.total("getters"),
                putters=channel.total("putters"),
                depths=tuple(channel.depths),
            )
            for name, channel in sorted(self._channels.items())
        )

    def engines(self, now: float) -> tuple[EngineView, ...]:
        """Return the engines, by worker."""
        views = []
        ordered = sorted((worker.rpartition(":")[0], rank_of(worker), worker) for worker in self._engines)
        for group, _, worker in ordered:
            url, version, is_asleep = self._engines[worker]
            newest = [link.version for link in self.links.values() if link.name.endswith(f" -> {group}")]
            requests = self._requests.get(url, _Requests())
            view = EngineView(
                worker=worker,
                version=version,
                behind=max(0, max(newest) - version) if newest and version is not None else None,
                is_asleep=is_asleep,
                busy=requests.values.get("busy", 0),
                served=requests.values.get("served", 0),
                failed=requests.values.get("failed", 0),
                per_second=requests.served.rate(now) if requests.values else None,
                latency=requests.latency(now),
                rates=tuple(requests.rates),
                latencies=tuple(requests.latencies),
            )
            views.append(view)
        return tuple(views)


def rank_of(address: str) -> int:
    """Return the rank in the address of a worker; 0 if it has none."""
    rank = address.rpartition(":")[2]
    return int(rank) if rank.isdigit() and len(rank) < 10 else 0


def _whole(value: Any) -> int:
    found = int(value or 0)
    if abs(found) > _MOST_COUNT:
        raise ValueError("too large for a count")
    return found
