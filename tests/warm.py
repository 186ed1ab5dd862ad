"""A `roost` and a `warm-python` for tests, forked from one process that has imported the libraries that they use.

The tests run them hundreds of times, and importing takes most of each run. Each is a small script that hands its
arguments, environment, folder and open files to the process, which forks; the child runs the command or the script with
them and reports its exit code. Ray itself is imported in the child: it reads the environment when it is loaded. That
both work in a fresh interpreter is tested elsewhere.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import marshal
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import forks

ROOT = Path(__file__).resolve().parents[1]
_CLIENT = """\
#!{python} -IS
import marshal, os, socket, sys
name, *words = os.path.basename(sys.argv[0]), *sys.argv[1:]
# What an interpreter reads when it starts: a caller that sets some of it, or its flags, gets its own.
if any(os.environ.get(name) != value for name, value in {early!r}.items()):
    server = None
elif name == "roost" or words and words[0].endswith(".py"):
    server = socket.socket(socket.AF_UNIX)
    server.connect({path!r})
else:
    server = None
if server is None:
    os.execv({python!r}, [{python!r}, *(["-m", "roost"] if name == "roost" else []), *words])
socket.send_fds(server, [b"."], [0, 1, 2])
server.sendall(marshal.dumps([name, words, dict(os.environ), os.getcwd()]))
server.shutdown(socket.SHUT_WR)
code = server.recv(1)
sys.exit(code[0] if code else 70)
"""
_EARLY = ("PYTHONIOENCODING", "PYTHONPATH", "PYTHONUTF8", "LC_ALL", "LANG")


@functools.cache
def programs() -> Path:
    """Return a folder with both programs, which work while this process runs, in its environment at the first call."""
    # Pytest's own folder is too long a path for a socket.
    folder = Path(tempfile.mkdtemp(prefix="warm-", dir="/tmp"))
    path = str(folder / "socket")
    # Output of the docs' blocks is compared as text.
    environment = os.environ | {"PYTHONIOENCODING": "utf-8"}
    early = {name: environment.get(name) for name in _EARLY}
    for name in ("roost", "warm-python"):
        program = folder / name
        program.write_text(_CLIENT.format(python=sys.executable, path=path, early=early), encoding="utf-8")
        program.chmod(0o700)
    server = subprocess.Popen([sys.executable, __file__, path], env=environment, stdout=subprocess.PIPE)
    server.stdout.readline()

    def end() -> None:
        server.kill()
        server.wait()
        server.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    return folder


def environment() -> dict[str, str]:
    """Return this process's environment, with the programs first on the path."""
    path = os.pathsep.join([str(programs()), str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | {"PATH": path, "PYTHONIOENCODING": "utf-8"}


def _serve(path: str) -> None:
    """Fork a child for every client."""
    from roost.cli import main as cli

    for name in forks.LIBRARIES:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    # Commands import what they need when they run: let one do so here.
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.suppress(SystemExit):
        sys.argv = ["roost", "plan", str(ROOT / "examples" / "job.yaml"), "--cluster", "2x8,1x0"]
        cli.main()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    os.write(1, b"ready\n")
    while True:
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _run(client)
        client.close()


def _run(client: socket.socket) -> None:
    """Be the program that a client stands for, and report how it ended."""
    from roost.cli import main as cli

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, files, _, _ = socket.recv_fds(client, 1, 3)
    data = b""
    while part := client.recv(65536):
        data += part
    # The program may run another one in its place.
    if child := os.fork():
        client.sendall(bytes([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255]))
        os._exit(0)
    client.close()
    name, words, environment, folder = marshal.loads(data)  # noqa: S302 - from the client above
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    code: object = 0
    # A record of a run has it.
    sys.orig_argv = [sys.executable, *([shutil.which("roost")] if name == "roost" else []), *words]
    try:
        if name == "roost":
            sys.argv = ["roost", *words]
            cli.main()
        else:
            sys.argv, sys.path[0] = words, os.path.dirname(os.path.abspath(words[0]))
            forks.run(words[0])
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        trace = error.__traceback__
        while trace.tb_next is not None and trace.tb_frame.f_globals.get("__name__") != "__main__":
            trace = trace.tb_next
        sys.excepthook(type(error), error, trace.tb_next if name == "roost" else trace)
        code = 1
    # As at the end of an interpreter: `Cluster` and Ray disconnect there.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if isinstance(code, str):
        print(code, file=sys.stderr, flush=True)
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    _serve(sys.argv[1])
