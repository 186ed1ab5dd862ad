"""Start nodes with `ray start`: works with any Ray, and is slower than the quick way."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from roost.deadline import Deadline
from roost.machine.processes import die_with_parent
from roost.testing.limits import BOOT_SECONDS


class PlainStarter:
    """Starts nodes with Ray's own command."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.address: str = ""
        self._folder = Path(spec["folder"])
        self._one_at_a_time = threading.Lock()

    def start(self, node: dict[str, Any]) -> list[int]:
        """Start a node, wait until its raylet is registered, which `ray start` prints, and return its processes."""
        installed = Path(sys.executable).with_name("ray")
        ray = str(installed) if installed.exists() else shutil.which("ray")
        command = [
            *([ray] if ray else [sys.executable, "-m", "ray.scripts.scripts"]),
            "start",
            "--block",
            "--disable-usage-stats",
            f"--node-ip-address={node['address']}",
            f"--node-name={node['name']}",
            f"--num-cpus={node['cpus']}",
            f"--num-gpus={node['accelerators']}",
            f"--resources={json.dumps(node['resources'])}",
            f"--labels={','.join(f'{key}={value}' for key, value in node['labels'].items())}",
            f"--object-store-memory={node['object_store_memory']}",
            f"--runtime-env-agent-port={node['ports'][0]}",
            f"--dashboard-agent-listen-port={node['ports'][2]}",
            "--min-worker-port=0",
            "--max-worker-port=0",
        ]
        if node["rank"] == 0:
            self.address = f"{node['address']}:{node['ports'][1]}"
            command += ["--head", f"--port={node['ports'][1]}"]
            command += ["--include-dashboard=false", f"--temp-dir={self._folder}"]
        else:
            command.append(f"--address={self.address}")
        log = self._folder / f"start-{node['rank']}.log"
        # Two nodes that start in one session folder at the same time can choose the same socket.
        with self._one_at_a_time, log.open("wb") as out:
            process = subprocess.Popen(  # noqa: S603 - Ray's own command
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=os.environ | node["env"],
                preexec_fn=die_with_parent,
            )
            deadline = Deadline.after(BOOT_SECONDS)
            while b"Ray runtime started" not in (said := log.read_bytes()):
                if process.poll() is not None or deadline.is_over:
                    raise RuntimeError(f"`ray start` did not start the node:\n{said.decode(errors='replace')[-3000:]}")
                time.sleep(0.05)
        return [process.pid, *(child.pid for child in psutil.Process(process.pid).children())]
