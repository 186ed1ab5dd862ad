"""SIGTERM in a driver: it unwinds, a second one ends it at once, and a grace period bounds it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

CODE = """
import os, signal, sys, time
from roost.runtime.connect import stop
stop.STOP_GRACE_SECONDS = LIMIT
def doze():
    # A signal that arrives just before a sleep begins interrupts nothing until the sleep is over.
    for _ in range(6000):
        time.sleep(0.1)
found = stop.Stop(lambda name: print(name, flush=True))
BEFORE
with found.on_sigterm():
    BODY
"""
UNWIND = """
    try:
        print("waiting", flush=True)
        doze()
    finally:
        print("finally", flush=True)
        LAST
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start scripts that install the handler, and wait until they wait."""
    started: list[subprocess.Popen[str]] = []

    def begin(body: str, before: str = "", grace: float = 600) -> subprocess.Popen[str]:
        code = CODE.replace("LIMIT", str(grace)).replace("BEFORE", before).replace("    BODY", body)
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "waiting\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait(60)
        process.stdout.close()


def test_it_unwinds_and_the_exit_code_is_143(start):
    process = start(UNWIND.replace("LAST", "pass"))
    process.terminate()
    assert process.stdout.read() == "SIGTERM\nfinally\n"
    assert process.wait(60) == 143


def test_a_second_one_ends_the_process_at_once(start):
    process = start(UNWIND.replace("LAST", "doze()"))
    process.terminate()
    assert [process.stdout.readline() for _ in range(2)] == ["SIGTERM\n", "finally\n"]
    process.terminate()
    assert process.wait(60) == -signal.SIGTERM


def test_it_ends_after_the_grace_period_and_the_time_for_its_hooks(start):
    process = start(UNWIND.replace("LAST", "doze()"), "found.add(print, 0.1)", grace=0.1)
    process.terminate()
    assert process.wait(60) == -signal.SIGTERM


def test_a_handler_of_the_user_stays(start):
    own = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))"
    for before, body in ((own, UNWIND), ("", f"    {own}\n{UNWIND}")):
        process = start(body.replace("LAST", "pass"), before)
        process.terminate()
        assert (process.stdout.read(), process.wait(60)) == ("finally\n", 9)


def test_a_fork_ends_as_if_there_were_no_handler(start):
    body = """
    # Python forgets a signal that arrives before the fork is complete.
    ready, say = os.pipe()
    child = os.fork()
    if not child:
        os.write(say, b".")
        doze()
    os.read(ready, 1)
    print("waiting", flush=True)
    os.kill(child, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
    process = start(body)
    assert (process.stdout.read(), process.wait(60)) == (f"{-signal.SIGTERM}\n", 0)


def test_outside_the_block_the_default_is_back(start):
    process = start("    pass\nprint('waiting', flush=True)\ndoze()")
    process.terminate()
    assert process.wait(60) == -signal.SIGTERM
