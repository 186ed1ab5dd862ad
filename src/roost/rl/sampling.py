"""Samples for a batch of prompts, through the router: each as soon as it is finished."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from roost.deadline import Deadline
from roost.errors import CallTimedOut
from roost.rl.engines.samples import Prompt, Sample, VersionSpan
from roost.rl.json_request import ask
from roost.rl.limits import GRACE_SECONDS
from roost.rl.router import TIMEOUT_HEADER
from roost.runtime.events.waits import waiting
from roost.runtime.failures.meanwhile import with_meanwhile
from roost.text import plural

_MOST_RESUMES = 100


@runtime_checkable
class Dialect(Protocol):
    """How the server of an engine is asked for samples; a class of engines has it."""

    path: str

    def to_request(self, prompt: Prompt) -> dict[str, Any]:
        """Return the JSON that its server takes for a prompt."""
        ...

    def from_answer(self, prompt: Prompt, answer: Any) -> list[Sample]:
        """Return the samples of its server's answer."""
        ...


class Sampler:
    """Asks the router of a job for samples."""

    def __init__(self, dialect: Dialect, url: str, secret: str, busy: Callable[[], Sequence[str]] = lambda: ()) -> None:
        """Take what returns the workers of engines that have requests."""
        self._busy = busy
        self._dialect = dialect
        self._url = url
        self._secret = secret

    def run(self, prompts: Sequence[Prompt], timeout: float, most_at_once: int) -> Iterator[tuple[int, Sample]]:
        """Yield each sample with the place of its prompt, as soon as the prompt is answered.

        A sample that an update of the weights broke off goes on from its old tokens.
        """
        if not prompts:
            return
        deadline = Deadline.after(timeout)
        pool = ThreadPoolExecutor(min(most_at_once, len(prompts)), thread_name_prefix="roost-sampling")
        try:
            asked = {pool.submit(self._answer, prompt, deadline): place for place, prompt in enumerate(prompts)}
            ended = as_completed(asked)
            for number in range(len(asked)):
                with waiting(lambda: "the router", details=functools.partial(self._details, len(asked) - number)):
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
            # Whoever stops to listen does not wait for the rest.
            pool.shutdown(wait=False, cancel_futures=True)

    def _details(self, missing: int) -> tuple[str, Sequence[str]]:
        return f"{plural(missing, 'prompt')} at the router {self._url}, busy:", self._busy()

    def _answer(self, prompt: Prompt, deadline: Deadline) -> list[Sample]:
        return [self._finish(prompt, sample, deadline) for sample in self._ask(prompt, deadline)]

    def _finish(self, prompt: Prompt, sample: Sample, deadline: Deadline) -> Sample:
        """Go on with a sample until it is complete."""
        for _ in range(_MOST_RESUMES):
            left = prompt.max_tokens - len(sample.tokens)
            if sample.finish != "abort":
                return sample
            if left <= 0:
                return replace(sample, finish="length")
            rest = replace(prompt, tokens=prompt.tokens + sample.tokens, n=1, max_tokens=left)
            (more,) = self._ask(rest, deadline)
            sample = join_samples(sample, more)
        return sample

    def _ask(self, prompt: Prompt, deadline: Deadline) -> list[Sample]:
        if deadline.is_over:
            raise CallTimedOut("the others were not asked any more")
        request = self._dialect.to_request(prompt)
        return self._dialect.from_answer(
            prompt, ask_router(self._url, self._dialect.path, request, self._secret, deadline.left)
        )


def ask_router(url: str, path: str, request: dict[str, Any], secret: str, timeout: float) -> Any:
    """Send a request through the router of a job, and return its answer."""
    return ask(
        url,
        path,
        request,
        secret=secret,
        # The router knows the deadline, and says what happened when it is over.
        timeout=timeout + GRACE_SECONDS,
        who=f"the router at {url}",
        headers={TIMEOUT_HEADER: str(timeout)},
        hint="if its process is gone, manager.restart() starts it again",
    )


def join_samples(first: Sample, more: Sample) -> Sample:
    """Return one sample of two, the second of which goes on from the tokens of the first."""
    start = len(first.tokens)
    moved = (VersionSpan(span.version, span.start + start, span.end + start) for span in more.spans)
    return replace(
        first,
        tokens=first.tokens + more.tokens,
        logprobs=first.logprobs + more.logprobs,
        spans=(*first.spans, *moved),
        finish=more.finish,
    )
