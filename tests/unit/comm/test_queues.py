"""The queues of a channel: what each event leads to, and a model with which clients that die at random must agree."""

from __future__ import annotations

import asyncio
import math
from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from roost.comm.channels.queues import Answer, Item, Queues, Recall, SetAside, Status, Want

ONE = Want()
NOW = Want(waits=False)


def things(*contents, weight=0, size=0):
    return [Item(content, weight, size) for content in contents]


def said(events):
    """Events in short: who, which request, how it ended, and with what."""
    found = []
    for event in events:
        if isinstance(event, Answer):
            got = [item.content for item in event.items]
            word = event.status.name.lower()
            found.append((event.client, event.number, word, got) if got else (event.client, event.number, word))
        else:
            found.append((event.client, event.number, "recall"))
    return found


class Story:
    """Queues, and requests that number themselves."""

    def __init__(self, *args, **kwargs):
        self.queues = Queues(*args, **kwargs)
        self.number = 0

    def put(self, client, *contents, key="k", weight=0, size=0, waits=True):
        self.number += 1
        return said(self.queues.put(client, self.number, key, things(*contents, weight=weight, size=size), waits))

    def get(self, client, want=ONE, key="k"):
        self.number += 1
        return said(self.queues.get(client, self.number, key, want))

    def ack(self, client, number, count=0):
        return said(self.queues.acknowledge(client, number, count))


def test_items_come_out_in_order_and_each_key_is_a_queue_of_its_own():
    story = Story()
    assert story.put("p", "a") == [("p", 1, "done")]
    story.put("p", "x", key="other")
    story.put("p", "b")
    assert story.get("c") == [("c", 4, "done", ["a"])]
    assert story.get("c") == [("c", 5, "done", ["b"])]
    assert story.get("c", key="other") == [("c", 6, "done", ["x"])]


def test_a_get_that_waits_gets_what_is_put_next_and_those_before_it_come_first():
    story = Story()
    assert story.get("c") == story.get("d") == []
    assert story.put("p", "a") == [("p", 3, "done"), ("c", 1, "done", ["a"])]
    assert story.put("p", "b") == [("p", 4, "done"), ("d", 2, "done", ["b"])]


def test_calls_that_do_not_wait_end_at_once():
    story = Story(maxsize=1)
    assert story.get("c", NOW) == [("c", 1, "empty")]
    assert story.get("c", Want(5, 0, None, False)) == [("c", 2, "done")]
    assert story.put("p", "a", waits=False) == [("p", 3, "done")]
    assert story.put("p", "b", waits=False) == [("p", 4, "full")]
    assert story.get("c", NOW) == [("c", 5, "done", ["a"])]


def test_a_put_into_a_full_queue_waits_for_a_place():
    story = Story(maxsize=1)
    story.put("p", "a")
    assert story.put("p", "b") == story.put("q", "c") == []
    assert story.get("c") == [("c", 4, "done", ["a"]), ("p", 2, "done")]
    assert story.get("c") == [("c", 5, "done", ["b"]), ("q", 3, "done")]


def test_bytes_are_limited_over_all_keys_until_they_are_acknowledged():
    story = Story(max_bytes=10)
    story.put("p", "a", size=6)
    assert story.put("p", "b", size=6, key="other") == []
    assert story.get("c") == [("c", 3, "done", ["a"])]
    assert story.ack("c", 3) == [("p", 2, "done")]
    # One that is larger than the limit goes through alone.
    assert story.put("p", "big", size=99) == []
    story.get("c", key="other")
    assert story.ack("c", 5) == [("p", 4, "done")]


def test_small_items_do_not_overtake_a_large_one_that_waits_for_bytes():
    story = Story(max_bytes=10)
    story.put("p", "a", size=8)
    assert story.put("p", "large", size=8, key="other") == []
    assert story.put("p", "small", size=1, key="third") == []
    story.get("c")
    assert story.ack("c", 4) == [("p", 2, "done"), ("p", 3, "done")]


def test_a_get_that_needs_more_than_the_limits_allow_is_served():
    story = Story(maxsize=2, max_bytes=10)
    assert story.get("c", Want(5, 5)) == []
    for content in "abcd":
        assert story.put("p", content, size=9)[0][2] == "done"
    assert story.put("p", "e") == [("p", 6, "done"), ("c", 1, "done", list("abcde"))]


def test_a_batch_takes_items_while_they_fit_and_nothing_before_it_is_complete():
    story = Story()
    story.put("p", "a", weight=2)
    assert story.get("c", Want(target=5)) == []
    assert story.queues.depth("k") == 1
    story.put("p", "b", weight=2)
    # The next one does not fit any more: that is a batch of 4.
    assert story.put("p", "c", weight=2) == [("p", 4, "done"), ("c", 2, "done", ["a", "b"])]
    assert story.get("c", Want(target=2)) == [("c", 5, "done", ["c"])]


def test_a_batch_is_not_overtaken_and_two_do_not_hoard():
    story = Story()
    assert story.get("c", Want(target=2)) == story.get("d", Want(target=2)) == story.get("e") == []
    story.put("p", "a", weight=1)
    assert story.get("f", NOW) == [("f", 5, "empty")]
    assert story.put("p", "b", weight=1)[1:] == [("c", 1, "done", ["a", "b"])]
    story.put("p", "c", weight=1)
    assert story.put("p", "d", weight=1)[1:] == [("d", 2, "done", ["c", "d"])]
    assert story.put("p", "e", weight=1)[1:] == [("e", 3, "done", ["e"])]


def test_an_item_too_heavy_for_a_batch_ends_that_batch_and_the_next_get_has_it():
    story = Story()
    assert story.get("c", Want(target=2)) == story.get("d") == []
    (done, heavy, taken) = story.queues.put("p", 9, "k", [Item("a", 7)])
    assert (heavy.status, heavy.weight) == (Status.TOO_HEAVY, 7)
    assert said([done, taken]) == [("p", 9, "done"), ("d", 2, "done", ["a"])]


def test_items_without_weight_go_along_until_the_batch_is_full():
    story = Story()
    story.put("p", "a", "b")
    story.put("p", "c", weight=1)
    story.put("p", "d")
    assert story.get("c", Want(target=1)) == [("c", 4, "done", ["a", "b", "c"])]


def test_what_was_not_acknowledged_goes_back_to_its_place_when_the_client_dies():
    story = Story()
    story.put("p", *"abcd")
    for client in "xyz":
        story.get(client)
    story.ack("y", 3)
    assert said(story.queues.drop_client("z")) == []
    assert said(story.queues.drop_client("x")) == []
    assert story.get("c", Want(9, 0, None, False))[0][3] == ["a", "c", "d"]


def test_an_item_that_three_clients_died_with_is_set_aside():
    story = Story(max_bytes=10)
    story.put("p", "deadly", size=10)
    for number, client in enumerate("xyz", start=2):
        assert story.get(client) == [(client, number, "done", ["deadly"])]
        events = story.queues.drop_client(client)
        assert events == ([SetAside("z", "k", 1)] if client == "z" else [])
    assert story.queues.bytes == 0
    assert story.queues.stats()["keys"]["k"]["set_aside"] == 1
    assert story.put("p", "next", size=10) == [("p", 5, "done")]


def test_what_an_iterator_had_ahead_and_a_token_survive_any_number_of_deaths():
    story = Story()
    story.put("p", *"ab")
    for client in "vwxyz":
        story.get(client, Want(64, 1, ahead=True))
        assert said(story.queues.drop_client(client)) == []
    assert story.get("c", Want(9, 2))[0][3] == ["a", "b"]
    story.queues.put("p", 99, "lock", [Item("token", lives=math.inf)])
    for client in "vwxyz":
        assert story.get(client, key="lock")[0][3] == ["token"]
        assert story.queues.drop_client(client) == []


def test_a_get_drops_what_is_too_old_as_soon_as_it_is_its_turn():
    story = Story(maxsize=4)
    old = [Item(content, version=1) for content in "abc"]
    story.queues.put("p", 1, "k", old)
    story.number = 1
    assert story.put("p", "x", "y") == []
    assert said(story.queues.put("q", 8, "k", [Item("z", version=5)])) == []
    # Those that were put before have version 0.
    assert said(story.queues.get("c", 9, "k", Want(1, 1, min_version=2))) == [
        ("p", 2, "done"),
        ("q", 8, "done"),
        ("c", 9, "done", ["z"]),
    ]
    kept = story.queues.stats()["keys"]["k"]
    assert (kept["dropped"], kept["depth"], kept["leased"], kept["versions"]) == (5, 0, 1, (None, None))


def test_what_a_get_drops_makes_room_for_puts_under_other_keys():
    story = Story(max_bytes=10)
    story.put("p", "old", size=10)
    assert story.put("p", "other", size=10, key="other") == []
    assert said(story.queues.get("c", 9, "k", Want(1, 0, None, False, min_version=1))) == [
        ("c", 9, "done"),
        ("p", 2, "done"),
    ]


def test_a_put_as_a_whole_goes_in_at_once_and_is_not_overtaken():
    story = Story(maxsize=3)
    story.put("p", "a", "b")
    assert story.queues.put("p", 2, "k", things("c", "d"), True, True) == []
    story.number = 2
    assert story.put("p", "e") == []
    assert story.get("c") == [("c", 4, "done", ["a"]), ("p", 2, "done")]
    assert story.get("c") == [("c", 5, "done", ["b"]), ("p", 3, "done")]
    assert story.get("c") == [("c", 6, "done", ["e"])]
    assert story.ack("p", 2) == []
    assert story.get("c", Want(9, 1)) == [("c", 7, "done", ["c", "d"])]
    story.put("p", "f", "g")
    assert story.queues.put("p", 9, "k", things("h", "i"), True, True) == []
    (cancelled,) = story.queues.cancel("p", 9)
    assert (cancelled.status, cancelled.accepted) == (Status.CANCELLED, 0)


@pytest.mark.parametrize("how", ["it is withdrawn", "the client dies"])
def test_a_put_as_a_whole_that_is_not_acknowledged_never_goes_in(how):
    story = Story(maxsize=3, max_bytes=9)
    assert said(story.queues.put("p", 1, "k", things("a", "b", size=3), True, True)) == [("p", 1, "done")]
    story.number = 1
    # It has its room.
    assert story.put("q", "c", "d", size=3) == []
    assert story.queues.depth("k") == 1
    events = story.queues.cancel("p", 1) if how == "it is withdrawn" else story.queues.drop_client("p")
    assert said(events) == [("q", 2, "done")]
    assert story.ack("p", 1) == []
    assert story.get("c", Want(9, 1)) == [("c", 3, "done", ["c", "d"])]


def test_a_get_that_waits_for_more_than_there_is_room_lets_a_whole_put_in():
    story = Story(maxsize=4)
    story.put("p", "a", "b", "c")
    assert story.get("c", Want(4, 4)) == []
    assert said(story.queues.put("p", 9, "k", things("d", "e"), True, True)) == [
        ("p", 9, "done"),
    ]
    # That is enough: another one waits.
    assert story.queues.put("p", 10, "k", things("f"), True, True) == []
    assert story.ack("p", 9)[0] == ("c", 2, "done", ["a", "b", "c", "d"])


def test_a_dead_client_is_no_longer_in_the_way():
    story = Story(maxsize=1)
    story.get("c", Want(target=5))
    story.get("d")
    assert said(story.queues.drop_client("c")) == []
    assert story.put("p", "a")[1:] == [("d", 2, "done", ["a"])]
    story.put("p", "b")
    story.put("dead", "lost")
    story.put("q", "c")
    story.queues.drop_client("dead")
    assert story.get("e") == [("e", 7, "done", ["b"]), ("q", 6, "done")]
    assert story.get("e") == [("e", 8, "done", ["c"])]


def test_a_request_that_is_cancelled_is_answered_and_what_it_got_goes_back():
    story = Story(maxsize=1)
    story.get("c")
    assert said(story.queues.cancel("c", 1)) == [("c", 1, "cancelled")]
    story.put("p", "a")
    story.put("p", "b")
    assert said(story.queues.cancel("p", 3)) == [("p", 3, "cancelled")]
    story.get("c")
    assert said(story.queues.cancel("c", 4)) == []
    assert said(story.queues.cancel("c", 4)) == []
    assert story.get("d") == [("d", 5, "done", ["a"])]


def test_a_cancelled_put_of_several_says_how_many_are_in():
    story = Story(maxsize=2)
    assert story.put("p", *"abc") == []
    (cancelled,) = story.queues.cancel("p", 1)
    assert (cancelled.status, cancelled.accepted) == (Status.CANCELLED, 2)


def test_after_close_puts_fail_and_gets_take_what_is_left():
    story = Story(maxsize=2)
    story.put("p", *"abc")
    story.get("c", Want(9, 9), key="other")
    assert said(story.queues.close()) == [("p", 1, "closed"), ("c", 2, "closed")]
    assert story.put("p", "d") == [("p", 3, "closed")]
    assert story.get("c", Want(target=9)) == [("c", 4, "done", ["a", "b"])]
    assert story.get("c") == [("c", 5, "closed")]
    # What another client has may come back.
    assert story.get("d") == []
    assert said(story.queues.drop_client("c")) == [("d", 6, "done", ["a"])]


def test_an_iterator_gets_a_fair_part_ahead_and_returns_it_when_others_wait():
    story = Story(maxsize=4)
    story.put("p", *"abcd")
    assert story.get("c", Want(64, 1, None, True, True)) == [("c", 2, "done", list("abcd"))]
    # Until they are handed out they are in the queue.
    assert story.queues.depth("k") == 4
    assert story.queues.is_full("k")
    assert story.ack("c", 2, 1) == []
    assert story.queues.depth("k") == 3
    assert story.get("d") == [("c", 2, "recall")]
    assert story.get("e") == []
    assert said(story.queues.cancel("c", 2)) == [("d", 3, "done", ["b"]), ("e", 4, "done", ["c"])]
    assert story.get("f", Want(64, 1, None, True, True)) == [("f", 5, "done", ["d"])]


def test_a_key_is_freed_when_it_is_empty_and_unused():
    queues = Queues(maxsize=1)
    queues.put("p", 1, "k", things("a"))
    queues.get("c", 2, "k", ONE)
    assert "k" in queues._lines
    queues.acknowledge("c", 2)
    assert "k" not in queues._lines
    queues.get("c", 3, "k", ONE)
    assert said(queues.cancel("c", 3)) == [("c", 3, "cancelled")]
    assert "k" not in queues._lines
    # Its counts are kept.
    (kept,) = queues.stats()["keys"].values()
    assert (kept["depth"], kept["puts"], kept["gets"]) == (0, 1, 1)
    for number in range(1000):
        queues.put("p", 2 * number + 4, number, things("a"))
        queues.get("c", 2 * number + 5, number, ONE)
        queues.acknowledge("c", 2 * number + 5)
    assert len(queues.stats()["keys"]) == 256


def test_stats_say_who_waits():
    story = Story(maxsize=1)
    story.put("p", "a", size=5)
    story.put("p", "b")
    story.get("c", key="other")
    keys = story.queues.stats()["keys"]
    assert keys["k"] | {"putters": {"p": 1}, "depth": 1, "bytes": 5} == keys["k"]
    assert keys["other"]["getters"] == {"c": 1}


CLIENTS = st.sampled_from(["a", "b", "c"])
KEYS = st.sampled_from(["k", "l"])


class Model(RuleBasedStateMachine):
    """Clients put, get, acknowledge, give up and die at random; a simple model knows what must be true."""

    def __init__(self):
        super().__init__()
        self.queues = Queues(maxsize=3, max_bytes=20)
        self.number = 0
        self.made = 0
        self.waiting: dict[tuple[str, int], tuple[str, list[int] | Want]] = {}
        self.inside: dict[str, list[int]] = {"k": [], "l": []}
        """By key, in order: what was accepted and not acknowledged."""
        self.held: dict[tuple[str, int], tuple[str, deque[int]]] = {}
        self.taken: dict[str, list[int]] = {"k": [], "l": []}
        self.offered: dict[tuple[str, int], tuple[str, list[int]]] = {}
        self.promised: set[int] = set()
        """What a put was told is in the queue."""
        self.refused: set[int] = set()
        self.weights: dict[int, int] = {}

    def new(self):
        self.number += 1
        return self.number

    def accept(self, events):
        for event in events:
            if isinstance(event, Recall):
                assert (event.client, event.number) in self.held
                continue
            request = event.client, event.number
            key, asked = self.waiting.pop(request)
            if isinstance(asked, list):
                assert event.accepted <= len(asked)
                if event.status is Status.DONE:
                    assert event.accepted == len(asked)
                self.promised |= set(asked[: event.accepted])
                self.refused |= set(asked[event.accepted :])
                self.sync(key)
            elif event.items:
                got = [item.content for item in event.items]
                self.sync(key)
                free = self.free(key)
                assert got == free[: len(got)], "in order, and each to one client"
                self.check(asked, got, free)
                self.held[request] = key, deque(got)

    def sync(self, key):
        """Items that were accepted are those in the queue that are not known yet, in order."""
        known = set(self.inside[key]) | set(self.taken[key])
        line = self.queues._lines.get(key)
        leases = line.leases.values() if line else ()
        leased = [item.content for lease in leases for item in lease.items]
        there = sorted([item.content for item in line.items] + leased) if line else leased
        self.inside[key] += [content for content in there if content not in known]

    def free(self, key):
        held = {content for where, contents in self.held.values() if where == key for content in contents}
        return sorted(set(self.inside[key]) - held)

    def check(self, want, got, free):
        if want.target is None:
            assert len(got) <= want.most
            assert len(got) >= want.least or self.queues.is_closed
        else:
            total = sum(self.weights[content] for content in got)
            assert total <= want.target
            after = free[len(got) : len(got) + 1]
            full = total == want.target or any(total + self.weights[content] > want.target for content in after)
            assert full or self.queues.is_closed

    @rule(client=CLIENTS, key=KEYS, weights=st.lists(st.integers(0, 4), min_size=1, max_size=4), waits=st.booleans())
    def put(self, client, key, weights, waits):
        items = []
        for weight in weights if waits else weights[:1]:
            self.made += 1
            self.weights[self.made] = weight
            # None is ever set aside: what is lost would be lost for a reason.
            items.append(Item(self.made, weight, weight * 3, lives=math.inf))
        number = self.new()
        self.waiting[client, number] = key, [item.content for item in items]
        self.offered[client, number] = key, [item.content for item in items]
        self.accept(self.queues.put(client, number, key, items, waits))

    @rule(client=CLIENTS, key=KEYS, most=st.integers(1, 4), least=st.integers(0, 4), ahead=st.booleans())
    def get(self, client, key, most, least, ahead):
        want = Want(most, 1, ahead=True) if ahead else Want(most, min(most, least), None, least > 0)
        number = self.new()
        self.waiting[client, number] = key, want
        self.accept(self.queues.get(client, number, key, want))

    @rule(client=CLIENTS, key=KEYS, weight=st.integers(1, 6))
    def get_batch(self, client, key, weight):
        number = self.new()
        self.waiting[client, number] = key, Want(target=float(weight))
        self.accept(self.queues.get(client, number, key, Want(target=float(weight))))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), one=st.booleans())
    def acknowledge(self, data, one):
        request = data.draw(st.sampled_from(sorted(self.held)))
        key, contents = self.held[request]
        gone = [contents.popleft()] if one else list(contents)
        if not one or not contents:
            del self.held[request]
        self.taken[key] += gone
        self.inside[key] = [content for content in self.inside[key] if content not in gone]
        self.accept(self.queues.acknowledge(*request, 1 if one else 0))

    @precondition(lambda self: self.held or self.waiting)
    @rule(data=st.data())
    def cancel(self, data):
        request = data.draw(st.sampled_from(sorted([*self.held, *self.waiting])))
        self.held.pop(request, None)
        self.accept(self.queues.cancel(*request))
        assert request not in self.waiting

    @rule(client=CLIENTS)
    def die(self, client):
        for request in [request for request in self.waiting if request[0] == client]:
            key, _ = self.waiting.pop(request)
        for request in [request for request in self.held if request[0] == client]:
            del self.held[request]
        self.accept(self.queues.drop_client(client))
        for key in ("k", "l"):
            self.sync(key)

    @precondition(lambda self: not self.queues.is_closed)
    @rule(really=st.integers(0, 19))
    def close(self, really):
        if really == 0:
            self.accept(self.queues.close())

    @invariant()
    def nothing_is_lost_or_doubled(self):
        for key in ("k", "l"):
            self.sync(key)
            line = self.queues._lines.get(key)
            there = [item.content for item in line.items] if line else []
            assert there == self.free(key), "in order, and all of it"
            assert not set(self.taken[key]) & set(self.inside[key])

    @invariant()
    def what_was_accepted_is_what_was_offered(self):
        offered = {content for _, contents in self.offered.values() for content in contents}
        assert {content for contents in self.inside.values() for content in contents} <= offered

    @invariant()
    def bytes_are_those_of_the_items(self):
        for key in ("k", "l"):
            self.sync(key)
        sizes = [3 * self.weights[content] for contents in self.inside.values() for content in contents]
        assert self.queues.bytes == sum(sizes)

    @invariant()
    def the_first_that_waits_waits_for_something_that_is_not_there(self):
        for line in self.queues._lines.values():
            assert not (line.getters and line.putters), "what a get lacks is accepted"
            if line.getters:
                want = next(iter(line.getters.values())).want
                if want.target is None:
                    assert len(line.items) < want.least

    @invariant()
    def no_key_is_kept_for_nothing(self):
        assert not [key for key, line in self.queues._lines.items() if line.is_unused]

    def teardown(self):
        """Everything that a put was told is in the queue comes out, once and in order, and nothing that it was not."""
        for client in "abc":
            self.queues.drop_client(client)
        self.queues.close()
        left = []
        for key in ("k", "l"):
            events = self.queues.get("last", self.new(), key, Want(10**6, 1))
            drained = [item.content for event in events for item in event.items]
            assert drained == sorted(drained)
            left += drained
        taken = [content for contents in self.taken.values() for content in contents]
        assert len(set(taken + left)) == len(taken + left)
        assert self.promised <= set(taken + left)
        assert not self.refused & set(taken + left)


Model.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestModel = Model.TestCase


def test_a_failed_wait_leaves_no_trace_in_a_local_channel():
    from roost import CallTimedOut, Channel

    channel = Channel.create("test-queues-wait", local=True)
    with pytest.raises(CallTimedOut, match=r"has no item after 0.01 s"):
        channel.get(timeout=0.01)
    with pytest.raises(asyncio.QueueEmpty):
        channel.get_nowait()
    channel.put("kept")
    assert channel.get() == "kept"
    assert channel.stats()["keys"]["default_queue"]["depth"] == 0
