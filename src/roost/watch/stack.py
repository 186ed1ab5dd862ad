"""The stacks of a worker, without stopping it: by py-spy where it is installed, else by the worker itself."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from pathlib import Path

from roost.deadline import Deadline
from roost.errors import ClusterError, ConfigError
from roost.machine.folders import open_regular
from roost.machine.py_spy import read_stacks
from roost.runtime.events.stacks import answer_file, request_file
from roost.text import join_words, printable_lines
from roost.watch.limits import ANSWER_SECONDS, STACK_LOOK_SECONDS
from roost.watch.views import RunView, State, WorkerView

_LIMIT = 2**20


def stack_of(folder: Path, view: RunView, address: str, seconds: float = ANSWER_SECONDS) -> str:
    """Return the stacks of all threads of a worker of a run, safe to print."""
    workers = {worker.address: worker for worker in view.workers}
    if address not in workers:
        has = join_words(list(workers), most=12) or "none"
        raise ConfigError(f"the run {folder} has no worker {address!r}", hint=f"it has {has}")
    worker = workers[address]
    if worker.state in (State.DEAD, State.ENDED):
        raise ClusterError(f"{address} is not running: it is {worker.state}", hint="`roost logs` has what it printed")
    text = _by_py_spy(worker) or _main_first(_by_itself(folder, worker, seconds))
    return printable_lines(text)


def _main_first(text: str) -> str:
    r"""Put the main thread in front, which Python writes last: the only one that began in a module.

    >>> _main_first("Thread 2:\n  File 'b.py' in f\n\nThread 1:\n  File 'a.py' in <module>\n").splitlines()[0]
    'Thread 1:'
    """
    threads = text.strip("\n").split("\n\n")
    return "\n\n".join(sorted(threads, key=lambda thread: not thread.endswith(" in <module>"))) + "\n"


def _by_py_spy(worker: WorkerView) -> str:
    """Return what py-spy shows, or nothing where it is not installed, may not look, or the worker is elsewhere."""
    return read_stacks(worker.pid)[0] if worker.host == socket.gethostname() else ""


def _by_itself(folder: Path, worker: WorkerView, seconds: float) -> str:
    token = secrets.token_hex(16)
    request, answer = folder / request_file(worker.address), folder / answer_file(worker.address)
    deadline, half = Deadline.after(seconds), Deadline.after(seconds / 2)
    is_asked = False
    try:
        while not deadline.is_over:
            # One process asks at a time, again if its answer was replaced before it was read. A request that stays was
            # left by a process that is gone.
            if not (is_asked and request.exists()):
                if half.is_over:
                    request.unlink(missing_ok=True)
                is_asked = False
                with contextlib.suppress(FileExistsError), open(request, "x", opener=open_regular) as file:
                    file.write(token)
                    is_asked = True
            with contextlib.suppress(OSError), open(answer, "rb", opener=open_regular) as file:
                first, _, rest = file.read(_LIMIT).partition(b"\n")
                if first == token.encode():
                    return rest.decode(errors="replace")
            time.sleep(STACK_LOOK_SECONDS)
    except OSError as error:
        raise ClusterError(f"{worker.address} cannot be asked: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            if request.read_text() == token:
                request.unlink()
    raise ClusterError(
        f"{worker.address} (pid {worker.pid} on {worker.host}) did not answer in {seconds:g} s",
        hint="it hangs in code that lets no other thread run; py-spy on its node can show where",
    )
