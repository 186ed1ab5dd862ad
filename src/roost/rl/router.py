"""The router in front of the rollout engines: one address, the least busy engine, and the next one if that fails.

`EnginePool` makes every decision and does no I/O; `Router` carries them out over HTTP. A request to generate is safe to
repeat, so the router sends it to another engine if the first one dies or hangs; the client always gets an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import re
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TypeVar

from roost.errors import ClusterError, ConfigError
from roost.rl.engine import url_of
from roost.rl.web import (
    EngineBroken,
    EngineClient,
    EngineLate,
    HttpServer,
    Route,
    ServerLimits,
    check_positive,
    read_json,
    web,
)
from roost.text import plural, shorten

TIMEOUT_HEADER = "X-Roost-Timeout"
"""How many seconds a request may take; the client sends it."""

_ENGINE_HEADER = "X-Roost-Engine"
_NOT_CHECKED = "not checked yet"
_URL = re.compile(r"http://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?\]):([0-9]{1,5})")
_MOST_BROKEN = 3
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """How a router checks its engines, how long requests may take, and who may send them."""

    check_seconds: float = 0.5
    """How long it waits between two checks of an engine."""
    check_timeout: float = 2.0
    """How long an engine may take to answer a check."""
    hang_seconds: float = 10.0
    """After so long without health, the requests at an engine go to another one that is healthy."""
    request_timeout: float = 600.0
    """How long a request may take that does not say so itself, with the header `X-Roost-Timeout`."""
    open_generate: bool = False
    """Whether `POST /generate` and `GET /health` take requests without the secret."""
    limits: ServerLimits = field(default_factory=ServerLimits)

    def __post_init__(self) -> None:
        check_positive(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """What the router knows about an engine."""

    url: str
    healthy: bool = False
    busy: int = 0
    """How many requests it is serving."""
    served: int = 0
    """How many requests it has answered."""
    failed: int = 0
    """How many it has not: it was unreachable, broke the connection, took too long or answered 503."""
    is_leaving: bool = False
    """Whether it only finishes the requests that it has."""
    why: str = _NOT_CHECKED
    """Why it is not healthy; empty if it is."""


class EnginePool:
    """Decides which engine serves next. It asks no engine anything, and belongs to one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._engines: dict[str, EngineState] = {}
        self._clock = clock
        self._ill_since: dict[str, float] = {}
        self._last_picks: dict[str, int] = {}
        self._picks = itertools.count(1)
        self.changed: asyncio.Event = asyncio.Event()
        """Set, and replaced by a new event, when an engine joins, leaves, or turns healthy or unhealthy."""

    def join(self, url: str) -> None:
        """Add an engine; it gets requests once it is marked healthy. A known engine keeps its state."""
        engine = self._engines.setdefault(url, EngineState(url=url))
        if engine.is_leaving:
            # It may be another process at the same address: what is known about the old one says nothing.
            self._engines[url] = replace(engine, is_leaving=False, healthy=False, why=_NOT_CHECKED)
            self._ill_since.pop(url, None)
        self.wake()

    def leave(self, url: str) -> bool:
        """Send an engine no more requests, and forget it after its last one; False if it is unknown."""
        if url not in self._engines:
            return False
        self._update(replace(self._engines[url], is_leaving=True))
        self.wake()
        return True

    def pick(self, excluding: Collection[str] = ()) -> str | None:
        """Return the healthy engine with the fewest requests, or None; ties go to the least recently used.

        The engine counts as serving one more request until `done`.
        """
        if not (able := self._able(excluding)):
            return None
        engine = min(able, key=lambda one: (one.busy, self._last_picks.get(one.url, 0)))
        self._last_picks[engine.url] = next(self._picks)
        self._update(replace(engine, busy=engine.busy + 1))
        return engine.url

    def done(self, url: str, *, served: bool = True) -> None:
        """Count a request that an engine was picked for as finished."""
        engine = self._engines.get(url)
        if engine is None or engine.busy == 0:
            raise ConfigError(f"{url} is serving no request that could be done")
        failed = engine.failed + (not served)
        self._update(replace(engine, busy=engine.busy - 1, served=engine.served + served, failed=failed))

    def mark(self, url: str, healthy: bool, why: str = "") -> None:
        """Record whether an engine can serve, and why not; an engine that has left is ignored."""
        if (engine := self._engines.get(url)) is None:
            return
        self._engines[url] = replace(engine, healthy=healthy, why="" if healthy else why)
        if healthy:
            self._ill_since.pop(url, None)
        else:
            self._ill_since.setdefault(url, self._clock())
        if engine.healthy != healthy:
            self.wake()

    def states(self) -> list[EngineState]:
        """Return all engines, in the order in which they joined."""
        return list(self._engines.values())

    def has_more(self, excluding: Collection[str]) -> bool:
        """Return whether other engines can serve, now or once they are healthy again."""
        return any(not engine.is_leaving and engine.url not in excluding for engine in self._engines.values())

    def ill_seconds(self, url: str) -> float | None:
        """Return for how long an engine has not been healthy; None if it is, or was never checked."""
        return None if (since := self._ill_since.get(url)) is None else self._clock() - since

    def has_able(self, excluding: Collection[str]) -> bool:
        """Return whether another engine can serve now."""
        return bool(self._able(excluding))

    def wake(self) -> None:
        """Wake all tasks that wait for a change."""
        self.changed.set()
        self.changed = asyncio.Event()

    def _able(self, excluding: Collection[str]) -> list[EngineState]:
        engines = self._engines.values()
        return [one for one in engines if one.healthy and not one.is_leaving and one.url not in excluding]

    def _update(self, engine: EngineState) -> None:
        self._engines[engine.url] = engine
        if engine.is_leaving and engine.busy == 0:
            del self._engines[engine.url]
            self._last_picks.pop(engine.url, None)
            self._ill_since.pop(engine.url, None)


def check_engine_url(url: object) -> str:
    """Return the URL if it is `http://host:port`; ConfigError otherwise.

    >>> check_engine_url("http://10.0.0.7:20300")
    'http://10.0.0.7:20300'
    """
    if isinstance(url, str) and (match := _URL.fullmatch(url)) and 1 <= int(match[2]) <= 65535:
        return url
    hint = "it is http://host:port, as in http://10.0.0.7:20300"
    raise ConfigError(f"the url of an engine is {shorten(repr(url))}", hint=hint)


class Router:
    """Forwards requests to the engines that have joined, over HTTP.

    An engine answers `POST /generate`. `GET /health` and `GET /engines` describe the engines, and `POST /engines` and
    `DELETE /engines` with `{"url": ...}` let one join or leave. Requests show the secret, as `Authorization: Bearer
    ...`; the router shows it to the engines too. A router starts only once.
    """

    def __init__(
        self, host: str, port: int, options: RouterOptions | None = None, *, secret: str | None = None
    ) -> None:
        self.url: str = url_of(host, port)
        """Where it listens: `http://10.0.0.7:20300`."""
        self.secret: str = secret or secrets.token_urlsafe(32)
        """What requests have to show; a new one unless it is given."""
        self._options = options or RouterOptions()
        is_open = self._options.open_generate
        routes = {
            ("POST", "/generate"): Route(handler=self._generate, is_open=is_open),
            ("GET", "/health"): Route(handler=self._health, is_open=is_open),
            ("GET", "/engines"): Route(handler=self._engines),
            ("POST", "/engines"): Route(handler=self._change_engines, is_control=True),
            ("DELETE", "/engines"): Route(handler=self._change_engines, is_control=True),
        }
        self._serve = partial(
            HttpServer, host, port, routes, secret=self.secret, name="roost router", limits=self._options.limits
        )
        self._lock = threading.Lock()
        self._server: HttpServer | None = None
        self._is_stopping = False
        # While the server runs, only its loop uses these.
        self._pool = EnginePool()
        self._checks: dict[str, asyncio.Task[None]] = {}
        self._client = EngineClient(self.secret)
        self._is_running = False

    def start(self) -> None:
        """Listen, and check the engines' health; OSError with EADDRINUSE if the port is taken."""
        with self._lock:
            if self._server is not None or self._is_stopping:
                raise ClusterError("a router starts only once", hint="make another one")
            self._server = self._serve(context=self._running())
            self.url = self._server.url

    def stop(self, seconds: float = 5.0) -> None:
        """Give requests at an engine `seconds` to finish, then answer 503 and end. Safe to call again."""
        with self._lock:
            self._is_stopping = True
        if self._server is not None:
            self._server.call(self._pool.wake)
            self._server.close(seconds, self._break_off)

    def join(self, url: str) -> None:
        """Add an engine: the router checks its health immediately, and sends requests once it is healthy."""
        check_engine_url(url)
        self._do(lambda: self._join(url))

    def leave(self, url: str) -> bool:
        """Send an engine no more requests; those that it has finish. False if it is unknown."""
        return self._do(lambda: self._leave(url))

    def states(self) -> list[EngineState]:
        """Return what the router knows about each engine, in the order in which they joined."""
        return self._do(self._pool.states)

    def _do(self, act: Callable[[], Value]) -> Value:
        with self._lock:
            return act() if self._server is None else self._server.call(act)

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        self._is_running = True
        for state in self._pool.states():
            self._join(state.url)
        try:
            yield
        finally:
            await self._break_off()

    async def _break_off(self) -> None:
        """End every check, and every request to an engine as if its connection broke."""
        self._is_running = False
        for task in self._checks.values():
            task.cancel()
        await self._client.close()

    def _join(self, url: str) -> None:
        self._pool.join(url)
        if self._is_running and url not in self._checks:
            self._checks[url] = asyncio.create_task(self._keep_checking(url))

    def _leave(self, url: str) -> bool:
        if (task := self._checks.pop(url, None)) is not None:
            task.cancel()
        return self._pool.leave(url)

    async def _keep_checking(self, url: str) -> None:
        seconds = self._options.check_timeout
        while True:
            try:
                reply = await self._client.ask("GET", f"{url}/health", connect=seconds, seconds=seconds)
                why = "" if reply.status == 200 else f"/health answered {reply.status}"
            except EngineLate:
                why = f"/health had not answered after {seconds:g} s"
            except EngineBroken as error:
                why = str(error)
            self._pool.mark(url, not why, why)
            await asyncio.sleep(self._options.check_seconds)

    async def _generate(self, request: web.Request) -> web.Response:
        seconds = _read_timeout(request.headers.get(TIMEOUT_HEADER), self._options.request_timeout)
        deadline = asyncio.get_running_loop().time() + seconds
        failures: dict[str, str] = {}
        refusing: set[str] = set()
        num_broken = 0
        # A request that breaks one engine after another must not break them all.
        while num_broken < _MOST_BROKEN and (url := await self._pick(refusing, deadline)) is not None:
            is_served = False
            try:
                reply = await self._ask(url, request, refusing, deadline)
                if reply.status != 503:
                    is_served = True
                    reply.headers[_ENGINE_HEADER] = url
                    return reply
                text = reply.body.decode(errors="replace") if isinstance(reply.body, bytes) else ""
                failures[url] = f"answered 503: {shorten(text, 200)}"
                refusing.add(url)
            except EngineLate:
                error = f"engine {url} had not answered after {seconds:g} s"
                headers = {_ENGINE_HEADER: url}
                return web.json_response({"error": error, "engine": url}, status=504, headers=headers)
            except EngineBroken as broken:
                num_broken += 1
                failures[url] = str(broken)
                if not self._is_stopping:
                    self._pool.mark(url, False, str(broken))
            finally:
                self._pool.done(url, served=is_served)
        return self._refusal(failures)

    async def _pick(self, refusing: Collection[str], deadline: float) -> str | None:
        """Pick an engine that has not refused the request; if none is healthy, wait for one until the deadline."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                while not self._is_stopping:
                    changed = self._pool.changed
                    if (url := self._pool.pick(refusing)) is not None:
                        return url
                    if refusing and not self._pool.has_more(refusing):
                        return None
                    await changed.wait()
        return None

    async def _ask(self, url: str, request: web.Request, refusing: Collection[str], deadline: float) -> web.Response:
        """Ask an engine; EngineBroken if it hangs and another one can serve."""
        left = max(0.001, deadline - asyncio.get_running_loop().time())
        # A request with little time must still reach the other engine before its deadline.
        patience = min(self._options.hang_seconds, left / 2)
        connect = min(self._options.check_timeout, left)
        content_type = request.headers.get("Content-Type", "application/json")
        body = await request.read()
        asking = asyncio.create_task(
            self._client.ask("POST", f"{url}/generate", body, content_type, connect=connect, seconds=left)
        )
        hanging = asyncio.create_task(self._wait_until_hung(url, patience, {*refusing, url}))
        try:
            await asyncio.wait({asking, hanging}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
            raise EngineBroken(f"it was not healthy for {patience:g} s, and had not answered")
        finally:
            asking.cancel()
            hanging.cancel()

    async def _wait_until_hung(self, url: str, patience: float, excluding: Collection[str]) -> None:
        """Return once an engine was not healthy for so long and another one is: without one, it may yet answer."""
        while True:
            changed = self._pool.changed
            ill = self._pool.ill_seconds(url)
            is_hung = ill is not None and ill >= patience
            if is_hung and self._pool.has_able(excluding):
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if ill is None or is_hung else patience - ill):
                    await changed.wait()

    def _refusal(self, failures: dict[str, str]) -> web.Response:
        reasons = {one.url: "is leaving" if one.is_leaving else one.why for one in self._pool.states()} | failures
        if self._is_stopping:
            error = "the router is stopping"
        elif reasons:
            error = f"none of {plural(len(reasons), 'engine')} could serve the request"
        else:
            error = "no engine has joined"
        engines = [{"url": url, "why": why or "was not asked"} for url, why in reasons.items()]
        return web.json_response({"error": error, "engines": engines}, status=503)

    async def _health(self, _request: web.Request) -> web.Response:
        states = self._pool.states()
        healthy = sum(state.healthy and not state.is_leaving for state in states)
        return web.json_response({"healthy": healthy, "engines": len(states)}, status=200 if healthy else 503)

    async def _engines(self, _request: web.Request) -> web.Response:
        return web.json_response([asdict(state) for state in self._pool.states()])

    async def _change_engines(self, request: web.Request) -> web.Response:
        asked = await read_json(request)
        if not (isinstance(asked, dict) and "url" in asked):
            raise ConfigError('the body is {"url": "http://host:port"}')
        url = check_engine_url(asked["url"])
        if request.method == "POST":
            self._join(url)
        elif not self._leave(url):
            return web.json_response({"error": f"engine {url} is not known"}, status=404)
        return web.json_response({"url": url})


def _read_timeout(header: str | None, default: float) -> float:
    """Read how long a request may take; ConfigError if the header is not a number of seconds."""
    if header is None:
        return default
    try:
        seconds = float(header)
    except ValueError:
        seconds = math.nan
    if 0 < seconds < math.inf:
        return seconds
    raise ConfigError(f"{TIMEOUT_HEADER} is {shorten(repr(header))}: it is a number of seconds above 0")
