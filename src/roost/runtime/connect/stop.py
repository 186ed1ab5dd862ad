"""SIGTERM, by which Slurm and Kubernetes end a job, ends a driver as Ctrl-C does: `with` and `finally` blocks run."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from roost.runtime.connect.head import check_not_lost
from roost.runtime.limits import STOP_GRACE_SECONDS

log: logging.Logger = logging.getLogger(__name__)


_EXIT_CODE = 128 + signal.SIGTERM
"""As a shell reports a process that the signal ended."""


class Stop:
    """Whether this driver was asked to stop, and what to call then, before anything of the job is ended."""

    def __init__(self, note_signal: Callable[[str], object]) -> None:
        """Take a function that gets the name of the signal."""
        self._note_signal = note_signal
        self._hooks: list[tuple[Callable[[], object], float]] = []
        self._pid = os.getpid()
        self._is_asked = False
        self.hooks_began: float = 0.0
        """When the hooks were called first, on the clock of `time.perf_counter`; 0 if they were not."""

    def add(self, hook: Callable[[], object], seconds: float) -> None:
        """Call a function that may take some seconds before anything is ended."""
        self._hooks.append((hook, seconds))

    def __enter__(self) -> None:
        """Wait for workers inside: SIGTERM ends that with its own exit code, and a head that is gone with ClusterError.

        Ray raises a SystemExit of its own in both cases.
        """

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, SystemExit):
            if not self._is_asked:
                check_not_lost()
            else:
                error.code = _EXIT_CODE

    def run_hooks(self, error: BaseException | None = None) -> None:
        """Call each hook once, if SIGTERM or Ctrl-C ends this process; `error` is what ends it, if that is known."""
        error = error or sys.exception()
        if self._is_asked and isinstance(error, SystemExit):
            error.code = _EXIT_CODE
        if self._is_asked or isinstance(error, KeyboardInterrupt):
            while self._hooks:
                self.hooks_began = self.hooks_began or time.perf_counter()
                hook, _ = self._hooks.pop(0)
                try:
                    hook()
                except Exception:
                    log.exception("a function that on_stop was given has failed")

    @contextlib.contextmanager
    def on_sigterm(self) -> Iterator[None]:
        """Inside, SIGTERM raises SystemExit in the main thread; a second one, or the end of the grace period, ends it.

        A handler of the user's stays in place.
        """
        _replace_handler(signal.SIG_DFL, self._handle)
        try:
            yield
        finally:
            _replace_handler(self._handle, signal.SIG_DFL)

    def _handle(self, number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != self._pid:
            # A fork inherits the handler, but has nothing to clean up.
            os.kill(os.getpid(), number)
            return
        self._is_asked = True
        self._note_signal(signal.Signals(number).name)
        seconds = STOP_GRACE_SECONDS + sum(seconds for _, seconds in self._hooks)
        end = threading.Timer(seconds, os.kill, (self._pid, number))
        end.daemon = True
        # While the interpreter ends, Python starts no thread.
        with contextlib.suppress(RuntimeError):
            end.start()
        raise SystemExit(_EXIT_CODE)


def _replace_handler(old: object, new: Any) -> None:
    """Replace the handler of SIGTERM if it is the old one, and if this thread may."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) == old:
        signal.signal(signal.SIGTERM, new)
