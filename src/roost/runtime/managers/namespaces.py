"""The jobs that are on a Ray cluster: each has a namespace, and its managers in it."""

from __future__ import annotations

from collections.abc import Collection

from ray.util import list_named_actors

from roost.errors import ClusterError, RoostError
from roost.runtime.managers.proxies import CALL_SECONDS, JobInfo, NodeManager
from roost.text import join_words


def choose_namespace(wanted: str, used: Collection[str]) -> str:
    """The wanted namespace, or the first free one after it.

    >>> choose_namespace("roost", {"roost", "roost-2"})
    'roost-3'
    """
    if wanted not in used:
        return wanted
    number = 2
    while f"{wanted}-{number}" in used:
        number += 1
    return f"{wanted}-{number}"


def job_namespaces() -> list[str]:
    """The namespaces that have a manager of ours, in order."""
    named = list_named_actors(all_namespaces=True)
    return sorted(entry["namespace"] for entry in named if entry["name"] == NodeManager.NAME)


def find_job(namespace: str | None) -> str:
    """The namespace of the job to attach to; ClusterError where it is not there or cannot be told."""
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
    """Who runs the job in a namespace, or None where its manager does not answer."""
    try:
        return (manager or NodeManager.get_proxy(namespace)).get_job(timeout)
    except RoostError:
        return None


def describe_job(namespace: str, manager: NodeManager | None = None, timeout: float = CALL_SECONDS) -> str:
    """`'roost' (pid 4711 on head, by ana)`."""
    job = get_job(namespace, timeout, manager)
    return repr(namespace) if job is None else f"{namespace!r} (pid {job.pid} on {job.host}, by {job.user})"
