"""Deadlines: how much is left of them, and which of two comes first."""

from __future__ import annotations

import math
import threading

from roost.deadline import NEVER, Deadline


def test_a_deadline_in_the_past_is_over_and_has_nothing_left():
    over = Deadline.after(-1.0)
    assert over.is_over
    assert over.left == 0
    assert over.timeout == 0


def test_without_seconds_there_is_none():
    assert Deadline.after(None) == NEVER
    assert not NEVER.is_over
    assert NEVER.left == math.inf
    assert NEVER.timeout is None


def test_the_earlier_of_two_counts():
    soon = NEVER.within(10.0)
    assert 0 < soon.left <= 10.0
    assert soon.within(100.0) == soon
    assert soon.within(0.0).is_over


def test_what_it_leaves_can_be_given_to_a_lock():
    lock = threading.Lock()
    assert lock.acquire(timeout=Deadline.after(1e12).timeout)
