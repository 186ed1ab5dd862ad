"""Launches several groups at the same time: all of them are there in the end, or none."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from roost.errors import RoostError
from roost.runtime.groups.members import CLOSE_SECONDS
from roost.runtime.managers.control import JobControl

log: logging.Logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.1
Group = TypeVar("Group")


def launch_together(context: JobControl, launches: Mapping[str, Callable[[], Group]]) -> dict[str, Group]:
    """Make all launches at the same time; raise the exception of the first that fails, after all of them have ended.

    So does Ctrl-C. The job must have no other open groups: all are closed then.
    """
    if not launches:
        return {}
    pool = ThreadPoolExecutor(len(launches), thread_name_prefix="roost-launch")
    started = {name: pool.submit(launch) for name, launch in launches.items()}
    try:
        wait(started.values(), return_when=FIRST_EXCEPTION)
        failed = {name: future for name, future in started.items() if future.done() and future.exception()}
        first = next(iter(failed), None)
        for name, future in failed.items():
            if name != first:
                log.error("%s failed as well: %s", name, future.exception())
        return {name: future.result() for name, future in started.items() if first in (None, name)}
    except BaseException:
        _end(context, list(started.values()))
        raise
    finally:
        pool.shutdown(wait=False)


def _end(context: JobControl, launches: list[Future[Group]]) -> None:
    """Close every group, also those that are still being launched, which ends their launches."""
    deadline = time.monotonic() + CLOSE_SECONDS
    while time.monotonic() < deadline:
        is_over = all(launch.done() for launch in launches)
        for close in reversed(list(context.open_groups.values())):
            # What cannot be ended now ends with the Cluster.
            with contextlib.suppress(RoostError):
                close(max(_LOOK_SECONDS, deadline - time.monotonic()))
        if is_over:
            return
        wait(launches, timeout=_LOOK_SECONDS)
