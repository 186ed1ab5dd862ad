"""An HTTP server for the router and for engines: aiohttp in its own thread.

Every check of who may ask what is here. A server binds to one address and takes requests for that address only, none
from another web page, and none without the secret unless their route is open. It proves that it knows the secret to
whoever asks, see `roost_proof`. It bounds connections, times and bytes, and closes connections that have shown no
secret when there are too many. Handlers get requests whose body has arrived, and are cancelled if the client goes away;
every error is JSON as OpenAI's clients expect it; the server ends in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import http
import json
import logging
import math
import re
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from roost.errors import ClusterError, ConfigError
from roost.machine.strangers import Strangers, most_connections
from roost.rl.engine import url_of
from roost.rl.engines.inside import roost_proof
from roost.rl.limits import CUT_SECONDS, PAUSE_SECONDS, SERVER_SECONDS
from roost.text import shorten

try:
    import aiohttp as aiohttp
    from aiohttp import web as web
except ImportError as _error:
    raise ImportError("the router and NumpyEngine need aiohttp: pip install 'roost[rl]'") from _error

_BACKLOG = 1024
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_CODES = {one.value: one.name.lower() for one in http.HTTPStatus} | {401: "invalid_api_key"}
_KINDS = {401: "authentication_error"}
"""Where litellm would take OpenAI's own type, `invalid_request_error`, for a bad request."""

log: logging.Logger = logging.getLogger(__name__)
# aiohttp reports what strangers garble, with tracebacks. The errors of handlers are reported here.
_garbled: logging.Logger = logging.getLogger(f"{__name__}.garbled")
_garbled.setLevel(logging.CRITICAL)
Value = TypeVar("Value")

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
"""Answers a request. The client gets status 400 for a ConfigError, 503 for a ClusterError, 500 for anything else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The function that answers a method and a path, and what a request needs."""

    handler: Handler
    is_open: bool = False
    """Whether requests without the secret are answered too."""
    is_control: bool = False
    """Whether it changes the server: its requests are JSON and say so, which those of a form in a web page cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """How much a server takes from its clients."""

    connections: int = 16_384
    """How many are open at a time, and at most a third of the files that the process may open.

    Connections that have shown no secret make room for newer ones, the oldest first; others wait.
    """
    head_seconds: float = 10.0
    """How long the head of the first request on a connection may take, up to a secret if the request needs one."""
    idle_seconds: float = 60.0
    """After so long without a further request, a connection is closed."""
    body_seconds: float = 60.0
    """How long the body of a request may take."""
    body_bytes: int = 64 * 1024**2
    """The largest body."""
    buffered_bytes: int = 1024**3
    """The bodies of all requests together; further requests wait, at most `body_seconds`."""

    def __post_init__(self) -> None:
        check_positive(self)
        if self.buffered_bytes < self.body_bytes:
            raise ConfigError(f"buffered_bytes is {self.buffered_bytes}: a body may have {self.body_bytes}")


def check_positive(options: Any) -> None:
    """Raise ConfigError if a number among the fields of a dataclass is not above 0."""
    for item in fields(options):
        value = getattr(options, item.name)
        if item.type in ("int", "float") and not (type(value) in (int, float) and 0 < value < math.inf):
            raise ConfigError(f"{item.name} is {value!r}: it is a number above 0")


def error_response(
    status: int, message: str, code: str = "", headers: Mapping[str, str] | None = None, **details: Any
) -> web.Response:
    """Build `{"error": {"message": ..., "type": ..., "code": ...}}`, which OpenAI's clients read; `details` go with it.

    Without a code it is the name of the status, such as `not_found`.
    """
    kind = "server_error" if status >= 500 else _KINDS.get(status, "invalid_request_error")
    error = {"message": message, "type": kind, "code": code or _CODES.get(status, kind), **details}
    return web.json_response({"error": error}, status=status, headers=headers)


async def read_json(request: web.BaseRequest) -> Any:
    """Decode the body; ConfigError if it is not JSON."""
    try:
        return json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the body is not JSON: {error}") from None


def break_off(request: web.BaseRequest) -> None:
    """Close the client's connection in the middle of an answer, which no client can take for the end of it.

    What was written goes out first, if the client reads it at once.
    """
    if (transport := request.transport) is not None:
        transport.close()
        asyncio.get_running_loop().call_later(CUT_SECONDS, transport.abort)


class HttpServer:
    """Serves routes from an event loop in its own thread. It listens as soon as it is made; OSError if it cannot.

    `context` is entered on the loop before the first request and left after the last one.
    """

    def __init__(
        self,
        host: str,
        port: int,
        routes: Mapping[tuple[str, str], Route],
        *,
        secret: str,
        name: str,
        limits: ServerLimits | None = None,
        context: AbstractAsyncContextManager[object] | None = None,
    ) -> None:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._socket = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self._socket.setblocking(False)
        self.url: str = url_of(host, self._socket.getsockname()[1])
        """Where it listens: `http://10.0.0.7:20300`."""
        self._routes = dict(routes)
        """By method and path; `*` in a path stands for anything."""
        self._patterns = [
            (method, re.compile(re.escape(path).replace(r"\*", ".+")), route)
            for (method, path), route in routes.items()
            if "*" in path
        ]
        self._secret = secret
        self._shown_by_all = f"Bearer {secret}".encode()
        self._shown_by: dict[web.RequestHandler, bytes] = {}
        """The word that a client that asked for a proof may show instead of the secret, on this connection only."""
        self._limits = limits or ServerLimits()
        self._context = context or contextlib.nullcontext()
        self._budget = _ByteBudget(self._limits.buffered_bytes)
        # A request to the router has two files: its client's connection and the engine's.
        self._most = most_connections(self._limits.connections, files=2)
        self._strangers = Strangers(self._most)
        self._num_open = 0
        self._timers: dict[web.RequestHandler, asyncio.TimerHandle] = {}
        """When connections close on which no request that could be answered has arrived."""
        self._requests: set[asyncio.Task[Any]] = set()
        self._grace_seconds = 0.0
        self._on_late: Callable[[], Awaitable[None]] | None = None
        self._started: Future[None] = Future()
        self._closing = asyncio.Event()
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._started.result(SERVER_SECONDS)

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is on the server's loop."""
        return threading.get_ident() == self._thread.ident

    def call(self, act: Callable[[], Value]) -> Value:
        """Call a function on the server's loop, from another thread; directly once the loop has ended."""
        done: Future[Value] = Future()

        def run() -> None:
            try:
                done.set_result(act())
            except BaseException as error:
                done.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(run)
        except RuntimeError:
            return act()
        return done.result(SERVER_SECONDS)

    def close(self, seconds: float, on_late: Callable[[], Awaitable[None]] | None = None) -> None:
        """Stop listening, give requests in flight `seconds` to finish, and cut the rest off. Safe to call again.

        `on_late` gets the requests that are late to answer within a second; without it they are cancelled.
        """
        self._grace_seconds, self._on_late = seconds, on_late or self._on_late
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(seconds + SERVER_SECONDS)

    def _run(self) -> None:
        with self._socket, asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._serve())
            except Exception as error:
                if self._started.done():
                    raise
                self._started.set_exception(error)

    async def _serve(self) -> None:
        server = self._make_server()
        async with self._context:
            accepting = asyncio.create_task(self._accept(server))
            self._started.set_result(None)
            await self._closing.wait()
            # A connection that is accepted already is served.
            self._loop.remove_reader(self._socket)
            for _ in range(3):
                await asyncio.sleep(0)
            accepting.cancel()
            self._socket.close()
            server.pre_shutdown()
            late = (await asyncio.wait(self._requests, timeout=self._grace_seconds))[1] if self._requests else ()
            if late and self._on_late is not None:
                await self._on_late()
            elif late:
                for task in self._requests:
                    task.cancel()
            await server.shutdown(CUT_SECONDS)

    async def _accept(self, server: web.Server) -> None:
        """Accept connections, as many as may be open at a time; the kernel keeps the others waiting."""
        while True:
            if self._num_open >= self._most and not self._strangers.close_oldest():
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            try:
                line, _ = await self._loop.sock_accept(self._socket)
                await self._loop.connect_accepted_socket(server, line)
            except OSError as error:
                # The client is gone already, or this process has no file left.
                log.debug("a connection was not accepted: %s", error)
                self._strangers.close_oldest()
                await asyncio.sleep(PAUSE_SECONDS)

    def _make_server(self) -> web.Server:
        """Return aiohttp's server of connections, which notes here when one begins and ends."""
        own = self

        class Server(web.Server):
            def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
                super().connection_made(handler, transport)
                own._num_open += 1
                own._strangers.arrive(handler, transport.abort)
                own._timers[handler] = own._loop.call_later(own._limits.head_seconds, transport.abort)

            def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
                super().connection_lost(handler, exc)
                own._num_open -= 1
                own._strangers.leave(handler)
                own._shown_by.pop(handler, None)
                if (timer := own._timers.pop(handler, None)) is not None:
                    timer.cancel()

        return Server(
            self._respond,
            request_factory=lambda message, payload, connection, writer, task: web.BaseRequest(
                message, payload, connection, writer, task, self._loop, client_max_size=self._limits.body_bytes
            ),
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=self._limits.idle_seconds,
            logger=_garbled,
        )

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
        if (task := asyncio.current_task()) is not None:
            self._requests.add(task)
            task.add_done_callback(self._requests.discard)
        if (request.method, request.path) == ("GET", roost_proof.PATH):
            return self._prove(request)
        if (route := self._routes.get((request.method, request.path))) is None:
            route = self._find_by_pattern(request.method, request.path)
        given = request.headers.get("Authorization", "").encode(errors="replace")
        is_member = hmac.compare_digest(given, self._shown_by.get(request.protocol, self._shown_by_all))
        is_member |= hmac.compare_digest(given, self._shown_by_all)
        # Before any of the body is kept.
        refusal = self._check_source(request)
        if refusal is None and not is_member and not (route is not None and route.is_open):
            refusal = error_response(401, "the request lacks the secret: Authorization: Bearer ...")
            refusal.headers["WWW-Authenticate"] = "Bearer"
        if refusal is not None:
            refusal.force_close()
            return refusal
        self._strangers.leave(request.protocol)
        if (timer := self._timers.pop(request.protocol, None)) is not None:
            timer.cancel()
        try:
            response = await self._respond_by(route, request)
            if not response.prepared and (known := request.headers.get("X-Request-Id")):
                response.headers.setdefault("X-Request-Id", known)
            return response
        finally:
            if not is_member and request.transport is not None:
                self._strangers.arrive(request.protocol, request.transport.abort)

    def _find_by_pattern(self, method: str, path: str) -> Route | None:
        """Return the first route whose pattern this is, if the path can lead nowhere else."""
        if {".", ".."} & {*path.split("/")}:
            return None
        return next((one for its, pattern, one in self._patterns if its == method and pattern.fullmatch(path)), None)

    def _prove(self, request: web.BaseRequest) -> web.Response:
        """Prove to a client that this server knows the secret, and note what the client then proves itself with."""
        nonce, own = request.headers.get(roost_proof.NONCE, ""), roost_proof.new_nonce()
        try:
            proof = roost_proof.prove(self._secret, nonce, own)
        except ValueError as error:
            return error_response(400, str(error))
        self._shown_by[request.protocol] = f"Roost {roost_proof.code_of(self._secret, 'client', own, nonce)}".encode()
        return web.json_response(proof)

    def _check_source(self, request: web.BaseRequest) -> web.Response | None:
        """Refuse a request that is meant for another server, or comes from another server's web page."""
        own = {self.url.removeprefix("http://").lower()}
        if request.transport is not None:
            # The address that the client reached, if it listens on several.
            address, port = request.transport.get_extra_info("sockname")[:2]
            own.add(url_of(address, port).removeprefix("http://"))
            if address in ("127.0.0.1", "::1"):
                own |= {f"{name}:{port}" for name in _LOOPBACK}
        hosts = request.headers.getall("Host", [])
        if len(hosts) != 1 or hosts[0].lower() not in own:
            return error_response(403, f"the request is for {shorten(repr(hosts))}, and this is {self.url}")
        origin = request.headers.get("Origin")
        if origin is not None and origin.lower().removeprefix("http://") not in own:
            return error_response(403, f"the request comes from a web page of {shorten(repr(origin))}")
        return None

    async def _respond_by(self, route: Route | None, request: web.BaseRequest) -> web.StreamResponse:
        """Read the body of a request that may be answered, and let its route answer."""
        limits, length = self._limits, request.content_length
        if route is None:
            return error_response(404, f"there is no {request.method} {request.path}")
        if route.is_control and request.content_type != "application/json":
            return error_response(415, f"the content type is {shorten(request.content_type)}, not application/json")
        if length is not None and length > limits.body_bytes:
            return error_response(413, f"the body has {length} bytes, and {limits.body_bytes} are the most")
        # A body that is compressed or comes in chunks does not say how large it is.
        size = limits.body_bytes if length is None or "Content-Encoding" in request.headers else length
        if not request.can_read_body:
            size = 0
        try:
            await self._budget.take(size, limits.body_seconds)
        except TimeoutError:
            return error_response(503, f"other requests have filled {limits.buffered_bytes} bytes")
        try:
            try:
                async with asyncio.timeout(limits.body_seconds):
                    body = await request.read()
            except web.HTTPRequestEntityTooLarge:
                return error_response(413, f"the body has more than {limits.body_bytes} bytes")
            except (ConnectionError, web.RequestPayloadError) as error:
                return error_response(400, f"the body broke off: {error}")
            except TimeoutError:
                late = error_response(408, f"the body did not arrive within {limits.body_seconds:g} s")
                late.force_close()
                return late
            self._budget.give(size - len(body))
            size = len(body)
            return await route.handler(request)
        except ConfigError as error:
            return error_response(400, str(error))
        except ClusterError as error:
            return error_response(503, str(error))
        except Exception as error:
            log.exception("%s %s failed", request.method, request.path)
            return error_response(500, f"{type(error).__name__}: {error}")
        finally:
            self._budget.give(size)


class _ByteBudget:
    """Bytes that all requests share, for the tasks of one event loop."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._changed = asyncio.Event()

    async def take(self, size: int, seconds: float) -> None:
        """Wait until so many are free, and take them; TimeoutError after some seconds."""
        if size > self._free:
            async with asyncio.timeout(seconds):
                while size > self._free:
                    await self._changed.wait()
        self._free -= size

    def give(self, size: int) -> None:
        """Give some back."""
        self._free += size
        self._changed.set()
        self._changed = asyncio.Event()
