"""Requests of OpenAI's API, `/v1/completions` and `/v1/chat/completions`, as prompts of tokens."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from roost.errors import ConfigError
from roost.rl.engines.samples import MOST_SAMPLES, Prompt
from roost.text import did_you_mean, error_text, shorten

_MOST_PROBABLE = 20
_MOST_STOPS = 16
_LONGEST_STOP = 1000
"""Each is looked for after every token, in the thread that generates for all."""
_COMPLETION_TOKENS = 16
"""How long a completion is that does not say so, as OpenAI has it."""
_CHAT_TOKENS = 256
"""The same in a chat, if the model does not say how many tokens it takes."""
_SAMPLING = {one.name for one in fields(Prompt)} - {"tokens"}
_OWN = {"model", "stream", "stream_options", "stop", "logprobs", "return_token_ids"}
_OF_COMPLETIONS = {"prompt"}
_OF_CHATS = {
    "messages",
    "max_completion_tokens",
    "top_logprobs",
    "tools",
    "tool_choice",
    "chat_template_kwargs",
}
_WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier"}
_ONLY: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "top_k": (-1, 0),
    "min_p": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
}
"""Fields whose other values the engine cannot do."""
_WORDS = {
    str: "a text",
    list: "a list",
    dict: "an object",
    bool: "true or false",
    int: "a number",
    float: "a fraction",
    object: "anything",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIRequest:
    """A request, as far as the tokens do not say it."""

    is_chat: bool
    prompts: tuple[Prompt, ...]
    stops: tuple[str, ...]
    most_probable: int | None
    """How many of the most probable tokens the client wants to know besides each; None without log probabilities."""
    is_stream: bool
    has_usage: bool
    """Whether a stream says at its end how many tokens there were."""
    has_ids: bool
    """Whether the answer has the ids of the tokens, and which version of the weights made them."""
    has_tools: bool


class OpenAIReader:
    """Reads requests: checks every field, and makes tokens of texts and messages. Threads may share it."""

    def __init__(self, tokenizer: Any, most_tokens: int | None) -> None:
        self._tokenizer = tokenizer
        """Or why there is none."""
        self._most_tokens = most_tokens
        """How many tokens the model takes in all."""
        # The tokenizers of transformers change their settings during a call.
        self._one_at_a_time = threading.Lock()

    def read(self, body: Any, *, is_chat: bool) -> OpenAIRequest:
        """Return what is asked; ConfigError if it is wrong, or more than the engine can do."""
        if not isinstance(body, dict):
            raise ConfigError(f"the body is a JSON object, not {shorten(json.dumps(body))}")
        given = {name: value for name, value in body.items() if value is not None}
        _check_names(given, is_chat)
        if isinstance(self._tokenizer, ConfigError):
            raise self._tokenizer.with_traceback(None)
        with self._one_at_a_time:
            every = [self._render(given)] if is_chat else self._tokens_of(_get(given, "prompt", object, ""))
        for name in ("temperature", "top_p"):
            _get(given, name, (int, float), 1)
        options = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in given.items()
            if name in _SAMPLING
        }
        prompts = tuple(
            Prompt(tokens=tuple(tokens), **options | {"max_tokens": self._most_new(given, len(tokens), is_chat)})
            for tokens in every
        )
        if (most := sum(prompt.n for prompt in prompts)) > MOST_SAMPLES:
            raise ConfigError(f"a request is for {most} samples: at most {MOST_SAMPLES}")
        stops = _get(given, "stop", (str, list), [])
        stops = [stops] if isinstance(stops, str) else stops
        if len(stops) > _MOST_STOPS or not all(isinstance(one, str) and 0 < len(one) <= _LONGEST_STOP for one in stops):
            sizes = f"at most {_MOST_STOPS} texts, each of 1 to {_LONGEST_STOP} characters"
            raise ConfigError(f"stop is a text or a list: {sizes}")
        usage = _get(_get(given, "stream_options", dict, {}), "include_usage", bool, False)
        return OpenAIRequest(
            is_chat=is_chat,
            prompts=prompts,
            stops=tuple(stops),
            most_probable=_read_logprobs(given, is_chat),
            is_stream=_get(given, "stream", bool, False),
            has_usage=usage,
            has_ids=_get(given, "return_token_ids", bool, False),
            has_tools=bool(_read_tools(given)),
        )

    def _most_new(self, given: Mapping[str, Any], num_tokens: int, is_chat: bool) -> Any:
        """Return how many tokens a sample may have: in a chat, as many as the model takes, unless it says so."""
        asked = given.get("max_completion_tokens", given.get("max_tokens"))
        if asked is not None or not is_chat:
            return _COMPLETION_TOKENS if asked is None else asked
        return _CHAT_TOKENS if self._most_tokens is None else max(1, self._most_tokens - num_tokens)

    def _encode(self, text: str, *, is_whole: bool = True) -> list[int]:
        """Return the tokens of a text, with the special ones around it if the text does not have them."""
        try:
            return list(self._tokenizer(text, add_special_tokens=is_whole)["input_ids"])
        except (UnicodeError, TypeError, ValueError) as error:
            raise ConfigError(f"the tokenizer does not take {shorten(ascii(text))}: {error_text(error)}") from None

    def _tokens_of(self, prompt: Any) -> list[list[int]]:
        """Return the tokens of each prompt: it is a text, tokens, or a list of either."""
        if isinstance(prompt, str):
            return [self._encode(prompt)]
        if isinstance(prompt, list) and prompt:
            if all(type(one) is int for one in prompt):
                return [prompt]
            if len(prompt) <= MOST_SAMPLES and all(isinstance(one, str | list) for one in prompt):
                return [self._encode(one) if isinstance(one, str) else one for one in prompt]
        raise ConfigError("prompt is a text, a list of token ids, or a list of either")

    def _render(self, given: Mapping[str, Any]) -> list[int]:
        """Return the tokens of messages, as the model's template writes them."""
        messages = _get(given, "messages", list, [])
        if not messages:
            raise ConfigError("messages is a list of at least one message")
        options = _get(given, "chat_template_kwargs", dict, {})
        if taken := sorted(set(options) & {*inspect.signature(self._tokenizer.apply_chat_template).parameters}):
            raise ConfigError(f"chat_template_kwargs cannot have {taken[0]}: they are variables of the template")
        if not getattr(self._tokenizer, "chat_template", None):
            hint = "send a text to /v1/completions"
            raise ConfigError("the model's tokenizer has no chat template", hint=hint)
        read, tools = [_read_message(one) for one in messages], _read_tools(given)
        try:
            text = self._tokenizer.apply_chat_template(
                read, tools=tools or None, tokenize=False, add_generation_prompt=True, **options
            )
        except Exception as error:
            # A template raises what it likes, for messages that it does not take.
            raise ConfigError(f"the model's chat template refuses the messages: {error_text(error)}") from None
        return self._encode(text, is_whole=False)


def load_tokenizer(given: Any, model: Any) -> Any:
    """Return a tokenizer: the one given, that of a folder, or else that in the folder of the model; or ConfigError."""
    if given is not None and not isinstance(given, str | os.PathLike):
        return given
    folder = next((Path(one) for one in (given, model) if isinstance(one, str | os.PathLike)), None)
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    if folder is None or not any((folder / name).is_file() for name in files):
        hint = "give the engine tokenizer=, or send tokens to POST /generate"
        raise ConfigError(f"the engine has no tokenizer: there is none in {folder or 'its model'}", hint=hint)
    try:
        return importlib.import_module("transformers").AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise ConfigError(f"the tokenizer in {folder} cannot be loaded: {error_text(error)}") from error


def _check_names(given: Mapping[str, Any], is_chat: bool) -> None:
    known = _SAMPLING | _OWN | _WITHOUT_EFFECT | set(_ONLY) | (_OF_CHATS if is_chat else _OF_COMPLETIONS)
    for name, value in given.items():
        if name not in known:
            hint = f"did you mean {close}?" if (close := did_you_mean(name, known)) else ""
            raise ConfigError(f"a request has no {shorten(name)}", hint=hint)
        if name in _ONLY and value not in _ONLY[name]:
            only = json.dumps(_ONLY[name][0])
            raise ConfigError(f"{name} is {shorten(json.dumps(value))}: this engine only knows {only}")


def _get(given: Mapping[str, Any], name: str, kind: Any, default: Any) -> Any:
    value = given.get(name, default)
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        raise ConfigError(f"{name} is {shorten(json.dumps(value))}: it is {' or '.join(_WORDS[one] for one in kinds)}")
    return value


def _read_logprobs(given: Mapping[str, Any], is_chat: bool) -> int | None:
    if is_chat:
        most = given.get("top_logprobs", 0)
        if not _get(given, "logprobs", bool, False):
            if most:
                raise ConfigError("top_logprobs needs logprobs: true")
            return None
    elif (most := given.get("logprobs")) is None or most is False:
        return None
    if type(most) is not int or not 0 <= most <= _MOST_PROBABLE:
        name = "top_logprobs" if is_chat else "logprobs"
        raise ConfigError(f"{name} is {shorten(json.dumps(most))}: it is a whole number from 0 to {_MOST_PROBABLE}")
    return most


def _read_tools(given: Mapping[str, Any]) -> list[Any]:
    """Return the tools that the model may ask to be called."""
    tools = _get(given, "tools", list, [])
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
            raise ConfigError('a tool is {"type": "function", "function": {"name": ..., "parameters": {...}}}')
    choice = given.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        hint = "leave it to the model, with auto, and say in a message that it must call the tool"
        raise ConfigError(f"tool_choice is {shorten(json.dumps(choice))}: this engine cannot force a call", hint=hint)
    return tools if choice == "auto" else []


def _read_message(given: Any) -> dict[str, Any]:
    """Return a message as templates expect it: content is text, the arguments of calls are objects."""
    if not (isinstance(given, dict) and isinstance(given.get("role"), str)):
        raise ConfigError('a message is {"role": ..., "content": ...}')
    content = given.get("content")
    if isinstance(content, list):
        if not all(isinstance(one, dict) and isinstance(one.get("text"), str) for one in content):
            raise ConfigError("the content of a message is a text: this engine sees no images and hears nothing")
        content = "".join(one["text"] for one in content)
    if not isinstance(content, str | None):
        raise ConfigError(f"the content of a message is {shorten(json.dumps(content))}: it is a text")
    # Most templates do not know OpenAI's newer name for it.
    message = {**given, "role": "system" if given["role"] == "developer" else given["role"], "content": content or ""}
    if calls := given.get("tool_calls"):
        message["tool_calls"] = [_read_call(one) for one in _get(given, "tool_calls", list, calls)]
    return message


def _read_call(given: Any) -> dict[str, Any]:
    try:
        function = given["function"]
        arguments = function["arguments"]
        if not isinstance(arguments := json.loads(arguments) if isinstance(arguments, str) else arguments, dict):
            raise TypeError
        return {**given, "function": {**function, "arguments": arguments}}
    except (KeyError, TypeError, ValueError, RecursionError):
        hint = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": "{...}"}}'
        raise ConfigError("a tool call of a message is not one", hint=f"it is {hint}") from None
