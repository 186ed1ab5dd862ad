"""OpenAI's API of `TransformersEngine`, by the clients that people use: openai's and litellm, against a tiny model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

import engine_parts
from engine_parts import spec_here
from language_models import save_chat_model
from roost.errors import ConfigError
from roost.rl.engines import TransformersEngine
from roost.rl.router import Router, RouterOptions
from routing import ENGINE_SECRET
from waiting import wait_until

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")
openai = pytest.importorskip("openai", reason="openai is not installed")

LONG = 60.0
SECRET = "the engine's own"  # noqa: S105 - of the tests
HELLO = "Héllo there 😀, you."
CALL = {"name": "add", "arguments": {"a": 1, "b": 2}}
ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
ADD = {**ASKED, "messages": [{"role": "user", "content": "add"}], "tools": TOOLS}


@pytest.fixture(autouse=True, scope="module")
def one_core():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(one_core, tmp_path_factory):  # noqa: ARG001
    """A model that has learned three answers by heart."""
    answers = {
        "<user>hi\n<assistant>": HELLO,
        f"<user>add\n[{len(TOOLS)}]<assistant>": f"I add.\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>",
        "<user>add\n<assistant>": "3",
    }
    folder = tmp_path_factory.mktemp("tiny")
    save_chat_model(folder, answers)
    return folder


PROCESS = """
import sys
import threading

import torch

import engine_parts
from engine_parts import spec_here
from roost.rl.engines import TransformersEngine

torch.set_num_threads(1)
engine = TransformersEngine(sys.argv[1], device="cpu", model_name="tiny")
engine.start(spec_here(sys.argv[2]))
print(engine.spec.url, flush=True)
threading.Event().wait()
"""


@pytest.fixture(scope="module")
def router():
    """A router without engines."""
    one = Router("127.0.0.1", 0, RouterOptions(check_seconds=0.05))
    one.start()
    yield one
    one.stop()


@pytest.fixture(scope="module")
def engine(folder, router):
    """An engine behind the router."""
    one = TransformersEngine(folder, device="cpu", model_name="tiny")
    one.start(spec_here(SECRET))
    router.join(one.spec.url, SECRET)
    wait_until(lambda: any(state.healthy for state in router.states()), "the engine is healthy")
    yield one
    one.stop(0)


@pytest.fixture
def client(router, engine):  # noqa: ARG001 - the engine is behind the router
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key=router.secret, max_retries=0, timeout=LONG) as one:
        yield one


def test_a_chat_is_answered_with_its_reason_to_end_and_how_many_tokens_it_took(client):
    answer = client.chat.completions.create(**ASKED)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", HELLO, "stop")
    assert (answer.model, answer.object) == ("tiny", "chat.completion")
    assert answer.usage.prompt_tokens == len("<user>hi\n<assistant>")
    # Its tokens are bytes, and there is one that ends the text.
    assert answer.usage.completion_tokens == len(HELLO.encode()) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert [one.id for one in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == 512


def test_a_stream_has_the_same_text_in_whole_characters(client):
    stream = client.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    pieces = [one.choices[0].delta.content for one in chunks if one.choices and one.choices[0].delta.content]
    assert pieces == list(HELLO)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [one.choices[0].finish_reason for one in chunks if one.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens == len(HELLO.encode()) + 1
    assert len({one.id for one in chunks}) == 1


def test_an_older_client_completes_texts_and_tokens(client, folder):
    prompts = ["<user>hi\n<assistant>", "<user>add\n<assistant>"]
    answer = client.completions.create(model="tiny", prompt=prompts, max_tokens=64, temperature=0, n=2)
    assert [(one.index, one.text) for one in answer.choices] == list(enumerate([HELLO, HELLO, "3", "3"]))
    ids = transformers.AutoTokenizer.from_pretrained(folder)(prompts[1])["input_ids"]
    for prompt in (ids, [ids]):
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=64, temperature=0)
        assert (answer.object, answer.choices[0].text) == ("text_completion", "3")
    stream = client.completions.create(model="tiny", prompt=prompts[0], temperature=0, stream=True)
    assert "".join(one.choices[0].text for one in stream) == HELLO.encode()[:16].decode(errors="replace"), (
        "16 tokens by default"
    )


def test_samples_differ_and_a_seed_repeats_them(client):
    options = {**ASKED, "temperature": 3.0, "n": 4, "max_tokens": 8}
    texts = [
        [one.message.content for one in client.chat.completions.create(**options, seed=seed).choices]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0])) > 1
    with client.chat.completions.create(**options, seed=1, stream=True) as stream:
        found = [""] * 4
        for one in stream:
            found[one.choices[0].index] += one.choices[0].delta.content or ""
    assert found == texts[0]


@pytest.mark.parametrize(
    ("limit", "content", "finish"),
    [
        ({"max_tokens": 4}, "Hél", "length"),
        ({"max_completion_tokens": 2, "max_tokens": 9}, "H\ufffd", "length"),
        ({"stop": " there"}, "Héllo", "stop"),
        ({"stop": ["nowhere", "😀, y", "you"]}, "Héllo there ", "stop"),
        ({"extra_body": {"stop_token_ids": [ord("t") - 33]}}, "Héllo ", "stop"),
        ({"stop": "nowhere"}, HELLO, "stop"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_text_ends_where_it_is_told_to(client, limit, content, finish, is_stream):
    answer = client.chat.completions.create(**ASKED, **limit, stream=is_stream)
    if is_stream:
        chunks = [one.choices[0] for one in answer]
        found = "".join(one.delta.content or "" for one in chunks), chunks[-1].finish_reason
    else:
        found = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert found == (content, finish)


def test_log_probabilities_are_the_model_s_own(client, folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt, answer = (tokenizer(text)["input_ids"] for text in ("<user>add\n<assistant>", "3"))
    with torch.no_grad():
        own = model(input_ids=torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    best = own.topk(3)
    asked = {**ASKED, "messages": [{"role": "user", "content": "add"}], "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**asked).choices[0].logprobs.content
    with client.chat.completions.create(**asked, stream=True) as stream:
        streamed = [entry for one in stream if one.choices[0].logprobs for entry in one.choices[0].logprobs.content]
    for entries in (whole, streamed):
        assert [(one.token, one.bytes) for one in entries] == [("3", [ord("3")])], "without the token that ends it"
        assert entries[0].logprob == pytest.approx(float(own[answer[0]]), abs=1e-4)
        assert [one.token for one in entries[0].top_logprobs] == [tokenizer.decode([one]) for one in best.indices]
        assert [one.logprob for one in entries[0].top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-4)
    older = client.completions.create(model="tiny", prompt="<user>add\n<assistant>", temperature=0, logprobs=2)
    assert older.choices[0].logprobs.tokens == ["3"]
    assert older.choices[0].logprobs.token_logprobs == pytest.approx([float(own[answer[0]])], abs=1e-4)
    assert list(older.choices[0].logprobs.top_logprobs[0].values()) == pytest.approx(best.values[:2].tolist(), abs=1e-4)
    limited = client.chat.completions.create(**asked, extra_body={"allowed_token_ids": answer}, max_tokens=1)
    (only,) = limited.choices[0].logprobs.content[0].top_logprobs
    assert (only.token, only.logprob) == ("3", 0.0), "what cannot be drawn is not told"


def test_a_model_calls_a_tool(client):
    answer = client.chat.completions.create(**ADD)
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I add.")
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "add",
        CALL["arguments"],
    )
    stream = list(client.chat.completions.create(**ADD, stream=True))
    calls = [call for one in stream for call in one.choices[0].delta.tool_calls or []]
    assert [(one.index, one.function.name, json.loads(one.function.arguments)) for one in calls] == [
        (0, *CALL.values())
    ]
    assert "".join(one.choices[0].delta.content or "" for one in stream).strip() == "I add."
    assert stream[-1].choices[0].finish_reason == "tool_calls"
    talk = [*ADD["messages"], choice.message.model_dump(exclude_none=True)]
    talk.append({"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "3"}]})
    again = client.chat.completions.create(**ADD | {"messages": talk, "max_tokens": 1})
    # The template writes the arguments as JSON, which it can only if they are not a text of JSON already.
    assert again.usage.prompt_tokens == len('<user>add\n<assistant>I add.{"a": 1, "b": 2}\n<tool>3\n[1]<assistant>')
    assert client.chat.completions.create(**ADD, tool_choice="none").choices[0].message.content == "3"


def test_what_trains_on_a_chat_gets_its_tokens_and_the_versions_of_the_weights(client, engine, folder):
    answer = client.chat.completions.create(**ASKED, logprobs=True, extra_body={"return_token_ids": True}).choices[0]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(answer.token_ids, skip_special_tokens=True) == HELLO
    assert tokenizer.decode(answer.prompt_token_ids) == "<user>hi\n<assistant>"
    assert answer.spans == [[engine.version, 0, len(answer.token_ids)]]
    stream = client.chat.completions.create(**ASKED, stream=True, extra_body={"return_token_ids": True})
    assert [token for one in stream for token in one.choices[0].token_ids] == answer.token_ids[:-1]


SURROGATE = rb'{"messages": [{"role": "user", "content": "\ud800"}]}'
BAD = [
    ({"messages": []}, "messages is a list of at least one message"),
    ({"messages": "hi"}, 'messages is "hi": it is a list'),
    ({"messages": [7]}, "a message is"),
    ({"messages": [{"role": "user", "content": {"a": 1}}]}, "the content of a message is"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "sees no images"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
        "a tool call of a message",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "[" * 100_000}}]}]},
        "a tool call of a message",
    ),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "are too many: the model takes 512 in all"),
    ({"n": 0}, "a prompt cannot have n 0"),
    ({"n": 10**9}, "a prompt cannot have n 1000000000"),
    ({"n": "two"}, "a prompt cannot have n 'two'"),
    ({"max_tokens": -1}, "a prompt cannot have max_tokens -1"),
    ({"max_tokens": 10**6}, "are too many: the model takes 512 in all"),
    ({"temperature": "hot"}, 'temperature is "hot": it is a number'),
    ({"temperature": -1}, "a prompt cannot have temperature -1"),
    ({"top_p": 7}, "a prompt cannot have top_p 7"),
    ({"seed": 1.5}, "a seed is a whole number"),
    ({"stop": [""]}, "stop is a text or a list: at most 16 texts"),
    ({"stop": ["a"] * 17}, "at most 16 texts"),
    ({"stop": "a" * 1001}, "each of 1 to 1000 characters"),
    ({"stop": 7}, "stop is 7: it is a text or a list"),
    ({"logprobs": 3}, "logprobs is 3: it is true or false"),
    ({"logprobs": True, "top_logprobs": 99}, "top_logprobs is 99: it is a whole number from 0 to 20"),
    ({"top_logprobs": 2}, "top_logprobs needs logprobs: true"),
    ({"stream": "yes"}, 'stream is "yes": it is true or false'),
    ({"tools": [{"type": "web_search"}]}, "a tool is"),
    ({"tools": TOOLS, "tool_choice": "required"}, 'tool_choice is "required": this engine cannot force a call'),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "this engine cannot force a call"),
    ({"response_format": {"type": "json_object"}}, "this engine only knows"),
    ({"frequency_penalty": 0.5}, "frequency_penalty is 0.5: this engine only knows 0"),
    ({"logit_bias": {"5": 1}}, "logit_bias is"),
    ({"extra_body": {"max_token": 5}}, "a request has no max_token.*did you mean max_tokens"),
    (
        {"extra_body": {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}},
        "chat_template_kwargs cannot have chat_template",
    ),
    ({"extra_body": {"stop_token_ids": 7}}, "stop_token_ids are whole numbers"),
    ({"extra_body": {"allowed_token_ids": [-1]}}, "allowed_token_ids are whole numbers"),
]


@pytest.mark.parametrize(("change", "why"), BAD)
def test_a_bad_request_is_refused_with_what_is_wrong(client, change, why):
    with pytest.raises(openai.BadRequestError, match=f"(?s){why}"):
        client.chat.completions.create(**ASKED | change)


@pytest.mark.parametrize("prompt", ["", [], [[]], [None], [1, "a"], [1.5], {"a": 1}, [[[1]]], [10**9], [True]])
def test_a_prompt_that_is_none_is_refused(client, prompt):
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt=prompt)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"7", b'"a"', b"{", b'{"messages": NaN}', b"\xff", b"[" * 100_000, SURROGATE]
)
def test_a_body_that_is_none_is_refused(client, body):
    with pytest.raises(openai.BadRequestError):
        client.post(
            "/chat/completions", cast_to=object, content=body, options={"headers": {"Content-Type": "application/json"}}
        )


def test_fields_without_effect_and_null_are_accepted(client):
    more = {"user": "me", "metadata": {"a": "b"}, "presence_penalty": 0.0, "n": 1, "stop": None, "logit_bias": {}}
    assert client.chat.completions.create(**ASKED, **more).choices[0].message.content == HELLO
    with pytest.raises(openai.NotFoundError, match="the model 'gpt' does not exist: this engine has 'tiny'"):
        client.chat.completions.create(**ASKED | {"model": "gpt"})


def test_a_hundred_chats_at_once_are_all_answered(router, engine):  # noqa: ARG001 - the engine is behind the router
    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key=router.secret, timeout=LONG) as client:

            async def streamed():
                stream = await client.chat.completions.create(**ASKED, stream=True)
                return "".join([one.choices[0].delta.content or "" async for one in stream])

            async def whole():
                return (await client.chat.completions.create(**ASKED)).choices[0].message.content

            return await asyncio.gather(*(one() for _ in range(50) for one in (streamed, whole)))

    assert asyncio.run(ask_all()) == [HELLO] * 100


def test_a_client_that_stops_to_listen_frees_its_place(router, engine):
    """Whether it is late, or breaks a stream off."""
    held = threading.Event()
    hook = engine.accept().register_forward_pre_hook(lambda *_: held.wait(LONG) and None)
    try:
        late = openai.OpenAI(base_url=f"{router.url}/v1", api_key=router.secret, max_retries=0, timeout=0.3)
        with late as client, pytest.raises(openai.APITimeoutError):
            client.chat.completions.create(**ASKED)
    finally:
        held.set()
        hook.remove()
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key=router.secret, max_retries=0) as client:
        options = ASKED | {"temperature": 1, "extra_body": {"ignore_eos": True}, "max_tokens": 450, "n": 8}
        with client.chat.completions.create(**options, stream=True) as stream:
            next(iter(stream))
    wait_until(lambda: not (engine._generation._running or engine._generation._waiting), "nothing is left of them")


def test_a_model_without_a_tokenizer_says_so_and_answers_tokens(folder, tmp_path):
    with pytest.raises(ConfigError, match=f"the engine has no tokenizer: there is none in {tmp_path}"):
        TransformersEngine(folder, device="cpu", tokenizer=tmp_path).start(spec_here(SECRET))
    configuration = transformers.AutoConfig.from_pretrained(folder)
    for options, status in (({}, 400), ({"tokenizer": folder}, 200)):
        engine = TransformersEngine(configuration, device="cpu", **options)
        engine.start(spec_here(SECRET))
        try:
            with openai.OpenAI(base_url=f"{engine.spec.url}/v1", api_key=SECRET, max_retries=0) as client:
                asked = partial(client.completions.create, model="model", prompt="a", max_tokens=1)
                if status == 200:
                    assert asked().usage.completion_tokens == 1
                else:
                    with pytest.raises(
                        openai.BadRequestError, match="the engine has no tokenizer: there is none in its model"
                    ):
                        asked()
        finally:
            engine.stop(0)


def test_an_engine_that_is_killed_in_mid_stream_is_an_api_error_and_the_next_one_goes_on(folder):
    router = Router("127.0.0.1", 0, RouterOptions(check_seconds=0.05))
    environment = os.environ | {"PYTHONPATH": str(Path(engine_parts.__file__).parent)}
    with contextlib.ExitStack() as stack:
        router.start()
        stack.callback(router.stop)
        urls = []
        for _ in range(2):
            command = [sys.executable, "-c", PROCESS, folder, SECRET]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
            stack.callback(process.kill)
            urls.append((process, process.stdout.readline().strip()))
        (first, url), (_, other) = urls
        router.join(url, SECRET)
        wait_until(lambda: router.states()[0].healthy, "the first engine is healthy")
        client = stack.enter_context(
            openai.OpenAI(base_url=f"{router.url}/v1", api_key=router.secret, max_retries=0, timeout=LONG)
        )
        options = ASKED | {"temperature": 1, "extra_body": {"ignore_eos": True}, "max_tokens": 490}
        stream = iter(client.chat.completions.create(**options, stream=True))
        next(stream)
        first.kill()
        with pytest.raises(openai.APIError, match="broke a stream"):
            list(stream)
        router.join(other, SECRET)
        assert client.chat.completions.create(**ASKED).choices[0].message.content == HELLO


# litellm, whose own code warns

of_litellm = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def litellm():
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    return pytest.importorskip("litellm", reason="litellm is not installed")


@pytest.fixture
def ask(litellm, router, engine):  # noqa: ARG001 - the engine is behind the router
    return partial(
        litellm.completion, **ASKED | {"model": "openai/tiny"}, api_base=f"{router.url}/v1", api_key=router.secret
    )


@of_litellm
def test_litellm_chats_streams_and_calls_tools(ask, litellm):
    answer = ask(n=2, logprobs=True)
    assert [one.message.content for one in answer.choices] == [HELLO] * 2
    assert all(math.isfinite(one.logprob) for one in answer.choices[0].logprobs.content)
    assert "".join(one.choices[0].delta.content or "" for one in ask(stream=True)) == HELLO
    assert ask(stop=[" there"]).choices[0].message.content == "Héllo"
    (call,) = ask(messages=ADD["messages"], tools=TOOLS).choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == tuple(CALL.values())
    chunks = list(ask(messages=ADD["messages"], tools=TOOLS, stream=True))
    rebuilt = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls[0].function
    assert (rebuilt.name, json.loads(rebuilt.arguments)) == tuple(CALL.values())


@of_litellm
def test_litellm_names_errors_as_it_does_for_openai(ask, litellm):
    with pytest.raises(litellm.BadRequestError, match="a prompt cannot have top_p 7"):
        ask(top_p=7)
    with pytest.raises(litellm.NotFoundError):
        ask(model="openai/gpt")
    with pytest.raises(litellm.AuthenticationError):
        ask(api_key="sk-other")


@of_litellm
def test_litellm_asks_a_hundred_at_once(ask):
    with ThreadPoolExecutor(100) as pool:
        answers = list(pool.map(lambda _: ask().choices[0].message.content, range(100)))
    assert answers == [HELLO] * 100


@of_litellm
def test_litellm_gives_up_when_it_is_told_to(ask, engine, litellm):
    held = threading.Event()
    hook = engine.accept().register_forward_pre_hook(lambda *_: held.wait(LONG) and None)
    try:
        with pytest.raises(litellm.Timeout):
            ask(timeout=0.3, max_retries=0)
    finally:
        held.set()
        hook.remove()


@of_litellm
def test_an_engine_that_is_killed_in_mid_stream_is_an_api_error_of_litellm(litellm, begin_streams):
    chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}
    event = f"data: {json.dumps({**chunk, 'choices': [{'index': 0, 'delta': {'content': 'Hel'}}]})}\n\n"
    head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    process, router = begin_streams(f"{head}{len(event):x}\r\n{event}\r\n"), Router("127.0.0.1", 0)
    router.start()
    try:
        router.join(process.url, ENGINE_SECRET)
        stream = litellm.completion(
            **ASKED | {"model": "openai/tiny"}, api_base=f"{router.url}/v1", api_key=router.secret, stream=True
        )
        assert next(stream).choices[0].delta.content == "Hel"
        process.kill()
        with pytest.raises(openai.APIError, match="broke a stream"):
            list(stream)
    finally:
        router.stop()
