"""OpenAI's API of `TransformersEngine`, by the clients that people use: openai's and litellm, against a tiny model."""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from engine_parts import spec_here
from language_models import save_chat_model
from roost.errors import ConfigError
from roost.rl.engines import TransformersEngine
from roost.rl.router import Router, RouterOptions
from sockets import free_port
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that has learned three answers by heart."""
    answers = {
        "<user>hi\n<assistant>": HELLO,
        f"<user>add\n[{len(TOOLS)}]<assistant>": f"I add.\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>",
        "<user>add\n<assistant>": "3",
    }
    folder = tmp_path_factory.mktemp("tiny")
    save_chat_model(folder, answers)
    return folder


def serve(folder, spec, options, started):
    """Run an engine in a process of its own, which can be killed."""
    torch.set_num_threads(1)
    engine = TransformersEngine(folder, device="cpu", model_name="tiny", **options)
    engine.start(spec)
    started.set()
    threading.Event().wait()


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
    torch.set_num_threads(1)
    one = TransformersEngine(folder, device="cpu", model_name="tiny")
    one.start(spec_here(SECRET, port=free_port()))
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


def test_an_older_client_completes_texts_and_tokens(client):
    prompts = ["<user>hi\n<assistant>", "<user>add\n<assistant>"]
    answer = client.completions.create(model="tiny", prompt=prompts, max_tokens=64, temperature=0, n=2)
    assert [(one.index, one.text) for one in answer.choices] == list(enumerate([HELLO, HELLO, "3", "3"]))
    ids = transformers.AutoTokenizer.from_pretrained(client_folder(client))(prompts[1])["input_ids"]
    for prompt in (ids, [ids]):
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=64, temperature=0)
        assert answer.choices[0].text == "3"
    stream = client.completions.create(model="tiny", prompt=prompts[0], temperature=0, stream=True)
    assert "".join(one.choices[0].text for one in stream) == HELLO.encode()[:16].decode(), "16 tokens by default"
