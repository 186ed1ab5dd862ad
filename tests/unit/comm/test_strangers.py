"""Whoever connects to a member without the job's secret: many at once, silent or with nonsense, while members talk."""

from __future__ import annotations

import contextlib
import itertools
import resource
import secrets
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from echoing import make_member, read

pytestmark = pytest.mark.heavy

FILES = 400
"""How many files the member may have open."""
# A proof and a number of 32 bytes each, and how long the greeting is that never comes.
GARBLED = (
    b"",
    b"x",
    secrets.token_bytes(64),
    bytes(64) + struct.pack("<I", 4096),
    bytes(64) + b"\xff" * 4,
    b"GET /\r\n",
)


def connect(listing, number):
    """Connect by the network or on the node, and say nothing or nonsense."""
    if number % 2:
        sock = socket.socket()
        target = listing.host, listing.port
    else:
        sock = socket.socket(socket.AF_UNIX)
        target = listing.local_name
    sock.setblocking(False)
    # What is in the queue of the kernel counts as well, and one that is refused has tried.
    with contextlib.suppress(OSError):
        sock.connect(target)
    with contextlib.suppress(OSError):
        sock.send(GARBLED[number % len(GARBLED)])
    return sock


@pytest.mark.parametrize("count", [800, pytest.param(10_000, marks=pytest.mark.soak)])
def test_members_are_served_while_strangers_hold_connections_open(count, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < count + 1000:
        pytest.skip(f"this process may open {hard} files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count + 1000), hard))
    script = Path(__file__).parents[2] / "echoing.py"
    with (tmp_path / "stderr").open("w+") as stderr, contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        child = stack.enter_context(
            subprocess.Popen([sys.executable, script, str(FILES)], stdout=subprocess.PIPE, stderr=stderr, text=True)
        )
        stack.callback(child.kill)
        listing = read(child.stdout.readline())

        def member(address, node):
            messages, directory = make_member(address, node, None)
            stack.callback(messages.endpoint.close)
            directory.announce(listing)
            return messages

        def ask(messages, thing):
            messages.send(thing, "b:0")
            return messages.wait_for_next("b:0", None, None, 60)

        old = [member("near:0", 0), member("far:0", 1)]
        assert [ask(one, "before") for one in old] == ["before"] * 2
        over = threading.Event()
        held = []

        def flood():
            for number in range(count):
                held.append(stack.enter_context(connect(listing, number)))
            # All of them stay open at this end, and new ones take the place of the oldest.
            for place in itertools.cycle(range(count)):
                if over.is_set():
                    return
                held[place].close()
                held[place] = stack.enter_context(connect(listing, place))

        flooding = threading.Thread(target=flood)
        flooding.start()
        try:
            for number in range(100):
                assert [ask(one, number) for one in old] == [number] * 2
            for number in range(10):
                # One that connects now is not taken for one of them.
                assert ask(member(f"new:{number}", number % 2), number) == number
            while len(held) < count:
                assert ask(old[0], "meanwhile") == "meanwhile"
            assert ask(old[0], "files") < FILES // 2
        finally:
            over.set()
            flooding.join()
        old[0].send("end", "b:0")
        assert child.wait(60) == 0
        stderr.seek(0)
        assert stderr.read() == ""
