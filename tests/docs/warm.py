"""A `roost` command for the shell blocks of the docs, forked from one process that has imported it.

The docs run it well over a hundred times, and importing takes most of each run. The command in `folder` is a small
script that hands its arguments, environment, folder and open files to this process, which forks; the child runs
`main()` with them and reports its exit code. That `roost` works in a fresh interpreter is tested elsewhere.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLIENT = """\
#!{python} -IS
import marshal, os, socket, sys
# What an interpreter reads when it starts: a block that sets some of it gets its own.
if any(os.environ.get(name) != value for name, value in {early!r}.items()):
    os.execv({python!r}, [{python!r}, "-m", "roost", *sys.argv[1:]])
with socket.socket(socket.AF_UNIX) as server:
    server.connect({path!r})
    socket.send_fds(server, [b"."], [0, 1, 2])
    server.sendall(marshal.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]))
    server.shutdown(socket.SHUT_WR)
    code = server.recv(1)
sys.exit(code[0] if code else 70)
"""


@contextlib.contextmanager
def warm_roost(folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """Put a `roost` into a folder that is ready to run while the block lasts."""
    path = str(folder / "warm")
    command = folder / "roost"
    early = {name: environment.get(name) for name in ("PYTHONIOENCODING", "PYTHONPATH", "PYTHONUTF8", "LC_ALL", "LANG")}
    command.write_text(CLIENT.format(python=sys.executable, path=path, early=early), encoding="utf-8")
    command.chmod(0o700)
    server = subprocess.Popen([sys.executable, __file__, path], env=environment, stdout=subprocess.PIPE)
    try:
        server.stdout.readline()
        yield
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def serve(path: str) -> None:
    """Fork a `roost` for every client."""
    from roost.cli import main as cli

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
            run(client)
        client.close()


def run(client: socket.socket) -> None:
    """Be the `roost` that a client stands for."""
    from roost.cli import main as cli

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, files, _, _ = socket.recv_fds(client, 1, 3)
    data = b""
    while part := client.recv(65536):
        data += part
    words, environment, folder = marshal.loads(data)  # noqa: S302 - from the client above
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["roost", *words]
    code: object = 1
    try:
        cli.main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    client.sendall(bytes([code if isinstance(code, int) else int(code is not None)]))
    os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1])
