"""A policy that balances a pole, and how it learns: PPO in numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Weights = Mapping[str, Floats]

_HIDDEN = 32
_ACTIONS = 2
_SCALE = np.array([2.4, 2.0, 0.2, 2.0])
"""The rough magnitudes of position, speed, angle and angular speed."""
_DISCOUNT = 0.98
_TRACE = 0.95
_CLIP = 0.2
_ENTROPY = 0.005
_RATE = 0.02
_EPOCHS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The steps of some games played in parallel; arrays are indexed by step, then by game."""

    observations: Floats
    actions: NDArray[np.int64]
    logprobs: Floats
    """Of the actions, under the policy that chose them."""
    rewards: Floats
    ends: NDArray[np.bool_]
    """Whether the episode ended with this step."""
    last: Floats
    """The observation of each game after the last step."""


def first_weights(seed: int) -> Weights:
    """Return initial weights, under which both actions are equally likely."""
    rng = np.random.default_rng(seed)
    return {
        "w1": rng.normal(scale=0.5, size=(len(_SCALE), _HIDDEN)),
        "b1": np.zeros(_HIDDEN),
        "w2": np.zeros((_HIDDEN, _ACTIONS)),
        "b2": np.zeros(_ACTIONS),
    }


def probabilities(weights: Weights, observations: Floats) -> Floats:
    """Return the probability of each action.

    >>> probabilities(first_weights(0), np.zeros((3, 4))).tolist()
    [[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]
    """
    return _forward(weights, observations)[2]


def choose(weights: Weights, observations: Floats, rng: np.random.Generator) -> tuple[NDArray[np.int64], Floats]:
    """Draw an action for each observation; return the actions and their log-probabilities."""
    likely = probabilities(weights, observations)
    actions = (rng.random(len(likely)) < likely[:, 1]).astype(np.int64)
    return actions, np.log(likely[np.arange(len(likely)), actions])


class Learner:
    """One of the ranks that learn together: each learns from its own batch, and all take the same steps."""

    def __init__(self, seed: int, average: Callable[[Floats], Floats]) -> None:
        self.weights: Weights = first_weights(seed)
        self._average = average
        self._steps = 0
        self._mean = self._square = np.zeros(sum(value.size for value in self.weights.values()))

    def learn(self, batch: Batch) -> None:
        """Take some steps on a batch, with the gradients averaged over all ranks."""
        observations = batch.observations.reshape(-1, len(_SCALE))
        actions, logprobs = batch.actions.ravel(), batch.logprobs.ravel()
        advantages = _advantages(batch).ravel()
        for _ in range(_EPOCHS):
            own = _gradient(self.weights, observations, actions, logprobs, advantages)
            gradient = self._average(np.concatenate([own[name].ravel() for name in self.weights]))
            # Adam.
            self._steps += 1
            self._mean = 0.9 * self._mean + 0.1 * gradient
            self._square = 0.99 * self._square + 0.01 * gradient**2
            mean, square = self._mean / (1 - 0.9**self._steps), self._square / (1 - 0.99**self._steps)
            step = _RATE * mean / (np.sqrt(square) + 1e-8)
            parts = np.split(step, np.cumsum([value.size for value in self.weights.values()])[:-1])
            named = zip(self.weights.items(), parts, strict=True)
            self.weights = {name: value + part.reshape(value.shape) for (name, value), part in named}


def _forward(weights: Weights, observations: Floats) -> tuple[Floats, Floats, Floats]:
    scaled = observations / _SCALE
    hidden = np.tanh(scaled @ weights["w1"] + weights["b1"])
    logits = hidden @ weights["w2"] + weights["b2"]
    raised = np.exp(logits - logits.max(axis=1, keepdims=True))
    return scaled, hidden, raised / raised.sum(axis=1, keepdims=True)


def _gradient(
    weights: Weights, observations: Floats, actions: NDArray[np.int64], logprobs: Floats, advantages: Floats
) -> Weights:
    """Return the gradient of PPO's clipped objective with a small entropy bonus."""
    scaled, hidden, likely = _forward(weights, observations)
    count = len(observations)
    ratio = np.exp(np.log(likely[np.arange(count), actions]) - logprobs)
    clipped = ((advantages > 0) & (ratio > 1 + _CLIP)) | ((advantages < 0) & (ratio < 1 - _CLIP))
    pull = (~clipped * advantages * ratio)[:, None] / count
    surprise = np.log(likely)
    entropy = -(likely * surprise).sum(axis=1, keepdims=True)
    logits = pull * (np.eye(_ACTIONS)[actions] - likely) - _ENTROPY / count * likely * (surprise + entropy)
    inner = logits @ weights["w2"].T * (1 - hidden**2)
    return {"w1": scaled.T @ inner, "b1": inner.sum(axis=0), "w2": hidden.T @ logits, "b2": logits.sum(axis=0)}


def _advantages(batch: Batch) -> Floats:
    """Return how much better each step went than expected (GAE), normalised; the expectation is fitted to the batch."""

    def features_of(observations: Floats) -> Floats:
        scaled = observations / _SCALE
        return np.concatenate([scaled, scaled**2, np.ones((*scaled.shape[:-1], 1))], axis=-1)

    def discounted(amounts: Floats, factors: Floats, running: Floats) -> Floats:
        """Return for each step its amount and the discounted ones that follow; `running` follows the last."""
        out = np.zeros_like(amounts)
        for step in reversed(range(len(amounts))):
            out[step] = running = amounts[step] + factors[step] * running
        return out

    going_on = (~batch.ends).astype(np.float64)
    features, last = features_of(batch.observations), features_of(batch.last)
    flat = features.reshape(-1, features.shape[-1])
    normal = flat.T @ flat + 1e-3 * np.eye(features.shape[-1])
    nothing = after = np.zeros(len(batch.last))
    # The first fit takes the value after the last step as 0; the second takes it from the first.
    for _ in range(2):
        returns = discounted(batch.rewards, _DISCOUNT * going_on, after)
        fitted = np.linalg.solve(normal, flat.T @ returns.ravel())
        values, after = features @ fitted, last @ fitted
    errors = batch.rewards + _DISCOUNT * going_on * np.concatenate([values[1:], [after]]) - values
    out = discounted(errors, _DISCOUNT * _TRACE * going_on, nothing)
    normalised: Floats = (out - out.mean()) / (out.std() + 1e-8)
    return normalised
