"""Calls of Ray's that do not return, and the deadlines of those who make them."""

from __future__ import annotations

import dis
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import pytest

from roost import ClusterError
from roost.deadline import Deadline
from roost.runtime.connect import head
from roost.runtime.connect.head import Head, until, within
from waiting import wait_until


@pytest.fixture
def hang(monkeypatch) -> threading.Event:
    """What a call waits for that hangs; the head itself is there."""
    monkeypatch.setattr(Head, "current", Head("127.0.0.1:1"))
    monkeypatch.setattr(head, "_hanging", {})
    over = threading.Event()
    yield over
    over.set()


def test_a_call_that_hangs_ends_with_its_own_deadline_or_with_the_callers(hang):
    began = time.monotonic()
    with pytest.raises(ClusterError, match="Ray did not do one thing in 1 s"):
        within(1, hang.wait, "do one thing")
    with until(Deadline(began)), pytest.raises(ClusterError, match=r"Ray did not do another in 0\.5 s"):
        within(60, hang.wait, "do another")
    with (
        until(Deadline(began + 600)),
        until(Deadline(began)),
        until(Deadline(began + 60)),
        pytest.raises(ClusterError, match="do a third"),
    ):
        within(60, hang.wait, "do a third")
    assert time.monotonic() - began < 30
    hang.set()
    assert within(60, lambda: "there", "do a fourth") == "there"


class InterruptedAt:
    """Raises KeyboardInterrupt at the n-th place where Python would, in the files of a wait in this thread.

    Python looks for signals after calls, at the beginning of functions and where loops go back.
    """

    FILES = ("connect/head.py", "/threading.py", "concurrent/futures/_base.py")
    AFTER = ("CALL", "CALL_KW", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD")

    def __init__(self, number: int) -> None:
        self.left = number
        self._names: dict[CodeType, dict[int, str]] = {}
        self._last: dict[FrameType, str] = {}

    def trace(self, frame: FrameType, event: str, _argument: object) -> Callable[..., Any] | None:
        code = frame.f_code
        if not code.co_filename.endswith(self.FILES):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            if code not in self._names:
                self._names[code] = {one.offset: one.opname for one in dis.get_instructions(code)}
            name = self._names[code][frame.f_lasti]
            # Python raises in the call itself, which may be in a block that has ended before a return.
            may = self._last.get(frame) in self.AFTER and name != "RETURN_VALUE"
            self._last[frame] = name
            self.left -= may
            if may and not self.left:
                raise KeyboardInterrupt
        return self.trace

    def __enter__(self) -> None:
        sys.settrace(self.trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)


@pytest.mark.skipif(sys.gettrace() is not None, reason="something else traces")
@pytest.mark.parametrize("seconds", [0.0, 0.01])
@pytest.mark.usefixtures("hang")
def test_an_interrupt_at_any_moment_of_a_call_arrives_and_leaves_no_thread(seconds, monkeypatch):
    died: list[object] = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    monkeypatch.setattr(sys, "unraisablehook", died.append)
    made, undone = 0, 0

    def make() -> str:
        nonlocal made
        time.sleep(seconds)
        made += 1
        return "it"

    def undo(_: str) -> None:
        nonlocal undone
        undone += 1

    number = delivered = 0
    while not delivered:
        number += 1
        at = InterruptedAt(number)
        try:
            with at:
                delivered += within(60, make, "do it", undo) == "it"
        except KeyboardInterrupt:
            assert not at.left
        wait_until(lambda: not head._running, f"the call has ended after interrupt {number}", seconds=5)
        assert not head._hanging
        assert not died, f"interrupt {number}"
    assert number > 10, "there were places"
    wait_until(lambda: made == undone + delivered, "what nobody got was undone", seconds=5)
