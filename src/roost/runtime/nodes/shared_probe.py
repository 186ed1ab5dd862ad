"""Nodes of this machine that were started with the same settings share one probe: what one reports holds for all.

A machine of a cluster has one node, and a local cluster has all its nodes on one machine: a Python process on each of
them would take half a second of CPU time to report the same.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor

import psutil

from roost.errors import ClusterError
from roost.machine.processes import list_processes
from roost.runtime.connect.find_head import takes_token
from roost.runtime.limits import RAYLET_ANSWER_SECONDS
from roost.runtime.nodes.info import RayNode

_NAMESPACES = ("mnt", "net", "pid", "user")
_AT_ONCE = 16


def group_for_probe(nodes: Iterable[RayNode]) -> list[list[RayNode]]:
    """Group the nodes that share a probe; a node whose raylet is not seen here, or does not answer, is alone."""
    raylets = {item.flag("node_id"): item for item in list_processes() if item.name == "raylet"}
    groups: dict[Hashable, list[RayNode]] = {}
    for node in nodes:
        key: Hashable = node.ray_id
        raylet = raylets.get(node.ray_id)
        if raylet is not None:
            # The raylet may belong to another user, or have just ended.
            with contextlib.suppress(psutil.Error, OSError):
                inodes = [os.stat(f"/proc/{raylet.pid}/ns/{name}").st_ino for name in _NAMESPACES]
                python = raylet.flag("python_worker_command").split()[:1]
                key = (*inodes, *python, frozenset(psutil.Process(raylet.pid).environ().items()))
        groups.setdefault(key, []).append(node)
    found = list(groups.values())
    several = [node for group in found if len(group) > 1 for node in group]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        awake = {node.ray_id for node, answers in zip(several, pool.map(_answers, several), strict=True) if answers}
    out = []
    for group in found:
        sharing = [node for node in group if node.ray_id in awake]
        out += [sharing] if sharing else []
        out += [[node] for node in group if node.ray_id not in awake]
    return out


def _answers(node: RayNode) -> bool:
    """Whether the raylet of a node answers; which answer it is does not matter."""
    try:
        takes_token(f"{node.address}:{node.port}", "", RAYLET_ANSWER_SECONDS)
    except ClusterError:
        return False
    return True
