"""The failures in a job's workers, of any caller's calls: a process adds them to its own errors.

A worker whose method raises tells the worker manager, and a process that makes an error asks there. What the process
has raised itself, or returned as an outcome, it does not say again.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

from roost.deadline import Deadline
from roost.errors import Problem, RoostError
from roost.runtime.limits import MEANWHILE_LATER_SECONDS, MEANWHILE_SECONDS
from roost.text import plural, shorten

if TYPE_CHECKING:
    from roost.runtime.failures.failure import Failure

_MOST_KEPT = 100
_MOST_SAID = 5
_MOST_ASKS = 20
_MOST_CAUSES = 10
_WORDS = "meanwhile failed: "

Key = tuple[str, int, float]
"""Tells one failure from all others: address, pid and time of the worker."""
Error = TypeVar("Error", bound=BaseException)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFailure:
    """An exception of a call, as the worker manager keeps it."""

    address: str
    node: str
    method: str
    what: str
    """`KeyError: 'reward'`."""
    pid: int
    when: float
    more: int = 0
    """How many of the same kind and method came shortly before it, and were not told."""
    causes: tuple[Key, ...] = ()
    """The failures of other workers that it passes on."""
    number: int = 0

    @property
    def key(self) -> Key:
        """The key that no other failure has."""
        return self.address, self.pid, self.when

    def __str__(self) -> str:
        more = f", and {self.more} more like it" if self.more else ""
        return f"{self.address} in {self.method}: {shorten(self.what, 300)}{more}"


class Meanwhile:
    """The failures that a process knows of."""

    current: ClassVar[Meanwhile | None] = None
    """Those of the job of this process."""

    def __init__(self, ask: Callable[[int, float], Sequence[CallFailure]]) -> None:
        """Take a function that returns the failures after a number, within some seconds."""
        self._ask = ask
        self._lock = threading.Lock()
        self._last = 0
        self._known: deque[CallFailure] = deque(maxlen=_MOST_KEPT)
        self._seen: deque[Key] = deque(maxlen=10 * _MOST_KEPT)
        self._deaths: dict[str, str] = {}
        """By address: how each worker of this process died that is not back, and that no caller was told of."""
        self._told_deaths: set[str] = set()
        self._not_before = Deadline.after(0)
        self._asks: float = _MOST_ASKS
        """How often it may ask now; more with time."""
        self._asked = time.monotonic()
        self.on_new: Callable[[CallFailure], object] = lambda _: None
        """Called with each failure that this process learns of."""

    def look(self, seconds: float = MEANWHILE_SECONDS, *, is_last: bool = False) -> None:
        """Ask what else has failed; less often after many times, and not for a while where nobody answers."""
        # In an event loop nothing may wait: what is known has to do.
        asyncio = sys.modules.get("asyncio")
        is_in_loop = asyncio is not None and asyncio._get_running_loop() is not None
        if not is_last and (is_in_loop or not self._may_ask()):
            return
        with contextlib.suppress(Exception), self._lock:
            self._not_before = Deadline.after(MEANWHILE_LATER_SECONDS)
            found = self._ask(self._last, seconds)
            self._not_before = Deadline.after(0)
            for failure in found:
                self._last = max(self._last, failure.number)
                self._known.append(failure)
                self.on_new(failure)

    def _may_ask(self) -> bool:
        """Whether to ask now: a program may wait for a moment again and again, and each time get an error."""
        now = time.monotonic()
        self._asks = min(_MOST_ASKS, self._asks + 2 * (now - self._asked) / MEANWHILE_SECONDS)
        self._asked = now
        if self._asks < 1 or not self._not_before.is_over:
            return False
        self._asks -= 1
        return True

    def saw(self, failures: Iterable[Failure]) -> None:
        """Take note that the caller is told of these."""
        for item in failures:
            self._seen.append((item.address, item.pid or 0, item.when))
            if self._deaths.pop(item.address, None) is None and item.kind == "death":
                # The watch may notice it later.
                self._told_deaths.add(item.address)

    def note_death(self, address: str, how: str) -> None:
        """Take note that a worker has died; an empty text says that it is back."""
        if not how:
            self._deaths.pop(address, None)
            self._told_deaths.discard(address)
        elif address not in self._told_deaths:
            self._deaths[address] = how

    def words(self) -> list[str]:
        """Say what has failed that no caller here was told of, the newest last."""
        known = list(self._known)
        told = {*self._seen, *(key for item in known for key in item.causes)}
        unseen = [item for item in known if item.key not in told]
        now = time.time()
        lines = [
            f"{_WORDS}{item} ({item.node}, pid {item.pid}, {max(0.0, now - item.when):.0f} s ago)" for item in unseen
        ]
        lines += [f"{_WORDS}{address} {how}" for address, how in list(self._deaths.items())]
        more = len(lines) - _MOST_SAID
        return lines if more <= 0 else [f"{_WORDS}{plural(more, 'call')} before these", *lines[-_MOST_SAID:]]


def with_meanwhile(error: Error) -> Error:
    """Return an error that also says what else has failed in the job; in a plain process, as it is."""
    known = Meanwhile.current
    if known is None:
        return error
    cause: BaseException | None = error
    # What it tells of itself, perhaps as Ray raised it for a handle.
    for _ in range(_MOST_CAUSES):
        with contextlib.suppress(Exception):
            known.saw(getattr(cause, "worker_failures", ()))
        cause = cause and (cause.__cause__ or cause.__context__)
    with contextlib.suppress(Exception):
        if any(_WORDS in text for text in (str(error), *getattr(error, "__notes__", ()))):
            return error
        known.look()
        for line in known.words():
            if isinstance(error, RoostError):
                error.add(Problem(message=line))
            else:
                error.add_note(line)
    return error
