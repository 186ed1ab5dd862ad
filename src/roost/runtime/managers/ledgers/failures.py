"""The exceptions of the calls of a job, as plain state: no Ray, no clock, no I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from roost.runtime.failures.meanwhile import CallFailure

_MOST = 100


class FailureLedger:
    """The last failures of a job's calls, each with a number that grows.

    >>> ledger = FailureLedger()
    >>> ledger.add([CallFailure(address="a:0", node="n", method="f", what="KeyError: 1", pid=1, when=2.0)])
    >>> [failure.number for failure in ledger.after(0)], ledger.after(1)
    ([1], [])
    """

    def __init__(self) -> None:
        self._failures: deque[CallFailure] = deque(maxlen=_MOST)
        self._count = 0

    def add(self, failures: Iterable[CallFailure]) -> None:
        """Add failures; too many push the oldest out."""
        for failure in failures:
            self._count += 1
            self._failures.append(replace(failure, number=self._count))

    def after(self, number: int) -> list[CallFailure]:
        """Return the failures after one with this number, the oldest first."""
        return [failure for failure in self._failures if failure.number > number]
