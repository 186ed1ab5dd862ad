"""Trainers and engines for the tests of `roost.rl`; apart from the other workers, which need neither it nor numpy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ray

from roost import Worker
from roost.rl import EngineSpec, RolloutManager
from roost.testing import NumpyEngine


class Trainer(Worker):
    """One rank of a training: what `RayTrainGroup` calls, and a few things for tests."""

    def init(self, _word: str) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "visible": os.environ["CUDA_VISIBLE_DEVICES"],
            "gpu_ids": ray.get_runtime_context().get_accelerator_ids()["GPU"],
            "master": (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]),
        }

    def train(self) -> str:
        return f"train {self.rank}"

    def eval(self) -> str:
        return f"eval {self.rank}"

    def save(self) -> str:
        return f"save {self.rank}"

    def update(self) -> str:
        return f"update {self.rank}"

    def offload(self) -> str:
        return f"offload {self.rank}"

    def onload(self) -> str:
        return f"onload {self.rank}"

    def take(self, manager: RolloutManager, count: int) -> list[Any]:
        return manager.get(count)

    def try_lock(self, manager: RolloutManager, timeout: float) -> str | None:
        with manager.lock(timeout):
            return manager.lock_holder()

    def die_with_lock(self, manager: RolloutManager) -> None:
        with manager.lock():
            os.kill(os.getpid(), signal.SIGKILL)


class Holder(Worker):
    """A worker that takes samples, and holds the lock until a file is there."""

    def take(self, manager: RolloutManager, count: int) -> list[Any]:
        return manager.get(count) if count else []

    def hold(self, manager: RolloutManager, gate: str) -> None:
        with manager.lock():
            while not Path(gate).exists():
                time.sleep(0.01)


@ray.remote(num_cpus=0)
class PlainHolder:
    """An actor that Roost did not launch."""

    def hold(self, manager: RolloutManager) -> tuple[int, str | None]:
        self.block = manager.lock()
        self.block.__enter__()
        return os.getpid(), manager.lock_holder()


@ray.remote(num_cpus=0, max_retries=0)
def hold_and_die(manager: RolloutManager, seen: str) -> None:
    """A task that dies with the lock, and leaves a file that says who had it."""
    with manager.lock():
        Path(seen).write_text(str(manager.lock_holder()))
        os.kill(os.getpid(), signal.SIGKILL)


class LateEngine(NumpyEngine):
    """An engine that never becomes healthy if it is the second one."""

    def start(self, spec: EngineSpec) -> None:
        super().start(spec)
        self.is_late = spec.engine_rank == 1
        if self.is_late:
            print("still loading the model", flush=True)

    def health(self) -> bool:
        return not self.is_late and super().health()


class TellingEngine(NumpyEngine):
    """An engine that reports where it runs, and takes its time to answer."""

    def __init__(self, *args: Any, slow: float = 0.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.slow = slow

    def generate(self, request: Any) -> Any:
        if request == "tell":
            return {
                "node_id": ray.get_runtime_context().get_node_id(),
                "visible": os.environ["CUDA_VISIBLE_DEVICES"],
                "pid": os.getpid(),
                "spec": self.spec,
            }
        time.sleep(self.slow)
        return super().generate(request)


class SquattedEngine(NumpyEngine):
    """An engine whose port another process takes, once, just before it could listen."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)

    def start(self, spec: EngineSpec) -> None:
        if spec.engine_rank == 0 and not list(self.folder.glob("stolen-*")):
            code = f"import socket, time; s = socket.create_server(({spec.address!r}, {spec.port})); print(flush=True)"
            thief = subprocess.Popen(
                [sys.executable, "-c", f"{code}; time.sleep(300)"], stdout=subprocess.PIPE, start_new_session=True
            )
            thief.stdout.readline()
            (self.folder / f"stolen-{spec.port}").touch()
            (self.folder / f"pid-{thief.pid}").touch()
        super().start(spec)
