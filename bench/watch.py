"""Measures what collecting events costs: an empty call with and without, a job that does nothing, the size of an hour.

The same workers switch collecting on and off between blocks of calls, so that a busy machine slows both alike.
`WORKERS=8 python bench/watch.py cost` measures fewer workers.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from parts import finish, run, start

WORKERS = int(os.environ.get("WORKERS", "32"))
BLOCKS, CALLS = 16, 40
IDLE_SECONDS = 20.0
THREADS = ("roost-events", "roost-sampler")
DRIVER_THREADS = ("roost-events", "roost-watch")
CALL_LIMIT = 1.05
IDLE_LIMIT = 0.01
HOUR_LIMIT = 100e6
LATENCY_LIMIT = 300.0
LATENCY_SECONDS = 15.0
OPENING_LIMIT = 2.0


def cpu_of(names: tuple[str, ...]) -> float:
    """Return the CPU seconds that the threads of these names in this process have taken so far."""
    found = {thread.native_id for thread in threading.enumerate() if thread.name in names}
    times = [item for item in psutil.Process().threads() if item.id in found]
    return sum(item.user_time + item.system_time for item in times)


@contextlib.contextmanager
def group_of(count: int) -> Any:
    """Launch workers that do nothing, on a local cluster of their own."""
    from roost import Cluster, NodePlacementStrategy, Worker
    from roost.testing import local_cluster

    class Idle(Worker):
        def nothing(self) -> None:
            pass

        def collecting(self) -> float:
            return cpu_of(THREADS)

        def collect(self, wanted: bool) -> None:
            from roost.runtime.events.emitter import emitter

            emitter.is_on = wanted

    with (
        local_cluster("1x0", cpus=count),
        Cluster(num_nodes=1, quiet=True) as cluster,
        Idle.create_group().launch(cluster, NodePlacementStrategy([0] * count), "idle") as group,
    ):
        yield group, Path(cluster.run_dir)


def cost() -> dict[str, float]:
    """Measure an empty call over all workers, with and without collecting, in alternating blocks."""
    from roost.runtime.events.emitter import emitter

    ratios, found = [], {True: [], False: []}
    with group_of(WORKERS) as (group, folder):
        for block in range(BLOCKS + 2):
            medians = {}
            # The order alternates too.
            for wanted in (True, False) if block % 2 else (False, True):
                group.collect(wanted).wait()
                # The driver notes its waits.
                emitter.is_on = wanted
                times = []
                for _ in range(CALLS):
                    began = time.perf_counter()
                    group.nothing().wait()
                    times.append(time.perf_counter() - began)
                medians[wanted] = statistics.median(times)
            if block > 1:
                ratios.append(medians[True] / medians[False])
                for wanted, median in medians.items():
                    found[wanted].append(median)
        size = sum(path.stat().st_size for path in folder.glob("events/**/*.jsonl"))
    return {
        "with ms": 1e3 * statistics.median(found[True]),
        "without ms": 1e3 * statistics.median(found[False]),
        "ratio": statistics.median(ratios),
        "bytes": size,
    }


def taking() -> dict[str, float]:
    """Measure what the emitter adds to a call inside the worker, in microseconds."""
    import tempfile

    from roost.runtime.events.emitter import emitter
    from roost.runtime.process.timers import measured_call

    def block() -> float:
        began = time.perf_counter()
        for _ in range(2000):
            with measured_call("nothing"):
                pass
        return (time.perf_counter() - began) / 2000 * 1e6

    with tempfile.TemporaryDirectory() as folder:
        without = statistics.median(block() for _ in range(30))
        emitter.start(Path(folder), Path("events/a/0.jsonl"), "a:0", run="x")
        found = []
        for _ in range(30):
            found.append(block())
            time.sleep(0.25)
        emitter.stop()
    return {"without us": without, "with us": statistics.median(found), "added us": statistics.median(found) - without}


def idle() -> dict[str, float]:
    """Measure the share of a core that collecting takes in a job that does nothing: the threads of all its workers."""
    with group_of(WORKERS) as (group, _):
        group.nothing().wait()
        time.sleep(3)
        before, driver = sum(group.collecting().wait()), cpu_of(DRIVER_THREADS)
        time.sleep(IDLE_SECONDS)
        used = (sum(group.collecting().wait()) - before) / IDLE_SECONDS
        watching = (cpu_of(DRIVER_THREADS) - driver) / IDLE_SECONDS
    return {"workers": WORKERS, "with": used, "driver": watching}


def hour() -> dict[str, float]:
    """Work out what 64 workers at 10 calls/s, and as many node samples as there are seconds, write in an hour."""
    from roost.runtime.events.format import line_of
    from roost.runtime.events.pending import Call, Pending

    pending, size, now, made = Pending(0.0), 0, 0.0, 0
    next_usage = 0.0
    while now < 3600:
        due = int(now * 10) - made
        calls = [Call("generate", now - 0.09 - 0.1 * i, now - 0.01 - 0.1 * i, True) for i in range(due)]
        made += due
        notes = []
        if now >= next_usage:
            next_usage += 2.0
            notes.append(line_of("usage", 0.512, t=now, memory=12345))
        size += sum(len(line) + 1 for line in pending.lines(now, calls, notes=notes))
        now += 0.2
    sample = len(line_of("node", 0.512, t=3599.1234, memory=10**6, of=10**6, devices=[[0.97, 70123, 81920]] * 8)) + 1
    whole = 64 * size + 8 * 3600 * sample
    return {"one worker MB": size / 1e6, "64 workers MB": 64 * size / 1e6, "with 8 nodes MB": whole / 1e6}


def latency() -> dict[str, float]:
    """Measure the milliseconds from the end of a call to the page, with 256 workers at 20 calls/s."""
    import http.client
    import json
    import subprocess
    import tempfile

    from roost.watch.live import LiveRun
    from roost.watch.page import PageServer

    with tempfile.TemporaryDirectory() as folder:
        writer = subprocess.Popen([sys.executable, __file__, "write", folder], stdout=subprocess.PIPE, text=True)
        try:
            writer.stdout.readline()  # type: ignore[union-attr]
            server = PageServer(LiveRun(Path(folder)))
            thread = threading.Thread(target=server.serve, daemon=True)
            thread.start()
            while not server._server.started:
                time.sleep(0.01)
            began = time.perf_counter()
            connection = http.client.HTTPConnection("127.0.0.1", server.port)
            connection.request("GET", f"/{server.token}/events")
            answer = connection.getresponse()
            delays, first, seen = [], 0.0, dict[str, float]()
            end = time.monotonic() + LATENCY_SECONDS
            while time.monotonic() < end:
                line = answer.readline()
                if not line.startswith(b'data: {"now"'):
                    continue
                now = time.time()
                first = first or time.perf_counter() - began
                for worker in json.loads(line[6:])["workers"]:
                    # The end of its last call: its beginning and how long it took.
                    ended = worker["since"] + (worker["last_seconds"] or 0)
                    if seen.get(worker["address"], 0) != ended:
                        if worker["address"] in seen:
                            delays.append(now - ended)
                        seen[worker["address"]] = ended
            server.stop()
        finally:
            writer.terminate()
            writer.wait()
    delays.sort()
    return {
        "first view s": first,
        "median ms": 1e3 * statistics.median(delays),
        "p95 ms": 1e3 * delays[int(len(delays) * 0.95)],
        "seen": len(delays),
    }


def write_hour(folder: str, count: int) -> None:
    """Write an hour of some workers: 80 MB, however many they are."""
    from roost.runtime.events.format import header, line_of

    lines = 20_000 * 64 // count
    body = "".join(
        line_of("call", "generate", t=3600 / lines * i, d=0.151, n=4, busy=0.1402) + "\n" for i in range(lines)
    )
    base = Path(folder, "events", "actor")
    base.mkdir(parents=True)
    wall = time.time() - 3600
    first = header("driver", run="x", pid=1, host="h", wall=wall)
    (base.parent / "driver.jsonl").write_text(first + "\n")
    for rank in range(count):
        first = header(f"actor:{rank}", run="x", pid=rank, host="h", wall=wall, node=rank // 8, devices=(rank % 8,))
        (base / f"{rank}.jsonl").write_text(f"{first}\n{body}")


def browser() -> dict[str, float]:
    """Measure in Chromium: the first view of an hour of 4,096 workers, how long a click takes then, and a death."""
    import tempfile

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from browsing import open_browser, served, wait_for
    from roost.runtime.events.format import line_of
    from roost.watch.live import LiveRun

    with tempfile.TemporaryDirectory() as folder, open_browser() as chromium:
        write_hour(folder, 4096)
        page = chromium.new_page()
        with served(LiveRun(Path(folder))) as url:
            began = time.perf_counter()
            page.goto(url)
            wait_for(page, "document.querySelectorAll('.node').length == 512")
            first = time.perf_counter() - began
            began = time.perf_counter()
            page.click("[aria-label^='open node 77:']")
            wait_for(page, "document.querySelectorAll('.tile').length == 8")
            opened = time.perf_counter() - began
            # The longest time in which the page answers nothing, in three seconds.
            longest = page.evaluate(
                """new Promise(done => { let last = performance.now(), longest = 0; const end = last + 3000;
                const look = () => { const now = performance.now(); longest = Math.max(longest, now - last); last = now;
                if (now < end) setTimeout(look, 0); else done(longest); }; look(); })"""
            )
    delays = []
    with tempfile.TemporaryDirectory() as folder:
        write_hour(folder, 64)
        with open_browser() as chromium, served(LiveRun(Path(folder))) as url:
            page = chromium.new_page()
            page.goto(url)
            wait_for(page, "document.querySelectorAll('.tile').length == 64")
            for rank in range(20):
                began = time.perf_counter()
                with Path(folder, "events", "driver.jsonl").open("a") as file:
                    file.write(line_of("died", f"actor:{rank}", t=3600.0 + rank) + "\n")
                page.wait_for_selector(f"[data-worker='actor:{rank}'].dead", state="attached")
                delays.append(time.perf_counter() - began)
    return {
        "first view s": first,
        "open a node s": opened,
        "longest pause ms": longest,
        "death shown ms": 1e3 * statistics.median(delays),
        "slowest ms": 1e3 * max(delays),
    }


def opening() -> dict[str, float]:
    """Measure the seconds until the first view of an hour of 64 workers, and of 4,096, each with 80 MB of events."""
    import json
    import tempfile

    from roost.watch.facts import page_facts
    from roost.watch.live import LiveRun

    found = {}
    for count in (64, 4096):
        with tempfile.TemporaryDirectory() as folder:
            write_hour(folder, count)
            began, cpu = time.perf_counter(), time.process_time()
            live = LiveRun(Path(folder))
            json.dumps(page_facts(live.refresh(), title="x", status="running"))
            found[f"{count} workers s"] = time.perf_counter() - began
            # What it would take on a machine that does nothing else.
            found[f"{count} workers CPU s"] = time.process_time() - cpu
            began = time.perf_counter()
            json.dumps(page_facts(live.refresh(), title="x", status="running"))
            found[f"{count} again s"] = time.perf_counter() - began
    return found


def write() -> dict[str, float]:
    """Write events as 256 workers with 20 calls/s would, through the code that they use."""
    from roost.runtime.events.file import EventFile
    from roost.runtime.events.format import header, worker_file
    from roost.runtime.events.pending import Call, Pending

    base, began = Path(sys.argv[2]), time.perf_counter()
    (base / "run.json").write_text("{}")
    wall = time.time()
    EventFile(base, Path("events/driver.jsonl"), header("driver", run="x", pid=1, host="h", wall=wall)).write([])
    workers = []
    for rank in range(256):
        first = header(f"actor:{rank}", run="x", pid=rank, host="h", wall=wall, node=rank // 8)
        workers.append((EventFile(base, worker_file(f"actor:{rank}"), first), Pending(began), rank * 0.2 / 256))
    print("ready", flush=True)
    made = [0] * 256
    step = 0
    while True:
        # Each worker writes five times a second, at its own moments.
        for rank, (file, pending, offset) in enumerate(workers):
            due = began + step * 0.2 + offset
            if (left := due - time.perf_counter()) > 0:
                time.sleep(left)
            now = time.perf_counter()
            total = int((now - began) * 20)
            ends = [began + (number + 1) / 20 for number in range(made[rank], total)]
            made[rank] = total
            lines = pending.lines(now, [Call("step", end - 0.03, end, True) for end in ends])
            if lines:
                file.write(lines)
        step += 1


def main() -> None:
    """Run every part and compare with the limits."""
    over = []
    for part in PARTS:
        found = run(__file__, part)
        if part == "cost" and found["ratio"] > CALL_LIMIT:
            over.append(f"a call costs {found['ratio']:.3f} times as much")
        if part == "idle" and found["with"] > IDLE_LIMIT:
            over.append(f"a job that is idle takes {found['with']:.1%} of a core")
        if part == "hour" and found["with 8 nodes MB"] * 1e6 > HOUR_LIMIT:
            over.append(f"an hour has {found['with 8 nodes MB']:.0f} MB")
        if part == "latency" and found["p95 ms"] > LATENCY_LIMIT:
            over.append(f"the page is {found['p95 ms']:.0f} ms behind")
        if part == "browser" and found["first view s"] > OPENING_LIMIT:
            over.append(f"a browser takes {found['first view s']:.1f} s to show a large run")
        if part == "opening" and max(found.values()) > OPENING_LIMIT:
            over.append(f"the first view takes {max(found.values()):.1f} s")
    finish(over)


PARTS = {
    "taking": taking,
    "cost": cost,
    "idle": idle,
    "hour": hour,
    "latency": latency,
    "opening": opening,
    "browser": browser,
}

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    start({**PARTS, "write": write}, main)
