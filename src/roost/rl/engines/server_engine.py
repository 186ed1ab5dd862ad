"""`ServerEngine`: what engines have in common whose server is a program of its own."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from roost.errors import ClusterError, ConfigError, EngineFailed
from roost.machine.devices import nvidia_devices
from roost.machine.ports import taken_ports
from roost.machine.server_process import ServerProcess
from roost.rl.engine import EngineSpec, PauseMode, check_pause_mode
from roost.rl.engines.samples import Dialect, Prompt
from roost.rl.engines.staging import StagedFile, StagedOnDevice, StagedWeights, staging_folder
from roost.rl.json_request import ask
from roost.rl.limits import CALL_SECONDS, FIND_SECONDS, GENERATE_SECONDS
from roost.text import join_words

WeightsPlace = Literal["host", "device"]
"""Where an engine has memory for the next version of its weights."""

_INSIDE = Path(__file__).with_name("inside")
_FIND = "import importlib.util, sys; sys.exit(not importlib.util.find_spec(sys.argv[1]))"


class ServerEngine(Dialect, ABC):
    """A server in a child process, on exactly the devices of its worker, with memory for its next weights.

    A subclass says how its server is started and asked, and describes the arguments as its server takes them.
    """

    name: ClassVar[str]
    """The name of the server in messages."""
    package: ClassVar[str]
    """The Python package that the server is in."""
    install: ClassVar[str]
    """How to install it on a machine with GPUs."""
    program: ClassVar[tuple[str, ...]]
    """The arguments of its interpreter, up to the folder of the model."""
    off: ClassVar[str] = ""
    """How the flag of an option begins that is off; without it there is no flag then."""
    pause_modes: ClassVar[tuple[PauseMode, ...]] = get_args(PauseMode)
    """The modes that the server can do."""
    weights_places: ClassVar[tuple[WeightsPlace, ...]] = ("host",)
    """Where the server can take weights from."""
    not_inherited: ClassVar[tuple[str, ...]] = ("RAY_", "PYTHON")
    """How the variables of this process begin that its server must not have."""

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
        weights_on: WeightsPlace = "host",
    ) -> None:
        if weights_on not in self.weights_places:
            places = join_words(self.weights_places, last="or")
            raise ConfigError(f"weights_on is {weights_on!r}: with {self.name} it is {places}")
        self._model = Path(model)
        self._python = python
        self._options = dict(options or {})
        self._environment = dict(environment or {})
        self._pipeline = pipeline_parallel
        self._pause_mode = check_pause_mode(pause_mode, self.pause_modes)
        self._can_sleep = can_sleep
        self._weights_on = weights_on
        self._lock = threading.Lock()
        self._server: ServerProcess | None = None
        self._spec: EngineSpec | None = None
        self._staged: StagedWeights | None = None
        self._is_warm = False
        self._is_offloaded = False
        self._is_sound = True
        """Whether the last change of its weights or its memory succeeded."""

    @abstractmethod
    def _sleep(self) -> None:
        """Let the server free its memory."""

    @abstractmethod
    def _wake(self) -> None:
        """Let the server take its memory back, and go on."""

    @abstractmethod
    def _describe(self, spec: EngineSpec, *, on_gpu: bool) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the options and the variables that this kind of server needs."""

    def _warm_up(self) -> None:
        """Ask the server, which has just come up, for its first tokens: they take longer than those of requests."""
        self.generate(Prompt(tokens=(1,), max_tokens=1).to_json())

    @abstractmethod
    def _load(self, where: Mapping[str, Any], version: int) -> None:
        """Let the server load what lies there, on all nodes of the engine, and serve it as this version."""

    def start(self, spec: EngineSpec) -> None:
        """Start the server; it becomes healthy later."""
        if not self._model.is_dir():
            raise ConfigError(
                f"there is no folder {self._model} on {spec.address}", hint="it is the folder of the model"
            )
        if self._server is not None:
            raise ClusterError(f"engine {spec.engine_rank} is running already", hint="stop it first")
        if self._weights_on == "device" and spec.num_nodes > 1:
            where = f"engine {spec.engine_rank} has {spec.num_nodes} nodes"
            raise ConfigError(f"{where}, and weights on a device reach one", hint='leave weights_on="device" out')
        if taken_ports([(spec.port, 1)]):
            # The server would say so after it has loaded the model.
            raise OSError(errno.EADDRINUSE, f"port {spec.port} is in use")
        self._spec, self._is_warm, self._is_offloaded, self._is_sound = spec, False, False, True
        words, variables = self._command(spec, on_gpu=bool(nvidia_devices()[0]))
        try:
            found = subprocess.run(  # noqa: S603 - an interpreter that the user names
                [self._python, "-c", _FIND, self.package],
                env=variables,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=FIND_SECONDS,
                check=False,
            )
        except OSError as error:
            raise ConfigError(f"the interpreter {self._python} cannot be run: {error.strerror}") from None
        if found.returncode:
            what = f"{self._python} has no package {self.package}"
            raise ConfigError(what, hint=f"{self.install}, in that environment")
        self._server = ServerProcess(words, variables, scratch=staging_folder(spec))

    def health(self) -> bool:
        """Return whether it can serve; EngineFailed if its process has ended, or will never be able to."""
        spec, server = self._running()
        if (code := server.exit_code()) is not None:
            raise EngineFailed(f"the {self.name} of engine {spec.engine_rank} on {spec.address} ended with code {code}")
        if spec.node_rank:
            return True
        try:
            self._ask("/health")
            if not self._is_warm:
                self._warm_up()
                self._is_warm = True
        except EngineFailed:
            raise
        except ClusterError:
            return False
        return self._is_sound

    def generate(self, request: Any) -> dict[str, Any]:
        """Answer a prompt, which is a `Prompt` as JSON, with samples."""
        spec, _ = self._running()
        prompt = Prompt.from_json(dict(request))
        answer = self._ask(self.path, self.to_request(prompt), timeout=GENERATE_SECONDS)
        samples = self.from_answer(prompt, answer)
        return {"samples": [one.to_json() for one in samples], "engine": spec.engine_rank}

    def accept(self) -> StagedWeights:
        """Return where a link writes a version, which the server reads when all of it is there."""
        spec, _ = self._running()
        with self._lock:
            if self._staged is None:
                if self._weights_on == "device":
                    self._staged = StagedOnDevice(self._model, self._use)
                else:
                    self._staged = StagedFile(self._model, staging_folder(spec), self._use)
            return self._staged

    def update_weights(self, weights: Any, version: int) -> None:
        """Take weights that do not come from a link: arrays by name, or a path of safetensors files."""
        self.stage_weights(weights)
        self.accept().commit(version)

    def stage_weights(self, weights: Any) -> None:
        """Take in such weights, which are used when they are committed."""
        self.accept().fill(weights)

    def offload(self) -> None:
        """Let the server free its memory; what a link has written moves to the host. Safe to call again."""
        if self._is_offloaded:
            return
        if self._serves():
            self._sleep()
        if isinstance(self._staged, StagedOnDevice):
            self._staged.leave()
        self._is_offloaded = True

    def onload(self) -> None:
        """Let the server take its memory back, and go on. Safe to call again."""
        if not self._is_offloaded:
            return
        if not self._is_sound:
            # The server would answer with them.
            raise ClusterError("the weights of the engine are in doubt", hint="restart it")
        if isinstance(self._staged, StagedOnDevice):
            self._staged.come_back()
        if self._serves():
            self._wake()
        self._is_offloaded = False

    def stop(self) -> None:
        """End the server and all its processes. Safe to call again."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()
        with self._lock:
            staged, self._staged = self._staged, None
        if staged is not None:
            staged.close()

    def _use(self, where: Callable[[], Mapping[str, Any]], version: int) -> None:
        """Let the server use a version; the engine's node 0 does so for all its nodes."""
        if self._is_offloaded:
            raise ClusterError("the engine is offloaded, and cannot take weights", hint="onload it first")
        if self._serves():
            self._load(where(), version)
            self._is_sound = True

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Surround what leaves the server's weights or memory in doubt if it fails."""
        try:
            yield
        except BaseException:
            self._is_sound = False
            raise

    def _serves(self) -> bool:
        """Return whether this is the process that is asked: on the engine's other nodes there is nothing to ask."""
        return self._running()[0].node_rank == 0

    def _check_version(self, served: str, version: int) -> None:
        if served != str(version):
            rank = self._running()[0].engine_rank
            raise EngineFailed(f"engine {rank} serves version {served} after an update to {version}")

    def _command(self, spec: EngineSpec, *, on_gpu: bool) -> tuple[list[str], dict[str, str]]:
        """Return the command line of the server, and its environment.

        That is this worker's, which has its devices, without Ray's own variables; what the user gives counts last.
        """
        options, variables = self._describe(spec, on_gpu=on_gpu)
        own = {name: value for name, value in os.environ.items() if not name.startswith(self.not_inherited)}
        every = {"PYTHONPATH": str(_INSIDE), "ROOST_ENGINE_SECRET": spec.secret, "HF_HUB_OFFLINE": "1"}
        flags = to_flags(options | self._options, off=self.off)
        words = [self._python, "-m", *self.program, str(self._model), *flags]
        return words, own | every | variables | self._environment

    def _running(self) -> tuple[EngineSpec, ServerProcess]:
        if self._server is None or self._spec is None:
            raise ClusterError("the engine does not run")
        return self._spec, self._server

    def _ask(self, path: str, body: Any = None, timeout: float = CALL_SECONDS) -> Any:
        spec, _ = self._running()
        who = f"the {self.name} of engine {spec.engine_rank}"
        return ask(spec.url, path, body, secret=spec.secret, timeout=timeout, who=who)


def to_flags(options: Mapping[str, Any], *, off: str = "") -> list[str]:
    """Write options as flags. `off` begins the flag of an option that is False; without `off`, there is no such flag.

    >>> to_flags({"max_len": 64, "eager": True, "lora": False, "loras": ["a", "b"], "x": None}, off="--no-")
    ['--max-len', '64', '--eager', '--no-lora', '--loras', 'a', 'b']
    >>> to_flags({"lora": False})
    []
    """
    words: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if value is True:
            words.append(f"--{flag}")
        elif value is False:
            words += [f"{off}{flag}"] if off else []
        elif isinstance(value, Sequence) and not isinstance(value, str):
            words += [f"--{flag}", *map(str, value)]
        elif value is not None:
            words += [f"--{flag}", str(value)]
    return words
