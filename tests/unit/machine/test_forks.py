"""The process that forks the workers of a local cluster: what it imports before, and how its clients do without it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from roost.machine import forks
from waiting import stopped, wait_until

CODE = """
import os, sys, sysconfig
from roost.machine import forks
forks._PRELOAD_SECONDS = 1
sys.path.insert(0, FOLDER)
paths = sysconfig.get_path
sysconfig.get_path = lambda kind: FOLDER if kind == "purelib" else paths(kind)
print(forks._preload("module", dict(os.environ)))
"""
WRONG = {
    "import threading as t\nt.Thread(target=t.Event().wait, daemon=True).start()": "it starts a thread",
    "import os\nos.environ['OWN'] = '1'": "it changes the environment",
    "raise KeyError('x')": "KeyError: 'x'",
    "raise SystemExit(3)": "SystemExit: 3",
    "import time\nfor _ in range(600): time.sleep(0.1)": "TimeoutError: importing it takes more than 1 s",
    "import no_such": "ModuleNotFoundError: No module named 'no_such'",
}


def preload(code: str) -> str:
    """What a process says of a module that it is to import."""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.mark.parametrize("text", WRONG)
def test_a_module_that_would_harm_those_that_are_forked_is_left_out(tmp_path, text):
    (tmp_path / "module.py").write_text(text, encoding="utf-8")
    assert WRONG[text] in preload(CODE.replace("FOLDER", repr(str(tmp_path))))


def test_an_installed_module_is_imported_and_one_that_may_be_edited_is_not(tmp_path):
    (tmp_path / "module.py").write_text("value = 1", encoding="utf-8")
    code = CODE.replace("FOLDER", repr(str(tmp_path)))
    assert preload(code) == ""
    elsewhere = code.replace("sysconfig.get_path =", "unused =")
    assert preload(elsewhere) == f"it is not an installed package, but {tmp_path}{os.sep}module.py"


WORKER = """
import multiprocessing, os, sys
import numpy.random
kind = "forked" if "ray" in sys.modules else "plain"
drawn = f"{multiprocessing.current_process().authkey.hex()} {numpy.random.random()}"
open(sys.argv[1], "a").write(f"{kind} {os.getppid()} {drawn}\\n")
"""
Start = Callable[[], list[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a worker as a raylet does; returns what all of them have written, once it has too."""
    program = Path(forks.make_program(tmp_path / "warm"))
    paths = "import sysconfig\npaths = sysconfig.get_path\n"
    paths += f"sysconfig.get_path = lambda kind: {str(tmp_path)!r} if kind == 'purelib' else paths(kind)\n"
    (tmp_path / "sitecustomize.py").write_text(paths, encoding="utf-8")
    (tmp_path / "default_worker.py").write_text(WORKER, encoding="utf-8")
    output = tmp_path / "output"
    output.touch()
    with subprocess.Popen(["sleep", "infinity"]) as raylet:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "RAY_RAYLET_PID": str(raylet.pid)}

        def run() -> list[str]:
            before = len(output.read_text(encoding="utf-8").splitlines())
            command = [str(program), str(tmp_path / "default_worker.py"), str(output)]
            # The first of a cluster stays.
            with open(tmp_path / "errors", "a", encoding="utf-8") as errors:
                subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=errors).returncode = 0
            wait_until(lambda: len(output.read_text(encoding="utf-8").splitlines()) > before, "the worker starts")
            return output.read_text(encoding="utf-8").splitlines()

        yield run
        raylet.kill()


@contextlib.contextmanager
def impatient(folder: Path) -> Iterator[None]:
    """Let workers wait for two seconds only."""
    server = folder / "warm" / "ray" / "_private" / "forks.py"
    text = server.read_text(encoding="utf-8")
    server.write_text(text.replace("_ANSWER_SECONDS = 30.0", "_ANSWER_SECONDS = 2.0"), encoding="utf-8")
    yield
    server.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("text", ["import os\nos._exit(3)", "import signal\nsignal.pause()"])
def test_a_module_that_ends_or_hangs_what_forks_workers_costs_only_time(tmp_path, start, text):
    (tmp_path / "module.py").write_text(text, encoding="utf-8")
    forks.set_wanted(tmp_path / "warm", ("module",))
    with impatient(tmp_path):
        assert start()[0].startswith("plain")
    said = (tmp_path / "errors").read_text(encoding="utf-8")
    assert said.startswith("roost: a worker starts from scratch: the process that was to fork it ended")


def test_one_worker_waits_for_a_server_that_hangs_and_is_not_forked_later(tmp_path, start):
    server = psutil.Process(int(start()[0].split()[1]))
    assert "--serve" in server.cmdline()
    with stopped(server.pid):
        with impatient(tmp_path):
            assert start()[1].startswith("plain")
        start()
    assert [line.split()[0] for line in start()] == ["forked", "plain", "forked", "forked"]


def test_forks_share_no_key_and_no_random_numbers(start):
    start()
    first, second = (line.split() for line in start())
    assert first[:2] == second[:2]
    assert all(one != other for one, other in zip(first[2:], second[2:], strict=True))
