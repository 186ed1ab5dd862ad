"""The program that raylets of a local cluster run as Python: it forks workers instead of starting each from scratch.

A raylet runs `python default_worker.py …` for every worker, and nearly all of what that costs is importing Ray. Here
the first worker of a cluster starts a base process instead, which imports the libraries that Ray and Roost use, and the
modules that are to be preloaded. For each job on each node the base forks a server, which imports Ray and Roost and
forks a child for every worker of that job there. A child runs Ray's own `default_worker.py`. A server has one thread
when it forks, and ends with its raylet or soon after its last child; the base ends some time after its last server.

A server belongs to one job on one node because Ray reads both from the environment when it is loaded. A worker with a
`runtime_env`, for which Ray runs another program first, gets an interpreter of its own; so does every worker where no
server answers. This program runs outside the package, so it uses the standard library only. What asks for a worker
runs thousands of times, and imports as little as can be: `socket` alone would double its time.
"""

from __future__ import annotations

import _socket
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    import types
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import NoReturn

_PROGRAM = "default_worker.py"
_SERVE = "--serve"
# The modules that Ray imports; a name that is missing here only costs time, and one too many hides what a worker
# of Roost loads without need.
LIBRARIES = (
    *("asyncio", "cProfile", "colorama", "difflib", "faulthandler", "filelock", "google.protobuf.internal.builder"),
    *("google.protobuf.json_format", "google.protobuf.timestamp_pb2", "jsonschema", "lazy_loader", "logging.handlers"),
    *("encodings.ascii", "getpass", "html", "mmap", "msgpack", "multiprocessing.synchronize", "numpy"),
    *("packaging.version", "pdb", "psutil", "pydantic.fields", "pydantic.main", "pydantic.v1", "requests", "runpy"),
    *("starlette.datastructures", "statistics", "tarfile", "tracemalloc", "unittest", "yaml", "zipfile"),
)
# The modules that the workers of Roost import; none of them starts a thread. First those that need no Ray.
_OWN_LIBRARIES = (
    *("roost.runtime.managers.ledgers." + name for name in ("collectives", "endpoints", "ports", "workers")),
    *("roost.runtime.nodes." + name for name in ("accelerators", "order")),
    *("roost.runtime.process." + name for name in ("environment", "output", "timers")),
    *("roost.placement.from_groups", "roost.runtime.launch.progress", "roost.runtime.options"),
    "roost.runtime.runs.recorder",
)
PRELOADED = (
    *("ray", "ray._common.usage.usage_lib", "ray._common.pydantic_compat", "ray._private.arrow_serialization"),
    *("roost.comm.worker", "roost.runtime.cluster", "roost.runtime.groups.group", "roost.runtime.managers.namespaces"),
)
# Ray sets these for a job and for a raylet.
_OWN = ("RAY_JOB_ID", "RAY_RAYLET_PID")
_CLUSTER = ("--gcs-address=", "--session-name=")
FOLDER = "warm"
"""The folder of a local cluster in which the program is."""
_WANTED = "wanted"
_IDLE_SECONDS = 5.0
_ANSWER_SECONDS = 30.0
_READ_SECONDS = 5.0
_PRELOAD_SECONDS = 60


def make_program(folder: Path) -> str:
    """Write the program into a new folder, and return its path; the interpreter's own where it could not run."""
    import py_compile
    from pathlib import Path

    # The kernel reads no more of a script's first line than 127 characters, in some versions.
    if len(sys.executable) > 120 or " " in sys.executable:
        return sys.executable
    # Named like a part of Ray, for py-spy too, so that stacks of workers show none of its frames.
    server = folder / "ray" / "_private" / "forks.py"
    server.parent.mkdir(parents=True, mode=0o700)
    for package in (server.parent, server.parent.parent):
        (package / "__init__.py").touch()
    server.write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    py_compile.compile(str(server))
    program = folder / "python"
    program.write_text(
        f"#!{sys.executable} -IS\nimport sys\nsys.path.insert(0, {str(server.parent)!r})\nimport forks\n"
        f"forks.ask({sys.executable!r}, {str(server)!r}, {str(folder)!r})\n",
        encoding="utf-8",
    )
    program.chmod(0o700)
    return str(program)


def set_wanted(folder: Path, modules: Sequence[str], job: str = "") -> None:
    """Have workers that start from now on, or those of a job, forked from a process that has these modules too."""
    wanted = folder / (f"{_WANTED}.{job}" if job else _WANTED)
    draft = wanted.with_name(f"{wanted.name}.new")
    draft.write_text(" ".join(modules), encoding="utf-8")
    draft.replace(wanted)


def ask(python: str, server: str, folder: str) -> NoReturn:
    """Have a server fork the worker that the raylet asked this process to be, or be that worker."""
    words = sys.argv[1:]
    if os.path.basename(words[0]) == _PROGRAM:
        # Whatever fails, the worker starts.
        why = "the process that was to fork it ended, or did not answer"
        try:
            if _is_forked(words, python, server, folder):
                os._exit(0)
        except OSError as error:
            why = str(error)
        print(f"roost: a worker starts from scratch: {why}", file=sys.stderr, flush=True)
    os.execv(python, [python, *words])  # noqa: S606 - the interpreter that the raylet meant


def _is_forked(words: list[str], python: str, server: str, folder: str) -> bool:
    """Whether a server has forked the worker; it is started if need be."""
    import zlib

    own = [os.environ.get(name, "") for name in _OWN]
    wanted = _read_wanted(folder)
    path = f"{folder}/{zlib.crc32(' '.join([*own, *wanted]).encode()):x}"
    listener = _connect(path, words)
    if isinstance(listener, bool):
        return listener
    shared = sorted(f"{name}={value}" for name, value in os.environ.items() if name not in _OWN)
    key = "\0".join([*wanted, *shared, *(word for word in words if word.startswith(_CLUSTER))])
    base_path, request = f"{folder}/{zlib.crc32(key.encode()):x}", [*own, words[0]]
    base = _connect(base_path, request, listener)
    if not isinstance(base, bool):
        if not os.fork():
            # A raylet may kill the process group of a worker that ended, and this process was to be one.
            os.setpgrp()
            os.set_inheritable(base.fileno(), True)
            os.execv(python, [python, server, _SERVE, str(base.fileno()), " ".join(wanted)])  # noqa: S606 - this program
        # Otherwise workers would connect to a base that has ended, and wait until this process ends.
        base.close()
        if os.fork():
            listener.close()
            # Stay, so that the base and all its workers descend from the raylet.
            os.wait()
            os.wait()
            os._exit(0)
        os.setpgrp()
        base = _connect(base_path, request, listener)
    # The same holds for a server.
    listener.close()
    return base is True and _connect(path, words) is True


def _read_wanted(folder: str) -> list[str]:
    found: list[str] = []
    for name in (_WANTED, f"{_WANTED}.{os.environ.get('RAY_JOB_ID', '')}"):
        try:
            with open(f"{folder}/{name}") as file:
                found += file.read().split()
        except OSError:
            continue
    return list(dict.fromkeys(found))


def _connect(path: str, words: list[str], handed: _socket.socket | None = None) -> _socket.socket | bool:
    """Send words, and a socket, to the process that listens there; returns whether it did what they ask for.

    If none listens there, returns a socket that does.
    """
    import fcntl

    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        connection = _socket.socket(_socket.AF_UNIX)
        # One that is stopped, and has too many clients already, is as good as none.
        connection.settimeout(_ANSWER_SECONDS)
        try:
            connection.connect(path)
        except OSError:
            connection.close()
            if os.path.exists(path):
                os.unlink(path)
            listener = _socket.socket(_socket.AF_UNIX)
            listener.bind(path)
            listener.listen(128)
            return listener
        node = os.stat(path).st_ino
    descriptors = b"" if handed is None else handed.fileno().to_bytes(4, sys.byteorder)
    rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, descriptors)] if descriptors else []
    try:
        connection.sendmsg([b"."], rights)
        connection.sendall("\0".join(words).encode() + b"\n")
        return bool(connection.recv(1))
    except OSError:
        # Others do not wait for a server that hangs: they start a new one. A base may be at a long import.
        if handed is None and os.stat(path).st_ino == node:
            os.unlink(path)
        return False
    finally:
        connection.close()


def _serve_cluster(base: socket.socket, wanted: str) -> list[str]:
    """Fork a server for every job and node that asks, each of which forks workers; returns a worker's command."""
    import contextlib
    import gc
    import importlib

    # What is imported stays.
    gc.disable()
    for name in (*LIBRARIES, *_OWN_LIBRARIES):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    environment = dict(os.environ)
    for name in wanted.split():
        if problem := _preload(name, environment):
            print(f"roost: {name} is not preloaded: {problem}", file=sys.stderr, flush=True)
            # Begin again without it: what it started stays in this process.
            others = " ".join(other for other in wanted.split() if other != name)
            arguments = [__file__, _SERVE, str(base.fileno()), others]
            os.execve(sys.executable, [sys.executable, *arguments], environment)  # noqa: S606 - this program
    for server, request in _fork_each(base, _IDLE_SECONDS * 6):
        os.environ.update(zip(_OWN, request, strict=False))
        program = request[len(_OWN)]
        sys.path[0] = os.path.dirname(program)
        for name in PRELOADED:
            # A worker that needs it finds out, and reports it better.
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        _compiled(program)
        for _, command in _fork_each(server, _IDLE_SECONDS) if server is not None else ():
            gc.enable()
            # Python's own generator has a new seed in every fork; what else is drawn at an import is the same in all.
            if "numpy.random" in sys.modules:
                sys.modules["numpy.random"].seed()
            if "torch" in sys.modules:
                sys.modules["torch"].default_generator.seed()
            if "multiprocessing.process" in sys.modules:
                sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
            return command
    raise AssertionError("a child returns its command")


def _preload(name: str, environment: Mapping[str, str]) -> str:
    """Import a module that all workers then have; returns why that is no good, if it is not."""
    import importlib
    import importlib.util
    import signal
    import sysconfig

    def stop(*_: object) -> NoReturn:
        raise TimeoutError(f"importing it takes more than {_PRELOAD_SECONDS} s")

    threads = len(os.listdir("/proc/self/task"))
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(_PRELOAD_SECONDS)
    try:
        found = importlib.util.find_spec(name.partition(".")[0])
        origin = found.origin or "" if found is not None else ""
        installed = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
        if found is not None and not any(origin.startswith(folder + os.sep) for folder in installed):
            # It may be edited between two launches.
            return f"it is not an installed package, but {origin or 'a folder'}"
        importlib.import_module(name)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    if len(os.listdir("/proc/self/task")) > threads:
        return "it starts a thread when it is imported, and a fork has none of them"
    if dict(os.environ) != environment:
        return "it changes the environment when it is imported"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "it opens a CUDA device when it is imported, which no fork can use"
    return ""


def _fork_each(listener: socket.socket, idle_seconds: float) -> Iterator[tuple[socket.socket | None, list[str]]]:
    """Fork a child for every request, and yield it there; the process itself ends with its raylet, or when idle."""
    import contextlib
    import gc
    import select
    import signal
    import time

    gc.freeze()
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    # Only to wake up: a raylet takes a worker that ended and was not collected for one that is alive.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    raylet = int(os.environ.get("RAY_RAYLET_PID") or os.getpid())
    children, alone_since = 0, time.monotonic()
    while True:
        ready, _, _ = select.select([listener.fileno(), woken], [], [], 1.0)
        if woken in ready:
            os.read(woken, 4096)
        while children and os.waitpid(-1, os.WNOHANG)[0]:
            children -= 1
            alone_since = time.monotonic()
        if listener.fileno() in ready:
            connection, _ = listener.accept()
            # A client that hears nothing, as where there is no memory for a fork, starts its worker itself.
            with connection, contextlib.suppress(OSError):
                handed, words = _read(connection)
                if words and os.fork() == 0:
                    os.setpgrp()
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    os.close(woken)
                    os.close(waker)
                    listener.close()
                    connection.close()
                    break
                if handed is not None:
                    handed.close()
                if words:
                    children += 1
                    connection.sendall(b".")
        elif (not children and time.monotonic() > alone_since + idle_seconds) or not _is_alive(raylet):
            os._exit(0)
    yield handed, words


def _read(connection: socket.socket) -> tuple[socket.socket | None, list[str]]:
    """The socket and the words of a client, or no words where it is gone."""
    import select
    import socket

    connection.settimeout(_READ_SECONDS)
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    handed = socket.socket(fileno=descriptors[0]) if descriptors else None
    with connection.makefile("rb") as file:
        line = file.readline()
    # A client says no more, so that there is something to read only if it waited for too long and is gone.
    is_gone = not line.endswith(b"\n") or bool(select.select([connection], [], [], 0)[0])
    return handed, [] if is_gone else line[:-1].decode().split("\0")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def run(program: str) -> None:
    """Run a program as this process's own, without frames that would show in the tracebacks of workers."""
    import types

    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__file__ = program
    exec(_compiled(program), module.__dict__)  # noqa: S102 - Ray's own program


def _compiled(program: str) -> types.CodeType:
    """The code of a program, which children have from the process that forks them."""
    if program not in _codes:
        with open(program, "rb") as file:
            _codes[program] = compile(file.read(), program, "exec")
    return _codes[program]


_codes: dict[str, types.CodeType] = {}


if __name__ == "__main__" and sys.argv[1:2] == [_SERVE]:
    import socket

    sys.argv = _serve_cluster(socket.socket(fileno=int(sys.argv[2])), sys.argv[3])
    run(sys.argv[0])
