"""Ctrl-C reaches the tests and the processes they start, even in a background job whose shell ignored it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from waiting import press_ctrl_c

ROOT = Path(__file__).resolve().parents[2]


def test_an_interrupt_reaches_the_test_and_the_processes_that_it_starts():
    timer = threading.Timer(0.05, press_ctrl_c)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        time.sleep(60)
    timer.join()
    code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n"


def test_a_run_that_was_started_with_interrupts_ignored_receives_them():
    test = f"{__file__}::{test_an_interrupt_reaches_the_test_and_the_processes_that_it_starts.__name__}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", test]
    done = subprocess.run(
        ["/bin/sh", "-c", 'trap "" INT; exec "$@"', "sh", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout[:1]) == (0, "."), done.stdout + done.stderr
