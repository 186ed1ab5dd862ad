"""Collects the facts of a Ray cluster for `roost doctor`, with a short task on each node."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.util import list_named_actors

from roost.deadline import Deadline
from roost.doctor.facts import Clock, ClusterFacts, JobFacts, NodeFacts, Unknown
from roost.doctor.limits import ASK_SECONDS, PING_SECONDS
from roost.doctor.machine_facts import collect_machine, collect_node, driver_folders, gather, tell_time
from roost.errors import CheckFailed
from roost.machine.ports import answers
from roost.runtime.managers.namespaces import MANAGER_NAMES, get_job
from roost.runtime.nodes import discover
from roost.runtime.nodes.info import RayNode, name_node
from roost.runtime.runs.folder import RUNS_VARIABLE, runs_folder
from roost.runtime.status import visit

_CLOCK_ROUNDS = 4
_SILENT_PINGS = 3
_NODE_PART = 0.8
"""The part of the time for a node that its own facts may take: they still have to come back."""

_Jobs = tuple[JobFacts, ...] | Unknown


def collect_cluster(
    address: str | None,
    run_dir: str | None,
    seconds: float,
    waiting: Callable[[str], None],
    lost: Callable[[str], None],
) -> ClusterFacts:
    """Join a cluster, collect the facts of every node, and leave nothing behind; ClusterError if there is none to join.

    `waiting` is called with the nodes that have not answered yet. `lost` is called from another thread when the head is
    gone: Ray's own calls would hang for a minute and then end the process.
    """
    with visit(address, seconds) as (at, deadline):
        ended = threading.Event()

        def watch() -> None:
            """Call `lost` when the head does not answer several times in a row."""
            silent = 0
            while silent < _SILENT_PINGS:
                if ended.wait(PING_SECONDS):
                    return
                silent = 0 if answers(at) else silent + 1
            lost(at)

        threading.Thread(target=watch, daemon=True).start()
        try:
            return _collect(at, run_dir, deadline, waiting)
        finally:
            ended.set()


def _collect(address: str, run_dir: str | None, deadline: Deadline, waiting: Callable[[str], None]) -> ClusterFacts:
    nodes = discover.wait_for_nodes(1, deadline)
    before: _Jobs = gather({"jobs": _find_jobs}, ASK_SECONDS * 2)["jobs"]
    jobs = () if isinstance(before, Unknown) else before
    drivers = [(job.info.pid, job.info.since) for job in jobs if job.info is not None]
    names = {node.ray_id: str(node) for node in nodes}
    left = max(1.0, deadline.left)

    def say(out: Sequence[str]) -> None:
        waiting(f"waiting for {len(out)} of {len(nodes)} nodes: {', '.join(names[item] for item in out[:4])}")

    with _marker(run_dir) as marker:
        path = None if isinstance(marker, Unknown) else str(marker)
        asks = {node.ray_id: partial(_ask, node, path, drivers, deadline) for node in nodes}
        # At the same time, since either may take all of it; a little longer than each node has, so that an answer at
        # the deadline is its own.
        collecting: dict[str, Callable[[], Any]] = {
            "nodes": partial(gather, asks, left + 2, say),
            "driver": partial(collect_machine, driver_folders(run_dir), os.environ, max(left, ASK_SECONDS)),
        }
        found = gather(collecting, max(left, ASK_SECONDS) + 4)
    answered = {ray_id: item for ray_id, item in found["nodes"].items() if not isinstance(item, Unknown)}
    after: _Jobs = gather({"jobs": _find_jobs}, ASK_SECONDS * 2)["jobs"]
    later = () if isinstance(after, Unknown) else after
    both = before if isinstance(before, Unknown) else after
    if not isinstance(both, Unknown):
        ids = {(job.namespace, job.info and job.info.id) for job in jobs}
        both = tuple(job for job in later if (job.namespace, job.info and job.info.id) in ids)
    return ClusterFacts(
        address=address,
        driver=found["driver"],
        nodes=tuple(node for node, _ in answered.values()),
        clocks=tuple((names[ray_id], clock) for ray_id, (_, clock) in answered.items()),
        silent=tuple((names[ray_id], why) for ray_id, why in found["nodes"].items() if ray_id not in answered),
        gone=_gone(),
        jobs=both,
        # Of a job that lost its manager only the namespace is known: its processes are not left over.
        marks=tuple(
            f"{address}|{job.namespace}:" if job.info is None else f"{job.info.id}/" for job in (*jobs, *later)
        ),
        run_folder=marker if isinstance(marker, Unknown) else str(marker.parent),
    )


def _ask(
    node: RayNode, marker: str | None, drivers: Sequence[tuple[int, float]], deadline: Deadline
) -> tuple[NodeFacts, Clock | Unknown]:
    """Return the facts of one node, and its clock."""
    names = {node.ray_id: str(node)}
    seconds = max(1.0, deadline.left * _NODE_PART)
    asked = (str(node), node.address, dict(node.resources), marker, list(drivers), seconds)
    facts = discover.on_nodes(names, collect_node, *asked, deadline=deadline)[node.ray_id]
    # The quickest of some round trips: the clock was read during it, so half of it is the error.
    best: Clock | Unknown = Unknown(why="it was not asked")
    for _ in range(_CLOCK_ROUNDS):
        sent = time.time()
        began = time.monotonic()
        try:
            there = discover.on_nodes(names, tell_time, deadline=deadline)[node.ray_id]
        except CheckFailed as error:
            return facts, best if isinstance(best, Clock) else Unknown(why=error.problems[0].message)
        half = (time.monotonic() - began) / 2
        if isinstance(best, Unknown) or half < best.error:
            best = Clock(ahead=there - (sent + half), error=half)
    return facts, best


@contextlib.contextmanager
def _marker(run_dir: str | None) -> Iterator[Path | Unknown]:
    """Put a file into the run folder, which a node sees only if it shares that folder."""
    made = gather({"marker": partial(_put_marker, run_dir)}, ASK_SECONDS)["marker"]
    try:
        yield made
    finally:
        if not isinstance(made, Unknown):
            gather({"marker": partial(made.unlink, missing_ok=True)}, ASK_SECONDS)


def _put_marker(run_dir: str | None) -> Path:
    folder = Path(run_dir).absolute() if run_dir else runs_folder()
    if run_dir is None and not os.environ.get(RUNS_VARIABLE):
        folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".doctor-{secrets.token_hex(8)}"
    path.touch()
    return path


def _find_jobs() -> tuple[JobFacts, ...]:
    """Return the job of each namespace that has a manager of Roost."""
    alive = {(entry["namespace"], entry["name"]) for entry in list_named_actors(all_namespaces=True)}
    return tuple(
        JobFacts(
            namespace=namespace,
            info=get_job(namespace, ASK_SECONDS),
            missing=tuple(name for name in MANAGER_NAMES if (namespace, name) not in alive),
        )
        for namespace in sorted({namespace for namespace, name in alive if name in MANAGER_NAMES})
    )


def _gone() -> tuple[str, ...]:
    return tuple(
        name_node(None, entry["NodeManagerAddress"], entry.get("NodeName", ""))
        for entry in ray.nodes()  # type: ignore[no-untyped-call]
        if not entry["Alive"]
    )
