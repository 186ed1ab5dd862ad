"""The sampler of a node: one of the workers on it, chosen by a lock, samples the node about once a second."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
import time
from pathlib import Path

import psutil

from roost.machine.devices import nvidia_sampler
from roost.machine.folders import make_folders, open_regular
from roost.runtime.events.file import EventFile
from roost.runtime.events.format import EVENTS_FOLDER, header, line_of, mebibytes, node_file
from roost.runtime.limits import SAMPLES_EVERY_SECONDS


class Sampler:
    """Has the node of a worker sampled: the worker samples it if no other worker there does."""

    def __init__(self, base: Path, run: str, node: int) -> None:
        self._base = base
        self._run = run
        self._node = node
        self._lock: int | None = None
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """Begin to sample unless another process does. Called every few seconds; never raises."""
        if self._thread is not None:
            return
        # RuntimeError: the system allows no more threads.
        with contextlib.suppress(OSError, RuntimeError):
            if self._lock is None:
                folder = self._base / EVENTS_FOLDER
                make_folders(self._base, folder)
                self._lock = open_regular(folder / f".node-{self._node}.lock", os.O_WRONLY | os.O_CREAT)
            # The kernel releases it when this process ends, however it ends.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            thread = threading.Thread(target=self._sample, name="roost-sampler", daemon=True)
            thread.start()
            self._thread = thread

    def _sample(self) -> None:
        began = time.perf_counter()
        first = header(
            f"node {self._node}",
            run=self._run,
            pid=os.getpid(),
            host=socket.gethostname(),
            wall=time.time(),
            node=self._node,
        )
        file = EventFile(self._base, node_file(self._node), first)
        psutil.cpu_percent(None)
        # In this thread: NVIDIA's library may take seconds to start.
        sample_devices = nvidia_sampler()
        with contextlib.suppress(Exception):
            while True:
                time.sleep(SAMPLES_EVERY_SECONDS)
                memory = psutil.virtual_memory()
                devices = [[load, mebibytes(used), mebibytes(total)] for load, used, total in sample_devices()]
                line = line_of(
                    "node",
                    round(psutil.cpu_percent(None) / 100, 3),
                    t=round(time.perf_counter() - began, 4),
                    memory=mebibytes(int(memory.total - memory.available)),
                    of=mebibytes(int(memory.total)),
                    devices=devices or None,
                )
                file.write([line])
