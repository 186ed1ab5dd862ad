"""The process that keeps a local cluster: it starts the nodes, and stops exactly what it started.

A process of its own, for three reasons. What it does to Ray's internals stays in it. Every process of the cluster
descends from it, and as a subreaper it inherits those whose parents die, so nothing escapes. And when the process
that asked for the cluster is gone, even by SIGKILL, the end of standard input tells.

It reads a spec and then commands, one JSON object a line, and answers each with one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
import time
import traceback
from pathlib import Path
from typing import Any, Protocol

import psutil

from roost.machine.processes import adopt_orphans, reap

_STOP_SECONDS = 10.0


class RunningNode(Protocol):
    """One node that was started."""

    pids: list[int]


class Starter(Protocol):
    """A way to start nodes: the quick one, or the plain one with Ray's own command."""

    address: str
    note: str
    """What a user should know of the way that was taken."""

    def start(self, node: dict[str, Any], *, head: bool) -> RunningNode: ...


class Keeper:
    """The nodes of one local cluster and the folder that they live in."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.folder: Path = Path(spec["folder"])
        self.starter: Starter = make_starter(spec)
        self.nodes: dict[int, RunningNode] = {}
        self.stays = False
        """Whether the cluster outlives whoever asked for it; until told so, the end of the input is the end."""
        self._stopping = threading.Event()

    def boot(self, nodes: list[dict[str, Any]], deadline: float) -> None:
        """Start the head, then the others at once."""
        self._start_all(nodes[:1], deadline, head=True)
        self._start_all(nodes[1:], deadline, head=False)

    def add(self, node: dict[str, Any], deadline: float) -> None:
        """Start one more node."""
        self._start_all([node], deadline, head=False)

    def kill(self, rank: int) -> None:
        """End a node as a power cut would."""
        for pid in self.nodes.pop(rank).pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap()

    def stop(self) -> None:
        """End every process that descends from this one, and remove the folder."""
        self._stopping.set()
        deadline = time.monotonic() + _STOP_SECONDS
        while time.monotonic() < deadline:
            reap()
            left = psutil.Process().children(recursive=True)
            if not left:
                break
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.01)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start_all(self, nodes: list[dict[str, Any]], deadline: float, *, head: bool) -> None:
        failures: list[str] = []
        done = threading.Semaphore(0)

        def keep(node: dict[str, Any]) -> None:
            # The kernel kills the node when the thread that started it ends, so the thread stays as long as the keeper.
            try:
                self.nodes[node["rank"]] = self.starter.start(node, head=head)
            except Exception:
                failures.append(f"node {node['rank']}: {traceback.format_exc()}")
            done.release()
            self._stopping.wait()

        for node in nodes:
            threading.Thread(target=keep, args=(node,), daemon=True).start()
        for _ in nodes:
            if not done.acquire(timeout=max(0.0, deadline - time.monotonic())):
                failures.append("a node did not come up in time")
                break
        if failures:
            raise RuntimeError("\n".join(failures))


def make_starter(spec: dict[str, Any]) -> Starter:
    """The quick starter, or the plain one where the quick one does not fit this Ray or was not wanted."""
    from roost.testing.plain import PlainStarter

    if not spec["fast"]:
        return PlainStarter(spec, note="")
    try:
        from roost.testing.quick import QuickStarter

        return QuickStarter(spec)
    except (ImportError, AttributeError, TypeError) as error:
        return PlainStarter(
            spec, note=f"this Ray is not one that the quick start knows, so `ray start` is used: {error}"
        )


def _answer(keeper: Keeper, line: str) -> dict[str, Any]:
    command = json.loads(line)
    deadline = time.monotonic() + float(command.get("timeout", 60))
    if command["do"] == "boot":
        keeper.boot(command["nodes"], deadline)
    elif command["do"] == "add":
        keeper.add(command["node"], deadline)
    elif command["do"] == "kill":
        keeper.kill(command["rank"])
    elif command["do"] == "stay":
        keeper.stays = True
    pids = {rank: node.pids for rank, node in keeper.nodes.items()}
    return {"address": keeper.starter.address, "note": keeper.starter.note, "pids": pids}


def main() -> None:
    """Read the spec, obey, and stop when the input ends, unless told to stay until SIGTERM."""
    adopt_orphans()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    # The children must not hold the two pipes, nor write into them.
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    spec = json.loads(requests.readline())
    log = os.open(Path(spec["folder"]) / "keeper.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    keeper = Keeper(spec)

    def obey() -> None:
        for line in requests:
            try:
                answer = _answer(keeper, line)
            except Exception:
                answer = {"error": traceback.format_exc()}
            with contextlib.suppress(BrokenPipeError):
                print(json.dumps(answer), file=answers, flush=True)
        if not keeper.stays:
            stop.set()

    try:
        threading.Thread(target=obey, daemon=True).start()
        while not stop.wait(0.2):
            reap()
    finally:
        keeper.stop()


if __name__ == "__main__":
    main()
