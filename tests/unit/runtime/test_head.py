"""Calls of Ray's that do not return, and the deadlines of those who make them."""

from __future__ import annotations

import threading
import time

import pytest

from roost import ClusterError
from roost.deadline import Deadline
from roost.runtime.connect import head
from roost.runtime.connect.head import Head, until, within


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
