"""A server that is a program of its own: started in a child process, and ended with all its descendants.

Between the caller and the server there is a small process that outlives neither. It adopts what the server leaves
behind when it dies, and when its caller is gone, however that ended, it ends the server and removes the shared memory
of processes that were killed, and what the caller had there for the server.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, cast

import psutil

from roost.deadline import Deadline
from roost.errors import ClusterError
from roost.machine.limits import KILL_SECONDS, MEMORY_LOOK_SECONDS, PIPE_SECONDS, TIDY_SECONDS
from roost.machine.processes import adopt_orphans, die_with_parent, reap

_SHARED_FOLDER = Path("/dev/shm")  # noqa: S108 - where shared memory lies
_LEFTOVERS = ("psm_", "sem.", "torch_", "vllm_", "VLLM_", "nccl-", "cuda.shm.")
"""How the names begin of what Python, torch, vLLM and CUDA keep there. Other files, such as a model, are the user's."""


class ServerProcess:
    """A server that runs. Its output goes where that of this process goes."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        patience: float = 10.0,
        scratch: Path | None = None,
    ) -> None:
        """Start a program with an environment; at its end it has `patience` seconds after SIGTERM.

        `scratch` is a folder that is removed then, also if the caller was killed.
        """
        self._patience = patience
        try:
            # -P: a file in the current folder must not replace a module.
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-P", "-m", __name__],
                stdin=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                # Ctrl-C goes to the caller, which then ends the server in order.
                start_new_session=True,
            )
            self._pipe = cast(IO[bytes], self._process.stdin)
            # Not on the command line, which every user of the machine can read.
            task = {
                "command": list(command),
                "environment": dict(environment),
                "patience": patience,
                "scratch": None if scratch is None else str(scratch),
            }
            self._pipe.write(json.dumps(task).encode() + b"\n")
            self._pipe.flush()
        except OSError as error:
            raise ClusterError(f"a server cannot be started: {error.strerror}") from None

    @property
    def pid(self) -> int:
        """The process that watches over the server."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return the server's exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """End the server and all its descendants; returns when none of them runs. Safe to call again."""
        with contextlib.suppress(OSError):
            self._pipe.close()
        try:
            self._process.wait(self._patience + 2 * KILL_SECONDS)
        except subprocess.TimeoutExpired:
            for process in _descendants(psutil.Process(self.pid)):
                with contextlib.suppress(psutil.Error):
                    process.kill()
            self._process.kill()
            self._process.wait(KILL_SECONDS)


def main() -> int:
    """Watch over a server until it ends, or the caller is gone."""
    caller = os.getppid()
    task = json.loads(sys.stdin.buffer.readline())
    adopt_orphans()
    before = set(_SHARED_FOLDER.glob("*"))
    try:
        server = subprocess.Popen(  # noqa: S603 - what the caller wants to run, without a shell
            task["command"],
            stdin=subprocess.DEVNULL,
            env=task["environment"],
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    except OSError as error:
        sys.stderr.write(f"{task['command'][0]} cannot be started: {error.strerror}\n")
        return 127
    me = psutil.Process()
    memory: set[Path] = set()
    next_look = Deadline.after(0)
    # A process that the caller forked may hold the other end of the pipe for longer than the caller lives.
    while server.poll() is None and os.getppid() == caller:
        if next_look.is_over:
            memory |= _shared_memory(_descendants(me))
            next_look = Deadline.after(MEMORY_LOOK_SECONDS)
        if select.select([0], [], [], PIPE_SECONDS)[0] and not os.read(0, 1):
            break
    memory |= _shared_memory(_descendants(me))
    if server.poll() is None:
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(task["patience"])
    killed, tidied = Deadline.after(KILL_SECONDS), Deadline.after(TIDY_SECONDS)
    while (left := _descendants(me)) and not killed.is_over:
        for process in left:
            with contextlib.suppress(psutil.Error):
                # Python's resource tracker removes semaphores and shared memory when the others have ended.
                if tidied.is_over or "resource_tracker" not in " ".join(process.cmdline()):
                    process.kill()
        time.sleep(0.02)
        server.poll()
    code = server.poll()
    reap()
    for path in memory - before - _shared_memory(list(psutil.process_iter())):
        with contextlib.suppress(OSError):
            path.unlink()
    if task["scratch"] is not None:
        shutil.rmtree(task["scratch"], ignore_errors=True)
    return -signal.SIGKILL if code is None else code


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    """Return the running descendants of a process."""
    found = []
    with contextlib.suppress(psutil.Error):
        for one in process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if one.status() != psutil.STATUS_ZOMBIE:
                    found.append(one)
    return found


def _shared_memory(processes: Sequence[psutil.Process]) -> set[Path]:
    """Return the files of shared memory that processes of this user have mapped, of the kinds that are left behind."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8", errors="replace")
            found |= {Path(line[line.index("/") :]) for line in maps.splitlines() if f" {_SHARED_FOLDER}/" in line}
    return {path for path in found if path.parent == _SHARED_FOLDER and path.name.startswith(_LEFTOVERS)}


if __name__ == "__main__":
    # A negative code is a signal, which a process can only have by ending so.
    code = main()
    if code < 0:
        with contextlib.suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
