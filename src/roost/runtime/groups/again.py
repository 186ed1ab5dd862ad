"""Calls that outlive a rank: made again on a rank that died in them, once it has been restarted."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from typing import Any

from roost.runtime.groups.result import CallResult, OutcomeKind


def keep_calling(call: Callable[[int], CallResult[Any]], tries: Mapping[int, int]) -> Future[list[Any]]:
    """Call each rank, as often as `tries` says while its process dies in the call; the future has the values by rank.

    The first other exception, or the death of a rank that has no tries left, is that of the future.
    """
    found: Future[list[Any]] = Future()
    # It runs from the beginning, and nothing could be cancelled.
    found.set_running_or_notify_cancel()
    values: dict[int, Any] = {}

    def keep(rank: int) -> None:
        # Another rank may have failed first.
        with contextlib.suppress(InvalidStateError):
            try:
                for left in reversed(range(tries[rank])):
                    # A call to a rank that is being restarted waits for its new process.
                    [outcome] = call(rank).outcomes()
                    if outcome.kind is not OutcomeKind.DEATH or not left:
                        break
                if outcome.error is not None:
                    found.set_exception(outcome.error)
                    return
                values[rank] = outcome.value
                if len(values) == len(tries):
                    found.set_result([values[each] for each in tries])
            except Exception as error:
                found.set_exception(error)

    for rank in tries:
        # Not those of a pool, which the interpreter joins before Roost ends what they wait for.
        threading.Thread(target=keep, args=(rank,), name=f"roost-again-{rank}", daemon=True).start()
    return found
