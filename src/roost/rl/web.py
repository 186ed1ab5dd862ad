"""An HTTP server for the router and for engines: aiohttp in its own thread.

Every check of who may ask what is here. A server binds to one address and takes requests for that address only, none
from another web page, and none without the job's secret unless their route is open. It bounds connections, times and
bytes. Handlers get requests whose body has arrived, and are cancelled if the client goes away; every error is JSON; the
server ends in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import math
import resource
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from roost.errors import ClusterError, ConfigError
from roost.rl.engine import url_of
from roost.rl.limits import CUT_SECONDS, PAUSE_SECONDS, SERVER_SECONDS
from roost.text import shorten

try:
    import aiohttp as aiohttp
    from aiohttp import web as web
except ImportError as _error:
    raise ImportError("the router and NumpyEngine need aiohttp: pip install 'roost[rl]'") from _error

_BACKLOG = 1024
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")

log: logging.Logger = logging.getLogger(__name__)
Value = TypeVar("Value")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
"""Answers a request. The client gets status 400 for a ConfigError, 503 for a ClusterError, 500 for anything else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What answers a method and a path, and what a request needs."""

    handler: Handler
    is_open: bool = False
    """Whether requests without the secret are answered too."""
    is_control: bool = False
    """Whether it changes the server: its requests are JSON and say so, which those of a form in a web page cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """How much a server takes from its clients."""

    connections: int = 16_384
    """How many are open at a time, and at most a third of the files that the process may open; others wait."""
    head_seconds: float = 10.0
    """How long the head of the first request on a connection may take."""
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


def authorization(secret: str) -> dict[str, str]:
    """Build the header that shows a server the secret."""
    return {"Authorization": f"Bearer {secret}"}


def error_response(status: int, message: str) -> web.Response:
    """Build `{"error": message}`."""
    return web.json_response({"error": message}, status=status)


async def read_json(request: web.Request) -> Any:
    """Decode the body; ConfigError if it is not JSON."""
    try:
        return json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the body is not JSON: {error}") from None


def break_off(request: web.Request) -> None:
    """Close the client's connection in the middle of an answer, which no client can take for the end of it."""
    if request.transport is not None:
        request.transport.abort()


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
        self._secret = authorization(secret)["Authorization"].encode()
        self._limits = limits or ServerLimits()
        self._context = context or contextlib.nullcontext()
        self._budget = _ByteBudget(self._limits.buffered_bytes)
        self._silent: set[web.RequestHandler] = set()
        self._requests: set[asyncio.Task[Any]] = set()
        self._grace_seconds = 0.0
        self._on_late: Callable[[], Awaitable[None]] = self._cancel_requests
        self._started: Future[None] = Future()
        self._closing = asyncio.Event()
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._started.result(SERVER_SECONDS)

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
        app = web.Application(client_max_size=self._limits.body_bytes)
        app.router.add_route("*", "/{path:.*}", self._respond)
        app.on_shutdown.append(self._drain)
        runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=CUT_SECONDS,
            keepalive_timeout=self._limits.idle_seconds,
            handler_cancellation=True,
        )
        async with self._context:
            await runner.setup()
            accepting = asyncio.create_task(self._accept(runner))
            self._started.set_result(None)
            await self._closing.wait()
            # A connection that is accepted already is served.
            self._loop.remove_reader(self._socket)
            for _ in range(3):
                await asyncio.sleep(0)
            accepting.cancel()
            self._socket.close()
            await runner.cleanup()

    async def _accept(self, runner: web.AppRunner) -> None:
        """Accept connections, as many as may be open at a time; the kernel keeps the others waiting."""
        server = runner.server
        most, files = self._limits.connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if files != resource.RLIM_INFINITY:
            # A request to the router has two files: its client's connection and the engine's.
            most = min(most, files // 3)
        while server is not None and not self._closing.is_set():
            if len(server.connections) >= most:
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            try:
                line, _ = await self._loop.sock_accept(self._socket)
                _, connection = await self._loop.connect_accepted_socket(server, line)
            except OSError as error:
                # The client is gone already, or this process has no file left.
                log.debug("a connection was not accepted: %s", error)
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            self._silent.add(connection)
            self._loop.call_later(self._limits.head_seconds, self._close_silent, connection)

    def _close_silent(self, connection: web.RequestHandler) -> None:
        """Close a connection on which no request has arrived."""
        if connection in self._silent:
            self._silent.discard(connection)
            connection.force_close()

    async def _drain(self, _app: web.Application) -> None:
        if self._requests and (await asyncio.wait(self._requests, timeout=self._grace_seconds))[1]:
            await self._on_late()

    async def _cancel_requests(self) -> None:
        for task in self._requests:
            task.cancel()

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        self._silent.discard(request.protocol)
        if (task := asyncio.current_task()) is not None:
            self._requests.add(task)
            task.add_done_callback(self._requests.discard)
        route = self._routes.get((request.method, request.path))
        # Before any of the body is kept.
        if refusal := self._check_source(request) or self._check_secret(request, route):
            refusal.force_close()
            return refusal
        if route is None:
            return error_response(404, f"there is no {request.method} {request.path}")
        if route.is_control and request.content_type != "application/json":
            return error_response(415, f"the content type is {shorten(request.content_type)}, not application/json")
        if (length := request.content_length or 0) > self._limits.body_bytes:
            return error_response(413, f"the body has {length} bytes, and {self._limits.body_bytes} are the most")
        return await self._respond_with_body(request, route.handler)

    def _check_source(self, request: web.Request) -> web.Response | None:
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

    def _check_secret(self, request: web.Request, route: Route | None) -> web.Response | None:
        given = request.headers.get("Authorization", "").encode(errors="replace")
        if (route is not None and route.is_open) or hmac.compare_digest(given, self._secret):
            return None
        refusal = error_response(401, "the request lacks the job's secret: Authorization: Bearer ...")
        refusal.headers["WWW-Authenticate"] = "Bearer"
        return refusal

    async def _respond_with_body(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        limits, length = self._limits, request.content_length
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
            return await handler(request)
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
