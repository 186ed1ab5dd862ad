"""Samples for a batch of prompts, through the router: each as soon as it is finished."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Any

from roost.deadline import Deadline
from roost.errors import CallTimedOut
from roost.rl.engines.samples import Dialect, Prompt, Sample, VersionSpan
from roost.runtime.events.waits import waiting
from roost.runtime.failures.meanwhile import with_meanwhile
from roost.text import plural

_MOST_RESUMES = 100


def draw_samples(
    dialect: Dialect,
    send: Callable[[str, dict[str, Any], float], Any],
    prompts: Sequence[Prompt],
    timeout: float,
    most_at_once: int,
    details: Callable[[str], tuple[str, Sequence[str]]],
) -> Iterator[tuple[int, Sample]]:
    """Yield each sample with the place of its prompt, as soon as the prompt is answered.

    `send` takes a path, a request and seconds, and returns the answer; `details` takes what is missing, and says for
    whom that waits. A sample that an update of the weights broke off goes on from its old tokens.
    """
    if not prompts:
        return
    deadline = Deadline.after(timeout)

    def ask(prompt: Prompt) -> list[Sample]:
        if deadline.is_over:
            raise CallTimedOut("the others were not asked any more")
        return dialect.from_answer(prompt, send(dialect.path, dialect.to_request(prompt), deadline.left))

    def finish(prompt: Prompt, sample: Sample) -> Sample:
        for _ in range(_MOST_RESUMES):
            start = len(sample.tokens)
            if sample.finish != "abort":
                return sample
            if start >= prompt.max_tokens:
                return replace(sample, finish="length")
            (more,) = ask(
                replace(prompt, tokens=prompt.tokens + sample.tokens, n=1, max_tokens=prompt.max_tokens - start)
            )
            moved = (VersionSpan(span.version, span.start + start, span.end + start) for span in more.spans)
            sample = replace(
                sample,
                tokens=sample.tokens + more.tokens,
                logprobs=sample.logprobs + more.logprobs,
                spans=(*sample.spans, *moved),
                finish=more.finish,
            )
        return sample

    pool = ThreadPoolExecutor(min(most_at_once, len(prompts)), thread_name_prefix="roost-sampling")
    try:
        asked = {
            pool.submit(lambda prompt: [finish(prompt, sample) for sample in ask(prompt)], prompt): place
            for place, prompt in enumerate(prompts)
        }
        ended = as_completed(asked)
        for number in range(len(asked)):
            missing = plural(len(asked) - number, "prompt")
            with waiting(lambda: "the router", details=functools.partial(details, missing)):
                done = next(ended)
            try:
                samples = done.result()
            except CallTimedOut as late:
                answered = f"{number} of {plural(len(prompts), 'prompt')}"
                error = CallTimedOut(f"{answered} were answered in {timeout:g} s: {late}")
                raise with_meanwhile(error) from None
            for sample in samples:
                yield asked[done], sample
    finally:
        # A caller that stops to listen does not wait for the rest.
        pool.shutdown(wait=False, cancel_futures=True)
