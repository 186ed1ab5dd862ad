"""The router in front of the rollout engines: one address, the least busy engine, and the next one if that fails.

`EnginePool` makes every decision and does no I/O; `Router` carries them out over HTTP. A request to generate is safe to
repeat, so the router sends it to another engine if the first one dies; the client always gets an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import threading
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TypeVar

from roost.errors import ClusterError, ConfigError
from roost.rl.engine import url_of
from roost.rl.web import MOST_BODY_BYTES, EngineBroken, EngineClient, EngineLate, HttpServer, read_json, web
from roost.text import plural, shorten

_ENGINE_HEADER = "X-Roost-Engine"
_NOT_CHECKED = "not checked yet"
_URL = re.compile(r"http://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?\]):([0-9]{1,5})")
_MOST_BROKEN = 3
Value = TypeVar("Value")


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

    def __init__(self) -> None:
        self._engines: dict[str, EngineState] = {}
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
        engines = self._engines.values()
        able = [one for one in engines if one.healthy and not one.is_leaving and one.url not in excluding]
        if not able:
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
        if engine.healthy != healthy:
            self.wake()

    def states(self) -> list[EngineState]:
        """Return all engines, in the order in which they joined."""
        return list(self._engines.values())

    def has_more(self, excluding: Collection[str]) -> bool:
        """Return whether other engines can serve, now or once they are healthy again."""
        return any(not engine.is_leaving and engine.url not in excluding for engine in self._engines.values())

    def wake(self) -> None:
        """Wake all tasks that wait for a change."""
        self.changed.set()
        self.changed = asyncio.Event()

    def _update(self, engine: EngineState) -> None:
        self._engines[engine.url] = engine
        if engine.is_leaving and engine.busy == 0:
            del self._engines[engine.url]
            self._last_picks.pop(engine.url, None)


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
    `DELETE /engines` with `{"url": ...}` let one join or leave. A router starts only once.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        check_seconds: float = 0.5,
        health_timeout: float = 2.0,
        request_timeout: float = 600.0,
        wait_seconds: float = 5.0,
        most_body_bytes: int = MOST_BODY_BYTES,
    ) -> None:
        self.url: str = url_of(host, port)
        """Where it listens: `http://10.0.0.7:20300`."""
        routes = {
            ("POST", "/generate"): self._generate,
            ("GET", "/health"): self._health,
            ("GET", "/engines"): self._engines,
            ("POST", "/engines"): self._change_engines,
            ("DELETE", "/engines"): self._change_engines,
        }
        self._serve = partial(HttpServer, host, port, routes, name="roost router", most_body_bytes=most_body_bytes)
        self._check_seconds = check_seconds
        self._health_timeout = health_timeout
        self._request_timeout = request_timeout
        self._wait_seconds = wait_seconds
        self._lock = threading.Lock()
        self._server: HttpServer | None = None
        self._is_stopping = False
        # While the server runs, only its loop uses these.
        self._pool = EnginePool()
        self._checks: dict[str, asyncio.Task[None]] = {}
        self._client = EngineClient()
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
        seconds = self._health_timeout
        while True:
            try:
                reply = await self._client.ask("GET", f"{url}/health", connect=seconds, seconds=seconds)
                why = "" if reply.status == 200 else f"/health answered {reply.status}"
            except EngineLate:
                why = f"/health had not answered after {seconds:g} s"
            except EngineBroken as error:
                why = str(error)
            self._pool.mark(url, not why, why)
            await asyncio.sleep(self._check_seconds)

    async def _generate(self, request: web.Request) -> web.Response:
        tried: dict[str, str] = {}
        num_broken = 0
        body, content_type = await request.read(), request.headers.get("Content-Type", "application/json")
        limits = {"connect": self._health_timeout, "seconds": self._request_timeout}
        # A request that breaks one engine after another must not break them all.
        while num_broken < _MOST_BROKEN and (url := await self._pick(tried)) is not None:
            is_served = False
            try:
                reply = await self._client.ask("POST", f"{url}/generate", body, content_type, **limits)
                if reply.status != 503:
                    is_served = True
                    reply.headers[_ENGINE_HEADER] = url
                    return reply
                text = reply.body.decode(errors="replace") if isinstance(reply.body, bytes) else ""
                tried[url] = f"answered 503: {shorten(text, 200)}"
            except EngineLate:
                # It may still be working on it: asking another one would only double the work.
                error = f"engine {url} had not answered after {self._request_timeout:g} s"
                headers = {_ENGINE_HEADER: url}
                return web.json_response({"error": error, "engine": url}, status=504, headers=headers)
            except EngineBroken as broken:
                num_broken += 1
                tried[url] = str(broken)
                if not self._is_stopping:
                    self._pool.mark(url, False, str(broken))
            finally:
                self._pool.done(url, served=is_served)
        return self._refusal(tried)

    async def _pick(self, tried: Mapping[str, str]) -> str | None:
        """Pick an engine that was not tried, waiting for one if none is healthy."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._wait_seconds):
                while not self._is_stopping:
                    changed = self._pool.changed
                    if (url := self._pool.pick(tried)) is not None:
                        return url
                    if tried and not self._pool.has_more(tried):
                        return None
                    await changed.wait()
        return None

    def _refusal(self, tried: dict[str, str]) -> web.Response:
        reasons = {one.url: "is leaving" if one.is_leaving else one.why for one in self._pool.states()} | tried
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
