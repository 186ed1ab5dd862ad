"""HTTP for the router and for engines: an aiohttp server in its own thread, and a client that asks engines.

Handlers get requests whose body has arrived; every error is JSON; the server binds to one address and ends in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from functools import cached_property
from typing import Any, TypeVar

from roost.errors import ClusterError, ConfigError
from roost.rl.engine import url_of

try:
    import aiohttp
    from aiohttp import web as web
except ImportError as _error:
    raise ImportError("the router and NumpyEngine need aiohttp: pip install 'roost[rl]'") from _error

MOST_BODY_BYTES = 64 * 1024 * 1024
"""The server refuses a request with a larger body."""

_BACKLOG = 1024
_BODY_SECONDS = 600.0
_CALL_SECONDS = 30.0
_CUT_SECONDS = 1.0
# A machine that is gone does not say so: the kernel probes the connection while an engine is thinking.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}

log: logging.Logger = logging.getLogger(__name__)
Value = TypeVar("Value")

Handler = Callable[[web.Request], Awaitable[web.Response]]
"""Answers a request. The client gets status 400 for a ConfigError, 503 for a ClusterError, 500 for anything else."""


def error_response(status: int, message: str) -> web.Response:
    """Build `{"error": message}`."""
    return web.json_response({"error": message}, status=status)


async def read_json(request: web.Request) -> Any:
    """Decode the body; ConfigError if it is not JSON."""
    try:
        return json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the body is not JSON: {error}") from None


class HttpServer:
    """Serves routes from an event loop in its own thread. It listens as soon as it is made; OSError if it cannot.

    `context` is entered on the loop before the first request and left after the last one.
    """

    def __init__(
        self,
        host: str,
        port: int,
        routes: Mapping[tuple[str, str], Handler],
        *,
        name: str,
        most_body_bytes: int = MOST_BODY_BYTES,
        context: AbstractAsyncContextManager[object] | None = None,
    ) -> None:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._socket = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self.url: str = url_of(host, self._socket.getsockname()[1])
        """Where it listens: `http://10.0.0.7:20300`."""
        self._routes = dict(routes)
        self._most_body_bytes = most_body_bytes
        self._context = context or contextlib.nullcontext()
        self._requests: set[asyncio.Task[Any]] = set()
        self._grace_seconds = 0.0
        self._on_late: Callable[[], Awaitable[None]] = self._cancel_requests
        self._started: Future[None] = Future()
        self._closing = asyncio.Event()
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._started.result(_CALL_SECONDS)

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
        return done.result(_CALL_SECONDS)

    def close(self, seconds: float, on_late: Callable[[], Awaitable[None]] | None = None) -> None:
        """Stop listening, give requests in flight `seconds` to finish, and cut the rest off. Safe to call again.

        `on_late` gets the requests that are late to answer within a second; without it they are cancelled.
        """
        self._grace_seconds, self._on_late = seconds, on_late or self._on_late
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(seconds + _CALL_SECONDS)

    def _run(self) -> None:
        with self._socket, asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._serve())
            except Exception as error:
                if self._started.done():
                    raise
                self._started.set_exception(error)

    async def _serve(self) -> None:
        app = web.Application(client_max_size=self._most_body_bytes)
        app.router.add_route("*", "/{path:.*}", self._respond)
        app.on_shutdown.append(self._drain)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=_CUT_SECONDS)
        async with self._context:
            await runner.setup()
            await web.SockSite(runner, self._socket, backlog=_BACKLOG).start()
            self._started.set_result(None)
            await self._closing.wait()
            # asyncio hands a new connection over in two rounds; one that it is handing over would leak.
            self._loop.remove_reader(self._socket)
            for _ in range(3):
                await asyncio.sleep(0)
            await runner.cleanup()

    async def _drain(self, _app: web.Application) -> None:
        if self._requests and (await asyncio.wait(self._requests, timeout=self._grace_seconds))[1]:
            await self._on_late()

    async def _cancel_requests(self) -> None:
        for task in self._requests:
            task.cancel()

    async def _respond(self, request: web.Request) -> web.Response:
        if (task := asyncio.current_task()) is not None:
            self._requests.add(task)
            task.add_done_callback(self._requests.discard)
        handler = self._routes.get((request.method, request.path))
        if handler is None:
            return error_response(404, f"there is no {request.method} {request.path}")
        if (length := request.content_length or 0) > self._most_body_bytes:
            return error_response(413, f"the body has {length} bytes, and {self._most_body_bytes} are the most")
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                await request.read()
        except web.HTTPRequestEntityTooLarge:
            return error_response(413, f"the body has more than {self._most_body_bytes} bytes")
        except (ConnectionError, web.RequestPayloadError) as error:
            return error_response(400, f"the body broke off: {error}")
        except TimeoutError:
            return error_response(408, f"the body did not arrive within {_BODY_SECONDS:g} s")
        try:
            return await handler(request)
        except ConfigError as error:
            return error_response(400, str(error))
        except ClusterError as error:
            return error_response(503, str(error))
        except Exception as error:
            log.exception("%s %s failed", request.method, request.path)
            return error_response(500, f"{type(error).__name__}: {error}")


class EngineBroken(Exception):  # noqa: N818 - what happened
    """An engine cannot be reached, or the connection broke."""


class EngineLate(Exception):  # noqa: N818 - what happened
    """An engine was reached and did not answer in time."""


class EngineClient:
    """Asks engines, each time over a new connection, since one that was kept may be dead. It belongs to one loop."""

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_open_socket)
        return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())

    async def ask(
        self, method: str, url: str, body: bytes = b"", content_type: str = "", *, connect: float, seconds: float
    ) -> web.Response:
        """Send a request to an engine and return its whole answer; EngineBroken or EngineLate if there is none."""
        headers = {"Content-Length": str(len(body))} | ({"Content-Type": content_type} if content_type else {})
        try:
            async with self._session.request(
                method,
                url,
                data=_in_one_piece(body) if body else None,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=seconds, connect=connect),
                allow_redirects=False,
            ) as reply:
                answered = {"Content-Type": reply.headers.get("Content-Type", "application/octet-stream")}
                return web.Response(status=reply.status, body=await reply.read(), headers=answered)
        except aiohttp.ClientConnectorError as error:
            raise EngineBroken(f"could not be reached: {error.os_error}") from None
        except aiohttp.ConnectionTimeoutError:
            raise EngineBroken(f"could not be reached: no connection within {connect:g} s") from None
        except TimeoutError:
            raise EngineLate from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EngineBroken(f"the connection broke: {str(error) or type(error).__name__}") from None

    async def close(self) -> None:
        """Break off every request, now and later."""
        await self._session.close()


async def _in_one_piece(body: bytes) -> AsyncIterator[bytes]:
    # An engine may refuse a body before it has read all of it: a write in pieces would fail and hide the answer.
    yield body


def _open_socket(address: Any) -> socket.socket:
    line = socket.socket(*address[:3])
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        line.setsockopt(socket.IPPROTO_TCP, option, value)
    return line
