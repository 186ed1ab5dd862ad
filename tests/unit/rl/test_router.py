"""The router: real engines behind real sockets, and an answer to every request whatever happens to them."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import re
import socket
import threading
import time

import psutil
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from roost.deadline import Deadline
from roost.errors import CallTimedOut, ClusterError, ConfigError
from roost.rl.engine_pool import EnginePool, EngineState
from roost.rl.json_request import ask as ask_engine
from roost.rl.router import Router, RouterOptions, check_engine_url
from roost.rl.web import ServerLimits
from roost.testing import NumpyEngine
from routing import (
    ENGINE_SECRET,
    LONG,
    OURS,
    REQUEST,
    SECRET,
    Held,
    OddEngine,
    ask,
    begin,
    break_at_once,
    connect,
    exchange,
    generate,
    is_healthy,
    said,
    state,
)
from sockets import free_port
from waiting import wait_until

pytestmark = pytest.mark.heavy

# The decision


def healthy_pool(*urls):
    pool = EnginePool()
    for url in urls:
        pool.join(url)
        pool.mark(url, True)
    return pool


def urls_of(known):
    return [state.url for state in known.states()]


def test_a_new_engine_gets_nothing_before_it_is_healthy():
    pool = EnginePool()
    pool.join("a")
    assert pool.pick() is None
    assert pool.states() == [
        EngineState(url="a", healthy=False, busy=0, served=0, failed=0, is_leaving=False, why="not checked yet")
    ]
    pool.mark("a", True)
    assert pool.pick() == "a"
    assert pool.states() == [EngineState(url="a", healthy=True, busy=1, served=0, failed=0, is_leaving=False, why="")]


def test_idle_engines_take_turns():
    pool = healthy_pool("a", "b", "c")
    picked = []
    for _ in range(7):
        picked.append(pool.pick())
        pool.done(picked[-1])
    assert picked == ["a", "b", "c", "a", "b", "c", "a"]


def test_the_least_busy_engine_is_picked():
    pool = healthy_pool("a", "b", "c")
    assert [pool.pick() for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]
    pool.done("b")
    pool.done("b")
    pool.done("c")
    assert [pool.pick() for _ in range(3)] == ["b", "c", "b"]


def test_engines_that_were_tried_are_passed_over():
    pool = healthy_pool("a", "b")
    assert pool.pick({"a"}) == "b"
    assert pool.pick({"a"}) == "b"
    assert pool.pick({"a", "b"}) is None
    assert pool.has_more({"a"})
    assert not pool.has_more({"a", "b"})


def test_an_unhealthy_engine_is_passed_over_until_it_is_well_again():
    pool = healthy_pool("a", "b")
    pool.mark("a", False, "it broke")
    assert [pool.pick(), pool.pick()] == ["b", "b"]
    assert pool.states()[0].why == "it broke"
    assert pool.has_more({"b"}), "it may be healthy again"
    pool.mark("a", True)
    assert pool.pick() == "a"
    assert pool.states()[0].why == ""


def test_done_counts_how_requests_ended():
    pool = healthy_pool("a")
    for outcome in ("served", "failed", "served", "cancelled", "served"):
        pool.pick()
        pool.done("a", outcome)
    assert pool.states() == [EngineState(url="a", healthy=True, served=3, failed=1, cancelled=1, why="")]
    for url in ("a", "unknown"):
        with pytest.raises(ConfigError, match="is serving no request"):
            pool.done(url)


def test_an_engine_that_leaves_ends_what_it_has_and_gets_nothing_new():
    pool = healthy_pool("a", "b")
    assert [pool.pick(), pool.pick(), pool.pick()] == ["a", "b", "a"]
    assert pool.leave("a")
    assert [pool.pick(), pool.pick()] == ["b", "b"]
    assert pool.states()[0].is_leaving
    pool.done("a")
    assert urls_of(pool) == ["a", "b"]
    pool.done("a")
    assert urls_of(pool) == ["b"]
    assert not pool.leave("a")


def test_an_idle_engine_that_leaves_is_gone_immediately():
    pool = healthy_pool("a")
    assert pool.leave("a")
    assert urls_of(pool) == []
    pool.mark("a", True)
    assert urls_of(pool) == [], "a check that comes late brings nothing back"


def test_an_engine_that_comes_back_while_it_leaves_is_checked_again_and_keeps_its_requests():
    pool = healthy_pool("a")
    pool.pick()
    pool.leave("a")
    pool.join("a")
    assert pool.pick() is None
    assert (pool.states()[0].busy, pool.states()[0].why) == (1, "not checked yet")
    pool.mark("a", True)
    pool.done("a")
    assert urls_of(pool) == ["a"]


def test_joining_again_changes_nothing():
    pool = healthy_pool("a")
    pool.pick()
    pool.join("a")
    assert (pool.states()[0].healthy, pool.states()[0].busy) == (True, 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda pool: pool.join("b"),
        lambda pool: pool.leave("a"),
        lambda pool: pool.mark("a", False),
        EnginePool.wake,
    ],
)
def test_a_change_wakes_those_that_wait_for_one(change):
    pool = healthy_pool("a")
    changed = pool.changed
    pool.mark("a", True)
    assert not changed.is_set(), "that is not news"
    change(pool)
    assert changed.is_set()
    assert not pool.changed.is_set(), "the next change has its own event"


SESSIONS = [f"session {number}" for number in range(300)]


def places(pool):
    """The engine of each session."""
    return {session: pool.pick(session=session) for session in SESSIONS}


def test_a_session_keeps_its_engine_however_busy_it_is_and_sessions_spread_over_all():
    pool = healthy_pool("a", "b", "c")
    before = places(pool)
    assert places(pool) == before == places(healthy_pool("a", "b", "c")), "also after a restart of the router"
    assert all(60 < list(before.values()).count(url) < 140 for url in "abc")


@pytest.mark.parametrize(
    "lose", [lambda pool: pool.mark("b", False), lambda pool: pool.bury("b", "died"), lambda pool: pool.leave("b")]
)
def test_only_the_sessions_of_an_engine_that_cannot_serve_move(lose):
    pool = healthy_pool("a", "b", "c")
    before = places(pool)
    lose(pool)
    after = places(pool)
    moved = {after[session] for session in SESSIONS if before[session] == "b"}
    assert moved == {"a", "c"}
    assert [after[one] for one in SESSIONS if before[one] != "b"] == [
        before[one] for one in SESSIONS if before[one] != "b"
    ]
    assert places(pool) == after


def test_sessions_come_back_to_an_engine_that_is_well_again_or_that_was_restarted_at_another_address():
    pool = healthy_pool("a", "b", "c")
    before = places(pool)
    pool.mark("b", False)
    pool.mark("b", True)
    assert places(pool) == before
    pool.bury("b", "died")
    pool.leave("b")
    pool.join("d")
    pool.mark("d", True)
    assert places(pool) == {session: "d" if url == "b" else url for session, url in before.items()}


def test_an_engine_that_refused_a_request_of_its_session_is_passed_over():
    pool = healthy_pool("a", "b")
    (first,) = {pool.pick(session="s") for _ in range(3)}
    assert {pool.pick({first}, "s")} == {"a", "b"} - {first}


class Pools(RuleBasedStateMachine):
    """Any order of events, on a pool and on a plain model of it."""

    def __init__(self):
        super().__init__()
        self.pool = EnginePool()
        self.busy, self.healthy, self.leaving = {}, set(), set()

    @rule(url=st.sampled_from("abcd"))
    def join(self, url):
        self.pool.join(url)
        self.busy.setdefault(url, 0)
        if url in self.leaving:
            self.leaving.discard(url)
            self.healthy.discard(url)

    @rule(url=st.sampled_from("abcd"))
    def leave(self, url):
        assert self.pool.leave(url) == (url in self.busy)
        if url in self.busy:
            self.leaving.add(url)
            self.forget(url)

    @rule(url=st.sampled_from("abcd"), healthy=st.booleans())
    def mark(self, url, healthy):
        self.pool.mark(url, healthy)
        if url in self.busy:
            (self.healthy.add if healthy else self.healthy.discard)(url)

    @rule(excluding=st.sets(st.sampled_from("abcd"), max_size=2))
    def pick(self, excluding):
        able = (self.healthy - self.leaving) - excluding
        url = self.pool.pick(excluding)
        if url is None:
            assert not able
        else:
            assert url in able
            assert self.busy[url] == min(self.busy[one] for one in able)
            self.busy[url] += 1

    @rule(url=st.sampled_from("abcd"))
    def done(self, url):
        if self.busy.get(url):
            self.pool.done(url)
            self.busy[url] -= 1
            self.forget(url)

    def forget(self, url):
        if url in self.leaving and not self.busy[url]:
            del self.busy[url]
            self.leaving.discard(url)
            self.healthy.discard(url)

    @invariant()
    def they_agree(self):
        states = self.pool.states()
        assert {state.url: state.busy for state in states} == self.busy
        assert {state.url for state in states if state.healthy} == self.healthy
        assert {state.url for state in states if state.is_leaving} == self.leaving


TestPools = Pools.TestCase


@pytest.mark.parametrize(
    "url", ["http://10.0.0.7:20300", "http://localhost:1", "http://[::1]:65535", "http://a-b.c:80"]
)
def test_the_url_of_an_engine_is_its_host_and_port(url):
    assert check_engine_url(url) == url


BAD_URLS = [
    "10.0.0.7:20300",
    "https://10.0.0.7:20300",
    "http://10.0.0.7",
    "http://10.0.0.7:0",
    "http://10.0.0.7:65536",
    "http://10.0.0.7:20300/",
    "http://10.0.0.7:20300/x",
    "http://10.0.0.7:20300\n",
    "http://me@10.0.0.7:20300",
    "http://::1:20300",
    "http://:20300",
    "",
    None,
    7,
    ["http://10.0.0.7:20300"],
]


@pytest.mark.parametrize("url", BAD_URLS)
def test_what_is_not_the_url_of_an_engine_is_refused(url):
    with pytest.raises(ConfigError, match="it is http://host:port"):
        check_engine_url(url)
    with pytest.raises(ConfigError, match="it is http://host:port"):
        Router("127.0.0.1", 0).join(url, ENGINE_SECRET)


# Requests


def test_a_request_is_answered_by_an_engine_and_the_header_names_it(engine, router):
    one = engine()
    status, answer, by = generate(router(one))
    assert (status, by) == (200, one.url)
    assert answer == one.generate(REQUEST)


def test_idle_engines_take_turns_over_http(engine, router):
    engines = [engine() for _ in range(3)]
    behind = router(*engines)
    assert [generate(behind)[1]["engine"] for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_a_busy_engine_is_passed_over(engine, router, aside):
    held, other = engine(Held()), engine()
    behind = router(held, other)
    first = aside.submit(generate, behind)
    assert held.asked.wait(LONG)
    assert [generate(behind)[2] for _ in range(3)] == [other.url] * 3
    held.go.set()
    assert first.result(LONG)[2] == held.url


def test_several_requests_go_over_one_connection(engine, router):
    behind = router(engine())
    with contextlib.closing(connect(behind.url)) as connection:
        connection.connect()
        line = connection.sock
        for _ in range(3):
            assert exchange(connection, "POST", "/generate", REQUEST)[0].status == 200
            assert exchange(connection, "GET", "/nothing")[0].status == 404
        assert connection.sock is line


def test_a_body_goes_through_unchanged_both_ways_with_its_content_type(engine, router):
    seen = []

    def odd(handler):
        seen.append((handler.path, handler.headers["Content-Type"]))
        OddEngine.say(handler, 201, bytes(range(256)), "application/x-odd; a=b")

    behind = router(engine(OddEngine(odd)))
    with contextlib.closing(connect(behind.url)) as connection:
        connection.request("POST", "/generate", b"\x00\xff", OURS | {"Content-Type": "text/x-mine"})
        response = connection.getresponse()
        assert (response.status, response.read()) == (201, bytes(range(256)))
        assert response.getheader("Content-Type") == "application/x-odd; a=b"
    assert seen == [("/generate", "text/x-mine")]


@pytest.mark.parametrize("status", [400, 404, 429, 500, 502])
def test_an_error_that_an_engine_answers_is_an_answer(engine, router, status):
    odd = engine(OddEngine(lambda handler: OddEngine.say(handler, status, b'{"error": "no"}')))
    other = engine()
    behind = router(odd, other)
    assert generate(behind) == (status, {"error": "no"}, odd.url)
    assert state(behind, odd.url).served == 1
    assert is_healthy(behind, odd.url)
    assert state(behind, other.url).served == 0, "the router asked no other engine"


def test_a_bad_request_is_refused_by_the_engine_itself(engine, router):
    status, answer, by = generate(router(one := engine()), {"observations": "none"})
    assert (status, by) == (400, one.url)
    assert "observations" in answer["error"]["message"]


def test_an_engine_without_room_has_its_request_served_elsewhere(engine, router):
    full, other = engine(), engine()
    behind = router(full, other)
    full.offload()
    assert [generate(behind)[2] for _ in range(4)] == [other.url] * 4
    assert is_healthy(behind, full.url)
    assert state(behind, full.url).failed >= 1
    full.onload()
    assert full.url in {generate(behind)[2] for _ in range(2)}


def test_if_no_engine_has_room_each_is_named_with_what_it_said(engine, router):
    engines = [engine(), engine()]
    behind = router(*engines)
    for one in engines:
        one.offload()
    status, answer, by = generate(behind)
    assert (status, by) == (503, None)
    assert answer["error"]["message"] == "none of 2 engines could serve the request"
    assert answer["error"]["engines"] == [
        {"url": one.url, "why": "answered 503: the engine does not serve: it is offloaded"} for one in engines
    ]


# Failures


def test_an_engine_killed_in_the_middle_of_a_request_has_it_served_elsewhere(engine, router, aside):
    held, other = engine(Held()), engine()
    behind = router(held, other, check_seconds=LONG)
    asked = aside.submit(generate, behind)
    assert held.asked.wait(LONG)
    url = held.url
    killing = aside.submit(held.stop, 0.0)
    status, _, by = asked.result(LONG)
    assert (status, by) == (200, other.url)
    dead = state(behind, url)
    assert (dead.healthy, dead.failed, dead.busy) == (False, 1, 0), "known immediately, without a check"
    assert "the connection broke" in dead.why
    held.go.set()
    killing.result(LONG)


def test_an_engine_that_cannot_be_reached_is_known_immediately_and_named(engine, router):
    gone = engine()
    behind = router(gone, check_seconds=LONG)
    gone.stop()
    status, answer, by = generate(behind, seconds=0.5)
    assert (status, by) == (503, None)
    assert answer["error"]["message"] == "none of 1 engine could serve the request within 0.5 s"
    assert [one["url"] for one in answer["error"]["engines"]] == [gone.url]
    assert "could not be reached" in answer["error"]["engines"][0]["why"]
    assert not is_healthy(behind, gone.url)


def break_in_the_head(handler):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-")
    break_at_once(handler)


def break_in_the_body(handler):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
    break_at_once(handler)


def talk_nonsense(handler):
    handler.wfile.write(b"hello\r\n\r\n")
    break_at_once(handler)


@pytest.mark.parametrize("how", [break_at_once, break_in_the_head, break_in_the_body, talk_nonsense])
def test_half_an_answer_is_never_passed_on(engine, router, how):
    odd, other = engine(OddEngine(how)), engine()
    behind = router(odd, other, check_seconds=LONG)
    status, answer, by = generate(behind)
    assert (status, by) == (200, other.url)
    assert answer == other.generate(REQUEST)
    assert not is_healthy(behind, odd.url)


def test_an_answer_in_chunks_is_read_to_its_end(engine, router):
    def in_chunks(handler):
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n[1, \r\n2\r\n2]\r\n0\r\n\r\n")

    assert generate(router(one := engine(OddEngine(in_chunks)))) == (200, [1, 2], one.url)


def test_an_engine_that_refuses_before_it_has_read_all_is_understood(engine, router):
    def refuse(handler):
        OddEngine.say(handler, 413, b'{"error": "too much"}')
        handler.close_connection = True

    early = engine(OddEngine(refuse, is_reading=False))
    behind = router(early)
    assert generate(behind, b" " * 8_000_000) == (413, {"error": "too much"}, early.url)
    assert state(behind, early.url).failed == 0


def test_an_engine_that_takes_too_long_is_named_and_no_other_is_asked(engine, router):
    slow, other = engine(Held()), engine()
    behind = router(slow, other)
    status, answer, by = generate(behind, seconds=0.2)
    assert (status, by) == (504, slow.url)
    assert said(answer) == f"engine {slow.url} had not answered after 0.2 s"
    assert (answer["error"]["code"], answer["error"]["engine"]) == ("engine_late", slow.url)
    assert state(behind, slow.url).failed == 1
    assert state(behind, other.url).served == 0


def test_an_engine_that_answers_drop_by_drop_takes_too_long_as_well(engine, router):
    over = threading.Event()

    def trickle(handler):
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        while not over.wait(0.02):
            handler.wfile.write(b" ")

    one = engine(OddEngine(trickle))
    behind = router(one)
    status, answer, _ = generate(behind, seconds=0.2)
    with pytest.raises(CallTimedOut, match=r"the engine has not answered in 0\.2 s"):
        ask_engine(one.url, "/generate", {}, secret=ENGINE_SECRET, timeout=0.2, who="the engine")
    over.set()
    assert status == 504
    assert "had not answered after 0.2 s" in said(answer)


def hanging(at_health, at_generate):
    """An engine whose server takes connections and answers only once the events are set, as a stopped process does."""

    def answer(handler):
        at_generate.wait(LONG)
        OddEngine.say(handler, 200, b"{}")

    def health(handler):
        at_health.wait(LONG)
        OddEngine.well(handler)

    return OddEngine(answer, health)


@pytest.fixture
def gates():
    """Two events, which are set after the test so that no engine waits for ever."""
    events = threading.Event(), threading.Event()
    yield events
    for event in events:
        event.set()


def test_a_request_at_an_engine_that_hangs_is_served_by_another_one(engine, router, aside, gates):
    gates[0].set()
    hung = engine(hanging(*gates))
    behind = router(hung, check_timeout=0.1, hang_seconds=0.1)
    asked = aside.submit(generate, behind)
    wait_until(lambda: state(behind, hung.url).busy == 1, "it has the request")
    gates[0].clear()
    wait_until(lambda: not is_healthy(behind, hung.url), "it hangs")
    assert not asked.done(), "there is no other engine: this one may yet answer"
    behind.join((other := engine()).url, ENGINE_SECRET)
    assert asked.result(LONG)[2] == other.url
    assert "had not answered" in state(behind, hung.url).why


def test_a_request_stays_at_an_engine_that_hangs_if_there_is_no_other(engine, router, aside, gates):
    gates[0].set()
    hung = engine(hanging(*gates))
    behind = router(hung, check_timeout=0.1, hang_seconds=0.01)
    asked = aside.submit(generate, behind)
    wait_until(lambda: state(behind, hung.url).busy == 1, "it has the request")
    gates[0].clear()
    wait_until(lambda: not is_healthy(behind, hung.url), "it hangs")
    gates[1].set()
    assert asked.result(LONG)[2] == hung.url


def test_a_request_with_little_time_reaches_another_engine_before_its_deadline(engine, router, aside, gates):
    gates[0].set()
    hung = engine(hanging(*gates))
    behind = router(hung, check_timeout=0.1, hang_seconds=LONG)
    asked = aside.submit(generate, behind, seconds=5)
    wait_until(lambda: state(behind, hung.url).busy == 1, "it has the request")
    gates[0].clear()
    behind.join((other := engine()).url, ENGINE_SECRET)
    assert asked.result(LONG)[::2] == (200, other.url)


def test_engines_may_die_under_load_and_every_request_is_answered(engine, router, aside):
    engines = [engine() for _ in range(3)]
    behind = router(*engines, most_broken=3)
    urls = [one.url for one in engines]
    died = threading.Event()

    def keep_asking(number):
        answers = []
        for turn in range(40):
            if number == 0 and turn == 10:
                engines[1].stop(0.0)
                died.set()
            answers.append(generate(behind))
        return answers

    def revive():
        assert died.wait(LONG)
        spec = engines[0].spec
        engines[0].stop(0.0)
        engines[0].start(spec)

    asking = [aside.submit(keep_asking, number) for number in range(8)]
    reviving = aside.submit(revive)
    answers = [answer for one in asking for answer in one.result(LONG)]
    reviving.result(LONG)
    assert [status for status, _, _ in answers] == [200] * 320
    assert {by for _, _, by in answers} <= set(urls)
    wait_until(lambda: is_healthy(behind, urls[0], urls[2]) and not is_healthy(behind, urls[1]), "health is known")
    states = behind.states()
    assert sum(one.served for one in states) == 320
    assert sum(one.busy for one in states) == 0


def test_many_clients_at_once_are_all_served(engine, router, aside):
    engines = [engine(Held()), engine(Held())]
    behind = router(*engines)
    asked = [aside.submit(generate, behind) for _ in range(24)]
    wait_until(lambda: [one.busy for one in behind.states()] == [12, 12], "all are at an engine, half at each")
    for one in engines:
        one.go.set()
    assert [one.result(LONG)[0] for one in asked] == [200] * 24


def test_a_client_that_goes_away_disturbs_no_other(engine, router, capfd, caplog):
    held = engine(Held())
    behind = router(held)
    connection = connect(behind.url)
    connection.request("POST", "/generate", json.dumps(REQUEST), OURS)
    assert held.asked.wait(LONG)
    # The connection is reset, not only closed: the router's answer cannot be written.
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    connection.close()
    with begin(behind.url, b"Content-Length: 100\r\n\r\n{"):
        pass
    held.go.set()
    wait_until(lambda: state(behind, held.url).busy == 0, "the request is over")
    assert generate(behind)[0] == 200
    assert (capfd.readouterr().err, caplog.records) == ("", [])


def test_half_a_request_is_never_passed_on(engine, router):
    behind = router(one := engine())
    with begin(behind.url, b"Content-Length: 100\r\n\r\n{") as half:
        half.shutdown(socket.SHUT_WR)
        assert half.recv(1) == b""
    assert (state(behind, one.url).served, state(behind, one.url).failed) == (0, 0)


# Health


def test_an_engine_is_not_used_before_it_has_answered_and_makes_no_other_one_wait(engine, router):
    go = threading.Event()

    def hang(handler):
        go.wait(LONG)
        OddEngine.well(handler)

    hanging, other = engine(OddEngine(on_health=hang)), engine()
    behind = router(hanging, other, is_waiting=False, check_timeout=LONG)
    try:
        wait_until(lambda: is_healthy(behind, other.url), "the other one is checked")
        assert generate(behind)[2] == other.url
        assert (state(behind, hanging.url).healthy, state(behind, hanging.url).why) == (False, "not checked yet")
    finally:
        go.set()
    wait_until(lambda: is_healthy(behind, hanging.url), "it has answered")


def test_an_engine_that_hangs_is_unhealthy_and_well_again_without_help(engine, router):
    go = threading.Event()
    go.set()

    def maybe_hang(handler):
        go.wait(LONG)
        OddEngine.well(handler)

    one = engine(OddEngine(on_health=maybe_hang))
    behind = router(one, check_timeout=0.2)
    go.clear()
    try:
        wait_until(lambda: state(behind, one.url).why == "/health had not answered after 0.2 s", "it hangs")
        assert not is_healthy(behind, one.url)
    finally:
        go.set()
    wait_until(lambda: is_healthy(behind, one.url), "it is well again")


def test_an_engine_that_says_it_is_not_well_is_unhealthy(engine, router):
    one = engine(NumpyEngine(start_seconds=3600))
    behind = router(one, is_waiting=False)
    wait_until(lambda: state(behind, one.url).why == "/health answered 503", "it is checked")
    status, answer, _ = generate(behind, seconds=0.2)
    assert status == 503
    assert answer["error"]["engines"] == [{"url": one.url, "why": "/health answered 503"}]


def test_an_engine_that_dies_and_comes_back_is_healthy_again_without_help(engine, router):
    one = engine()
    behind = router(one)
    spec = one.spec
    one.stop()
    wait_until(lambda: "could not be reached" in state(behind, one.url).why, "it is dead")
    assert not is_healthy(behind, one.url)
    one.start(spec)
    wait_until(lambda: is_healthy(behind, one.url), "it is back")
    assert generate(behind)[0] == 200


def seen_waiting(router):
    """Return an event that is set when a request finds no engine and waits for one."""
    waits, pick = threading.Event(), router._pool.pick

    def watched(*asked):
        if (url := pick(*asked)) is None:
            waits.set()
        return url

    router._pool.pick = watched
    return waits


def test_a_request_waits_for_an_engine_to_join(engine, router, aside):
    behind = router()
    waits = seen_waiting(behind)
    asked = aside.submit(generate, behind)
    assert waits.wait(LONG)
    one = engine()
    behind.join(one.url, ENGINE_SECRET)
    assert asked.result(LONG)[2] == one.url


def test_a_request_whose_engine_died_waits_for_another_one_that_may_get_well(engine, router, aside):
    held, other = engine(Held()), engine()
    behind = router(held, other)
    spec = other.spec
    other.stop()
    wait_until(lambda: not is_healthy(behind, other.url), "the other one is dead")
    waits = seen_waiting(behind)
    asked = aside.submit(generate, behind)
    assert held.asked.wait(LONG)
    killing = aside.submit(held.stop, 0.0)
    assert waits.wait(LONG)
    other.start(spec)
    assert asked.result(LONG)[2] == other.url
    held.go.set()
    killing.result(LONG)


def test_a_request_waits_for_a_healthy_engine_as_long_as_its_own_time_allows(engine, router, aside):
    one = engine(NumpyEngine(start_seconds=3600))
    behind = router(one, is_waiting=False)
    patient = aside.submit(generate, behind, seconds=LONG)
    assert generate(behind, seconds=0.3)[0] == 503
    assert not patient.done()
    one._start = Deadline.after(0.0)
    assert patient.result(LONG)[2] == one.url


def test_a_request_without_a_time_has_that_of_the_router(router):
    behind = router(request_timeout=0.1)
    assert ask(behind.url, "POST", "/generate", REQUEST)[0] == 503


@pytest.mark.parametrize("seconds", ["soon", "0", "-1", "nan", "inf", ""])
def test_a_time_that_is_none_is_refused(router, seconds):
    status, answer, _ = generate(router(), seconds=seconds)
    assert (status, answer["error"]["message"]) == (
        400,
        f"X-Roost-Timeout is {seconds!r}: it is a number of seconds above 0",
    )


def test_an_engine_that_got_a_request_late_is_not_said_to_have_had_all_of_its_time(engine, router, aside):
    held = engine(Held())
    behind = router(held, is_waiting=False)
    behind.doubt([held.url])
    asked = aside.submit(generate, behind, seconds=3)
    wait_until(lambda: state(behind, held.url).why.startswith("its engine does not have"), "it gets no requests")
    spent = time.monotonic()
    wait_until(lambda: time.monotonic() - spent > 1, "some of its time is over")
    behind.doubt([])
    status, answer, _ = asked.result(LONG)
    assert status == 504
    found = re.search(r"had not answered after ([0-9.]+) s, when the request's 3 s were over", said(answer))
    assert 0 < float(found[1]) < 2.5


def test_requests_at_an_engine_that_has_died_go_elsewhere_at_once(engine, router, aside):
    """Also if its connection stays, as when its node has lost power, or its server outlives its worker."""
    held, other = engine(Held()), engine()
    behind = router(held, other, hang_seconds=LONG, check_seconds=LONG)
    asked = aside.submit(generate, behind)
    assert held.asked.wait(LONG)
    behind.bury(held.url, "rollout:0 on node 0 died")
    assert asked.result(LONG)[::2] == (200, other.url)
    assert state(behind, held.url).failed == 1


def poison(engine):
    """Make an engine whose connection breaks whenever it is asked to generate, and which is well again at once."""
    return engine(OddEngine(break_at_once))


@pytest.mark.parametrize(("count", "broken"), [(4, 2), (2, 2), (1, 1)])
def test_a_request_that_breaks_engines_breaks_two_at_most_and_is_answered_at_once_with_why(
    engine, router, count, broken
):
    engines = [poison(engine) for _ in range(count)]
    behind = router(*engines)
    with contextlib.closing(connect(behind.url)) as connection:
        response, content = exchange(connection, "POST", "/generate", REQUEST)
    error = json.loads(content)["error"]
    assert (response.status, error["code"]) == (502, "engines_broken")
    assert response.getheader("x-should-retry") == "false", "OpenAI's clients would send it again"
    assert error["message"].startswith(f"the request broke {broken} engine")
    named = [one.url for one in engines if one.url in error["message"]]
    assert len(named) == broken
    assert sum(state(behind, one.url).failed for one in engines) == broken


def test_how_many_engines_a_request_may_break_is_an_option(engine, router):
    engines = [poison(engine) for _ in range(4)]
    behind = router(*engines, most_broken=3)
    assert "broke 3 engines" in said(generate(behind)[1])
    with pytest.raises(ConfigError, match="most_broken is 0"):
        RouterOptions(most_broken=0)


def test_without_any_engine_a_request_is_refused_after_a_while(router):
    status, answer, by = generate(router(), seconds=0.2)
    assert (status, said(answer), answer["error"]["engines"], by) == (
        503,
        "no engine has joined within 0.2 s",
        [],
        None,
    )


# Joining and leaving


def test_engines_join_and_leave_over_http(engine, router):
    one = engine()
    behind = router()
    assert ask(behind.url, "GET", "/health") == (503, {"healthy": 0, "engines": 0})
    assert ask(behind.url, "GET", "/engines") == (200, [])
    joining = {"url": one.url, "secret": ENGINE_SECRET}
    assert ask(behind.url, "POST", "/engines", joining) == (200, {"url": one.url})
    wait_until(lambda: ask(behind.url, "GET", "/health") == (200, {"healthy": 1, "engines": 1}), "it is healthy")
    generate(behind)
    expected = {"url": one.url, "healthy": True, "busy": 0, "served": 1, "failed": 0, "cancelled": 0}
    expected |= {"is_leaving": False, "is_dead": False, "why": ""}
    assert ask(behind.url, "GET", "/engines") == (200, [expected])
    assert ask(behind.url, "DELETE", "/engines", {"url": one.url}) == (200, {"url": one.url})
    assert ask(behind.url, "GET", "/engines") == (200, [])
    status, answer = ask(behind.url, "DELETE", "/engines", {"url": one.url})
    assert (status, said(answer)) == (404, f"engine {one.url} is not known")
    assert ask(behind.url, "GET", "/health")[0] == 503


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_what_is_not_an_engine_can_neither_join_nor_leave(router, method):
    behind = router()
    for url in BAD_URLS:
        status, answer = ask(behind.url, method, "/engines", {"url": url})
        assert status == 400
        assert "http://host:port" in answer["error"]["message"]
    if method == "POST":
        status, answer = ask(behind.url, method, "/engines", {"url": "http://10.0.0.7:20300"})
        assert (status, "has no secret of its own" in said(answer)) == (400, True)
        asked = {"url": "http://10.0.0.7:20300", "secret": behind.secret}
        status, answer = ask(behind.url, method, "/engines", asked)
        assert (status, "has the router's own secret" in said(answer)) == (400, True)
    for body in (b"", b"{", b"[]", b"{}", b'"http://10.0.0.7:20300"'):
        status, answer = ask(behind.url, method, "/engines", body)
        assert status == 400
        assert "body is" in answer["error"]["message"]
    assert behind.states() == []


def test_an_engine_that_leaves_ends_its_requests_and_is_gone_then(engine, router, aside):
    held, other = engine(Held()), engine()
    behind = router(held, other)
    asked = aside.submit(generate, behind)
    assert held.asked.wait(LONG)
    assert behind.leave(held.url)
    assert [generate(behind)[2] for _ in range(3)] == [other.url] * 3
    assert (state(behind, held.url).busy, state(behind, held.url).is_leaving) == (1, True)
    held.go.set()
    assert asked.result(LONG)[2] == held.url
    wait_until(lambda: state(behind, held.url) is None, "it is gone")
    assert not behind.leave(held.url)


def test_an_engine_is_checked_by_one_task_and_not_after_it_has_left(engine, router):
    checks = []

    def count(handler):
        checks.append(time.monotonic())
        OddEngine.well(handler)

    one = engine(OddEngine(lambda handler: OddEngine.say(handler, 200, b"{}"), on_health=count))
    behind = router(one, check_seconds=LONG)
    for _ in range(3):
        behind.join(one.url, ENGINE_SECRET)
    assert generate(behind)[2] == one.url
    assert len(checks) == 1, "joining again starts no second check"
    behind.leave(one.url)
    behind.join(one.url, ENGINE_SECRET)
    wait_until(lambda: is_healthy(behind, one.url), "it is back")
    assert generate(behind)[2] == one.url
    assert len(checks) == 2

    often = router(one, check_seconds=0.01)
    often.leave(one.url)
    assert often.states() == []
    before = len(checks)
    time.sleep(0.1)
    assert len(checks) <= before + 1, "at most the check that was under way"


def test_engines_that_joined_before_the_start_are_checked_with_it(engine):
    one = engine()
    behind = Router("127.0.0.1", 0, secret=SECRET)
    behind.join(one.url, ENGINE_SECRET)
    assert state(behind, one.url).why == "not checked yet"
    behind.start()
    try:
        wait_until(lambda: is_healthy(behind, one.url), "it is checked")
    finally:
        behind.stop()


# Strangers

JSON = {"Content-Type": "application/json"}
EVIL = "http://evil.example"
STRANGERS = {
    "no secret": (401, JSON),
    "a wrong secret": (401, JSON | {"Authorization": "Bearer guess"}),
    "part of the secret": (401, JSON | {"Authorization": f"Bearer {SECRET[:-1]}"}),
    "another scheme": (401, JSON | {"Authorization": f"Basic {SECRET}"}),
    "odd bytes": (401, JSON | {"Authorization": b"Bearer \xff\xfe"}),
    "a web page": (403, {"Origin": EVIL, "Content-Type": "text/plain"}),
    "a web page with the secret": (403, OURS | {"Origin": EVIL}),
    "a web page of no origin": (403, OURS | {"Origin": "null"}),
    "a name that was bound to this address": (403, OURS | {"Host": "evil.example"}),
    "another port": (403, OURS | {"Host": "127.0.0.1:1"}),
}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/engines"),
        ("DELETE", "/engines"),
        ("GET", "/engines"),
        ("POST", "/generate"),
        ("GET", "/health"),
        ("GET", "/nothing"),
    ],
)
def test_a_stranger_can_do_nothing(engine, router, method, path):
    behind = router(one := engine())
    for who, (status, headers) in STRANGERS.items():
        body = {"url": "http://10.0.0.7:20300"} if "engines" in path else REQUEST
        found, answer = ask(behind.url, method, path, body, headers)
        assert (who, found) == (who, status)
        assert SECRET not in str(answer)
        assert one.url not in str(answer)
    assert urls_of(behind) == [one.url]
    assert (state(behind, one.url).served, state(behind, one.url).failed) == (0, 0)


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_what_changes_the_router_has_to_be_json_and_say_so(router, content_type):
    behind = router()
    body = {"url": "http://10.0.0.7:20300"}
    status, answer = ask(behind.url, "POST", "/engines", body, OURS | {"Content-Type": content_type})
    assert (status, said(answer)) == (415, f"the content type is {content_type}, not application/json")
    assert behind.states() == []


def test_a_router_can_be_opened_for_requests_to_generate_and_for_nothing_else(engine, router):
    behind = router(one := engine(), open_generate=True)
    assert ask(behind.url, "POST", "/generate", REQUEST, {})[0] == 200
    assert ask(behind.url, "GET", "/health", None, {}) == (200, {"healthy": 1, "engines": 1})
    assert ask(behind.url, "POST", "/generate", REQUEST, {"Origin": EVIL})[0] == 403
    assert ask(behind.url, "POST", "/generate", REQUEST, {"Host": "evil.example"})[0] == 403
    assert ask(behind.url, "GET", "/engines", None, {})[0] == 401
    assert ask(behind.url, "DELETE", "/engines", {"url": one.url}, JSON)[0] == 401


def test_its_own_address_and_the_names_of_loopback_are_right(router):
    behind = router()
    port = behind.url.rpartition(":")[2]
    for host in ("127.0.0.1", "localhost", "LOCALHOST", "[::1]"):
        headers = OURS | {"Host": f"{host}:{port}", "Origin": f"http://{host}:{port}"}
        assert ask(behind.url, "GET", "/engines", None, headers) == (200, [])


def test_a_secret_is_made_if_none_is_given_and_engines_see_it():
    first, second = Router("127.0.0.1", 0), Router("127.0.0.1", 0)
    assert len({first.secret, second.secret}) == 2
    assert len(first.secret) > 30


def test_an_engine_gets_the_secret_and_cannot_send_it_elsewhere(engine, router):
    seen, elsewhere = [], []
    other = engine(OddEngine(on_health=lambda handler: elsewhere.append(handler.path) or OddEngine.well(handler)))

    def redirect(handler):
        seen.append(handler.headers["Authorization"])
        handler.send_response(307)
        handler.send_header("Location", f"{other.url}/generate")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    def health(handler):
        seen.append(handler.headers["Authorization"])
        OddEngine.well(handler)

    behind = router(engine(OddEngine(redirect, health)))
    with contextlib.closing(connect(behind.url)) as connection:
        assert exchange(connection, "POST", "/generate", REQUEST)[0].status == 307
    assert set(seen) == {f"Bearer {ENGINE_SECRET}"}
    assert elsewhere == []


# Limits


def counted(url):
    """How many connections the kernel has with a server, and how many of them it has accepted."""
    port = int(url.rpartition(":")[2])
    return sum(
        one.laddr[1] == port and one.status == psutil.CONN_ESTABLISHED for one in psutil.Process().net_connections()
    )


def test_half_open_connections_are_bounded_and_closed(engine, router):
    limits = ServerLimits(connections=100, head_seconds=0.5)
    behind = router(engine(), limits=limits)
    threads = threading.active_count()
    with contextlib.ExitStack() as lines:
        for _ in range(300):
            lines.enter_context(begin(behind.url))
        assert threading.active_count() == threads, "no thread for any of them"
        assert counted(behind.url) <= 100
        assert generate(behind)[0] == 200, "they make room for a whole request"
        wait_until(lambda: counted(behind.url) == 0, "all are closed")


def test_a_body_that_does_not_arrive_is_not_waited_for(router):
    behind = router(limits=ServerLimits(body_seconds=0.1))
    with begin(behind.url, b"Content-Length: 100\r\n\r\n{") as line:
        response = http.client.HTTPResponse(line)
        response.begin()
        assert (response.status, said(json.loads(response.read()))) == (408, "the body did not arrive within 0.1 s")
        response.close()


def test_the_bodies_of_all_requests_together_are_bounded(engine, router):
    megabyte = 1024 * 1024
    behind = router(engine(), limits=ServerLimits(body_bytes=32 * megabyte, buffered_bytes=64 * megabyte))
    before = psutil.Process().memory_info().rss
    with contextlib.ExitStack() as lines:
        head = b"Content-Length: %d\r\n\r\n" % (32 * megabyte)
        unfinished = [lines.enter_context(begin(behind.url, head)) for _ in range(10)]
        send_what_they_take(unfinished, 30 * megabyte)
        # Two of the ten are read.
        assert psutil.Process().memory_info().rss - before < 150 * megabyte
        asked = lines.enter_context(begin(behind.url, head))
        assert generate(behind, b"")[0] == 400, "a request that needs no room is answered"
        for line in (*unfinished, asked):
            line.close()
        wait_until(lambda: generate(behind)[0] == 200, "there is room again")


def send_what_they_take(lines, most):
    """Send to all connections until none takes more."""
    sent, idle, chunk = [0] * len(lines), 0, b" " * 65536
    for line in lines:
        line.setblocking(False)
    while idle < 20:
        idle += 1
        for place, line in enumerate(lines):
            with contextlib.suppress(BlockingIOError):
                while sent[place] < most:
                    sent[place] += line.send(chunk)
                    idle = 0
        time.sleep(0.01)


def test_a_stranger_s_body_is_not_kept(router):
    behind = router()
    headers = JSON | {"Content-Length": str(60 * 1024 * 1024)}
    with contextlib.closing(connect(behind.url)) as connection:
        connection.request("POST", "/generate", b"", headers)
        assert connection.getresponse().status == 401, "before it has sent any of it"


@pytest.mark.parametrize(
    "options",
    [
        {"check_seconds": 0},
        {"request_timeout": -1},
        {"hang_seconds": "5"},
        {"check_timeout": float("inf")},
        {"check_timeout": float("nan")},
    ],
)
def test_times_that_are_none_are_refused(options):
    with pytest.raises(ConfigError, match="it is a number above 0"):
        RouterOptions(**options)


def test_limits_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="connections is 0: it is a number above 0"):
        ServerLimits(connections=0)
    with pytest.raises(ConfigError, match="buffered_bytes is 10: a body may have 20"):
        ServerLimits(body_bytes=20, buffered_bytes=10)


# The server


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/"), ("GET", "/generate"), ("POST", "/health"), ("PUT", "/engines"), ("POST", "/generate/x")],
)
def test_everything_else_is_not_found(router, method, path):
    status, answer = ask(router().url, method, path)
    assert (status, said(answer)) == (404, f"there is no {method} {path}")


def test_a_question_mark_and_what_follows_does_not_matter(router):
    assert ask(router().url, "GET", "/engines?a=b") == (200, [])


def test_a_body_that_is_too_large_is_refused_before_it_is_read(engine, router):
    behind = router(one := engine(), limits=ServerLimits(body_bytes=1000))
    status, answer, by = generate(behind, b"x" * 8_000_000)
    assert (status, by) == (413, None)
    assert said(answer) == "the body has 8000000 bytes, and 1000 are the most"
    assert generate(behind, b" " * 990)[0] == 400, "that one came to the engine"
    assert state(behind, one.url).served == 1


def test_a_body_in_chunks_is_read_to_its_end_and_refused_if_it_is_too_large(engine, router):
    one = engine()
    behind = router(one, limits=ServerLimits(body_bytes=1000))
    with contextlib.closing(connect(behind.url)) as connection:
        for body, status in ((json.dumps(REQUEST).encode(), 200), (b"x" * 600, 413)):
            pieces = iter([body, b" "] * (1 + (status != 200)))
            connection.request("POST", "/generate", pieces, OURS, encode_chunked=True)
            response = connection.getresponse()
            answer = json.loads(response.read())
            assert response.status == status
            assert status == 200 or said(answer) == "the body has more than 1000 bytes"
            connection.close()
    assert state(behind, one.url).served == 1


@pytest.mark.parametrize(
    "head",
    [
        b"nonsense\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nContent-Length: ten\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nContent-Length : 2\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nA: b\r\n folded\r\n\r\n",
    ],
)
def test_what_is_not_http_gets_status_400(router, head):
    port = int(router().url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=LONG) as line:
        line.sendall(head)
        response = http.client.HTTPResponse(line)
        response.begin()
        assert response.status == 400
        response.close()


def test_a_mistake_in_the_router_itself_is_an_answer_and_is_logged(router, monkeypatch, caplog):
    behind = router()
    monkeypatch.setattr(behind._pool, "states", lambda: 1 / 0)
    status, answer = ask(behind.url, "GET", "/engines")
    assert (status, said(answer)) == (500, "ZeroDivisionError: division by zero")
    assert "ZeroDivisionError" in caplog.text


def test_two_routers_cannot_share_a_port(router):
    first = router()
    second = Router("127.0.0.1", int(first.url.rpartition(":")[2]))
    with pytest.raises(OSError, match="in use") as raised:
        second.start()
    assert raised.value.errno == errno.EADDRINUSE
    second.stop()
    assert ask(first.url, "GET", "/engines") == (200, [])


def test_the_port_of_a_router_that_ended_can_be_used_again_immediately(router):
    first = router()
    assert ask(first.url, "GET", "/engines") == (200, [])
    first.stop()
    again = Router("127.0.0.1", int(first.url.rpartition(":")[2]), secret=SECRET)
    again.start()
    try:
        assert again.url == first.url
        assert ask(again.url, "GET", "/engines") == (200, [])
    finally:
        again.stop()


def test_it_listens_at_its_own_address_only(router):
    port = int(router().url.rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=LONG)


def test_it_listens_on_ipv6_too():
    try:
        port = free_port("::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    behind = Router("::1", port, secret=SECRET)
    assert behind.url == f"http://[::1]:{port}"
    behind.start()
    try:
        behind.join(behind.url, ENGINE_SECRET)
        wait_until(lambda: "its proof is of another secret" in state(behind, behind.url).why, "it reaches itself")
        assert ask(behind.url, "GET", "/health") == (503, {"healthy": 0, "engines": 1})
    finally:
        behind.stop()


# The end


def test_stopping_twice_ends_every_thread(engine, router):
    behind = router(engine(), engine(), check_seconds=LONG)

    def threads():
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("roost router")]

    with contextlib.closing(connect(behind.url)) as connection:
        exchange(connection, "GET", "/health")
        assert threads() == ["roost router"], "one thread for all connections and engines"
        behind.stop()
        behind.stop()
        wait_until(lambda: not threads(), "no thread is left")
        assert connection.sock.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        ask(behind.url, "GET", "/health")
    with pytest.raises(ClusterError, match="a router starts only once"):
        behind.start()


def test_a_router_is_started_once(router):
    with pytest.raises(ClusterError, match="a router starts only once"):
        router().start()


def test_a_router_that_was_never_started_can_be_stopped():
    behind = Router("127.0.0.1", 0)
    behind.stop()
    behind.stop()
    with pytest.raises(ClusterError, match="a router starts only once"):
        behind.start()


def test_stopping_lets_a_request_finish(engine, router, aside):
    held = engine(Held())
    behind = router(held)
    asked = aside.submit(generate, behind)
    assert held.asked.wait(LONG)
    stopping = aside.submit(behind.stop, LONG)

    def refuses():
        try:
            socket.create_connection(("127.0.0.1", int(behind.url.rpartition(":")[2])), timeout=LONG).close()
        except ConnectionError:
            return True
        return False

    wait_until(refuses, "it takes no more requests")
    held.go.set()
    assert asked.result(LONG)[0] == 200
    stopping.result(LONG)


def test_a_request_that_cannot_finish_learns_that_the_router_stops(engine, router, aside):
    held = engine(Held())
    behind = router(held)
    asked = aside.submit(generate, behind)
    assert held.asked.wait(LONG)
    behind.stop(0.0)
    status, answer, _ = asked.result(LONG)
    assert (status, answer["error"]["message"]) == (503, "the router is stopping")
    assert [one["url"] for one in answer["error"]["engines"]] == [held.url]


def test_a_request_that_waits_for_an_engine_learns_immediately_that_the_router_stops(router, aside):
    behind = router()
    waits = seen_waiting(behind)
    asked = aside.submit(generate, behind)
    assert waits.wait(LONG)
    behind.stop(LONG)
    status, answer, _ = asked.result(LONG)
    assert (status, answer["error"]["message"]) == (503, "the router is stopping")


def test_stopping_does_not_wait_for_an_engine_that_hangs(engine, router, aside):
    asked, go = threading.Event(), threading.Event()

    def hang(handler):
        asked.set()
        go.wait(LONG)
        OddEngine.well(handler)

    behind = router(engine(OddEngine(on_health=hang)), is_waiting=False, check_timeout=2 * LONG)
    assert asked.wait(LONG)
    stopping = aside.submit(behind.stop)
    try:
        wait_until(stopping.done, "it has stopped, though the engine has not answered", LONG / 2)
    finally:
        go.set()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("roost router")]


def test_requests_are_counted_and_timed_for_events(engine, router):
    one = engine()
    made = router(one)
    assert made._gauge() == [("requests", one.url, {"served": 0, "failed": 0, "busy": 0, "seconds": 0.0})]
    generate(made)
    wait_until(lambda: made._gauge()[0][2]["served"] == 1, "the request to be counted")
    wait_until(lambda: made._gauge()[0][2]["seconds"] > 0, "its time to be counted")
