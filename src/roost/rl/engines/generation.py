"""Prompts in, samples out: a thread that continues many sequences at once, and pauses between two steps."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from roost.errors import CallTimedOut, ClusterError
from roost.rl.engine import PauseMode
from roost.rl.engines.samples import Finish, Prompt, Sample, VersionSpan
from roost.rl.engines.token_batch import Choice, Drawn, TokenBatch
from roost.rl.limits import WEIGHTS_SECONDS
from roost.text import error_text

_NUMBER_BITS = 48
_STARTED_TOKENS = 8192
"""How many tokens of prompts one step computes, unless a single prompt has more."""


log: logging.Logger = logging.getLogger(__name__)


class Listener(Protocol):
    """Hears of each token of a request as it is made, in the thread that makes it."""

    most_probable: int
    """How many of the most probable tokens it wants to know besides each."""

    def hear(self, index: int, drawn: Drawn) -> bool:
        """Hear a token of a sample that is not a stop token; returns whether the sample ends with it."""
        ...

    def end(self, index: int, why: Finish) -> None:
        """Hear that a sample has ended."""
        ...


@dataclass(eq=False, slots=True)
class _Request:
    """A prompt, and the samples that it has so far."""

    prompt: Prompt
    stops: frozenset[int]
    listener: Listener | None
    samples: dict[int, Sample] = field(default_factory=dict)
    answer: Future[list[Sample]] = field(default_factory=Future)

    @contextlib.contextmanager
    def telling(self) -> Iterator[Listener | None]:
        """Tell the listener something: if that raises, this request fails, and no other."""
        try:
            yield self.listener
        except Exception as error:
            log.exception("a request's tokens could not be told")
            self.fail(ClusterError(f"the engine could not answer: {error_text(error)}"))

    def fail(self, error: ClusterError) -> None:
        # The client may be gone, or another sequence has failed.
        with contextlib.suppress(InvalidStateError):
            self.answer.set_exception(error)


@dataclass(eq=False, slots=True)
class _Sequence:
    """A sample in the making."""

    request: _Request
    index: int
    random: Random
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)

    @property
    def prefix(self) -> tuple[int, ...]:
        """All tokens that it has."""
        return (*self.request.prompt.tokens, *self.tokens)

    def take(self, drawn: Drawn, version: int) -> bool:
        """Append a token; returns whether the sample has ended."""
        if not math.isfinite(drawn.logprob):
            self.request.fail(ClusterError("the model's logits are not numbers"))
            return True
        start = len(self.tokens)
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.tokens.append(drawn.token)
        self.logprobs.append(drawn.logprob)
        self.spans.append(VersionSpan(version, start, len(self.tokens)))
        is_stopped = drawn.token in self.request.stops
        if not is_stopped:
            with self.request.telling() as listener:
                is_stopped = listener is not None and listener.hear(self.index, drawn)
        has_ended = is_stopped or len(self.tokens) == self.request.prompt.max_tokens
        if has_ended:
            self.finish("stop" if is_stopped else "length")
        return has_ended

    def finish(self, why: Finish) -> None:
        """Give the request its sample, and the client all of them if it is the last."""
        request = self.request
        with request.telling() as listener:
            if listener is not None:
                listener.end(self.index, why)
        request.samples[self.index] = Sample(
            prompt=request.prompt.tokens,
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            spans=tuple(self.spans),
            finish=why,
        )
        if len(request.samples) == request.prompt.n:
            # The client may be gone, or another sequence has failed.
            with contextlib.suppress(InvalidStateError):
                request.answer.set_result([request.samples[one] for one in range(request.prompt.n)])


class Generation:
    """Continues the sequences of all requests, at most `max_batch` at a time; others wait for their turn.

    A step computes the next token of every sequence, or the first one of some that join. Weights change between two
    steps, so each token was made by one version of them: the version of the step.
    """

    def __init__(self, batch: TokenBatch, *, max_batch: int, pause_mode: PauseMode, random: Random, name: str) -> None:
        self.version: int = 0
        """The version of the weights."""
        self._batch = batch
        self._max_batch = max_batch
        self._pause_mode: PauseMode = pause_mode
        self._random = random
        self._changed = threading.Condition()
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        """The rows of the batch. Only a step changes them, or a pause when no step is under way."""
        self._is_stepping = False
        self._is_paused = False
        self._is_asleep = False
        self._torn = ""
        """The error that broke off the last change of the weights."""
        self._end = ""
        """Why it has ended."""
        self._one_pause = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_well(self) -> bool:
        """Whether it can make samples, or could if it were awake."""
        return not self._torn and not self._end

    def submit(self, prompt: Prompt, stops: frozenset[int], listener: Listener | None = None) -> Future[list[Sample]]:
        """Make samples that end with one of `stops`, or are as long as the prompt says; cancel the future to stop.

        ClusterError if it cannot, now or later.
        """
        request = _Request(prompt, stops, listener)
        with self._changed:
            if why := self._end or self._torn or ("it is offloaded" if self._is_asleep else ""):
                raise ClusterError(f"the engine does not serve: {why}")
            seed = self._random.getrandbits(64) if prompt.seed is None else prompt.seed
            randoms = [Random(f"{seed}:{index}") for index in range(prompt.n)]  # noqa: S311 - no secret
            self._waiting += [_Sequence(request, index, random) for index, random in enumerate(randoms)]
            self._changed.notify_all()
        return request.answer

    @contextlib.contextmanager
    def changing(self, version: int) -> Iterator[None]:
        """Pause while the weights change to another version. If that is broken off, no more tokens are made."""
        with self._paused():
            try:
                yield
            except BaseException as error:
                self._torn = f"an update of its weights was broken off: {error_text(error)}"
                self._batch.clear()
                self._fail_all(self._torn)
                raise
            self.version, self._torn = version, ""

    @contextlib.contextmanager
    def falling_asleep(self) -> Iterator[None]:
        """Make no more tokens, and free the memory of the batch; sequences that run go on after `waking_up`."""
        with self._paused():
            with self._changed:
                self._is_asleep = True
                self._waiting.extendleft(reversed(self._running))
                self._running = []
            self._batch.clear()
            yield

    @contextlib.contextmanager
    def waking_up(self) -> Iterator[None]:
        """Make tokens again, afterwards."""
        with self._paused():
            yield
            self._is_asleep = False

    def close(self, seconds: float) -> None:
        """End the thread once its step is over; ClusterError if that takes longer. Requests fail."""
        with self._changed:
            self._end = self._end or "it was stopped"
            self._changed.notify_all()
        self._thread.join(seconds)
        self._fail_all(self._end)
        if self._thread.is_alive():
            raise ClusterError(f"a step of the model has not ended in {seconds:g} s")

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        if not self._one_pause.acquire(timeout=WEIGHTS_SECONDS):
            raise CallTimedOut(f"another pause of the engine has taken {WEIGHTS_SECONDS:g} s")
        try:
            with self._changed:
                self._is_paused = True
                if not self._changed.wait_for(
                    lambda: self._end or not (self._is_stepping or self._is_finishing), WEIGHTS_SECONDS
                ):
                    raise CallTimedOut(f"the engine has not paused within {WEIGHTS_SECONDS:g} s")
                if self._end:
                    raise ClusterError(f"the engine does not serve: {self._end}")
                if self._pause_mode == "abort":
                    running, self._running = self._running, []
                    self._batch.clear()
                    for sequence in running:
                        sequence.finish("abort")
            yield
        finally:
            try:
                with self._changed:
                    self._is_paused = False
                    self._changed.notify_all()
            finally:
                self._one_pause.release()

    @property
    def _is_finishing(self) -> bool:
        """Whether sequences that run finish in a pause, before what the pause is for."""
        return self._pause_mode == "wait" and bool(self._running)

    def _is_due(self) -> bool:
        """Whether there is a step to make, or the end."""
        if self._is_paused:
            return bool(self._end) or self._is_finishing
        return bool(self._end) or (not self._is_asleep and bool(self._running or self._waiting))

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(self._is_due)
                    if self._end:
                        return
                    self._is_stepping = True
                    starting = [] if self._is_paused else self._admit()
                try:
                    self._step(starting)
                finally:
                    with self._changed:
                        self._is_stepping = False
                        self._changed.notify_all()
        except Exception as error:
            log.exception("the engine has failed")
            with self._changed:
                self._end = f"it has failed: {error_text(error)}"
                self._changed.notify_all()
            self._fail_all(self._end)
        finally:
            self._batch.clear()

    def _admit(self) -> list[_Sequence]:
        """Take the next sequences that there is room for, as many as one step starts."""
        taken: list[_Sequence] = []
        distinct: set[tuple[int, ...]] = set()
        longest = 0
        while self._waiting and len(self._running) + len(taken) < self._max_batch:
            sequence = self._waiting[0]
            prefix = sequence.prefix
            if sequence.request.answer.done():
                self._waiting.popleft()
                continue
            longest = max(longest, len(prefix))
            if taken and len(distinct | {prefix}) * longest > _STARTED_TOKENS:
                break
            distinct.add(prefix)
            taken.append(self._waiting.popleft())
        return taken

    def _step(self, starting: list[_Sequence]) -> None:
        """Draw the first token of these, or the next one of those that run."""
        self._drop([sequence for sequence in self._running if sequence.request.answer.done()])
        before, self._running = self._running, self._running + starting
        active = starting or before
        if not active:
            return
        choices = [
            Choice(
                temperature=sequence.request.prompt.temperature,
                top_p=sequence.request.prompt.top_p,
                allowed=sequence.request.prompt.allowed_token_ids,
                number=sequence.random.getrandbits(_NUMBER_BITS) / 2**_NUMBER_BITS,
                most_probable=0 if (listener := sequence.request.listener) is None else listener.most_probable,
            )
            for sequence in active
        ]
        try:
            if starting:
                drawn = self._batch.start([sequence.prefix for sequence in starting], choices)
            else:
                drawn = self._batch.step([sequence.tokens[-1] for sequence in active], choices)
        except ClusterError as error:
            self._running = before if starting else []
            if not starting:
                self._batch.clear()
            for sequence in active:
                sequence.request.fail(error)
            return
        self._drop([sequence for sequence, one in zip(active, drawn, strict=True) if sequence.take(one, self.version)])

    def _drop(self, ended: Sequence[_Sequence]) -> None:
        if ended:
            gone = set(ended)
            rows = [row for row, sequence in enumerate(self._running) if sequence not in gone]
            self._running = [self._running[row] for row in rows]
            self._batch.keep(rows)

    def _fail_all(self, why: str) -> None:
        with self._changed:
            left = [*self._running, *self._waiting]
            self._running = []
            self._waiting.clear()
        for sequence in left:
            sequence.request.fail(ClusterError(f"the engine does not serve: {why}"))
