"""Ray's head, as this process reaches it: the one place that decides whether it is there.

A network that fails for two seconds must not end a job, so a head counts as gone only after it has been silent for a
while. Calls of Ray's that need the head do not return while it is dead or hangs: `within` gives them a deadline.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import ctypes
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Generic, TypeVar

from roost.deadline import NEVER, Deadline
from roost.errors import ClusterError
from roost.machine.ports import answers
from roost.runtime.limits import (
    BLIP_SECONDS,
    HANGING_CALLS_SECONDS,
    HEAD_EVERY_SECONDS,
    KNOCK_SECONDS,
    LEAST_SECONDS,
    LOST_SECONDS,
    POLL_SECONDS,
    STILL_HANGS_SECONDS,
)

log: logging.Logger = logging.getLogger(__name__)

Value = TypeVar("Value")


class _Call(Generic[Value]):
    """A call of Ray's in a thread of its own.

    The main thread starts it and waits for it, where Ctrl-C may raise at any moment. `Thread.start`, `Event.wait` and
    the futures of the standard library wait in a `Condition`, which such a moment leaves to release a lock that the
    other thread holds: "release unlocked lock" ends that thread, or takes the place of the interrupt. A lock alone has
    no such moment.
    """

    def __init__(self, call: Callable[[], Value], what: str, undo: Callable[[Value], object] | None = None) -> None:
        """Take what to call, what that is in words, and what to do with a value that nobody waits for any more."""
        self.what = what
        self.is_done = False
        self._call = call
        self._undo = undo
        self._is_given_up = False
        self._undone = [False]
        """The thread that takes the entry out undoes the call."""
        self._ended = threading.Lock()
        self._ended.acquire()
        self._value: Value | None = None
        self._error: BaseException | None = None

    def start(self) -> None:
        """Begin in another thread."""
        try:
            _thread.start_new_thread(self._run, ())
        except RuntimeError:
            # Python 3.12 and later start no thread while the interpreter ends.
            self._run()

    def _run(self) -> None:
        _running[self] = self.what
        try:
            self._value = self._call()
        except BaseException as error:
            self._error = error
        # In this order: a thread that gives it up at this moment undoes it, or this thread does.
        self.is_done = True
        self._ended.release()
        _running.pop(self, None)
        if self._is_given_up:
            self._undo_once()

    def wait(self, seconds: float) -> bool:
        """Wait until it has ended, for some seconds at most; returns whether it has."""
        if not self.is_done and self._ended.acquire(timeout=seconds):
            # For others that wait; where an interrupt comes in between, they look again soon.
            self._ended.release()
        return self.is_done

    def result(self) -> Value:
        """Return what it returned, or raise what it raised."""
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def give_up(self) -> None:
        """Let what it returns in the end be undone."""
        self._is_given_up = True
        if self.is_done:
            self._undo_once()

    def _undo_once(self) -> None:
        try:
            self._undone.pop()
        except IndexError:
            return
        if self._undo is not None and self._error is None:
            try:
                self._undo(self.result())
            except Exception as error:
                # What the caller is about to raise, such as an interrupt, matters more.
                log.debug("what was to %s could not be undone: %s", self.what, error)


_hanging: dict[str, _Call[Any]] = {}
"""The call of each kind that did not return in time."""
_caller = threading.local()
_running: dict[_Call[Any], str] = {}
"""All calls that have not returned, and what each was to do."""


class Head:
    """Ray's head at an address. All threads of a process share what is known about it."""

    current: ClassVar[Head | None] = None
    """The one of this process's last connection; None in a worker, which Ray connected."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.is_given_up = False
        """Whether this process disconnects from it: it was silent for too long, or the raylet has ended."""
        self._raylet = ""
        self._has_raylet = True
        self._silent_since: float | None = None
        self._is_reported = False
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_there(self) -> bool:
        """Whether it answered last time."""
        return self._silent_since is None

    @property
    def silent_seconds(self) -> float:
        """For how long it has not answered; 0 if it answered last time."""
        since = self._silent_since
        return 0.0 if since is None else time.monotonic() - since

    def answers(self) -> bool:
        """Return whether it answers now."""
        if answers(self.address):
            self._silent_since = None
            return True
        if self._silent_since is None:
            self._silent_since = time.monotonic()
        return False

    def wait(self) -> bool:
        """Wait until it answers; False once it has been silent for longer than a blip."""
        while not self.is_given_up and not self.answers():
            if self.silent_seconds > BLIP_SECONDS:
                return False
            time.sleep(POLL_SECONDS)
        return not self.is_given_up

    def use(self) -> None:
        """Make it this process's head, in place of an earlier one that may be lost."""
        Head.current = self
        _used.add(self.address)
        _hanging.clear()

    def watch(self, raylet: str, on_lost: Callable[[], object]) -> None:
        """Call `on_lost` once it is given up: from a thread of its own, which no call of Ray's can hold up.

        `raylet` is the address of the raylet through which this process uses it.
        """
        self._raylet = raylet
        self._thread = threading.Thread(target=self._watch, args=(on_lost,), name="roost-head", daemon=True)
        self._thread.start()

    def stop_watching(self, timeout: float) -> None:
        """End that thread."""
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _watch(self, on_lost: Callable[[], object]) -> None:
        while not self.is_given_up:
            if self._stopped.wait(HEAD_EVERY_SECONDS):
                return
            silent_before = self.silent_seconds
            if self.answers():
                if self._is_reported:
                    log.warning("Ray's head at %s answers again after %.0f s", self.address, silent_before)
                self._is_reported = False
            elif self.silent_seconds > BLIP_SECONDS and not self._is_reported:
                # Only a change that lasts.
                log.error("Ray's head at %s does not answer", self.address)
                self._is_reported = True
            # The head soon declares the node dead: all that this process started ends then.
            self._has_raylet = answers(self._raylet, KNOCK_SECONDS) is not False
            self.is_given_up = self.silent_seconds > LOST_SECONDS or not self._has_raylet
        log.error("%s: this process disconnects from Ray", self.gone().problems[0].message)
        # First every thread notices it: while one waits in Ray, Ray may not disconnect.
        time.sleep(2 * HEAD_EVERY_SECONDS)
        on_lost()

    def gone(self, doing: str = "") -> ClusterError:
        """Make the error that names it."""
        if not self._has_raylet:
            what, hint = f"the raylet of this process, at {self._raylet}, has ended", "start Ray again, and the job"
        else:
            what = f"Ray's head at {self.address} does not answer"
            hint = "if it is only the network, try again; if the head has ended, so has every job on it"
        return ClusterError(f"{what}{doing}", hint=hint)


_used: set[str] = set()
"""The addresses of the heads that this process has used."""


@atexit.register
def _leave_at_once() -> None:
    """Let a process end without the destructors of C++ if a thread of Ray's still looks for a head that is gone.

    It would use what they destroy, and crash. Python has done by then what it does at its end, and the exit code stays.
    """
    if _running or any(answers(address) is not True for address in _used):
        # It runs before the handlers of libraries that are loaded already. Other systems than Linux have none.
        with contextlib.suppress(AttributeError):
            libc = ctypes.CDLL(None)
            libc.fflush(None)
            libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)


def check_not_lost() -> None:
    """Raise ClusterError if this process has given up its head."""
    if Head.current is not None and Head.current.is_given_up:
        raise Head.current.gone()


def check_nothing_waits() -> None:
    """Raise ClusterError if calls still wait in a Ray that this process has given up: another one would crash them."""
    if Head.current is None or not Head.current.is_given_up:
        return
    # Most end with the connection.
    deadline = Deadline.after(HANGING_CALLS_SECONDS)
    for running in list(_running):
        running.wait(deadline.left)
    if calls := ", ".join(sorted(set(_running.copy().values()))):
        raise ClusterError(
            f"this process still waits for Ray at {Head.current.address}, which it has lost, to {calls}",
            hint="start a new process to use another Ray cluster",
        )


@contextlib.contextmanager
def noticing_loss() -> Iterator[None]:
    """Wait in Ray inside: ClusterError in place of the SystemExit that Ray raises when it disconnects meanwhile."""
    try:
        yield
    except SystemExit:
        check_not_lost()
        raise


@contextlib.contextmanager
def until(deadline: Deadline) -> Iterator[None]:
    """Let calls of Ray's inside, in this thread, end by a deadline of the caller's, however long each may take."""
    before: Deadline = _caller.__dict__.get("deadline", NEVER)
    _caller.__dict__["deadline"] = min(before, deadline)
    try:
        yield
    finally:
        _caller.__dict__["deadline"] = before


def within(
    seconds: float, call: Callable[[], Value], what: str, undo: Callable[[Value], object] | None = None
) -> Value:
    """Make a call of Ray's that needs the head; ClusterError after `seconds`, or when the head counts as gone.

    Ray may still finish the call: `undo` gets what it then returns.
    """
    check_not_lost()
    usual = seconds
    callers: Deadline = _caller.__dict__.get("deadline", NEVER)
    seconds = min(usual, max(LEAST_SECONDS, callers.left))
    deadline = Deadline.after(seconds)
    # While one call hangs, the next of its kind would hang as well.
    soon = deadline.within(STILL_HANGS_SECONDS)
    late = f"Ray did not {what} in {round(seconds, 1):g} s"
    hint = "its head hangs or is overloaded: look at its machine"
    if what in _hanging and not _is_done(_hanging[what], soon, BLIP_SECONDS):
        raise ClusterError(late, hint=hint)
    made = _Call(call, what, undo)
    try:
        made.start()
        if _is_done(made, deadline, BLIP_SECONDS):
            return made.result()
        if seconds == usual:
            _hanging[what] = made
        raise ClusterError(late, hint=hint)
    except BaseException:
        made.give_up()
        raise


def unless_lost(call: Callable[[], Value]) -> Value:
    """Make a call of Ray's that waits for workers; ClusterError when the head is given up, and the call goes on."""
    made = _Call(call, "return from a wait")
    made.start()
    _is_done(made, NEVER, math.inf)
    return made.result()


def _is_done(call: _Call[Any], deadline: Deadline, most_silent: float) -> bool:
    """Wait until the deadline; ClusterError if the head is silent for so many seconds, or given up."""
    while not call.is_done and (left := deadline.left):
        if call.wait(min(HEAD_EVERY_SECONDS, left)):
            break
        head = Head.current
        if head is None:
            # A driver has a thread for that.
            import ray  # the caller has loaded it

            head = _head_of_worker(ray.get_runtime_context().gcs_address)
            head.answers()
        if head.is_given_up or head.silent_seconds > most_silent:
            raise head.gone()
    return call.is_done


_head_of_worker: Callable[[str], Head] = functools.cache(Head)
