"""What the router adds to a request: 32 clients at once and two stand-in engines, directly and through routers.

`bench/router.py REVISION` also measures the router as it was at a revision of this repository. If the environment names
an interpreter that has the package sglang-router, as `SGLANG_ROUTER_PYTHON`, that router is measured too. The ways
alternate in one run, best of fifteen rounds: other work on the machine only makes them slower.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from parts import finish

from roost.rl.engines.inside import roost_proof

CLIENTS = 32
ROUNDS = 15
SECONDS = 1.0
THINKING_MS = 200
ADDED_LIMIT = 1.0
SECRET = "of the bench"  # noqa: S105 - not one
ROOT = Path(__file__).resolve().parents[1]
TEXT = "x" * 1000
ROUTER = """
import sys
from inspect import signature
from roost.rl.router import Router
router = Router("127.0.0.1", 0, secret=sys.argv[1])
router.start()
for url in sys.argv[2:]:
    # Engines of older routers have the router's secret.
    router.join(*(url, sys.argv[1])[: 1 + ("secret" in signature(router.join).parameters)])
print(router.url.rpartition(":")[2], flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True, kw_only=True)
class Server:
    """A process that listens."""

    port: int
    pid: int

    @property
    def cpu_seconds(self) -> float:
        used = psutil.Process(self.pid).cpu_times()
        return used.user + used.system


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What the clients of one way see."""

    rate: float
    """Requests per second."""
    p50: float
    """The median time of a request, less what its engine took, in ms."""
    cpu: float
    """CPU time of the router for a request, in ms."""


class Engine(asyncio.Protocol):
    """A server that answers a request after as many milliseconds as it asks for tokens, give or take half."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport, self.arrived = transport, b""

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"PRI"):
            # sglang-router asks in HTTP/2 first.
            self.transport.close()
            return
        self.arrived += data
        head, end, body = self.arrived.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
        if not end or len(body) < int(length or 0):
            return
        self.arrived = b""
        if head.startswith(b"GET /roost/proof"):
            nonce = head.lower().partition(b"x-roost-nonce:")[2].split(b"\r\n")[0].strip().decode()
            self.send(roost_proof.prove(SECRET, nonce))
            return
        tokens = json.loads(body)["sampling_params"]["max_new_tokens"] if body else 0
        began = time.perf_counter()
        if tokens:
            seconds = random.uniform(0.5, 1.5) * tokens / 1000  # noqa: S311 - not a secret
            asyncio.get_running_loop().call_later(seconds, self.answer, began)
        else:
            self.answer(began)

    def answer(self, began: float) -> None:
        self.send({"text": TEXT, "seconds": time.perf_counter() - began})

    def send(self, content: Mapping[str, object]) -> None:
        body = json.dumps(content)
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self.transport.write((head + body).encode())


async def serve() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Engine, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


async def load(servers: Sequence[Server], tokens: int) -> list[float]:
    """Keep every client asking for some seconds; return how long each answer took, less what its engine took."""
    body = json.dumps({"text": "hello " * 100, "sampling_params": {"max_new_tokens": tokens}}).encode()
    until = time.perf_counter() + SECONDS
    times: list[float] = []

    async def keep_asking(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /generate HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {SECRET}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        while (began := time.perf_counter()) < until:
            writer.write(head.encode() + body)
            answered = await reader.readuntil(b"\r\n\r\n")
            if not answered.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"port {port} answered {answered!r}")
            length = answered.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
            answer = await reader.readexactly(int(length))
            times.append(time.perf_counter() - began - json.loads(answer)["seconds"])
        writer.close()

    await asyncio.gather(*(keep_asking(servers[client % len(servers)].port) for client in range(CLIENTS)))
    return times


@contextlib.contextmanager
def started(command: Sequence[str], source: Path = ROOT / "src") -> Iterator[Server]:
    """Start a server that prints its port and ends with its input."""
    env = os.environ | {"PYTHONPATH": str(source)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=env, **pipes) as process, process.stdin, process.stdout:
        yield Server(port=int(process.stdout.readline()), pid=process.pid)


@contextlib.contextmanager
def started_sglang(python: str, urls: Sequence[str]) -> Iterator[Server]:
    port = 20000 + random.randrange(10000)  # noqa: S311 - not a secret
    command = [python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--policy", "round_robin", "--log-level", "error", "--disable-retries", "--worker-urls", *urls]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield Server(port=port, pid=process.pid)
        finally:
            process.terminate()


@contextlib.contextmanager
def sources_at(revision: str) -> Iterator[Path]:
    """Unpack the package as it was at a revision."""
    command = ["git", "-C", str(ROOT), "archive", revision, "src"]
    packed = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
        yield Path(folder) / "src"


def wait_until_ready(port: int) -> None:
    deadline = time.monotonic() + 60
    shown = {"Authorization": f"Bearer {SECRET}"}
    while True:
        try:
            asked = urllib.request.Request(f"http://127.0.0.1:{port}/health", headers=shown)
            with urllib.request.urlopen(asked, timeout=5):  # noqa: S310 - http
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def measure(servers: Sequence[Server], tokens: int) -> Figures:
    before = sum(server.cpu_seconds for server in servers)
    times = asyncio.run(load(servers, tokens))
    cpu = sum(server.cpu_seconds for server in servers) - before
    return Figures(rate=len(times) / SECONDS, p50=statistics.median(times) * 1e3, cpu=cpu / len(times) * 1e3)


def measure_all(ways: Mapping[str, Sequence[Server]], tokens: int) -> dict[str, Figures]:
    """Measure the ways in turn, and return the best figures of each."""
    rounds: dict[str, list[Figures]] = {way: [] for way in ways}
    for number in range(ROUNDS):
        for way in sorted(ways, reverse=number % 2 == 1):
            rounds[way].append(measure(ways[way], tokens))
            print(f"  {way}: {rounds[way][-1]}", file=sys.stderr)
    return {
        way: Figures(
            rate=max(one.rate for one in found), p50=min(one.p50 for one in found), cpu=min(one.cpu for one in found)
        )
        for way, found in rounds.items()
    }


def main(revision: str | None) -> None:
    over = []
    with contextlib.ExitStack() as running:
        engines = [running.enter_context(started([sys.executable, __file__, "engine"])) for _ in range(2)]
        urls = [f"http://127.0.0.1:{engine.port}" for engine in engines]
        router = [sys.executable, "-c", ROUTER, SECRET, *urls]
        ways = {"no router": engines, "the router": [running.enter_context(started(router))]}
        before = f"the router at {revision}"
        if revision is not None:
            source = running.enter_context(sources_at(revision))
            ways[before] = [running.enter_context(started(router, source))]
        if python := os.environ.get("SGLANG_ROUTER_PYTHON"):
            ways["sglang-router"] = [running.enter_context(started_sglang(python, urls))]
        for way, servers in ways.items():
            if way != "no router":
                wait_until_ready(servers[0].port)
        thinking, at_once = measure_all(ways, THINKING_MS), measure_all(ways, 0)

    print(f"\n| {CLIENTS} clients at once, two engines | added, p50 ms | requests/s | ratio | CPU ms for a request |")
    print("|---|---:|---:|---:|---:|")
    for way, found in at_once.items():
        added = thinking[way].p50 - thinking["no router"].p50
        if way == "the router" and added > ADDED_LIMIT:
            over.append("added time")
        ratio = found.rate / at_once[before if revision else "the router"].rate
        cells = ("", "") if way == "no router" else (f"{added:.2f}", f"{found.cpu:.2f}")
        print(f"| {way} | {cells[0]} | {found.rate:,.0f} | {ratio:.2f} | {cells[1]} |")
    if revision is not None and at_once["the router"].rate < at_once[before].rate:
        over.append("requests/s")
    finish(over)


if __name__ == "__main__":
    if sys.argv[1:] == ["engine"]:
        asyncio.run(serve())
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else None)
