"""The events that a process has yet to write, as plain data: which become lines, which are merged, which wait.

Every file has two allowances of bytes that grow with time. One is for calls that ended: while there is plenty, each has
its own line. A process with many calls uses it up: then the calls of one method since the last write share a line, and
once nothing is left they wait until there is room for them. The other is for announcing calls and waits that are
under way; when it is used up, the oldest come first. So the size of a file has a bound, whatever the process does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from roost.runtime.events.format import line_of

BYTES_PER_SECOND = 310.0
"""64 workers write at most 71 MB in an hour, and what they may have saved up."""
SAVED_BYTES = 96 * 1024.0
_PART_OF_CALLS = 2 / 3
"""Of both; the rest is for announcements."""
SHORT_WAIT = 0.02
"""Shorter waits for the same process share a line, however much is left."""


class Call(NamedTuple):
    """A call that ended; times are seconds of the process's clock."""

    method: str
    started: float
    ended: float
    is_ok: bool
    is_wait: bool = False
    """Whether it is a wait: `method` then says for whom."""
    is_aside: bool = False
    """Whether it is a wait outside any call, as in a thread of the user's own."""


class Running(NamedTuple):
    """A call or a wait that is under way."""

    method: str
    started: float
    is_wait: bool = False
    is_aside: bool = False


@dataclass(slots=True)
class _Merged:
    started: float
    ended: float
    count: int = 0
    busy: float = 0.0
    failed: int = 0


class Allowance:
    """Bytes that may be written, more with every second."""

    def __init__(self, part: float, now: float) -> None:
        self.most = self.left = SAVED_BYTES * part
        self._per_second = BYTES_PER_SECOND * part
        self._at = now

    def earn(self, now: float) -> None:
        """Add what has come with time."""
        self.left = min(self.most, self.left + (now - self._at) * self._per_second)
        self._at = now

    def spend(self, lines: Sequence[str]) -> Sequence[str]:
        """Subtract what lines take, and return them."""
        self.left -= sum(len(line) + 1 for line in lines)
        return lines


class Pending:
    """The calls that wait to be written, and the allowances."""

    def __init__(self, now: float) -> None:
        self._epoch = now
        """The zero of `t`."""
        self.for_calls = Allowance(_PART_OF_CALLS, now)
        self.for_announcements = Allowance(1 - _PART_OF_CALLS, now)
        self.merged: dict[tuple[str, str, bool], _Merged] = {}
        """By kind of line, name, and whether outside any call."""
        self._announced: dict[tuple[bool, float], Running] = {}
        """The calls and waits that were announced and go on, by kind and start."""

    def lines(
        self,
        now: float,
        calls: Iterable[Call],
        *,
        running: Sequence[Running] = (),
        notes: Iterable[str] = (),
        age: float = 0.0,
    ) -> list[str]:
        """Return what to write now.

        Of the calls and waits under way those older than `age` are announced once, the oldest first; `notes` are lines
        that are always written.
        """
        self.for_calls.earn(now)
        self.for_announcements.earn(now)
        calls = list(calls)
        ended = {_key(call) for call in calls}
        out = list(notes)
        for item in sorted(running, key=lambda item: item.started):
            if _key(item) in ended or _key(item) in self._announced or now - item.started < age:
                continue
            if self.for_announcements.left <= 0:
                break
            self._announced[_key(item)] = item
            kind, aside = "waiting" if item.is_wait else "began", item.is_aside or None
            out += self.for_announcements.spend([line_of(kind, item.method, t=self._t(item.started), aside=aside)])
        # What was announced ends with a line of its own: readers tell by its start what has ended.
        ends = [self._single(call) for call in calls if _key(call) in self._announced]
        others = [call for call in calls if _key(call) not in self._announced]
        # The end of some was dropped, because too much waited.
        lost = self._announced.keys() - ended - {_key(item) for item in running}
        for item in [self._announced[key] for key in lost]:
            ends.append(self._single(Call(item.method, item.started, now, True, item.is_wait, item.is_aside)))
        self._announced = {key: item for key, item in self._announced.items() if key not in ended | lost}
        if self.for_calls.left > self.for_calls.most / 2:
            ends += self.rest()
            for call in others:
                if call.is_wait and call.ended - call.started < SHORT_WAIT:
                    self._merge(call)
                else:
                    ends.append(self._single(call))
            ends += self.rest()
            out += self.for_calls.spend(ends)
        else:
            for call in others:
                self._merge(call)
            out += self.for_announcements.spend(ends)
            # Lines of calls have about 60 characters.
            if self.for_calls.left > 60 * len(self.merged):
                out += self.for_calls.spend(self.rest())
        return out

    def _t(self, when: float) -> float:
        # All starts and ends are on one grid, so that what was inside a call is inside its slice.
        return round(when - self._epoch, 6)

    def _single(self, call: Call) -> str:
        start, failed = self._t(call.started), None if call.is_ok else 1
        seconds = round(self._t(call.ended) - start, 6)
        return line_of(_kind(call), call.method, t=start, d=seconds, failed=failed, aside=call.is_aside or None)

    def _merge(self, call: Call) -> None:
        found = self.merged.setdefault((_kind(call), call.method, call.is_aside), _Merged(call.started, call.ended))
        found.started = min(found.started, call.started)
        found.ended = max(found.ended, call.ended)
        found.count += 1
        found.busy += call.ended - call.started
        found.failed += not call.is_ok

    def rest(self) -> list[str]:
        """Return all merged calls that still wait."""
        out = [
            line_of(
                kind,
                method,
                t=self._t(item.started),
                d=round(self._t(item.ended) - self._t(item.started), 6),
                n=item.count if item.count > 1 else None,
                busy=round(item.busy, 4) if item.count > 1 else None,
                failed=item.failed or None,
                aside=aside or None,
            )
            for (kind, method, aside), item in self.merged.items()
        ]
        self.merged.clear()
        return out


def _key(item: Call | Running) -> tuple[bool, float]:
    return item.is_wait, item.started


def _kind(call: Call) -> str:
    return "wait" if call.is_wait else "call"
