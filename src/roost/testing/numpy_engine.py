"""A rollout engine without an accelerator: a tiny softmax policy in numpy behind a real HTTP server.

With it a whole training loop runs on a laptop and in tests as it does with large engines.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roost.deadline import Deadline
from roost.errors import ClusterError, ConfigError
from roost.rl.engine import EngineSpec
from roost.rl.web import HttpServer, Route, read_json, web
from roost.text import join_words, shorten

Floats = NDArray[np.float64]

_WEIGHTS = ("w", "b")
_MAX_REQUESTS = 64
_REQUEST_HINT = 'a request is {"observations": [[...], ...]}, and may have "seed": 7'


class TinyPolicy:
    """Picks an action with probability softmax(observation @ w + b)."""

    def __init__(self, weights: Mapping[str, object]) -> None:
        self._weights = _checked_weights(weights, shape=None)

    @classmethod
    def random(cls, features: int, actions: int, seed: int = 0) -> TinyPolicy:
        """Make a policy with small random weights, the same ones for the same seed."""
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
        """Return one row per observation and one column per action."""
        rows = self._rows(observations)
        with np.errstate(over="ignore", invalid="ignore"):
            result: Floats = rows @ self._weights["w"] + self._weights["b"]
        if not np.isfinite(result).all():
            raise ConfigError("the observations are so large that the logits are not finite")
        return result

    def probabilities(self, observations: object) -> Floats:
        """Return the logits as probabilities; each row sums to 1."""
        result: Floats = np.exp(_log_softmax(self.logits(observations)))
        return result

    def sample(self, observations: object, rng: np.random.Generator) -> tuple[NDArray[np.int64], Floats]:
        """Draw an action for each observation; return the actions and their log probabilities."""
        logprobs = _log_softmax(self.logits(observations))
        # The largest logit after adding Gumbel noise is a draw from the softmax.
        actions = np.argmax(logprobs + rng.gumbel(size=logprobs.shape), axis=1).astype(np.int64)
        return actions, logprobs[np.arange(len(actions)), actions]

    def gradient(self, observations: object, actions: object, advantages: object) -> dict[str, Floats]:
        """Return the gradient of the batch's mean of advantage * log probability of the action."""
        rows = self._rows(observations)
        taken = _numbers("actions", actions)
        weight = _numbers("advantages", advantages)
        if taken.shape != (len(rows),) or weight.shape != (len(rows),):
            shapes = f"actions of shape {taken.shape} and advantages of {weight.shape}"
            hint = "each observation has one action and one advantage"
            raise ConfigError(f"{len(rows)} observations come with {shapes}", hint=hint)
        if not (np.equal(np.mod(taken, 1), 0) & (taken >= 0) & (taken < self.actions)).all():
            raise ConfigError(f"actions are whole numbers from 0 to {self.actions - 1}")
        slope = -np.exp(_log_softmax(self.logits(rows)))
        slope[np.arange(len(rows)), taken.astype(np.int64)] += 1.0
        slope *= weight[:, None] / len(rows)
        return {"w": rows.T @ slope, "b": slope.sum(axis=0)}

    def apply(self, gradient: Mapping[str, object], lr: float) -> None:
        """Take a step of this size up the gradient."""
        step = _checked_weights(gradient, shape=(self.features, self.actions))
        self.weights = {name: array + lr * step[name] for name, array in self._weights.items()}

    def _rows(self, observations: object) -> Floats:
        rows = _numbers("observations", observations)
        if rows.ndim != 2 or len(rows) == 0 or rows.shape[1] != self.features:
            hint = f"they are one or more rows of {self.features} numbers"
            raise ConfigError(f"observations have shape {rows.shape}", hint=hint)
        return rows


def _log_softmax(logits: Floats) -> Floats:
    # Subtract the largest first: the exponential of a large logit is infinite.
    lowered = logits - logits.max(axis=1, keepdims=True)
    result: Floats = lowered - np.log(np.exp(lowered).sum(axis=1, keepdims=True))
    return result


def _numbers(name: str, values: object) -> Floats:
    """Copy the values into an array; ConfigError if they are not rows of finite numbers."""
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
        given = join_words(sorted(map(str, weights))) if isinstance(weights, Mapping) else shorten(repr(weights))
        raise ConfigError(f"the weights of a policy are {join_words(_WEIGHTS)}, not {given or 'nothing'}")
    w, b = (_numbers(f"the weights {name}", weights[name]) for name in _WEIGHTS)
    if shape is None and w.ndim == 2 and w.size:
        shape = (w.shape[0], w.shape[1])
    if shape is None or w.shape != shape or b.shape != shape[1:]:
        expected = f"{shape} and {shape[1:]}" if shape else "(features, actions) and (actions,)"
        raise ConfigError(f"the weights w and b have shapes {w.shape} and {b.shape}, not {expected}")
    return {"w": w, "b": b}


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


class NumpyEngine:
    """A `RolloutEngine` around a `TinyPolicy`.

    Its server answers `POST /generate`, `GET /health`, `GET /version` and `POST /update_weights`, if the request shows
    the secret of its `EngineSpec`. `start_seconds` is how long it takes to become healthy, as a large engine does while
    it loads.
    """

    def __init__(self, features: int = 4, actions: int = 2, seed: int = 0, start_seconds: float = 0.0) -> None:
        self._lock = threading.Lock()
        self._policy = TinyPolicy.random(features, actions, seed)
        self.version: int = 0
        """The version of the weights."""
        self._seed = seed
        self._seeds = np.random.SeedSequence(seed)
        self._start_seconds = start_seconds
        self.spec: EngineSpec | None = None
        """The engine's arguments; None if it is not running."""
        self._server: HttpServer | None = None
        self._start = Deadline.after(0)
        self._is_offloaded = False

    def start(self, spec: EngineSpec) -> None:
        """Listen at exactly the address and port of the spec, on the engine's node 0; OSError if they are in use."""
        with self._lock:
            if self.spec is not None:
                raise ClusterError(f"engine {self.spec.engine_rank} is running already", hint="stop it first")
            if spec.node_rank == 0:
                routes = {
                    ("POST", "/generate"): Route(handler=self._answer_generate),
                    ("GET", "/health"): Route(handler=self._answer_health),
                    ("GET", "/version"): Route(handler=self._answer_version),
                    ("POST", "/update_weights"): Route(handler=self._answer_update_weights, is_control=True),
                }
                name = f"roost engine {spec.engine_rank}"
                self._threads = ThreadPoolExecutor(_MAX_REQUESTS, thread_name_prefix=name)
                self._server = HttpServer(spec.address, spec.port, routes, secret=spec.secret, name=name)
            # Engines have the same weights, and must not draw the same actions.
            self._seeds = np.random.SeedSequence([self._seed, spec.engine_rank])
            self._start = Deadline.after(self._start_seconds)
            self._is_offloaded = False
            self.spec = spec

    def health(self) -> bool:
        """Return whether it is up; an offloaded engine is."""
        return self.spec is not None and self._start.is_over

    def generate(self, request: Any) -> dict[str, Any]:
        """Draw an action for each of `{"observations": [[...], ...]}`; with a "seed", the same ones each time."""
        with self._lock:
            spec, policy, version = self.spec, self._policy, self.version
            if spec is None:
                raise ClusterError("the engine does not serve: it is not running")
            if spec.node_rank != 0:
                why = f"node {spec.node_rank} of engine {spec.engine_rank} has no server, node 0 has"
            elif not self.health():
                why = "it is starting"
            else:
                why = "it is offloaded" if self._is_offloaded else ""
            if why:
                raise ClusterError(f"the engine does not serve: {why}")
            drawn_seed = self._seeds.spawn(1)[0]
        if not isinstance(request, Mapping) or "observations" not in request:
            raise ConfigError(f"there are no observations in {shorten(repr(request))}", hint=_REQUEST_HINT)
        if unknown := sorted(map(str, set(request) - {"observations", "seed"})):
            raise ConfigError(f"a request has no {join_words(unknown, last='or')}", hint=_REQUEST_HINT)
        seed = request.get("seed")
        if seed is not None and not _is_count(seed, 0):
            raise ConfigError(f"a seed is a whole number from 0 on, not {seed!r}")
        rng = np.random.default_rng(drawn_seed if seed is None else seed)
        actions, logprobs = (array.tolist() for array in policy.sample(request["observations"], rng))
        return {"actions": actions, "logprobs": logprobs, "version": version, "engine": spec.engine_rank}

    def update_weights(self, weights: Any, version: int) -> None:
        """Replace the weights with others of the same shapes; each request gets the old ones or the new ones."""
        if not _is_count(version, 0):
            raise ConfigError(f"a version is a whole number from 0 on, not {version!r}")
        with self._lock:
            policy = TinyPolicy(self._policy.weights)
            policy.weights = weights
            self._policy, self.version = policy, version

    def offload(self) -> None:
        """Stay up, and answer no requests: a large engine frees its memory."""
        self._is_offloaded = True

    def onload(self) -> None:
        """Answer requests again."""
        self._is_offloaded = False

    def stop(self, seconds: float = 2.0) -> None:
        """Stop the server; requests have `seconds` to finish before they are cut off. Safe to call again."""
        with self._lock:
            server, self._server, self.spec = self._server, None, None
        if server is not None:
            server.close(seconds)
            self._threads.shutdown(wait=False)

    async def _answer_generate(self, request: web.BaseRequest) -> web.Response:
        asked = await read_json(request)
        # In a thread: a subclass may take its time.
        answer = asyncio.get_running_loop().run_in_executor(self._threads, self.generate, asked)
        return web.json_response(await answer)

    async def _answer_health(self, _request: web.BaseRequest) -> web.Response:
        healthy = self.health()
        return web.json_response({"healthy": healthy}, status=200 if healthy else 503)

    async def _answer_version(self, _request: web.BaseRequest) -> web.Response:
        return web.json_response({"version": self.version})

    async def _answer_update_weights(self, request: web.BaseRequest) -> web.Response:
        asked = await read_json(request)
        if not isinstance(asked, dict) or set(asked) != {"weights", "version"}:
            raise ConfigError('the body is {"weights": {"w": ..., "b": ...}, "version": 7}')
        self.update_weights(asked["weights"], asked["version"])
        return web.json_response({"version": asked["version"]})
