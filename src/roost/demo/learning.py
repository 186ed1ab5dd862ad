"""A policy that balances a pole, and how it learns from what was played: PPO in numpy."""

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
"""About how large the position, the speed, the angle and the angular speed get."""
_DISCOUNT = 0.98
_TRACE = 0.95
_CLIP = 0.2
_ENTROPY = 0.005
_RATE = 0.02
_EPOCHS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What some environments played side by side: an entry for each step and environment."""

    observations: Floats
    actions: NDArray[np.int64]
    logprobs: Floats
    """Of the actions, as the policy thought that chose them."""
    rewards: Floats
    ends: NDArray[np.bool_]
    """Whether the episode ended with this step."""
    last: Floats
    """What each environment saw after the last step."""
    oldest: int
    newest: int
    """The versions of the weights that chose the actions."""


def first_weights(seed: int) -> Weights:
    """Weights with which both actions are equally likely."""
    rng = np.random.default_rng(seed)
    return {
        "w1": rng.normal(scale=0.5, size=(len(_SCALE), _HIDDEN)),
        "b1": np.zeros(_HIDDEN),
        "w2": np.zeros((_HIDDEN, _ACTIONS)),
        "b2": np.zeros(_ACTIONS),
    }


def probabilities(weights: Weights, observations: Floats) -> Floats:
    """How likely each action is.

    >>> probabilities(first_weights(0), np.zeros((3, 4))).tolist()
    [[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]
    """
    return _forward(weights, observations)[2]


def choose(weights: Weights, observations: Floats, rng: np.random.Generator) -> tuple[NDArray[np.int64], Floats]:
    """Draw an action for each observation; with the logarithm of how likely it was."""
    likely = probabilities(weights, observations)
    actions = (rng.random(len(likely)) < likely[:, 1]).astype(np.int64)
    return actions, np.log(likely[np.arange(len(likely)), actions])


class Learner:
    """One of the ranks that learn together: each has a batch of its own, and all make the same steps."""

    def __init__(self, seed: int, average: Callable[[Floats], Floats]) -> None:
        self.weights: Weights = first_weights(seed)
        self._average = average
        self._steps = 0
        self._mean = {name: np.zeros_like(value) for name, value in self.weights.items()}
        self._square = {name: np.zeros_like(value) for name, value in self.weights.items()}

    def learn(self, batch: Batch) -> None:
        """Make some steps on a batch; the gradients are averaged over all ranks."""
        observations = batch.observations.reshape(-1, len(_SCALE))
        actions, logprobs = batch.actions.ravel(), batch.logprobs.ravel()
        advantages = _advantages(batch).ravel()
        for _ in range(_EPOCHS):
            own = _gradient(self.weights, observations, actions, logprobs, advantages)
            flat = self._average(np.concatenate([value.ravel() for value in own.values()]))
            self._step(_unflatten(flat, own))

    def _step(self, gradient: Weights) -> None:
        """Adam, uphill."""
        self._steps += 1
        new = {}
        for name, value in gradient.items():
            self._mean[name] = 0.9 * self._mean[name] + 0.1 * value
            self._square[name] = 0.99 * self._square[name] + 0.01 * value**2
            mean = self._mean[name] / (1 - 0.9**self._steps)
            square = self._square[name] / (1 - 0.99**self._steps)
            new[name] = self.weights[name] + _RATE * mean / (np.sqrt(square) + 1e-8)
        self.weights = new


def _forward(weights: Weights, observations: Floats) -> tuple[Floats, Floats, Floats]:
    scaled = observations / _SCALE
    hidden = np.tanh(scaled @ weights["w1"] + weights["b1"])
    logits = hidden @ weights["w2"] + weights["b2"]
    raised = np.exp(logits - logits.max(axis=1, keepdims=True))
    return scaled, hidden, raised / raised.sum(axis=1, keepdims=True)


def _gradient(
    weights: Weights, observations: Floats, actions: NDArray[np.int64], logprobs: Floats, advantages: Floats
) -> Weights:
    """Of PPO's clipped objective, with a little entropy."""
    scaled, hidden, likely = _forward(weights, observations)
    count = len(observations)
    ratio = np.exp(np.log(likely[np.arange(count), actions]) - logprobs)
    clipped = ((advantages > 0) & (ratio > 1 + _CLIP)) | ((advantages < 0) & (ratio < 1 - _CLIP))
    pull = (~clipped * advantages * ratio)[:, None] / count
    surprise = np.log(likely)
    entropy = -(likely * surprise).sum(axis=1, keepdims=True)
    logits = pull * (np.eye(_ACTIONS)[actions] - likely) - _ENTROPY / count * likely * (surprise + entropy)
    inner = logits @ weights["w2"].T * (1 - hidden**2)
    return {
        "w1": scaled.T @ inner,
        "b1": inner.sum(axis=0),
        "w2": hidden.T @ logits,
        "b2": logits.sum(axis=0),
    }


def _advantages(batch: Batch) -> Floats:
    """How much better each step went than was to be expected, normalised; what is expected is fitted to the batch."""
    steps, going_on = len(batch.rewards), 1.0 - batch.ends
    features, last = _features(batch.observations), _features(batch.last)
    values, after = np.zeros_like(batch.rewards), np.zeros(len(batch.last))
    # The first fit knows nothing of what comes after the last step; the second takes it from the first.
    for _ in range(2):
        returns, running = np.zeros_like(values), after
        for step in reversed(range(steps)):
            running = batch.rewards[step] + _DISCOUNT * running * going_on[step]
            returns[step] = running
        flat = features.reshape(-1, features.shape[-1])
        normal = flat.T @ flat + 1e-3 * np.eye(features.shape[-1])
        fitted = np.linalg.solve(normal, flat.T @ returns.ravel())
        values, after = features @ fitted, last @ fitted
    out, running, following = np.zeros_like(values), np.zeros(len(batch.last)), after
    for step in reversed(range(steps)):
        error = batch.rewards[step] + _DISCOUNT * following * going_on[step] - values[step]
        running = error + _DISCOUNT * _TRACE * running * going_on[step]
        out[step], following = running, values[step]
    normalised: Floats = (out - out.mean()) / (out.std() + 1e-8)
    return normalised


def _features(observations: Floats) -> Floats:
    scaled = observations / _SCALE
    return np.concatenate([scaled, scaled**2, np.ones((*scaled.shape[:-1], 1))], axis=-1)


def _unflatten(flat: Floats, like: Weights) -> Weights:
    parts = np.split(flat, np.cumsum([value.size for value in like.values()])[:-1])
    return {name: part.reshape(value.shape) for (name, value), part in zip(like.items(), parts, strict=True)}
