"""Measures how soon a death is noticed and named, and how late after its deadline a caller hears of a hang.

Every failure is real: processes are killed or stopped with signals, on local clusters.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator

from parts import finish, run, start

from roost import Cluster, ClusterError, NodePlacementStrategy, Worker, WorkerGroup
from roost.testing import NumpyEngine, local_cluster

ROUNDS, NODE_ROUNDS, HANG_ROUNDS = 6, 4, 3
DEADLINE, LAUNCH_DEADLINE = 2.0, 5.0
LIMITS = {"worker": 2.0, "node": 5.0, "manager": 2.0, "engine": 2.0}
LATE_LIMIT = 1.0
SECONDS = 120
MANAGERS = ("NodeManager", "WorkerManager", "CollectiveManager")
DEATHS = {
    "worker": "a worker: the call that it is in raises `WorkerDied`",
    "node": "a node: a call to its worker raises `WorkerDied`, and `cluster.dead_nodes` has it",
    "manager": "a manager: a warning names it",
    "engine": "an engine: the router knows, and says why",
}
HANGS = {
    "worker hangs": "a worker: `wait(2)`",
    "manager hangs": "a manager: `launch(timeout=5)`",
    "engine hangs": "both engines: `generate(timeout=2)`",
}


class Idler(Worker):
    """A worker that does nothing, quickly or slowly."""

    def idle(self, seconds: float = 0.0) -> None:
        time.sleep(seconds)


class Warnings(logging.Handler):
    """Keeps what Roost logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""
        logging.getLogger("roost").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.text += f"{record.getMessage()}\n"


def wait_for(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_so():
        if time.monotonic() > deadline:
            sys.exit(f"not in {SECONDS} s: {what}")
        time.sleep(0.01)


def expect(call: Callable[[], object], name: str) -> None:
    """Make a call that must raise an error that names someone."""
    try:
        call()
    except ClusterError as error:
        if name not in str(error):
            sys.exit(f"the error does not name {name}: {error}")
    else:
        sys.exit(f"no error named {name}")


def pid_of(cluster: Cluster, address: str) -> int:
    """The process of a worker."""
    return next(item.pid for item in cluster.worker_manager.get_workers() if item.address == address)


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Let processes hang inside the block."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def summary(found: dict[str, list[float]]) -> dict[str, float]:
    return {
        f"{name} {kind}": function(values)
        for name, values in found.items()
        for kind, function in (("median", statistics.median), ("worst", max))
    }


def idlers(cluster: Cluster, name: str, nodes: list[int]) -> WorkerGroup:
    return Idler.create_group().launch(cluster, NodePlacementStrategy(nodes), name)


def small() -> dict[str, float]:
    """Deaths and hangs of workers and managers."""
    from roost.runtime.nodes.ray_state import read_ray_state

    def pid_of_manager(name: str) -> int:
        return next(actor.pid for actor in read_ray_state().actors if actor.name == name)

    warnings = Warnings()
    found: dict[str, list[float]] = {"worker": [], "manager": [], "worker hangs": [], "manager hangs": []}
    with local_cluster("2x1"), Cluster(num_nodes=2, quiet=True, record=False) as cluster:
        group = idlers(cluster, "idle", [0, 1])
        for number in range(ROUNDS):
            rank = number % 2
            pid = pid_of(cluster, f"idle:{rank}")
            result = group[rank].idle(SECONDS)
            time.sleep(0.3)
            began = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            expect(result.wait, f"idle:{rank}")
            found["worker"].append(time.monotonic() - began)
            group.restart(rank)
        for number in range(ROUNDS):
            name = MANAGERS[number % len(MANAGERS)]
            warnings.text = ""
            began = time.monotonic()
            os.kill(pid_of_manager(name), signal.SIGKILL)
            wait_for(lambda name=name: f"the {name} died" in warnings.text, f"a warning names the {name}")
            found["manager"].append(time.monotonic() - began)
            wait_for(lambda name=name: f"the {name} is back" in warnings.text, f"the {name} is back")
        for _ in range(HANG_ROUNDS):
            with stopped(pid_of(cluster, "idle:1")):
                began = time.monotonic()
                expect(lambda: group.idle().wait(DEADLINE), "1 (node 1")
                found["worker hangs"].append(time.monotonic() - began - DEADLINE)
            # One has to know the workers; the other one has their ports, and reserves accelerators for the last group.
            on_node = NodePlacementStrategy([0])
            for name, where in (("WorkerManager", on_node), ("NodeManager", on_node), ("NodeManager", None)):
                draft = Idler.create_group()
                with stopped(pid_of_manager(name)):
                    began = time.monotonic()
                    expect(functools.partial(draft.launch, cluster, where, "late", timeout=LAUNCH_DEADLINE), name)
                    found["manager hangs"].append(time.monotonic() - began - LAUNCH_DEADLINE)
                wait_for(lambda: "late" not in str(cluster.node_manager.get_slots()), "the accelerators are free again")
    return summary(found)


def node() -> dict[str, float]:
    """Deaths of nodes."""
    took = []
    with local_cluster(f"{NODE_ROUNDS + 1}x0") as local, Cluster(num_nodes=NODE_ROUNDS + 1, quiet=True) as cluster:
        groups = {rank: idlers(cluster, f"idle{rank}", [rank]) for rank in range(1, NODE_ROUNDS + 1)}
        for rank, group in groups.items():
            result = group.idle(SECONDS)
            time.sleep(0.3)
            began = time.monotonic()
            local.kill_node(rank)
            expect(result.wait, f"node {rank}")
            wait_for(lambda rank=rank: rank in cluster.dead_nodes, f"node {rank} is dead")
            took.append(time.monotonic() - began)
    return summary({"node": took})


def engine() -> dict[str, float]:
    """Deaths and hangs of engines."""
    from roost.rl import RolloutManager, create_placement_groups

    found: dict[str, list[float]] = {"engine": [], "engine hangs": []}
    args = argparse.Namespace(actor_num_nodes=1, rollout_num_gpus=2, debug_rollout_only=True)
    with (
        local_cluster("1x2"),
        Cluster(num_nodes=1, quiet=True, record=False) as cluster,
        create_placement_groups(args, cluster) as groups,
        RolloutManager(args, NumpyEngine, groups["rollout"], cluster=cluster) as manager,
    ):
        request = {"observations": [[1.0] * 4]}
        addresses = [f"{manager.engines.group.name}:{rank}" for rank in range(2)]
        for _ in range(HANG_ROUNDS):
            with stopped(*(pid_of(cluster, address) for address in addresses)):
                began = time.monotonic()
                expect(lambda: manager.generate(request, timeout=DEADLINE), manager.router_url)
                found["engine hangs"].append(time.monotonic() - began - DEADLINE)
            wait_for(lambda: all(state.healthy for state in manager.engine_states()), "the engines are well again")
        for number in range(ROUNDS):
            rank = number % 2
            url = manager.engines.urls[rank]
            pid = pid_of(cluster, addresses[rank])
            began = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            wait_for(
                lambda url=url: any(item.url == url and item.why for item in manager.engine_states()), f"{url} is ill"
            )
            found["engine"].append(time.monotonic() - began)
            manager.restart_engine(rank)
    return summary(found)


PARTS = {"small": small, "node": node, "engine": engine}


def main() -> None:
    found = {name: value for part in PARTS for name, value in run(__file__, part).items()}
    over = []

    def line(key: str, what: str, limit: float) -> str:
        if found[f"{key} worst"] > limit:
            over.append(what)
        return f"| {what} | {found[f'{key} median']:.2f} | {found[f'{key} worst']:.2f} | {limit:g} |"

    print("\n| the death of | noticed and named: median s | worst s | limit |\n|---|---:|---:|---:|")
    for key, what in DEATHS.items():
        print(line(key, what, LIMITS[key]))
    print("\n| a hang of | seconds after the deadline: median | worst | limit |\n|---|---:|---:|---:|")
    for key, what in HANGS.items():
        print(line(key, what, LATE_LIMIT))
    finish(over)


if __name__ == "__main__":
    start(PARTS, main)
