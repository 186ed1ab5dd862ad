"""A real multi-node Ray cluster on this machine: one raylet a node, loopback addresses, fake accelerators."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import secrets
import select
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roost.config.hardware import AcceleratorType
from roost.config.topology import Topology
from roost.deadline import Deadline
from roost.errors import ClusterError, ConfigError
from roost.machine.folders import socket_folder
from roost.machine.forks import FOLDER, set_wanted
from roost.machine.ports import taken_ports
from roost.runtime.connect.authentication import refresh_authentication, set_variables, token_for_local_clusters
from roost.runtime.nodes.accelerators import variables_of_interest
from roost.testing.limits import KEEPER_SECONDS
from roost.text import plural

_OBJECT_STORE_BYTES = 100 * 2**20
_LEAST_OBJECT_STORE_BYTES = 75 * 2**20
"""Ray starts no smaller one."""
_MAX_NODES = 250
_PORTS_PER_NODE = 3
# Not the global generator: a test may seed it, and two clusters would draw the same addresses.
_random = random.SystemRandom()
_RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    # A raylet that starts before its object store retries after a second by default.
    "RAY_raylet_client_connect_timeout_milliseconds": "20",
    "RAY_raylet_client_num_connect_attempts": "1000",
}
_NOT_OURS = ("RAY_ADDRESS", "RAY_NAMESPACE", "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_AUTH_TOKEN", "ROOST_NODE_RANK")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalNode:
    """One node of a local cluster.

    `env` is added to the environment of the node's processes, as in `ROOST_NODE_RANK=1 ray start …`; `name` is what
    Ray calls the node. `object_store_memory` is the size of its object store in bytes, which is in shared memory.
    """

    accelerators: int = 0
    model: str | None = None
    cpus: int = 8
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)
    address: str | None = None
    name: str | None = None
    object_store_memory: int = _OBJECT_STORE_BYTES

    def __post_init__(self) -> None:
        size = self.object_store_memory
        if type(size) is not int or size < _LEAST_OBJECT_STORE_BYTES:
            raise ConfigError(
                f"a local node has object_store_memory={size!r}",
                hint=f"it is a number of bytes, at least {_LEAST_OBJECT_STORE_BYTES:,}",
            )
        if type(self.accelerators) is not int or self.accelerators < 0 or type(self.cpus) is not int or self.cpus < 1:
            raise ConfigError(
                f"a local node has accelerators={self.accelerators!r} and cpus={self.cpus!r}",
                hint="accelerators is at least 0, cpus at least 1",
            )


class LocalCluster:
    """A local cluster, from `start` to `stop`; as a context manager it also sets and restores `RAY_ADDRESS`.

    `environment` holds the variables that another process needs to join it.
    """

    def __init__(
        self,
        nodes: Sequence[LocalNode],
        *,
        timeout: float = 90,
        fast: bool = True,
        warm: bool = True,
        preload: Sequence[str] = (),
        stays: bool = False,
    ) -> None:
        if not nodes or len(nodes) > _MAX_NODES:
            raise ConfigError(f"a local cluster has 1 to {_MAX_NODES} nodes, not {len(nodes)}")
        if not sys.platform.startswith("linux"):
            raise ClusterError("local clusters need Linux: other systems have one loopback address only")
        self.nodes: list[LocalNode] = list(nodes)
        self.address: str = ""
        self.note: str = ""
        self.folder: Path = Path()
        self.environment: dict[str, str] = {}
        self.pids: dict[int, list[int]] = {}
        """The processes of each node: the raylet, and on node 0 those of Ray's head too."""
        self._timeout = timeout
        self._fast = fast
        self._warm = fast and warm
        self._wanted = _check_modules(preload)
        self._stays = stays
        self._network = f"127.{_random.randint(1, 254)}.{_random.randint(0, 254)}"
        self._keeper: subprocess.Popen[str] | None = None
        self._undo = contextlib.ExitStack()

    @property
    def keeper_pid(self) -> int:
        """The pid of the process that keeps the cluster."""
        return self._running.pid

    def start(self) -> None:
        """Start every node and wait until all are registered; leave nothing behind if that fails."""
        if self._keeper is not None:
            raise ClusterError("the local cluster is running already")
        authentication = token_for_local_clusters()
        self.folder = socket_folder() / f"ray-{secrets.token_hex(4)}"
        try:
            self.folder.mkdir(mode=0o700)
            not_ours = {*_NOT_OURS, *variables_of_interest()}
            environment = {name: value for name, value in os.environ.items() if name not in not_ours}
            # By default every raylet assumes that it has all cores, and one that may start several processes at a time
            # starts more than it needs: two for a single task.
            concurrency = str(max(1, (os.cpu_count() or 1) // len(self.nodes)))
            environment |= {**_RAY_SETTINGS, "RAY_worker_maximum_startup_concurrency": concurrency, **authentication}
            self._keeper = subprocess.Popen(
                [sys.executable, "-m", "roost.testing.keeper"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL if self._stays else None,
                text=True,
                env=environment,
                # Ctrl-C goes to the process that asked for the cluster, which then stops it in order.
                start_new_session=True,
            )
            self._send({"folder": str(self.folder), "fast": self._fast, "warm": self._warm})
            self._send(self._start_command(self.nodes))
            if not self._stays:
                # This process is about to use Ray, and importing it takes as long as the nodes do.
                import ray  # noqa: F401
            self._receive()
            self.preload(*self._wanted)
        except BaseException:
            self.stop()
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self.environment = {"RAY_ADDRESS": self.address, **authentication}

    def stop(self) -> None:
        """Stop every process that `start` started."""
        if self._keeper is None:
            return
        keeper = self._release()
        if self._stays:
            keeper.terminate()
        try:
            keeper.wait(KEEPER_SECONDS)
        except subprocess.TimeoutExpired:
            # The kernel then kills the nodes, which are its children.
            keeper.kill()
            keeper.wait(KEEPER_SECONDS)
        # The keeper does this too, unless it failed to start.
        shutil.rmtree(self.folder, ignore_errors=True)

    def leave_running(self) -> None:
        """Detach from the cluster, so that it keeps running when this process ends."""
        self._send({"do": "stay"})
        self._receive()
        # Popen warns when it is dropped while the process runs, which is intended here.
        self._release().returncode = 0

    def add_node(self, node: LocalNode) -> int:
        """Start one more node and return its rank."""
        self._send(self._start_command([node], len(self.nodes)))
        self._receive()
        self.nodes.append(node)
        return len(self.nodes) - 1

    def preload(self, *modules: str) -> None:
        """Let workers that start from now on share one import of these modules, which replace those named before.

        One that is no installed package, or that starts a thread, opens a device or changes the environment when it is
        imported, is left out, and the log of the node's raylet says so.
        """
        self._wanted = _check_modules(modules)
        folder = self.folder / FOLDER
        if self._warm and folder.is_dir():
            set_wanted(folder, self._wanted)

    def kill_node(self, rank: int) -> None:
        """Kill a node's processes, as a power cut would."""
        if rank not in self.pids:
            raise ConfigError(f"there is no node {rank} that runs")
        self._send({"do": "kill", "rank": rank})
        self._receive()

    def __enter__(self) -> LocalCluster:
        self.start()
        self._undo.callback(set_variables(self.environment))
        refresh_authentication()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            # Disconnect this process before the cluster goes away.
            if "ray" in sys.modules:
                import ray

                from roost.runtime.cluster import Cluster

                Cluster.close_if_open(self.address)
                if ray.is_initialized() and ray.get_runtime_context().gcs_address == self.address:
                    ray.shutdown()
        finally:
            self._undo.close()
            refresh_authentication()
            self.stop()

    def _start_command(self, nodes: Sequence[LocalNode], first: int = 0) -> dict[str, Any]:
        """Return the keeper's command to start these nodes, of which the first has the rank `first`."""
        # Free on every interface, and below the kernel's range for outgoing connections.
        tried, wanted = _random.sample(range(20000, 32000), 8000), _PORTS_PER_NODE * len(nodes)
        free = list(itertools.islice((port for port in tried if not taken_ports([(port, 1)])), wanted))
        if len(free) < wanted:
            raise ClusterError("no free port between 20000 and 32000 on this machine")
        ports = iter(free)
        described = [
            {
                "rank": rank,
                "address": node.address or f"{self._network}.{rank + 1}",
                "name": node.name or f"local-{rank}",
                "cpus": node.cpus,
                "accelerators": node.accelerators,
                "resources": {
                    **node.resources,
                    **({f"accelerator_type:{node.model}": 1} if node.model and node.accelerators else {}),
                },
                "labels": dict(node.labels),
                "env": dict(node.env),
                "object_store_memory": node.object_store_memory,
                "ports": [next(ports) for _ in range(_PORTS_PER_NODE)],
            }
            for rank, node in enumerate(nodes, first)
        ]
        return {"do": "start", "nodes": described, "timeout": self._timeout}

    @property
    def _running(self) -> subprocess.Popen[str]:
        if self._keeper is None:
            raise ClusterError("the local cluster is not running")
        return self._keeper

    def _release(self) -> subprocess.Popen[str]:
        """Close the pipes to the keeper, which ends it unless it is to stay, and return it."""
        keeper, self._keeper = self._running, None
        for pipe in filter(None, (keeper.stdin, keeper.stdout)):
            # If the keeper is gone, the pipe has no reader for what is still buffered.
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        return keeper

    def _send(self, request: dict[str, Any]) -> None:
        try:
            print(json.dumps(request), file=self._running.stdin, flush=True)
        except BrokenPipeError:
            raise ClusterError(f"the process that keeps the local cluster is gone{self._last_words()}") from None

    def _receive(self) -> None:
        """Wait for the keeper's answer, and keep what it says about the cluster."""
        pipe: Any = self._running.stdout
        deadline = Deadline.after(self._timeout + 5)
        while not select.select([pipe], [], [], 1)[0]:
            if deadline.is_over:
                late = f"{plural(len(self.nodes), 'node')} did not start in {self._timeout:g} s"
                raise ClusterError(f"{late}{self._last_words()}")
        line = pipe.readline()
        if not line:
            raise ClusterError(f"the process that keeps the local cluster is gone{self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise ClusterError(f"the local cluster could not do that: {answer['error'].strip()}")
        self.address, self.note = answer["address"], answer["note"]
        self.pids = {int(rank): pids for rank, pids in answer["pids"].items()}

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            text = (self.folder / "keeper.log").read_text(encoding="utf-8", errors="replace").strip()
            return f": {text[-1000:]}" if text else ""
        return ""


def local_cluster(
    spec: str | Sequence[LocalNode] = "1x1",
    *,
    cpus: int = 8,
    object_store_memory: int = _OBJECT_STORE_BYTES,
    timeout: float = 90,
    fast: bool = True,
    warm: bool = True,
    preload: Sequence[str] = (),
) -> LocalCluster:
    """Start a Ray cluster on this machine for a `with` block.

    `spec` is nodes x accelerators [: model], as everywhere in Roost, or a list of `LocalNode`. Inside the block
    `RAY_ADDRESS` leads to the cluster, for this process and its children. Every node has its own loopback
    address. The accelerators are fake: Ray counts them, but there are no devices. `object_store_memory` is the size of
    each node's object store in bytes; what does not fit in goes to disk. With a list of `LocalNode`, each has its own
    `cpus` and `object_store_memory`. `fast=False` starts the nodes with `ray start`, which takes longer and uses only
    Ray's public interface.

    Workers start warm: each is a fork of a process that has imported Ray and Roost, and the modules of `preload`, such
    as `["torch"]`. With `warm=False`, and with `fast=False`, each starts from scratch.

        with local_cluster("2x8,1x0") as local:
            cluster = Cluster(num_nodes=3)
    """
    nodes = local_nodes(spec, cpus=cpus, object_store_memory=object_store_memory)
    return LocalCluster(nodes, timeout=timeout, fast=fast, warm=warm, preload=preload)


def local_nodes(
    spec: str | Sequence[LocalNode], *, cpus: int = 8, object_store_memory: int = _OBJECT_STORE_BYTES
) -> list[LocalNode]:
    """The nodes that a shorthand describes."""
    if not isinstance(spec, str):
        if not all(isinstance(node, LocalNode) for node in spec):
            raise ConfigError(f"{spec!r} is not a list of LocalNode", hint='write "2x8,1x0", or a list of LocalNode')
        return list(spec)
    nodes = Topology.from_shorthand(spec).nodes[: _MAX_NODES + 1]
    return [
        LocalNode(
            accelerators=len(node.accelerators),
            model=node.accelerators[0].model if node.accelerator_type != AcceleratorType.NONE else None,
            cpus=cpus,
            object_store_memory=object_store_memory,
        )
        for node in nodes
    ]


def _check_modules(names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str) or not all(
        isinstance(name, str) and all(part.isidentifier() for part in name.split(".")) for name in names
    ):
        raise ConfigError(f"preload is {names!r}", hint='it is a list of modules: ["torch", "transformers.models"]')
    return tuple(dict.fromkeys(names))
