"""A small HTTP/1.1 server for what runs inside a worker's process: routes are functions, errors are JSON.

It binds to exactly one address, answers every request that it took, and ends in bounded time with all its threads.
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from roost.errors import ClusterError, ConfigError

MOST_BODY_BYTES = 64 * 1024 * 1024
"""A request with more is refused before it is read."""

_JSON = "application/json"
_IDLE_SECONDS = 600.0
_DRAIN_SECONDS = 5.0
_CUT_SECONDS = 1.0
_ACCEPT_PAUSE_SECONDS = 0.1
_OUT_OF_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_WITHOUT_BODY = (204, 304)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a client asks, read to its end."""

    method: str
    path: str
    """Without what follows a question mark."""
    body: bytes
    content_type: str

    def json(self) -> Any:
        """The body, read; ConfigError where it is no JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the body is no JSON: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the client is told."""

    status: int
    body: bytes
    content_type: str = _JSON
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, value: object, status: int = 200, headers: tuple[tuple[str, str], ...] = ()) -> Answer:
        """A value as JSON."""
        return cls(status=status, body=json.dumps(value, allow_nan=False).encode(), headers=headers)

    @classmethod
    def error(cls, status: int, message: str) -> Answer:
        """`{"error": message}`."""
        return cls.of({"error": message}, status)


Route = Callable[[Request], Answer]
"""Answers a request; a ConfigError in it is 400 for the client, a ClusterError 503."""


def url_of(host: str, port: int) -> str:
    """`http://10.0.0.7:20300`, with an IPv6 address in brackets.

    >>> url_of("::1", 20300)
    'http://[::1]:20300'
    """
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class HttpServer(ThreadingHTTPServer):
    """Serves routes, each connection in a thread of its own; the port is taken when it is made."""

    daemon_threads = True
    # A port whose last connections only linger can be had again, but never one where another server listens.
    allow_reuse_address = True
    allow_reuse_port = False
    # Clients come all at once: with the usual 5 places, the rest would wait a second and more to connect.
    request_queue_size = 1024

    def __init__(
        self,
        host: str,
        port: int,
        routes: Mapping[tuple[str, str], Route],
        *,
        name: str,
        most_body_bytes: int = MOST_BODY_BYTES,
    ) -> None:
        self.host = host
        self.routes = dict(routes)
        self.most_body_bytes = most_body_bytes
        self.is_ending = threading.Event()
        self._name = name
        self._lock = threading.Lock()
        self._connections: dict[Any, threading.Thread] = {}
        self._thread = threading.Thread(target=self._listen, name=name, daemon=True)
        self._is_listening = False
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """Where it is: `http://10.0.0.7:20300`."""
        return url_of(self.host, self.server_port)

    def start(self) -> None:
        """Take connections from now on."""
        self._thread.start()
        self._is_listening = True

    def finish(self, seconds: float) -> bool:
        """Take no more requests, and give those that run so long to end; tells whether all did."""
        deadline = time.monotonic() + seconds
        self.is_ending.set()
        if self._is_listening:
            self._is_listening = False
            # Wakes the thread that waits for connections, which would look for the end only now and then.
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
            self.shutdown()
            self._thread.join()
        self.server_close()
        # Who waits for the next request reads the end; who serves one can still write the answer.
        return self._join(self._shut(socket.SHUT_RD), deadline)

    def cut(self) -> bool:
        """Break every connection off; tells whether their threads ended in the second that they have for it."""
        return self._join(self._shut(socket.SHUT_RDWR), time.monotonic() + _CUT_SECONDS)

    def server_bind(self) -> None:
        """Bind to the address, and to nothing else."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        # Not HTTPServer's: it asks the name service for this machine's full name, which can take seconds.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.host, self.server_address[1]

    def get_request(self) -> tuple[Any, Any]:
        """The next connection."""
        try:
            return super().get_request()
        except OSError as error:
            # The connection stays where it is and would be tried again at once, for ever.
            if error.errno in _OUT_OF_ROOM:
                self.is_ending.wait(_ACCEPT_PAUSE_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread that `finish` and `cut` know of."""
        thread = threading.Thread(
            target=self.process_request_thread,
            args=(request, client_address),
            name=f"{self._name} connection",
            daemon=True,
        )
        with self._lock:
            self._connections[request] = thread
        thread.start()

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Show a mistake in a route; that a client goes away is none."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def _listen(self) -> None:
        # `finish` wakes it: no need to look for the end in between.
        HTTPServer.serve_forever(self, poll_interval=_IDLE_SECONDS)

    def _shut(self, how: int) -> list[threading.Thread]:
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(how)
            return list(self._connections.values())

    @staticmethod
    def _join(threads: list[threading.Thread], deadline: float) -> bool:
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)


class _Refused(Exception):  # noqa: N818 - what happened
    """A request whose body is not read."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.answer = Answer.error(status, message)


class _Handler(BaseHTTPRequestHandler):
    """One connection: requests one after the other, each answered with what its route says."""

    protocol_version = "HTTP/1.1"
    # Of a request whose version cannot be read; with http.server's own, 0.9, the answer would have no status.
    default_request_version = "HTTP/1.0"
    server_version = "roost"
    sys_version = ""
    disable_nagle_algorithm = True
    timeout = _IDLE_SECONDS
    server: HttpServer

    def _serve(self) -> None:
        try:
            body = self._body()
        except _Refused as refused:
            self.close_connection = True
            self._send(refused.answer)
            self._drain()
            return
        request = Request(
            method=self.command,
            path=self.path.partition("?")[0],
            body=body,
            content_type=" ".join(self.headers.get("Content-Type", _JSON).split()),
        )
        self._send(self._answer(request))

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _serve  # noqa: N815 - http.server's names

    def _answer(self, request: Request) -> Answer:
        route = self.server.routes.get((request.method, request.path))
        if route is None:
            return Answer.error(404, f"there is no {request.method} {request.path}")
        try:
            return route(request)
        except ConfigError as error:
            return Answer.error(400, str(error))
        except ClusterError as error:
            return Answer.error(503, str(error))
        except Exception as error:
            self.server.handle_error(self.request, self.client_address)
            return Answer.error(500, f"{type(error).__name__}: {error}")

    def _body(self) -> bytes:
        if "Transfer-Encoding" in self.headers:
            raise _Refused(411, "the body's length is not said: send it with Content-Length, not in chunks")
        text = self.headers.get("Content-Length", "0").strip()
        if not (text.isascii() and text.isdigit()):
            raise _Refused(400, f"Content-Length is {text!r}: it is a number of bytes")
        # A number with thousands of digits cannot even be read.
        length = int(text) if len(text) < 20 else self.server.most_body_bytes + 1
        if length > self.server.most_body_bytes:
            raise _Refused(413, f"the body has {text[:20]} bytes, and {self.server.most_body_bytes} are the most")
        try:
            body = self.rfile.read(length)
        except TimeoutError:
            raise _Refused(408, "the body did not come") from None
        if len(body) < length:
            raise ConnectionAbortedError("the client went away in the middle of its request")
        return body

    def _send(self, answer: Answer) -> None:
        has_body = answer.status not in _WITHOUT_BODY
        self.send_response(answer.status)
        for name, value in answer.headers:
            self.send_header(name, value)
        if has_body:
            self.send_header("Content-Type", " ".join(answer.content_type.split()))
            self.send_header("Content-Length", str(len(answer.body)))
        if self.close_connection or self.server.is_ending.is_set():
            self.send_header("Connection", "close")
        self.end_headers()
        if has_body and self.command != "HEAD":
            self.wfile.write(answer.body)

    def _drain(self) -> None:
        """Read on what the client still sends: closed before that, the connection is reset and the answer lost."""
        deadline = time.monotonic() + _DRAIN_SECONDS
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(_DRAIN_SECONDS)
            while time.monotonic() < deadline and self.connection.recv(65536):
                pass

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What http.server itself refuses, as JSON too."""
        self.close_connection = True
        self._send(Answer.error(code, explain or message or self.responses.get(code, ("refused", ""))[0]))

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        """Nothing: requests are many."""
