"""OpenAI's own client against the router: answers, streams, and every error as the exception that it stands for."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from routing import ENGINE_SECRET, LONG, SECRET, OddEngine, break_at_once, state
from waiting import wait_until

openai = pytest.importorskip("openai", reason="openai is not installed")

pytestmark = pytest.mark.heavy

ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
EVENTS = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
WORDS = ["Hel", "lo", "!"]


def event(word):
    choice = {"index": 0, "delta": {"content": word}, "finish_reason": None}
    chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "tiny", "choices": [choice]}
    return f"data: {json.dumps(chunk)}\n\n"


def chunk(text):
    return f"{len(text):x}\r\n{text}\r\n"


def whole(handler):
    """Answer as an engine does that speaks OpenAI's API, with what it was asked in the text."""
    body = json.loads(handler.body)
    if handler.path == "/v1/embeddings":
        answer = {"object": "list", "model": "tiny", "data": [{"index": 0, "object": "embedding", "embedding": [0.5]}]}
    elif handler.path == "/v1/responses":
        answer = {"id": "resp_1", "object": "response", "model": body["model"], "output": []}
    elif body.get("stream"):
        handler.wfile.write((EVENTS + "".join(map(chunk, [*map(event, WORDS), "data: [DONE]\n\n", ""]))).encode())
        return
    else:
        message = {"role": "assistant", "content": body["messages"][0]["content"]}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "tiny", "choices": [choice]}
    OddEngine.say(handler, 200, json.dumps(answer).encode(), "application/json")


def listing(handler):
    content = (
        b"{}" if handler.path == "/health" else b'{"object": "list", "data": [{"id": "org/tiny", "object": "model"}]}'
    )
    OddEngine.say(handler, 200, content, "application/json")


def client_of(router, key=SECRET, kind=openai.OpenAI, **options):
    return kind(base_url=f"{router.url}/v1", api_key=key, **{"max_retries": 0, "timeout": LONG, **options})


def test_what_an_engine_answers_reaches_the_client(engine, router):
    with client_of(router(engine(OddEngine(whole, listing)))) as client:
        assert client.chat.completions.create(**ASKED).choices[0].message.content == "hello"
        with client.chat.completions.create(**ASKED, stream=True) as stream:
            assert [one.choices[0].delta.content for one in stream] == WORDS
        assert [one.id for one in client.models.list()] == ["org/tiny"]
        assert client.models.retrieve("org/tiny").id == "org/tiny"
        assert client.embeddings.create(model="tiny", input="a", encoding_format="float").data[0].embedding == [0.5]
        assert client.responses.create(model="tiny", input="a").id == "resp_1"


def test_a_hundred_requests_at_once_are_each_answered_with_their_own(engine, router):
    behind = router(*(engine(OddEngine(whole, listing)) for _ in range(2)))

    async def ask_all():
        async with client_of(behind, kind=openai.AsyncOpenAI) as client:
            texts = [f"number {number}" for number in range(100)]
            asked = [{**ASKED, "messages": [{"role": "user", "content": text}]} for text in texts]
            answers = await asyncio.gather(*(client.chat.completions.create(**one) for one in asked))
            return texts, [one.choices[0].message.content for one in answers]

    texts, answers = asyncio.run(ask_all())
    assert texts == answers


def test_errors_of_the_router_are_the_exceptions_that_they_stand_for(engine, router):
    behind = router(engine(OddEngine(whole, listing)))
    with client_of(behind) as client:
        with pytest.raises(openai.NotFoundError, match="the model 'none' does not exist") as raised:
            client.models.retrieve("none")
        assert (raised.value.code, raised.value.type) == ("model_not_found", "invalid_request_error")
        assert raised.value.body["message"] == "the model 'none' does not exist"
        with pytest.raises(openai.NotFoundError, match="there is no POST /v1/moderations"):
            client.moderations.create(input="a")
        with pytest.raises(openai.BadRequestError, match="X-Roost-Timeout is 'soon'"):
            client.chat.completions.create(**ASKED, extra_headers={"X-Roost-Timeout": "soon"})
    with client_of(behind, "sk-other") as client, pytest.raises(openai.AuthenticationError) as raised:
        client.chat.completions.create(**ASKED)
    assert raised.value.code == "invalid_api_key"
    with client_of(router(request_timeout=0.1)) as client:
        with pytest.raises(openai.InternalServerError, match="no engine has joined") as raised:
            client.chat.completions.create(**ASKED)
        assert (raised.value.status_code, raised.value.code) == (503, "unavailable")


def test_a_client_that_waits_too_long_gives_up_and_so_does_its_engine(engine, router):
    gone = threading.Event()

    def never(handler):
        assert handler.rfile.read(1) == b""
        gone.set()

    one = engine(OddEngine(never))
    behind = router(one)
    with client_of(behind, timeout=0.2) as client, pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(**ASKED)
    assert gone.wait(LONG)
    wait_until(lambda: state(behind, one.url).cancelled == 1, "the request is over")


def test_an_engine_that_is_killed_in_the_middle_of_streams_is_an_api_error_for_each(begin_streams, engine, router):
    process, other = begin_streams(EVENTS + chunk(event("Hel"))), engine(OddEngine(whole, listing))
    behind = router(process)
    begun, killed = threading.Barrier(9), threading.Event()

    def read_all(client):
        words, stream = [], iter(client.chat.completions.create(**ASKED, stream=True))
        words.append(next(stream).choices[0].delta.content)
        begun.wait(LONG)
        assert killed.wait(LONG)
        try:
            words += [one.choices[0].delta.content for one in stream]
        except openai.APIError as error:
            return words, error
        return words, None

    with client_of(behind) as client, ThreadPoolExecutor(8) as pool:
        reads = [pool.submit(read_all, client) for _ in range(8)]
        begun.wait(LONG)
        behind.join(other.url, ENGINE_SECRET)
        process.kill()
        killed.set()
        for one in reads:
            words, error = one.result(LONG)
            assert words == ["Hel"]
            assert f"engine {process.url} broke a stream" in error.message
            assert (error.code, error.type) == ("engine_broke", "server_error")
        wait_until(lambda: state(behind, other.url).healthy, "another engine is healthy")
        assert client.chat.completions.create(**ASKED).choices[0].message.content == "hello"


def test_a_request_that_breaks_engines_is_not_sent_again_by_a_client_that_would(engine, router):
    engines = [engine(OddEngine(break_at_once)) for _ in range(4)]
    behind = router(*engines, check_seconds=LONG)
    with client_of(behind, max_retries=5) as client, pytest.raises(openai.InternalServerError) as raised:
        client.chat.completions.create(**ASKED)
    assert (raised.value.status_code, raised.value.code) == (502, "engines_broken")
    assert sum(state(behind, one.url).failed for one in engines) == 2
