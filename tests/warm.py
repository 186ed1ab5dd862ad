"""A `roost` and a `warm-python` for tests, forked from one process that has imported the libraries that they use.

The tests run them hundreds of times, and importing takes most of each run. Each is a small script that hands its
arguments, environment, folder and open files to the process, which forks; the child runs the command or the script with
them and reports its exit code. In tests that use Ray, the process has imported that too. Ray reads the environment when
it is loaded: a caller with other variables of Ray than those that can be read again gets an interpreter of its own.
That both programs work in a fresh interpreter is tested elsewhere.

The processes in which commands ask Ray, `python -P -m roost.…`, are forked as well, and so are the keepers of local
clusters, which read their environment when they start nodes.

`start` runs a script as the child itself, so that its id is that of the script, signals reach it, and it ends as an
interpreter does.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import marshal
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from roost.machine import forks

ROOT = Path(__file__).resolve().parents[1]
_CLIENT = """\
#!{python} -IS
import marshal, os, socket, sys
name, *words = os.path.basename(sys.argv[0]), *sys.argv[1:]
# What an interpreter or Ray reads when it starts: a caller that sets some of it, or its flags, gets its own.
early = {{key: value for key, value in os.environ.items() if key in {early!r} or key.startswith("RAY_")}}
if {{key: value for key, value in early.items() if key not in {again!r}}} != {known!r}:
    server = None
elif name == "roost" or words and words[0].endswith(".py") or words[:2] == ["-P", "-m"]:
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
_EARLY = ("PYTHONIOENCODING", "PYTHONUTF8", "LC_ALL", "LANG")
_SCRIPT = "script"
_AGAIN = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""What Ray reads when it connects, or `refresh_authentication` lets it read again."""


@functools.cache
def programs() -> Path:
    """Return a folder with both programs, which work while this process runs, in its environment at the first call."""
    # Pytest's own folder is too long a path for a socket.
    folder = Path(tempfile.mkdtemp(prefix="warm-", dir="/tmp"))
    path = str(folder / "socket")
    # Output of the docs' blocks is compared as text.
    environment = os.environ | {"PYTHONIOENCODING": "utf-8"}
    known = _read_early(environment)
    client = _CLIENT.format(python=sys.executable, path=path, early=_EARLY, again=_AGAIN, known=known)
    (folder / "known").write_bytes(marshal.dumps(known))
    for name in ("roost", "warm-python"):
        program = folder / name
        program.write_text(client, encoding="utf-8")
        program.chmod(0o700)
    with_ray = ["ray"] if "ray" in sys.modules else []
    command, pipe = [sys.executable, __file__, path, *with_ray], subprocess.PIPE
    # It ends when its standard input does, however this process ends.
    server = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe)
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


def _read_early(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables that an interpreter or Ray reads when it starts, and not again."""
    return {
        name: value
        for name, value in environment.items()
        if name in _EARLY or (name.startswith("RAY_") and name not in _AGAIN)
    }


def start(script: Path, variables: dict[str, str]) -> Process | subprocess.Popen[str]:
    """Start `python -u script` in the folder of the script, with this environment and some more variables."""
    own = environment() | variables
    if _read_early(own) == marshal.loads((programs() / "known").read_bytes()):  # noqa: S302 - written above
        return Process(script, own)
    piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-u", str(script)], text=True, env=own, cwd=script.parent, **piped)


def start_keeper(command: list[str], *, env: dict[str, str], **options: object) -> Process | subprocess.Popen[str]:
    """Start the keeper of a local cluster, as `subprocess.Popen` does; what outlives this process is no fork of it."""
    if options["stderr"] is not None:
        return subprocess.Popen(command, env=env, **options)
    keeper = Process(Path(__file__).with_name("keeping.py"), env)
    keeper.stderr.close()
    return keeper


class Process:
    """A script that runs in a fork of the warm process, with what the tests use of `subprocess.Popen`."""

    def __init__(self, script: Path, environment: dict[str, str]) -> None:
        (read_in, write_in), (read_out, write_out), (read_err, write_err) = os.pipe(), os.pipe(), os.pipe()
        self.stdin = open(write_in, "w", encoding="utf-8")  # noqa: SIM115 - closed by whoever started it
        self.stdout = open(read_out, encoding="utf-8")  # noqa: SIM115
        self.stderr = open(read_err, encoding="utf-8")  # noqa: SIM115
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(str(programs() / "socket"))
        socket.send_fds(self._server, [b"."], [read_in, write_out, write_err])
        for file in (read_in, write_out, write_err):
            os.close(file)
        self._server.sendall(marshal.dumps([_SCRIPT, [str(script)], environment, str(script.parent)]))
        self._server.shutdown(socket.SHUT_WR)
        self.pid = int(self._server.recv(16))
        self.returncode: int | None = None

    def wait(self, timeout: float) -> int:
        """Wait until it has ended, and return its exit code, or the negative number of the signal that ended it."""
        if self.returncode is None:
            self._server.settimeout(timeout)
            try:
                self.returncode = int(self._server.recv(16))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("python", timeout) from None
            self._server.close()
        return self.returncode

    def poll(self) -> int | None:
        """Return its exit code if it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait until it has ended: what it wrote to standard output and to standard error."""
        deadline = time.monotonic() + timeout
        self.stdin.close()
        with ThreadPoolExecutor(2) as pool:
            read = [pool.submit(file.read) for file in (self.stdout, self.stderr)]
            try:
                out, err = (one.result(deadline - time.monotonic()) for one in read)
            except TimeoutError:
                self.kill()
                raise subprocess.TimeoutExpired("python", timeout) from None
        self.wait(max(0.0, deadline - time.monotonic()))
        return out, err


def _serve(path: str, with_ray: bool) -> str:
    """Fork a child for every client; return, in a child, the script that it is to run."""
    from roost.cli import main as cli

    for name in (*forks.LIBRARIES, *((*forks.PRELOADED, "roost.testing.quick") if with_ray else ())):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    # Commands import what they need when they run: let one do so here.
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.suppress(SystemExit):
        sys.argv = ["roost", "plan", str(ROOT / "examples" / "job.yaml"), "--cluster", "2x8,1x0"]
        cli.main()
    # Children neither look through what is there, nor get a copy of it by that.
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    os.write(1, b"ready\n")
    while listener in select.select([listener, 0], [], [])[0]:
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return _run(client, os.path.dirname(path))
        client.close()
    os._exit(0)


def _run(client: socket.socket, programs: str) -> str:
    """Be the program that a client stands for, and report how it ended; a script of `start` is returned instead."""
    from roost.cli import main as cli
    from roost.machine import child as child_processes

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, files, _, _ = socket.recv_fds(client, 1, 3)
    data = b""
    while part := client.recv(65536):
        data += part
    name, words, environment, folder = marshal.loads(data)  # noqa: S302 - from the client above
    # The program may run another one in its place.
    if child := os.fork():
        for file in files:
            os.close(file)
        with contextlib.suppress(OSError):
            if name == _SCRIPT:
                client.sendall(b"%16d" % child)
            else:
                # What is killed here is the client, which the program must not outlive.
                ends = select.poll()
                ends.register(os.pidfd_open(child), select.POLLIN)
                ends.register(client, 0)
                if any(file == client.fileno() for file, _ in ends.poll()):
                    os.kill(child, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            client.sendall(b"%16d" % code if name == _SCRIPT else bytes([code & 255]))
        os._exit(0)
    client.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    kept = set(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    os.environ.clear()
    os.environ.update(environment)
    own = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[1:] = [*own, *(path for path in sys.path[1:] if path not in kept)]
    if "ray" in sys.modules:
        from roost.runtime.connect.authentication import refresh_authentication

        refresh_authentication()
    tempfile.tempdir = None
    if name == _SCRIPT:
        sys.argv, sys.path[0] = words, folder
        sys.orig_argv = [sys.executable, "-u", *words]
        for file in (sys.stdout, sys.stderr):
            file.reconfigure(line_buffering=True, write_through=True)
        return words[0]
    code: object = 0
    # A record of a run has it.
    sys.orig_argv = [sys.executable, *([shutil.which("roost")] if name == "roost" else []), *words]
    try:
        if name == "roost":
            sys.argv, sys.path[0] = ["roost", *words], os.path.dirname(sys.executable)
            child_processes.sys = types.SimpleNamespace(executable=os.path.join(programs, "warm-python"))
            cli.main()
        elif words[:2] == ["-P", "-m"]:
            program = importlib.import_module(words[2]).__file__
            sys.argv, sys.path = [program, *words[3:]], sys.path[1:]
            forks.run(program)
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
    forks.run(_serve(sys.argv[1], "ray" in sys.argv[2:]))
