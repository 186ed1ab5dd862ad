"""The process that keeps a local cluster: it starts the nodes and stops everything that it started.

It is a separate process for three reasons. Its changes to Ray's internals affect no other process. Every process of
the cluster descends from it, and as a subreaper it inherits those whose parents die, so none escapes. And it notices
the end of the process that asked for the cluster, even by SIGKILL, because its standard input ends.

It reads a spec and then commands, one JSON object per line, and answers each with one.
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
from typing import TYPE_CHECKING, Any

import psutil

from roost.deadline import Deadline
from roost.machine.processes import adopt_orphans, reap
from roost.testing.limits import NODES_SECONDS
from roost.testing.plain import PlainStarter

if TYPE_CHECKING:
    from roost.testing.quick import QuickStarter


class Keeper:
    """The nodes of one local cluster, and their folder."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.folder: Path = Path(spec["folder"])
        self.note: str = ""
        """Why the quick way was not taken, for the user."""
        self.starter: PlainStarter | QuickStarter = PlainStarter(spec)
        if spec["fast"]:
            try:
                from roost.testing.quick import QuickStarter

                self.starter = QuickStarter(spec)
            except (ImportError, AttributeError, TypeError) as error:
                self.note = f"the quick start does not know this Ray, so `ray start` is used: {error}"
        self.pids: dict[int, list[int]] = {}
        """The processes of each node."""
        self.stays: bool = False
        """Whether the cluster outlives the process that asked for it; otherwise it ends with standard input."""
        self._stopping = threading.Event()

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Carry out a command, and return the state of the cluster."""
        if command["do"] == "start":
            # The head, which is the first of all, before the others.
            deadline = Deadline.after(command["timeout"])
            self._start_all(command["nodes"][:1], deadline)
            self._start_all(command["nodes"][1:], deadline)
        elif command["do"] == "kill":
            for pid in self.pids.pop(command["rank"]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            reap()
        elif command["do"] == "stay":
            self.stays = True
        return {"address": self.starter.address, "note": self.note, "pids": self.pids}

    def stop(self) -> None:
        """Kill every descendant of this process and remove the folder."""
        self._stopping.set()
        deadline = Deadline.after(NODES_SECONDS)
        while not deadline.is_over:
            reap()
            left = psutil.Process().children(recursive=True)
            if not left:
                break
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.01)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start_all(self, nodes: list[dict[str, Any]], deadline: Deadline) -> None:
        """Start nodes at the same time."""
        failures: list[str] = []
        done = threading.Semaphore(0)

        def keep(node: dict[str, Any]) -> None:
            # The kernel kills the node when the thread that started it ends, so the thread lives as long as the keeper.
            try:
                self.pids[node["rank"]] = self.starter.start(node)
            except Exception:
                failures.append(f"node {node['rank']}: {traceback.format_exc()}")
            done.release()
            self._stopping.wait()

        for node in nodes:
            threading.Thread(target=keep, args=(node,), daemon=True).start()
        for _ in nodes:
            if not done.acquire(timeout=deadline.left):
                failures.append("a node did not come up in time")
                break
        if failures:
            raise RuntimeError("\n".join(failures))


def main() -> None:
    """Read the spec, run commands, and stop at the end of the input or, for a cluster that stays, at SIGTERM."""
    adopt_orphans()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    # Children must neither hold the two pipes nor write to them.
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    spec = json.loads(requests.readline())
    log = os.open(Path(spec["folder"]) / "keeper.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    keeper = Keeper(spec)

    def run_commands() -> None:
        for line in requests:
            try:
                answer = keeper.answer(json.loads(line))
            except Exception:
                answer = {"error": traceback.format_exc()}
            with contextlib.suppress(BrokenPipeError):
                print(json.dumps(answer), file=answers, flush=True)
        if not keeper.stays:
            stop.set()

    try:
        threading.Thread(target=run_commands, daemon=True).start()
        while not stop.wait(0.2):
            reap()
    finally:
        keeper.stop()


if __name__ == "__main__":
    main()
