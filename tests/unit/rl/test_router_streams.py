"""The router's paths, streams, retries and kept connections: what reaches the client, and what reaches the engines."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import os
import signal
import socket
import threading
import time
import urllib.parse

import aiohttp
import pytest

from roost.errors import ConfigError
from roost.rl.engine_client import EngineAnswer
from roost.rl.router import Router, RouterOptions
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
    generate,
    said,
    state,
)
from waiting import wait_until

pytestmark = pytest.mark.heavy

PATHS = RouterOptions().paths
EVENTS = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKS = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


def write_chunk(handler, piece):
    handler.wfile.write(f"{len(piece):x}\r\n{piece}\r\n".encode())


def is_cut_off(handler):
    """Whether the router closes the engine's connection, within the time of a test."""
    handler.connection.settimeout(LONG)
    with contextlib.suppress(ConnectionError):
        return handler.connection.recv(1) == b""
    return True


class Streamer(OddEngine):
    """An engine that streams a piece for each that a test puts in, and knows whether it was cut off."""

    def __init__(self, head=EVENTS):
        self.asked, self.cut_off = threading.Event(), threading.Event()
        self.pieces, self.ready = [], threading.Semaphore(0)

        def stream(handler):
            handler.wfile.write(head.encode())
            self.asked.set()
            while self.ready.acquire(timeout=LONG) and (piece := self.pieces.pop(0)) is not None:
                write_chunk(handler, piece)
                if not piece:
                    return
            if is_cut_off(handler):
                self.cut_off.set()

        super().__init__(stream)

    def send(self, *pieces):
        """Stream pieces: an empty one ends the stream, and after None the engine waits to be cut off."""
        self.pieces += pieces
        self.ready.release(len(pieces))


@contextlib.contextmanager
def opened(router, path="/v1/completions", headers=OURS):
    """Ask the router, and return the answer as far as its head."""
    with contextlib.closing(connect(router.url)) as connection:
        connection.request("POST", path, json.dumps(REQUEST), headers)
        yield connection.getresponse()


def counts(router, engine):
    found = state(router, engine.url)
    return found.busy, found.served, found.failed, found.cancelled


# Paths


@pytest.mark.parametrize("path", PATHS)
def test_an_engine_gets_path_query_body_and_what_describes_the_body_with_the_router_s_secret(engine, router, path):
    seen = []

    def note(handler):
        path, _, query = handler.path.partition("?")
        seen.append((handler.command, path, urllib.parse.parse_qs(query), dict(handler.headers), handler.body))
        OddEngine.say(handler, 200, b"{}")

    one = engine(OddEngine(note, lambda handler: (OddEngine.well if handler.path == "/health" else note)(handler)))
    behind = router(one)
    method, _, target = path.partition(" ")
    theirs = {"Accept": "text/x-mine", "Content-Type": "text/x-yours", "Cookie": "a=b", "X-Roost-Timeout": "9"}
    body = b"mine" if method == "POST" else b""
    with contextlib.closing(connect(behind.url)) as connection:
        connection.request(method, f"{target}?n=1&s=%2F+%26", body, OURS | theirs)
        response = connection.getresponse()
        assert (response.status, response.read(), response.getheader("X-Roost-Engine")) == (200, b"{}", one.url)
    sent = {
        "Host": one.url.removeprefix("http://"),
        "Authorization": f"Bearer {ENGINE_SECRET}",
        "Accept": "text/x-mine",
        "Content-Type": "text/x-yours",
        "Content-Length": str(len(body)),
    }
    assert seen == [(method, target, {"n": ["1"], "s": ["/ &"]}, sent, body)]


def test_a_router_forwards_the_paths_that_it_is_given_and_no_others(engine, router):
    one = engine(OddEngine(lambda handler: OddEngine.say(handler, 200, json.dumps(handler.path).encode())))
    behind = router(one, paths=("POST /v1/embeddings",))
    assert ask(behind.url, "POST", "/v1/embeddings", {}) == (200, "/v1/embeddings")
    for method, path in [("POST", "/generate"), ("GET", "/v1/embeddings"), ("POST", "/v1/embeddings/x")]:
        status, answer = ask(behind.url, method, path)
        assert (status, said(answer)) == (404, f"there is no {method} {path}")
    assert ask(behind.url, "GET", "/health") == (200, {"healthy": 1, "engines": 1})


def test_a_star_in_a_path_stands_for_anything_and_leads_nowhere_else(engine, router):
    def echo(handler):
        OddEngine.say(handler, 200, json.dumps(handler.path).encode())

    one = engine(OddEngine(echo, lambda handler: (OddEngine.well if handler.path == "/health" else echo)(handler)))
    behind = router(one, paths=("GET /v1/responses/*", "POST /v1/responses/*/cancel"))
    for method, path in [
        ("GET", "/v1/responses/one"),
        ("GET", "/v1/responses/one/input_items?after=2"),
        ("GET", "/v1/responses/a%2Fb%20c"),
        ("GET", "/v1/responses/%252e%252e/pause"),
        ("POST", "/v1/responses/one/cancel"),
    ]:
        assert ask(behind.url, method, path) == (200, path)
    for method, path in [
        ("GET", "/v1/responses/"),
        ("POST", "/v1/responses/one"),
        ("POST", "/v1/responses//cancel/more"),
        ("GET", "/v1/responses/../../pause"),
        ("GET", "/v1/responses/%2e%2E/pause"),
        ("GET", "/v1/responses/a%2F..%2F..%2Fpause"),
        ("GET", "/v1/responses/./x"),
        ("GET", "/v1/responsesXone"),
    ]:
        assert ask(behind.url, method, path)[0] == 404
    everything = router(one, paths=("GET /*", "POST /*"))
    assert ask(everything.url, "GET", "/health") == (200, {"healthy": 1, "engines": 1})
    assert isinstance(ask(everything.url, "GET", "/engines")[1], list), "its own paths stay its own"
    assert ask(everything.url, "POST", "/engines", {"url": "nothing"})[0] == 400


@pytest.mark.parametrize("path", ["/generate", "DELETE /generate", "POST generate", "POST /a?b=c", "POST /a b", ""])
def test_what_is_not_a_method_and_a_path_is_refused(path):
    with pytest.raises(ConfigError, match="is not GET or POST and a path"):
        RouterOptions(paths=(path,))


@pytest.mark.parametrize("path", ["GET /health", "POST /engines"])
def test_the_router_s_own_paths_are_not_the_engines(path):
    with pytest.raises(ConfigError, match=f"the router answers {path} itself"):
        RouterOptions(paths=(path,))


def test_an_engine_gets_the_headers_that_are_listed_but_no_secret(engine, router):
    seen = []

    def note(handler):
        seen.append({name: handler.headers[name] for name in theirs})
        OddEngine.say(handler, 200, b"{}")

    theirs = {"X-Session-Id": "7", "x-key": f"key {SECRET}", "X-Other": "no"}
    behind = router(engine(OddEngine(note)), headers=("x-session-id", "X-Key"))
    assert ask(behind.url, "POST", "/v1/completions", {}, OURS | theirs) == (200, {})
    assert seen == [{"X-Session-Id": "7", "x-key": None, "X-Other": None}]


@pytest.mark.parametrize("name", ["Authorization", "proxy-authorization", "Host", "Content-Length", "X-Roost-Nonce"])
def test_headers_that_are_the_router_s_own_are_never_passed_on(name):
    with pytest.raises(ConfigError, match=f"the header {name} is between the client and the router"):
        RouterOptions(headers=(name,))


@pytest.mark.parametrize("name", ["", "a b", "a:", "é", None, 7, b"x", "a\r\nb"])
@pytest.mark.parametrize("option", ["headers", "session_header"])
def test_what_is_not_the_name_of_a_header_is_refused(name, option):
    if (option, name) == ("session_header", ""):
        return
    with pytest.raises(ConfigError, match="is not the name of a header"):
        RouterOptions(**{option: (name,) if option == "headers" else name})


def test_a_session_stays_at_its_engine_and_outlives_it(engine, router):
    engines = [engine() for _ in range(3)]
    behind = router(*engines)

    def places():
        found = {}
        for number in range(24):
            headers = OURS | {"X-SMG-Routing-Key": f"agent {number}"}
            with contextlib.closing(connect(behind.url)) as connection:
                connection.request("POST", "/generate", json.dumps(REQUEST), headers)
                answer = connection.getresponse()
                assert (answer.status, bool(answer.read())) == (200, True)
                found[number] = answer.getheader("X-Roost-Engine")
        return found

    before = places()
    assert places() == before
    lost = engines[1]
    assert lost.url in before.values()
    lost.stop()
    after = places()
    assert lost.url not in after.values()
    assert {number: after[number] for number in after if before[number] != lost.url} == {
        number: url for number, url in before.items() if url != lost.url
    }


def test_an_open_router_shows_the_engine_its_own_secret_whatever_the_client_shows(engine, router):
    seen = []

    def note(handler):
        seen.append(handler.headers["Authorization"])
        OddEngine.say(handler, 200, b"{}")

    behind = router(engine(OddEngine(note)), open_generate=True)
    for key in ({}, {"Authorization": "Bearer none"}):
        assert ask(behind.url, "POST", "/v1/completions", {}, key) == (200, {})
    assert seen == [f"Bearer {ENGINE_SECRET}"] * 2


# Clients for OpenAI's API

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
WORDS = ["Hel", "lo", "!"]


def chat_engine():
    """An engine that speaks as much of OpenAI's API as a client of it needs."""

    def answer(handler):
        if handler.path == "/v1/chat/completions" and json.loads(handler.body).get("stream"):
            handler.wfile.write(EVENTS.encode())
            for word in WORDS:
                write_chunk(handler, f"data: {json.dumps({'choices': [{'delta': {'content': word}}]})}\n\n")
            write_chunk(handler, "data: [DONE]\n\n")
            write_chunk(handler, "")
        elif handler.path == "/v1/chat/completions":
            message = {"role": "assistant", "content": "".join(WORDS)}
            OddEngine.say(handler, 200, json.dumps({"choices": [{"message": message}]}).encode(), "application/json")
        else:
            OddEngine.say(handler, 200, json.dumps({"data": [{"id": "tiny"}]}).encode(), "application/json")

    return OddEngine(answer, lambda handler: (OddEngine.well if handler.path == "/health" else answer)(handler))


def openai_session(router, api_key):
    headers = {
        "Accept": "application/json",
        "Authorization": f"Bearer {api_key}",
        "User-Agent": "OpenAI/Python 2.8.0",
        "X-Stainless-Async": "async:asyncio",
        "X-Stainless-Retry-Count": "0",
    }
    timeout = aiohttp.ClientTimeout(total=LONG)
    return aiohttp.ClientSession(f"{router.url}/v1/", headers=headers, timeout=timeout)


def test_a_client_for_openai_s_api_works_with_the_secret_as_its_key(engine, router):
    behind = router(engine(chat_engine()))

    async def talk():
        async with openai_session(behind, SECRET) as session:
            async with session.get("models") as answer:
                models = [one["id"] for one in (await answer.json())["data"]]
            async with session.post("chat/completions", json=CHAT) as answer:
                whole = (await answer.json())["choices"][0]["message"]["content"]
            words = []
            async with session.post("chat/completions", json=CHAT | {"stream": True}) as answer:
                assert answer.content_type == "text/event-stream"
                async for line in answer.content:
                    if line.startswith(b"data: ") and line != b"data: [DONE]\n":
                        words.append(json.loads(line.removeprefix(b"data: "))["choices"][0]["delta"]["content"])
        return models, whole, words

    assert asyncio.run(talk()) == (["tiny"], "Hello!", WORDS)


def test_a_client_for_openai_s_api_with_another_key_is_refused_as_it_expects(engine, router):
    behind = router(engine(chat_engine()))

    async def talk():
        async with openai_session(behind, "sk-other") as session, session.post("chat/completions", json=CHAT) as answer:
            return answer.status, answer.content_type

    assert asyncio.run(talk()) == (401, "application/json")


# Streams


@pytest.mark.parametrize("head", [EVENTS, CHUNKS])
def test_a_piece_of_a_stream_reaches_the_client_before_the_next_one_is_made(engine, router, head):
    one = engine(Streamer(head))
    behind = router(one)
    pieces = ["data: first\n\n", "data: second\n\n", "data: third\n\n"]
    one.send(pieces[0])
    with opened(behind) as answer:
        assert (answer.status, answer.getheader("X-Roost-Engine")) == (200, one.url)
        assert answer.getheader("Content-Type") in head
        for piece, after in itertools.pairwise([*pieces, ""]):
            assert answer.read(len(piece)) == piece.encode()
            assert counts(behind, one) == (1, 0, 0, 0)
            one.send(after)
        assert answer.read() == b""
    wait_until(lambda: counts(behind, one) == (0, 1, 0, 0), "it is served")


def test_an_event_that_comes_in_parts_reaches_the_client_when_it_is_complete(engine, router):
    one = engine(Streamer())
    behind = router(one)
    one.send("data: fi", "rst\r", "\n\r\ndata: sec")
    with opened(behind) as answer:
        assert answer.read(15) == b"data: first\r\n\r\n"
        # Too long to be held.
        one.send("o" * 2_000_000, "")
        assert len(answer.read()) == 2_000_009


def test_after_a_stream_the_client_s_connection_serves_the_next_request(engine, router):
    one = engine(Streamer(CHUNKS))
    behind = router(one)
    with contextlib.closing(connect(behind.url)) as connection:
        connection.connect()
        line = connection.sock
        for number in range(3):
            one.send(f"{number}", "")
            connection.request("POST", "/generate", b"", OURS)
            assert connection.getresponse().read() == str(number).encode()
        assert connection.sock is line


def test_an_event_stream_that_says_its_length_streams_too(engine, router):
    go = threading.Event()

    def stream(handler):
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 6\r\n\r\na\n\n")
        assert go.wait(LONG)
        handler.wfile.write(b"bcd")

    with opened(router(engine(OddEngine(stream)))) as answer:
        assert answer.read(3) == b"a\n\n"
        go.set()
        assert answer.read() == b"bcd", "an event that does not end is passed on at the end of the stream"


def test_compressed_bytes_pass_as_they_are(engine, router):
    def answer(handler):
        head = "HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nRetry-After: 7\r\nContent-Length: 3\r\n\r\n"
        handler.wfile.write(head.encode() + b"\x1f\x8b\x00")

    with opened(router(engine(OddEngine(answer)))) as found:
        assert (found.getheader("Content-Encoding"), found.getheader("Retry-After")) == ("gzip", "7")
        assert found.read() == b"\x1f\x8b\x00"


def test_a_client_that_reads_slowly_makes_the_engine_wait_and_gets_everything(engine, router):
    piece, most = "x" * 65536, 4096
    sent = itertools.count()
    last = [0]

    def stream(handler):
        handler.wfile.write(CHUNKS.encode())
        for _ in range(most):
            write_chunk(handler, piece)
            last[0] = next(sent)
        write_chunk(handler, "")

    behind = router(engine(OddEngine(stream)))
    with opened(behind) as answer:
        assert answer.read(1) == b"x"
        seen = []

        def stands_still():
            seen.append(last[0])
            return len(seen) > 20 and len(set(seen[-20:])) == 1

        wait_until(stands_still, "the engine waits")
        assert last[0] < most / 2, "what it has sent is in the buffers of sockets"
        assert ask(behind.url, "GET", "/engines")[0] == 200, "the router serves others meanwhile"
        left = most * len(piece) - 1
        while block := answer.read(1 << 20):
            left -= len(block)
        assert left == 0


def test_a_stream_that_breaks_ends_with_the_error_and_no_other_engine_is_asked(engine, router, caplog):
    def half(handler):
        handler.wfile.write(EVENTS.encode())
        write_chunk(handler, "data: half\n\ndata: qua")
        assert go.wait(LONG)
        break_at_once(handler)

    go = threading.Event()
    odd, other = engine(OddEngine(half)), engine()
    behind = router(odd, other, check_seconds=LONG)
    with opened(behind) as answer:
        assert answer.read(12) == b"data: half\n\n"
        go.set()
        with pytest.raises(http.client.IncompleteRead) as raised:
            answer.read()
    event = raised.value.partial.decode()
    assert (event[:6], event[-2:]) == ("data: ", "\n\n"), "a whole event, and nothing of the one that broke off"
    error = json.loads(event.removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("server_error", "engine_broke")
    assert error["message"].startswith(f"engine {odd.url} broke a stream: ")
    wait_until(lambda: counts(behind, odd) == (0, 0, 1, 0), "it is counted")
    assert "the connection broke" in state(behind, odd.url).why
    assert counts(behind, other) == (0, 0, 0, 0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"engine {odd.url} broke a stream" in caplog.text


def test_a_stream_of_an_engine_that_has_died_ends_with_that_at_once(engine, router):
    one = engine(Streamer())
    behind = router(one)
    one.send("data: half\n\n", None)
    with opened(behind) as answer:
        assert answer.read(12) == b"data: half\n\n"
        behind.bury(one.url, "rollout:0 on node 0 died")
        with pytest.raises(http.client.IncompleteRead) as raised:
            answer.read()
    assert b"rollout:0 on node 0 died" in raised.value.partial
    assert one.cut_off.wait(LONG)


def test_one_model_is_found_among_those_of_an_engine(engine, router):
    def models(handler):
        content = {"data": [{"id": "Qwen/tiny", "object": "model"}, {"id": "other"}]} if odd else []
        OddEngine.say(handler, 200, json.dumps(content).encode(), "application/json")

    odd = True
    behind = router(engine(OddEngine(None, lambda h: (OddEngine.well if h.path == "/health" else models)(h))))
    for name in ("Qwen/tiny", "Qwen%2Ftiny"):
        assert ask(behind.url, "GET", f"/v1/models/{name}") == (200, {"id": "Qwen/tiny", "object": "model"})
    status, answer = ask(behind.url, "GET", "/v1/models/none")
    assert (status, said(answer), answer["error"]["code"]) == (
        404,
        "the model 'none' does not exist",
        "model_not_found",
    )
    odd = False
    status, answer = ask(behind.url, "GET", "/v1/models/none")
    assert (status, said(answer)) == (502, "an engine answered to GET /v1/models what is no list of models")
    assert ask(router(paths=("POST /generate",)).url, "GET", "/v1/models/tiny")[0] == 404


def test_what_traces_a_request_reaches_the_engine_and_its_id_comes_back(engine, router):
    seen = []

    def note(handler):
        seen.append({name: handler.headers[name] for name in traced})
        OddEngine.say(handler, 200, b"{}")

    traced = {"X-Request-Id": "mine", "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    traced["tracestate"] = "a=b"
    behind = router(engine(OddEngine(note)))
    for status, more in ((200, {}), (400, {"X-Roost-Timeout": "soon"})):
        with opened(behind, headers=OURS | traced | more) as answer:
            assert (answer.status, answer.getheader("X-Request-Id")) == (status, "mine")
    assert seen == [traced]


def test_an_engine_that_is_killed_in_the_middle_of_streams_breaks_each_of_them(begin_streams, engine, router, caplog):
    other, process = engine(), begin_streams("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n")
    behind = router(process)
    with contextlib.ExitStack() as clients:
        answers = [clients.enter_context(opened(behind)) for _ in range(8)]
        assert [answer.read(4) for answer in answers] == [b"half"] * 8
        behind.join(other.url, ENGINE_SECRET)
        wait_until(lambda: state(behind, other.url).healthy, "another engine is healthy")
        os.kill(process.pid, signal.SIGKILL)
        for answer in answers:
            with pytest.raises(http.client.IncompleteRead):
                answer.read()
    wait_until(lambda: counts(behind, process) == (0, 0, 8, 0), "each is counted")
    assert caplog.text.count("broke a stream") == 8
    assert counts(behind, other) == (0, 0, 0, 0)
    assert generate(behind)[2] == other.url


def test_an_engine_that_dies_before_the_first_piece_of_a_stream_has_it_served_elsewhere(engine, router):
    def nothing(handler):
        handler.wfile.write(EVENTS.encode())
        break_at_once(handler)

    odd, other = engine(OddEngine(nothing)), engine()
    behind = router(odd, other, check_seconds=LONG)
    assert generate(behind) == (200, other.generate(REQUEST), other.url)
    assert counts(behind, odd) == (0, 0, 1, 0)


def test_a_stream_has_the_deadline_of_its_request(engine, router, caplog):
    one = engine(Streamer(CHUNKS))
    behind = router(one)
    one.send("half", None)
    with opened(behind, headers=OURS | {"X-Roost-Timeout": "0.5"}) as answer:
        assert answer.read(4) == b"half"
        with pytest.raises(http.client.IncompleteRead):
            answer.read()
    assert one.cut_off.wait(LONG), "the engine need not go on"
    wait_until(lambda: counts(behind, one) == (0, 0, 1, 0), "it is counted")
    assert state(behind, one.url).healthy
    assert "had not ended a stream at its deadline" in caplog.text


def test_a_client_that_reads_too_slowly_for_its_deadline_is_not_the_engine_s_failure(engine, router):
    def endless(handler):
        handler.wfile.write(EVENTS.encode())
        while True:
            write_chunk(handler, "x" * 65536)

    behind = router(one := engine(OddEngine(endless)))
    with opened(behind, headers=OURS | {"X-Roost-Timeout": "3"}) as answer:
        wait_until(lambda: counts(behind, one) == (0, 0, 0, 1), "the router gives up")
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            answer.read()


def test_a_client_that_cannot_tell_a_broken_stream_gets_whole_answers(engine, router):
    def broken(handler):
        handler.wfile.write(CHUNKS.encode())
        write_chunk(handler, "half")
        break_at_once(handler)

    odd, other = engine(OddEngine(broken)), engine(Streamer(CHUNKS))
    behind = router(odd, other)
    other.send("whole", "")
    address = behind.url.removeprefix("http://")
    with socket.create_connection(address.split(":"), timeout=LONG) as line:
        head = f"POST /generate HTTP/1.0\r\nHost: {address}\r\nAuthorization: Bearer {SECRET}\r\n"
        line.sendall(f"{head}Content-Length: 0\r\n\r\n".encode())
        response = http.client.HTTPResponse(line)
        response.begin()
        assert (response.getheader("Content-Length"), response.read()) == ("5", b"whole")
        response.close()
    assert counts(behind, odd) == (0, 0, 1, 0)


def test_a_mistake_in_the_router_itself_puts_no_error_into_a_stream(engine, router, monkeypatch, caplog):
    one = engine(Streamer(CHUNKS))
    behind = router(one)
    monkeypatch.setattr(EngineAnswer, "read_piece", lambda *_: 1 / 0)
    one.send("half", None)
    with opened(behind) as answer, pytest.raises(http.client.IncompleteRead) as raised:
        answer.read()
    assert raised.value.partial == b"half"
    assert one.cut_off.wait(LONG)
    assert "ZeroDivisionError" in caplog.text


def test_stopping_the_router_breaks_a_stream_that_does_not_end_in_time(engine, router, caplog):
    one = engine(Streamer(CHUNKS))
    behind = router(one)
    one.send("half", None)
    with opened(behind) as answer:
        assert answer.read(4) == b"half"
        behind.stop(0.0)
        with pytest.raises(http.client.IncompleteRead):
            answer.read()
    assert one.cut_off.wait(LONG)
    assert counts(behind, one) == (0, 0, 1, 0), "as if its connection broke, and not by cancelling the request"
    assert caplog.records == [], "which is no news of the engine"


def test_stopping_the_router_answers_a_request_of_which_the_engine_has_answered_half(engine, router, aside):
    begun, cut_off = threading.Event(), threading.Event()

    def half(handler):
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
        begun.set()
        if is_cut_off(handler):
            cut_off.set()

    behind = router(engine(OddEngine(half)))
    asked = aside.submit(generate, behind)
    assert begun.wait(LONG)
    wait_until(lambda: behind._client._unfinished, "the router has the half")
    behind.stop(0.0)
    status, answer, _ = asked.result(LONG)
    assert (status, answer["error"]["message"]) == (503, "the router is stopping")
    assert cut_off.wait(LONG)


def test_stopping_the_router_lets_a_stream_end_in_time(engine, router, aside):
    one = engine(Streamer(CHUNKS))
    behind = router(one)
    one.send("half")
    with opened(behind) as answer:
        assert answer.read(4) == b"half"
        stopping = aside.submit(behind.stop, LONG)
        wait_until(lambda: behind._is_stopping, "the router stops")
        one.send("whole", "")
        assert answer.read() == b"whole"
        stopping.result(LONG)


# Clients that go away


def reset(line):
    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    line.close()


@pytest.mark.parametrize("leave", [socket.socket.close, reset])
def test_a_client_that_goes_away_ends_its_request_at_the_engine(engine, router, leave, caplog):
    asked, cut_off = threading.Event(), threading.Event()

    def think(handler):
        asked.set()
        if is_cut_off(handler):
            cut_off.set()

    one, other = engine(OddEngine(think)), engine()
    behind = router(one, other)
    line = begin(behind.url, b"Content-Length: 0\r\n\r\n")
    assert asked.wait(LONG)
    leave(line)
    assert cut_off.wait(LONG), "the engine can stop"
    wait_until(lambda: counts(behind, one) == (0, 0, 0, 1), "it is counted, and not as the engine's failure")
    assert state(behind, one.url).healthy
    assert counts(behind, other) == (0, 0, 0, 0), "the router asks no other engine"
    assert caplog.records == []


def test_a_client_that_goes_away_in_the_middle_of_a_stream_ends_it_at_the_engine(engine, router, caplog):
    one = engine(Streamer(CHUNKS))
    behind = router(one)
    one.send("half", None)
    with opened(behind) as answer:
        assert answer.read(4) == b"half"
    assert one.cut_off.wait(LONG), "the engine can stop"
    wait_until(lambda: counts(behind, one) == (0, 0, 0, 1), "it is counted")
    assert caplog.records == []


def test_a_client_that_goes_away_while_it_waits_for_an_engine_is_forgotten(engine, router):
    behind = router()
    seen = threading.Event()
    pick = behind._pool.pick
    behind._pool.pick = lambda *asked: seen.set() or pick(*asked)
    with begin(behind.url, b"Content-Length: 0\r\n\r\n"):
        assert seen.wait(LONG)
    wait_until(lambda: not behind._server._requests, "its request is over")
    behind.join((one := engine(Held())).url, ENGINE_SECRET)
    wait_until(lambda: state(behind, one.url).healthy, "an engine is there")
    assert counts(behind, one) == (0, 0, 0, 0)


# Requests that must not be repeated

ONCE = OURS | {"X-Roost-Retry": "no"}


def test_a_request_that_may_be_sent_once_is_not_sent_to_another_engine(engine, router):
    odd, other = engine(OddEngine(break_at_once)), engine()
    behind = router(odd, other, check_seconds=LONG)
    status, answer = ask(behind.url, "POST", "/generate", REQUEST, ONCE)
    assert (status, answer["error"]["engine"]) == (502, odd.url)
    assert answer["error"]["message"].startswith(f"engine {odd.url} may have got the request: the connection broke")
    assert (counts(behind, odd), counts(behind, other)) == ((0, 0, 1, 0), (0, 0, 0, 0))


def test_a_request_that_may_be_sent_once_gets_an_engine_s_503(engine, router):
    full, other = engine(), engine()
    behind = router(full, other)
    full.offload()
    status, answer = ask(behind.url, "POST", "/generate", REQUEST, ONCE)
    assert (status, said(answer)) == (503, "the engine does not serve: it is offloaded")
    assert (counts(behind, full), counts(behind, other)) == ((0, 0, 1, 0), (0, 0, 0, 0))


def test_a_request_that_may_be_sent_once_is_served_by_another_engine_if_the_first_got_nothing(engine, router):
    gone, other = engine(), engine()
    behind = router(gone, other, check_seconds=LONG)
    gone.stop()
    assert ask(behind.url, "POST", "/generate", REQUEST, ONCE) == (200, other.generate(REQUEST))
    assert counts(behind, other) == (0, 1, 0, 0)


def test_a_request_that_may_be_sent_once_stays_at_an_engine_that_hangs(engine, router, aside):
    asked, go, is_well = threading.Event(), threading.Event(), threading.Event()
    is_well.set()

    def answer(handler):
        asked.set()
        assert go.wait(LONG)
        OddEngine.say(handler, 200, b"{}")

    def health(handler):
        OddEngine.say(handler, 200 if is_well.is_set() else 500, b"")

    hung = engine(OddEngine(answer, health))
    behind = router(hung, hang_seconds=0.01)
    once = aside.submit(ask, behind.url, "POST", "/generate", REQUEST, ONCE)
    assert asked.wait(LONG)
    asked.clear()
    twice = aside.submit(generate, behind)
    assert asked.wait(LONG)
    behind.join((other := engine()).url, ENGINE_SECRET)
    is_well.clear()
    try:
        assert twice.result(LONG)[2] == other.url, "the other request moves"
        assert not once.done()
    finally:
        go.set()
    assert once.result(LONG) == (200, {})


def test_whether_a_request_may_be_repeated_is_yes_or_no(engine, router):
    behind = router(engine())
    assert ask(behind.url, "POST", "/generate", REQUEST, OURS | {"X-Roost-Retry": "yes"})[0] == 200
    status, answer = ask(behind.url, "POST", "/generate", REQUEST, OURS | {"X-Roost-Retry": "0"})
    assert (status, said(answer)) == (400, "X-Roost-Retry is '0': it is yes or no")


# Kept connections


def counting(on_generate):
    """An engine, and the connections on which requests have come to it."""
    lines = []

    def note(handler):
        lines.append(handler.client_address)
        on_generate(handler, lines)

    return OddEngine(note), lines


def test_requests_one_after_another_share_a_connection_to_the_engine(engine, router):
    odd, lines = counting(lambda handler, _: OddEngine.say(handler, 200, b"{}"))
    behind = router(engine(odd))
    for _ in range(5):
        assert generate(behind)[0] == 200
    assert (len(lines), len(set(lines))) == (5, 1)


def test_a_request_that_must_not_be_repeated_has_a_connection_of_its_own(engine, router):
    odd, lines = counting(lambda handler, _: OddEngine.say(handler, 200, b"{}"))
    behind = router(engine(odd))
    assert generate(behind)[0] == 200
    for _ in range(2):
        assert ask(behind.url, "POST", "/generate", REQUEST, ONCE) == (200, {})
    assert (len(lines), len(set(lines))) == (3, 3)


def test_an_engine_that_closes_a_kept_connection_just_then_gets_the_request_over_a_new_one(engine, router):
    def say_or_break(handler, lines):
        if len(lines) == 2:
            break_at_once(handler)
        else:
            OddEngine.say(handler, 200, b"{}")

    odd, lines = counting(say_or_break)
    behind = router(engine(odd), check_seconds=LONG)
    for _ in range(3):
        assert generate(behind) == (200, {}, odd.url)
    assert counts(behind, odd) == (0, 3, 0, 0)
    assert state(behind, odd.url).healthy
    assert lines[0] == lines[1] != lines[2], "only the one that broke is sent twice"
    assert len(lines) == 4


def test_a_new_connection_that_breaks_is_the_engine_s_failure(engine, router):
    odd, lines = counting(lambda handler, _: break_at_once(handler))
    other = engine()
    behind = router(engine(odd), other, check_seconds=LONG)
    assert generate(behind)[2] == other.url
    assert (len(lines), counts(behind, odd)) == (1, (0, 0, 1, 0))


# A restart


def test_clients_that_ask_again_are_all_served_once_while_the_router_is_restarted(engine, router, aside):
    engines = [engine(), engine()]
    behind = router(*engines)
    num_asked, over = itertools.count(), threading.Event()

    def ask_until_served(number):
        body = REQUEST | {"seed": number}
        while True:
            with contextlib.suppress(ConnectionError, http.client.HTTPException):
                status, answer, _ = generate(behind, body)
                if status == 200:
                    return answer
                assert (status, answer["error"]["message"]) == (503, "the router is stopping")
            assert not over.is_set()
            time.sleep(0.01)

    def keep_asking():
        found = []
        while not over.is_set() or len(found) < 10:
            number = next(num_asked)
            found.append((number, ask_until_served(number)))
        return found

    asking = [aside.submit(keep_asking) for _ in range(8)]
    try:
        for _ in range(3):
            served = sum(one.served for one in behind.states())
            wait_until(lambda: sum(one.served for one in behind.states()) > served + 50, "the router is busy")  # noqa: B023
            behind.stop(0.0)
            again = Router("127.0.0.1", int(behind.url.rpartition(":")[2]), secret=SECRET)
            for one in engines:
                again.join(one.url, ENGINE_SECRET)
            again.start()
            behind = again
    finally:
        over.set()
    answers = dict(pair for one in asking for pair in one.result(LONG))
    behind.stop()
    assert len(answers) == next(num_asked), "every request has its answer"
    for number, answer in answers.items():
        expected = engines[0].generate(REQUEST | {"seed": number})
        assert answer["actions"] == expected["actions"], "and it is its own"
