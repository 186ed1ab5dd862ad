"""The fair lock: one holder, a line in order, and nobody who is dead in either."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roost.errors import ConfigError
from roost.rl.fair_lock import LockState


def test_the_first_to_ask_holds_the_lock_and_the_others_stand_in_line():
    lock = LockState()
    assert lock.ask("actor:0", 1.0)
    assert not lock.ask("actor:1", 2.0)
    assert not lock.ask("actor:2", 3.0)
    assert (lock.holder, lock.waiting, lock.since) == ("actor:0", ("actor:1", "actor:2"), 1.0)


def test_asking_again_changes_nothing():
    lock = LockState()
    lock.ask("a", 1.0)
    lock.ask("b", 1.0)
    lock.ask("c", 1.0)
    assert lock.ask("a", 5.0)
    assert not lock.ask("b", 5.0)
    assert (lock.holder, lock.waiting, lock.since) == ("a", ("b", "c"), 1.0)


def test_a_release_hands_the_lock_to_the_next_in_line():
    lock = LockState()
    for name in "abc":
        lock.ask(name, 1.0)
    lock.release("a", now=7.0)
    assert (lock.holder, lock.waiting, lock.since) == ("b", ("c",), 7.0)
    assert not lock.ask("a", 8.0), "who had it goes to the end of the line"
    assert lock.waiting == ("c", "a")


def test_without_a_time_the_new_holders_time_begins_when_it_asks_again():
    lock = LockState()
    lock.ask("a", 1.0)
    lock.ask("b", 2.0)
    lock.release("a")
    assert (lock.holder, lock.since) == ("b", None)
    assert lock.ask("b", 9.0)
    assert lock.ask("b", 10.0)
    assert lock.since == 9.0


def test_the_last_release_leaves_the_lock_free_for_anybody():
    lock = LockState()
    lock.ask("a", 1.0)
    lock.release("a", now=2.0)
    assert (lock.holder, lock.waiting, lock.since) == (None, (), None)
    assert lock.ask("b", 3.0)
    assert lock.since == 3.0


def test_who_does_not_hold_the_lock_cannot_release_it_and_is_told_who_can():
    lock = LockState()
    with pytest.raises(ConfigError, match="b cannot release the lock: nobody holds it"):
        lock.release("b")
    lock.ask("actor:3", 1.0)
    lock.ask("b", 1.0)
    with pytest.raises(ConfigError, match="b cannot release the lock: actor:3 holds it"):
        lock.release("b")
    assert (lock.holder, lock.waiting) == ("actor:3", ("b",))


def test_who_gives_up_leaves_the_line_and_the_lock_if_its_turn_has_just_come():
    lock = LockState()
    for name in "abcd":
        lock.ask(name, 1.0)
    lock.give_up("c")
    lock.give_up("nobody")
    assert (lock.holder, lock.waiting) == ("a", ("b", "d"))
    lock.release("a")
    lock.give_up("b", now=4.0)
    assert (lock.holder, lock.waiting, lock.since) == ("d", (), 4.0)


def test_the_dead_lose_the_lock_and_their_places():
    lock = LockState()
    for name in "abcde":
        lock.ask(name, 1.0)
    lock.bury({"a", "b", "d", "never seen"}, now=6.0)
    assert (lock.holder, lock.waiting, lock.since) == ("c", ("e",), 6.0)
    lock.bury({"c", "e"})
    assert (lock.holder, lock.waiting, lock.since) == (None, (), None)


def test_a_holder_that_lives_keeps_the_lock_and_its_time_when_others_die():
    lock = LockState()
    for name in "abc":
        lock.ask(name, 1.0)
    lock.bury({"b"}, now=6.0)
    assert (lock.holder, lock.waiting, lock.since) == ("a", ("c",), 1.0)


def test_it_says_who_holds_it_how_long_and_how_many_wait():
    lock = LockState()
    assert lock.describe(0.0) == str(lock) == "free"
    lock.ask("actor:3", 1.0)
    assert lock.describe(5.0) == "held by actor:3 for 4 s"
    lock.ask("a", 2.0)
    lock.ask("b", 2.0)
    assert lock.describe(5.2) == "held by actor:3 for 4 s, 2 waiting"
    assert str(lock) == "held by actor:3, 2 waiting"
    lock.release("actor:3")
    assert lock.describe(9.0) == "held by a, 1 waiting"


names = st.sampled_from("abcdef")
steps = st.one_of(
    st.tuples(st.just("ask"), names),
    st.tuples(st.just("give_up"), names),
    st.tuples(st.just("release"), names),
    st.tuples(st.just("bury"), st.sets(names)),
)


@given(st.lists(steps, max_size=40))
def test_in_any_order_of_events_the_lock_goes_to_who_waited_longest(todo):
    lock, line = LockState(), []
    for now, (step, name) in enumerate(todo):
        if step == "ask":
            line += [] if name in line else [name]
            assert lock.ask(name, now) == (line[0] == name)
        elif step == "release" and line[:1] != [name]:
            with pytest.raises(ConfigError):
                lock.release(name, now)
        elif step == "bury":
            line = [one for one in line if one not in name]
            lock.bury(name, now)
        else:
            line = [one for one in line if one != name]
            getattr(lock, step)(name, now)
        assert [lock.holder, *lock.waiting] == (line or [None])
        assert (lock.since is None) == (lock.holder is None)
