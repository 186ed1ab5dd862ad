"""What a process has to write, as plain data: which calls become a line each, which are merged, which wait.

Every file has an allowance of bytes that grows with time. While there is plenty, each call has its own line. A process
that makes many calls uses it up: then the calls of one method since the last write share a line, and once nothing is
left they wait until there is room for them. So the size of a file has a bound, whatever the process does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from roost.runtime.events.format import line_of, number

BYTES_PER_SECOND = 330.0
"""64 workers write at most 76 MB in an hour, and what they may have saved up."""
SAVED_BYTES = 96 * 1024.0
SHORT_WAIT = 0.02
"""Shorter waits for the same process share a line, however much is left."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call that ended; times are seconds of the process's clock."""

    method: str
    started: float
    ended: float
    is_ok: bool
    is_wait: bool = False
    """Whether it is a wait inside a call: `method` then says for whom."""


class Running(NamedTuple):
    """A call or a wait that is under way."""

    key: int
    method: str
    started: float
    is_wait: bool = False


@dataclass(slots=True)
class _Merged:
    started: float
    ended: float
    count: int = 0
    busy: float = 0.0
    failed: int = 0


class Pending:
    """The calls that wait to be written, and the allowance."""

    def __init__(self, now: float) -> None:
        self._epoch = now
        """What `t` counts from."""
        self._left = SAVED_BYTES
        self._at = now
        self._merged: dict[tuple[str, str], _Merged] = {}
        """By kind of line and name."""
        self._metrics: dict[str, str] = {}
        self._announced: set[int] = set()
        self.thinned = 0
        """Values of metrics that gave way to a later one of the same name."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not (self._merged or self._metrics)

    def lines(
        self,
        now: float,
        calls: Iterable[Call],
        *,
        running: Sequence[Running] = (),
        metrics: Iterable[tuple[str, float, float | None, float]] = (),
        notes: Iterable[str] = (),
        age: float = 0.0,
    ) -> list[str]:
        """Return what to write now.

        Of the calls and waits under way those older than `age` are announced once; `metrics` has name, value, step and
        time; `notes` are lines that are always written.
        """
        self._left = min(SAVED_BYTES, self._left + (now - self._at) * BYTES_PER_SECOND)
        self._at = now
        out = list(notes)
        self._announced &= {item.key for item in running}
        for item in running:
            if item.key not in self._announced and now - item.started >= age:
                self._announced.add(item.key)
                out.append(line_of("waiting" if item.is_wait else "began", item.method, t=self._t(item.started)))
        if self._left > SAVED_BYTES / 2:
            out += self._flush()
            for call in calls:
                if call.is_wait and call.ended - call.started < SHORT_WAIT:
                    self._merge(call)
                else:
                    out.append(self._single(call))
            out += self._flush()
            out += [self._metric(*metric) for metric in metrics]
        else:
            for call in calls:
                self._merge(call)
            for metric in metrics:
                self.thinned += metric[0] in self._metrics
                self._metrics[metric[0]] = self._metric(*metric)
            # Lines of calls have about 60 characters.
            if self._left > 60 * len(self._merged) + 80 * len(self._metrics):
                out += self._flush()
        self._left -= sum(len(line) + 1 for line in out)
        return out

    def rest(self) -> list[str]:
        """Return everything that still waits, for the end of the process."""
        return self._flush()

    def _t(self, when: float) -> float:
        return round(when - self._epoch, 4)

    def _single(self, call: Call) -> str:
        failed = None if call.is_ok else 1
        seconds = round(call.ended - call.started, 6)
        return line_of(_kind(call), call.method, t=self._t(call.started), d=seconds, failed=failed)

    def _metric(self, name: str, value: float, step: float | None, when: float) -> str:
        return line_of("metric", name, t=self._t(when), value=number(value), step=step)

    def _merge(self, call: Call) -> None:
        found = self._merged.setdefault((_kind(call), call.method), _Merged(call.started, call.ended))
        found.started = min(found.started, call.started)
        found.ended = max(found.ended, call.ended)
        found.count += 1
        found.busy += call.ended - call.started
        found.failed += not call.is_ok

    def _flush(self) -> list[str]:
        out = [
            line_of(
                kind,
                method,
                t=self._t(item.started),
                d=round(item.ended - item.started, 4),
                n=item.count if item.count > 1 else None,
                busy=round(item.busy, 4) if item.count > 1 else None,
                failed=item.failed or None,
            )
            for (kind, method), item in self._merged.items()
        ]
        out += self._metrics.values()
        self._merged.clear()
        self._metrics.clear()
        return out


def _kind(call: Call) -> str:
    return "wait" if call.is_wait else "call"
