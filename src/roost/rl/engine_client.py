"""Asks engines over HTTP: for a whole answer, or for a stream that is passed on piece by piece.

A connection is kept for the next request. An engine may close one that is idle just when a request goes out on it,
which says nothing about the engine: such a request is sent again, to the same engine, over a new connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from roost.rl.limits import IDLE_SECONDS
from roost.rl.web import aiohttp, authorization

# Less than the 5 s after which common servers close an idle connection.
# A machine that is gone does not say so: the kernel probes the connection while an engine is thinking.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}
_PASSED_ON = ("Content-Type", "Content-Encoding", "Retry-After")
_LARGE_BODY = 65536


class EngineBroken(Exception):  # noqa: N818 - what happened
    """An engine cannot be reached, or the connection broke."""

    def __init__(self, why: str, *, is_sent: bool = True) -> None:
        super().__init__(why)
        self.is_sent = is_sent
        """Whether the engine may have got the request."""


class EngineLate(Exception):  # noqa: N818 - what happened
    """An engine was reached and did not answer in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """What is sent to an engine."""

    method: str = "GET"
    target: str
    """Path and query: `/v1/models?a=b`."""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_repeatable: bool = True
    """Whether it may reach an engine twice, or two engines."""
    takes_stream: bool = False
    """Whether the answer may be a stream; otherwise it is whole."""


class EngineAnswer:
    """What an engine answers: the whole, or the first piece of a stream of which more may come."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes, reply: aiohttp.ClientResponse) -> None:
        self.status = status
        self.headers = dict(headers)
        self.body = body
        self._reply = reply

    @property
    def is_whole(self) -> bool:
        """Whether `body` is all there is."""
        return self._reply.content.at_eof()

    async def read_piece(self, deadline: float) -> bytes:
        """Wait for the next piece of a stream; empty at its end. EngineBroken or EngineLate if it does not come."""
        try:
            async with asyncio.timeout_at(deadline):
                with _broken_explained():
                    return await self._reply.content.readany()
        except TimeoutError:
            raise EngineLate from None

    def close(self) -> None:
        """Let go of the answer; if more of it could come, the connection is closed, and the engine can stop."""
        self._reply.close()


class EngineClient:
    """Sends requests to engines. It belongs to one loop.

    Every request shows the secret, and no redirect is followed: an engine cannot send it elsewhere.
    """

    def __init__(self, secret: str) -> None:
        self._secret = authorization(secret)
        self._unfinished: weakref.WeakSet[aiohttp.ClientResponse] = weakref.WeakSet()

    @cached_property
    def _kept(self) -> aiohttp.ClientSession:
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_reuseconn.append(_note_reuse)
        return _open_session(keepalive_timeout=IDLE_SECONDS, tracing=[tracing])

    @cached_property
    def _new(self) -> aiohttp.ClientSession:
        return _open_session(force_close=True)

    async def send(self, url: str, request: EngineRequest, *, connect: float) -> EngineAnswer:
        """Send a request to an engine; EngineBroken if there is no answer, or only part of one that is not a stream.

        A new connection has `connect` seconds to open; the answer may take any time.
        """
        if not request.is_repeatable:
            return await self._send(self._new, url, request, connect)
        connection = SimpleNamespace(is_reused=False)
        try:
            return await self._send(self._kept, url, request, connect, connection)
        except EngineBroken:
            if not connection.is_reused or self._new.closed:
                raise
        return await self._send(self._new, url, request, connect)

    async def check(self, url: str, seconds: float) -> str:
        """Ask an engine for its health over a new connection; return why it is not healthy, or nothing."""
        try:
            async with asyncio.timeout(seconds):
                answer = await self._send(self._new, url, EngineRequest(target="/health"), seconds)
        except TimeoutError:
            return f"/health had not answered after {seconds:g} s"
        except EngineBroken as broken:
            return str(broken)
        return "" if answer.status == 200 else f"/health answered {answer.status}"

    async def _send(
        self,
        session: aiohttp.ClientSession,
        url: str,
        request: EngineRequest,
        connect: float,
        connection: SimpleNamespace | None = None,
    ) -> EngineAnswer:
        # Without a threshold aiohttp rounds times of more than 5 s up to whole seconds.
        timeout = aiohttp.ClientTimeout(connect=connect, ceil_threshold=math.inf)
        body = request.body
        with _broken_explained(connect):
            reply = await session.request(
                request.method,
                url + request.target,
                data=_in_one_piece(body) if len(body) > _LARGE_BODY else body or None,
                headers={**request.headers, **self._secret, "Content-Length": str(len(body))},
                timeout=timeout,
                allow_redirects=False,
                trace_request_ctx=connection,
            )
            if not reply.content.at_eof():
                self._unfinished.add(reply)
            try:
                headers = {name: reply.headers[name] for name in _PASSED_ON if name in reply.headers}
                is_stream = reply.content_length is None or reply.content_type == "text/event-stream"
                part = reply.content.readany() if is_stream and request.takes_stream else reply.read()
                return EngineAnswer(reply.status, headers, await part, reply)
            except BaseException:
                reply.close()
                raise

    async def close(self) -> None:
        """Break off every request, now and later."""
        for reply in self._unfinished:
            # aiohttp closes the connection under a reader without a word to it.
            reply.content.set_exception(aiohttp.ClientConnectionError("it was broken off"))
        await self._kept.close()
        await self._new.close()


def _open_session(tracing: list[aiohttp.TraceConfig] | None = None, **options: Any) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, socket_factory=_open_socket, **options),
        cookie_jar=aiohttp.DummyCookieJar(),
        trace_configs=tracing,
        # Bodies pass as they are, compressed or not, and an engine sees what the client asked for.
        auto_decompress=False,
        skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
    )


async def _note_reuse(_session: object, context: SimpleNamespace, _params: object) -> None:
    context.trace_request_ctx.is_reused = True


@contextlib.contextmanager
def _broken_explained(connect: float = 0.0) -> Iterator[None]:
    """Turn the errors of a connection into EngineBroken."""
    try:
        yield
    except aiohttp.ClientConnectorError as error:
        raise EngineBroken(f"could not be reached: {error.os_error}", is_sent=False) from None
    except aiohttp.ConnectionTimeoutError:
        raise EngineBroken(f"could not be reached: no connection within {connect:g} s", is_sent=False) from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise EngineBroken(f"the connection broke: {str(error) or type(error).__name__}") from None


async def _in_one_piece(body: bytes) -> AsyncIterator[bytes]:
    # aiohttp warns of large bodies. An engine may also refuse one before it has read all of it: a write in pieces would
    # fail and hide the answer.
    yield body


def _open_socket(address: Any) -> socket.socket:
    line = socket.socket(*address[:3])
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        line.setsockopt(socket.IPPROTO_TCP, option, value)
    return line
