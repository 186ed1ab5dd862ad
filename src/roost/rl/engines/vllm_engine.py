"""`VllmEngine`: vLLM's own server as a rollout engine, on GPUs or on CPUs, on one node or several."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any, ClassVar, get_args

from roost.errors import ClusterError
from roost.rl.engine import EngineSpec
from roost.rl.engines.samples import Prompt, Sample, VersionSpan
from roost.rl.engines.server_engine import ServerEngine, WeightsPlace
from roost.rl.limits import DRAIN_SECONDS, WEIGHTS_SECONDS


class VllmEngine(ServerEngine):
    """A vLLM server in a child process, on exactly the devices of its worker.

    - `model`: the folder of the model, on every node. Its safetensors files say what a link of weights writes.
    - `python`: the interpreter that vLLM is installed in; it needs no Roost.
    - `options`: further options of `vllm serve`, such as `{"max_model_len": 4096}`; they override those of Roost.
    - `environment`: further variables of the server.
    - `pipeline_parallel`: how many stages the engine has; its other devices are tensor parallel.
    - `pause_mode`: what becomes of requests that run when weights change. `"keep"`: they freeze, and go on with the new
      weights. `"wait"`: they finish first. `"abort"`: they are answered with what they have so far.
    - `can_sleep`: whether `offload` frees the memory of a GPU, which vLLM has to be started for.
    - `weights_on`: where a link writes the next version. `"host"`: into shared memory. `"device"`: onto the engine's
      first GPU, next to what vLLM has of it, so set `gpu_memory_utilization` to leave room for the model once more; a
      trainer on that GPU copies there at the speed of its memory.

    After an update that fails while vLLM loads it, the weights are in doubt: requests wait, and the engine is not
    healthy, until an update succeeds or the engine is restarted.
    """

    name: ClassVar[str] = "vLLM"
    package: ClassVar[str] = "vllm"
    install: ClassVar[str] = "pip install vllm"
    program: ClassVar[tuple[str, ...]] = ("roost_vllm_serve", "serve")
    off: ClassVar[str] = "--no-"
    path: ClassVar[str] = "/inference/v1/generate"
    weights_places: ClassVar[tuple[WeightsPlace, ...]] = get_args(WeightsPlace)

    @staticmethod
    def to_request(prompt: Prompt) -> dict[str, Any]:
        """Return what its server takes for a prompt."""
        sampling = {
            name: value for name, value in prompt.to_json().items() if name != "tokens" and value not in (None, ())
        }
        return {
            "token_ids": list(prompt.tokens),
            # 0: of the sampled token alone.
            "sampling_params": {**sampling, "logprobs": 0, "detokenize": False},
        }

    @staticmethod
    def from_answer(prompt: Prompt, answer: Any) -> list[Sample]:
        """Return the samples of an answer of its server."""
        try:
            return [
                Sample(
                    prompt=prompt.tokens,
                    tokens=tuple(choice["token_ids"]),
                    logprobs=tuple(one["logprob"] for one in choice["logprobs"]["content"]),
                    spans=tuple(
                        VersionSpan(int(one["version"]), one["start"], one["end"]) for one in choice["weight_versions"]
                    ),
                    finish=choice["finish_reason"],
                )
                for choice in answer["choices"]
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise ClusterError(f"vLLM's answer lacks {error}: {json.dumps(answer)[:500]}") from None

    def _warm_up(self) -> None:
        self._ask("/update_weight_version", {"new_version": "0"})
        super()._warm_up()

    def _load(self, where: Mapping[str, Any], version: int) -> None:
        if not self._is_sound:
            with contextlib.suppress(ClusterError):
                # An update whose end is not known may still be open.
                self._ask("/finish_weight_update", {})
        try:
            self._ask(f"/pause?mode={self._pause_mode}", {}, timeout=WEIGHTS_SECONDS)
            self._ask("/start_weight_update", {})
        except BaseException:
            if self._is_sound:
                # Nothing has changed.
                with contextlib.suppress(ClusterError):
                    self._ask("/resume", {})
            raise
        with self._changing():
            self._ask("/update_weights", {"update_info": dict(where)}, timeout=WEIGHTS_SECONDS)
            self._ask("/finish_weight_update", {"weight_version": str(version)})
            self._check_version(self._ask("/weight_info")["weight_version"], version)
            # What was computed with the old weights.
            self._ask("/reset_prefix_cache", {})
            self._ask("/resume", {})

    def _sleep(self) -> None:
        # On CPUs it only stops generating.
        self._ask("/sleep?level=1", {}, timeout=WEIGHTS_SECONDS)

    def _wake(self) -> None:
        self._ask("/wake_up", {}, timeout=WEIGHTS_SECONDS)

    def _describe(self, spec: EngineSpec, *, on_gpu: bool) -> tuple[dict[str, Any], dict[str, str]]:
        options: dict[str, Any] = {
            "tensor_parallel_size": max(1, spec.num_devices // self._pipeline),
            "pipeline_parallel_size": self._pipeline,
            # Tokens in and out, with the version of the weights of each.
            "enable_scale_out": True,
            # A trainer's ratios are about the probabilities after temperature and limits.
            "logprobs_mode": "processed_logprobs",
            "shutdown_timeout": DRAIN_SECONDS,
            "disable_uvicorn_access_log": True,
            "worker_extension_cls": "roost_vllm.Extension",
            "weight_transfer_config": json.dumps({"backend": "roost"}),
        }
        if spec.node_rank == 0:
            options |= {"host": spec.address, "port": spec.port, "middleware": "roost_proof.Lock"}
        if spec.num_nodes > 1:
            address, _, port = spec.dist_init_addr.rpartition(":")
            options |= {
                "nnodes": spec.num_nodes,
                "node_rank": spec.node_rank,
                "master_addr": address.strip("[]"),
                "master_port": port,
                "distributed_executor_backend": "mp",
            }
        if spec.node_rank:
            options["headless"] = True
        if on_gpu and self._can_sleep:
            options["enable_sleep_mode"] = True
        variables = {
            "VLLM_HOST_IP": spec.address,
            "VLLM_NO_USAGE_STATS": "1",
            # The routes that change weights.
            "VLLM_SERVER_DEV_MODE": "1",
            # The router keeps connections for longer than a server usually does.
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        if not on_gpu:
            variables |= {"OMP_NUM_THREADS": "1"}
            if spec.num_devices == 1:
                # One process less, which starts ten seconds sooner.
                variables |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        return options, variables
