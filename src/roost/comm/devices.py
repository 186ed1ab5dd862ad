"""The accelerators of a worker: torch's module for them, and a lock for workers that share them."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import logging
import os
import struct
import threading
import time
from collections.abc import Sequence
from types import TracebackType

from roost.comm.limits import LOCK_POLL_SECONDS, LOCK_SAY_SECONDS
from roost.comm.process import job_context
from roost.comm.wire.loop import check_timeout
from roost.config.hardware import AcceleratorType
from roost.deadline import NEVER, Deadline
from roost.errors import CallTimedOut, ClusterError
from roost.machine.folders import open_regular, socket_folder
from roost.placement.placement import Placement
from roost.runtime.events.waits import waiting
from roost.runtime.failures.meanwhile import with_meanwhile

_LOCK_FILE = "devices.lock"

log: logging.Logger = logging.getLogger(__name__)


def torch_device_type(placement: Placement) -> str:
    """Return torch's name for the kind of accelerator that it sees in this process; `cpu` if it sees none."""
    torch = importlib.import_module("torch")
    if placement.accelerator_type == AcceleratorType.ASCEND:
        with contextlib.suppress(ImportError):
            importlib.import_module("torch_npu")
    for name in ("cuda", "npu", "xpu"):
        module = getattr(torch, name, None)
        if module is not None and module.is_available():
            return name
    return "cpu"


class DeviceLock:
    """Keeps the accelerators of a worker from the other workers of the job that have them too: `with lock: …`.

    A worker that has several takes all of them. The lock ends with the process that holds it. Without accelerators
    there is nothing to wait for.
    """

    def __init__(self, pieces: Sequence[str]) -> None:
        """Take the names of the accelerators, which are the same in all processes on the node."""
        # Each is a byte of one file, so that nothing is left behind. In order, so that no two wait for each other.
        digests = (hashlib.sha256(piece.encode()).digest() for piece in pieces)
        self._places = sorted(int.from_bytes(digest[:8], "big") >> 2 for digest in digests)
        self._own = threading.Lock()
        self._file: int | None = None

    def acquire(self, timeout: float | None = None) -> None:
        """Wait for the accelerators; CallTimedOut after `timeout` seconds. A long wait is logged."""
        timeout = check_timeout(timeout)
        deadline, say_once = Deadline.after(timeout), Deadline.after(LOCK_SAY_SECONDS)
        late = CallTimedOut(f"another worker has had the lock of these accelerators for {timeout or 0:g} s")
        with waiting(lambda: "the lock of its accelerators"):
            if not self._own.acquire(timeout=-1 if timeout is None else deadline.left):
                raise with_meanwhile(late)
            try:
                if self._places:
                    self._file = open_regular(socket_folder() / _LOCK_FILE, os.O_RDWR | os.O_CREAT)
                for place in self._places:
                    while not self._take(place):
                        if deadline.is_over:
                            raise with_meanwhile(late)
                        if say_once.is_over:
                            say_once = NEVER
                            log.warning("still waiting for accelerators that another worker has locked")
                        time.sleep(LOCK_POLL_SECONDS)
            except BaseException:
                self._let_go()
                raise

    def _take(self, place: int) -> bool:
        wanted = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
        try:
            # A lock of this open file, not of the process: it also holds against other threads.
            fcntl.fcntl(self._file or 0, fcntl.F_OFD_SETLK, wanted)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        """Let others have the accelerators."""
        if not self._own.locked():
            raise ClusterError("the device lock is not held")
        self._let_go()

    def _let_go(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)
        self._own.release()

    def __enter__(self) -> DeviceLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def make_device_lock(placement: Placement) -> DeviceLock:
    """Return the lock of the accelerators of a worker."""
    context = job_context()
    job, node, kind = context.job.id if context else "", placement.cluster_node_rank, placement.hardware_type
    return DeviceLock([f"{job}/{node}/{kind}/{piece}" for piece in placement.local_hardware_ranks])
