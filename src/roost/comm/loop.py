"""The communication thread of a process, and the handles that its work completes.

One thread reads all sockets. A thread that waits for a handle takes over the reading meanwhile, if it may: what it
waits for then arrives without a switch of threads, which would cost several times as much as the message itself. One
thread reads at a time; the others that wait sleep until their handle is done or it is their turn to read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar, cast

from roost.errors import CallTimedOut, ConfigError

log: logging.Logger = logging.getLogger(__name__)

_LINGER_SECONDS = 0.002
_MOST_LINGER_SECONDS = 0.02
"""How long the thread leaves the reading to threads that wait again and again: the longer, the longer they do."""

SPACE = 1 << 18
"""How many bytes are read at a time."""

Value = TypeVar("Value")


class Handle(Generic[Value]):
    """An operation that may still be under way: wait for it, await it, or ask whether it is done.

    It can be waited for any number of times, and gives the same value or raises the same error each time. It is true.
    """

    __slots__ = ("_callbacks", "_error", "_late", "_loop", "_open", "_value", "_waiting", "is_done")

    def __init__(
        self,
        loop: Loop,
        open_value: Callable[[Any], Value] | None = None,
        late: Callable[[], str] = lambda: "the operation is not done",
    ) -> None:
        """Take what turns the raw value into that of the caller, in the caller's thread, and says what is missing."""
        self.is_done = False
        self._loop = loop
        self._open: Callable[[Any], Value] | _Opening | None = open_value
        self._late = late
        self._value: Any = None
        self._error: BaseException | None = None
        self._waiting: tuple[_Waiter, ...] = ()
        self._callbacks: tuple[Callable[[], None], ...] = ()

    def __bool__(self) -> bool:
        return True

    def done(self) -> bool:
        """Whether it has ended, with a value or an error."""
        if not self.is_done:
            self._loop.nudge()
        return self.is_done

    def wait(self, timeout: float | None = None) -> Value:
        """Wait for the value; CallTimedOut says who is missing, and the operation goes on."""
        if not self.is_done and not self._loop.wait_for(self, check_timeout(timeout)):
            raise self.timed_out(timeout)
        return self._get()

    async def async_wait(self, timeout: float | None = None) -> Value:
        """Do the same in a coroutine."""
        if not self.is_done:
            try:
                await asyncio.wait_for(self._ended(), check_timeout(timeout))
            except TimeoutError:
                if not self.is_done:
                    raise self.timed_out(timeout) from None
        return self._get()

    def __await__(self) -> Generator[Any, None, Value]:
        return self.async_wait().__await__()

    def timed_out(self, timeout: float | None) -> CallTimedOut:
        """Make the error that says who is missing."""
        return CallTimedOut(f"{self._late()} after {timeout or 0:g} s")

    def complete(self, value: Any) -> None:
        """End with a value, unless it has ended."""
        self._end(value, None)

    def fail(self, error: BaseException) -> None:
        """End with an error, unless it has ended."""
        self._end(None, error)

    @property
    def error(self) -> BaseException | None:
        """What it failed with, if it has."""
        return self._error

    @property
    def raw(self) -> Any:
        """What it was completed with."""
        return self._value

    def on_done(self, callback: Callable[[], None]) -> None:
        """Call a function when it is done, in the thread that completes it; at once if it is done."""
        with self._loop.turns:
            if not self.is_done:
                self._callbacks += (callback,)
                return
        callback()

    def _end(self, value: Any, error: BaseException | None) -> None:
        with self._loop.turns:
            if self.is_done:
                return
            self._value, self._error = value, error
            self.is_done = True
            for waiter in self._waiting:
                waiter.wake()
                self._loop.interrupt(waiter)
            callbacks, self._callbacks = self._callbacks, ()
        for callback in callbacks:
            callback()

    async def _ended(self) -> None:
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def set_ended() -> None:
            if not ended.done():
                ended.set_result(None)

        def end() -> None:
            # The caller may have given up, and its event loop may be closed.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(set_ended)

        self.on_done(end)
        self._loop.nudge()
        await ended

    def _get(self) -> Value:
        while self._error is None and self._open is not None:
            self._open_value()
        if self._error is not None:
            raise self._error
        return cast(Value, self._value)

    def _open_value(self) -> None:
        """Turn the raw value into that of the caller, or wait for the thread that does."""
        opening = _Opening()
        opener: Any = None
        try:
            with self._loop.turns:
                opener = self._open
                if callable(opener):
                    self._open = opening
            if callable(opener):
                try:
                    self._value = opener(self._value)
                except Exception as error:
                    self._value, self._error = None, error
                opener = None
            elif opener is not None:
                opener.wait()
        finally:
            if self._open is opening:
                # After Ctrl-C it is as it was: the value can still be taken, or go back.
                self._open = opener
                opening.end()


class _Opening:
    """A thread turns the value of a handle into that of the caller."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def end(self) -> None:
        """Let the others go on."""
        self._lock.release()

    def wait(self) -> None:
        """Wait for the end."""
        with self._lock:
            return


def check_timeout(timeout: float | None) -> float | None:
    """Return the seconds to wait, where None is without limit; ConfigError if it is not a number."""
    if timeout is None or timeout == math.inf:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or math.isnan(timeout):
        raise ConfigError(f"timeout is {timeout!r}: it is a number of seconds, or None")
    return max(0.0, float(timeout))


class _Waiter:
    """A thread that waits: by reading, or asleep."""

    __slots__ = ("_is_awake", "_lock", "thread")

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self._lock: threading.Lock | None = None
        self._is_awake = True

    def wake(self) -> None:
        """Let it look again; with the lock of the turns held."""
        if not self._is_awake and self._lock is not None:
            self._is_awake = True
            self._lock.release()

    def sleep(self, seconds: float) -> None:
        if self._lock is not None:
            self._lock.acquire(timeout=seconds)

    def rest(self) -> None:
        """Sleep the next time; with the lock of the turns held."""
        if self._lock is None:
            self._lock = threading.Lock()
        if self._is_awake:
            self._is_awake = False
            self._lock.acquire(blocking=False)


class Loop:
    """Reads sockets in a thread that starts with the first of them."""

    def __init__(self, name: str) -> None:
        self.turns = threading.Lock()
        """Held for moments, while it is decided who reads and which handles are done."""
        self.space = memoryview(bytearray(SPACE))
        """Where the thread that reads puts what it reads, before it is looked at."""
        self._name = name
        self._poll = select.epoll()
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._woken, select.EPOLLIN)
        self._handlers: dict[int, Callable[[int], None]] = {self._woken: self._wake_up}
        self._calls: deque[Callable[[], None]] = deque()
        self._leader: _Waiter | Loop | None = None
        self._queue: deque[_Waiter] = deque()
        self._resume = threading.Condition(self.turns)
        self._left_at = 0.0
        self._is_asked = False
        self._is_stopped = False
        self._thread: threading.Thread | None = None
        self._turning = 0
        """The thread that handles events right now."""
        self._at_end: list[Callable[[], None]] = []

    def watch(self, fd: int, handler: Callable[[int], None]) -> None:
        """Call a handler with the events of a descriptor."""
        self._handlers[fd] = handler
        self._poll.register(fd, select.EPOLLIN)
        self.start()

    def watch_for(self, fd: int, *, reads: bool, writes: bool) -> None:
        """Choose which events of a descriptor its handler is called with; its end is always one."""
        with contextlib.suppress(OSError):
            self._poll.modify(fd, (select.EPOLLIN if reads else 0) | (select.EPOLLOUT if writes else 0))
        if writes:
            self.nudge()

    def forget(self, fd: int) -> None:
        """Stop watching a descriptor."""
        if self._handlers.pop(fd, None) is not None:
            with contextlib.suppress(OSError):
                self._poll.unregister(fd)

    def call(self, function: Callable[[], None]) -> None:
        """Let the thread that reads call a function; safe in a finalizer, which may run anywhere."""
        self._calls.append(function)
        with contextlib.suppress(OSError):
            os.eventfd_write(self._woken, 1)

    def at_end_of_turn(self, function: Callable[[], None]) -> bool:
        """Call a function when all that has arrived is handled; False if it is not this thread that handles it."""
        if self._turning != threading.get_ident():
            return False
        self._at_end.append(function)
        return True

    def interrupt(self, waiter: _Waiter) -> None:
        """Let a thread look again if it is the one that reads; with the lock of the turns held."""
        if waiter is self._leader and waiter.thread != threading.get_ident():
            os.eventfd_write(self._woken, 1)

    def start(self) -> None:
        """Start the thread, once."""
        with self.turns:
            if self._thread is not None or self._is_stopped:
                return
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def nudge(self) -> None:
        """Let the thread read now, if no other one does: a caller waits for something, but not by reading."""
        if self._leader is None:
            with self.turns:
                self._left_at = 0.0
                self._resume.notify()

    def stop(self) -> None:
        """End the thread."""
        with self.turns:
            self._is_stopped = True
            self._resume.notify()
        self.call(lambda: None)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(5.0)
        self._poll.close()

    def __del__(self) -> None:
        # Not before: a finalizer may wake the thread even after its end.
        os.close(self._woken)

    def wait_for(self, handle: Handle[Any], timeout: float | None) -> bool:
        """Wait until a handle is done; returns whether it is."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        waiter = _Waiter()
        may_lead = not is_interruptible()
        with self.turns:
            if handle.is_done:
                return True
            handle._waiting += (waiter,)
            if may_lead and self._leader is None and not self._is_stopped:
                self._leader = waiter
            else:
                waiter.rest()
                if may_lead:
                    self._queue.append(waiter)
                    if self._leader is self and not self._is_asked:
                        self._is_asked = True
                        os.eventfd_write(self._woken, 1)
        if not may_lead:
            self.nudge()
        try:
            while not handle.is_done:
                left = math.inf if timeout is None else deadline - time.monotonic()
                if left <= 0:
                    break
                if self._leader is waiter:
                    self._turn(left)
                else:
                    waiter.sleep(left if left < threading.TIMEOUT_MAX else -1)
                    with self.turns:
                        waiter.rest()
        finally:
            with self.turns:
                handle._waiting = tuple(other for other in handle._waiting if other is not waiter)
                if self._leader is waiter:
                    self._hand_over()
                elif waiter in self._queue:
                    self._queue.remove(waiter)
        return handle.is_done

    def _hand_over(self) -> None:
        """Let the next one read; with the lock of the turns held."""
        if self._queue:
            self._leader = self._queue.popleft()
            self._leader.wake()
        else:
            self._leader = None
            self._left_at = time.monotonic()

    def _run(self) -> None:
        while True:
            seconds = _LINGER_SECONDS
            with self.turns:
                while not self._is_stopped and (
                    self._leader is not None or time.monotonic() - self._left_at < seconds
                ):
                    self._resume.wait(seconds)
                    seconds = min(2 * seconds, _MOST_LINGER_SECONDS)
                if self._is_stopped:
                    return
                self._leader, self._is_asked = self, False
            while not self._is_asked and not self._is_stopped:
                self._turn(None)
            with self.turns:
                self._hand_over()

    def _turn(self, seconds: float | None) -> None:
        """Wait for events and handle them."""
        if self._calls:
            self._make_calls()
        events = self._poll.poll(seconds if seconds is not None and seconds < 1e6 else None)
        self._turning = threading.get_ident()
        handlers = self._handlers
        try:
            for fd, event in events:
                handler = handlers.get(fd)
                if handler is not None:
                    try:
                        handler(event)
                    except Exception:
                        log.exception("a connection could not be handled")
                        self.forget(fd)
        finally:
            self._turning = 0
            while self._at_end:
                self._at_end.pop()()

    def _wake_up(self, _event: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._woken)
        self._make_calls()

    def _make_calls(self) -> None:
        for _ in range(len(self._calls)):
            try:
                self._calls.popleft()()
            except Exception:
                log.exception("the communication thread could not do something")


class uninterrupted:  # noqa: N801 - used like contextlib.suppress
    """Hold Ctrl-C back until the end of a block, in the thread that it would interrupt."""

    __slots__ = ("_frame", "_handler")

    def __enter__(self) -> None:
        self._handler: Any = None
        self._frame: Any = None
        if is_interruptible():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._hold)

    def __exit__(self, *_: object) -> None:
        if self._handler is None:
            return
        signal.signal(signal.SIGINT, self._handler)
        if self._frame is not None:
            self._handler(signal.SIGINT, self._frame)

    def _hold(self, _number: int, frame: Any) -> None:
        self._frame = frame


_leads_anywhere = False


def let_main_thread_read() -> None:
    """Allow the main thread of this process to read: no Ctrl-C interrupts it in the middle of a frame."""
    global _leads_anywhere
    _leads_anywhere = True


def is_interruptible() -> bool:
    """Whether Ctrl-C may interrupt this thread anywhere."""
    return not _leads_anywhere and threading.current_thread() is threading.main_thread()
