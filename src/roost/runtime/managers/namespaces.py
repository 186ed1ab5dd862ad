"""The jobs on a Ray cluster: each has a namespace, and its managers in it."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import replace

from roost.config.node_groups import NodeGroup
from roost.errors import ClusterError, NameTaken, RoostError
from roost.runtime.connect.calls import list_actors
from roost.runtime.limits import CALL_SECONDS
from roost.runtime.managers.collective_manager import CollectiveManager
from roost.runtime.managers.job_info import JobInfo
from roost.runtime.managers.node_manager import NodeManager
from roost.runtime.managers.worker_manager import WorkerManager
from roost.runtime.nodes.info import NodeInfo
from roost.text import join_words, printable

MANAGER_NAMES = (NodeManager.NAME, WorkerManager.NAME, CollectiveManager.NAME)

Managers = tuple[NodeManager, WorkerManager, CollectiveManager]


def start_managers(
    job: JobInfo, nodes: tuple[NodeInfo, ...], groups: tuple[NodeGroup, ...], ports: tuple[int, int] | None
) -> Managers:
    """Start the three managers on node 0; NameTaken if another driver was first in this namespace."""
    namespace, node = job.namespace, nodes[0].ray_id
    try:
        # The first name decides who gets the namespace.
        node_manager = NodeManager.start(namespace, node, nodes, groups, job, ports)
    except ValueError:
        hint = f"attach to it with Cluster(namespace={namespace!r}), or choose another name"
        raise NameTaken(f"another job has namespace {namespace!r}", hint=hint) from None
    return node_manager, WorkerManager.start(namespace, node), CollectiveManager.start(namespace, node, namespace)


def find_managers(namespace: str) -> Managers:
    """Return proxies to the managers of a job."""
    return NodeManager.get_proxy(namespace), WorkerManager.get_proxy(namespace), CollectiveManager.get_proxy(namespace)


def choose_namespace(wanted: str, used: Collection[str]) -> str:
    """Return the wanted namespace, or the first free one after it.

    >>> choose_namespace("roost", {"roost", "roost-2"})
    'roost-3'
    """
    names = itertools.chain([wanted], (f"{wanted}-{number}" for number in itertools.count(2)))
    return next(name for name in names if name not in used)


def used_namespaces() -> set[str]:
    """Return the namespaces that have named actors."""
    return {entry["namespace"] for entry in list_actors(all_namespaces=True)}


def job_namespaces() -> list[str]:
    """Return the namespaces that have a node manager, in order."""
    named = list_actors(all_namespaces=True)
    return sorted(entry["namespace"] for entry in named if entry["name"] == NodeManager.NAME)


def find_job(namespace: str | None) -> str:
    """Return the namespace of the job to attach to; ClusterError if there is none, or more than one."""
    found = job_namespaces()
    if namespace is not None:
        if namespace not in found:
            there = f"{'is' if len(found) == 1 else 'are'} {join_words([repr(item) for item in found]) or 'none'}"
            raise ClusterError(f"there is no job in namespace {namespace!r}", hint=f"there {there}")
        return namespace
    if not found:
        raise ClusterError(
            "there is no job to attach to on this Ray cluster",
            hint="the job's own driver gives num_nodes or cluster_cfg; after that, others attach with Cluster()",
        )
    if len(found) > 1:
        raise ClusterError(
            f"there are {len(found)} jobs on this Ray cluster: {join_words([describe_job(item) for item in found])}",
            hint=f"say which: Cluster(namespace={found[0]!r})",
        )
    return found[0]


def get_job(namespace: str, timeout: float = CALL_SECONDS, manager: NodeManager | None = None) -> JobInfo | None:
    """Return who runs the job in a namespace, or None if its manager does not answer."""
    try:
        job = (manager or NodeManager.get_proxy(namespace)).within(timeout).get_job()
    except RoostError:
        return None
    # Of another user, perhaps.
    return replace(job, host=printable(job.host), user=printable(job.user), command=printable(job.command))


def describe_job(namespace: str, manager: NodeManager | None = None, timeout: float = CALL_SECONDS) -> str:
    """`'roost' (pid 4711 on head, by ana)`."""
    job = get_job(namespace, timeout, manager)
    return repr(namespace) if job is None else f"{namespace!r} (pid {job.pid} on {job.host}, by {job.user})"
