"""Ray's calls as a connected process makes them: in time, never in a fork, never after the head was given up."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roost.deadline import Deadline
from roost.errors import ClusterError
from roost.runtime.connect.head import Head, check_not_lost, noticing_loss, unless_lost, within
from roost.runtime.limits import ASK_SECONDS, SOON_SECONDS

USER_KEY = "roost_user"
"""Under this key Ray knows the account that runs a driver of Roost, also after its end."""

_is_fork = False


def is_fork() -> bool:
    """Whether this process is a fork of one that was connected to Ray: Ray's calls would wait for ever here."""
    return _is_fork


def check_not_fork() -> None:
    """Raise ClusterError in a fork."""
    if _is_fork:
        raise ClusterError(
            "this process is a fork of one that is connected to Ray, and cannot use its connection",
            hint="use the Cluster and its groups where they were made; "
            'start other processes before that, or with multiprocessing.get_context("spawn")',
        )


def _note_fork() -> None:
    global _is_fork
    _is_fork = _is_fork or ray.is_initialized()


os.register_at_fork(after_in_child=_note_fork)


def is_worker() -> bool:
    """Whether this process runs a Ray task or actor."""
    # There is no other way that logs no warning in a driver.
    return ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE


def on_node(ray_id: str) -> NodeAffinitySchedulingStrategy:
    """Schedule on this node and nowhere else: for a node that is gone, the call fails at once."""
    return NodeAffinitySchedulingStrategy(node_id=ray_id, soft=False)


def end_actors(actors: Mapping[str, ActorHandle[Any]], deadline: Deadline) -> set[str]:
    """End actors of this namespace, by name; return the names that are still there at the deadline."""

    def kill() -> None:
        for actor in actors.values():
            with contextlib.suppress(Exception):
                ray.kill(actor)

    with contextlib.suppress(ClusterError):
        within(deadline.left, kill, "end its actors")
    left = set(actors)
    # If Ray is gone, there is nothing to wait for.
    with contextlib.suppress(Exception):
        while left and (seconds := deadline.left):
            left.intersection_update(within(seconds, list_named_actors, "list its actors"))
            time.sleep(0.02 if left else 0)
    return left


def list_actors(*, all_namespaces: bool = False) -> Any:
    """Return what Ray's `list_named_actors` does, in time."""
    return within(ASK_SECONDS, lambda: list_named_actors(all_namespaces), "list its actors")


def get(calls: Any, timeout: float | None = None) -> Any:
    """Do what `ray.get` does, and raise ClusterError when the head is given up: Ray's own wait may not return then."""
    if Head.current is None:
        return ray.get(calls, timeout=timeout)
    check_not_lost()
    deadline = Deadline.after(timeout)
    try:
        with noticing_loss():
            return ray.get(calls, timeout=SOON_SECONDS if timeout is None else min(timeout, SOON_SECONDS))
    except GetTimeoutError:
        if deadline.is_over:
            raise
    return unless_lost(lambda: ray.get(calls, timeout=deadline.timeout))
