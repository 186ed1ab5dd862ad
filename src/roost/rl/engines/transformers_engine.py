"""`TransformersEngine`: an engine in the worker's own process, which needs no inference server, only transformers.

Transformers has continuous batching of its own, `ContinuousBatchingManager`. It is not used here: as of 5.23, whether
to sample, and the seed, are the same for all requests, no request can limit its tokens, one that is cancelled returns
nothing, and no token tells which weights made it. Without kernels for paged attention it also multiplies each sequence
with the keys of all others. `TokenBatch` pads instead, which every model with attention takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from random import Random
from typing import Any, ClassVar, cast

from roost.errors import ClusterError, ConfigError
from roost.rl.engine import EngineSpec, PauseMode, check_pause_mode
from roost.rl.engines.generation import Generation, Listener
from roost.rl.engines.openai_api import OPENAI_ROUTES, OpenAIApi
from roost.rl.engines.openai_request import load_tokenizer
from roost.rl.engines.samples import Prompt, Sample
from roost.rl.engines.token_batch import Choice, TokenBatch
from roost.rl.host_copies import HostCopies, free_memory
from roost.rl.limits import END_SECONDS, LOOK_SECONDS
from roost.rl.web import HttpServer, Route, error_response, read_json, web
from roost.text import join_words, shorten
from roost.weights.safetensors import map_safetensors


class TransformersEngine:
    """A `RolloutEngine` around a causal language model of transformers, on one accelerator or on the CPU.

    - `model`: a folder with a model in the format of Hugging Face, a configuration of transformers for a model with
      random weights, or a function that returns a model, called in the engine's worker.
    - `dtype`: the type of the weights, such as `"bfloat16"`; by default the one that the model was saved with.
    - `device`: where the model is, such as `"cuda"`; by default the accelerator, or the CPU if there is none.
    - `max_batch`: how many sequences are continued at a time; others wait.
    - `seed`: for random weights, and for requests without a seed.
    - `tokenizer`: for clients of OpenAI's API: a folder, or a tokenizer of transformers; by default the model's own.
    - `model_name`: what these clients call the model; by default `model`, if that is a folder.
    - `pause_mode`: what becomes of sequences that run when weights change. `"keep"`: they go on with the new weights
      and the keys and values that they have. `"wait"`: they finish first. `"abort"`: they end with the tokens so far.

    Its server answers `POST /generate` with a `Prompt` as JSON, `GET /health` and `GET /version`, and for OpenAI's
    clients `/v1/completions`, `/v1/chat/completions` and `/v1/models`, if the request shows the secret of its
    `EngineSpec`. An answer to `/generate` is `{"samples": [...], "engine": 0}`, each sample a `Sample` as JSON. A
    sample ends with the token that stopped it. At temperature 0, log probabilities are those at temperature 1.

    A seed gives the same samples each time, as far as rounding does, which depends on what else is in the batch.
    """

    path: ClassVar[str] = "/generate"
    """Where its server takes prompts."""

    def __init__(
        self,
        model: Any,
        *,
        dtype: str = "auto",
        device: str | None = None,
        max_batch: int = 128,
        seed: int = 0,
        tokenizer: Any = None,
        model_name: str | None = None,
        pause_mode: PauseMode = "keep",
    ) -> None:
        if type(max_batch) is not int or max_batch < 1:
            raise ConfigError(f"max_batch is {max_batch!r}: it is a whole number from 1 on")
        self._given = model
        self._dtype = dtype
        self._device = device
        self._max_batch = max_batch
        self._seed = seed
        self._tokenizer = tokenizer
        self._name = model_name or (str(model) if isinstance(model, str | os.PathLike) else "model")
        self._pause_mode = check_pause_mode(pause_mode)
        self._lifecycle = threading.Lock()
        self.spec: EngineSpec | None = None
        """The spec that it was started with; None if it is not running."""
        self._server: HttpServer | None = None
        self._model: Any = None
        self._asleep = HostCopies()
        self._generation: Generation | None = None
        self._api: OpenAIApi | None = None

    @property
    def version(self) -> int:
        """The version of the weights; it starts with version 0."""
        generation = self._generation
        return 0 if generation is None else generation.version

    def start(self, spec: EngineSpec) -> None:
        """Listen at exactly the address and port of the spec, and load the model; OSError if the port is in use."""
        if spec.num_nodes > 1 or spec.num_devices > 1:
            where = f"{spec.num_devices} accelerators on {spec.num_nodes} nodes"
            hint = "set rollout_num_gpus_per_engine to 1, for more engines"
            raise ConfigError(f"TransformersEngine has one accelerator, and is to have {where}", hint=hint)
        with self._lifecycle:
            if self.spec is not None:
                raise ClusterError(f"engine {self.spec.engine_rank} is running already", hint="stop it first")
            self._rank = spec.engine_rank
            name = f"roost engine {spec.engine_rank}"
            routes = {
                ("POST", "/generate"): Route(handler=self._answer_generate),
                ("GET", "/health"): Route(handler=self._answer_health),
                ("GET", "/version"): Route(handler=self._answer_version),
            }
            routes |= dict.fromkeys(OPENAI_ROUTES, Route(handler=self._answer_openai))
            server = HttpServer(spec.address, spec.port, routes, secret=spec.secret, name=name)
            try:
                self._model = _load(self._given, self._dtype, self._device, self._seed)
                try:
                    tokenizer = load_tokenizer(self._tokenizer, self._given)
                except ConfigError as error:
                    if self._tokenizer is not None:
                        raise
                    # Who sends tokens needs none.
                    tokenizer = error
                self._api = OpenAIApi(self._name, tokenizer, _most_tokens(self._model), self._submit)
                ends = self._model.generation_config.eos_token_id
                self._stops = frozenset() if ends is None else frozenset([ends] if isinstance(ends, int) else ends)
                batch = TokenBatch(self._model)
                # Two tokens, so that the first request is as quick as others, and a model that cannot fails here.
                choices = [Choice(temperature=1.0, top_p=0.5, allowed=(), number=0.5)]
                batch.step([one.token for one in batch.start([(0,)], choices)], choices)
                batch.clear()
            except BaseException:
                server.close(0)
                self._forget_model()
                raise
            # Engines have the same weights, and must not draw the same tokens.
            self._generation = Generation(
                batch,
                max_batch=self._max_batch,
                pause_mode=self._pause_mode,
                random=Random(f"{self._seed}:{spec.engine_rank}"),  # noqa: S311 - no secret
                name=f"{name} steps",
            )
            self._server, self.spec = server, spec

    def health(self) -> bool:
        """Return whether it is up; an offloaded engine is."""
        generation = self._generation
        return generation is not None and generation.is_well

    def generate(self, request: Any) -> dict[str, Any]:
        """Make the samples of a `Prompt`, or of one as JSON, and return what the server answers."""
        return self._answer(self._submit(request).result())

    @staticmethod
    def to_request(prompt: Prompt) -> dict[str, Any]:
        """Return what its server takes for a prompt."""
        return prompt.to_json()

    @staticmethod
    def from_answer(prompt: Prompt, answer: Any) -> list[Sample]:
        """Return the samples of an answer of its server."""
        del prompt
        return [Sample.from_json(one) for one in answer["samples"]]

    def accept(self) -> Any:
        """Return the model, for a link of weights to write to; see `weights_changing`."""
        if self._model is None:
            raise ClusterError("the engine has no weights: it is not running")
        return self._model

    @contextlib.contextmanager
    def weights_changing(self, version: int) -> Iterator[None]:
        """Pause between two steps, as `pause_mode` says, while the weights become another version.

        If that raises, the weights are neither version: the engine is not healthy until the next change succeeds.
        """
        with self._running().changing(version):
            yield

    def update_weights(self, weights: Any, version: int) -> None:
        """Replace all weights, given by the names of the model's parameters, or as a safetensors file or a folder.

        Names and shapes are checked before anything changes.
        """
        if type(version) is not int or version < 0:
            raise ConfigError(f"a version is a whole number from 0 on, not {version!r}")
        self._running()
        torch, model = _import("torch"), self.accept()
        own, tensors = model.state_dict(), weights
        if isinstance(weights, Mapping):
            # An array of numpy that came through Ray cannot be written, which torch would warn of: hence the copy.
            tensors = {
                str(name): one if isinstance(one, torch.Tensor) else torch.tensor(one) for name, one in weights.items()
            }
        elif isinstance(weights, str | os.PathLike):
            tensors = map_safetensors(weights)
        else:
            what = f"weights are tensors by name, or the path of a safetensors file, not {type(weights).__name__}"
            raise ConfigError(what)
        wrong = [f"{name} is not in the model" for name in tensors if name not in own]
        wrong += [
            f"{name} has shape {list(one.shape)}, not {list(own[name].shape)}"
            for name, one in tensors.items()
            if name in own and one.shape != own[name].shape
        ]
        # One that has two names may be given once.
        given = {own[name].data_ptr() for name in tensors if name in own}
        wrong += [f"{name} is missing" for name, one in model.named_parameters() if one.data_ptr() not in given]
        if wrong:
            raise ConfigError(f"these weights do not fit the model: {join_words(wrong)}")
        with self.weights_changing(version), torch.no_grad():
            # They may have been moved to the host and back meanwhile.
            own = model.state_dict()
            for name, tensor in tensors.items():
                own[name].copy_(tensor)
            # The sender may change them when this returns.
            if model.device.type != "cpu":
                torch.accelerator.synchronize(model.device)

    def offload(self) -> None:
        """Move the weights to the host, and free all memory of the accelerator; sequences that run go on later.

        Their keys and values are computed again. With `pause_mode="abort"` they end, with `"wait"` they finish first.
        """
        with self._running().falling_asleep():
            model = self.accept()
            self._asleep.leave([*model.parameters(), *model.buffers()])

    def onload(self) -> None:
        """Take the memory back, and go on."""
        with self._running().waking_up():
            self._asleep.come_back()

    def stop(self, seconds: float = 2.0) -> None:
        """Stop the server; requests have `seconds` to finish before they are cut off. Safe to call again."""
        with self._lifecycle:
            server, generation = self._server, self._generation
            self.spec = self._server = self._generation = None
            if server is not None:
                server.close(seconds)
            if generation is not None:
                generation.close(END_SECONDS)
            self._forget_model()

    def _running(self) -> Generation:
        generation = self._generation
        if generation is None:
            raise ClusterError("the engine does not serve: it is not running")
        return generation

    def _submit(self, request: Any, listener: Listener | None = None) -> Future[list[Sample]]:
        generation = self._running()
        prompt = request if isinstance(request, Prompt) else Prompt.from_json(request)
        _check_prompt(prompt, self.accept())
        ends = frozenset() if prompt.ignore_eos else self._stops
        return generation.submit(prompt, ends | frozenset(prompt.stop_token_ids), listener)

    def _answer(self, samples: list[Sample]) -> dict[str, Any]:
        return {"samples": [sample.to_json() for sample in samples], "engine": self._rank}

    def _forget_model(self) -> None:
        self._model, self._api, self._asleep = None, None, HostCopies()
        if "torch" in sys.modules:
            free_memory()

    async def _answer_generate(self, request: web.BaseRequest) -> web.Response:
        samples = asyncio.wrap_future(self._submit(await read_json(request)))
        try:
            while not (await asyncio.wait([samples], timeout=LOOK_SECONDS))[0]:
                if request.transport is None:
                    return error_response(499, "the client is gone")
            return web.json_response(self._answer(samples.result()))
        finally:
            samples.cancel()

    async def _answer_openai(self, request: web.BaseRequest) -> web.StreamResponse:
        self._running()
        return await cast(OpenAIApi, self._api).answer(request)

    async def _answer_health(self, _request: web.BaseRequest) -> web.Response:
        healthy = self.health()
        return web.json_response({"healthy": healthy}, status=200 if healthy else 503)

    async def _answer_version(self, _request: web.BaseRequest) -> web.Response:
        return web.json_response({"version": self.version})


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        hint = "pip install torch transformers safetensors"
        raise ConfigError(f"TransformersEngine needs {name}: {error}", hint=hint) from error


def _load(given: Any, dtype: str, device: str | None, seed: int) -> Any:
    """Make the model, ready for use on its device."""
    torch, transformers = _import("torch"), _import("transformers")
    options = {} if dtype == "auto" else {"dtype": getattr(torch, dtype, None)}
    if not all(isinstance(one, torch.dtype) for one in options.values()):
        raise ConfigError(f"dtype is {dtype!r}: it is the name of a type of torch, such as bfloat16, or auto")
    if device is None:
        device = str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "cpu"
    if isinstance(given, str | os.PathLike):
        folder = Path(given)
        if not (folder / "config.json").is_file():
            raise ConfigError(f"there is no model in {folder}: it has no config.json")
        try:
            model, found = transformers.AutoModelForCausalLM.from_pretrained(
                folder, local_files_only=True, output_loading_info=True, **(options or {"dtype": "auto"})
            )
        except OSError as error:
            hint = "for random weights, give the configuration: AutoConfig.from_pretrained(folder)"
            raise ConfigError(f"the model in {folder} cannot be loaded: {error}", hint=hint) from error
        if missing := sorted(found["missing_keys"]):
            raise ConfigError(f"the model in {folder} is not whole: it has no {join_words(missing)}")
    elif isinstance(given, transformers.PretrainedConfig):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = transformers.AutoModelForCausalLM.from_config(given, **options)
    elif callable(given):
        model = given()
    else:
        hint = "give a folder, a configuration of transformers, or a function that returns a model"
        raise ConfigError(f"{shorten(repr(given))} is not a model", hint=hint)
    return model.to(device, **options).eval()


def _most_tokens(model: Any) -> int | None:
    """Return how many tokens the model takes in all."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def _check_prompt(prompt: Prompt, model: Any) -> None:
    """Raise ConfigError if the model cannot be asked that."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    for name in ("tokens", "stop_token_ids", "allowed_token_ids"):
        tokens = getattr(prompt, name)
        if not isinstance(tokens, tuple) or not all(type(one) is int and 0 <= one < vocabulary for one in tokens):
            raise ConfigError(f"{name} are whole numbers from 0 to {vocabulary - 1}, not {shorten(repr(tokens))}")
    if prompt.seed is not None and type(prompt.seed) is not int:
        raise ConfigError(f"a seed is a whole number, not {prompt.seed!r}")
    if (most := _most_tokens(model)) is not None and len(prompt.tokens) + prompt.max_tokens > most:
        asked = f"a prompt of {len(prompt.tokens)} tokens and {prompt.max_tokens} more"
        raise ConfigError(f"{asked} are too many: the model takes {most} in all", hint="ask for fewer max_tokens")
