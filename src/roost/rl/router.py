"""The router in front of the rollout engines: one address, the least busy engine, and the next one if that fails.

`EnginePool` makes every decision and does no I/O; `Router` carries them out over HTTP. A request to generate is safe to
repeat, so the router sends it to another engine if the first one dies or hangs, unless the request forbids it or has
broken enough engines. Once a client has any part of an answer, no other engine is asked: a stream of events that breaks
ends with the error, any other by the end of the client's connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import re
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import asdict, dataclass, field, replace
from functools import partial, wraps
from typing import Concatenate, ParamSpec, TypeVar

from roost.errors import ClusterError, ConfigError
from roost.rl.engine import url_of
from roost.rl.engine_client import EngineAnswer, EngineBroken, EngineClient, EngineLate, EngineRequest
from roost.rl.engine_pool import EnginePool, EngineState, Outcome
from roost.rl.json_request import read_error
from roost.rl.limits import CUT_SECONDS
from roost.rl.web import (
    HttpServer,
    Route,
    ServerLimits,
    aiohttp,
    break_off,
    check_positive,
    error_response,
    read_json,
    web,
)
from roost.runtime.events.emitter import Gauge, emitter
from roost.text import plural, shorten

TIMEOUT_HEADER = "X-Roost-Timeout"
"""How many seconds a request may take; the client sends it."""
RETRY_HEADER = "X-Roost-Retry"
"""Whether a request may reach a second engine: `yes`, as without it, or `no`; the client sends it."""

_ENGINE_HEADER = "X-Roost-Engine"
_OWN_PATHS = ("/health", "/engines")
_MODELS = "/v1/models"
_TAKEN_OVER = ("Accept", "Content-Type", "X-Request-Id", "traceparent", "tracestate")
_NEVER_TAKEN_OVER = re.compile(
    r"(proxy-)?authorization|(proxy-)?connection|content-(length|encoding)|expect|host|keep-alive|te|trailer|"
    r"transfer-encoding|upgrade|x-roost-.*",
    re.IGNORECASE,
)
"""Headers that are secrets, or say how this connection is used."""
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_PATH = re.compile(r"(GET|POST) (/[A-Za-z0-9._~/*-]+)")
_URL = re.compile(r"http://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?\]):([0-9]{1,5})")
_GAPS = (b"\n\n", b"\r\n\r\n", b"\r\r")
"""The ends of an event of a stream."""
_MOST_EVENT = 1024**2
"""The longest event of a stream that is held until all of it is there."""
_IN_DOUBT = "its engine does not have the weights of an update that failed"
Value = TypeVar("Value")
Params = ParamSpec("Params")

log: logging.Logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """The paths that a router forwards, its checks of engines, its time limits, and who may send requests."""

    paths: tuple[str, ...] = (
        "POST /generate",
        "POST /v1/completions",
        "POST /v1/chat/completions",
        "POST /v1/responses",
        "POST /v1/embeddings",
        "POST /inference/v1/generate",
        "GET /v1/models",
    )
    """The requests that engines answer, each a method and a path; with `GET /v1/models` also that of one model.

    `*` in a path stands for anything: `GET /v1/responses/*`.
    """
    headers: tuple[str, ...] = ()
    """Headers of requests that engines get, too, besides those that describe the body and trace the request."""
    session_header: str = "X-SMG-Routing-Key"
    """Requests with the same value of this header go to the same engine while that can serve; empty for none."""
    check_seconds: float = 0.5
    """How long it waits between two checks of an engine."""
    check_timeout: float = 2.0
    """How long an engine may take to answer a check."""
    hang_seconds: float = 10.0
    """After so long without health, the requests at an engine go to another one that is healthy."""
    most_broken: int = 2
    """How many engines a request may break before it is answered with why: the next ones would break as well."""
    request_timeout: float = 600.0
    """How long a request may take that does not say so itself, with the header `X-Roost-Timeout`."""
    open_generate: bool = False
    """Whether the `paths` and `GET /health` take requests without the secret."""
    limits: ServerLimits = field(default_factory=ServerLimits)

    def __post_init__(self) -> None:
        check_positive(self)
        for path in self.paths:
            if not (match := _PATH.fullmatch(path)):
                raise ConfigError(f"{shorten(repr(path))} is not GET or POST and a path", hint="as in POST /generate")
            if match[2] in _OWN_PATHS:
                raise ConfigError(f"the router answers {path} itself: no engine can")
        for name in (*self.headers, *([self.session_header] if self.session_header != "" else ())):
            if not (isinstance(name, str) and _HEADER.fullmatch(name)):
                raise ConfigError(f"{shorten(repr(name))} is not the name of a header", hint="as in X-Session-Id")
        for name in self.headers:
            if _NEVER_TAKEN_OVER.fullmatch(name):
                raise ConfigError(f"the header {name} is between the client and the router: no engine gets it")


@dataclass(slots=True, eq=False)
class _Attempt:
    """A request at an engine that has not answered: if the engine hangs or dies, another one gets the request."""

    url: str
    excluding: Collection[str]
    """The engines that cannot take over: this one, and any that refused the request."""
    patience: float
    """For how long the engine may be unhealthy."""
    limit: asyncio.Timeout
    is_repeatable: bool
    why: str = ""
    """Why it was given up."""

    def give_up(self, why: str) -> None:
        if not self.limit.expired():
            self.why = why
            self.limit.reschedule(0)


def check_engine_url(url: object) -> str:
    """Return the URL if it is `http://host:port`; ConfigError otherwise.

    >>> check_engine_url("http://10.0.0.7:20300")
    'http://10.0.0.7:20300'
    """
    if isinstance(url, str) and (match := _URL.fullmatch(url)) and 1 <= int(match[2]) <= 65535:
        return url
    hint = "it is http://host:port, as in http://10.0.0.7:20300"
    raise ConfigError(f"the url of an engine is {shorten(repr(url))}", hint=hint)


def _on_its_loop(method: Callable[Concatenate[Router, Params], Value]) -> Callable[Concatenate[Router, Params], Value]:
    """Let a method of a router run on the loop of its server while that runs, whichever thread calls it."""

    @wraps(method)
    def run(router: Router, /, *args: Params.args, **kwargs: Params.kwargs) -> Value:
        if router._server is not None and router._server.is_own_thread:
            return method(router, *args, **kwargs)
        with router._lock:
            if router._server is None:
                return method(router, *args, **kwargs)
            return router._server.call(lambda: method(router, *args, **kwargs))

    return run


class Router:
    """Forwards requests to the engines that have joined, over HTTP.

    Engines answer `POST /generate` and the other `paths` of the options. `GET /health` and `GET /engines` describe the
    engines; `POST /engines` with `{"url": ..., "secret": ...}` lets one join, and `DELETE /engines` with its `url` lets
    it leave. Requests show the router's secret, as `Authorization: Bearer ...`. Each engine has a secret of its own,
    which it has to prove before it is asked anything. A router starts only once.
    """

    def __init__(
        self, host: str, port: int, options: RouterOptions | None = None, *, secret: str | None = None
    ) -> None:
        self.url: str = url_of(host, port)
        """Where it listens: `http://10.0.0.7:20300`."""
        self.secret: str = secret or secrets.token_urlsafe(32)
        """The secret that requests show; a new one unless it is given."""
        self._options = options or RouterOptions()
        is_open = self._options.open_generate
        routes = {
            ("GET", "/health"): Route(handler=self._health, is_open=is_open),
            ("GET", "/engines"): Route(handler=self._engines),
            ("POST", "/engines"): Route(handler=self._change_engines, is_control=True),
            ("DELETE", "/engines"): Route(handler=self._change_engines, is_control=True),
        }
        for path in self._options.paths:
            method, _, target = path.partition(" ")
            routes[method, target] = Route(handler=self._forward, is_open=is_open)
            if path == f"GET {_MODELS}":
                routes[method, f"{target}/*"] = Route(handler=self._answer_model, is_open=is_open)
        self._serve = partial(
            HttpServer, host, port, routes, secret=self.secret, name="roost router", limits=self._options.limits
        )
        self._lock = threading.Lock()
        self._server: HttpServer | None = None
        self._is_stopping = False
        # While the server runs, only its loop uses these.
        self._pool = EnginePool()
        self._checks: dict[str, asyncio.Task[None]] = {}
        self._doubted: set[str] = set()
        self._attempts: set[_Attempt] = set()
        self._client = EngineClient()
        self._is_running = False
        self._seconds: defaultdict[str, float] = defaultdict(float)
        """By engine: how long the requests that it has answered took, all together."""

    def start(self) -> None:
        """Listen, and check the engines' health; OSError with EADDRINUSE if the port is taken."""
        with self._lock:
            if self._server is not None or self._is_stopping:
                raise ClusterError("a router starts only once", hint="make another one")
            self._server = self._serve(context=self._running())
            self.url = self._server.url
            emitter.add_gauge(self._gauge)

    def stop(self, seconds: float = 5.0) -> None:
        """Give requests at an engine `seconds` to finish, then answer 503 and end. Safe to call again."""
        with self._lock:
            self._is_stopping = True
        if self._server is not None:
            self._server.call(self._pool.wake)
            self._server.close(seconds, self._break_off)

    @_on_its_loop
    def join(self, url: str, secret: str) -> None:
        """Add an engine: the router checks its health immediately, and sends requests once it is healthy.

        `secret` is the engine's own, which it proves to know on each connection before anything else is sent there.
        """
        check_engine_url(url)
        if not (isinstance(secret, str) and secret):
            raise ConfigError(f"the engine {url} has no secret of its own", hint="it is the `secret` of its EngineSpec")
        if secret == self.secret:
            # A program that takes the engine's place could then command the router.
            raise ConfigError(f"the engine {url} has the router's own secret", hint="give each engine one of its own")
        self._doubted.discard(url)
        self._client.trust(url, secret)
        self._pool.join(url)
        self._start_checks(url)

    @_on_its_loop
    def leave(self, url: str) -> bool:
        """Send an engine no more requests, and let it finish the ones that it has. False if it is unknown."""
        self._stop_checks(url)
        return self._pool.leave(url)

    @_on_its_loop
    def bury(self, url: str, why: str) -> None:
        """Believe nothing at this address any more, and ask it nothing: its process has ended."""
        self._stop_checks(url)
        self._client.distrust(url, why)
        self._pool.bury(url, why)
        for attempt in [*self._attempts]:
            if attempt.url == url:
                attempt.give_up(why)

    @_on_its_loop
    def doubt(self, urls: Collection[str]) -> None:
        """Send these engines no requests, whatever their servers say of their health, and those doubted before again.

        An engine that joins is trusted.
        """
        self._doubted = set(urls)
        for url in urls:
            self._pool.mark(url, False, _IN_DOUBT)

    @property
    @_on_its_loop
    def doubted(self) -> list[str]:
        """The engines that are doubted."""
        return sorted(self._doubted)

    @_on_its_loop
    def states(self) -> list[EngineState]:
        """Return what the router knows about each engine, in the order in which they joined."""
        return self._pool.states()

    def _gauge(self) -> list[Gauge]:
        """Return the requests at each engine, as events have them; called by the thread that writes events."""
        return [
            (
                "requests",
                state.url,
                {
                    "served": state.served,
                    "failed": state.failed,
                    "busy": state.busy,
                    "seconds": round(self._seconds[state.url], 4),
                },
            )
            for state in self._pool.states()
        ]

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        self._is_running = True
        for state in self._pool.states():
            self._start_checks(state.url)
        watching = asyncio.create_task(self._watch_attempts())
        try:
            yield
        finally:
            watching.cancel()
            await self._break_off()

    async def _break_off(self) -> None:
        """End every check, and every request to an engine as if its connection broke."""
        self._is_running = False
        for task in self._checks.values():
            task.cancel()
        await self._client.close()

    def _start_checks(self, url: str) -> None:
        async def keep_checking() -> None:
            while True:
                why = await self._client.check(url, self._options.check_timeout)
                why = _IN_DOUBT if url in self._doubted else why
                self._pool.mark(url, not why, why)
                await asyncio.sleep(self._options.check_seconds)

        if self._is_running and url not in self._checks:
            self._checks[url] = asyncio.create_task(keep_checking())

    def _stop_checks(self, url: str) -> None:
        if (task := self._checks.pop(url, None)) is not None:
            task.cancel()

    async def _forward(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._send_to_engine(request, await self._read_request(request))

    async def _answer_model(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer for one model from what an engine says of all: not every server knows the path."""
        name, sent = request.path.removeprefix(f"{_MODELS}/"), await self._read_request(request)
        answer = await self._send_to_engine(request, replace(sent, target=_MODELS, takes_stream=False))
        if answer.status != 200 or not isinstance(answer, web.Response) or not isinstance(answer.body, bytes):
            return answer
        try:
            models = [one for one in json.loads(answer.body)["data"] if one["id"] == name]
        except (ValueError, KeyError, TypeError):
            return error_response(502, f"an engine answered to GET {_MODELS} what is no list of models")
        if not models:
            return error_response(404, f"the model {shorten(repr(name))} does not exist", "model_not_found")
        return web.json_response(models[0])

    async def _send_to_engine(self, request: web.BaseRequest, sent: EngineRequest) -> web.StreamResponse:
        header = request.headers.get(TIMEOUT_HEADER, str(self._options.request_timeout))
        try:
            seconds = float(header)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            raise ConfigError(f"{TIMEOUT_HEADER} is {shorten(repr(header))}: it is a number of seconds above 0")
        deadline = asyncio.get_running_loop().time() + seconds
        session = request.headers.get(self._options.session_header, "")
        failures: dict[str, str] = {}
        refusing: set[str] = set()
        broken: dict[str, str] = {}
        while (url := await self._pick(refusing, session, deadline)) is not None:
            # Unless something else happens the client goes away, which cancels this task.
            outcome: Outcome = "cancelled"
            asked = time.monotonic()
            try:
                answer = await self._ask(url, sent, refusing, deadline)
                if answer.status != 503 or not sent.is_repeatable:
                    outcome, response = await self._pass_on(answer, request, url, deadline)
                    return response
                outcome = "failed"
                answer.close()
                failures[url] = f"answered 503: {shorten(read_error(answer.body), 200)}"
                refusing.add(url)
            except EngineLate:
                outcome = "failed"
                spent = time.monotonic() - asked
                whole = f", when the request's {seconds:g} s were over" if spent < 0.9 * seconds else ""
                why = f"engine {url} had not answered after {round(spent, 1):g} s{whole}"
                return error_response(504, why, "engine_late", {_ENGINE_HEADER: url}, engine=url)
            except EngineBroken as error:
                outcome = "failed"
                failures[url] = str(error)
                if not self._is_stopping:
                    self._pool.mark(url, False, str(error))
                if error.is_sent:
                    broken[url] = str(error)
                    if not sent.is_repeatable:
                        why = f"engine {url} may have got the request: {error}"
                        return error_response(502, why, "engine_broke", {_ENGINE_HEADER: url}, engine=url)
            finally:
                self._pool.done(url, outcome)
                if outcome == "served":
                    self._seconds[url] += time.monotonic() - asked
            # A request that breaks one engine after another must not break them all, nor wait for one to come back.
            is_poison = len(broken) >= self._options.most_broken or not self._pool.has_more(broken)
            if broken and is_poison and not self._is_stopping:
                reasons = "; ".join(f"{one}: {why}" for one, why in broken.items())
                why = f"the request broke {plural(len(broken), 'engine')}, and no other gets it: {reasons}"
                # OpenAI's clients would send it again.
                return error_response(502, why, "engines_broken", {"x-should-retry": "false"})
        is_late = asyncio.get_running_loop().time() >= deadline
        return self._refusal(failures, f" within {seconds:g} s" if is_late else "")

    async def _pick(self, refusing: Collection[str], session: str, deadline: float) -> str | None:
        """Pick an engine that has not refused the request; if none is healthy, wait for one until the deadline."""
        while not self._is_stopping:
            changed = self._pool.changed
            if (url := self._pool.pick(refusing, session)) is not None:
                return url
            if refusing and not self._pool.has_more(refusing):
                return None
            try:
                async with asyncio.timeout_at(deadline):
                    await changed.wait()
            except TimeoutError:
                return None
        return None

    async def _ask(self, url: str, sent: EngineRequest, refusing: Collection[str], deadline: float) -> EngineAnswer:
        """Ask an engine; EngineLate at the deadline, EngineBroken if it hangs and another one can serve."""
        left = max(0.001, deadline - asyncio.get_running_loop().time())
        # A request with little time must still reach the other engine before its deadline.
        patience = min(self._options.hang_seconds, left / 2)
        attempt = _Attempt(url, {*refusing, url}, patience, asyncio.timeout_at(deadline), sent.is_repeatable)
        try:
            async with attempt.limit:
                self._attempts.add(attempt)
                return await self._client.send(url, sent, connect=min(self._options.check_timeout, left))
        except TimeoutError:
            if not attempt.why:
                raise EngineLate from None
            raise EngineBroken(attempt.why) from None
        finally:
            self._attempts.discard(attempt)

    async def _watch_attempts(self) -> None:
        """Give up requests at engines that hang, if others can serve them: without one, the engine may yet answer."""
        while True:
            changed = self._pool.changed
            soonest = math.inf
            for attempt in [*self._attempts]:
                if (ill := self._pool.ill_seconds(attempt.url)) is None or not attempt.is_repeatable:
                    continue
                if ill < attempt.patience:
                    soonest = min(soonest, attempt.patience - ill)
                elif self._pool.has_able(attempt.excluding):
                    self._attempts.discard(attempt)
                    attempt.give_up(f"it was not healthy for {round(ill, 1):g} s, and had not answered")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(soonest if soonest < math.inf else None):
                    await changed.wait()

    async def _pass_on(
        self, answer: EngineAnswer, request: web.BaseRequest, url: str, deadline: float
    ) -> tuple[Outcome, web.StreamResponse]:
        """Answer the client; from here on, no other engine is asked."""
        headers = answer.headers | {_ENGINE_HEADER: url}
        if "X-Request-Id" in request.headers:
            headers.setdefault("X-Request-Id", request.headers["X-Request-Id"])
        if answer.is_whole:
            whole = web.Response(status=answer.status, body=answer.body, headers=headers)
            return "failed" if answer.status == 503 else "served", whole
        response = web.StreamResponse(status=answer.status, headers=headers)
        kind = headers.get("Content-Type", "").partition(";")[0].strip().lower()
        holds_events = kind == "text/event-stream" and "Content-Encoding" not in headers
        outcome: Outcome = "failed"
        why, code = "", ""
        try:
            await response.prepare(request)
            piece, held = answer.body, b""
            while piece:
                held += piece
                # An event that breaks off would make an error after it unreadable.
                ends = [held.rfind(gap) + len(gap) for gap in _GAPS if gap in held] if holds_events else [len(held)]
                end = max(ends, default=0)
                if len(held) - end > _MOST_EVENT:
                    holds_events, end = False, len(held)
                if end:
                    # It waits while the client has not read what it has: the engine waits too, and nothing piles up.
                    async with asyncio.timeout_at(deadline):
                        await response.write(held[:end])
                held = held[end:]
                piece = await answer.read_piece(deadline)
            async with asyncio.timeout_at(deadline):
                await response.write_eof(held)
            outcome = "served"
        except (TimeoutError, ConnectionError):
            outcome = "cancelled"
        except EngineLate:
            why, code = f"engine {url} had not ended a stream at its deadline", "engine_late"
        except EngineBroken as broken:
            why, code = "the router is stopping", "unavailable"
            if not self._is_stopping:
                why, code = f"engine {url} broke a stream: {broken}", "engine_broke"
                self._pool.mark(url, False, str(broken))
        finally:
            answer.close()
            if outcome != "served" and not why:
                break_off(request)
        if why:
            if not self._is_stopping:
                log.warning("%s: the client's connection is closed", why)
            if holds_events:
                # OpenAI's clients raise an APIError for such an event.
                with contextlib.suppress(TimeoutError, ConnectionError):
                    async with asyncio.timeout(CUT_SECONDS):
                        await response.write(f"data: {error_response(502, why, code).text}\n\n".encode())
            # Without the end of the stream, so that no other client takes this for all of it.
            break_off(request)
        return outcome, response

    async def _read_request(self, request: web.BaseRequest) -> EngineRequest:
        """Make what an engine gets: never the client's Authorization, since the router shows its own."""
        retry = request.headers.get(RETRY_HEADER, "yes")
        if retry not in ("yes", "no"):
            raise ConfigError(f"{RETRY_HEADER} is {shorten(repr(retry))}: it is yes or no")
        headers = {
            name: value
            for name in (*_TAKEN_OVER, *self._options.headers)
            # The secret may be in any header, as a key that another server would take.
            if (value := ", ".join(request.headers.getall(name, ()))) and self.secret not in value
        }
        if request.method == "POST":
            headers.setdefault("Content-Type", "application/json")
        return EngineRequest(
            method=request.method,
            # As the client wrote it: decoded once more, it could be another path.
            target=request.rel_url.raw_path + (f"?{query}" if (query := request.rel_url.raw_query_string) else ""),
            headers=headers,
            body=await request.read(),
            is_repeatable=retry == "yes",
            # The end of a stream to an older client is the end of its connection, also if the stream breaks.
            takes_stream=request.version >= aiohttp.HttpVersion11,
        )

    def _refusal(self, failures: dict[str, str], within: str) -> web.Response:
        found = {one.url: "is leaving" if one.is_leaving else one.why for one in self._pool.states()} | failures
        reasons = [{"url": url, "why": why or "was not asked"} for url, why in found.items()]
        if self._is_stopping:
            error = "the router is stopping"
        elif reasons:
            error = f"none of {plural(len(reasons), 'engine')} could serve the request{within}"
        else:
            error = f"no engine has joined{within}"
        return error_response(503, error, "unavailable", engines=reasons)

    async def _health(self, _request: web.BaseRequest) -> web.Response:
        states = self._pool.states()
        healthy = sum(state.healthy and not state.is_leaving for state in states)
        return web.json_response({"healthy": healthy, "engines": len(states)}, status=200 if healthy else 503)

    async def _engines(self, _request: web.BaseRequest) -> web.Response:
        return web.json_response([asdict(state) for state in self._pool.states()])

    async def _change_engines(self, request: web.BaseRequest) -> web.Response:
        asked = await read_json(request)
        if not (isinstance(asked, dict) and "url" in asked):
            raise ConfigError('the body is {"url": "http://host:port"}')
        url = check_engine_url(asked["url"])
        if request.method == "POST":
            self.join(url, asked.get("secret", ""))
        elif not self.leave(url):
            return error_response(404, f"engine {url} is not known")
        return web.json_response({"url": url})
