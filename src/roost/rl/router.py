"""The router in front of the rollout engines: one address, the least busy engine, and the next one if that fails.

`EnginePool` is the whole decision and does no I/O; `Router` carries it out over HTTP. To generate is safe to repeat,
so a request whose engine dies goes on to another one; whatever happens, the client gets an answer.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import re
import socket
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from roost.errors import ClusterError, ConfigError
from roost.rl.http_server import MOST_BODY_BYTES, Answer, HttpServer, Request, url_of
from roost.text import plural, shorten

_ENGINE_HEADER = "X-Roost-Engine"
_NOT_CHECKED = "not checked yet"
_STOPPING = "the router is stopping"
_URL = re.compile(r"http://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?\]):([0-9]{1,5})")
_LAST_PORT = 65535
_MOST_BROKEN = 3
_READ_BYTES = 1024 * 1024
# A machine that is gone does not say so: its kernel is asked from time to time while an engine is thinking.
_SILENCE_SECONDS = 5
_UNANSWERED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """What the router knows of an engine."""

    url: str
    healthy: bool
    busy: int
    """How many requests it serves now."""
    served: int
    """How many it has answered."""
    failed: int
    """How many it has not: it could not be reached, broke off, took too long or had no room."""
    is_leaving: bool
    """Whether it only ends what it has."""
    why: str
    """Why it is not healthy, or nothing."""


@dataclass(slots=True, kw_only=True)
class _Engine:
    url: str
    healthy: bool = False
    busy: int = 0
    served: int = 0
    failed: int = 0
    is_leaving: bool = False
    why: str = _NOT_CHECKED
    last_pick: int = 0

    def can_serve(self) -> bool:
        return self.healthy and not self.is_leaving

    def state(self) -> EngineState:
        return EngineState(
            url=self.url,
            healthy=self.healthy,
            busy=self.busy,
            served=self.served,
            failed=self.failed,
            is_leaving=self.is_leaving,
            why=self.why,
        )


class EnginePool:
    """Which engine serves next. Safe to use from many threads; it asks no engine anything itself."""

    def __init__(self) -> None:
        self._engines: dict[str, _Engine] = {}
        self._picks = itertools.count(1)
        self._changed = threading.Condition()
        self._changes = 0

    def join(self, url: str) -> None:
        """Take an engine in; it gets requests once it is marked healthy. One that is there stays as it is."""
        with self._changed:
            engine = self._engines.setdefault(url, _Engine(url=url))
            if engine.is_leaving:
                # It may be another process at the same place: what was known of the old one says nothing.
                engine.is_leaving, engine.healthy, engine.why = False, False, _NOT_CHECKED
            self._tell()

    def leave(self, url: str) -> bool:
        """Give an engine no more requests, and forget it when its last one is done; False if it is not known."""
        with self._changed:
            engine = self._engines.get(url)
            if engine is None:
                return False
            engine.is_leaving = True
            self._forget_if_idle(engine)
            self._tell()
            return True

    def pick(self, excluding: Collection[str] = ()) -> str | None:
        """The healthy engine with the fewest requests, of several the one whose turn is longest ago, or None.

        It has one request more from now on, until `done`.
        """
        with self._changed:
            able = [engine for engine in self._engines.values() if engine.can_serve() and engine.url not in excluding]
            if not able:
                return None
            engine = min(able, key=lambda one: (one.busy, one.last_pick))
            engine.busy += 1
            engine.last_pick = next(self._picks)
            return engine.url

    def done(self, url: str, *, served: bool = True) -> None:
        """A request that an engine was picked for has ended."""
        with self._changed:
            engine = self._engines.get(url)
            if engine is None or engine.busy == 0:
                raise ConfigError(f"{url} serves no request that could be done")
            engine.busy -= 1
            if served:
                engine.served += 1
            else:
                engine.failed += 1
            self._forget_if_idle(engine)

    def mark(self, url: str, healthy: bool, why: str = "") -> None:
        """Say whether an engine can serve, and why not; one that has left meanwhile is passed over."""
        with self._changed:
            engine = self._engines.get(url)
            if engine is None:
                return
            is_news = engine.healthy != healthy
            engine.healthy, engine.why = healthy, "" if healthy else why
            if is_news:
                self._tell()

    def states(self) -> list[EngineState]:
        """All engines, in the order in which they joined."""
        with self._changed:
            return [engine.state() for engine in self._engines.values()]

    def has_more(self, excluding: Collection[str]) -> bool:
        """Whether there are other engines that can serve, now or when they are healthy again."""
        with self._changed:
            return any(not engine.is_leaving and engine.url not in excluding for engine in self._engines.values())

    @property
    def changes(self) -> int:
        """Grows whenever an engine comes, goes, or turns healthy or unhealthy."""
        with self._changed:
            return self._changes

    def wait_for_change(self, seen: int, seconds: float) -> None:
        """Wait until `changes` is no longer what was seen, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._changes != seen, seconds)

    def wake(self) -> None:
        """Let everybody who waits for a change look again."""
        with self._changed:
            self._tell()

    def _forget_if_idle(self, engine: _Engine) -> None:
        if engine.is_leaving and engine.busy == 0:
            del self._engines[engine.url]

    def _tell(self) -> None:
        self._changes += 1
        self._changed.notify_all()


def check_engine_url(url: object) -> str:
    """The address of an engine, if it is one; ConfigError otherwise.

    >>> check_engine_url("http://10.0.0.7:20300")
    'http://10.0.0.7:20300'
    """
    if isinstance(url, str) and (match := _URL.fullmatch(url)) and 1 <= int(match[2]) <= _LAST_PORT:
        return url
    raise ConfigError(
        f"the url of an engine is {shorten(repr(url))}", hint="it is http://host:port, as in http://10.0.0.7:20300"
    )


class Router:
    """Hands requests on to the engines that have joined, over HTTP.

    `POST /generate` is answered by an engine, `GET /health` and `GET /engines` say how they are, and `POST /engines`
    and `DELETE /engines` with `{"url": ...}` let one join or leave. It is started once.
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
        self.pool: EnginePool = EnginePool()
        self._host = host
        self._port = port
        self._check_seconds = check_seconds
        self._health_timeout = health_timeout
        self._request_timeout = request_timeout
        self._wait_seconds = wait_seconds
        self._most_body_bytes = most_body_bytes
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._server: HttpServer | None = None
        self._requests = _Calls()
        self._checks = _Calls()
        self._watches: dict[str, _Watch] = {}
        self._old_watches: list[_Watch] = []

    @property
    def url(self) -> str:
        """Where it listens: `http://10.0.0.7:20300`."""
        return url_of(self._host, self._port) if self._server is None else self._server.url

    def start(self) -> None:
        """Listen, and watch the engines; OSError with EADDRINUSE where another listens already."""
        with self._lock:
            if self._server is not None or self._stopping.is_set():
                raise ClusterError("a router is started once, and this one was", hint="make another one")
            routes = {
                ("POST", "/generate"): self._generate,
                ("GET", "/health"): self._health,
                ("GET", "/engines"): self._engines,
                ("POST", "/engines"): self._join_engine,
                ("DELETE", "/engines"): self._leave_engine,
            }
            self._server = HttpServer(
                self._host, self._port, routes, name="roost router", most_body_bytes=self._most_body_bytes
            )
            self._server.start()
            for state in self.pool.states():
                self._watch(state.url)

    def stop(self, seconds: float = 5.0) -> None:
        """End: requests at an engine have so long to finish, then their clients are told; safe to call again."""
        with self._lock:
            self._stopping.set()
            self.pool.wake()
            watches = [*self._watches.values(), *self._old_watches]
            self._watches, self._old_watches = {}, []
        for watch in watches:
            watch.over.set()
        self._checks.break_off()
        if self._server is not None and not self._server.finish(seconds):
            self._requests.break_off()
            self._server.finish(1.0)
            self._server.cut()
        for watch in watches:
            watch.thread.join(self._health_timeout + 1.0)

    def join(self, url: str) -> None:
        """Take an engine in; it is asked for its health at once and gets requests when it is healthy."""
        check_engine_url(url)
        with self._lock:
            self.pool.join(url)
            if self._server is not None and not self._stopping.is_set():
                self._watch(url)

    def leave(self, url: str) -> bool:
        """Give an engine no more requests; those that it has come to their end. False if it is not known."""
        with self._lock:
            self._old_watches = [watch for watch in self._old_watches if watch.thread.is_alive()]
            if (watch := self._watches.pop(url, None)) is not None:
                watch.over.set()
                self._old_watches.append(watch)
            return self.pool.leave(url)

    def _generate(self, request: Request) -> Answer:
        tried: dict[str, str] = {}
        broken: set[str] = set()
        # A request that breaks one engine after the other must not break them all.
        while len(broken) < _MOST_BROKEN and (url := self._pick(tried)) is not None:
            answer: Answer | None = None
            try:
                answer = self._forward(url, request, tried)
            except _Broken as error:
                tried[url] = str(error)
                broken.add(url)
                if not self._stopping.is_set():
                    self.pool.mark(url, False, str(error))
            finally:
                self.pool.done(url, served=answer is not None and url not in tried)
            if answer is not None:
                return answer
        return self._nobody(tried)

    def _pick(self, tried: Mapping[str, str]) -> str | None:
        """An engine that was not tried, waited for if none is healthy."""
        deadline = time.monotonic() + self._wait_seconds
        while not self._stopping.is_set():
            seen = self.pool.changes
            if (url := self.pool.pick(tried)) is not None:
                return url
            remaining = deadline - time.monotonic()
            if remaining <= 0 or (tried and not self.pool.has_more(tried)):
                return None
            self.pool.wait_for_change(seen, remaining)
        return None

    def _forward(self, url: str, request: Request, tried: dict[str, str]) -> Answer | None:
        """What the client is told; None if another engine is to be asked. Where this one failed, `tried` says why."""
        try:
            reply = self._requests.ask(
                url, request, connect_seconds=self._health_timeout, seconds=self._request_timeout
            )
        except _Late:
            # It may still be at it: to ask another one would only double the work.
            tried[url] = f"had not answered after {self._request_timeout:g} s"
            return Answer.of({"error": f"engine {url} {tried[url]}", "engine": url}, 504, ((_ENGINE_HEADER, url),))
        if reply.status == 503:
            tried[url] = f"answered 503: {shorten(reply.body.decode(errors='replace'), 200)}"
            return None
        return Answer(
            status=reply.status,
            body=reply.body,
            content_type=reply.content_type,
            headers=((_ENGINE_HEADER, url),),
        )

    def _nobody(self, tried: Mapping[str, str]) -> Answer:
        reasons = {state.url: "is leaving" if state.is_leaving else state.why for state in self.pool.states()}
        reasons.update(tried)
        if self._stopping.is_set():
            error = _STOPPING
        elif reasons:
            error = f"none of {plural(len(reasons), 'engine')} could serve the request"
        else:
            error = "no engine has joined"
        engines = [{"url": url, "why": why or "was not asked"} for url, why in reasons.items()]
        return Answer.of({"error": error, "engines": engines}, 503)

    def _health(self, _request: Request) -> Answer:
        states = self.pool.states()
        healthy = sum(state.healthy and not state.is_leaving for state in states)
        return Answer.of({"healthy": healthy, "engines": len(states)}, 200 if healthy else 503)

    def _engines(self, _request: Request) -> Answer:
        return Answer.of([asdict(state) for state in self.pool.states()])

    def _join_engine(self, request: Request) -> Answer:
        url = _url_in(request)
        self.join(url)
        return Answer.of({"url": url})

    def _leave_engine(self, request: Request) -> Answer:
        url = _url_in(request)
        if not self.leave(url):
            return Answer.error(404, f"engine {url} is not known")
        return Answer.of({"url": url})

    def _watch(self, url: str) -> None:
        """Begin to ask an engine for its health; the lock is held."""
        if url in self._watches:
            return
        over = threading.Event()
        # Each in a thread of its own: an engine that hangs makes no other one wait.
        thread = threading.Thread(
            target=self._keep_checking, args=(url, over), name=f"roost router watches {url}", daemon=True
        )
        self._watches[url] = _Watch(thread=thread, over=over)
        thread.start()

    def _keep_checking(self, url: str, over: threading.Event) -> None:
        request = Request(method="GET", path="/health", body=b"", content_type="")
        while not over.is_set():
            try:
                reply = self._checks.ask(
                    url, request, connect_seconds=self._health_timeout, seconds=self._health_timeout
                )
                why = "" if reply.status == 200 else f"/health answered {reply.status}"
            except _Late:
                why = f"/health had not answered after {self._health_timeout:g} s"
            except _Broken as error:
                why = str(error)
            if not over.is_set():
                self.pool.mark(url, not why, why)
            over.wait(self._check_seconds)


def _url_in(request: Request) -> str:
    asked = request.json()
    if not (isinstance(asked, dict) and "url" in asked):
        raise ConfigError('the body is {"url": "http://host:port"}')
    return check_engine_url(asked["url"])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Watch:
    thread: threading.Thread
    over: threading.Event


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reply:
    status: int
    body: bytes
    content_type: str


class _Broken(Exception):  # noqa: N818 - what happened
    """An engine could not be reached, or the connection broke."""


class _Late(Exception):  # noqa: N818 - what happened
    """An engine was reached and did not answer in time."""


class _Calls:
    """What is being asked of engines, so that all of it can be broken off."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._is_over = False

    def break_off(self) -> None:
        """End every call, now and from now on, as if its connection broke."""
        with self._lock:
            self._is_over = True
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def ask(self, url: str, request: Request, *, connect_seconds: float, seconds: float) -> _Reply:
        """Ask an engine and read its answer to the end."""
        host, _, port = url.removeprefix("http://").rpartition(":")
        connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=connect_seconds)
        try:
            try:
                connection.connect()
            except (OSError, ValueError) as error:
                raise _Broken(f"could not be reached: {error}") from None
            with self._known(connection.sock):
                return _exchange(connection, request, time.monotonic() + seconds)
        except TimeoutError as error:
            # With a number it comes from the kernel, which has lost the other machine.
            if error.errno is None:
                raise _Late from None
            raise _Broken(f"the connection broke: {error}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise _Broken(f"the connection broke: {str(error) or type(error).__name__}") from None
        finally:
            connection.close()

    @contextlib.contextmanager
    def _known(self, connection: socket.socket) -> Iterator[None]:
        with self._lock:
            if self._is_over:
                raise _Broken(_STOPPING)
            self._open.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(connection)


def _exchange(connection: http.client.HTTPConnection, request: Request, deadline: float) -> _Reply:
    line: Any = connection.sock
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE_SECONDS)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENCE_SECONDS)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _UNANSWERED)
    headers = {"Connection": "close"}
    if request.content_type:
        headers["Content-Type"] = request.content_type
    line.settimeout(_until(deadline))
    # An engine may answer, that it is too much for it, before it has read all: then there is something to read.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.request(request.method, request.path, request.body or None, headers)
    line.settimeout(_until(deadline))
    with connection.getresponse() as response:
        pieces = []
        while not response.isclosed():
            line.settimeout(_until(deadline))
            piece = response.read1(_READ_BYTES)
            if not piece:
                break
            pieces.append(piece)
        if response.length:
            raise http.client.IncompleteRead(b"", response.length)
        # A head that breaks off reads as a whole one, without a length and with nothing behind it.
        if request.method == "POST" and not (pieces or response.chunked or response.length == 0):
            raise http.client.IncompleteRead(b"")
        return _Reply(
            status=response.status,
            body=b"".join(pieces),
            content_type=response.getheader("Content-Type", "application/octet-stream"),
        )


def _until(deadline: float) -> float:
    """The seconds that are left; TimeoutError where there are none, as 0 would mean not to wait at all."""
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    return remaining
