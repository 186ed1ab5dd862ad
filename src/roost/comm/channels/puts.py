"""The puts of a `Channel` in this process: in order, and no more on their way at a time than its home has use for."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Hashable, Sequence

from roost.comm.channels.checks import check_async
from roost.comm.channels.operations import PutOperation
from roost.comm.channels.routes import take_back
from roost.comm.wire.loop import Handle, Loop, all_of, check_timeout, uninterrupted
from roost.errors import CallTimedOut

_MOST_PUTS = 256
_MOST_BYTES = 1 << 23
"""How many puts of one process, and how many bytes, may wait for one key at its home; the others wait here."""


class Puts:
    """Starts puts and waits for them."""

    def __init__(self) -> None:
        self._flows: dict[Hashable, Flow] = {}
        self._lock = threading.Lock()

    def run(self, put: PutOperation, async_op: bool, timeout: float | None) -> Handle[None] | None:
        """Put something; returns when it is in the queue, or at once with a handle."""
        check_async(async_op, timeout)
        seconds = check_timeout(timeout)
        if async_op:
            self._start(put)
            return put
        try:
            self._start(put)
            self._wait(put, seconds)
        except KeyboardInterrupt:
            self._withdraw(put)
            raise
        return None

    def run_all(
        self, puts: Sequence[PutOperation], loop: Loop, async_op: bool, timeout: float | None
    ) -> Handle[None] | None:
        """Do the same with several, in order; if one fails, the later ones are withdrawn."""
        check_async(async_op, timeout)
        seconds = check_timeout(timeout)
        for put in puts:
            self._start(put)
        if async_op:
            return all_of(loop, puts, None, "not all items are in the channel")
        end = None if seconds is None else time.monotonic() + seconds
        for place, put in enumerate(puts):
            try:
                self._wait(put, None if end is None else max(0.0, end - time.monotonic()))
            except BaseException:
                for later in puts[place + 1 :]:
                    self._withdraw(later)
                raise
        return None

    def release(self, put: PutOperation) -> None:
        """Note that a put has ended, so that another one may be sent."""
        with self._lock:
            if not put.has_place:
                return
            put.has_place = False
            flow = self._flows[put.key]
            flow.count -= 1
            flow.bytes -= put.size
            if not flow.count and not flow.waiting:
                del self._flows[put.key]
        if flow.waiting:
            self._pump(flow)

    def _start(self, put: PutOperation) -> None:
        with uninterrupted():
            with self._lock:
                flow = self._flows.get(put.key)
                if flow is None:
                    flow = self._flows[put.key] = Flow()
                flow.waiting.append(put)
            self._pump(flow)

    def _pump(self, flow: Flow) -> None:
        """Send the puts that may be sent; one thread at a time does, so that they stay in order."""
        while flow.may_send and flow.sending.acquire(blocking=False):
            try:
                while True:
                    with self._lock:
                        if not flow.may_send:
                            break
                        put = flow.waiting.popleft()
                        flow.count += 1
                        flow.bytes += put.size
                        put.has_place = True
                    try:
                        put.send()
                    except Exception as error:
                        put.fail(error)
            finally:
                flow.sending.release()

    def _wait(self, put: PutOperation, seconds: float | None) -> None:
        try:
            put.wait(seconds)
        except CallTimedOut as late:
            if put.error is late:
                raise
            if self._unqueue(put):
                raise
            error = put.outcome(seconds or 0)
            if error is not None:
                raise error from None

    def _withdraw(self, put: PutOperation) -> None:
        if not self._unqueue(put):
            put.give_up()

    def _unqueue(self, put: PutOperation) -> bool:
        """Take back a put that was not sent yet."""
        with self._lock:
            flow = self._flows.get(put.key)
            if flow is None or put.has_place or put not in flow.waiting:
                return False
            flow.waiting.remove(put)
        take_back(put.items)
        return True


class Flow:
    """The puts under one key: as many as its home lets wait are there, the others here, in order."""

    __slots__ = ("bytes", "count", "sending", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[PutOperation] = deque()
        self.sending = threading.Lock()
        self.count = 0
        self.bytes = 0

    @property
    def may_send(self) -> bool:
        """Whether one more may be sent."""
        if not self.waiting:
            return False
        return not self.count or (self.count < _MOST_PUTS and self.bytes + self.waiting[0].size <= _MOST_BYTES)
