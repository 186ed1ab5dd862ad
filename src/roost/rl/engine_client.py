"""Asks engines over HTTP: for a whole answer, or for a stream that is passed on piece by piece.

An engine proves on each connection that it knows its secret, before it gets that or a request: whoever has taken the
port of one that died learns nothing, see `roost_proof`. A connection is kept for the next request. An engine may close
one that is idle just when a request goes out on it, which says nothing about the engine: such a request is sent again,
to the same engine, over a new connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from roost.rl.engines.inside import roost_proof
from roost.rl.limits import IDLE_SECONDS
from roost.rl.web import aiohttp

# Less than the 5 s after which common servers close an idle connection.
# A machine that is gone does not say so: the kernel probes the connection while an engine is thinking.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}
_PASSED_ON = ("Content-Type", "Content-Encoding", "Retry-After", "X-Request-Id")
_LARGE_BODY = 65536
_is_reused: ContextVar[bool] = ContextVar("is_reused", default=False)
"""Whether the last request of this task had a connection that was kept."""


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
    """A request to an engine."""

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
    """The answer of an engine: the whole, or the first piece of a stream of which more may come."""

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
    """Sends requests to engines that have proven to be them. It belongs to one loop.

    No redirect is followed: an engine cannot send a request elsewhere.
    """

    def __init__(self) -> None:
        self._secrets: dict[tuple[str, int], str] = {}
        """The secret of each engine that is known, by its host and port."""
        self._unfinished: weakref.WeakSet[aiohttp.ClientResponse] = weakref.WeakSet()
        self._sessions: dict[bool, aiohttp.ClientSession] = {}
        """One whose connections are kept for further requests, and one whose connections are new each time."""
        self._is_closed = False

    def trust(self, url: str, secret: str) -> None:
        """Ask an engine at this address, once it has proven to know this secret."""
        self._secrets[_place(url)] = secret

    def distrust(self, url: str, why: str) -> None:
        """Ask nobody at this address any more, and break off what is being read from there."""
        self._secrets.pop(_place(url), None)
        self._break_off(why, [reply for reply in self._unfinished if _place(reply.url) == _place(url)])

    async def send(self, url: str, request: EngineRequest, *, connect: float) -> EngineAnswer:
        """Send a request to an engine; EngineBroken if there is no answer, or only part of one that is not a stream.

        A new connection has `connect` seconds to open; the answer may take any time.
        """
        if request.is_repeatable:
            _is_reused.set(False)
            try:
                return await self._send(url, request, connect, is_kept=True)
            except EngineBroken:
                if not _is_reused.get() or self._is_closed:
                    raise
        return await self._send(url, request, connect)

    async def check(self, url: str, seconds: float) -> str:
        """Ask an engine for its health over a new connection; return why it is not healthy, or nothing."""
        try:
            async with asyncio.timeout(seconds):
                answer = await self._send(url, EngineRequest(target="/health"), seconds)
        except TimeoutError:
            return f"/health had not answered after {seconds:g} s"
        except EngineBroken as broken:
            return str(broken)
        return "" if answer.status == 200 else f"/health answered {answer.status}"

    async def _send(self, url: str, request: EngineRequest, connect: float, *, is_kept: bool = False) -> EngineAnswer:
        if self._is_closed:
            raise EngineBroken("it was broken off", is_sent=False)
        if (session := self._sessions.get(is_kept)) is None:
            options: dict[str, Any] = {"keepalive_timeout": IDLE_SECONDS} if is_kept else {"force_close": True}
            session = self._sessions[is_kept] = aiohttp.ClientSession(
                connector=_ProvingConnector(self._secrets, limit=0, socket_factory=_open_socket, **options),
                cookie_jar=aiohttp.DummyCookieJar(),
                # Bodies pass as they are, compressed or not, and an engine sees what the client asked for.
                auto_decompress=False,
                skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            )
        # Without a threshold aiohttp rounds times of more than 5 s up to whole seconds.
        timeout = aiohttp.ClientTimeout(connect=connect, ceil_threshold=math.inf)
        body = request.body
        with _broken_explained(connect):
            reply = await session.request(
                request.method,
                url + request.target,
                data=_in_one_piece(body) if len(body) > _LARGE_BODY else body or None,
                headers={**request.headers, "Content-Length": str(len(body))},
                timeout=timeout,
                allow_redirects=False,
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

    def _break_off(self, why: str, replies: Iterable[aiohttp.ClientResponse]) -> None:
        for reply in [*replies]:
            # aiohttp closes the connection under a reader without a word to it.
            reply.content.set_exception(aiohttp.ClientConnectionError(why))

    async def close(self) -> None:
        """Break off every request, now and later."""
        self._break_off("it was broken off", self._unfinished)
        self._is_closed = True
        for session in self._sessions.values():
            await session.close()


class _ProvingConnector(aiohttp.TCPConnector):
    """Lends only connections whose other end has proven to be the engine, and shows it on each that this is the router.

    A request is complete but for that when it asks for a connection, and is sent once it has one.
    """

    def __init__(self, secrets: Mapping[tuple[str, int], str], **options: Any) -> None:
        super().__init__(**options)
        self._secrets = secrets
        self._shown: weakref.WeakKeyDictionary[asyncio.BaseTransport, str] = weakref.WeakKeyDictionary()
        """The word to show on a connection, once the engine has proven itself there."""

    async def connect(self, req: aiohttp.ClientRequest, traces: Any, timeout: aiohttp.ClientTimeout) -> Any:
        """Lend a connection to a request."""
        began = asyncio.get_running_loop().time()
        connection = await super().connect(req, traces, timeout)
        transport = connection.transport
        if transport is None:
            connection.close()
            raise aiohttp.ServerDisconnectedError
        _is_reused.set(transport in self._shown)
        if (shown := self._shown.get(transport)) is None:
            try:
                if (secret := self._secrets.get(_place(req.url))) is None:
                    raise ValueError("it has left")
                async with asyncio.timeout_at(began + (timeout.connect or math.inf)):
                    shown = await _ask_for_proof(transport, req.headers["Host"], secret)
            except BaseException as error:
                connection.close()
                if isinstance(error, TimeoutError):
                    why = f"it did not prove within {timeout.connect:g} s that it is the job's"
                elif isinstance(error, EOFError | asyncio.LimitOverrunError):
                    why = "it did not prove that it is the job's: that is no answer"
                elif isinstance(error, ValueError):
                    why = str(error)
                else:
                    raise
                raise EngineBroken(why, is_sent=False) from None
            self._shown[transport] = shown
        req.headers["Authorization"] = shown
        return connection


class _ProofProtocol(asyncio.StreamReaderProtocol):
    """Reads a proof in the place of aiohttp, which waits for the end of each connection when it closes them."""

    def __init__(self, reader: asyncio.StreamReader, owner: asyncio.BaseProtocol) -> None:
        super().__init__(reader)
        self._owner = owner

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._owner.connection_lost(exc)


async def _ask_for_proof(transport: asyncio.Transport, host: str, secret: str) -> str:
    """Return what may be shown on a new connection; ValueError or EOFError if the other end proves nothing."""
    nonce, owner = roost_proof.new_nonce(), transport.get_protocol()
    # aiohttp reads the answers of its own requests only.
    reader = asyncio.StreamReader(limit=roost_proof.MOST_BYTES)
    transport.set_protocol(_ProofProtocol(reader, owner))
    head = f"GET {roost_proof.PATH} HTTP/1.1\r\nHost: {host}\r\n{roost_proof.NONCE}: {nonce}\r\n\r\n"
    transport.write(head.encode())
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
    version, said, *_ = *first.split(), "", ""
    headers = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    status, length = (int(one) if one.isdecimal() else 0 for one in (said, headers.get("content-length", "")))
    shown = roost_proof.check_proof(
        secret, nonce, status, await reader.readexactly(min(length, roost_proof.MOST_BYTES))
    )
    if version != "http/1.1" or headers.get("connection") == "close" or reader.at_eof():
        raise ValueError(roost_proof.CLOSES)
    transport.set_protocol(owner)
    return shown


def _place(url: object) -> tuple[str, int]:
    parts = urlsplit(str(url))
    return parts.hostname or "", parts.port or 80


@contextlib.contextmanager
def _broken_explained(connect: float = 0.0) -> Iterator[None]:
    """Turn the errors of a connection into EngineBroken."""
    try:
        yield
    except aiohttp.ClientConnectorError as error:
        raise EngineBroken(f"could not be reached: {error.os_error}", is_sent=False) from None
    except aiohttp.ConnectionTimeoutError:
        raise EngineBroken(f"could not be reached: no connection within {connect:g} s", is_sent=False) from None
    except aiohttp.ClientPayloadError:
        raise EngineBroken("the connection broke in the middle of the answer") from None
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
