"""Sequences that a model of transformers continues together: one forward for all of them, and one draw for each."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from roost.errors import ClusterError, ConfigError

_GREEDY_BELOW = 1e-5
_MOST_MASKS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How the next token of a sequence is drawn."""

    temperature: float
    """At 0 the most probable token is taken, and its log probability is the one at temperature 1."""
    top_p: float
    allowed: tuple[int, ...]
    """The only tokens to draw from; all if it is empty."""
    number: float
    """A random number from 0 up to 1, which decides."""
    most_probable: int = 0
    """How many of the most probable tokens are told with the one that is drawn."""

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is taken."""
        return self.temperature < _GREEDY_BELOW


class Drawn(NamedTuple):
    """A token that was drawn, and its log probability."""

    token: int
    logprob: float
    most_probable: tuple[tuple[int, float], ...] = ()
    """The most probable tokens with their log probabilities, if they were asked for."""


class TokenBatch:
    """Rows of tokens of different lengths, whose keys and values are in one cache.

    Rows are padded on the left, so that all of them end in the same column: that is the form in which every causal
    model of transformers takes a batch. The cache is as wide as the longest row, and no wider.
    """

    def __init__(self, model: Any) -> None:
        if getattr(model, "_is_stateful", False):
            hint = "take a model whose layers are all attention"
            raise ConfigError(f"{type(model).__name__} keeps a state, which cannot be padded", hint=hint)
        self._torch: Any = importlib.import_module("torch")
        self._model = model
        self._vocabulary: int = model.get_input_embeddings().weight.shape[0]
        self._cache: Any = None
        self._lengths: list[int] = []
        self._mask_of = lru_cache(_MOST_MASKS)(self._make_mask)

    def start(self, prefixes: Sequence[tuple[int, ...]], choices: Sequence[Choice]) -> list[Drawn]:
        """Add a row for each prefix; returns the first token of each.

        Prefixes that are the same are computed once. If this fails, the rows are as before.
        """
        distinct = {prefix: row for row, prefix in enumerate(dict.fromkeys(prefixes))}
        width = max(map(len, distinct))
        padded = [(0,) * (width - len(prefix)) + prefix for prefix in distinct]
        cache = importlib.import_module("transformers").DynamicCache()
        with self._torch.inference_mode():
            logits = self._forward(padded, cache, list(map(len, distinct)), width)
            rows = self._tensor([distinct[prefix] for prefix in prefixes])
            cache.batch_select_indices(rows)
            drawn = self._draw(logits[rows], choices)
            self._merge(cache, width)
        self._lengths += map(len, prefixes)
        return drawn

    def step(self, tokens: Sequence[int], choices: Sequence[Choice]) -> list[Drawn]:
        """Append a token to each row; returns the next token of each.

        If this fails, the rows can only be cleared.
        """
        self._lengths = [length + 1 for length in self._lengths]
        with self._torch.inference_mode():
            rows = [(token,) for token in tokens]
            return self._draw(self._forward(rows, self._cache, self._lengths, max(self._lengths)), choices)

    def keep(self, rows: Sequence[int]) -> None:
        """Leave out all rows but these."""
        if len(rows) == len(self._lengths):
            return
        if not rows:
            self.clear()
            return
        width = max(self._lengths)
        self._lengths = [self._lengths[row] for row in rows]
        unused = width - max(self._lengths)
        with self._torch.inference_mode():
            self._cache.batch_select_indices(self._tensor(rows))
            for layer in self._cache.layers:
                layer.keys, layer.values = layer.keys[:, :, unused:], layer.values[:, :, unused:]

    def clear(self) -> None:
        """Leave out all rows, and free the memory of the cache."""
        self._cache, self._lengths = None, []
        self._mask_of.cache_clear()

    def _forward(self, tokens: Sequence[Sequence[int]], cache: Any, lengths: Sequence[int], width: int) -> Any:
        """Compute the logits after the last of these tokens, and write keys and values into the cache."""
        columns = self._torch.arange(width, device=self._model.device)
        padding = width - self._tensor(lengths)[:, None]
        positions = (columns - padding).clamp(min=0)
        try:
            found = self._model(
                input_ids=self._tensor(tokens),
                attention_mask=columns >= padding,
                position_ids=positions[:, -len(tokens[0]) :],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        except self._torch.OutOfMemoryError:
            found = None
        if found is None:
            # Not as the cause: its traceback holds the memory.
            hint = "give the engine a smaller max_batch, or requests a smaller max_tokens"
            raise ClusterError(f"the accelerator has no memory left for {len(tokens)} sequences", hint=hint)
        return found.logits[:, -1]

    def _merge(self, cache: Any, width: int) -> None:
        """Append the rows of another cache to the own one."""
        if self._cache is None:
            self._cache = cache
            return
        own, pad = max(self._lengths), self._torch.nn.functional.pad
        widest = max(own, width)
        for layer, new in zip(self._cache.layers, cache.layers, strict=True):
            for name in ("keys", "values"):
                parts = ((getattr(layer, name), own), (getattr(new, name), width))
                setattr(layer, name, self._torch.cat([pad(one, (0, 0, widest - has, 0)) for one, has in parts]))

    def _draw(self, logits: Any, choices: Sequence[Choice]) -> list[Drawn]:
        torch = self._torch
        temperatures = self._tensor([1.0 if choice.is_greedy else choice.temperature for choice in choices])
        scores = logits.float() / temperatures[:, None]
        if limited := [row for row, choice in enumerate(choices) if choice.allowed]:
            masks = torch.stack([self._mask_of(choices[row].allowed) for row in limited])
            scores[limited] = scores[limited].masked_fill(~masks, -torch.inf)
        if cut := [row for row, choice in enumerate(choices) if choice.top_p < 1 and not choice.is_greedy]:
            scores[cut] = self._cut(scores[cut], self._tensor([choices[row].top_p for row in cut]))
        logprobs = scores.log_softmax(dim=-1)
        tokens = logprobs.argmax(dim=-1)
        if not all(choice.is_greedy for choice in choices):
            # In double precision: over a large vocabulary, rounding would take the rare tokens away.
            sums = logprobs.double().exp().cumsum(dim=-1)
            numbers = torch.tensor([choice.number for choice in choices], dtype=sums.dtype, device=sums.device)
            found = torch.searchsorted(sums, numbers[:, None] * sums[:, -1:], right=True)[:, 0]
            greedy = self._tensor([choice.is_greedy for choice in choices])
            # Past the end only if the logits are not numbers, as the log probability then shows.
            tokens = torch.where(greedy, tokens, found.clamp(max=self._vocabulary - 1))
        taken = logprobs.gather(1, tokens[:, None])[:, 0]
        most_probable: list[tuple[tuple[int, float], ...]] = [()] * len(choices)
        if (most := max(choice.most_probable for choice in choices)) > 0:
            values, indices = logprobs.topk(min(most, self._vocabulary))
            for row, choice in enumerate(choices):
                best = zip(indices[row].tolist(), values[row].tolist(), strict=True)
                # Tokens that cannot be drawn have no log probability that JSON could tell.
                most_probable[row] = tuple(one for one in best if one[1] > -math.inf)[: choice.most_probable]
        return list(map(Drawn, tokens.tolist(), taken.tolist(), most_probable))

    def _cut(self, scores: Any, top_p: Any) -> Any:
        """Leave the most probable tokens of each row, as few as have this probability together."""
        ordered, order = scores.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        ordered = ordered.masked_fill(before >= top_p[:, None], -self._torch.inf)
        return scores.scatter(1, order, ordered)

    def _make_mask(self, tokens: tuple[int, ...]) -> Any:
        mask = self._torch.zeros(self._vocabulary, dtype=self._torch.bool, device=self._model.device)
        mask[list(tokens)] = True
        return mask

    def _tensor(self, values: Sequence[Any]) -> Any:
        return self._torch.tensor(values, device=self._model.device)
