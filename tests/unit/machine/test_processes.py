"""Processes of this machine: found by a mark in their environment, and ended only if they are the same ones."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import psutil

from roost.machine.processes import account, began_after_boot, end_processes, find_processes
from waiting import is_gone

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("on", flush=True)
time.sleep(1000)
"""


def test_a_process_that_ignores_sigterm_is_killed_and_one_of_another_user_is_not_found():
    environment = os.environ | {"ROOST_TEST_CLEAN": "mine"}
    other = {"user": "nobody"} if os.getuid() == 0 else {}
    with (
        subprocess.Popen([sys.executable, "-c", STUBBORN], env=environment, stdout=subprocess.PIPE) as mine,
        subprocess.Popen(["sleep", "1000"], env=environment, **other) as theirs,
    ):
        try:
            assert mine.stdout.readline() == b"on\n"
            found = {item.pid: item for item in find_processes("ROOST_TEST_CLEAN", account())}
            assert set(found) == ({mine.pid} if other else {mine.pid, theirs.pid})
            assert find_processes("ROOST_TEST_CLEAN", "nobody at all") == []
            one = found[mine.pid]
            end_processes([replace(one, since=one.since + 1)], account())
            end_processes([replace(one, environment={"ROOST_TEST_CLEAN": "another"})], account())
            end_processes([one], "nobody at all")
            assert mine.poll() is None
            end_processes([one], account())
            assert is_gone(mine.pid)
            assert theirs.poll() is None
        finally:
            mine.kill()
            theirs.kill()


def test_when_a_process_began_does_not_depend_on_the_clock(monkeypatch):
    before, boot = began_after_boot(), psutil.boot_time()
    assert abs(boot + before - psutil.Process().create_time()) < 1
    # What a step of the clock by an hour changes: the kernel then tells another time of the boot.
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: boot + 3600)
    assert abs(psutil.Process().create_time() - boot - before) > 3000
    assert abs(began_after_boot() - before) < 1
