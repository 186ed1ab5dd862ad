"""Routers and engines for the tests of both."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest

from roost.rl.engine import EngineSpec
from roost.rl.router import Router, RouterOptions
from roost.testing import NumpyEngine
from routing import ENGINE_SECRET, SECRET, Held, is_healthy
from sockets import free_port
from waiting import wait_until


@pytest.fixture
def engine():
    """Starts engines, and stops them after the test."""
    engines = []

    def started(engine=None):
        engine = engine or NumpyEngine()
        engines.append(engine)
        while isinstance(engine, NumpyEngine) and engine.spec is None:
            spec = EngineSpec(
                engine_rank=len(engines) - 1,
                num_engines=9,
                node_rank=0,
                num_nodes=1,
                cluster_node_rank=0,
                address="127.0.0.1",
                devices=(),
                num_devices=0,
                port=free_port(),
                nccl_port=0,
                dist_init_addr="",
                dp_attention_ports=(),
                secret=ENGINE_SECRET,
            )
            with contextlib.suppress(OSError):
                engine.start(spec)
                engine.url = spec.url
        return engine

    yield started
    for engine in engines:
        if isinstance(engine, Held):
            engine.go.set()
        engine.stop()


@pytest.fixture
def router():
    """Starts routers whose engines are healthy, and stops them after the test."""
    routers = []

    def started(*engines, is_waiting=True, **options):
        router = Router("127.0.0.1", 0, RouterOptions(**{"check_seconds": 0.02, **options}), secret=SECRET)
        routers.append(router)
        router.start()
        for engine in engines:
            router.join(engine.url, ENGINE_SECRET)
        if is_waiting:
            wait_until(lambda: is_healthy(router, *(engine.url for engine in engines)), "all engines are healthy")
        return router

    yield started
    for router in routers:
        router.stop()


@pytest.fixture
def aside():
    """Threads that run next to the test."""
    with ThreadPoolExecutor(max_workers=32) as pool:
        yield pool


STREAMING = """
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from roost.rl.engines.inside.roost_proof import NONCE, PATH, prove

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        body = json.dumps(prove(sys.argv[1], self.headers[NONCE]) if self.path == PATH else {}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.wfile.write(sys.argv[2].encode())
        self.rfile.read()

    def log_message(self, *args):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.fixture
def begin_streams():
    """Starts engines in processes of their own, which begin each answer as they are told, and never end it."""
    with contextlib.ExitStack() as stack:

        def started(answer):
            command = [sys.executable, "-c", textwrap.dedent(STREAMING), ENGINE_SECRET, answer]
            running = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(running.kill)
            running.url = f"http://127.0.0.1:{int(running.stdout.readline())}"
            return running

        yield started
