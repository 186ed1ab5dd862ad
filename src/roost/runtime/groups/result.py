"""The result of a call on a group: wait for it, await it, iterate over the answers, or inspect each outcome."""

from __future__ import annotations

import asyncio
import contextlib
import math
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

import ray
from ray.exceptions import GetTimeoutError, RayError

from roost.config.ranks import format_ranks
from roost.errors import CallTimedOut, ConfigError
from roost.runtime.connect.connection import get
from roost.runtime.failures.failure import make_error
from roost.text import join_words, plural

if TYPE_CHECKING:
    from roost.runtime.groups.members import Members
    from roost.runtime.managers.context import JobContext

Ref = ray.ObjectRef[Any]

_GRACE_SECONDS = 1.0
"""How long to wait after the first failure for others of the same call: together they show what happened."""

_SLICE_SECONDS = 1.0

_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {"max": max, "min": min, "mean": statistics.fmean}
Reduction = Literal["max", "min", "mean"]


class OutcomeKind(StrEnum):
    """How a call ended in one worker."""

    VALUE = "value"
    EXCEPTION = "exception"
    TIMEOUT = "timeout"
    DEATH = "death"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a call ended in one worker: with a value, or with what went wrong."""

    rank: int
    kind: OutcomeKind
    value: Any = None
    error: Exception | None = None

    @property
    def is_ok(self) -> bool:
        """Whether there is a value."""
        return self.kind is OutcomeKind.VALUE


class CallResult:
    """What a call on a group returns without waiting: the workers may still be running.

    `wait()` and `await` return the values in rank order; iterating yields `(rank, value)` as workers finish.
    """

    def __init__(self, members: Members, method: str, ranks: Sequence[int], calls: Sequence[Ref | Future[Ref]]) -> None:
        """Take the call to each rank; to one that is being restarted it is sent in the future."""
        self._members = members
        self._method = method
        self._doing = f"in {method!r}"
        self._ranks = tuple(ranks)
        self._calls = list(calls)
        self._durations: dict[int, dict[str, float]] = {}

    def wait(self, timeout: float | None = None) -> list[Any]:
        """Return the values in rank order. Raises as soon as one worker fails; CallTimedOut names the late ranks."""
        seconds = self._begin(timeout)
        deadline = deadline_in(seconds)
        try:
            refs = self._send(deadline)
            with self._members.context.stop:
                replies = get(refs, seconds_until(deadline))
        except GetTimeoutError:
            if late := self._late():
                raise self._timed_out(seconds, late) from None
            # The last one answered in the meantime.
            return self.wait(0)
        except RayError:
            raise self._failed(deadline) from None
        return [self._open(rank, reply) for rank, reply in zip(self._ranks, replies, strict=True)]

    def __await__(self) -> Generator[Any, None, list[Any]]:
        return self._wait_async().__await__()

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Yield the values with their ranks, as workers finish."""
        return self.within(None)

    def within(self, seconds: float | None) -> Iterator[tuple[int, Any]]:
        """Iterate in the same way, and raise CallTimedOut if no worker finishes for so many seconds."""
        return self._iterate(self._begin(seconds))

    def _iterate(self, seconds: float | None) -> Iterator[tuple[int, Any]]:
        pending = list(self._ranks)
        deadline = deadline_in(seconds)
        while pending:
            try:
                refs = dict(zip(self._send(deadline), self._ranks, strict=True))
                ready = wait_for_one(self._members.context, [ref for ref in refs if refs[ref] in pending], deadline)
                with self._members.context.stop:
                    reply = get(ready, seconds_until(deadline))
            except GetTimeoutError:
                raise self._timed_out(seconds, pending) from None
            except RayError:
                raise self._failed() from None
            pending.remove(refs[ready])
            yield refs[ready], self._open(refs[ready], reply)
            deadline = deadline_in(seconds)

    def done(self) -> bool:
        """Whether every worker has finished, successfully or not."""
        self._begin(None)
        return not self._late()

    def outcomes(self, timeout: float | None = None) -> list[Outcome]:
        """Return how the call ended in each worker, in rank order, after at most `timeout`; never raises a failure."""
        seconds = self._begin(timeout)
        late = set(self._late(seconds))
        refs = self._refs()
        out = []
        for rank in self._ranks:
            if rank in late:
                out.append(Outcome(rank=rank, kind=OutcomeKind.TIMEOUT, error=self._timed_out(seconds, [rank])))
                continue
            try:
                out.append(Outcome(rank=rank, kind=OutcomeKind.VALUE, value=self._open(rank, ray.get(refs[rank]))))
            except RayError as error:
                failure = self._members.describe(error, rank)
                raised = make_error([failure], self._doing)
                out.append(Outcome(rank=rank, kind=OutcomeKind(failure.kind.value), error=raised))
        return out

    def consume_durations(self, reduction: Reduction | None = "max") -> dict[str, Any]:
        """Wait for the call and return seconds by tag, reduced over all ranks; with None by tag and rank. Only once."""
        if reduction is not None and reduction not in _REDUCTIONS:
            raise ConfigError(
                f"reduction is {reduction!r}", hint=f"it is {join_words([*_REDUCTIONS, None], last='or')}"
            )
        if len(self._durations) < len(self._ranks):
            # Includes the workers that succeeded where another failed.
            self.outcomes()
        by_tag: dict[str, dict[int, float]] = {}
        for rank in self._ranks:
            for tag, seconds in self._durations.get(rank, {}).items():
                by_tag.setdefault(tag, {})[rank] = seconds
        self._durations = {rank: {} for rank in self._ranks}
        if reduction is None:
            return by_tag
        return {tag: _REDUCTIONS[reduction](list(values.values())) for tag, values in by_tag.items()}

    def __repr__(self) -> str:
        return f"<CallResult of {self._method!r} on {plural(len(self._ranks), 'worker')} of {self._members.name!r}>"

    def _open(self, rank: int, reply: list[Any]) -> Any:
        value, durations = reply
        self._durations.setdefault(rank, durations)
        return value

    def _begin(self, timeout: float | None) -> float | None:
        """Check that the Cluster is open, and return the seconds to wait; None is without limit."""
        self._members.context.check_open()
        return check_seconds(timeout)

    def _late(self, seconds: float | None = 0.0) -> list[int]:
        """Wait at most some seconds, and return the ranks that have not answered."""
        deadline = deadline_in(seconds)
        with contextlib.suppress(GetTimeoutError):
            self._send(deadline)
        refs = self._refs()
        done = set(wait_for(self._members.context, list(refs.values()), len(refs), deadline))
        return [rank for rank in self._ranks if refs.get(rank) not in done]

    def _refs(self) -> dict[int, Ref]:
        """Return the call to each rank that it was sent to."""
        calls = zip(self._ranks, self._calls, strict=True)
        return {rank: call for rank, call in calls if not isinstance(call, Future)}

    def _send(self, deadline: float) -> list[Ref]:
        """Wait until the call was sent to the ranks that are being restarted; GetTimeoutError at the deadline."""
        unsent = [call for call in self._calls if isinstance(call, Future)]
        late = wait_for_futures(unsent, seconds_until(deadline)).not_done if unsent else ()
        self._calls = [call.result() if isinstance(call, Future) and call.done() else call for call in self._calls]
        if late:
            raise GetTimeoutError
        return list(self._refs().values())

    def _timed_out(self, seconds: float | None, late: Sequence[int]) -> CallTimedOut:
        hint = "the call goes on: wait() for it again, or look at their logs"
        return timed_out(self._members, self._method, seconds, late, len(self._ranks), hint)

    def _failed(self, deadline: float = math.inf) -> Exception:
        """Make the error for the caller, after a moment in which others may fail too."""
        grace = min(_GRACE_SECONDS, max(0.0, deadline - time.monotonic()))
        late = self._late(grace)
        ended = self._refs()
        failures = []
        for rank in ended.keys() - late:
            try:
                ray.get(ended[rank])
            except RayError as error:
                failures.append(self._members.describe(error, rank))
        return make_error(failures, self._doing, late)

    async def _wait_async(self) -> list[Any]:
        self._begin(None)
        if len(refs := self._refs()) < len(self._ranks):
            await asyncio.to_thread(self._send, math.inf)
            refs = self._refs()
        answers = [asyncio.wrap_future(ref.future()) for ref in refs.values()]
        for answer in answers:
            # Retrieve each exception, so that asyncio does not report it as never retrieved.
            answer.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        pending = set(answers)
        while pending and not any(answer.done() and answer.exception() for answer in answers):
            # After the head was given up, none of them ends.
            self._begin(None)
            _, pending = await asyncio.wait(pending, timeout=_SLICE_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
        if any(answer.done() and answer.exception() for answer in answers):
            raise await asyncio.to_thread(self._failed)
        return [self._open(rank, answer.result()) for rank, answer in zip(self._ranks, answers, strict=True)]


def deadline_in(seconds: float | None) -> float:
    """Return the deadline of `time.monotonic` in so many seconds; None is never."""
    return math.inf if seconds is None else time.monotonic() + seconds


def seconds_until(deadline: float) -> float | None:
    """Return the seconds that are left; None is without limit."""
    return None if deadline == math.inf else max(0.0, deadline - time.monotonic())


def wait_for(context: JobContext, refs: Sequence[Ref], count: int, deadline: float) -> list[Ref]:
    """Wait until so many of some calls have ended; return those that have.

    In slices: in another thread than the main one, Ray's wait does not return after the head was given up. What the
    calls return is fetched later, because the end of a slice breaks a transfer off.
    """
    ready: list[Ref] = []
    while refs:
        context.check_open()
        seconds = min(_SLICE_SECONDS, max(0.0, deadline - time.monotonic()))
        with context.stop:
            ready, _ = ray.wait(list(refs), num_returns=count, timeout=seconds, fetch_local=False)
        if len(ready) >= count or time.monotonic() >= deadline:
            break
    return ready


def wait_for_one(context: JobContext, refs: Sequence[Ref], deadline: float) -> Ref:
    """Return the first of some calls that ends; GetTimeoutError at the deadline."""
    ready = wait_for(context, refs, 1, deadline)
    if not ready:
        raise GetTimeoutError
    return ready[0]


def check_seconds(timeout: float | None) -> float | None:
    """Return the seconds to wait, where None is without limit; ConfigError if it is not a number."""
    if timeout is None or timeout == math.inf:
        return None
    if not isinstance(timeout, int | float) or math.isnan(timeout):
        raise ConfigError(f"timeout is {timeout!r}: it is a number of seconds, or None")
    return max(0.0, float(timeout))


def timed_out(
    members: Members, method: str, seconds: float | None, late: Sequence[int], called: int, hint: str
) -> CallTimedOut:
    """Make the error that names the late ranks, and where they are."""
    places = join_words(list(dict.fromkeys(members.identity(rank).node for rank in late)), most=4)
    return CallTimedOut(
        f"{method!r} of {members.name!r} has not answered in {seconds or 0:g} s from "
        f"{plural(len(late), 'rank')} of {called}: {format_ranks(late)} ({places})",
        hint=hint,
    )
