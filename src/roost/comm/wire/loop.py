"""The communication thread of a process, and the handles that its work completes.

One thread reads all sockets. A thread that waits for a handle which one connection will complete reads that connection
itself meanwhile: what it waits for then arrives without a switch of threads, which would cost several times as much as
the message itself. If nothing comes for some milliseconds, it leaves the connection to the other thread, and sleeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import heapq
import importlib
import itertools
import logging
import math
import os
import select
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from roost.comm.limits import LINGER_SECONDS, READ_SECONDS
from roost.deadline import Deadline
from roost.errors import CallTimedOut, ConfigError
from roost.runtime.events.waits import waiting
from roost.runtime.failures.meanwhile import with_meanwhile
from roost.runtime.limits import LEAST_WAIT_SECONDS
from roost.text import shorten

if TYPE_CHECKING:
    from roost.comm.wire.connection import Connection
    from roost.comm.wire.peer import Peer

log: logging.Logger = logging.getLogger(__name__)

SPACE = 1 << 18
"""How many bytes are read at a time."""

Value = TypeVar("Value")


class Handle(Generic[Value]):
    """An operation that may still be under way: wait for it, await it, or ask whether it is done.

    It can be waited for any number of times, and gives the same value or raises the same error each time. It is true.
    """

    __slots__ = ("_callbacks", "_late", "_loop", "_open", "_peer", "_value", "_waiting", "error", "is_done")

    def __init__(
        self,
        loop: Loop,
        open_value: Callable[[Any], Value] | None = None,
        late: Callable[[], str] = lambda: "the operation is not done",
        peer: Peer | None = None,
    ) -> None:
        """Take what turns the raw value into that of the caller, in the caller's thread, and says what is missing.

        A thread that waits for it reads the connection of the peer meanwhile.
        """
        self.is_done = False
        self._loop = loop
        self._open: Any = open_value
        """That function, or the lock that a thread holds while it opens the value."""
        self._late = late
        self._peer = peer
        self._value: Any = None
        self.error: BaseException | None = None
        """Its error, if it has failed."""
        self._waiting: tuple[threading.Lock, ...] = ()
        """The locks of the threads that sleep until it is done."""
        self._callbacks: tuple[Callable[[], None], ...] = ()

    def __bool__(self) -> bool:
        return True

    def done(self) -> bool:
        """Whether it has ended, with a value or an error."""
        if not self.is_done:
            self._loop.nudge()
        return self.is_done

    def within(self, seconds: float | None) -> bool:
        """Wait for so many seconds at most, or without limit; returns whether it is done."""
        return self.is_done or self._loop.wait_for(self, seconds)

    def wait(self, timeout: float | None = None) -> Value:
        """Wait for the value; CallTimedOut says who is missing, and the operation goes on."""
        if not self.within(check_timeout(timeout)):
            error = with_meanwhile(self.timed_out(timeout))
            # A caller that keeps the error keeps this frame, which must not keep an operation that was dropped.
            del self
            raise error
        return self._get()

    def missing(self) -> str:
        """Say what has not happened, for the error of a wait that was too short; the operation goes on."""
        return self._late()

    def waits_for(self) -> str:
        """Say who has to do something before it is done."""
        return self._late().partition(" has not ")[0]

    def details(self) -> tuple[str, Sequence[str]]:
        """Say more about that, and which workers have to do it, as far as is known."""
        return self.waits_for(), ()

    def timed_out(self, timeout: float | None) -> CallTimedOut:
        """Make the error that says who is missing."""
        return CallTimedOut(f"{self.missing()} after {timeout or 0:g} s")

    async def async_wait(self, timeout: float | None = None) -> Value:
        """Do the same in a coroutine."""
        if not self.is_done:
            seconds = check_timeout(timeout)
            loop = asyncio.get_running_loop()
            ended: asyncio.Future[None] = loop.create_future()

            def set_ended() -> None:
                if not ended.done():
                    ended.set_result(None)

            def end() -> None:
                # The caller may have given up, and its event loop may be closed.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(set_ended)

            self.on_done(end)
            self._loop.nudge()
            try:
                with waiting(self.waits_for, details=self.details):
                    await asyncio.wait_for(ended, seconds)
            except TimeoutError:
                if not self.is_done:
                    error = with_meanwhile(self.timed_out(timeout))
                    del self
                    raise error from None
            except asyncio.CancelledError:
                del self
                raise
        return self._get()

    def __await__(self) -> Generator[Any, None, Value]:
        return self.async_wait().__await__()

    def complete(self, value: Any) -> None:
        """End with a value, unless it has ended."""
        self._end(value, None)

    def fail(self, error: BaseException) -> None:
        """End with an error, unless it has ended."""
        self._end(None, error)

    def on_done(self, callback: Callable[[], None]) -> None:
        """Call a function when it is done, in the thread that completes it; at once if it is done."""
        with self._loop.turns:
            if not self.is_done:
                self._callbacks += (callback,)
                return
        callback()

    def source(self) -> Connection | None:
        """Return the connection that will complete it, if it is known."""
        return self._peer.connection if self._peer is not None else None

    def _end(self, value: Any, error: BaseException | None) -> None:
        with self._loop.turns:
            if self.is_done:
                return
            self._value, self.error = value, error
            self.is_done = True
            for waiter in self._waiting:
                waiter.release()
            self._waiting = ()
            callbacks, self._callbacks = self._callbacks, ()
        for callback in callbacks:
            callback()

    def _get(self) -> Value:
        """Return the value, or raise the error; one thread turns the raw value into it, and others wait for that."""
        while self.error is None and self._open is not None:
            opening = threading.Lock()
            opening.acquire()
            opener = None
            try:
                with self._loop.turns:
                    opener = self._open
                    if callable(opener):
                        self._open = opening
                if callable(opener):
                    try:
                        self._value = opener(self._value)
                    except Exception as error:
                        if is_from_handler(error):
                            raise
                        self._value, self.error = None, error
                    opener = None
                elif opener is not None:
                    with opener:
                        continue
            finally:
                if self._open is opening:
                    # After Ctrl-C it is as it was: the value can still be taken, or go back.
                    self._open = opener
                    opening.release()
        if self.error is not None:
            raise self.error
        value: Value = self._value
        return value


def all_of(loop: Loop, handles: Sequence[Handle[None]], value: Any, late: str) -> Handle[Any]:
    """Return a handle that has a value when all are done, or fails when one has failed; `late` says what is missing."""
    whole: Handle[Any] = Handle(loop, late=lambda: late)
    left, lock = [len(handles)], threading.Lock()
    if not handles:
        whole.complete(value)

    def note(handle: Handle[None]) -> None:
        with lock:
            left[0] -= 1
            is_last = not left[0]
        if handle.error is not None:
            whole.fail(handle.error)
        elif is_last:
            whole.complete(value)

    for handle in handles:
        handle.on_done(functools.partial(note, handle))
    return whole


def check_timeout(timeout: float | None) -> float | None:
    """Return the seconds to wait, where None is without limit; ConfigError if it is not a number."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout != timeout:
        raise ConfigError(f"timeout is {shorten(repr(timeout), 100)}: it is a number of seconds, or None")
    # Far more is an error of the system's; it is without limit as well.
    return None if timeout >= threading.TIMEOUT_MAX else max(0.0, float(timeout))


class Loop:
    """Reads sockets in a thread that starts with the first of them."""

    def __init__(self, name: str) -> None:
        self.turns = threading.Lock()
        """Held for moments, while it is decided who reads and which handles are done."""
        self.space = memoryview(bytearray(SPACE))
        """Where the thread puts what it reads, before it is looked at."""
        self._name = name
        self._poll = select.epoll()
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._woken, select.EPOLLIN)
        self._handlers: dict[int, Callable[[int], None]] = {self._woken: self._wake_up}
        self._calls: deque[Callable[[], object]] = deque()
        self._lent: dict[Connection, float] = {}
        """The connections that threads read themselves, each with when it was last left."""
        self._is_stopped = False
        self._thread: threading.Thread | None = None
        self.ident = 0
        """Of the thread."""
        self.at_end: list[Callable[[], None]] = []
        """Functions for the thread to call when all that has arrived is handled; only the thread itself adds one."""
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        """A heap of when to call what, in order."""
        self._order = itertools.count()

    def watch(self, fd: int, handler: Callable[[int], None]) -> None:
        """Call a handler with the events of a descriptor."""
        self._handlers[fd] = handler
        self._poll.register(fd, select.EPOLLIN)
        self.start()

    def watch_for(self, fd: int, *, reads: bool, writes: bool) -> None:
        """Choose which events of a descriptor its handler is called with; its end is always one."""
        with contextlib.suppress(OSError):
            self._poll.modify(fd, (select.EPOLLIN if reads else 0) | (select.EPOLLOUT if writes else 0))

    def forget(self, fd: int) -> None:
        """Stop watching a descriptor."""
        if self._handlers.pop(fd, None) is not None:
            with contextlib.suppress(OSError):
                self._poll.unregister(fd)

    def call(self, function: Callable[[], object]) -> None:
        """Let the thread call a function; safe in a finalizer, which may run anywhere."""
        self._calls.append(function)
        self._wake()

    def do(self, function: Callable[[], object]) -> bool:
        """Call a function that must not be interrupted; returns whether it is called here, and not by the thread."""
        if not is_interruptible():
            function()
            return True
        done = threading.Lock()
        done.acquire()
        failures: list[BaseException] = []

        def call() -> None:
            try:
                function()
            except BaseException as error:
                failures.append(error)
            finally:
                done.release()

        self.start()
        self.call(call)
        if self._is_stopped:
            self._make_calls()
        done.acquire()
        for failure in failures:
            raise failure
        return False

    def call_later(self, seconds: float, function: Callable[[], None]) -> None:
        """Let the thread call a function after a while."""
        timer = time.monotonic() + seconds, next(self._order), function
        self.call(lambda: heapq.heappush(self._timers, timer))

    def lend(self, source: Connection) -> None:
        """Leave a connection to a thread that reads it itself."""
        if source.is_lent and self._lent.get(source):
            # Usually it was left a moment ago. If the thread takes it back right now, the next reader lends it again.
            self._lent[source] = math.inf
            return
        with self.turns:
            is_first = not self._lent
            self._lent[source] = math.inf
            if source.is_lent:
                return
            source.is_lent = True
        source.listen()
        if is_first:
            self._wake()

    def take_back(self, source: Connection, *, soon: bool) -> None:
        """Let the thread read a connection again: soon, if no other reads it by then, or at once."""
        with self.turns:
            if soon and not source.sleepers:
                self._lent[source] = time.monotonic()
                return
            self._lent.pop(source, None)
            source.is_lent = False
        source.listen()

    def start(self) -> None:
        """Start the thread, once."""
        with self.turns:
            if self._is_stopped:
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            if self._thread.ident is None:
                self._thread.start()

    def nudge(self, before: float = math.inf) -> None:
        """Let the thread read all that no other one does: a caller waits for something, but not by reading.

        With a moment, only what was left before that.
        """
        if self._lent:
            with self.turns:
                left = [source for source, since in list(self._lent.items()) if since < before]
                for source in left:
                    self._lent.pop(source, None)
                    source.is_lent = False
            for source in left:
                source.listen()

    def stop(self) -> None:
        """End the thread."""
        with self.turns:
            self._is_stopped = True
        self.call(lambda: None)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(5.0)
        self._poll.close()

    def __del__(self) -> None:
        # Not before: a finalizer may wake the thread even after its end.
        os.close(self._woken)

    def wait_for(self, handle: Handle[Any], timeout: float | None, may_read: bool | None = None) -> bool:
        """Wait until a handle is done; returns whether it is. `may_read` says whether nothing can interrupt this."""
        began = time.perf_counter()
        source = None
        if timeout is None or timeout > READ_SECONDS:
            source = handle.source() if may_read or (may_read is None and not is_interruptible()) else None
        if source is not None:
            source.read_for(handle)
        if handle.is_done and time.perf_counter() - began < LEAST_WAIT_SECONDS:
            return True
        with waiting(handle.waits_for, began, handle.details):
            deadline = Deadline.after(None if timeout is None else timeout - (time.perf_counter() - began))
            if handle.is_done:
                return True
            self.nudge()
            asleep = threading.Lock()
            asleep.acquire()
            with self.turns:
                if handle.is_done:
                    return True
                handle._waiting += (asleep,)
                if source is not None:
                    source.sleepers += 1
            try:
                left = deadline.timeout
                asleep.acquire(timeout=-1 if left is None else left)
            finally:
                with self.turns:
                    handle._waiting = tuple(other for other in handle._waiting if other is not asleep)
                    if source is not None:
                        source.sleepers -= 1
            return handle.is_done

    def _run(self) -> None:
        self.ident = threading.get_ident()
        while not self._is_stopped:
            timeout = LINGER_SECONDS if self._lent else None
            if self._timers:
                left = max(0.0, self._timers[0][0] - time.monotonic())
                timeout = left if timeout is None else min(timeout, left)
            events = self._poll.poll(timeout)
            handlers = self._handlers
            for fd, event in events:
                handler = handlers.get(fd)
                if handler is not None:
                    try:
                        handler(event)
                    except BaseException:
                        # As SystemExit, which unpickling may raise: without this thread the process is deaf.
                        log.exception("a connection could not be handled")
                        self.forget(fd)
            while self._timers and self._timers[0][0] <= time.monotonic():
                self._make(heapq.heappop(self._timers)[2])
            while self.at_end:
                self.at_end.pop()()
            self.nudge(time.monotonic() - LINGER_SECONDS)
        self._make_calls()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._woken, 1)

    def _wake_up(self, _event: int) -> None:
        # Only in the thread itself: another one would take from it what wakes it to end.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._woken)
        self._make_calls()

    def _make_calls(self) -> None:
        # Another thread may make them, too, once the loop is stopped.
        with contextlib.suppress(IndexError):
            for _ in range(len(self._calls)):
                self._make(self._calls.popleft())

    def _make(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException:
            log.exception("the communication thread could not do something")


class uninterrupted:  # noqa: N801 - used like contextlib.suppress
    """Hold Ctrl-C back until the end of a block, in the thread that it would interrupt."""

    __slots__ = ("_handler", "_held")

    def __enter__(self) -> None:
        self._handler: Any = None
        self._held: tuple[Any, ...] = ()
        # In a worker there is none. To change a handler takes as long as to send a message.
        if signal.SIGINT in _signals and threading.get_ident() == threading.main_thread().ident:
            handler = _find_handler(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._hold)

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._held:
                self._handler(*self._held)

    def _hold(self, *pressed: Any) -> None:
        self._held = pressed


_find_handler: Callable[[int], Any] = importlib.import_module("_signal").getsignal
"""The function below `signal.getsignal`, which makes members of enumerations and takes thirty times as long."""
_signals = [
    *(signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGCHLD),
    *(signal.SIGQUIT, signal.SIGPROF, signal.SIGVTALRM, signal.SIGXCPU, signal.SIGIO, signal.SIGWINCH),
]
"""The signals that programs handle: looking at all 64 takes as long as sending a message."""


def is_interruptible() -> bool:
    """Whether a handler of a signal may raise in this thread, which it can do between any two steps."""
    return threading.get_ident() == threading.main_thread().ident and any(map(callable, map(_find_handler, _signals)))


def is_from_handler(error: BaseException) -> bool:
    """Whether a handler of a signal raised this, and not the code that it interrupted."""
    codes = set()
    for handler in map(_find_handler, _signals):
        method = handler if hasattr(handler, "__code__") or not callable(handler) else type(handler).__call__
        codes.add(getattr(getattr(method, "__func__", method), "__code__", None))
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def let_main_thread_read() -> None:
    """Take no account of handlers of SIGINT and SIGTERM: nobody presses Ctrl-C in a worker, and the other ends it."""
    _signals[:] = [number for number in _signals if number not in (signal.SIGINT, signal.SIGTERM)]
