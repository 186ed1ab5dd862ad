"""A look at a Ray cluster for `roost doctor`: a short task on each node, all at once, and what does not answer."""

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

from roost.doctor.facts import Clock, ClusterFacts, JobFacts, NodeFacts, Silent, Unseen
from roost.doctor.machine_look import at_once, driver_folders, look_at_machine
from roost.doctor.node_look import look_at_node, tell_time
from roost.errors import CheckFailed
from roost.machine.folders import state_folder
from roost.runtime.connect import connection
from roost.runtime.managers.namespaces import get_job
from roost.runtime.managers.proxies import MANAGER_NAMES, JobInfo
from roost.runtime.nodes import discover
from roost.runtime.nodes.discover import RayNode
from roost.runtime.nodes.info import describe_node
from roost.runtime.runs.folder import runs_folder

_ASK_SECONDS = 5.0
_CLOCK_ROUNDS = 4
_KNOCK_EVERY_SECONDS = 1.0
_SILENT_KNOCKS = 3
_LOOK_PART = 0.8
"""Of the time for a node, what its own looks may take: what it has by then still has to come back."""


def look_at_cluster(
    address: str | None,
    run_dir: str | None,
    seconds: float,
    waiting: Callable[[str], None],
    lost: Callable[[str], None],
) -> ClusterFacts:
    """Join, look around on every node, and leave nothing behind; ClusterError where there is nothing to join.

    `waiting` is told what is waited for, and `lost`, from another thread, that the head is gone: then Ray's own calls
    hang for a minute and end the process.
    """
    deadline = time.monotonic() + seconds
    connection.check_can_connect()
    made = connection.connect(address, f"roost-doctor-{os.getpid()}", may_start=False)
    ended = threading.Event()
    threading.Thread(target=_watch, args=(made.address, ended, lost), daemon=True).start()
    try:
        return _look(made.address, run_dir, deadline, waiting)
    finally:
        ended.set()
        connection.disconnect(made)


def _watch(address: str, ended: threading.Event, lost: Callable[[str], None]) -> None:
    """Tell when the head does not answer for several knocks in a row."""
    silent = 0
    while silent < _SILENT_KNOCKS:
        if ended.wait(_KNOCK_EVERY_SECONDS):
            return
        silent = 0 if connection.answers(address) else silent + 1
    lost(address)


def _look(address: str, run_dir: str | None, deadline: float, waiting: Callable[[str], None]) -> ClusterFacts:
    nodes = discover.wait_for_nodes(1, deadline)
    before = at_once({"jobs": _jobs}, _ASK_SECONDS * 2)["jobs"]
    drivers = [] if isinstance(before, Unseen) else [(job.pid, job.since) for _, job, _ in before if job is not None]
    names = {node.ray_id: str(node) for node in nodes}
    left = max(1.0, deadline - time.monotonic())

    def say(out: Sequence[str]) -> None:
        waiting(f"waiting for {len(out)} of {len(nodes)} nodes: {', '.join(names[item] for item in out[:4])}")

    with _marker(run_dir) as marker:
        path = None if isinstance(marker, Unseen) else str(marker)
        asks = {node.ray_id: partial(_ask, node, path, drivers, deadline) for node in nodes}
        # Both at the same time: either may take all of it.
        looks: dict[str, Callable[[], Any]] = {
            # A little longer than each node has, so that what comes at the deadline is its own word.
            "nodes": partial(at_once, asks, left + 2, say),
            "driver": partial(look_at_machine, driver_folders(run_dir), os.environ, max(left, _ASK_SECONDS)),
        }
        found = at_once(looks, max(left, _ASK_SECONDS) + 4)
    answers, driver = found["nodes"], found["driver"]
    after = at_once({"jobs": _jobs}, _ASK_SECONDS * 2)["jobs"]
    return ClusterFacts(
        address=address,
        driver=driver,
        nodes=tuple(item for item in answers.values() if isinstance(item, NodeFacts)),
        silent=tuple(
            Silent(name=names[ray_id], why=item.why, do="look at the load on the node, and at its raylet.out")
            if isinstance(item, Unseen)
            else item
            for ray_id, item in answers.items()
            if not isinstance(item, NodeFacts)
        ),
        gone=_gone(),
        jobs=_jobs_in_both(before, after),
        marks=(*_marks(address, before), *_marks(address, after)),
        run_folder=marker if isinstance(marker, Unseen) else str(marker.parent),
    )


def _ask(node: RayNode, marker: str | None, drivers: Sequence[tuple[int, float]], deadline: float) -> object:
    """One node: what a task there finds, and what the clock there says."""
    names = {node.ray_id: str(node)}
    seconds = max(1.0, (deadline - time.monotonic()) * _LOOK_PART)
    try:
        look = discover.on_nodes(
            names, look_at_node, str(node), dict(node.resources), marker, list(drivers), seconds, deadline=deadline
        )[node.ray_id]
    except CheckFailed as error:
        found = error.problems[0]
        return Silent(name=str(node), why=found.message, do=found.hint or "look at the node's log, raylet.out")
    return NodeFacts(
        name=str(node),
        address=node.address,
        resources=dict(node.resources),
        look=look,
        clock=_clock(names, node.ray_id, deadline),
    )


def _clock(names: dict[str, str], ray_id: str, deadline: float) -> Clock | Unseen:
    """The quickest of some round trips: the clock was read at some moment of it, so its half is how sure that is."""
    best: Clock | None = None
    for _ in range(_CLOCK_ROUNDS):
        sent = time.time()
        began = time.monotonic()
        try:
            there = discover.on_nodes(names, tell_time, deadline=deadline)[ray_id]
        except CheckFailed as error:
            return best or Unseen(why=error.problems[0].message)
        half = (time.monotonic() - began) / 2
        if best is None or half < best.error:
            best = Clock(ahead=there - (sent + half), error=half)
    return best or Unseen(why="it was not asked")


@contextlib.contextmanager
def _marker(run_dir: str | None) -> Iterator[Path | Unseen]:
    """A file in the run folder that only who sees that very folder sees."""
    made = at_once({"marker": partial(_put_marker, run_dir)}, _ASK_SECONDS)["marker"]
    try:
        yield made
    finally:
        if not isinstance(made, Unseen):
            at_once({"marker": partial(made.unlink, missing_ok=True)}, _ASK_SECONDS)


def _put_marker(run_dir: str | None) -> Path:
    folder = Path(run_dir).absolute() if run_dir else runs_folder()
    if run_dir is None and folder == state_folder() / "runs":
        folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".doctor-{secrets.token_hex(8)}"
    path.write_text("", encoding="utf-8")
    return path


_Jobs = tuple[tuple[str, JobInfo | None, tuple[str, ...]], ...]


def _jobs() -> _Jobs:
    """Each namespace with a manager of ours: who runs the job, and which managers are missing."""
    managers: dict[str, set[str]] = {}
    for entry in list_named_actors(all_namespaces=True):
        if entry["name"] in MANAGER_NAMES:
            managers.setdefault(entry["namespace"], set()).add(entry["name"])
    return tuple(
        (namespace, get_job(namespace, _ASK_SECONDS), tuple(name for name in MANAGER_NAMES if name not in alive))
        for namespace, alive in sorted(managers.items())
    )


def _jobs_in_both(before: _Jobs | Unseen, after: _Jobs | Unseen) -> tuple[JobFacts, ...] | Unseen:
    if isinstance(before, Unseen):
        return before
    if isinstance(after, Unseen):
        return after
    ids = {(namespace, job.id if job else "") for namespace, job, _ in before}
    return tuple(
        JobFacts(namespace=name, host=job.host if job else "", pid=job.pid if job else None, missing=missing)
        for name, job, missing in after
        if (name, job.id if job else "") in ids
    )


def _marks(address: str, jobs: _Jobs | Unseen) -> tuple[str, ...]:
    """Of a job that lost its manager only the namespace is known: what belongs to it is not left over."""
    if isinstance(jobs, Unseen):
        return ()
    return tuple(f"{address}|{namespace}:" if job is None else f"{job.id}/" for namespace, job, _ in jobs)


def _gone() -> tuple[str, ...]:
    return tuple(
        describe_node(entry["NodeManagerAddress"], entry.get("NodeName", ""))
        for entry in ray.nodes()  # type: ignore[no-untyped-call]
        if not entry["Alive"]
    )
