"""The agent that sets up a `runtime_env`, started when it is first needed.

Every node has such an agent, and starting it takes as long as starting the node. Most tests never use it. So the
keeper listens on the agent's port; at the first connection it starts the real agent on another port, and from then
on it forwards bytes in both directions.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import threading
import time

from roost.deadline import Deadline
from roost.machine.ports import answers
from roost.machine.processes import die_with_parent
from roost.testing.limits import AGENT_SECONDS

_PORT_FLAG = "--runtime-env-agent-port"


class LazyAgent:
    """Listens in place of one node's agent; `command` is what Ray would start, with its port in it."""

    def __init__(self, address: str, port: int, command: str) -> None:
        self._address = address
        self._command = [word for word in shlex.split(command) if not word.startswith(_PORT_FLAG)]
        # The agent exits when its parent is not the raylet, and here its parent is the keeper.
        self._environment = {**os.environ, "RAY_RAYLET_PID": str(os.getpid())}
        self._family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, port), family=self._family)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        """Start the agent in this thread, which stays: the kernel kills the agent with the thread that started it."""
        client, _ = self._listener.accept()
        try:
            target = self._start()
        except OSError:
            # The raylet sees that its connection ends.
            client.close()
            self._listener.close()
            return
        while True:
            threading.Thread(target=_connect, args=(client, target), daemon=True).start()
            client, _ = self._listener.accept()

    def _start(self) -> tuple[str, int]:
        """Start the agent and wait until it listens."""
        with socket.create_server((self._address, 0), family=self._family) as free:
            port = free.getsockname()[1]
        subprocess.Popen(  # noqa: S603 - Ray's own command
            [*self._command, f"{_PORT_FLAG}={port}"],
            stdin=subprocess.DEVNULL,
            env=self._environment,
            preexec_fn=die_with_parent,
        )
        deadline = Deadline.after(AGENT_SECONDS)
        while not answers(f"{self._address}:{port}"):
            if deadline.is_over:
                raise TimeoutError("the agent does not listen")
            time.sleep(0.02)
        return self._address, port


def _connect(client: socket.socket, target: tuple[str, int]) -> None:
    with client, contextlib.suppress(OSError), socket.create_connection(target) as agent:
        back = threading.Thread(target=_pump, args=(agent, client), daemon=True)
        back.start()
        _pump(client, agent)
        back.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Copy bytes until the source ends."""
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
