"""Start nodes quickly: with Ray's own node class, without what a test does not need.

Ray's public interface cannot leave these out: the API server, the monitor, workers started in advance, and two agents
on each node. On a quiet machine with 2 cores they take four fifths of the boot time. A raylet expects its agents as
children and their ports in files: it gets a waiting shell for each, and the files. The agent that sets up a
`runtime_env` starts when it is needed: without it such an actor would hang.
"""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from typing import Any

import ray._raylet
from ray._private import services
from ray._private.node import Node
from ray._private.parameter import RayParams

from roost.machine.forks import FOLDER, make_program
from roost.testing.lazy_agent import LazyAgent

# Notice in a second, not in fifteen, that a raylet is gone.
_SYSTEM_CONFIG = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 3,
}
_AGENT_PORTS = ("METRICS_AGENT_PORT_NAME", "METRICS_EXPORT_PORT_NAME", "DASHBOARD_AGENT_LISTEN_PORT_NAME")


class QuickStarter:
    """Starts nodes with Ray's node class, from any number of threads."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.address: str = ""
        self._folder = Path(spec["folder"])
        self._standin = self._folder / "agent.sh"
        # It waits for a line that never comes, and ends with the keeper, which holds the other end.
        pipe = self._folder / "silence"
        os.mkfifo(pipe)
        self._silence = os.open(pipe, os.O_RDWR | os.O_CLOEXEC)
        self._standin.write_text(f"read word < {pipe}\n", encoding="utf-8")
        self._python = make_program(self._folder / FOLDER) if spec["warm"] else sys.executable
        """The program that raylets run as Python to start workers."""
        original = services.start_ray_process
        _check_parameters(original, "command", "process_type", "fate_share")
        _check_parameters(RayParams.__init__, "runtime_env_agent_port", "include_log_monitor", "no_monitor")

        def start(command: list[str], process_type: str, *args: Any, **kwargs: Any) -> Any:
            if process_type == "raylet":
                command = self.raylet_command(command)
            # Ray decides about fate sharing for a whole node; here every process dies with the keeper.
            kwargs["fate_share"] = True
            return original(command, process_type, *args, **kwargs)

        services.start_ray_process = start
        Node.start_api_server = lambda _node, **_options: None  # type: ignore[method-assign]

    def start(self, node: dict[str, Any]) -> list[int]:
        """Start a node, wait until it is registered, and return its processes."""
        rank = node["rank"]
        head = rank == 0
        settings: dict[str, Any] = {
            "node_ip_address": node["address"],
            "node_name": node["name"],
            "num_cpus": node["cpus"],
            "num_gpus": node["accelerators"] or None,
            "resources": node["resources"],
            "labels": node["labels"],
            "env_vars": node["env"],
            "object_store_memory": node["object_store_memory"],
            "min_worker_port": 0,
            "max_worker_port": 0,
            "node_manager_port": 0,
            "runtime_env_agent_port": node["ports"][0],
            "no_monitor": True,
            "include_log_monitor": False,
            "include_dashboard": False,
            "temp_dir": str(self._folder),
            # Separate names for each node: Ray's defaults race.
            "plasma_store_socket_name": str(self._folder / f"p{rank}"),
            "raylet_socket_name": str(self._folder / f"r{rank}"),
        }
        of_head = {"gcs_server_port": node["ports"][1], "_system_config": _SYSTEM_CONFIG}
        settings |= of_head if head else {"gcs_address": self.address}
        started = Node(RayParams(**settings), head=head, shutdown_at_exit=False, spawn_reaper=False)
        if head:
            self.address = started.gcs_address
        return [info.process.pid for infos in started.all_processes.values() for info in infos]

    def raylet_command(self, command: list[str]) -> list[str]:
        """Return the raylet's command, with no workers in advance and with stand-ins for its agents."""
        flags = dict(word[2:].split("=", 1) for word in command if word.startswith("--") and "=" in word)
        raylet: Any = ray._raylet
        agent_port = int(flags["runtime_env_agent_port"])
        for name, port in {**dict.fromkeys(_AGENT_PORTS, 1), "RUNTIME_ENV_AGENT_PORT_NAME": agent_port}.items():
            raylet.persist_port(flags["session_dir"], flags["node_id"], getattr(raylet, name), port)
        LazyAgent(flags["node_ip_address"], agent_port, flags["runtime_env_agent_command"])
        standin = f"/bin/sh {self._standin}"
        changed = {
            "num_prestart_python_workers": "0",
            "dashboard_agent_command": standin,
            "runtime_env_agent_command": standin,
            "python_worker_command": flags["python_worker_command"].replace(sys.executable, self._python, 1),
        }
        names = [word.removeprefix("--").partition("=")[0] for word in command]
        return [
            f"--{name}={changed[name]}" if name in changed else word for name, word in zip(names, command, strict=True)
        ]


def _check_parameters(function: Any, *names: str) -> None:
    """Raise TypeError if a function of Ray lacks a parameter used here, so that the plain way is taken."""
    missing = set(names) - set(inspect.signature(function).parameters)
    if missing:
        raise TypeError(f"{function.__qualname__} has no {', '.join(sorted(missing))}")
