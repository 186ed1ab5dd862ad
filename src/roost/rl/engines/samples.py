"""Prompts for a language model and its samples, in tokens: the same for every engine."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

from roost.errors import ConfigError
from roost.text import join_words

Finish = Literal["stop", "length", "abort"]
MOST_SAMPLES = 1024
"""So many samples can be asked for at once."""


class VersionSpan(NamedTuple):
    """Which version of the weights made the tokens from `start` up to `end`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A request for samples. As JSON it is what the server of an engine of Roost's own takes."""

    tokens: tuple[int, ...]
    n: int = 1
    """How many samples to make, at most 1,024."""
    max_tokens: int = 256
    """How many tokens each may have."""
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a sample, besides the model's own end of text."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be sampled; all if it is empty."""
    ignore_eos: bool = False
    """Whether to go on after the model's end of text."""
    seed: int | None = None

    def __post_init__(self) -> None:
        wrong = [
            name
            for name, is_right in (
                ("tokens", len(self.tokens) > 0 and all(type(one) is int and one >= 0 for one in self.tokens)),
                ("n", type(self.n) is int and 1 <= self.n <= MOST_SAMPLES),
                ("max_tokens", type(self.max_tokens) is int and self.max_tokens >= 1),
                ("temperature", self.temperature >= 0),
                ("top_p", 0 < self.top_p <= 1),
            )
            if not is_right
        ]
        if wrong:
            values = join_words([f"{name} {getattr(self, name)!r}" for name in wrong])
            raise ConfigError(f"a prompt cannot have {values}")

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Prompt:
        """Read what `to_json` returned; ConfigError if it is anything else."""
        try:
            given: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in value.items()}
            return cls(**given)
        except (TypeError, AttributeError) as error:
            raise ConfigError(
                f"not a prompt: {error}", hint='it is {"tokens": [1, 2], "max_tokens": 16, ...}'
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answer to a prompt."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """The logarithm of the probability with which each token was sampled, after temperature and limits."""
    spans: tuple[VersionSpan, ...]
    """Which version of the weights made which tokens, in order."""
    finish: Finish

    @property
    def versions(self) -> tuple[int, ...]:
        """The version of the weights that made each token."""
        return tuple(span.version for span in self.spans for _ in range(span.start, span.end))

    def staleness(self, version: int) -> tuple[int, ...]:
        """Return how many versions before this one the weights were that made each token."""
        return tuple(version - one for one in self.versions)

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Sample:
        """Read what `to_json` returned."""
        lists = {name: tuple(value[name]) for name in ("prompt", "tokens", "logprobs")}
        return cls(**lists, spans=tuple(VersionSpan(*span) for span in value["spans"]), finish=value["finish"])


@runtime_checkable
class Dialect(Protocol):
    """How the server of an engine is asked for samples; a class of engines has it."""

    path: ClassVar[str]
    """Where its server takes prompts."""

    @staticmethod
    @abstractmethod
    def to_request(prompt: Prompt) -> dict[str, Any]:
        """Return the JSON that its server takes for a prompt."""
        ...

    @staticmethod
    @abstractmethod
    def from_answer(prompt: Prompt, answer: Any) -> list[Sample]:
        """Return the samples of an answer of its server."""
        ...
