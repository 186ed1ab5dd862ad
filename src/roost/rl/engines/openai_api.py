"""OpenAI's API in front of an engine: completions, chats and the list of models, whole or as streams."""

from __future__ import annotations

import asyncio
import copy
import json
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from roost.errors import ClusterError
from roost.rl.engines.generation import Listener
from roost.rl.engines.openai_request import OpenAIReader, OpenAIRequest
from roost.rl.engines.samples import Finish, Prompt, Sample
from roost.rl.engines.token_batch import Drawn
from roost.rl.engines.token_text import TokenText, ToolCall, ToolCallReader
from roost.rl.web import break_off, error_response, read_json, web
from roost.text import shorten

OPENAI_ROUTES = (("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"))
Submit = Callable[[Prompt, Listener], "Future[list[Sample]]"]


@dataclass(slots=True, kw_only=True)
class _Part:
    """News of a choice: a piece of its text, calls, the tokens that made them, or its end."""

    index: int
    text: str = ""
    calls: list[tuple[int, ToolCall]] = field(default_factory=list)
    drawn: list[Drawn] = field(default_factory=list)
    finish: str | None = None


class OpenAIApi:
    """Answers requests of OpenAI's clients with what `submit` makes of their prompts.

    - `name`: of the model.
    - `tokenizer`: a tokenizer of transformers, or the ConfigError that then refuses every request.
    - `most_tokens`: how many tokens the model takes in all.
    """

    def __init__(self, name: str, tokenizer: Any, most_tokens: int | None, submit: Submit) -> None:
        self._name = name
        self._reader = OpenAIReader(tokenizer, most_tokens)
        # The thread that generates decodes while others encode, which a tokenizer does not take.
        self._decoder = copy.deepcopy(tokenizer)
        self._submit = submit
        self._model = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "roost"}
        if most_tokens is not None:
            self._model["max_model_len"] = most_tokens

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request of `OPENAI_ROUTES`."""
        if request.method == "GET":
            return web.json_response({"object": "list", "data": [self._model]})
        body = await read_json(request)
        if isinstance(body, dict) and (named := body.get("model")) not in (None, self._name):
            why = f"the model {shorten(repr(named))} does not exist: this engine has {self._name!r}"
            return error_response(404, why, "model_not_found")
        asked = await asyncio.to_thread(self._reader.read, body, is_chat="chat" in request.path)
        kind = "chat.completion" if asked.is_chat else "text_completion"
        head = {
            "id": f"{'chatcmpl' if asked.is_chat else 'cmpl'}-{secrets.token_hex(16)}",
            "object": f"{kind}.chunk" if asked.is_chat and asked.is_stream else kind,
            "created": int(time.time()),
            "model": self._name,
        }
        loop, parts = asyncio.get_running_loop(), asyncio.Queue[_Part | None]()
        answers: list[asyncio.Future[list[Sample]]] = []
        try:
            for place, prompt in enumerate(asked.prompts):
                teller = _Teller(
                    asked,
                    self._decode,
                    place * prompt.n,
                    lambda part: loop.call_soon_threadsafe(parts.put_nowait, part),
                )
                answers.append(asyncio.wrap_future(self._submit(prompt, teller)))
            every = asyncio.gather(*answers)
            # All parts are in the queue by then.
            every.add_done_callback(lambda _: parts.put_nowait(None))
            if asked.is_stream:
                return await self._stream(request, asked, head, parts, every)
            samples = [sample for some in await every for sample in some]
            return web.json_response(self._whole(asked, head, parts, samples))
        except ConnectionError:
            return error_response(499, "the client is gone")
        finally:
            for one in answers:
                one.cancel()

    def _decode(self, tokens: Sequence[int], skip_special: bool = True) -> str:
        return str(self._decoder.decode(tokens, skip_special_tokens=skip_special))

    def _whole(
        self, asked: OpenAIRequest, head: Mapping[str, Any], parts: asyncio.Queue[_Part | None], samples: list[Sample]
    ) -> dict[str, Any]:
        found: defaultdict[int, _Part] = defaultdict(lambda: _Part(index=0))
        while (part := parts.get_nowait()) is not None:
            whole = found[part.index]
            whole.text += part.text
            whole.calls += part.calls
            whole.drawn += part.drawn
            whole.finish = part.finish
        choices = []
        for index, sample in enumerate(samples):
            whole = found[index]
            choice: dict[str, Any] = {"index": index, "finish_reason": whole.finish}
            if asked.is_chat:
                message: dict[str, Any] = {"role": "assistant", "content": whole.text}
                if whole.calls:
                    message |= {"content": whole.text.strip() or None, "tool_calls": _calls(whole.calls)}
                choice["message"] = message
            else:
                choice["text"] = whole.text
            choice["logprobs"] = self._logprobs(asked, whole.drawn)
            if asked.has_ids:
                choice |= {"prompt_token_ids": sample.prompt, "token_ids": sample.tokens, "spans": sample.spans}
            choices.append(choice)
        return {**head, "choices": choices, "usage": _usage(asked, samples)}

    async def _stream(
        self,
        request: web.BaseRequest,
        asked: OpenAIRequest,
        head: Mapping[str, Any],
        parts: asyncio.Queue[_Part | None],
        every: asyncio.Future[list[list[Sample]]],
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})

        async def send(choices: list[Any], **more: Any) -> None:
            await response.write(f"data: {json.dumps({**head, 'choices': choices, **more})}\n\n".encode())

        begun: set[int] = set()
        while (part := await parts.get()) is not None:
            if not response.prepared:
                # Until there is a first token, another engine can answer if this one fails.
                await response.prepare(request)
            choice: dict[str, Any] = {"index": part.index, "finish_reason": part.finish}
            if asked.is_chat:
                delta: dict[str, Any] = {} if part.index in begun else {"role": "assistant"}
                if part.text or delta:
                    delta["content"] = part.text
                if part.calls:
                    delta["tool_calls"] = _calls(part.calls, has_index=True)
                choice["delta"] = delta
            else:
                choice["text"] = part.text
            choice["logprobs"] = self._logprobs(asked, part.drawn)
            if asked.has_ids:
                choice["token_ids"] = [one.token for one in part.drawn]
            begun.add(part.index)
            await send([choice])
        try:
            samples = [sample for some in every.result() for sample in some]
        except ClusterError as error:
            if not response.prepared:
                raise
            await response.write(f"data: {error_response(503, str(error)).text}\n\n".encode())
            break_off(request)
            return response
        if asked.has_usage:
            await send([], usage=_usage(asked, samples))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _logprobs(self, asked: OpenAIRequest, drawn: Iterable[Drawn]) -> dict[str, Any] | None:
        if asked.most_probable is None:
            return None
        tokens = [(self._decode([one.token], False), one) for one in drawn]
        if not asked.is_chat:
            return {
                "tokens": [text for text, _ in tokens],
                "token_logprobs": [one.logprob for _, one in tokens],
                "top_logprobs": [
                    {self._decode([token], False): logprob for token, logprob in one.most_probable} for _, one in tokens
                ],
            }

        def entry(text: str, logprob: float) -> dict[str, Any]:
            return {"token": text, "logprob": logprob, "bytes": list(text.encode(errors="replace"))}

        return {
            "content": [
                {
                    **entry(text, one.logprob),
                    "top_logprobs": [entry(self._decode([token], False), other) for token, other in one.most_probable],
                }
                for text, one in tokens
            ],
            "refusal": None,
        }


class _Choice:
    """A sample in the making, as the client gets it."""

    def __init__(self, asked: OpenAIRequest, decode: Callable[[Sequence[int]], str]) -> None:
        self.text = TokenText(decode, asked.stops)
        self.reader = ToolCallReader() if asked.has_tools else None
        self.drawn: list[Drawn] = []
        """The tokens of which the client knows nothing yet."""
        self.num_calls = 0


class _Teller:
    """Makes parts of the tokens of one prompt, in the thread that makes them."""

    def __init__(
        self,
        asked: OpenAIRequest,
        decode: Callable[[Sequence[int]], str],
        first_index: int,
        tell: Callable[[_Part], object],
    ) -> None:
        self.most_probable: int = asked.most_probable or 0
        self._first_index = first_index
        self._tell = tell
        self._choices: defaultdict[int, _Choice] = defaultdict(lambda: _Choice(asked, decode))

    def hear(self, index: int, drawn: Drawn) -> bool:
        choice = self._choices[index]
        choice.drawn.append(drawn)
        self._pass_on(index, choice, choice.text.add(drawn.token))
        return choice.text.is_stopped

    def end(self, index: int, why: Finish) -> None:
        choice = self._choices[index]
        self._pass_on(index, choice, choice.text.end(), why)

    def _pass_on(self, index: int, choice: _Choice, text: str, finish: Finish | None = None) -> None:
        part = _Part(index=self._first_index + index, text=text, finish=finish)
        if choice.reader is not None:
            part.text, calls = choice.reader.add(text, is_last=finish is not None)
            part.calls = list(enumerate(calls, choice.num_calls))
            choice.num_calls += len(calls)
            if finish == "stop" and choice.num_calls:
                part.finish = "tool_calls"
        if part.text or part.calls or finish is not None:
            part.drawn, choice.drawn = choice.drawn, []
            self._tell(part)


def _calls(calls: Iterable[tuple[int, ToolCall]], *, has_index: bool = False) -> list[dict[str, Any]]:
    return [
        {
            **({"index": index} if has_index else {}),
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": call._asdict(),
        }
        for index, call in calls
    ]


def _usage(asked: OpenAIRequest, samples: Iterable[Sample]) -> dict[str, int]:
    prompt, completion = sum(len(one.tokens) for one in asked.prompts), sum(len(one.tokens) for one in samples)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
