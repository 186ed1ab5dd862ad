"""GRPO: samples of one prompt are compared with each other, and the better ones become likelier."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from roost.rl.engines.samples import Sample

_SMALLEST_SPREAD = 1e-4


class Scored(NamedTuple):
    """A sample, and how much better it is than the others of its prompt."""

    sample: Sample
    advantage: float


def score(samples: Sequence[Sample], rewards: Sequence[float]) -> list[Scored]:
    """Compare the samples of one prompt: the advantage is how far a reward is from their mean, in deviations."""
    mean, spread = statistics.fmean(rewards), statistics.pstdev(rewards)
    return [
        Scored(one, (value - mean) / (spread + _SMALLEST_SPREAD)) for one, value in zip(samples, rewards, strict=True)
    ]


def policy_loss(
    model: Any, batch: Sequence[Scored], *, allowed: Sequence[int] = (), clip: float = 0.2
) -> tuple[Any, float]:
    """Return the loss of a batch for a causal language model of transformers, to call `backward` on.

    `allowed` are the tokens that could be sampled, if not all. Samples of older weights count by how much likelier
    they are now, clipped. The second value is the largest change of a log probability since a token was sampled: with
    the same weights it is the difference between the engine's arithmetic and the trainer's, which should be tiny.
    """
    import torch

    device = next(model.parameters()).device
    rows = [(*one.sample.prompt, *one.sample.tokens) for one in batch]
    width = max(map(len, rows))
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    old, mask = torch.zeros(len(rows), width), torch.zeros(len(rows), width)
    for row, (words, (sample, _)) in enumerate(zip(rows, batch, strict=True)):
        tokens[row, : len(words)] = torch.tensor(words)
        old[row, len(sample.prompt) : len(words)] = torch.tensor(sample.logprobs)
        mask[row, len(sample.prompt) : len(words)] = 1.0
    tokens, old, mask = (one.to(device) for one in (tokens, old[:, 1:], mask[:, 1:]))
    advantages = torch.tensor([one.advantage for one in batch], device=device)[:, None]
    # Padding is on the right, where a causal model does not look.
    logits = model(tokens).logits[:, :-1].float()
    if allowed:
        limits = torch.full(logits.shape[-1:], -torch.inf, device=device)
        limits[list(allowed)] = 0.0
        logits = logits + limits
    new = torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None])[..., 0]
    change = torch.where(mask > 0, new - old, 0.0)
    ratio = change.exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return -(gain * mask).sum() / mask.sum(), float(change.detach().abs().max())
