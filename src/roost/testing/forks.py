"""The program that a raylet of a local cluster runs as its Python: it forks workers instead of starting each afresh.

A raylet runs `python default_worker.py …` for every worker, and nearly all of what that costs is importing Ray. Here
the first worker of a job on a node becomes a server instead: it imports Ray, and Roost where it can, and forks a child
for itself and for every later worker of that job there. A child runs Ray's own `default_worker.py`. The server has one
thread when it forks, and ends with its raylet or soon after its last child.

A server belongs to one job on one node because Ray reads both from the environment when it is imported. A worker with
a `runtime_env`, for which Ray runs another program first, gets an interpreter of its own; so does every worker where
the server does not answer. This file is copied into the cluster's folder and uses the standard library only.
"""

from __future__ import annotations

import os
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

PROGRAM = "default_worker.py"
SERVE = "--serve"
# What a worker of Roost imports; none of it starts a thread.
PRELOADED = ("roost.runtime.cluster", "roost.runtime.groups.group", "roost.runtime.managers.actors")
IDLE_SECONDS = 5.0
ANSWER_SECONDS = 60.0
_PR_SET_PDEATHSIG = 1


def main(python: str, folder: str) -> NoReturn:
    """Be one of the two: the client that the raylet starts, or the server that it turns into."""
    if sys.argv[1] == SERVE:
        _serve(socket.socket(fileno=int(sys.argv[2])), sys.argv[3:])
    words = sys.argv[1:]
    if os.path.basename(words[0]) == PROGRAM:
        path = f"{folder}/forks-{os.environ.get('RAY_RAYLET_PID')}-{os.environ.get('RAY_JOB_ID')}"
        listener = _ask(path, words)
        if listener is not None:
            os.set_inheritable(listener.fileno(), True)
            os.execv(python, [python, sys.argv[0], SERVE, str(listener.fileno()), *words])  # noqa: S606
    os.execv(python, [python, *words])  # noqa: S606


def _ask(path: str, words: list[str]) -> socket.socket | None:
    """Let the server fork this worker, and end; returns a listener where this process is to be the server."""
    import fcntl

    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
        except OSError:
            connection.close()
            if os.path.exists(path):
                os.unlink(path)
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(path)
            listener.listen(128)
            return listener
    with connection:
        connection.settimeout(ANSWER_SECONDS)
        try:
            connection.sendall("\0".join(words).encode() + b"\n")
            if connection.recv(1):
                os._exit(0)
        except OSError:
            pass
    return None


def _serve(listener: socket.socket, words: list[str]) -> NoReturn:
    import contextlib
    import ctypes
    import gc
    import importlib
    import select
    import signal
    import time

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    sys.path[0] = os.path.dirname(words[0])
    importlib.import_module("ray")
    for name in PRELOADED:
        # A worker that needs it finds out and reports it better.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.freeze()
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    # Nothing more to do than to wake up: to its raylet, a worker that ended and was not collected is alive.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children, alone_since = 0, time.monotonic()
    requests: list[tuple[list[str], socket.socket | None]] = [(words, None)]
    while True:
        for words, connection in requests:
            if os.fork() == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for number in (woken, waker, listener.fileno(), connection.fileno() if connection else -1):
                    if number >= 0:
                        os.close(number)
                _run(words)
            children += 1
            if connection is not None:
                connection.sendall(b".")
                connection.close()
        requests = []
        ready, _, _ = select.select([listener, woken], [], [], 1.0)
        if woken in ready:
            os.read(woken, 4096)
        while children:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                break
            children -= 1
            alone_since = time.monotonic()
        if listener in ready:
            connection, _ = listener.accept()
            data = b""
            while not data.endswith(b"\n") and (part := connection.recv(65536)):
                data += part
            requests = [(data[:-1].decode().split("\0"), connection)] if data.endswith(b"\n") else []
        elif not children and time.monotonic() > alone_since + IDLE_SECONDS:
            os._exit(0)


def _run(words: list[str]) -> NoReturn:
    """Be the worker that the raylet asked for."""
    import runpy

    sys.argv = words
    code = 1
    try:
        runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    os._exit(code)
