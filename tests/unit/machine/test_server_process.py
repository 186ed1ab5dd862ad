"""A server in a child process ends with all its descendants, whatever happens to it or to its caller."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from roost.machine.server_process import ServerProcess
from waiting import is_gone, wait_until

pytestmark = pytest.mark.heavy

# A server with a child in a session of its own, and shared memory; it says its pids.
SERVER = """
import os, subprocess, sys, time
from multiprocessing import resource_tracker, shared_memory
memory = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(memory._name, "shared_memory")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
with open(sys.argv[1] + ".new", "w") as file:
    file.write(f"{os.getpid()} {child.pid} {memory.name}")
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""

CALLER = """
import os, sys, time
from roost.machine.server_process import ServerProcess
command = [sys.executable, "-c", sys.argv[1], sys.argv[2]]
server = ServerProcess(command, dict(os.environ), scratch=sys.argv[2] + ".mine")
print(server.pid, flush=True)
time.sleep(600)
"""


def read_pids(path: Path) -> tuple[int, int, Path]:
    wait_until(path.exists, "the server runs")
    server, child, memory = path.read_text().split()
    return int(server), int(child), Path("/dev/shm") / memory.strip("/")  # noqa: S108 - only looks


def start(tmp_path: Path, **environment: str) -> ServerProcess:
    command = [sys.executable, "-c", SERVER, str(tmp_path / "pids")]
    return ServerProcess(command, {**os.environ, **environment})


def test_a_server_that_is_stopped_leaves_nothing(tmp_path):
    server = start(tmp_path)
    pid, child, memory = read_pids(tmp_path / "pids")
    assert server.exit_code() is None
    assert memory.exists()
    server.stop()
    assert is_gone(pid)
    assert is_gone(child)
    assert not memory.exists()
    assert server.exit_code() == -signal.SIGTERM
    server.stop()


def test_a_server_that_is_killed_takes_its_children_with_it(tmp_path):
    server = start(tmp_path)
    pid, child, memory = read_pids(tmp_path / "pids")
    # It looks once a second what memory the server has.
    time.sleep(3)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: server.exit_code() is not None, "its death is noticed")
    assert server.exit_code() == -signal.SIGKILL
    assert is_gone(child)
    assert not memory.exists()
    server.stop()


def test_a_server_ends_with_a_caller_that_is_killed(tmp_path):
    words = [sys.executable, "-c", CALLER, SERVER, str(tmp_path / "pids")]
    mine = tmp_path / "pids.mine"
    mine.mkdir()
    with subprocess.Popen(words, stdout=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        watcher = int(caller.stdout.readline())
        pid, child, memory = read_pids(tmp_path / "pids")
        caller.kill()
    for one in (watcher, pid, child):
        wait_until(lambda one=one: is_gone(one), "it has ended")
    wait_until(lambda: not memory.exists() and not mine.exists(), "its shared memory is gone")


def test_semaphores_of_a_server_that_is_killed_are_removed(tmp_path):
    code = """
import multiprocessing, os, sys, time
lock = multiprocessing.get_context("spawn").Lock()
with open(sys.argv[1] + ".new", "w") as file:
    file.write(f"{os.getpid()} {os.getpid()} sem.{lock._semlock.name.strip('/')}")
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""
    server = ServerProcess([sys.executable, "-c", code, str(tmp_path / "pids")], dict(os.environ))
    pid, _, semaphore = read_pids(tmp_path / "pids")
    assert semaphore.exists()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: server.exit_code() is not None, "its death is noticed")
    assert not semaphore.exists()
    server.stop()


def test_a_server_that_does_not_listen_to_sigterm_is_killed(tmp_path):
    code = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{SERVER}"
    server = ServerProcess([sys.executable, "-c", code, str(tmp_path / "pids")], dict(os.environ), patience=0.2)
    pid, child, _ = read_pids(tmp_path / "pids")
    server.stop()
    assert is_gone(pid)
    assert is_gone(child)


def test_a_program_that_does_not_exist_is_named(capfd):
    server = ServerProcess(["/no/such/program"], {})
    wait_until(lambda: server.exit_code() is not None, "it has ended")
    assert server.exit_code() == 127
    assert "/no/such/program cannot be started: No such file" in capfd.readouterr().err
    server.stop()


def test_the_environment_is_the_servers_own_and_on_no_command_line(tmp_path):
    server = start(tmp_path, WORD="hidden-value")
    pid, _, _ = read_pids(tmp_path / "pids")
    try:
        assert psutil.Process(pid).environ()["WORD"] == "hidden-value"
        assert "hidden-value" not in " ".join(psutil.Process(server.pid).cmdline() + psutil.Process(pid).cmdline())
    finally:
        server.stop()


@pytest.mark.skipif(not Path("/dev/shm").exists(), reason="needs /dev/shm")  # noqa: S108 - only looks
def test_shared_memory_that_others_use_stays(tmp_path):
    server = start(tmp_path)
    _, _, memory = read_pids(tmp_path / "pids")
    code = """
import mmap, sys, time
file = open(sys.argv[1], "r+b")
mapped = mmap.mmap(file.fileno(), 0)
print("mapped", flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code, str(memory)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        server.stop()
        assert memory.exists()
        other.kill()
    memory.unlink()


@pytest.mark.skipif(not Path("/dev/shm").exists(), reason="needs /dev/shm")  # noqa: S108 - only looks
def test_files_in_shared_memory_that_are_not_the_servers_own_stay(tmp_path):
    code = """
import mmap, os, sys, time
while not os.path.exists(sys.argv[-1]):
    time.sleep(0.01)
files = [open(path, "r+b") for path in sys.argv[2:]]
mapped = [mmap.mmap(file.fileno(), 0) for file in files]
"""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        shared = Path(folder).parent
        model, older, newer = Path(folder) / "psm_model", shared / f"psm_{tmp_path.name}", shared / f"w-{tmp_path.name}"
        try:
            model.write_bytes(b"a model in a folder")
            older.write_bytes(b"what another process had there before")
            words = [str(path) for path in (tmp_path / "pids", model, older, newer)]
            server = ServerProcess([sys.executable, "-c", code + SERVER, *words], dict(os.environ))
            newer.write_bytes(b"what a trainer writes for the server")
            _, _, memory = read_pids(tmp_path / "pids")
            server.stop()
            assert not memory.exists()
            assert [path.exists() for path in (model, older, newer)] == [True] * 3
        finally:
            older.unlink(missing_ok=True)
            newer.unlink(missing_ok=True)
