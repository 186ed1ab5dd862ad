"""`SglangEngine`: SGLang's own server as a rollout engine, on one node or several.

Written from SGLang's documentation and the source of its version 0.5.23, and tested with a stand-in that takes and
gives what they describe. It has not run with SGLang itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from roost.errors import ConfigError, EngineFailed
from roost.rl.engine import EngineSpec, PauseMode
from roost.rl.engines.samples import Prompt, Sample, VersionSpan
from roost.rl.engines.server_engine import ServerEngine
from roost.rl.limits import STEP_SECONDS, WEIGHTS_SECONDS

# After "abort" a last step may still run, and the cache of prefixes is not cleared while one does: "retract" ends it.
_PAUSES: Mapping[PauseMode, tuple[str, ...]] = {"keep": ("retract",), "abort": ("abort", "retract")}


class SglangEngine(ServerEngine):
    """An SGLang server in a child process, on exactly the devices of its worker. It has not run with SGLang itself.

    - `model`: the folder of the model, on every node. Its safetensors files say what a link of weights writes.
    - `python`: the interpreter that SGLang is installed in; it needs no Roost.
    - `options`: further options of `sglang.launch_server`, such as `{"context_length": 4096}`; they override those of
      Roost. With `log_level` set to `info`, SGLang writes the engine's secret to the log.
    - `environment`: further variables of the server.
    - `pipeline_parallel`: how many stages the engine has; its other devices are tensor parallel.
    - `pause_mode`: what becomes of requests that run when weights change. `"keep"`: they freeze, and go on with the new
      weights, after their keys and values have been computed again. `"abort"`: they are answered with what they have so
      far. SGLang has no `"wait"`.
    - `can_sleep`: whether `offload` frees the memory of a GPU, which SGLang has to be started for.

    Its prompts have no `allowed_token_ids` and no `top_p` below 1. A `seed` is for one sample, and has an effect with
    the option `enable_deterministic_inference`.

    After an update that fails, the weights are in doubt: requests wait, and the engine is not healthy, until an update
    succeeds or the engine is restarted. After an `offload` or `onload` that fails, restart it.
    """

    name: ClassVar[str] = "SGLang"
    package: ClassVar[str] = "sglang"
    install: ClassVar[str] = "pip install 'sglang[all]'"
    # It adds the secret as the server's key, in its process.
    program: ClassVar[tuple[str, ...]] = ("roost_sglang_serve", "--model-path")
    path: ClassVar[str] = "/generate"
    pause_modes: ClassVar[tuple[PauseMode, ...]] = tuple(_PAUSES)
    # SGLang can free no memory that expandable segments are in, which a trainer likes to have.
    not_inherited: ClassVar[tuple[str, ...]] = (
        *ServerEngine.not_inherited,
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
    )

    @staticmethod
    def to_request(prompt: Prompt) -> dict[str, Any]:
        """Return what its server takes for a prompt; ConfigError if it could not be asked that."""
        if prompt.allowed_token_ids:
            raise ConfigError("SGLang cannot be told which tokens are allowed", hint="leave out allowed_token_ids")
        if prompt.top_p < 1:
            raise ConfigError(
                f"top_p is {prompt.top_p}, and SGLang's log probabilities are those before it", hint="leave it at 1"
            )
        if prompt.seed is not None and prompt.n > 1:
            raise ConfigError(
                f"the {prompt.n} samples would be alike: SGLang gives each the same seed", hint="ask for one at a time"
            )
        sampling = {
            "n": prompt.n,
            "max_new_tokens": prompt.max_tokens,
            "temperature": prompt.temperature,
            "stop_token_ids": list(prompt.stop_token_ids),
            "ignore_eos": prompt.ignore_eos,
        }
        if prompt.seed is not None:
            sampling["sampling_seed"] = prompt.seed
        return {"input_ids": list(prompt.tokens), "sampling_params": sampling, "return_logprob": True}

    @staticmethod
    def from_answer(prompt: Prompt, answer: Any) -> list[Sample]:
        """Return the samples of an answer of its server."""
        try:
            samples = []
            # A list if there are several.
            for one in answer if isinstance(answer, list) else [answer]:
                found = one["meta_info"]
                made = found["output_token_logprobs"]
                # A request that was aborted before it began has no versions.
                spans = found["weight_versions"] if made else ()
                sample = Sample(
                    prompt=prompt.tokens,
                    tokens=tuple(token for _, token, _ in made),
                    logprobs=tuple(logprob for logprob, _, _ in made),
                    spans=tuple(VersionSpan(int(one["version"]), one["start"], one["end"]) for one in spans),
                    finish=found["finish_reason"]["type"],
                )
                samples.append(sample)
            return samples
        except (KeyError, TypeError, ValueError) as error:
            raise EngineFailed(
                f"SGLang's answer lacks {error}: {json.dumps(answer)[:500]}",
                hint="versions before 0.5.23 may not say which weights made which token",
            ) from None

    def _sleep(self) -> None:
        # Requests wait, or are aborted, as `pause_mode` says.
        with self._changing():
            self._pause()
            self._ask("/release_memory_occupation", {}, timeout=WEIGHTS_SECONDS)

    def _wake(self) -> None:
        with self._changing():
            self._ask("/resume_memory_occupation", {}, timeout=WEIGHTS_SECONDS)
            self._ask("/continue_generation", {})

    def _load(self, where: Mapping[str, Any], version: int) -> None:
        update = {
            "model_path": str(Path(where["path"]).parent),
            # Also if it was started with random weights.
            "load_format": "auto",
            "weight_version": str(version),
            # What was computed with the old weights.
            "flush_cache": True,
        }
        with self._changing():
            self._pause()
            self._ask("/update_weights_from_disk", update, timeout=WEIGHTS_SECONDS)
            self._ask("/continue_generation", {})
            # It answers before all copies are made; a step of the model, of whatever request, comes after them.
            self._ask("/health_generate", timeout=2.0 * STEP_SECONDS)
            self._check_version(self._ask("/model_info")["weight_version"], version)

    def _pause(self) -> None:
        for mode in _PAUSES[self._pause_mode]:
            self._ask("/pause_generation", {"mode": mode}, timeout=WEIGHTS_SECONDS)

    def _describe(self, spec: EngineSpec, *, on_gpu: bool) -> tuple[dict[str, Any], dict[str, str]]:
        options: dict[str, Any] = {
            # Also on other nodes than the first, where it only says that it is up.
            "host": spec.address,
            "port": spec.port,
            "nccl_port": spec.nccl_port,
            "tp_size": max(1, spec.num_devices // self._pipeline),
            "pp_size": self._pipeline,
            "weight_version": 0,
            "log_level": "warning",
        }
        if spec.num_nodes > 1:
            options |= {"nnodes": spec.num_nodes, "node_rank": spec.node_rank, "dist_init_addr": spec.dist_init_addr}
        if on_gpu and self._can_sleep:
            options |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
        return options, {
            # /health asks for a token, which a server without its memory cannot make.
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
            "SGLANG_HEALTH_CHECK_TIMEOUT": str(STEP_SECONDS),
            # The router keeps connections for longer than a server usually does.
            "SGLANG_TIMEOUT_KEEP_ALIVE": "600",
        }
