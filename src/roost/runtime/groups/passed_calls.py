"""The calls whose results are arguments of another call: which of them are late, and which have failed."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayError, RayTaskError

from roost.config.ranks import format_ranks
from roost.runtime.failures.failure import DEATHS, Failure, FailureKind
from roost.runtime.managers.control import JobControl
from roost.runtime.process.identity import WorkerIdentity
from roost.text import join_words

_NAME = re.compile(r"^\s*name: (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassedCall:
    """A call whose result was passed on. It does not hold the values: Ray frees them once they have arrived."""

    group: str
    method: str
    workers: tuple[WorkerIdentity, ...]
    timings: tuple[ray.ObjectRef[Any], ...]
    """By worker: what it timed, a small object that arrives with the value, and fails as the value does."""
    value_ids: tuple[str, ...]


def timings_of(sources: Iterable[PassedCall]) -> list[ray.ObjectRef[Any]]:
    """Return what arrives when the calls end, each once."""
    return list(dict.fromkeys(ref for source in sources for ref in source.timings))


def look_at(refs: Sequence[ray.ObjectRef[Any]]) -> set[ray.ObjectRef[Any]]:
    """Return which of these have arrived. Ray logs errors that were never looked at."""
    return set(ray.wait(list(refs), num_returns=len(refs), timeout=0)[0]) if refs else set()


def late_sources(sources: Sequence[PassedCall]) -> str:
    """Say which workers have not made their arguments yet; empty if all have."""
    arrived = look_at(timings_of(sources))
    late: dict[str, set[int]] = {}
    for source in sources:
        ranks = {who.rank for who, ref in zip(source.workers, source.timings, strict=True) if ref not in arrived}
        if ranks:
            late.setdefault(f"{source.method!r} of {source.group!r}", set()).update(ranks)
    return join_words([f"{call} on rank {format_ranks(sorted(ranks))}" for call, ranks in late.items()], most=4)


def failures_of(context: JobControl, source: PassedCall) -> Iterator[Failure]:
    """Yield the failures of a call whose result was passed on, as far as its workers have ended."""
    arrived = look_at(source.timings)
    for worker, ref in zip(source.workers, source.timings, strict=True):
        try:
            _ = ref in arrived and ray.get(ref)
        except RayError as error:
            found = lost_value(context, error, ()) or context.describe(worker, error)
            yield found if found.method or found.address != worker.address else replace(found, method=source.method)


def lost_value(context: JobControl, error: BaseException, sources: Sequence[PassedCall]) -> Failure | None:
    """Return the failure of a worker whose value a call needed, if Ray did not start the call because of its loss."""
    cause = getattr(error, "cause", None)
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
