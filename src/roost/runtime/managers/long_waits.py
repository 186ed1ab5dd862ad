"""The one place in a driver that says what it waits for, when that takes long."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence

from roost.errors import ClusterError
from roost.runtime.connect.stop import Stop
from roost.runtime.events.emitter import emitter
from roost.runtime.events.waits import waiting
from roost.runtime.limits import (
    HANG_SECONDS,
    LONG_WAIT_SECONDS,
    LONG_WAITS_EVERY_SECONDS,
    STOP_WAIT_SECONDS,
    WATCH_STOP_SECONDS,
)
from roost.runtime.managers.context import JobContext
from roost.runtime.runs.console import Console
from roost.runtime.runs.recorder import Recorder
from roost.text import join_words

log: logging.Logger = logging.getLogger(__name__)

_MOST_WORKERS = 4
_TIMES = (1, 2, 4, 10, 20)
"""When a wait is said, in multiples of the first time; then every twenty."""


class LongWaits:
    """A thread that looks at the waits of this process: a long one is said on the console, in events and record."""

    def __init__(self, context: JobContext, console: Console, recorder: Recorder, stop: Stop) -> None:
        self._context = context
        self._console = console
        self._recorder = recorder
        self._stop = stop
        self._due: dict[waiting, float] = {}
        """By wait: after how many seconds it is said next."""
        self._said: dict[waiting, str] = {}
        """The last line about each wait that goes on, the newest last; the newest is in the record."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="roost-waits", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        waiting.watched = {}
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        waiting.watched = None
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join(timeout=WATCH_STOP_SECONDS)
        if self._said:
            self._recorder.note_long_wait("")

    def _run(self) -> None:
        while not self._stopped.wait(LONG_WAITS_EVERY_SECONDS):
            try:
                self._look()
            except Exception as error:
                log.debug("a wait could not be described: %s", error)

    def _look(self) -> None:
        under_way = list((waiting.watched or {}).values())
        self._due = {wait: due for wait, due in self._due.items() if wait in under_way}
        said = {wait: text for wait, text in self._said.items() if wait in under_way}
        if said.keys() != self._said.keys():
            self._said = said
            self._recorder.note_long_wait(next(reversed(said.values()), ""))
        for wait in under_way:
            seconds = time.perf_counter() - wait.started
            moments = [LONG_WAIT_SECONDS * times for times in _TIMES]
            if self._stop.hooks_began and wait.started >= self._stop.hooks_began:
                # A caller of `stop` waits for it now.
                moments.insert(0, STOP_WAIT_SECONDS)
            due = self._due.get(wait, moments[0])
            if seconds < due:
                continue
            self._due[wait] = _next_moment(moments, seconds)
            self._say(wait, seconds)

    def _say(self, wait: waiting, seconds: float) -> None:
        what: str = wait.words()
        addresses: Sequence[str] = ()
        with contextlib.suppress(Exception):
            what, addresses = wait.details()
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
        who = self._describe(addresses)
        text = f"{seconds:.0f} s, since {since}: {' '.join(filter(None, (what, who)))}"
        self._said.pop(wait, None)
        self._said[wait] = text
        self._recorder.note_long_wait(text)
        emitter.note("waits", "driver", text)
        see = f"; `roost stack {self._context.run_dir.id} {addresses[0]}` shows what it does" if addresses else ""
        self._console.line(f"waiting for {text}{see}")
        self._context.failures.look()
        for line in self._context.failures.words():
            self._console.line(f"  {line}")

    def _describe(self, addresses: Sequence[str]) -> str:
        """Say where these workers are, and what their processes are."""
        known = {}
        with contextlib.suppress(ClusterError):
            found = self._context.worker_manager.within(HANG_SECONDS).get_workers(addresses[:_MOST_WORKERS])
            known = {item.address: item for item in found}
        words = []
        for address in addresses:
            if item := known.get(address):
                pid = f", pid {item.pid}" if item.pid else ""
                address = f"{address} on {self._context.nodes[item.node_rank]}{pid}"
            words.append(address)
        return join_words(words, most=_MOST_WORKERS)


def _next_moment(moments: Sequence[float], seconds: float) -> float:
    """Return after how many seconds a wait is said again that was said now.

    >>> _next_moment((30.0, 60.0, 600.0), 31.0), _next_moment((30.0, 60.0, 600.0), 700.0)
    (60.0, 1200.0)
    """
    later = [moment for moment in moments if moment > seconds]
    return later[0] if later else (seconds // moments[-1] + 1) * moments[-1]
