"""`VllmEngine`: vLLM's own server as a rollout engine, on GPUs or on CPUs, on one node or several."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from roost.errors import ClusterError, ConfigError, EngineFailed
from roost.machine.devices import nvidia_devices
from roost.machine.ports import taken_ports
from roost.machine.server_process import ServerProcess
from roost.rl.ask import ask
from roost.rl.engine import EngineSpec, PauseMode, check_pause_mode
from roost.rl.engines.installed import check_installed
from roost.rl.engines.samples import Prompt, Sample, VersionSpan
from roost.rl.engines.staging import StagedWeights

_INSIDE = Path(__file__).with_name("inside")
_CALL_SECONDS = 60.0
_UPDATE_SECONDS = 600.0
_GENERATE_SECONDS = 600.0
_DRAIN_SECONDS = 5


class VllmEngine:
    """A vLLM server in a child process, on exactly the devices of its worker.

    - `model`: the folder of the model, on every node. Its safetensors files say what a link of weights writes.
    - `python`: the interpreter that vLLM is installed in; it needs no Roost.
    - `options`: further options of `vllm serve`, such as `{"max_model_len": 4096}`; they override those of Roost.
    - `environment`: further variables of the server.
    - `pipeline_parallel`: how many stages the engine has; its other devices are tensor parallel.
    - `pause_mode`: what becomes of requests that run when weights change. `"keep"`: they freeze, and go on with the new
      weights. `"wait"`: they finish first. `"abort"`: they are answered with what they have so far.
    - `can_sleep`: whether `offload` frees the memory of a GPU, which vLLM has to be started for.
    """

    path: ClassVar[str] = "/inference/v1/generate"
    """Where its server takes prompts."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        python: str = sys.executable,
        options: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        pipeline_parallel: int = 1,
        pause_mode: PauseMode = "keep",
        can_sleep: bool = False,
    ) -> None:
        self._model = Path(model)
        self._python = python
        self._options = dict(options or {})
        self._environment = dict(environment or {})
        self._pipeline = pipeline_parallel
        self._pause_mode = check_pause_mode(pause_mode)
        self._can_sleep = can_sleep
        self._lock = threading.Lock()
        self._server: ServerProcess | None = None
        self._spec: EngineSpec | None = None
        self._staged: StagedWeights | None = None
        self._is_warm = False

    def start(self, spec: EngineSpec) -> None:
        """Start the server; it becomes healthy later."""
        if not self._model.is_dir():
            raise ConfigError(
                f"there is no folder {self._model} on {spec.address}", hint="it is the folder of the model"
            )
        if self._server is not None:
            raise ClusterError(f"engine {spec.engine_rank} is running already", hint="stop it first")
        if spec.node_rank == 0 and taken_ports([(spec.port, 1)]):
            # The server would say so after it has loaded the model.
            raise OSError(errno.EADDRINUSE, f"port {spec.port} is in use")
        self._spec, self._is_warm = spec, False
        on_gpu = bool(nvidia_devices()[0])
        variables = self._all_variables(spec, on_gpu=on_gpu)
        check_installed("vllm", self._python, variables)
        command = make_command(self._python, self._model, self._all_options(spec, on_gpu=on_gpu))
        self._server = ServerProcess(command, variables, patience=2.0 * _DRAIN_SECONDS)

    def health(self) -> bool:
        """Return whether it can serve; EngineFailed if its process has ended."""
        spec, server = self._running()
        if (code := server.exit_code()) is not None:
            raise EngineFailed(f"the vLLM of engine {spec.engine_rank} on {spec.address} ended with code {code}")
        if spec.node_rank:
            return True
        try:
            self._ask("/health")
            # The first batch takes a second or two more, which no request should have to.
            if not self._is_warm:
                self._ask("/update_weight_version", {"new_version": "0"})
                self.generate(Prompt(tokens=(1,), max_tokens=1).to_json())
                self._is_warm = True
        except ClusterError:
            return False
        return True

    def generate(self, request: Any) -> dict[str, Any]:
        """Answer a prompt, which is a `Prompt` as JSON, with samples."""
        spec, _ = self._running()
        prompt = Prompt.from_json(dict(request))
        answer = self._ask(self.path, self.to_request(prompt), timeout=_GENERATE_SECONDS)
        samples = self.from_answer(prompt, answer)
        return {"samples": [one.to_json() for one in samples], "engine": spec.engine_rank}

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

    def accept(self) -> StagedWeights:
        """Return where a link writes a version, which the server reads when all of it is there."""
        spec, _ = self._running()
        with self._lock:
            if self._staged is None:
                # The same name on all nodes of the engine, and no other engine's.
                name = hashlib.sha256(f"{spec.secret} {spec.dist_init_addr}".encode()).hexdigest()[:16]
                self._staged = StagedWeights(self._model, name, self._use)
            return self._staged

    def update_weights(self, weights: Any, version: int) -> None:
        """Take weights that do not come from a link: arrays by name, or a path of safetensors files."""
        staged = self.accept()
        staged.fill(weights)
        staged.commit(version)

    def _use(self, path: Path, version: int) -> None:
        """Let the server load a file; the engine's node 0 does so for all its nodes."""
        spec, _ = self._running()
        if spec.node_rank:
            return
        with self._paused():
            self._ask("/start_weight_update", {})
            self._ask("/update_weights", {"update_info": {"path": str(path)}}, timeout=_UPDATE_SECONDS)
            self._ask("/finish_weight_update", {"weight_version": str(version)})
        served = self._ask("/weight_info")["weight_version"]
        if served != str(version):
            raise EngineFailed(f"engine {spec.engine_rank} serves version {served} after an update to {version}")

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        self._ask(f"/pause?mode={self._pause_mode}", {}, timeout=_UPDATE_SECONDS)
        try:
            yield
            # What was computed with the old weights.
            self._ask("/reset_prefix_cache", {})
        finally:
            self._ask("/resume", {})

    def offload(self) -> None:
        """Let the server free its memory; on CPUs it only stops generating."""
        if self._running()[0].node_rank == 0:
            self._ask("/sleep?level=1", {}, timeout=_UPDATE_SECONDS)

    def onload(self) -> None:
        """Let the server take its memory back."""
        if self._running()[0].node_rank == 0:
            self._ask("/wake_up", {}, timeout=_UPDATE_SECONDS)

    def stop(self) -> None:
        """End the server and all its processes. Safe to call again."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()
        with self._lock:
            staged, self._staged = self._staged, None
        if staged is not None:
            staged.close()

    def _running(self) -> tuple[EngineSpec, ServerProcess]:
        if self._server is None or self._spec is None:
            raise ClusterError("the engine does not run")
        return self._spec, self._server

    def _ask(self, path: str, body: Any = None, timeout: float = _CALL_SECONDS) -> Any:
        spec, _ = self._running()
        return ask(
            spec.url, path, body, secret=spec.secret, timeout=timeout, who=f"the vLLM of engine {spec.engine_rank}"
        )

    def _all_options(self, spec: EngineSpec, *, on_gpu: bool) -> dict[str, Any]:
        """Return the options of the server, those of the user last."""
        options: dict[str, Any] = {
            "tensor_parallel_size": max(1, spec.num_devices // self._pipeline),
            "pipeline_parallel_size": self._pipeline,
            # Tokens in and out, with the version of the weights of each.
            "enable_scale_out": True,
            # Those that a trainer's ratios are about: after temperature and limits.
            "logprobs_mode": "processed_logprobs",
            "shutdown_timeout": _DRAIN_SECONDS,
            "disable_uvicorn_access_log": True,
            "worker_extension_cls": "roost_vllm.Extension",
            "weight_transfer_config": json.dumps({"backend": "roost"}),
        }
        if spec.node_rank == 0:
            options |= {"host": spec.address, "port": spec.port, "middleware": "roost_vllm.Secret"}
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
        return options | self._options

    def _all_variables(self, spec: EngineSpec, *, on_gpu: bool) -> dict[str, str]:
        """Return the environment of the server: this worker's, which has its devices, without what is for Ray alone."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHON"))}
        variables = {
            "PYTHONPATH": str(_INSIDE),
            "ROOST_ENGINE_SECRET": spec.secret,
            "VLLM_HOST_IP": spec.address,
            "VLLM_NO_USAGE_STATS": "1",
            # The routes that change weights.
            "VLLM_SERVER_DEV_MODE": "1",
            # The router keeps connections for longer than a server usually does.
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
        }
        if not on_gpu:
            variables |= {"OMP_NUM_THREADS": "1"}
            if spec.num_devices == 1:
                # One process less, which starts ten seconds sooner.
                variables |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        return own | variables | self._environment


def make_command(python: str, model: Path, options: Mapping[str, Any]) -> list[str]:
    """Return the command line of vLLM's server.

    >>> make_command("python", Path("/m"), {"max_model_len": 64, "enforce_eager": True, "lora": False, "x": None})
    ['python', '-m', 'roost_vllm_serve', 'serve', '/m', '--max-model-len', '64', '--enforce-eager', '--no-lora']
    """
    words = [python, "-m", "roost_vllm_serve", "serve", str(model)]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value is False:
            words.append(f"--no-{flag.removeprefix('--')}")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            words += [flag, *map(str, value)]
        elif value is not None:
            words += [flag, str(value)]
    return words
