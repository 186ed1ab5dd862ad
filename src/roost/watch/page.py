"""The page of a run: a server on loopback that reads the run folder and changes nothing.

The address has a secret in its path, and every request needs it. A request whose Host is not this server, or that comes
from a page of another origin, gets 403, as does one with a wrong secret; the answer says nothing else.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable
from importlib.resources import files
from typing import Any

from roost.errors import ClusterError, ConfigError, RoostError
from roost.machine.strangers import Listener
from roost.runtime.process.output import read_tail
from roost.runtime.runs.folder import log_file
from roost.text import printable_lines
from roost.watch.facts import chart_facts, lane_facts, page_facts
from roost.watch.limits import BEAT_SECONDS, CHART_SECONDS, LONGEST_LANE_SECONDS, PAGE_SECONDS, SHORTEST_LANE_SECONDS
from roost.watch.live import WatchedRun
from roost.watch.measures import prometheus_text
from roost.watch.stack import stack_of
from roost.watch.views import RunView

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
    from starlette.types import ASGIApp, Receive, Scope, Send
except ImportError as _error:
    raise ConfigError(
        "roost watch needs starlette and uvicorn", hint="pip install 'roost[watch]', or use roost top"
    ) from _error

_LOG_LINES = 60
_BACKLOG = 1024
_MOST_CONNECTIONS = 512
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_FILES = (
    *("index.html", "page.css", "page.js", "parts.js", "map.js", "lanes.js", "charts.js"),
    *("uplot/uPlot.min.css", "uplot/uPlot.iife.min.js"),
)
_HEADERS = (
    (b"content-security-policy", b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
     b"img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"cross-origin-resource-policy", b"same-origin"),
)  # fmt: skip


class Guard:
    """Lets through GET requests for this very server, from its own page or from no page, with the secret."""

    def __init__(self, app: ASGIApp, token: str, port: int, heard: Callable[[Any], object]) -> None:
        self._app = app
        self._token = token.encode()
        self._heard = heard
        self._hosts = {f"{host}:{port}".encode() for host in ("127.0.0.1", "localhost")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        status = self._refusal(scope)

        async def send_safely(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
            await send(message)

        if status:
            await Response(status_code=status)(scope, receive, send_safely)
            return
        self._heard(tuple(scope["client"] or ()))
        await self._app(scope, receive, send_safely)

    def _refusal(self, scope: Scope) -> int:
        headers = scope["headers"]
        hosts = [value for name, value in headers if name == b"host"]
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            return 403
        origins = [value.lower() for name, value in headers if name == b"origin"]
        sites = [value for name, value in headers if name == b"sec-fetch-site"]
        if any(origin != b"http://" + hosts[0].lower() for origin in origins):
            return 403
        if any(site not in (b"same-origin", b"none") for site in sites):
            return 403
        if scope["method"] not in ("GET", "HEAD"):
            return 405
        first = scope["path"].encode(errors="replace").split(b"/")[1:2]
        return 0 if first and hmac.compare_digest(first[0], self._token) else 403


def _number(request: Request, name: str, default: float) -> float:
    try:
        value = float(request.query_params.get(name, ""))
    except ValueError:
        return default
    return value if math.isfinite(value) and abs(value) < 1e12 else default


def _is_plain(address: str) -> bool:
    return all(part and not part.startswith(".") and not set(part) & set("/\\\0") for part in address.split(":"))


class PageServer:
    """Serves a run on loopback; `url` is where the page is, secret included.

    All pages that are open share one reader of the run folder, which reads in a thread, and only while one asks.
    """

    def __init__(self, run: WatchedRun, port: int = 0) -> None:
        try:
            self._socket = Listener("127.0.0.1", port, most=_MOST_CONNECTIONS, backlog=_BACKLOG)
        except OSError as error:
            raise ClusterError(f"port {port} cannot be used: {error.strerror}", hint="choose another --port") from None
        self.port: int = self._socket.getsockname()[1]
        self.token: str = secrets.token_urlsafe(24)
        self._run = run
        self._view: RunView | None = None
        self._next_view = -math.inf
        self._viewing = asyncio.Lock()
        self._asking = asyncio.Lock()
        """Held while a worker is asked for its stacks, one at a time."""
        routes = []
        for name in _FILES:
            content = (files("roost.watch") / "static").joinpath(*name.split("/")).read_bytes()
            kind = _KINDS[name[name.rindex(".") :]]
            path = f"/{self.token}/" if name == "index.html" else f"/{self.token}/{name}"
            routes.append(Route(path, lambda _, content=content, kind=kind: Response(content, media_type=kind)))
        for endpoint in (self.events, self.lanes, self.log, self.stack, self.metrics):
            routes.append(Route(f"/{self.token}/{endpoint.__name__}", endpoint))
        config = uvicorn.Config(
            Guard(Starlette(routes=routes), self.token, self.port, self._socket.heard),
            # What uvicorn would take in its place accepts connections without asking the socket.
            loop="asyncio",
            backlog=_BACKLOG,
            log_level="error",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
            lifespan="off",
        )
        self._server = uvicorn.Server(config)

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://127.0.0.1:{self.port}/{self.token}/"

    def serve(self) -> None:
        """Serve until `stop` is called or Ctrl-C is pressed."""
        self._server.run(sockets=[self._socket])

    def show(self, run: WatchedRun) -> None:
        """Show another run on the pages that are open; from any thread."""
        self._run, self._next_view = run, -math.inf

    def stop(self) -> None:
        """End the server; from any thread."""
        self._server.should_exit = True

    async def view(self) -> RunView:
        """Return the run as it is now, or was a moment ago."""
        async with self._viewing:
            began = time.monotonic()
            if self._view is None:
                self._view = await asyncio.to_thread(self._run.refresh)
            elif began >= self._next_view:
                self._view = await asyncio.to_thread(self._run.refresh)
                took = time.monotonic() - began
                # A large run is read less often, so that the watcher takes a quarter of a core at most.
                self._next_view = began + max(PAGE_SECONDS, 4 * took)
            return self._view

    async def events(self, request: Request) -> Response:
        """Send the run whenever it changed."""
        states = self._states(int(_number(request, "node", -1.0)))
        return StreamingResponse(states, media_type="text/event-stream")

    async def _states(self, node: int) -> AsyncIterator[str]:
        """Yield the states of a run. A slow reader gets fewer, not later, ones: nothing queues up."""
        last, sent_at, charts_at, charts = "", -math.inf, -math.inf, ""
        while not self._server.should_exit:
            view = await self.view()
            facts = page_facts(view, title=self._run.title, status=self._run.status, node=node, layout=self._run.layout)
            # The clock alone is no change.
            now = facts.pop("now")
            text = json.dumps(facts, separators=(",", ":"))
            at = time.monotonic()
            if text != last or at - sent_at > BEAT_SECONDS:
                last, sent_at = text, at
                yield f'event: run\ndata: {{"now":{json.dumps(now)},{text[1:]}\n\n'
            if at - charts_at >= CHART_SECONDS:
                charts_at = at
                found = json.dumps(chart_facts(view, self._run.bound), separators=(",", ":"))
                if found != charts:
                    charts = found
                    yield f"event: charts\ndata: {found}\n\n"
            await asyncio.sleep(PAGE_SECONDS)

    async def lanes(self, request: Request) -> Response:
        """Answer with the calls and waits of some workers."""
        view = await self.view()
        seconds = min(LONGEST_LANE_SECONDS, max(SHORTEST_LANE_SECONDS, _number(request, "seconds", 60.0)))
        end = min(view.now, _number(request, "end", view.now))
        # Of a young run there is nothing before its beginning.
        start = min(end - SHORTEST_LANE_SECONDS, max(end - seconds, view.began))
        names = request.query_params.getlist("worker")
        found = await asyncio.to_thread(lane_facts, self._run.model, view, start, end, names)
        return JSONResponse({"start": start, "end": end, "lanes": found})

    async def log(self, request: Request) -> Response:
        """Answer with the end of a worker's log."""
        view, address, folder = await self.view(), request.query_params.get("worker", ""), self._run.folder
        is_known = address in {worker.address for worker in view.workers} and _is_plain(address)
        if folder is None or not is_known:
            return Response(status_code=404)
        tail = await asyncio.to_thread(read_tail, log_file(folder / "logs", address), _LOG_LINES)
        return Response(tail, media_type="text/plain")

    async def stack(self, request: Request) -> Response:
        """Answer with the stacks of a worker."""
        address, folder = request.query_params.get("worker", ""), self._run.folder
        if folder is None or not _is_plain(address):
            return Response(status_code=404)
        async with self._asking:
            try:
                text = await asyncio.to_thread(stack_of, folder, await self.view(), address)
            except RoostError as error:
                return Response(printable_lines(str(error)), status_code=409, media_type="text/plain")
        return Response(text, media_type="text/plain")

    async def metrics(self, _: Request) -> Response:
        """Answer with the figures for Prometheus."""
        return Response(prometheus_text(await self.view()), media_type="text/plain; version=0.0.4")
