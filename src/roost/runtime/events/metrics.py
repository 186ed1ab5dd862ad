"""Which values of metrics a process writes, as plain data: all that people log, and a bound for runaway programs.

Values have a file of their own, so that nothing else gives way to them. Up to 1,000 a second are written, for 86.4
million values: a day at that rate, or eighty days of twelve values a second. Then the file takes 100 a second for
another 8.64 million, and 10 a second from there on. Above a rate, the last value of each name is written several times
a second. A value takes 40 bytes where a name has many of them, else 80 and its name. So a file may reach 4 GB, or 15 GB
with hundreds of names, and grows by less than 0.2 GB a day from there on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from roost.runtime.events.format import line_of, number
from roost.runtime.limits import METRICS_SAVED_SECONDS

RATES = ((86_400_000, 1000), (95_040_000, 100), (math.inf, 10))
"""Until so many values are in the file, so many go in a second."""
_MOST_IN_A_LINE = 500


class Value(NamedTuple):
    """A value of a metric; the time is of the process's clock."""

    name: str
    value: float
    step: float | None
    when: float


class MetricLines:
    """The values that wait to be written, and how many may be."""

    def __init__(self, now: float) -> None:
        self._epoch = self._at = now
        self.written = 0
        self._left = RATES[0][1] * METRICS_SAVED_SECONDS
        self.waiting: dict[str, Value] = {}
        """The last value of each name, where there was no room for all."""
        self.left_out: Counter[int] = Counter()
        """Values that gave way to a later one of the same name, by the rate that was exceeded; readers take from it."""

    def lines(self, now: float, values: Iterable[Value]) -> list[str]:
        """Return what to write of these values now."""
        rate = next(rate for until, rate in RATES if self.written < until)
        self._left = min(rate * METRICS_SAVED_SECONDS, self._left + (now - self._at) * rate)
        self._at = now
        values = list(values)
        if len(values) + len(self.waiting) <= self._left:
            return self._write([*self.waiting.values(), *values])
        for value in values:
            self.left_out[rate] += value.name in self.waiting
            self.waiting[value.name] = value
        return self.rest() if len(self.waiting) <= self._left else []

    def rest(self) -> list[str]:
        """Return everything that still waits."""
        return self._write(list(self.waiting.values()))

    def _write(self, values: list[Value]) -> list[str]:
        self.waiting.clear()
        self._left -= len(values)
        self.written += len(values)
        by_name: dict[str, list[Value]] = {}
        for value in values:
            by_name.setdefault(value.name, []).append(value)
        return [
            self._line(name, some[start : start + _MOST_IN_A_LINE])
            for name, some in by_name.items()
            for start in range(0, len(some), _MOST_IN_A_LINE)
        ]

    def _line(self, name: str, values: list[Value]) -> str:
        times = [round(value.when - self._epoch, 4) for value in values]
        steps = [
            None if step is None else int(step) if float(step).is_integer() else number(step)
            for _, _, step, _ in values
        ]
        if len(values) == 1:
            return line_of("metric", name, t=times[0], value=number(values[0].value), step=steps[0])
        return line_of(
            "metrics",
            name,
            t=times[0],
            after=[round(time - times[0], 4) for time in times],
            value=[number(value.value) for value in values],
            step=steps if any(step is not None for step in steps) else None,
        )
