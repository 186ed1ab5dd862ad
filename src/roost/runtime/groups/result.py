"""The result of a call on a group: wait for it, await it, iterate over the answers, or inspect each outcome."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import operator
import re
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, Literal, SupportsIndex, TypeVar, overload

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayError, RayTaskError

from roost.config.ranks import format_ranks
from roost.deadline import NEVER, Deadline
from roost.errors import CallTimedOut, ClusterError, ConfigError, WorkerDied
from roost.runtime.connect.calls import get
from roost.runtime.events.waits import waiting
from roost.runtime.failures.failure import (
    DEATHS,
    Failure,
    FailureKind,
    RemoteFailure,
    asked_at,
    failures_in,
    make_error,
)
from roost.runtime.failures.meanwhile import with_meanwhile
from roost.runtime.limits import GRACE_SECONDS, SLICE_SECONDS, TRANSFER_SECONDS
from roost.runtime.process.identity import WorkerIdentity
from roost.runtime.process.packing import Passable
from roost.text import join_words, plural

if TYPE_CHECKING:
    from roost.runtime.groups.members import Members
    from roost.runtime.managers.control import JobControl

Ref = ray.ObjectRef[Any]
Reply = Sequence[Ref]
"""References to the report of a call in a worker and to the value it returns."""

_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {"max": max, "min": min, "mean": statistics.fmean}
Reduction = Literal["max", "min", "mean"]
Value = TypeVar("Value")
"""The type that the method returns in each worker."""
_NAME = re.compile(r"^\s*name: (\S+)$", re.MULTILINE)
_CALL = re.compile(r"ray::\S+\.(\w+)\(\)\S* \(pid=(\d+),")


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassedCall:
    """A call whose result was passed on. It does not hold the values: Ray frees them once they have arrived."""

    group: str
    method: str
    workers: tuple[WorkerIdentity, ...]
    reports: tuple[Ref, ...]
    """By worker: a small object that arrives with the value, and says whether the call failed."""
    value_ids: tuple[str, ...]

    def failures(self, context: JobControl) -> list[Failure]:
        """Return the failures of the call, as far as its workers have ended."""
        found = []
        arrived = look_at(self.reports)
        for worker, ref in zip(self.workers, self.reports, strict=True):
            try:
                error = ray.get(ref) if ref in arrived else None
            except RayError as raised:
                error = raised
            if isinstance(error, Exception):
                failure = lost_value(context, error, ()) or context.describe(worker, error)
                is_own = not failure.method and failure.address == worker.address
                found.append(replace(failure, method=self.method) if is_own else failure)
        return found


class CallResult(Passable, Generic[Value]):
    """The result of a call on a group, returned without waiting: the workers may still be running.

    `wait()` and `await` return the values in rank order; iterating yields `(rank, value)` as workers finish. As an
    argument of another call it arrives there as the list of the values, which do not pass through this process;
    `result[0]` arrives as one value, and `result[0:4]` as some of them.
    """

    def __init__(
        self,
        members: Members,
        method: str,
        ranks: Sequence[int],
        calls: Sequence[Reply | Future[Reply]],
        sources: Sequence[Sequence[PassedCall]],
        asked: str | None = None,
    ) -> None:
        """Take the call to each rank, and by rank what makes its arguments; `asked` is the line that asked for it.

        The call to a rank that is being restarted is sent in the future.
        """
        self._asked = asked_at() if asked is None else asked
        self._members = members
        self._method = method
        self._ranks = tuple(ranks)
        self._calls = list(calls)
        self._sources_by_rank = tuple(sources)
        self._sources = tuple(dict.fromkeys(source for some in sources for source in some))
        # What arrives when the calls end that make the arguments, each once.
        self._source_reports = list(dict.fromkeys(ref for source in self._sources for ref in source.reports))
        self._has_durations = True

    @property
    def refs(self) -> list[Ref]:
        """Ray's references to the values, in rank order, for code that uses Ray itself."""
        return [value for _, value in self._send(NEVER)]

    @functools.cached_property
    def _source(self) -> PassedCall:
        replies = self._send(NEVER)
        return PassedCall(
            group=self._members.name,
            method=self._method,
            workers=tuple(map(self._members.identity, self._ranks)),
            reports=tuple(report for report, _ in replies),
            value_ids=tuple(value.hex() for _, value in replies),
        )

    def __len__(self) -> int:
        return len(self._ranks)

    @overload
    def __getitem__(self, which: slice) -> CallResult[Value]: ...
    @overload
    def __getitem__(self, which: SupportsIndex) -> RankResult[Value]: ...
    def __getitem__(self, which: SupportsIndex | slice) -> CallResult[Value] | RankResult[Value]:
        """Return the result of one rank, or of several by slice."""
        if isinstance(which, slice):
            kept = self._ranks[which], self._calls[which], self._sources_by_rank[which]
            return CallResult(self._members, self._method, *kept, self._asked)
        index = operator.index(which)
        if not -len(self._ranks) <= index < len(self._ranks):
            raise IndexError(f"{self!r} has no rank {index} here: it has {format_ranks(self._ranks) or 'none'}")
        index %= len(self._ranks)
        return RankResult(self[index : index + 1])

    def wait(self, timeout: float | None = None) -> list[Value]:
        """Return the values in rank order. Raises as soon as one worker fails; CallTimedOut names the late ranks."""
        seconds = self._begin(timeout)
        # When all have answered in time, large values may still be on their way from other nodes.
        for left in (seconds, TRANSFER_SECONDS):
            try:
                return self._wait(Deadline.after(left))
            except GetTimeoutError as error:
                if failures_in(error):
                    raise
            if late := self._late():
                break
        raise self._timed_out(seconds, late or self._ranks)

    def _wait(self, deadline: Deadline) -> list[Value]:
        """Return the values; GetTimeoutError at the deadline, or one that a worker raised."""
        try:
            with self._waiting(), self._members.context.stop:
                replies = self._send(deadline)
                if self._source_reports:
                    self._wait_for_reports([*self._source_reports, *(report for report, _ in replies)], deadline)
                found = get([value for _, value in replies], deadline.timeout)
        except RayError as error:
            if isinstance(error, GetTimeoutError) and not failures_in(error):
                raise
            raise self._failed(deadline) from None
        return list(found)

    def _wait_for_reports(self, reports: Sequence[Ref], deadline: Deadline) -> None:
        """Wait until calls have ended; RayError as soon as one of them has failed.

        Those that make the arguments are among them: Ray starts this call only after all of them, also if one failed.
        """
        pending = set(reports)
        while pending:
            wait_for(self._members.context, list(pending), 1, deadline)
            arrived = look_at(list(pending))
            if any(isinstance(report, RemoteFailure) for report in get(list(arrived), deadline.timeout)):
                raise RayError("a call has failed")
            pending -= arrived

    def one(self, timeout: float | None = None) -> Value:
        """Return the value of the only worker that was called: `group[0].train(batch).one()`."""
        if len(self._ranks) != 1:
            raise ConfigError(
                f"one() is for a call to one worker, and {self._method!r} was called on {len(self._ranks)}",
                hint=f"choose one: {self._members.name}[0], or take them all: wait()",
            )
        return self.wait(timeout)[0]

    async def async_wait(self, timeout: float | None = None) -> list[Value]:
        """Do the same in a coroutine, as `await` does without a timeout."""
        seconds = self._begin(timeout)
        try:
            async with asyncio.timeout(seconds) as scope:
                return await self._wait_async()
        except TimeoutError:
            # A worker may have raised one itself.
            if not scope.expired():
                raise
        if late := self._late():
            raise self._timed_out(seconds, late)
        return await self._wait_async()

    def __await__(self) -> Generator[Any, None, list[Value]]:
        return self._wait_async().__await__()

    def __iter__(self) -> Iterator[tuple[int, Value]]:
        """Yield the values with their ranks, as workers finish."""
        return self.within(None)

    def within(self, seconds: float | None) -> Iterator[tuple[int, Value]]:
        """Iterate in the same way, and raise CallTimedOut if no worker finishes for so many seconds."""
        return self._iterate(self._begin(seconds))

    def _iterate(self, seconds: float | None) -> Iterator[tuple[int, Value]]:
        pending = list(self._ranks)
        # Waited for as well: Ray starts this call only after all of them, even if one has failed.
        sources = dict.fromkeys(self._source_reports)
        deadline = Deadline.after(seconds)
        while pending:
            try:
                ranks = {value: rank for rank, (_, value) in zip(self._ranks, self._send(deadline), strict=True)}
                wanted = [*sources, *(ref for ref, rank in ranks.items() if rank in pending)]
                with self._waiting(), self._members.context.stop:
                    (ready,) = wait_for(self._members.context, wanted, 1, deadline)
                    value = get(ready, deadline.timeout)
            except RayError as error:
                if isinstance(error, GetTimeoutError) and not failures_in(error):
                    raise self._timed_out(seconds, pending) from None
                raise self._failed() from None
            if ready in sources:
                if isinstance(value, RemoteFailure):
                    raise self._failed()
                del sources[ready]
                continue
            pending.remove(ranks[ready])
            yield ranks[ready], value
            deadline = Deadline.after(seconds)

    def done(self) -> bool:
        """Whether every worker has finished, successfully or not."""
        self._begin(None)
        return not self._late()

    def outcomes(self, timeout: float | None = None) -> list[Outcome]:
        """Return how the call ended in each worker, in rank order, after at most `timeout`; never raises a failure."""
        seconds = self._begin(timeout)
        with self._waiting():
            late = set(self._late(seconds))
        sent, unsendable = self._sent(), self._unsendable()
        out = []
        for rank, sources in zip(self._ranks, self._sources_by_rank, strict=True):
            if (refusal := unsendable.get(rank)) is not None:
                kind = OutcomeKind.DEATH if isinstance(refusal, WorkerDied) else OutcomeKind.EXCEPTION
                out.append(Outcome(rank=rank, kind=kind, error=refusal))
                continue
            if rank in late:
                out.append(Outcome(rank=rank, kind=OutcomeKind.TIMEOUT, error=self._timed_out(seconds, [rank])))
                continue
            value, failure = self._answer(rank, sent[rank], sources)
            if failure is None:
                out.append(Outcome(rank=rank, kind=OutcomeKind.VALUE, value=value))
            else:
                self._members.context.failures.saw([failure])
                raised = make_error([failure], f"in {self._method!r}", asked=self._asked)
                # A worker whose argument failed is alive itself.
                kind = OutcomeKind.EXCEPTION if failure.passed_to else OutcomeKind(failure.kind.value)
                out.append(Outcome(rank=rank, kind=kind, error=raised))
        look_at([*(ref for reply in sent.values() for ref in reply), *self._source_reports])
        return out

    def _answer(self, rank: int, reply: Reply, sources: Sequence[PassedCall]) -> tuple[Any, Failure | None]:
        """Return the value of a rank that has answered, or its failure."""
        report, value = reply
        try:
            found = ray.get(report)
            if not isinstance(found, RemoteFailure):
                return ray.get(value), None
        except RayError as error:
            found = error
        return None, self._members.describe(found, rank, self._method, sources)

    def consume_durations(self, reduction_type: Reduction | None = "max", return_per_rank: bool = False) -> Any:
        """Wait for the call and return seconds by tag, reduced over all ranks; with None by tag and rank. Only once.

        With `return_per_rank`, return them and a list of the seconds by tag of each rank.
        """
        if reduction_type is not None and reduction_type not in _REDUCTIONS:
            raise ConfigError(
                f"reduction_type is {reduction_type!r}", hint=f"it is {join_words([*_REDUCTIONS, None], last='or')}"
            )
        self._begin(None)
        by_tag: dict[str, dict[int, float]] = {}
        by_rank: list[dict[str, float]] = [{} for _ in self._ranks]
        replies = zip(self._ranks, self._send(NEVER), by_rank, strict=True) if self._has_durations else ()
        for rank, (report, _), own in replies:
            # Also of the workers that succeeded where another failed.
            with contextlib.suppress(RayError), self._waiting(), self._members.context.stop:
                found = get(report)
                own.update({} if isinstance(found, RemoteFailure) else found)
            for tag, seconds in own.items():
                by_tag.setdefault(tag, {})[rank] = seconds
        self._has_durations = False
        reduced: dict[str, Any] = dict(by_tag)
        if reduction_type is not None:
            reduced = {tag: _REDUCTIONS[reduction_type](list(values.values())) for tag, values in by_tag.items()}
        return (reduced, by_rank) if return_per_rank else reduced

    def consume_duration(self, reduction_type: Reduction | None = "max") -> Any:
        """Do the same for the method alone: seconds, or with None seconds by rank."""
        found = self.consume_durations(reduction_type)
        if self._method not in found:
            raise ConfigError(
                f"there is no duration of {self._method!r}",
                hint="durations are given once, and only for workers where the call succeeded",
            )
        return found[self._method]

    def __repr__(self) -> str:
        return f"<CallResult of {self._method!r} on {plural(len(self._ranks), 'worker')} of {self._members.name!r}>"

    def _waiting(self) -> waiting:
        return waiting(self._waits_for, details=self._details)

    def _details(self) -> tuple[str, list[str]]:
        """Say what is called, from where, behind which other call, and who has not answered yet."""
        late = self._late()
        before = self._members.before(self, late)
        behind = f", behind {before._method!r}{before._asked and f', {before._asked}'}" if before is not None else ""
        what = f"{self._method!r} of {self._members.name!r}{self._asked and f', {self._asked}'}{behind}"
        if waits_for := self._late_sources():
            what += f", whose arguments come from {waits_for}"
        return f"{what}, not answered by", [self._members.identity(rank).address for rank in late]

    def _waits_for(self) -> str:
        who = f"{self._members.name}:{self._ranks[0]}" if len(self._ranks) == 1 else self._members.name
        return f"{who}, {self._method}"

    def _begin(self, timeout: float | None) -> float | None:
        """Check that the Cluster is open, and return the seconds to wait; None is without limit."""
        self._members.context.check_open()
        return check_seconds(timeout)

    def _late(self, seconds: float | None = 0.0) -> list[int]:
        """Wait at most some seconds, and return the ranks that have not answered."""
        deadline = Deadline.after(seconds)
        # Who waits for the values gets what sending raised.
        with contextlib.suppress(Exception):
            self._send(deadline)
        unsendable = self._unsendable()
        reports = {rank: report for rank, (report, _) in self._sent().items()}
        done = set(wait_for(self._members.context, list(reports.values()), len(reports), deadline, must=False))
        return [rank for rank in self._ranks if rank not in unsendable and reports.get(rank) not in done]

    def _sent(self) -> dict[int, Reply]:
        """Return the references to report and value of each rank that the call was sent to."""
        calls = zip(self._ranks, self._calls, strict=True)
        return {rank: call for rank, call in calls if not isinstance(call, Future)}

    def _send(self, deadline: Deadline) -> list[Reply]:
        """Wait until the call was sent to the ranks that are being restarted; GetTimeoutError at the deadline."""
        unsent = [call for call in self._calls if isinstance(call, Future)]
        if unsent:
            late = wait_for_futures(unsent, deadline.timeout).not_done
            self._calls = [
                call.result() if isinstance(call, Future) and call.done() and call.exception() is None else call
                for call in self._calls
            ]
            for refusal in self._unsendable().values():
                raise refusal
            if late:
                raise GetTimeoutError
        return list(self._sent().values())

    def _unsendable(self) -> dict[int, Exception]:
        """Return why the call could not be sent to a rank, as when that was not restarted after all."""
        ended = {
            rank: call.exception()
            for rank, call in zip(self._ranks, self._calls, strict=True)
            if isinstance(call, Future) and call.done()
        }
        return {rank: error for rank, error in ended.items() if isinstance(error, Exception)}

    def _timed_out(self, seconds: float | None, late: Sequence[int]) -> CallTimedOut:
        hint = "the call goes on: wait() for it again, or look at their logs"
        if waits_for := self._late_sources():
            hint = f"it waits for its arguments, from {waits_for}; {hint}"
        return timed_out(self._members, self._method, seconds, late, len(self._ranks), hint, self._asked)

    def _late_sources(self) -> str:
        """Say which workers have not made its arguments yet; empty if all have."""
        arrived = look_at(self._source_reports)
        late: dict[str, set[int]] = {}
        for source in self._sources:
            ranks = {who.rank for who, ref in zip(source.workers, source.reports, strict=True) if ref not in arrived}
            if ranks:
                late.setdefault(f"{source.method!r} of {source.group!r}", set()).update(ranks)
        return join_words([f"{call} on rank {format_ranks(sorted(ranks))}" for call, ranks in late.items()], most=4)

    def _failed(self, deadline: Deadline = NEVER) -> Exception:
        """Make the error for the caller, after a moment in which others may fail too."""
        grace = min(GRACE_SECONDS, deadline.left)
        late = self._late(grace)
        failed = {source: source.failures(self._members.context) for source in self._sources}
        failures = [self._members.passed_on(item, self._method) for found in failed.values() for item in found]
        sent = self._sent()
        for rank, sources in zip(self._ranks, self._sources_by_rank, strict=True):
            # Ray does not start a call whose argument failed.
            if rank in late or rank not in sent or any(failed[source] for source in sources):
                continue
            if (failure := self._answer(rank, sent[rank], sources)[1]) is not None:
                failures.append(failure)
        look_at([ref for reply in sent.values() for ref in reply])
        if not failures:
            # It was not sent to a rank, since that was not restarted after all.
            return next(iter(self._unsendable().values()), None) or ClusterError(f"{self._method!r} was not sent")
        self._members.context.failures.saw(failures)
        return with_meanwhile(make_error(failures, f"in {self._method!r}", late, self._asked))

    async def _wait_async(self) -> list[Value]:
        self._begin(None)
        if len(self._sent()) < len(self._ranks):
            await asyncio.to_thread(self._send, NEVER)
        refs = self.refs
        answers = [asyncio.wrap_future(ref.future()) for ref in [*refs, *self._source_reports]]
        of_sources = answers[len(refs) :]
        # Ray starts this call only after all of its sources: the failure of one must not wait for the others.
        until = asyncio.FIRST_COMPLETED if of_sources else asyncio.FIRST_EXCEPTION
        for answer in answers:
            # Retrieve each exception, so that asyncio does not report it as never retrieved.
            answer.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        pending, failed = set(answers), False
        with self._waiting():
            while pending and not failed:
                # After the head was given up, none of them ends.
                self._begin(None)
                done, pending = await asyncio.wait(pending, timeout=SLICE_SECONDS, return_when=until)
                failed = any(
                    answer.exception() or (answer in of_sources and isinstance(answer.result(), RemoteFailure))
                    for answer in done
                )
        if failed:
            raise await asyncio.to_thread(self._failed)
        return [answer.result() for answer in answers[: len(refs)]]


class RankResult(Passable, Generic[Value]):
    """The result of one rank, from `result[0]`. As an argument of another call it arrives as the value."""

    is_single = True

    def __init__(self, result: CallResult[Any]) -> None:
        self._result = result

    @property
    def refs(self) -> list[ray.ObjectRef[Any]]:
        """Ray's reference to the value, in a list."""
        return self._result.refs

    @property
    def _source(self) -> PassedCall:
        """The call that makes the result, as a call that takes it as an argument has to know it."""
        return self._result._source

    def wait(self, timeout: float | None = None) -> Any:
        """Return the value; raises the failure of the rank, and CallTimedOut if it is late."""
        return self._result.wait(timeout)[0]

    async def async_wait(self, timeout: float | None = None) -> Any:
        """Do the same in a coroutine."""
        return (await self._result.async_wait(timeout))[0]

    def __await__(self) -> Generator[Any, None, Any]:
        values = yield from self._result.__await__()
        return values[0]

    def done(self) -> bool:
        """Whether the worker has finished, successfully or not."""
        return self._result.done()

    def __repr__(self) -> str:
        (rank,) = self._result._ranks
        return f"<RankResult of {self._result._method!r} in {self._result._members.identity(rank).address}>"


def look_at(refs: Sequence[Ref]) -> set[Ref]:
    """Return which of these have arrived. Ray logs errors that were never looked at."""
    return set(ray.wait(list(refs), num_returns=len(refs), timeout=0)[0]) if refs else set()


def lost_value(context: JobControl, error: BaseException, sources: Sequence[PassedCall]) -> Failure | None:
    """Return the failure of a worker whose value a call needed, if Ray did not start the call because of its loss."""
    cause = getattr(error, "cause", None)
    if isinstance(error, RayTaskError) and "input arguments for this task could not be computed" in str(error):
        # A value that cannot be sent, which its call did not report: Ray's text alone says whose it is.
        for method, pid in _CALL.findall(str(error))[-1:]:
            makers = {who.address: who for source in sources if source.method == method for who in source.workers}
            for record in context.worker_manager.get_workers(list(makers)) if makers else ():
                if record.pid == int(pid):
                    return replace(context.describe(makers[record.address], error), method=method)
    if not isinstance(error, RayTaskError) or not isinstance(cause, (*DEATHS, ObjectLostError)):
        return None
    lost_id = getattr(cause, "object_ref_hex", None)
    for source in sources:
        for worker, value_id in zip(source.workers, source.value_ids, strict=True):
            if value_id == lost_id:
                return Failure(
                    kind=FailureKind.EXCEPTION,
                    address=worker.address,
                    rank=worker.rank,
                    node=worker.node,
                    what="its result is lost with the node that kept it",
                    method=source.method,
                    when=time.time(),
                )
    # Several calls back: only its name is known here.
    with contextlib.suppress(Exception):
        # Ray names the actor whose death it reports.
        group, _, rank = _NAME.findall(str(cause))[0].rpartition(":")
        return context.describe(context.worker_manager.get_group(group).identities[int(rank)], cause)
    return None


def wait_for(
    context: JobControl, refs: Sequence[Ref], count: int, deadline: Deadline, *, must: bool = True
) -> list[Ref]:
    """Wait until so many of some calls have ended, and return them; at the deadline GetTimeoutError, or fewer.

    In slices: in another thread than the main one, Ray's wait does not return after the head was given up. What the
    calls return is fetched later, because the end of a slice breaks a transfer off.
    """
    ready: list[Ref] = []
    while refs:
        context.check_open()
        seconds = min(SLICE_SECONDS, deadline.left)
        with context.stop:
            ready, _ = ray.wait(list(refs), num_returns=count, timeout=seconds, fetch_local=False)
        if len(ready) >= count:
            break
        if deadline.is_over:
            if must:
                raise GetTimeoutError
            break
    return ready


def check_seconds(timeout: float | None) -> float | None:
    """Return the seconds to wait, where None is without limit; ConfigError if it is not a number."""
    if timeout is None or timeout == math.inf:
        return None
    if not isinstance(timeout, int | float) or math.isnan(timeout):
        raise ConfigError(f"timeout is {timeout!r}: it is a number of seconds, or None")
    return max(0.0, float(timeout))


def timed_out(
    members: Members, method: str, seconds: float | None, late: Sequence[int], called: int, hint: str, asked: str
) -> CallTimedOut:
    """Make the error that names the late ranks, where they are, and the line that asked."""
    places = join_words(list(dict.fromkeys(members.identity(rank).node for rank in late)), most=4)
    error = CallTimedOut(
        f"{method!r} of {members.name!r} has not answered in {seconds or 0:g} s from "
        f"{plural(len(late), 'rank')} of {called}: {format_ranks(late)} ({places}){asked and f', {asked}'}",
        hint=hint,
    )
    return with_meanwhile(error)
