"""Requests to a router, and engines behind it that do what a test wants."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from roost.rl.engines.inside import roost_proof
from roost.testing import NumpyEngine

LONG = 60.0
REQUEST = {"observations": [[1.0, 0.0, -1.0, 0.5]], "seed": 1}
SECRET = "the job's own"  # noqa: S105 - of the tests
ENGINE_SECRET = "the engine's own"  # noqa: S105 - likewise
OURS = {"Authorization": f"Bearer {SECRET}", "Content-Type": "application/json"}


def connect(url):
    host, _, port = url.removeprefix("http://").rpartition(":")
    return http.client.HTTPConnection(host.strip("[]"), int(port), timeout=LONG)


def exchange(connection, method, path, body=None, headers=OURS):
    connection.request(method, path, body if isinstance(body, bytes | None) else json.dumps(body), headers)
    response = connection.getresponse()
    return response, response.read()


def ask(url, method, path, body=None, headers=OURS):
    with contextlib.closing(connect(url)) as connection:
        response, read = exchange(connection, method, path, body, headers)
        return response.status, json.loads(read)


def said(answer):
    """What an answer says went wrong, in the form that OpenAI's clients expect."""
    assert {"message", "type", "code"} <= set(answer["error"])
    return answer["error"]["message"]


def generate(router, body=REQUEST, seconds=LONG):
    """The status, the answer, and the engine that gave it."""
    with contextlib.closing(connect(router.url)) as connection:
        headers = OURS | {"X-Roost-Timeout": str(seconds)}
        response, read = exchange(connection, "POST", "/generate", body, headers)
        return response.status, json.loads(read), response.getheader("X-Roost-Engine")


def begin(url, rest=b""):
    """Send a request to generate as far as its secret, then the rest as it is, and return the open connection."""
    line = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=LONG)
    head = f"POST /generate HTTP/1.1\r\nHost: {url.removeprefix('http://')}\r\nAuthorization: Bearer {SECRET}\r\n"
    line.sendall(head.encode() + rest)
    return line


def state(router, url):
    return next((state for state in router.states() if state.url == url), None)


def is_healthy(router, *urls):
    return all(one is not None and one.healthy for one in (state(router, url) for url in urls))


class Held(NumpyEngine):
    """An engine that answers once a test allows it."""

    def __init__(self):
        super().__init__()
        self.asked, self.go = threading.Event(), threading.Event()

    def generate(self, request):
        answer = super().generate(request)
        self.asked.set()
        assert self.go.wait(LONG)
        return answer


class OddEngine:
    """A server that proves to be the engine, and answers requests and health checks as a test wants."""

    def __init__(self, on_generate=None, on_health=None, is_reading=True, on_proof=None):
        proofs = self.proofs = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            body = b""

            def do_GET(self):
                is_proof = self.path == roost_proof.PATH
                (on_proof or OddEngine.prove if is_proof else on_health or OddEngine.well)(self)
                if is_proof:
                    proofs.append(self.client_address)

            def do_POST(self):
                if is_reading:
                    self.body = self.rfile.read(int(self.headers["Content-Length"]))
                on_generate(self)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.handle_error = lambda *_: None
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()

    @staticmethod
    def well(handler):
        OddEngine.say(handler, 200, b"well")

    @staticmethod
    def prove(handler):
        proof = roost_proof.prove(ENGINE_SECRET, handler.headers[roost_proof.NONCE])
        OddEngine.say(handler, 200, json.dumps(proof).encode())

    @staticmethod
    def say(handler, status, body, content_type="text/plain"):
        handler.send_response(status)
        handler.send_header("Content-Type", content_type)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def stop(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def break_at_once(handler):
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)
