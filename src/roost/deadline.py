"""`Deadline`: the moment by which something must have happened, passed down to all that waits for a part of it."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Deadline:
    """A moment on the clock that never jumps; `math.inf` is none at all.

    A call makes one from the user's timeout and hands it on, so that all its waits together end in time.
    """

    at: float

    @classmethod
    def after(cls, seconds: float | None) -> Deadline:
        """Return the deadline so many seconds from now; with None there is none."""
        return cls(math.inf if seconds is None else time.monotonic() + seconds)

    @property
    def left(self) -> float:
        """The seconds until then: 0 once it has passed, infinite if there is none."""
        return max(0.0, self.at - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether it has passed."""
        return time.monotonic() >= self.at

    @property
    def timeout(self) -> float | None:
        """The seconds until then, as functions that wait without limit on None take them."""
        return None if self.at == math.inf else min(self.left, threading.TIMEOUT_MAX)

    def within(self, seconds: float) -> Deadline:
        """Return the earlier of this deadline and the one so many seconds from now."""
        return min(self, Deadline.after(seconds))


NEVER = Deadline(math.inf)
"""No deadline."""
