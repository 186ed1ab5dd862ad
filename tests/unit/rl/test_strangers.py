"""Strangers: on the port of an engine that died, and with thousands of connections that say nothing or nonsense."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import uvicorn

from roost.errors import ClusterError
from roost.rl.engines.inside import roost_proof
from roost.rl.json_request import ask
from roost.rl.web import ServerLimits
from routing import ENGINE_SECRET, LONG, OURS, SECRET, Held, OddEngine, connect, generate, state
from waiting import wait_until

pytestmark = pytest.mark.heavy

PROMPT = {"observations": [[31415.0, 0.0, 0.0, 0.0]]}

# The port of an engine that died

THIEF = """
import socket
import sys
import threading

# Answers 200 to everything, and notes what it gets.
answer = sys.argv[3].encode()
lock = threading.Lock()

def talk(line):
    with line:
        while data := line.recv(1 << 16):
            with lock, open(sys.argv[2], "ab") as notes:
                notes.write(data)
            head = f"HTTP/1.1 200 OK\\r\\nContent-Type: application/json\\r\\nContent-Length: {len(answer)}\\r\\n\\r\\n"
            line.sendall(head.encode() + answer)

with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as server:
    print("listening", flush=True)
    while True:
        threading.Thread(target=talk, args=(server.accept()[0],), daemon=True).start()
"""


class Thief:
    """A process that has taken the port of an engine."""

    def __init__(self, url: str, notes: Path, answer: str) -> None:
        self.notes = notes
        command = [sys.executable, "-c", textwrap.dedent(THIEF), url.rpartition(":")[2], str(notes), answer]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == "listening\n"

    def heard(self) -> str:
        return self.notes.read_text() if self.notes.exists() else ""

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def thief(tmp_path) -> Iterator:
    with contextlib.ExitStack() as stack:

        def take(url: str, answer: str = '{"healthy": true}') -> Thief:
            return stack.enter_context(contextlib.closing(Thief(url, tmp_path / "notes", answer)))

        yield take


ANSWERS = ['{"healthy": true}', "", "[]", '{"proof": "00", "nonce": ""}', '{"proof": null, "nonce": null}']


@pytest.mark.parametrize("answer", ANSWERS)
def test_who_takes_the_port_of_a_dead_engine_gets_no_secret_and_no_prompt(engine, router, thief, answer):
    dead, other = engine(), engine()
    behind = router(dead, other)
    url = dead.url
    assert generate(behind, PROMPT)[0] == 200
    dead.stop(0.0)
    taken = thief(url, answer)
    wait_until(lambda: taken.heard().count("GET /roost/proof") > 3, "the router has checked it")
    assert {generate(behind, PROMPT)[2] for _ in range(6)} == {other.url}
    assert not state(behind, url).healthy
    assert "did not prove that it is the job's" in state(behind, url).why
    other.stop(0.0)
    assert generate(behind, PROMPT, seconds=0.5)[0] == 503
    with pytest.raises(ClusterError, match=r"the engine is not who listens at .* did not prove"):
        ask(url, "/generate", PROMPT, secret=ENGINE_SECRET, timeout=LONG, who="the engine")
    assert {line.partition(":")[0] for line in taken.heard().splitlines()} == {
        "GET /roost/proof HTTP/1.1",
        "Host",
        "X-Roost-Nonce",
        *_FIXED,
    }
    for word in (ENGINE_SECRET, SECRET, "31415", "Authorization"):
        assert word not in taken.heard()


_FIXED = ("Accept-Encoding", "")
"""What http.client sends besides."""


def test_a_proof_is_of_its_own_nonce_and_secret():
    nonce = roost_proof.new_nonce()
    proof = json.dumps(roost_proof.prove(ENGINE_SECRET, nonce)).encode()
    assert roost_proof.check_proof(ENGINE_SECRET, nonce, 200, proof) == f"Bearer {ENGINE_SECRET}"
    for secret, asked, status in [(SECRET, nonce, 200), (ENGINE_SECRET, roost_proof.new_nonce(), 200)]:
        with pytest.raises(ValueError, match="did not prove that it is the job's"):
            roost_proof.check_proof(secret, asked, status, proof)
    with pytest.raises(ValueError, match="it answered 404"):
        roost_proof.check_proof(ENGINE_SECRET, nonce, 404, proof)
    for bad in ("", "x" * 32, "0" * 31, "0" * 129, nonce + "\n"):
        with pytest.raises(ValueError, match="32 to 128 hexadecimal digits"):
            roost_proof.prove(ENGINE_SECRET, bad)


def test_a_connection_that_is_kept_stays_proven_and_a_new_one_proves_again(engine, router):
    lines = []

    def answer(handler):
        lines.append(handler.client_address)
        OddEngine.say(handler, 200, b"{}")

    one = engine(OddEngine(answer))
    behind = router(one, check_seconds=LONG)
    asked = one.proofs
    assert len(asked) == 1, "for the check of its health"
    for _ in range(3):
        assert generate(behind)[0] == 200
    assert (len(set(lines)), asked[1:]) == (1, lines[:1])
    with contextlib.closing(connect(behind.url)) as connection:
        connection.request("POST", "/generate", b"{}", OURS | {"X-Roost-Retry": "no"})
        assert connection.getresponse().status == 200
    assert asked[2:] == [lines[3]], "which is a new one"


@pytest.mark.parametrize("version", ["HTTP/1.0", "HTTP/1.1"])
def test_an_engine_whose_server_keeps_no_connection_is_told_so(engine, router, version):
    def close(handler):
        handler.protocol_version = version
        handler.close_connection = True
        body = json.dumps(roost_proof.prove(ENGINE_SECRET, handler.headers["X-Roost-Nonce"])).encode()
        handler.send_response(200)
        handler.send_header("Connection", "close")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    odd = engine(OddEngine(on_proof=close))
    behind = router(odd, is_waiting=False)
    wait_until(lambda: "has to keep them, as HTTP/1.1 does" in state(behind, odd.url).why, "it is said")
    with pytest.raises(ClusterError, match=r"the engine cannot be asked: .* has to keep them"):
        ask(odd.url, "/generate", PROMPT, secret=ENGINE_SECRET, timeout=LONG, who="the engine")


def test_the_secret_of_an_engine_of_roost_is_on_no_connection(engine, router):
    """What passes between router and engine, as a program between them sees it."""
    one = engine()
    heard: list[bytes] = []
    with between(one, heard) as url:
        behind = router()
        behind.join(url, ENGINE_SECRET)
        wait_until(lambda: state(behind, url).healthy, "it is healthy")
        assert generate(behind, PROMPT)[0] == 200
        assert ask(url, "/generate", PROMPT, secret=ENGINE_SECRET, timeout=LONG, who="the engine")["engine"] == 0
        behind.stop()
    whole = b"".join(heard)
    assert whole.count(b"31415") == 2
    assert ENGINE_SECRET.encode() not in whole
    shown = {line for line in whole.split(b"\r\n") if line.startswith(b"Authorization")}
    assert len(shown) >= 3, "each connection has its own"
    # None of them opens another connection.
    for line in shown:
        with contextlib.closing(connect(one.url)) as connection:
            key = line.partition(b": ")[2].decode()
            connection.request("POST", "/generate", json.dumps(PROMPT), {"Authorization": key})
            assert connection.getresponse().status == 401


@contextlib.contextmanager
def between(engine, heard):
    """Pass on what is sent to an engine, and note it; Host is the engine's, as it expects."""
    target = engine.url.rpartition(":")[2]

    def pump(source, sink, replaced):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                heard.append(data)
                sink.sendall(data.replace(*replaced))
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def relay(line):
        with line, socket.create_connection(("127.0.0.1", int(target))) as other:
            back = threading.Thread(target=pump, args=(other, line, (b"", b"")))
            back.start()
            pump(line, other, (f":{server.getsockname()[1]}\r\n".encode(), f":{target}\r\n".encode()))
            back.join()

    def accept():
        with contextlib.suppress(OSError):
            while True:
                threads.append(threading.Thread(target=relay, args=server.accept()[:1]))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threads = [threading.Thread(target=accept)]
        threads[0].start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        # Wakes the thread that accepts.
        server.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(LONG)


@pytest.fixture
def served() -> Iterator:
    """Serve an application as vLLM and SGLang do, with uvicorn."""
    with contextlib.ExitStack() as stack:

        def serve(app) -> str:
            line = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1))
            thread = threading.Thread(target=server.run, args=([line],))
            thread.start()
            stack.callback(thread.join, LONG)
            stack.callback(setattr, server, "should_exit", True)
            return f"http://127.0.0.1:{line.getsockname()[1]}"

        yield serve


async def whatever(_scope, _receive, send):
    """A server that answers 200 to everything."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"{}"})


def test_what_runs_inside_inference_servers_proves_and_locks(router, served):
    locked, proving = served(roost_proof.Lock(whatever, ENGINE_SECRET)), served(roost_proof.Proof(whatever, "other"))
    behind = router(is_waiting=False)
    behind.join(locked, ENGINE_SECRET)
    behind.join(proving, ENGINE_SECRET)
    wait_until(lambda: state(behind, locked).healthy, "it has proven itself")
    wait_until(lambda: "of another secret" in state(behind, proving).why, "it has not")
    assert generate(behind, PROMPT) == (200, {}, locked)
    with contextlib.closing(connect(locked)) as connection:
        for key, status in (("", 401), ("Bearer other", 401), (f"Bearer {ENGINE_SECRET}", 200)):
            connection.request("GET", "/health", headers={"Authorization": key})
            response = connection.getresponse()
            assert (response.status, bool(response.read())) == (status, True)
        connection.request("GET", roost_proof.PATH, headers={"X-Roost-Nonce": "mine"})
        assert connection.getresponse().status == 400


def test_an_engine_that_has_died_is_not_asked_again_and_its_requests_go_elsewhere(engine, router):
    dead, other = engine(), engine()
    behind = router(dead, other)
    behind.bury(dead.url, "rollout:0 on node 0 died")
    assert {generate(behind)[2] for _ in range(4)} == {other.url}
    assert (state(behind, dead.url).is_dead, state(behind, dead.url).why) == (True, "rollout:0 on node 0 died")
    behind.join(dead.url, ENGINE_SECRET)
    wait_until(lambda: state(behind, dead.url).healthy, "it has joined again")
    assert dead.url in {generate(behind)[2] for _ in range(4)}


# Thousands of connections

SERVER = """
import resource
import sys

from roost.rl.router import Router

resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))
router = Router("127.0.0.1", 0, secret=sys.argv[1])
router.start()
router.join(sys.argv[3], sys.argv[2])
print(router.url, flush=True)
sys.stdin.read()
router.stop()
"""
STRANGER = """
import socket
import sys

# Open connections, and say nothing or nonsense on them.
end = b" HTTP/1.1\\r\\n\\r\\n"
said = [b"", b"G", b"\\x00\\xff" * 500, b"GET /" + end[:-2] + b"X: ", b"GET / HTTP/9" + end[-4:], b"POST /x" + end]
lines = []
for number in range(1000):
    line = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    lines.append(line)
    try:
        line.sendall(said[number % len(said)])
    except OSError:
        pass
print("open", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def running(script, *args):
    """A process that prints a line when it is ready, and ends with its input; its standard error must stay empty."""
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, args)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(command, text=True, env=os.environ | {"PYTHONDEVMODE": ""}, **pipes)
    try:
        yield process
        _, errors = process.communicate(timeout=LONG)
        assert (process.returncode, errors) == (0, "")
    finally:
        process.kill()
        process.communicate()


def test_members_are_served_while_ten_thousand_strangers_are_connected(engine):
    """The process of the router may open 512 files, far fewer than there are connections."""
    with running(SERVER, SECRET, ENGINE_SECRET, engine().url) as server:
        url = server.stdout.readline().strip()
        with contextlib.ExitStack() as stack:
            strangers = [stack.enter_context(running(STRANGER, url.rpartition(":")[2])) for _ in range(10)]
            member = partial(ask, url, "/generate", PROMPT, secret=SECRET, timeout=LONG, who="the router")
            assert [member()["engine"] for _ in range(20)] == [0] * 20, "while they connect"
            assert [one.stdout.readline() for one in strangers] == ["open\n"] * 10
            assert [member()["engine"] for _ in range(20)] == [0] * 20


def test_a_member_keeps_its_connection_while_strangers_come_and_go(engine, router, aside):
    held = engine(Held())
    behind = router(held, limits=ServerLimits(connections=4))
    with contextlib.closing(connect(behind.url)) as connection:
        waiting = aside.submit(generate, behind, PROMPT)
        assert held.asked.wait(LONG)
        connection.request("GET", "/health", headers=OURS)
        assert connection.getresponse().read()
        line = connection.sock
        port = int(behind.url.rpartition(":")[2])
        strangers = [socket.create_connection(("127.0.0.1", port), timeout=LONG) for _ in range(20)]
        assert strangers[0].recv(1) == b"", "the oldest has made room"
        connection.request("GET", "/health", headers=OURS)
        assert connection.getresponse().status == 200
        assert connection.sock is line
        held.go.set()
        assert waiting.result(LONG)[0] == 200
        for one in strangers:
            one.close()


@pytest.mark.parametrize("is_checked", [False, True], ids=["a check", "a request"])
def test_a_router_can_stop_while_an_engine_is_proving_itself(engine, router, aside, is_checked):
    asked, may_go = threading.Event(), threading.Event()

    def hesitate(handler):
        if is_checked and not odd.proofs:
            OddEngine.prove(handler)
            return
        asked.set()
        may_go.wait(LONG)
        handler.close_connection = True

    odd = engine(OddEngine(on_proof=hesitate))
    behind = router(odd, is_waiting=is_checked, check_timeout=LONG, check_seconds=LONG)
    answer = aside.submit(generate, behind, PROMPT) if is_checked else None
    try:
        assert asked.wait(LONG)
        behind.stop(0)
        assert not behind._server._thread.is_alive()
        assert answer is None or answer.result(LONG)[0] == 503
    finally:
        may_go.set()
