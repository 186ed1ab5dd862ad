"""A rollout engine that needs no accelerator: a tiny softmax policy in numpy behind a real HTTP server.

It is an engine in every respect - ports, health, weights with versions, memory that is given up and taken back - so
that a whole training loop runs on a laptop and in tests exactly as it does with big engines.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roost.errors import ClusterError, ConfigError
from roost.rl.engine import EngineSpec
from roost.rl.http_server import Answer, HttpServer, Request
from roost.text import join_words, shorten

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_WEIGHTS = ("w", "b")
_REQUEST_HINT = 'a request is {"observations": [[...], ...]}, and may have "seed": 7'


class TinyPolicy:
    """Picks an action with probability softmax(observation @ w + b)."""

    def __init__(self, weights: Mapping[str, object]) -> None:
        self._weights = _checked_weights(weights, shape=None)

    @classmethod
    def random(cls, features: int, actions: int, seed: int = 0) -> TinyPolicy:
        """Small random weights, the same for the same seed."""
        if not (_is_count(features, 1) and _is_count(actions, 1)):
            raise ConfigError(f"a policy has at least one feature and one action, not {features!r} and {actions!r}")
        rng = np.random.default_rng(seed)
        return cls({"w": rng.normal(scale=0.1, size=(features, actions)), "b": np.zeros(actions)})

    @property
    def features(self) -> int:
        """How many numbers an observation has."""
        return int(self._weights["w"].shape[0])

    @property
    def actions(self) -> int:
        """How many actions there are to pick from."""
        return int(self._weights["w"].shape[1])

    @property
    def weights(self) -> dict[str, Floats]:
        """`w` with shape (features, actions) and `b` with shape (actions,), copied both ways."""
        return {name: array.copy() for name, array in self._weights.items()}

    @weights.setter
    def weights(self, weights: Mapping[str, object]) -> None:
        self._weights = _checked_weights(weights, shape=(self.features, self.actions))

    def logits(self, observations: object) -> Floats:
        """One row for each observation, one column for each action."""
        rows = self._rows(observations)
        with np.errstate(over="ignore", invalid="ignore"):
            result: Floats = rows @ self._weights["w"] + self._weights["b"]
        if not np.isfinite(result).all():
            raise ConfigError("the observations are so large that the logits are not finite")
        return result

    def probabilities(self, observations: object) -> Floats:
        """The logits as probabilities; each row sums to 1."""
        result: Floats = np.exp(_log_softmax(self.logits(observations)))
        return result

    def sample(self, observations: object, rng: np.random.Generator) -> tuple[Integers, Floats]:
        """An action for each observation, and the logarithm of the probability that it had."""
        logprobs = _log_softmax(self.logits(observations))
        # The largest of logits with Gumbel noise is a draw from their softmax.
        actions = np.argmax(logprobs + rng.gumbel(size=logprobs.shape), axis=1).astype(np.int64)
        return actions, logprobs[np.arange(len(actions)), actions]

    def gradient(self, observations: object, actions: object, advantages: object) -> dict[str, Floats]:
        """The gradient of the mean over the batch of advantage * log probability of the action."""
        rows = self._rows(observations)
        taken = _numbers("actions", actions)
        weight = _numbers("advantages", advantages)
        if taken.shape != (len(rows),) or weight.shape != (len(rows),):
            raise ConfigError(
                f"{len(rows)} observations come with actions of shape {taken.shape} "
                f"and advantages of shape {weight.shape}",
                hint="each observation has one action and one advantage",
            )
        if not (np.equal(np.mod(taken, 1), 0) & (taken >= 0) & (taken < self.actions)).all():
            raise ConfigError(f"actions are whole numbers from 0 to {self.actions - 1}")
        slope = -np.exp(_log_softmax(self.logits(rows)))
        slope[np.arange(len(rows)), taken.astype(np.int64)] += 1.0
        slope *= weight[:, None] / len(rows)
        return {"w": rows.T @ slope, "b": slope.sum(axis=0)}

    def apply(self, gradient: Mapping[str, object], lr: float) -> None:
        """Go a step of this size up the gradient."""
        step = _checked_weights(gradient, shape=(self.features, self.actions))
        self.weights = {name: array + lr * step[name] for name, array in self._weights.items()}

    def _rows(self, observations: object) -> Floats:
        rows = _numbers("observations", observations)
        if rows.ndim != 2 or len(rows) == 0 or rows.shape[1] != self.features:
            raise ConfigError(
                f"observations have shape {rows.shape}",
                hint=f"they are one or more rows of {self.features} numbers",
            )
        return rows


def _log_softmax(logits: Floats) -> Floats:
    # The largest is taken off first: the exponential of a large logit is infinite.
    lowered = logits - logits.max(axis=1, keepdims=True)
    result: Floats = lowered - np.log(np.exp(lowered).sum(axis=1, keepdims=True))
    return result


def _numbers(name: str, values: object) -> Floats:
    """A copy of the values; ConfigError where they are no rows of finite numbers."""
    try:
        array = np.asarray(values)
    except ValueError:
        raise ConfigError(f"{name} are rows of different lengths") from None
    if array.dtype.kind not in "iuf":
        raise ConfigError(f"{name} are not all numbers: {shorten(repr(values))}")
    copied: Floats = np.array(array, dtype=np.float64)
    if not np.isfinite(copied).all():
        raise ConfigError(f"{name} are not all finite numbers")
    return copied


def _checked_weights(weights: object, shape: tuple[int, int] | None) -> dict[str, Floats]:
    if not isinstance(weights, Mapping) or set(weights) != set(_WEIGHTS):
        given = (
            join_words(sorted(map(str, weights))) or "nothing"
            if isinstance(weights, Mapping)
            else shorten(repr(weights))
        )
        raise ConfigError(f"the weights of a policy are {join_words(_WEIGHTS)}, not {given}")
    w, b = (_numbers(f"the weights {name}", weights[name]) for name in _WEIGHTS)
    if shape is None and w.ndim == 2 and w.size:
        shape = (w.shape[0], w.shape[1])
    if shape is None or w.shape != shape or b.shape != shape[1:]:
        expected = f"{shape} and {shape[1:]}" if shape else "(features, actions) and (actions,)"
        raise ConfigError(f"the weights w and b have shapes {w.shape} and {b.shape}, not {expected}")
    return {"w": w, "b": b}


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True, slots=True, kw_only=True)
class _Serving:
    """The policy and its version, swapped as one."""

    policy: TinyPolicy
    version: int


class NumpyEngine:
    """A `RolloutEngine` around a `TinyPolicy`.

    Its server answers `POST /generate`, `GET /health`, `GET /version` and `POST /update_weights`. `start_seconds` is
    how long it takes to become healthy, as a big engine does while it loads.
    """

    def __init__(self, features: int = 4, actions: int = 2, seed: int = 0, start_seconds: float = 0.0) -> None:
        self._lock = threading.Lock()
        self._serving = _Serving(policy=TinyPolicy.random(features, actions, seed), version=0)
        self._seed = seed
        self._seeds = np.random.SeedSequence(seed)
        self._start_seconds = start_seconds
        self._spec: EngineSpec | None = None
        self._server: HttpServer | None = None
        self._ready_at = 0.0
        self._is_offloaded = False

    @property
    def spec(self) -> EngineSpec | None:
        """Where it was started, or None where it is not."""
        return self._spec

    @property
    def version(self) -> int:
        """The version of the weights."""
        return self._serving.version

    def start(self, spec: EngineSpec) -> None:
        """Listen at exactly the address and port of the spec, on the engine's node 0; OSError if that is in use."""
        with self._lock:
            if self._spec is not None:
                raise ClusterError(f"engine {self._spec.engine_rank} is started already", hint="stop it first")
            if spec.node_rank == 0:
                routes = {
                    ("POST", "/generate"): self._answer_generate,
                    ("GET", "/health"): self._answer_health,
                    ("GET", "/version"): self._answer_version,
                    ("POST", "/update_weights"): self._answer_update_weights,
                }
                self._server = HttpServer(spec.address, spec.port, routes, name=f"roost engine {spec.engine_rank}")
                self._server.start()
            # Engines have the same weights, and must not draw the same actions.
            self._seeds = np.random.SeedSequence([self._seed, spec.engine_rank])
            self._ready_at = time.monotonic() + self._start_seconds
            self._is_offloaded = False
            self._spec = spec

    def health(self) -> bool:
        """Whether it is up; one that is offloaded is."""
        return self._spec is not None and time.monotonic() >= self._ready_at

    def generate(self, request: Any) -> dict[str, Any]:
        """Draw an action for each of `{"observations": [[...], ...]}`; with a "seed", the same ones each time."""
        spec, why = self._spec, self._why_not_serving()
        if spec is None or why:
            raise ClusterError(f"the engine does not serve: {why or 'not started'}")
        observations, seed = _checked_request(request)
        with self._lock:
            serving = self._serving
            rng = np.random.default_rng(self._seeds.spawn(1)[0] if seed is None else seed)
        actions, logprobs = serving.policy.sample(observations, rng)
        return {
            "actions": actions.tolist(),
            "logprobs": logprobs.tolist(),
            "version": serving.version,
            "engine": spec.engine_rank,
        }

    def update_weights(self, weights: Any, version: int) -> None:
        """Take new weights of the same shapes: every request is answered with the old or the new ones, never both."""
        if not _is_count(version, 0):
            raise ConfigError(f"a version is a whole number from 0 on, not {version!r}")
        with self._lock:
            policy = TinyPolicy(self._serving.policy.weights)
            policy.weights = weights
            self._serving = _Serving(policy=policy, version=version)

    def offload(self) -> None:
        """Give the memory up: serve nothing, and stay up."""
        with self._lock:
            self._is_offloaded = True

    def onload(self) -> None:
        """Take the memory back and serve again."""
        with self._lock:
            self._is_offloaded = False

    def stop(self, seconds: float = 2.0) -> None:
        """End the server; requests have so long to finish, then they are broken off. Safe to call again."""
        with self._lock:
            server, self._server, self._spec = self._server, None, None
        if server is not None and not server.finish(seconds):
            server.cut()

    def _why_not_serving(self) -> str:
        if self._spec is None:
            return "not started"
        if self._spec.node_rank != 0:
            return f"node {self._spec.node_rank} of engine {self._spec.engine_rank} has no server, node 0 has"
        if not self.health():
            return "starting"
        return "offloaded" if self._is_offloaded else ""

    def _answer_generate(self, request: Request) -> Answer:
        if why := self._why_not_serving():
            return Answer.error(503, why)
        return Answer.of(self.generate(request.json()))

    def _answer_health(self, _request: Request) -> Answer:
        healthy = self.health()
        return Answer.of({"healthy": healthy}, 200 if healthy else 503)

    def _answer_version(self, _request: Request) -> Answer:
        return Answer.of({"version": self.version})

    def _answer_update_weights(self, request: Request) -> Answer:
        asked = request.json()
        if not isinstance(asked, dict) or set(asked) != {"weights", "version"}:
            raise ConfigError('the body is {"weights": {"w": ..., "b": ...}, "version": 7}')
        self.update_weights(asked["weights"], asked["version"])
        return Answer.of({"version": asked["version"]})


def _checked_request(request: object) -> tuple[object, int | None]:
    if not isinstance(request, Mapping) or "observations" not in request:
        raise ConfigError(f"there are no observations in {shorten(repr(request))}", hint=_REQUEST_HINT)
    if unknown := sorted(map(str, set(request) - {"observations", "seed"})):
        raise ConfigError(f"a request has no {join_words(unknown, last='or')}", hint=_REQUEST_HINT)
    seed = request.get("seed")
    if seed is not None and not _is_count(seed, 0):
        raise ConfigError(f"a seed is a whole number from 0 on, not {seed!r}")
    return request["observations"], seed
